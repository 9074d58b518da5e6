"""What modules keep as attributes between their forward and a backward: an auxiliary loss, for one."""

from collections.abc import Collection, Iterator

import torch
from torch import nn

from ._trees import tensors_in

_FEW = 64  # of longer containers, a vocabulary for one, the tensors are not looked for
_OF_MODULES = frozenset(vars(nn.Module()))


class Stored:
    """The tensors that the modules of one unit keep: attributes, and what is in small containers among them.

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
                if name not in _OF_MODULES:
                    yield from (x for x in tensors_in(value, _FEW) if x.grad_fn is not None)


def _own(module: nn.Module, others: Collection[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from _own(child, others)
