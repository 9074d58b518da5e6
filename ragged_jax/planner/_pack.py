"""Packing: the smallest shard size for several tensors in one slab, and their offsets. Counts in units."""

import math
from collections.abc import Sequence
from itertools import combinations, islice
from typing import NamedTuple

from ._bound import admissible, lower_bound
from ._place import Item, best_fit, best_order, num_states, place

_EXACT_STEPS = 40_000  # steps of the exact search (states times items) spent on one slab, about 40 ms
_GREEDY_STEPS = 20_000  # tensors placed by the orders that are only good guesses, about 20 ms
_MAX_SUBSETS = 64  # subsets of grains whose least common multiples are tried as shard sizes


class Packing(NamedTuple):
    """Tensors in one slab.

    Attributes:
      shard: units on each shard.
      bound: no offsets at all need fewer.
      placed: `(item, offset)` by rising offset, in units.
    """

    shard: int
    bound: int
    placed: list[tuple[int, int]]


def pack(items: Sequence[Item], num_shards: int, limit: int | None = None) -> Packing | None:
    """The smallest shard size found, and offsets; None when a limit is given and no size up to it was found.

    Whether a size fits is not monotone (a larger one may fail), so sizes are tried one by one from the proven
    bound. Where the exact search is affordable it either fits the items or proves the size impossible, which
    lifts the bound: in small cases the result is therefore optimal. When the steps run out, sizes grow
    geometrically, with multiples of the grains' least common multiples among them, where cuts are easy.
    """
    if not items:
        return Packing(0, 0, [])
    bound = lower_bound(items, num_shards)
    num_tensors = sum(item.copies for item in items)
    num_steps = num_states(items) * len(items)
    exact, greedy, proving = _EXACT_STEPS, _GREEDY_STEPS, True
    shard = bound
    for shard in admissible(items, bound):
        if limit is not None and shard > limit:
            return None
        if proving:
            bound = shard
        if placed := _by_guess(items, num_shards, shard):
            return Packing(shard, bound, placed)
        greedy -= 4 * num_tensors
        if num_steps <= exact:
            exact -= num_steps
            if placed := _by_search(items, num_shards, shard):
                return Packing(shard, bound, placed)
        else:
            proving = False
            if greedy < 0:
                break
    for size in _coarse_sizes(items, shard + 1, limit):
        if placed := _by_guess(items, num_shards, size):
            return Packing(size, bound, placed)
    return None


def _by_guess(items: Sequence[Item], num_shards: int, shard: int) -> list[tuple[int, int]] | None:
    """Starts from a few orders that often do."""
    indices = range(len(items))
    for key in (lambda i: (-items[i].grain, -items[i].size), lambda i: (-items[i].size, -items[i].grain)):
        runs = [(i, items[i].copies) for i in sorted(indices, key=key)]
        if placed := place(items, runs, num_shards, shard):
            return placed
    runs = best_fit(items, num_shards, shard)
    return place(items, runs, num_shards, shard) if runs else None


def _by_search(items: Sequence[Item], num_shards: int, shard: int) -> list[tuple[int, int]] | None:
    runs = best_order(items, num_shards, shard)
    return place(items, runs, num_shards, shard) if runs else None


def _coarse_sizes(items: Sequence[Item], start: int, limit: int | None) -> list[int]:
    """Rising sizes from `start` to the limit, or to one that always fits."""
    most = max(start, sum(item.size * item.copies for item in items))  # all on the first shard
    last = most if limit is None else min(most, limit)
    grains = sorted({item.grain for item in items}, reverse=True)
    subsets = (c for k in range(1, len(grains) + 1) for c in combinations(grains, k))
    steps = {math.lcm(*subset) for subset in islice(subsets, _MAX_SUBSETS)} | {math.lcm(*grains)}
    sizes = {last}
    for step in steps:
        first = -(-start // step) * step
        sizes.update(range(first, min(last, first + 8 * step), step))
    size = start
    while size < last:
        sizes.add(size)
        size += max(1, size // 64)
    found = {next(admissible(items, size)) for size in sizes}
    return sorted(size for size in found if start <= size <= last)
