"""The whole parameters of a fully sharded module, for people and for files."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ._fully_shard import runtime_of


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = False) -> Iterator[nn.Module]:
    """The module with every parameter whole.

    Args:
      module: a fully sharded module.
      writeback: whether what was changed in place is kept: each rank keeps its own part of what it has.
    """
    units = runtime_of(module).units
    held = [unit.is_held for unit in units]
    try:
        for unit in units:
            unit.reshard()  # what is whole since a pass that was not finished may be out of date
            unit.start_unshard()
        for unit in units:
            unit.unshard()
            unit.is_held = True
        yield module
        if writeback:
            for unit in units:
                unit.write_back()
    finally:
        for unit, before in zip(units, held, strict=True):
            unit.is_held = before
            unit.reshard()


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded state dict, on every rank, unit by unit. Parameters have their master dtype."""
    runtime = runtime_of(module)
    whole = {id(slot.shard): x for unit in runtime.units for slot, x in unit.gather_masters()}
    state = module.state_dict(keep_vars=True)
    return {name: whole[id(x)] if id(x) in whole else x.detach() for name, x in state.items()}
