"""Between the arrays of a JAX state and a checkpoint: each device's part goes straight from or to the disk."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint import ALIGNMENT, Checkpoint, Part, Region, numpy_dtype, runs_of
from ..fsdp import array_from_parts
from ._holding import Holding
from ._state import PYTHON, Item, is_key, region_of, sharding_of

_REST = "state"  # the file of what is in no bucket


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
                    data = np.array(shard.data) if copy else np.asarray(shard.data)
                    yield from _shard_parts(item, leaf.shape, shard, data)
        elif rank == 0:
            dtype = PYTHON.get(type(item.leaf))
            data = np.array(item.leaf, dtype and np.dtype(dtype))
            yield Part(item.name, ((0, data.size),), data, _REST)


def _shard_parts(item: Item, shape: tuple[int, ...], shard: Any, data: np.ndarray) -> Iterator[Part]:
    data = np.ascontiguousarray(data)
    if item.held is not None:
        flat = data.reshape(-1)
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


def restored(checkpoint: Checkpoint, item: Item, cast: bool) -> Any:
    """A leaf from a checkpoint. Each device is sent its own part, and no more than that is read."""
    if item.held is not None:
        return _restored_slab(checkpoint, item, item.held, cast)
    leaf = item.leaf
    entries = item.tensors()
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
        array = array_from_parts(shape, jax.random.key_data(leaf).sharding, part, dtype=dtype)
    else:
        array = array_from_parts(shape, sharding, part, dtype=dtype)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array


def _restored_slab(checkpoint: Checkpoint, item: Item, held: Holding, cast: bool) -> jax.Array:
    leaf, sharding = item.leaf, sharding_of(item)
    local = sharding.shard_shape(leaf.shape)

    def read(region: Region) -> np.ndarray:
        buffer = _aligned_zeros(local, leaf.dtype)
        flat = buffer.reshape(-1)
        for s in held.segments(tuple(slice(*span) for span in region)):
            checkpoint.read_part(
                s.tensor, s.start, flat[s.offset :][: s.stop - s.start], held.placement(s.tensor), cast=cast
            )
        return buffer

    part = _once(lambda index: region_of(index, leaf.shape), read)
    return array_from_parts(leaf.shape, sharding, part, dtype=leaf.dtype)


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros that jax takes on CPU without a copy."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + nbytes].view(dtype).reshape(shape)


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
