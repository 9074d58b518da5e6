"""Slabs and buckets: where the elements of a group of tensors lie."""

from dataclasses import dataclass

from ._dtypes import itemsize
from ._errors import STRICT
from ._storage import Storage
from ._tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """A tensor at a place in a slab.

    Attributes:
      tensor: the tensor.
      offset: where its elements start in the global slab, in elements.
      storage: in which order they lie: `row_major`, or `tiled`, tile after tile.
      axis_order: for a tensor that is stored transposed, its dims in the order in which they are stored.
    """

    __pydantic_config__ = STRICT

    tensor: TensorSpec
    offset: int
    storage: Storage = "row_major"
    axis_order: tuple[int, ...] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The tensor's shape as stored."""
        shape = self.tensor.shape
        return shape if self.axis_order is None else tuple(shape[dim] for dim in self.axis_order)

    @property
    def stop(self) -> int:
        return self.offset + self.tensor.numel


@dataclass(frozen=True, slots=True)
class Slab:
    """A 2-D array `[num_shards * rows, width]`, sharded on dim 0: the unit of memory.

    Attributes:
      name: unique in its bucket; for a sole slab the tensor's own name.
      dtype: of every element.
      rows: rows on each shard (of share 1, where shards are uneven).
      width: elements of a row.
      placements: the tensors in it, by rising offset.
      sole: the slab is one tensor in its natural shape, cut on dim 0, without padding and without a copy.
    """

    __pydantic_config__ = STRICT

    name: str
    dtype: str
    rows: int
    width: int
    placements: tuple[Placement, ...]
    sole: bool = False

    @property
    def split_axes(self) -> tuple[tuple[str, int], ...]:
        """`(axis, size)` of the other mesh axes that split its tensors. There is one such slab for each slice."""
        return self.placements[0].tensor.split_axes if self.placements else ()

    @property
    def shard_numel(self) -> int:
        """Elements on each shard (of share 1), padding included."""
        return self.rows * self.width

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * itemsize(self.dtype)

    @property
    def payload_numel(self) -> int:
        """Elements of the tensors, over all shards, without padding."""
        return sum(p.tensor.numel for p in self.placements)

    def __repr__(self):
        kind = "sole" if self.sole else f"{len(self.placements)} tensors"
        return f"Slab({self.name}: {self.dtype}[N*{self.rows}, {self.width}], {kind})"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The slabs that are gathered together, normally those of one module: the unit of scheduling.

    Attributes:
      name: the module's path; empty for the root.
      slabs: its slabs.
      stack: for layers stacked under a scan, how many. Every slab then has a leading dim of that size, and
        shapes and offsets are those of one layer.
    """

    __pydantic_config__ = STRICT

    name: str
    slabs: tuple[Slab, ...]
    stack: int | None = None

    @property
    def num_copies(self) -> int:
        return 1 if self.stack is None else self.stack

    @property
    def shard_nbytes(self) -> int:
        """Bytes on each device (of share 1), padding included, all layers of a stack."""
        return self.num_copies * sum(slab.shard_nbytes for slab in self.slabs)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(p.tensor for slab in self.slabs for p in slab.placements)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the tensors over all shards, without padding, all layers of a stack."""
        return self.num_copies * sum(tensor.nbytes for tensor in self.tensors)
