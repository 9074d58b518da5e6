"""`RaggedShard` as a placement of `torch.distributed.tensor`, for `RaggedTensor` alone."""

from typing import NoReturn

from torch.distributed.tensor.placement_types import Placement

from ragged_jax import layout


class RaggedShard(Placement):
    """A tensor cut into contiguous pieces of unequal length along its flattened leading dims.

    Rank `k` of the mesh dim holds `local_units[k]` of `sum(local_units)` equal units, in the order in which the
    tensor lies in memory. Where other mesh dims cut the tensor (`Shard`), they cut first, in the order of `splits`,
    and the pieces are of a slice. Units are relative, so they are kept canonical: divided by their greatest common
    divisor.

    Only `RaggedTensor` knows it. DTensor's own code would move the label and not the data, so the questions that it
    asks of a placement raise here.

    Args:
      dims: the flattened prefix `(0, 1, ..., i)`; no cut is inside of what lies behind it.
      local_units: a count for each rank; zeros are allowed.
      splits: `(dim, size)` of each cut by another mesh dim.

    Example:
      >>> RaggedShard((0,), (2, 4, 0))
      RaggedShard(dims=(0,), local_units=(1, 2, 0))

    Reference: RaggedShard of veScale-FSDP, arXiv:2602.22437.
    """

    value: layout.RaggedShard | layout.StridedRaggedShard

    def __init__(self, dims: tuple[int, ...], local_units: tuple[int, ...], splits: tuple[tuple[int, int], ...] = ()):
        super().__init__()
        ragged = layout.RaggedShard(tuple(dims), tuple(local_units))
        self.value = layout.StridedRaggedShard(tuple(splits), ragged) if splits else ragged

    @classmethod
    def of(cls, value: layout.RaggedShard | layout.StridedRaggedShard) -> "RaggedShard":
        """The placement that a layout's value describes; `value` gives it back."""
        if isinstance(value, layout.StridedRaggedShard):
            return cls(value.ragged.dims, value.ragged.local_units, value.splits)
        return cls(value.dims, value.local_units)

    @property
    def ragged(self) -> layout.RaggedShard:
        """The placement of a slice."""
        return self.value.ragged if isinstance(self.value, layout.StridedRaggedShard) else self.value

    @property
    def dims(self) -> tuple[int, ...]:
        return self.ragged.dims

    @property
    def local_units(self) -> tuple[int, ...]:
        return self.ragged.local_units

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        return self.value.splits if isinstance(self.value, layout.StridedRaggedShard) else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard) and self.value == other.value

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        splits = f", splits={self.splits}" if self.splits else ""
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units}{splits})"

    __str__ = __repr__

    def __reduce__(self):
        return RaggedShard, (self.dims, self.local_units, self.splits)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            f"{self}: DTensor's own code cannot place data so. From a DTensor, use RaggedTensor.from_dtensor; from a "
            "whole tensor RaggedTensor.from_full; from this rank's elements RaggedTensor.from_local"
        )

    is_shard = is_replicate = is_partial = _refuse  # pyright: ignore[reportAssignmentType]
