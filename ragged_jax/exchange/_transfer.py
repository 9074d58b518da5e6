"""Between the arrays of a JAX state and a checkpoint: each device's part goes straight from or to the disk."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint import ALIGNMENT, Checkpoint, Part, Region, empty, numpy_dtype, runs_of
from ..fsdp import array_from_parts
from ..layout import listed
from ._holding import Holding, InSlab
from ._state import PYTHON, Item, is_key, key_impl, region_of, sharding_of

_REST = "state"  # the file of what is in no bucket

Stays = Callable[[str], bool]


def parts_of(items: Sequence[Item], rank: int, *, copy: bool) -> Iterator[Part]:
    """What this process saves of a state.

    Args:
      items: the state's leaves.
      rank: of the process; the first one saves what every process has.
      copy: whether later changes to the state must not show, because donated arrays are written to.
    """
    for item in items:
        if isinstance(item.leaf, jax.Array):
            leaf = jax.random.key_data(item.leaf) if is_key(item.leaf) else item.leaf
            if rank and leaf.is_fully_addressable:  # an array of this process alone: all have the same
                continue
            for shard in leaf.addressable_shards:
                if shard.replica_id == 0:
                    data = _copied(shard.data) if copy else np.asarray(shard.data)
                    yield from _shard_parts(item, leaf.shape, shard, data)
        elif rank == 0:
            dtype = PYTHON.get(type(item.leaf))
            data = np.array(item.leaf, dtype and np.dtype(dtype))
            yield Part(item.name, ((0, data.size),), data, _REST)


def _copied(data: Any) -> np.ndarray:
    copy = empty(data.shape, data.dtype)
    np.copyto(copy, data)
    return copy


def _shard_parts(item: Item, shape: tuple[int, ...], shard: Any, data: np.ndarray) -> Iterator[Part]:
    data = np.ascontiguousarray(data)
    if item.held is not None:
        flat = data.reshape(-1)
        if item.held.of.slab.split_axes and isinstance(item.held, InSlab):
            for name, place, region, order in item.held.slice_boxes(shard.index):
                box = flat[place].reshape([region[dim][1] - region[dim][0] for dim in order])
                back = [order.index(dim) for dim in range(len(order))]
                yield Part(name, region, np.ascontiguousarray(box.transpose(back)), item.held.group)
            return
        for s in item.held.segments(shard.index):
            yield Part(s.tensor, ((s.start, s.stop),), flat[s.offset :][: s.stop - s.start], item.held.group)
        return
    if item.is_empty:
        return
    region = region_of(shard.index, shape)
    if item.shape is not None:
        for run in runs_of(region, shape):
            part = data.reshape(-1)[run.at : run.at + run.numel]
            yield Part(item.name, ((run.first, run.first + run.numel),), part, _REST)
        return
    if all(span == (0, size) for span, size in zip(region[1:], shape[1:], strict=True)):
        row = data[:1].size if shape else 1
        region = ((region[0][0] * row, region[0][1] * row),) if shape else ((0, 1),)
    yield Part(item.name, region, data, _REST)


def keep_values(items: Sequence[Item], stays: Stays) -> None:
    """Raises ValueError when tensors that are to stay as they are have no values; every one is named."""
    bare = (item for item in items if isinstance(item.leaf, jax.ShapeDtypeStruct))
    if bad := [name for item in bare for name in item.tensors() if stays(name)]:
        raise ValueError(
            "the name map ignores these tensors, so that they stay as they are, but they have no values yet:"
            + listed(bad)
            + "\nGive a model that has values there, or load a part of it, such as `nnx.state(model, nnx.Param)`."
        )


def restored(checkpoint: Checkpoint, item: Item, cast: bool, stays: Stays) -> Any:
    """A leaf from a checkpoint. Each device is sent its own part, and no more than that is read.

    Args:
      stays: by name, whether a tensor is what it is in the item's own leaf.
    """
    leaf = item.leaf
    entries = item.tensors()
    if entries and all(map(stays, entries)):
        return leaf.copy() if isinstance(leaf, jax.Array | np.ndarray) else leaf  # donating one leaves the other
    if item.held is not None:
        return _restored_slab(checkpoint, item, item.held, cast, stays)
    shape = tuple(getattr(leaf, "shape", ()))
    dtype = np.dtype(leaf.dtype) if item.is_empty else numpy_dtype(entries[item.name].dtype)
    if is_key(leaf):
        shape = entries[item.name].shape

    def read(region: Region) -> np.ndarray:
        if item.is_empty:
            return np.zeros([stop - start for start, stop in region], dtype)
        if item.shape is None:
            return checkpoint.read_region(item.name, region, shape).astype(dtype, copy=False)
        parts = [
            checkpoint.read_region(item.name, ((run.first, run.first + run.numel),), item.shape)
            for run in runs_of(region, shape)
        ]
        return np.concatenate(parts).reshape([stop - start for start, stop in region]).astype(dtype, copy=False)

    part = _once(lambda index: region_of(index, shape), read)
    whole = (slice(None),) * len(shape)
    if type(leaf) in PYTHON:
        return type(leaf)(part(whole))
    if isinstance(leaf, np.ndarray | np.generic):
        return part(whole) if isinstance(leaf, np.ndarray) else part(whole)[()]
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        array = jnp.asarray(part(whole))
    elif is_key(leaf):
        of_data = sharding if isinstance(leaf, jax.ShapeDtypeStruct) else jax.random.key_data(leaf).sharding
        array = array_from_parts(shape, of_data, part, dtype=dtype)
    else:
        array = array_from_parts(shape, sharding, part, dtype=dtype)
    return jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_key(leaf) else array


def _restored_slab(checkpoint: Checkpoint, item: Item, held: Holding, cast: bool, stays: Stays) -> jax.Array:
    leaf, sharding = item.leaf, sharding_of(item)
    local = sharding.shard_shape(leaf.shape)

    indices: Any = sharding.addressable_devices_indices_map(leaf.shape).values()
    regions = sorted({region_of(index, leaf.shape) for index in indices})
    buffers = dict(zip(regions, _buffers(len(regions), local, leaf.dtype), strict=True))
    before: dict[Region, Any] = {}
    if any(map(stays, item.tensors())):
        before = {region_of(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
    with checkpoint.batch() as batch:
        for region, buffer in buffers.items():
            flat, index = buffer.reshape(-1), tuple(slice(*span) for span in region)
            if before:
                flat[:] = np.asarray(before[region]).reshape(-1)
            if isinstance(held, InSlab) and held.of.slab.split_axes:
                if not before:
                    flat[:] = 0
                _fill_slices(checkpoint, held, index, flat, stays)
                continue
            segments = held.segments(index)
            if not before and sum(s.stop - s.start for s in segments) < flat.size:
                flat[:] = 0  # the padding
            for s in segments:
                if stays(s.tensor):
                    continue
                out, placement = flat[s.offset :][: s.stop - s.start], held.placement(s.tensor)
                checkpoint.read_part(s.tensor, s.start, out, placement, cast=cast, batch=batch)
    part = _once(lambda index: region_of(index, leaf.shape), buffers.pop)
    return array_from_parts(leaf.shape, sharding, part, dtype=leaf.dtype)


def _fill_slices(
    checkpoint: Checkpoint, held: InSlab, index: tuple[slice, ...], flat: np.ndarray, stays: Stays
) -> None:
    """Fills a part of a slab whose tensors other axes split: of each a box, in the slab's order."""
    for name, place, box, order in held.slice_boxes(index):
        if stays(name):
            continue
        found = checkpoint.read_region(name, box, held.placement(name).tensor.full_shape)
        flat[place] = found.transpose(order).reshape(-1).astype(flat.dtype)


def _buffers(count: int, shape: tuple[int, ...], dtype: np.dtype) -> list[np.ndarray]:
    """Arrays in one piece of memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    rows = empty((count, nbytes + -nbytes % ALIGNMENT), np.dtype(np.uint8))
    return [row[:nbytes].view(dtype).reshape(shape) for row in rows]


def _once(key: Callable[[Any], Any], read: Callable[[Any], np.ndarray]) -> Callable[[Any], np.ndarray]:
    """Reads each part once, also when several devices get it.

    Each of them gets an array of its own. On CPU jax takes an array as it is, without a copy, and a donated one is
    written to: of one that two devices share, a counter would be counted up twice.
    """
    memory: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        at = key(index)
        if at in memory:
            return memory[at].copy()
        memory[at] = read(at)
        return memory[at]

    return part
