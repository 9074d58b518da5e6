"""`RaggedShard` and `StridedRaggedShard`: the placement of one tensor, in the form that other systems exchange."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class RaggedShard:
    """One tensor cut into contiguous pieces of unequal length along its flattened leading dims.

    The first dims are flattened; device `k` holds `local_units[k]` of `sum(local_units)` equal units of the
    tensor. Units are relative, so two spellings may mean the same split; here they are always canonical:
    divided by their greatest common divisor, which makes equality mean what it says.

    Reference: RaggedShard of veScale-FSDP, arXiv:2602.22437.

    Attributes:
      dims: the flattened prefix `(0, 1, ..., i)`; every cut is a multiple of what lies behind it.
      local_units: a count for each device; zeros are allowed.

    Example:
      >>> RaggedShard.from_numels((6, 4), (8, 16, 0))
      RaggedShard(dims=(0,), local_units=(1, 2, 0))
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self):
        if self.dims != tuple(range(len(self.dims))):
            raise ValueError(f"dims must be a prefix (0, 1, ...), got {self.dims}")
        if not self.local_units or any(type(u) is not int or u < 0 for u in self.local_units):
            raise ValueError(f"local_units must be integers of at least 0, got {self.local_units}")
        divisor = math.gcd(*self.local_units)
        if divisor == 0:
            raise ValueError("local_units are all zero; for a tensor without elements give the first device 1")
        if divisor > 1:
            object.__setattr__(self, "local_units", tuple(u // divisor for u in self.local_units))

    @classmethod
    def from_numels(cls, shape: tuple[int, ...], numels: Sequence[int]) -> "RaggedShard":
        """The placement under which device `k` holds the next `numels[k]` elements.

        Raises:
          ValueError: the counts do not add up to the tensor.
        """
        if sum(numels) != math.prod(shape):
            raise ValueError(f"pieces of {sum(numels)} elements do not make a tensor of shape {shape}")
        if sum(numels) == 0:
            return cls((), (1,) + (0,) * (len(numels) - 1))
        step = math.gcd(*accumulate(numels))
        dims = next(i for i in range(len(shape) + 1) if step % math.prod(shape[i:]) == 0)
        return cls(tuple(range(dims)), tuple(numels))

    def local_numels(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Elements on each device for a tensor of this shape.

        Raises:
          ValueError: the units do not divide the tensor.
        """
        unit, rest = divmod(math.prod(shape), sum(self.local_units))
        if rest:
            raise ValueError(f"{self} does not divide a tensor of shape {shape}")
        return tuple(unit * u for u in self.local_units)


@dataclass(frozen=True, slots=True)
class StridedRaggedShard:
    """A tensor that other axes cut into equal slices first, each slice then ragged over the shards.

    It is what tensor parallelism leaves to sharded training. Seen from the whole tensor a shard's elements lie at a
    stride, hence the name, which is that of PyTorch's placement for the even case.

    Attributes:
      splits: `(dim, size)` of each cut into equal slices, in the order in which they are made.
      ragged: the placement of every slice.

    Example:
      >>> columns = StridedRaggedShard(((1, 2),), RaggedShard((0,), (2, 1)))
      >>> columns.slice_of((6, 8), (1,)), columns.local_numels((6, 8))
      ((slice(0, 6, None), slice(4, 8, None)), (16, 8))
    """

    splits: tuple[tuple[int, int], ...]
    ragged: RaggedShard

    def __post_init__(self):
        faulty = [cut for cut in self.splits if any(type(n) is not int for n in cut) or cut[0] < 0 or cut[1] < 1]
        if not self.splits or faulty:
            raise ValueError(f"splits must be pairs of a dim and a number of slices, got {self.splits}")

    def slice_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a slice of a tensor of this shape.

        Raises:
          ValueError: the slices are not equal.
        """
        sizes = list(shape)
        for dim, size in self.splits:
            if dim >= len(shape) or sizes[dim] % size:
                raise ValueError(f"{self} does not cut a tensor of shape {shape} into equal slices")
            sizes[dim] //= size
        return tuple(sizes)

    def slice_of(self, shape: tuple[int, ...], ranks: Sequence[int]) -> tuple[slice, ...]:
        """The index of one slice in a tensor of this shape, by its place in every split."""
        bounds = [(0, length) for length in shape]
        self.slice_shape(shape)
        for (dim, size), rank in zip(self.splits, ranks, strict=True):
            if not 0 <= rank < size:
                raise IndexError(f"slice {rank} of {size} along dim {dim}")
            start, stop = bounds[dim]
            length = (stop - start) // size
            bounds[dim] = (start + rank * length, start + (rank + 1) * length)
        return tuple(slice(*bound) for bound in bounds)

    def local_numels(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Elements of each slice on each shard, for a tensor of this (global) shape.

        Raises:
          ValueError: the slices are not equal, or the units do not divide them.
        """
        return self.ragged.local_numels(self.slice_shape(shape))
