"""Between the arrays of a JAX state and a checkpoint: each device's part goes straight from or to the disk."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint import (
    ALIGNMENT,
    Checkpoint,
    CheckpointError,
    Part,
    Region,
    clear_padding,
    empty,
    fill_shard,
    numpy_dtype,
    shard_parts,
)
from ..fsdp import SlabOf, array_from_parts
from ..layout import Layout
from ._state import PYTHON, Item, is_key

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
                    data = _copied(shard.data) if copy else np.asarray(shard.data)
                    yield from _shard_parts(item, leaf.shape, shard, data)
        elif rank == 0:
            dtype = PYTHON.get(type(item.leaf))
            data = np.array(item.leaf, dtype and np.dtype(dtype))
            yield Part(item.prefix, ((0, data.size),), data, _REST)


def _copied(data: Any) -> np.ndarray:
    copy = empty(data.shape, data.dtype)
    np.copyto(copy, data)
    return copy


def _shard_parts(item: Item, shape: tuple[int, ...], shard: Any, data: np.ndarray) -> Iterator[Part]:
    data = np.ascontiguousarray(data)
    if item.of is not None:
        unit, slab = item.of.unit, item.of.slab
        buffers = {(unit.bucket.name, slab.name): data}
        k = unit.shard_at(slab, shard.index)
        yield from shard_parts(_layout(item.of), k, buffers, prefix=item.prefix, suffix=item.suffix)
        return
    region = _region(shard.index, shape)
    if all(span == (0, size) for span, size in zip(region[1:], shape[1:], strict=True)):
        row = data[:1].size if shape else 1
        region = ((region[0][0] * row, region[0][1] * row),) if shape else ((0, 1),)
    yield Part(item.prefix, region, data, _REST)


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    spans = (s.indices(size)[:2] for s, size in zip((*index, *[slice(None)] * len(shape)), shape, strict=False))
    return tuple(spans)


@cache
def _layout(of: SlabOf) -> Layout:
    """A layout of this slab alone."""
    unit = of.unit
    return Layout(unit.num_shards, (replace(unit.bucket, slabs=(of.slab,)),), unit.shares)


def check_restorable(checkpoint: Checkpoint, items: Sequence[Item], cast: bool) -> None:
    """Raises CheckpointError when a checkpoint does not hold what a state wants; every difference is listed."""
    faults = []
    for item in items:
        for name, want in item.tensors().items():
            try:
                sources = checkpoint.sources(name, want.shape)
            except CheckpointError as error:
                faults.append(str(error).removeprefix(f"{checkpoint.path} has "))
                continue
            saved = checkpoint.entry(sources[0].name)
            if saved.dtype != want.dtype and not cast:
                faults.append(f"{name}: saved as {saved.dtype}, wanted as {want.dtype}; `cast=True` would convert it")
            if saved.attributes != want.attributes:
                faults.append(f"{name}: saved with {saved.attributes}, wanted with {want.attributes}")
    if faults:
        more = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
        raise CheckpointError(f"{checkpoint.path} is not of this state:\n  " + "\n  ".join([*faults[:50], *more]))


def restored(checkpoint: Checkpoint, item: Item, cast: bool) -> Any:
    """A leaf from a checkpoint. Each device is sent its own part, and no more than that is read."""
    if item.of is not None:
        return _restored_slab(checkpoint, item, item.of, cast)
    leaf, ((name, want),) = item.leaf, item.tensors().items()
    dtype = numpy_dtype(want.dtype)

    def read(region: Region) -> np.ndarray:
        return checkpoint.read_region(name, region, want.shape).astype(dtype, copy=False)

    part = _once(lambda index: _region(index, want.shape), read)
    whole = (slice(None),) * len(want.shape)
    if type(leaf) in PYTHON:
        return type(leaf)(part(whole))
    if isinstance(leaf, np.ndarray | np.generic):
        return part(whole) if isinstance(leaf, np.ndarray) else part(whole)[()]
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or not getattr(leaf, "committed", True):
        array = jnp.asarray(part(whole))
    elif is_key(leaf):
        array = array_from_parts(want.shape, jax.random.key_data(leaf).sharding, part, dtype=dtype)
    else:
        array = array_from_parts(want.shape, sharding, part, dtype=dtype)
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key(leaf) else array


def _restored_slab(checkpoint: Checkpoint, item: Item, of: SlabOf, cast: bool) -> jax.Array:
    unit, slab, dtype = of.unit, of.slab, item.leaf.dtype
    sharding = getattr(item.leaf, "sharding", None) or unit.sharding(slab)
    local = sharding.shard_shape(unit.shape(slab))

    indices: Any = sharding.addressable_devices_indices_map(unit.shape(slab)).values()
    shards = sorted({unit.shard_at(slab, index) for index in indices})
    buffers = dict(zip(shards, _buffers(len(shards), local, dtype), strict=True))
    with checkpoint.batch() as batch:
        for k, buffer in buffers.items():
            mine: Mapping = {(unit.bucket.name, slab.name): buffer}
            clear_padding(_layout(of), k, mine)
            names = {"prefix": item.prefix, "suffix": item.suffix}
            fill_shard(checkpoint, _layout(of), k, mine, **names, cast=cast, batch=batch)
    part = _once(lambda index: unit.shard_at(slab, index), buffers.pop)
    return array_from_parts(unit.shape(slab), sharding, part, dtype=dtype)


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
