"""Which elements of a tensor a rank holds: what shape, strides, mesh and placements come to. No communication."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_jax.layout import Box, StridedRaggedShard, boxes

from ._placement import RaggedShard


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dims lie in this order, the outermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(1, shape[dim])
    return tuple(strides)


def order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `strides_of`.

    Raises:
      ValueError: the elements do not lie densely in any order of the dims.
    """
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim], dim)))
    wanted = strides_of(shape, order)
    if any(size > 1 and a != b for size, a, b in zip(shape, strides, wanted, strict=True)) and math.prod(shape):
        raise ValueError(f"strides {tuple(strides)} of a shape {tuple(shape)}: not dense")
    return order


@dataclass(frozen=True)
class Geometry:
    """A tensor of which one mesh dim holds ragged pieces.

    Attributes:
      shape: of the whole tensor.
      order: its dims in the order in which they lie in memory.
      mesh: the ranks.
      placements: on every mesh dim; one `RaggedShard`, the others `Replicate` or `Shard`.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    def __post_init__(self):
        ragged = [p for p in self.placements if isinstance(p, RaggedShard)]
        if len(self.placements) != self.mesh.ndim or len(ragged) != 1:
            raise ValueError(
                f"a mesh of {self.mesh.ndim} dims takes as many placements, one a RaggedShard, got {self.placements}"
            )
        if odd := [p for p in self.placements if not isinstance(p, RaggedShard | Replicate) and type(p) is not Shard]:
            raise ValueError(f"beside a RaggedShard a placement is Replicate or Shard, got {odd}")
        cuts = tuple((p.dim, self.mesh.size(i)) for i, p in enumerate(self.placements) if isinstance(p, Shard))
        if ragged[0].splits != cuts:
            raise ValueError(f"the other mesh dims cut the tensor by {cuts}, {ragged[0]} says {ragged[0].splits}")
        if len(ragged[0].local_units) != (size := self.mesh.size(self.mesh_dim)):
            raise ValueError(
                f"{ragged[0]} is for {len(ragged[0].local_units)} ranks, mesh dim {self.mesh_dim} has {size}"
            )
        _ = self.numels

    @cached_property
    def mesh_dim(self) -> int:
        """The mesh dim over which the tensor is ragged."""
        return next(i for i, p in enumerate(self.placements) if isinstance(p, RaggedShard))

    @property
    def placement(self) -> RaggedShard:
        placement = self.placements[self.mesh_dim]
        assert isinstance(placement, RaggedShard)
        return placement

    @property
    def strides(self) -> tuple[int, ...]:
        return strides_of(self.shape, self.order)

    @property
    def is_row_major(self) -> bool:
        return self.strides == strides_of(self.shape, range(len(self.shape)))

    @cached_property
    def slice(self) -> tuple[slice, ...]:
        """What the other mesh dims leave to this rank."""
        value = self.placement.value
        ranks = [self.mesh.get_local_rank(i) for i, p in enumerate(self.placements) if isinstance(p, Shard)]
        if isinstance(value, StridedRaggedShard):
            return value.slice_of(self.shape, ranks)
        return tuple(slice(0, size) for size in self.shape)

    @cached_property
    def slice_shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.slice)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the slice as it lies in memory."""
        return tuple(self.slice_shape[dim] for dim in self.order)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements on each rank of the ragged mesh dim."""
        return self.placement.ragged.local_numels(self.slice_shape)

    @cached_property
    def range(self) -> tuple[int, int]:
        """The elements of the slice that this rank holds, in the order of its memory."""
        rank = self.mesh.get_local_rank(self.mesh_dim)
        ends = (0, *accumulate(self.numels))
        return ends[rank], ends[rank + 1]

    @cached_property
    def boxes(self) -> tuple[tuple[Box, Box], ...]:
        """This rank's elements as boxes, one after the other: each in the tensor, and as it lies in memory."""
        found = []
        none = (Box((0,) * len(self.shape), self.stored_shape),)  # of a tensor without elements, which still exists
        for stored in boxes(self.stored_shape, *self.range) if math.prod(self.stored_shape) else none:
            at = {dim: i for i, dim in enumerate(self.order)}
            dims = range(len(self.shape))
            offsets = tuple(self.slice[dim].start + stored.offsets[at[dim]] for dim in dims)
            found.append((Box(offsets, tuple(stored.sizes[at[dim]] for dim in dims)), stored))
        return tuple(found)

    def from_stored(self, flat: torch.Tensor) -> torch.Tensor:
        """The slice as a view of its elements in the order of its memory."""
        return flat.view(self.stored_shape).permute([self.order.index(dim) for dim in range(len(self.shape))])

    def to_stored(self, part: torch.Tensor) -> torch.Tensor:
        """The inverse: a slice's elements in the order of its memory, a view where it lies so."""
        return part.permute(self.order).reshape(-1)

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a whole tensor."""
        return self.to_stored(whole[self.slice])[slice(*self.range)]
