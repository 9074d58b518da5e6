"""The tensors of a tree as the user wrote the model, although they lie packed."""

from functools import lru_cache

from ..fsdp import Leaf, Leaves
from ._tensor import Rule as Rule
from ._tensor import Shape as Shape
from ._tensor import Tensor as Tensor
from ._tensor import chosen as chosen
from ._tensor import decide as decide


@lru_cache(maxsize=64)
def tensors_of(leaves: Leaves) -> tuple[Tensor, ...]:
    """All tensors, in the order of the leaves."""
    return tuple(tensor for at, leaf in enumerate(leaves) for tensor in _of_leaf(at, leaf))


def _of_leaf(at: int, leaf: Leaf) -> list[Tensor]:
    if leaf.of is None:
        return [Tensor(leaf.path, leaf.shape, leaf.dtype, at)]
    stack = leaf.of.unit.bucket.stack
    lead = () if stack is None else (stack,)
    return [
        Tensor(p.tensor.name, (*lead, *p.tensor.shape), leaf.dtype, at, p, stack) for p in leaf.of.slab.placements
    ]
