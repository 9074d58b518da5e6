"""`Unit`: a bucket on a mesh. Where its slabs live, how they get there and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..layout import Bucket, Slab
from ._check import canonical_dtype, is_traced
from ._precision import FULL, MixedPrecision
from ._slabs import Shares, slab_of, slab_shape, tensors_of, to_stored

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Unit:
    """A bucket whose slabs are sharded over one axis of a mesh. A value: it is part of jit's cache key.

    Attributes:
      bucket: its layout.
      mesh: the devices.
      axes: the mesh axes that split the batch; the slabs are sharded over the last, replicated over the rest.
      shares: how many parts of each slab every device holds, when that is not one each.
      precision: the dtypes of its collectives and of what it computes.
    """

    bucket: Bucket
    mesh: Mesh
    axes: tuple[str, ...]
    shares: Shares = None
    precision: MixedPrecision = FULL

    def __hash__(self):  # part of jit's cache key: asked for in every step
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.bucket, self.mesh, self.axes, self.shares, self.precision))

    @property
    def axis(self) -> str:
        return self.axes[-1]

    @property
    def num_shards(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def share(self) -> int:
        """Parts of a slab that every device has room for: the largest share."""
        return max(self.shares or (1,))

    @property
    def stacked(self) -> bool:
        return self.bucket.stack is not None

    def spec(self, slab: Slab) -> PartitionSpec:
        """The partition spec of a slab's array, with an entry for each dim, as XLA gives it back."""
        rest = [None] * (len(slab_shape(slab, 1)) - 1)
        return PartitionSpec(*[None] * self.stacked, self.axis, *rest)

    def sharding(self, slab: Slab) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(slab))

    def shape(self, slab: Slab) -> tuple[int, ...]:
        """Global shape of the slab's array."""
        shape = slab_shape(slab, self.share * self.num_shards)
        return shape if self.bucket.stack is None else (self.bucket.stack, *shape)

    def shard(self, tensors: Mapping[str, Any]) -> Arrays:
        """The slabs' arrays from whole tensors, by name.

        Each device receives its own part and nothing else: the whole slab exists nowhere but in the tensors
        that came in. Under a trace the same is said with a sharding constraint.
        """
        self._check(tensors)
        if any(is_traced(x) for x in tensors.values()):
            return {slab.name: pin(self._packed(slab, tensors), self.sharding(slab)) for slab in self.bucket.slabs}
        return {slab.name: self._place(slab, tensors) for slab in self.bucket.slabs}

    def _check(self, tensors: Mapping[str, Any]) -> None:
        outer, wrong = () if self.bucket.stack is None else (self.bucket.stack,), []
        for slab in self.bucket.slabs:
            dtypes = {str(canonical_dtype(tensors[p.tensor.name])) for p in slab.placements}
            if len(dtypes) > 1:
                wrong.append(f"  {', '.join(p.tensor.name for p in slab.placements)} share a slab, but are {dtypes}")
            for tensor in (p.tensor for p in slab.placements):
                if (shape := tuple(tensors[tensor.name].shape)) != (*outer, *tensor.shape):
                    wrong.append(f"  {tensor.name}: shape {shape}, planned {(*outer, *tensor.shape)}")
        if wrong:
            raise ValueError("these tensors are not those of the layout:\n" + "\n".join(wrong))

    def _packed(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        return slab_of(slab, tensors, self.num_shards, self.shares, lead=int(self.stacked))

    def _place(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        lead, copies = int(self.stacked), self.bucket.num_copies
        whole = [(p, _on_host(tensors[p.tensor.name])) for p in slab.placements]
        dtype = canonical_dtype(whole[0][1])
        stored = [(p, to_stored(p, x, lead).reshape(copies, -1)) for p, x in whole]

        def part(index: Any) -> np.ndarray:
            buffer = np.zeros((copies, slab.shard_numel * self.share), dtype)
            low, high = self._bounds(slab, self.shard_at(slab, index))
            for placement, flat in stored:
                start, stop = max(low, placement.offset), min(high, placement.stop)
                if start < stop:
                    source = flat[:, start - placement.offset : stop - placement.offset]
                    buffer[:, start - low : stop - low] = source
            return buffer.reshape(self.shape(slab)[:lead] + slab_shape(slab, self.share))

        return jax.make_array_from_callback(self.shape(slab), self.sharding(slab), part, dtype=dtype)

    def shard_at(self, slab: Slab, index: tuple[slice, ...]) -> int:
        """Which shard a part of the slab's array is, by its index as jax gives it."""
        return (index[int(self.stacked)].start or 0) // max(1, slab.rows * self.share)

    def _bounds(self, slab: Slab, k: int) -> tuple[int, int]:
        """Where shard `k` starts and stops in the slab, in elements."""
        ends = (0, *accumulate(self.shares or (1,) * self.num_shards))
        return ends[k] * slab.shard_numel, ends[k + 1] * slab.shard_numel

    def full(self, slabs: Mapping[str, Any]) -> dict[str, Any]:
        """The whole tensors from the arrays of some slabs: numpy arrays, or traced ones under a trace.

        One slab at a time leaves the devices, and no device ever holds more than its own part.
        """
        tensors: dict[str, Any] = {}
        for slab in self.bucket.slabs:
            if (array := slabs.get(slab.name)) is None:
                continue
            if is_traced(array):
                whole = pin(array, NamedSharding(self.mesh, PartitionSpec()))
                tensors |= tensors_of(slab, whole, self.shares, lead=int(self.stacked))
            else:
                whole = tensors_of(slab, _on_host(array), self.shares, lead=int(self.stacked))
                # A view of a packed slab would keep all of it alive.
                tensors |= whole if slab.sole else {name: np.array(x) for name, x in whole.items()}
        return tensors


def pin(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Under a trace: `array` with that sharding, in the way that the mesh's axis types ask for."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
