"""`Unit`: a bucket on a mesh. Where its slabs live, how they get there and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ..layout import Bucket, Slab
from ._check import canonical_dtype, is_traced
from ._precision import FULL, MixedPrecision
from ._unshard import Arrays, pack, slab_shape, unshard


@dataclass(frozen=True)
class Unit:
    """A bucket whose slabs are sharded over one axis of a mesh. A value: it is part of jit's cache key.

    Attributes:
      bucket: its layout.
      mesh: the devices.
      axes: the mesh axes that split the batch; the slabs are sharded over the last, replicated over the rest.
      precision: the dtypes of its collectives and of what it computes.
    """

    bucket: Bucket
    mesh: Mesh
    axes: tuple[str, ...]
    precision: MixedPrecision = FULL

    @property
    def axis(self) -> str:
        return self.axes[-1]

    @property
    def num_shards(self) -> int:
        return self.mesh.shape[self.axis]

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
        shape = slab_shape(slab, self.num_shards)
        return shape if self.bucket.stack is None else (self.bucket.stack, *shape)

    def unshard(self, shards: Arrays) -> Arrays:
        """Inside `shard_map`: the tensors of (one layer of) the bucket, whole.

        Raises:
          ValueError: a shard has another shape than the layout says, which happens when a stack is used as a
            single layer or the reverse.
        """
        wrong = []
        for slab in self.bucket.slabs:
            expected, got = slab_shape(slab, 1), shards[slab.name].shape
            if got != expected:
                wrong.append(f"  {slab.name}: {got} on this device, planned {expected}")
        if wrong:
            raise ValueError(
                f"unit {self.bucket.name or '(root)'!r} does not have the shards of one layer:\n"
                + "\n".join(wrong)
                + "\nLayers stacked for a scan need `stacked=` when they are sharded, and are used inside the scan."
            )
        return unshard(self.bucket, shards, self.axis, self.axes, self.precision)

    def shard(self, tensors: Mapping[str, Any]) -> Arrays:
        """The slabs' arrays from whole tensors, by name.

        Each device receives its own part and nothing else: the whole slab exists nowhere but in the tensors
        that came in. Under a trace the same is said with a sharding constraint.
        """
        if any(is_traced(x) for x in tensors.values()):
            return {slab.name: pin(self._packed(slab, tensors), self.sharding(slab)) for slab in self.bucket.slabs}
        return {slab.name: self._place(slab, tensors) for slab in self.bucket.slabs}

    def _packed(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        def one(tensors):
            return pack(slab, tensors, self.num_shards)

        mine = {p.tensor.name: tensors[p.tensor.name] for p in slab.placements}
        return jax.vmap(one, axis_size=self.bucket.stack)(mine) if self.stacked else one(mine)

    def _place(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        whole = {p.tensor.name: _on_host(tensors[p.tensor.name]) for p in slab.placements}
        dtype = canonical_dtype(next(iter(whole.values())))
        copies = self.bucket.num_copies
        flat = {name: x.reshape(copies, -1) for name, x in whole.items()}

        def part(index: Any) -> np.ndarray:
            rows = index[1 if self.stacked else 0]
            start, stop, _ = rows.indices(slab.rows * self.num_shards)
            low, high = start * slab.width, stop * slab.width
            buffer = np.zeros((copies, high - low), dtype)
            for placement in slab.placements:
                first, last = max(low, placement.offset), min(high, placement.stop)
                if first < last:
                    source = flat[placement.tensor.name][:, first - placement.offset : last - placement.offset]
                    buffer[:, first - low : last - low] = source
            shape = slab_shape(slab, 1)
            return buffer.reshape((copies, stop - start, *shape[1:]) if self.stacked else (stop - start, *shape[1:]))

        return jax.make_array_from_callback(self.shape(slab), self.sharding(slab), part, dtype=dtype)

    def full(self, slabs: Mapping[str, Any]) -> dict[str, Any]:
        """The whole tensors from the slabs' arrays: numpy arrays, or traced ones under a trace.

        One slab at a time leaves the devices, and no device ever holds more than its own part.
        """
        tensors: dict[str, Any] = {}
        for slab in self.bucket.slabs:
            array = slabs[slab.name]
            if is_traced(array):
                whole = pin(array, NamedSharding(self.mesh, PartitionSpec()))
            else:
                whole = _on_host(array)
            if not slab.sole:
                whole = whole.reshape((*whole.shape[: self.stacked], -1))
            for placement in slab.placements:
                tensor = placement.tensor
                if not slab.sole:
                    shape = tensor.shape if self.bucket.stack is None else (self.bucket.stack, *tensor.shape)
                    part = whole[..., placement.offset : placement.stop].reshape(shape)
                    tensors[tensor.name] = part if is_traced(part) else part.copy()
                else:
                    tensors[tensor.name] = whole
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
