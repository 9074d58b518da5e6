"""A tensor as the user wrote the model, and rules that speak of it. No framework."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ..layout import Placement

T = TypeVar("T")
Shape = tuple[int, ...]
Rule = T | Mapping[str, T] | Callable[[str, Shape], T]
"""One value for all; a mapping from patterns of the path (the first that matches wins); or a function of both."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a tree of parameters.

    Attributes:
      name: its path, with slashes: in a slab that of the unsharded model, else that of the leaf.
      shape: as the user wrote it, with the leading dim of stacked layers.
      dtype: its name.
      leaf: the index of the leaf that holds it.
      placement: where it lies in a slab; None for an ordinary array.
      stack: how many layers lie on the leading dim; None where that is not known.
    """

    name: str
    shape: Shape
    dtype: str
    leaf: int
    placement: Placement | None = None
    stack: int | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def layer_shape(self) -> Shape:
        """The shape of one layer."""
        return self.shape if self.stack is None else self.shape[1:]


def decide(rule: Any, tensor: Tensor, default: Any = None) -> Any:
    """What a rule says of a tensor."""
    if isinstance(rule, Mapping):
        return next((value for pattern, value in rule.items() if fnmatchcase(tensor.name, pattern)), default)
    return rule(tensor.name, tensor.shape) if callable(rule) else rule


def chosen(rule: Any, tensor: Tensor) -> bool:
    """What a rule of yes and no says: also patterns, of which one must match."""
    if isinstance(rule, str):
        return fnmatchcase(tensor.name, rule)
    if isinstance(rule, Sequence):
        return any(fnmatchcase(tensor.name, pattern) for pattern in rule)
    return bool(decide(rule, tensor, default=False))
