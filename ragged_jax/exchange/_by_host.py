"""Arrays of a new state by way of the host's memory, tensor by tensor.

For what is there already, what lies in too many pieces for tables, and what other mesh axes split in another way.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..checkpoint import TensorEntry
from ..fsdp import array_from_parts
from ._holding import Index
from ._matched import Source
from ._places import row_major_indices, segments_in
from ._state import PYTHON, Item


def array_by_host(
    item: Item, have: Sequence[Item], sources: Mapping[str, Sequence[Source]], sharding: Any
) -> jax.Array:
    """An item's array on devices."""
    flat = {name: _whole(entry, have, sources[name]) for name, entry in item.tensors().items()}
    shape, dtype = tuple(item.leaf.shape), item.leaf.dtype
    local = sharding.shard_shape(shape)

    def part(index: Index) -> np.ndarray:
        out = np.zeros(int(np.prod(local)), dtype)
        for s in segments_in(item, index, dict.fromkeys(flat, True)):
            at = row_major_indices(item, s.tensor, index, s.start, s.stop)
            out[s.offset : s.offset + s.stop - s.start] = flat[s.tensor][at]
        return out.reshape(local)

    return array_from_parts(shape, sharding, part, dtype)


def value_by_host(item: Item, have: Sequence[Item], sources: Mapping[str, Sequence[Source]]) -> Any:
    """A number or a numpy array."""
    ((name, entry),) = item.tensors().items()
    value = _whole(entry, have, sources[name]).reshape(entry.shape)
    if type(item.leaf) in PYTHON:
        return type(item.leaf)(value[()])
    return value if isinstance(item.leaf, np.ndarray) else value[()]


def _whole(entry: TensorEntry, have: Sequence[Item], sources: Sequence[Source]) -> np.ndarray:
    """A tensor's elements in row-major order."""
    out = np.zeros(entry.numel, jnp.dtype(entry.dtype))
    for source in sources:
        item = have[source.item]
        for index, data in _parts(item):
            for s in segments_in(item, index, {source.name: True}):
                at = row_major_indices(item, s.tensor, index, s.start, s.stop) - source.held
                inside = (at >= 0) & (at < source.numel)
                out[at[inside] + source.wanted] = data[s.offset : s.offset + s.stop - s.start][inside]
    return out


def _parts(item: Item) -> Iterator[tuple[Index, np.ndarray]]:
    """The parts of an item's array, flat, each once."""
    leaf = item.leaf
    if not isinstance(leaf, jax.Array):
        value = np.asarray(leaf)
        yield (slice(None),) * value.ndim, value.reshape(-1)
        return
    if not leaf.is_fully_addressable:
        raise NotImplementedError(
            f"{item.name} would go by way of the host, and parts of it are on devices of other processes; save it "
            "with a `Checkpointer` and restore it"
        )
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            yield shard.index, np.asarray(shard.data).reshape(-1)
