"""`RaggedShard`: the placement of one tensor, in the form that other systems exchange."""

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
