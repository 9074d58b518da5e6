"""A tensor as the planner sees it: name, shape, dtype and block."""

import math
from dataclasses import dataclass

from ._block import Block, elements
from ._dtypes import itemsize
from ._errors import STRICT

MAX_DIMS = 64
MAX_NUMEL = 2**53  # beyond it an offset is no longer exact in JSON readers that use doubles

_ANYWHERE = elements(1)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model, unsharded.

    Attributes:
      name: its path, with slashes: `blocks/0/mlp/up/kernel`.
      shape: the global shape.
      dtype: the element type by its numpy/ml_dtypes name.
      block: what must stay on one device.
      label: tensors with different labels never share a slab. It keeps apart what is treated differently as a
        whole, such as variables of different types.
    """

    __pydantic_config__ = STRICT

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    block: Block = _ANYWHERE
    label: str = ""

    def __post_init__(self):
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} must hold integers of at least 0")
        if len(self.shape) > MAX_DIMS or any(size > MAX_NUMEL for size in self.shape):
            raise ValueError(f"{self.name:.80}: more than {MAX_DIMS} dims, or one of more than 2**53")
        if self.block.dim and self.block.dim >= len(self.shape) > 1:
            raise ValueError(f"{self.name}: {self.block!r} of a tensor with {len(self.shape)} dims")
        if math.prod(self.shape) > MAX_NUMEL:
            raise ValueError(f"{self.name}: {math.prod(self.shape)} elements are more than 2**53")
        itemsize(self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    @property
    def granularity(self) -> int:
        """Elements between two legal cuts, counted from the tensor's start."""
        return self.block.granularity(self.shape)

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // self.granularity)
