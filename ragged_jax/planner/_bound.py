"""Proven lower bounds on the shard size of one slab, in units, and which sizes are possible at all."""

import math
from collections.abc import Iterator, Sequence

from ._place import Item


def capacity_bound(items: Sequence[Item], num_shards: int) -> int:
    """What the fullest of `num_shards` devices holds at least, in whatever way whole blocks are laid out.

    Elements must fit somewhere; of the blocks with at least `b` units some device gets its share, rounded up; a
    tail is not cut. There must be items.
    """
    bound = -(-sum(item.size * item.copies for item in items) // num_shards)
    num_blocks = 0
    for block, number, tail in sorted(map(_blocks, items), reverse=True):
        num_blocks += number
        bound = max(bound, -(-num_blocks // num_shards) * block, tail)
    return bound


def lower_bound(items: Sequence[Item], num_shards: int) -> int:
    """No single slab holds the items in shards of fewer units: their capacity, in an `admissible` size."""
    return next(admissible(items, capacity_bound(items, num_shards)))


def admissible(items: Sequence[Item], start: int) -> Iterator[int]:
    """The shard sizes from `start` on that some placement of each item alone allows, rising, without end.

    A tensor that two boundaries must cut makes its grain divide the shard size, and all such tensors together
    make the least common multiple of their grains divide it. The larger the shards, the fewer are forced: up
    to `_free_from(item)` exclusive an item is.
    """
    forced = sorted(((_free_from(i), i.grain) for i in items), reverse=True)
    size = start
    while True:
        step, limit = 1, None
        for free_from, grain in forced:
            if free_from <= size:
                break
            step, limit = math.lcm(step, grain), free_from
        size = -(-size // step) * step
        while limit is None or size < limit:
            yield size
            size += step
        size = limit


def _blocks(item: Item) -> tuple[int, int, int]:
    """Units of a full block, how many such blocks there are, and the tail."""
    return min(item.grain, item.size), item.copies * max(1, item.size // item.grain), item.tail


def _free_from(item: Item) -> int:
    """The smallest shard size for which one cut is enough: a head in whole grains and a rest of one shard."""
    size, grain = item.size, item.grain
    heads = size // (2 * grain)
    return min(size - heads * grain, (heads + 1) * grain)
