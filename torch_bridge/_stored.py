"""What modules keep as attributes between their forward and a backward: an auxiliary loss, for one."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

_FEW = 64  # of longer containers, a vocabulary for one, the tensors are not looked for
_OF_MODULES = frozenset(vars(nn.Module()))


class Stored:
    """The tensors that the modules of one unit keep: attributes, and what is in small containers that are.

    Args:
      module: of the unit.
      others: modules of other units.
    """

    def __init__(self, module: nn.Module, others: Collection[nn.Module]):
        self._places = [place for part in _own(module, others) for place in (vars(part), part._buffers)]

    def with_graph(self) -> Iterator[torch.Tensor]:
        """Those that a backward may start from."""
        for place in self._places:
            for name, value in place.items():
                if name not in _OF_MODULES and not isinstance(value, _PLAIN):
                    yield from (x for x in _in(value) if x.grad_fn is not None)


_PLAIN = bool | int | float | str | type(None)


def _own(module: nn.Module, others: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from _own(child, others)


def _in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict) and len(value) <= _FEW:
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, torch.Tensor):
                yield item
