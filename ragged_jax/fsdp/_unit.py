"""`Unit`: a bucket on a mesh. Where its slabs live, how they get there and back."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..layout import Bucket, Slab, listed
from ._check import canonical_dtype, has_values, is_traced
from ._precision import FULL, MixedPrecision
from ._slabs import Shares, slab_of, slab_shape, tensors_of, to_stored
from ._splits import (
    Names,
    dim_splits,
    entries,
    joined,
    opened_spec,
    other_axes,
    slices,
    spec_of,
    stored_splits,
)

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
      reshard: whether gathered weights are dropped after the forward pass.
      policy: what the backward pass keeps otherwise.
      beside_layers: whether it is no layer, and others are.
    """

    bucket: Bucket
    mesh: Mesh
    axes: tuple[str, ...]
    shares: Shares = None
    precision: MixedPrecision = FULL
    reshard: bool = True
    policy: Callable | None = None
    beside_layers: bool = False

    def __repr__(self):
        name, slabs = self.bucket.name or "(root)", len(self.bucket.slabs)
        return f"Unit({name!r}, {slabs} slabs over {self.axis} {self.num_shards})"

    def __hash__(self):  # part of jit's cache key: asked for in every step
        return self._hash

    @cached_property
    def _hash(self) -> int:
        how = (self.precision, self.reshard, self.policy, self.beside_layers)
        return hash((self.bucket, self.mesh, self.axes, self.shares, *how))

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
        return spec_of([()] * self.stacked + self._dims(slab))

    def _dims(self, slab: Slab) -> list[Names]:
        """The mesh axes of each dim of a slab's array, without that of a stack."""
        num_dims, names = len(slab_shape(slab, 1)), other_axes(slab)
        if names and not slab.sole:
            return [names, (self.axis,), *[()] * (num_dims - 1)]
        splits = stored_splits(slab.placements[0]) if names else ()
        dims = [tuple(s.axis for s in dim_splits(splits, dim)) for dim in range(num_dims)]
        return [(*dims[0], self.axis), *dims[1:]]

    def inner_spec(self, slab: Slab) -> PartitionSpec:
        """The spec of one layer of a slab over the axes that split it, as it is inside `shard_map`."""
        inner = opened_spec(spec_of(self._dims(slab)), self.axes)
        return spec_of([() if names == (self.axis,) else names for names in entries(inner)])

    def inner_shape(self, slab: Slab) -> tuple[int, ...]:
        """The shape of one layer of a slab inside `shard_map`, where each device of the axis has its own part."""
        spec = entries(self.inner_spec(slab))
        shape = slab_shape(slab, self.share)
        shape = (1,) * (len(spec) - len(shape)) + shape  # a leading dim for the slices
        return tuple(n * math.prod(self.mesh.shape[a] for a in names) for n, names in zip(shape, spec, strict=True))

    def sharding(self, slab: Slab) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(slab))

    def shape(self, slab: Slab) -> tuple[int, ...]:
        """Global shape of the slab's array."""
        shape, sizes = slab_shape(slab, self.share * self.num_shards), dict(slab.split_axes)
        if sizes and not slab.sole:
            shape = (math.prod(sizes.values()), *shape)
        elif sizes:
            dims = [[n for n in names if n in sizes] for names in self._dims(slab)]
            shape = tuple(size * math.prod(sizes[n] for n in d) for size, d in zip(shape, dims, strict=True))
        return shape if self.bucket.stack is None else (self.bucket.stack, *shape)

    def abstract(self, slab: Slab) -> jax.ShapeDtypeStruct:
        """The slab's array as `jit` needs to know it to compile."""
        return jax.ShapeDtypeStruct(self.shape(slab), slab.dtype, sharding=self.sharding(slab))

    def shard(self, tensors: Mapping[str, Any]) -> Arrays:
        """The slabs' arrays from whole tensors, by name.

        Each device receives its own part and nothing else: the whole slab exists nowhere but in the tensors
        that came in. Under a trace the same is said with a sharding constraint.
        """
        self._check(tensors)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in tensors.values()):
            return {slab.name: self.abstract(slab) for slab in self.bucket.slabs}  # type: ignore[misc]
        if any(is_traced(x) for x in tensors.values()):
            return {slab.name: pin(self.packed(slab, tensors), self.sharding(slab)) for slab in self.bucket.slabs}
        return {slab.name: self._place(slab, tensors) for slab in self.bucket.slabs}

    def _check(self, tensors: Mapping[str, Any]) -> None:
        outer, wrong = () if self.bucket.stack is None else (self.bucket.stack,), []
        for slab in self.bucket.slabs:
            dtypes = {str(canonical_dtype(tensors[p.tensor.name])) for p in slab.placements}
            if len(dtypes) > 1:
                wrong.append(f"{', '.join(p.tensor.name for p in slab.placements)} share a slab, but are {dtypes}")
            for tensor in (p.tensor for p in slab.placements):
                if (shape := tuple(tensors[tensor.name].shape)) != (*outer, *tensor.full_shape):
                    wrong.append(f"{tensor.name}: shape {shape}, planned {(*outer, *tensor.full_shape)}")
        if wrong:
            raise ValueError("these tensors are not those of the layout:" + listed(wrong))

    def packed(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        """Under a trace, a slab's array from whole tensors, with whatever sharding comes out."""
        lead = int(self.stacked)
        if not slab.split_axes:
            return slab_of(slab, tensors, self.num_shards, self.shares, lead)
        tensors = {p.tensor.name: slices(tensors[p.tensor.name], p.tensor.splits, lead) for p in slab.placements}
        packed = slab_of(slab, tensors, self.num_shards, self.shares, lead + 1)
        return joined(packed, stored_splits(slab.placements[0]), lead) if slab.sole else packed

    def _tensors(self, slab: Slab, array: Any) -> dict[str, Any]:
        """The whole tensors of a slab from its array."""
        lead = int(self.stacked)
        if not slab.split_axes:
            return tensors_of(slab, array, self.shares, lead)
        packed = slices(array, stored_splits(slab.placements[0]), lead) if slab.sole else array
        splits = {p.tensor.name: p.tensor.splits for p in slab.placements}
        parts = tensors_of(slab, packed, self.shares, lead + 1)
        return {name: joined(x, splits[name], lead) for name, x in parts.items()}

    def _place(self, slab: Slab, tensors: Mapping[str, Any]) -> jax.Array:
        lead, copies = int(self.stacked), self.bucket.num_copies
        whole = [(p, on_host(tensors[p.tensor.name])) for p in slab.placements]
        dtype, shape = canonical_dtype(whole[0][1]), self.shape(slab)
        stored = []
        for p, x in whole:
            parts = slices(x, p.tensor.splits, lead)
            flat = to_stored(p, parts, lead + 1).reshape(copies, parts.shape[lead], p.tensor.numel)
            stored.append((p, flat))
        local = self.sharding(slab).shard_shape(shape)

        def part(index: Any) -> np.ndarray:
            buffer = np.zeros((copies, slab.shard_numel * self.share), dtype)
            at = self.coordinates(slab, index)
            rank = np.ravel_multi_index([at[n] for n, _ in slab.split_axes], [m for _, m in slab.split_axes] or ())
            low, high = self._bounds(slab, at[self.axis])
            for placement, flat in stored:
                start, stop = max(low, placement.offset), min(high, placement.stop)
                if start < stop:
                    source = flat[:, rank, start - placement.offset : stop - placement.offset]
                    buffer[:, start - low : stop - low] = source
            return buffer.reshape(local)

        return array_from_parts(shape, self.sharding(slab), part, dtype)

    def coordinates(self, slab: Slab, index: tuple[slice, ...]) -> dict[str, int]:
        """The place on each mesh axis of the device that holds this part of a slab's array."""
        found = {}
        for (size, names), part in zip(self._dims_of[slab.name], index, strict=True):
            sizes = [self.mesh.shape[n] for n in names]
            block = (part.start or 0) // max(1, size // math.prod(sizes))
            for name, length in zip(reversed(names), reversed(sizes), strict=True):
                block, found[name] = divmod(block, length)
        return found

    @cached_property
    def _dims_of(self) -> dict[str, list[tuple[int, Names]]]:
        """Of each slab's array, the size and the mesh axes of each dim."""
        slabs = self.bucket.slabs
        return {s.name: list(zip(self.shape(s), entries(self.spec(s)), strict=True)) for s in slabs}

    def shard_at(self, slab: Slab, index: tuple[slice, ...]) -> int:
        """Which shard a part of the slab's array is, by its index as jax gives it."""
        return self.coordinates(slab, index)[self.axis]

    def _bounds(self, slab: Slab, k: int) -> tuple[int, int]:
        """Where shard `k` starts and stops in the slab, in elements."""
        ends = (0, *accumulate(self.shares or (1,) * self.num_shards))
        return ends[k] * slab.shard_numel, ends[k + 1] * slab.shard_numel

    def full(self, slabs: Mapping[str, Any]) -> dict[str, Any]:
        """The whole tensors from the arrays of some slabs: numpy arrays, or traced ones under a trace.

        One slab at a time leaves the devices, and no device ever holds more than its own part.
        """
        tensors: dict[str, Any] = {}
        has_values(slabs.values())
        for slab in self.bucket.slabs:
            if (array := slabs.get(slab.name)) is None:
                continue
            if is_traced(array):
                whole = pin(array, NamedSharding(self.mesh, PartitionSpec()))
                tensors |= self._tensors(slab, whole)
            else:
                whole = self._tensors(slab, on_host(array))
                # A view of a packed slab would keep all of it alive.
                tensors |= whole if slab.sole else {name: np.array(x) for name, x in whole.items()}
        return tensors


def pin(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Under a trace: `array` with that sharding, in the way that the mesh's axis types ask for."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(array, sharding)
    return jax.lax.with_sharding_constraint(array, sharding)


def array_from_parts(
    shape: tuple[int, ...], sharding: Any, part: Callable[[Any], np.ndarray], dtype: Any
) -> jax.Array:
    """`jax.make_array_from_callback`, with memory of its own for each device.

    Where all devices hold the same, jax gives all of them what one call returns. On CPU it may take that memory as it
    is, and a donated array is written to: of one that two devices share, a counter would be counted up twice.
    """
    if not sharding.is_fully_replicated:
        return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)
    devices = sharding.addressable_devices_indices_map(shape)
    places = [(SingleDeviceSharding(d, memory_kind=sharding.memory_kind), index) for d, index in devices.items()]
    arrays = [jax.device_put(np.array(part(index)), place) for place, index in places]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def on_host(x: Any) -> np.ndarray:
    """The whole array, from all processes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))
    return np.asarray(x)
