"""The whole parameters of a fully sharded module, for people and for files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ._fully_shard import runtime_of
from ._reduction import Slot


@contextmanager
def unsharded(module: nn.Module, *, writeback: bool = False) -> Iterator[nn.Module]:
    """The module with every parameter whole. What is taken from it, such as a state dict, can be read inside only.

    Args:
      module: a fully sharded module.
      writeback: whether what was changed in place is kept: each rank keeps its own part of what it has.
    """
    (runtime := runtime_of(module)).notice_values()
    units = runtime.units
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
    (runtime := runtime_of(module)).notice_values()
    whole = {slot: x for unit in runtime.units for slot, x in unit.gather_masters()}
    return state_of(module, whole.__getitem__)


def state_of(module: nn.Module, made: Callable[[Slot], Any]) -> dict[str, Any]:
    """The state dict of a fully sharded module, its parameters as what is made of them."""
    slots, state = runtime_of(module).slots, dict(module.state_dict(keep_vars=True))
    for name, x in state.items():
        if slot := slots.get(id(x)):
            state[name] = made(slot)
        elif isinstance(x, torch.Tensor):  # a module's extra state need not be one
            state[name] = x.detach()
    return state
