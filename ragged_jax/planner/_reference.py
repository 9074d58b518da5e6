"""The smallest slab by trying everything: slow, obvious, and the oracle of the planner's tests."""

from collections.abc import Sequence
from itertools import count, permutations


def smallest_shard(tensors: Sequence[tuple[int, int]], num_shards: int, unit: int = 1) -> int:
    """The smallest shard size, in elements, for tensors of `(numel, granularity)` in one slab.

    Every shard size, every order, every start at a multiple of `unit`; each cut is looked at by itself.
    """
    for shard in count(0, unit):
        orders = set(permutations(t for t in tensors if t[0]))
        if any(_fits(order, 0, num_shards, shard, unit) for order in orders):
            return shard
    raise AssertionError


def _fits(order: Sequence[tuple[int, int]], position: int, num_shards: int, shard: int, unit: int) -> bool:
    if not order:
        return True
    (numel, granularity), rest = order[0], order[1:]
    starts = range(-(-position // unit) * unit, num_shards * shard - numel + 1, unit)
    return any(
        is_whole(start, numel, granularity, shard) and _fits(rest, start + numel, num_shards, shard, unit)
        for start in starts
    )


def is_whole(start: int, numel: int, granularity: int, shard: int) -> bool:
    """Whether each multiple of `shard` inside the tensor is a multiple of `granularity` after its start."""
    return all(
        (cut - start) % granularity == 0 for cut in range(start + 1, start + numel) if shard and cut % shard == 0
    )
