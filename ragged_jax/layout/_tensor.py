"""A tensor as the planner sees it: name, shape, dtype and block."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from ._block import Block, elements
from ._dtypes import itemsize
from ._errors import STRICT

MAX_DIMS = 64
MAX_NUMEL = 2**53  # beyond it an offset is no longer exact in JSON readers that use doubles

_ANYWHERE = elements(1)
_dim = attrgetter("dim")


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """A dim of a tensor that another mesh axis cuts into equal slices: tensor or expert parallelism.

    Attributes:
      dim: the tensor dim.
      size: how many slices, at least 2.
      axis: the mesh axis; its rank `i` holds slice `i`.
    """

    __pydantic_config__ = STRICT

    dim: int
    size: int
    axis: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model, unsharded.

    A tensor that other mesh axes split is described by one of its slices, all of which are alike: each is sharded
    as a tensor of its own, and so a block never reaches over two of them.

    Attributes:
      name: its path, with slashes: `blocks/0/mlp/up/kernel`.
      shape: the global shape, or that of a slice where there are `splits`; see `full_shape`.
      dtype: the element type by its numpy/ml_dtypes name.
      block: what must stay on one device.
      label: tensors with different labels never share a slab. It keeps apart what is treated differently as a
        whole, such as variables of different types.
      splits: how other mesh axes split it, by rising dim; where several split one dim, the outermost first.

    Example:
      >>> kernel = TensorSpec("up/kernel", (64, 128), splits=(Split(1, 2, "tp"),))
      >>> kernel.full_shape
      (64, 256)
    """

    __pydantic_config__ = STRICT

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    block: Block = _ANYWHERE
    label: str = ""
    splits: tuple[Split, ...] = ()

    def __post_init__(self):
        if any(type(size) is not int or size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} must hold integers of at least 0")
        if len(self.shape) > MAX_DIMS or any(size > MAX_NUMEL for size in self.shape):
            raise ValueError(f"{self.name:.80}: more than {MAX_DIMS} dims, or one of more than 2**53")
        if self.block.dim and self.block.dim >= len(self.shape) > 1:
            raise ValueError(f"{self.name}: {self.block!r} of a tensor with {len(self.shape)} dims")
        if any(not 0 <= s.dim < len(self.shape) or s.size < 2 or not s.axis for s in self.splits):
            raise ValueError(f"{self.name}: {self.splits} must name a dim of {self.shape}, a size from 2 on, an axis")
        if len({s.axis for s in self.splits}) < len(self.splits) or [*self.splits] != sorted(self.splits, key=_dim):
            raise ValueError(f"{self.name}: {self.splits} must name each axis once, by rising dim")
        if math.prod(self.full_shape) > MAX_NUMEL:
            raise ValueError(f"{self.name}: {math.prod(self.full_shape)} elements are more than 2**53")
        itemsize(self.dtype)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The global shape, all slices together."""
        shape = list(self.shape)
        for split in self.splits:
            shape[split.dim] *= split.size
        return tuple(shape)

    @property
    def split_axes(self) -> tuple[tuple[str, int], ...]:
        """`(axis, size)` of the mesh axes that split it, by name. Tensors that share a slab have the same ones."""
        return tuple(sorted((split.axis, split.size) for split in self.splits))

    def slice_start(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """Where a slice begins in the whole tensor, one index for each dim, by its place on every splitting axis.

        Example:
          >>> TensorSpec("up/kernel", (64, 128), splits=(Split(1, 2, "tp"),)).slice_start({"tp": 1})
          (0, 128)
        """
        at = [0] * len(self.shape)
        for split in self.splits:  # of one dim, the outermost first
            at[split.dim] = at[split.dim] * split.size + ranks[split.axis]
        return tuple(i * size for i, size in zip(at, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Elements; as everything that follows, of one slice."""
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
