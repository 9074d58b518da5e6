"""Rounds of static collectives that move a given traffic: the combinatorial heart of an exchange.

Two collectives are static enough for every backend. In a *permute* every device sends at most one message and
receives at most one, all padded to one size. In an *all-to-all* every device sends every other one a chunk,
all padded to one size. A schedule mixes them: an all-to-all carries what all pairs have in common, permutes
carry the peaks. `static_bound` says how far from the best any schedule of these collectives could be.
"""

from functools import lru_cache

import numpy as np

from ._permutes import plan_permutes
from ._traffic import Step, Traffic, steps_cost

_MAX_LEVELS = 128  # sizes of the all-to-all chunk that are looked at
_MAX_TRIED = 6  # and for which permutes are planned


def _levels(traffic: Traffic, num_shards: int, latency: float) -> list[tuple[float, int]]:
    """Chunk sizes for the all-to-all, each with a bound on any schedule whose all-to-all has that size, or one
    up to the next level; by rising bound.

    Let D be the traffic and c the chunk. The all-to-all takes `latency + (n - 1) c` (nothing for c = 0); each
    permute relieves a device of one message, so that as many are needed as the rest has messages at one
    device, and their sizes add up to what the rest has elements at one device. Between two sizes that occur in
    the traffic the number of messages does not change and the rest falls by less than the all-to-all grows, so
    only the sizes that occur can be best.
    """
    matrix = np.zeros((num_shards, num_shards), np.int64)
    for pair, numel in traffic.items():
        matrix[pair] = numel
    sizes = np.unique(matrix)
    if len(sizes) > _MAX_LEVELS:
        sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, _MAX_LEVELS).astype(int))]
    sizes = [0, *(int(size) for size in sizes if size)]
    levels = []
    for chunk, after in zip(sizes, [*sizes[1:], sizes[-1] + 1], strict=True):
        rest = np.maximum(matrix - chunk, 0)
        most = max(rest.sum(0).max(), rest.sum(1).max())
        # Up to the next level the messages can only get fewer.
        many = matrix >= after
        degree = max(many.sum(0).max(), many.sum(1).max())
        uniform = latency + (num_shards - 1) * chunk if chunk else 0.0
        levels.append((float(uniform + most + latency * degree), chunk))
    return sorted(levels)


def static_bound(traffic: Traffic, num_shards: int, latency: float) -> float:
    """A proven lower bound on the time of permutes and padded all-to-alls without relays, in elements.

    Example:
      >>> static_bound({(0, 1): 8, (0, 2): 2}, num_shards=3, latency=1)
      12.0
    """
    return _levels(traffic, num_shards, latency)[0][0] if traffic else 0.0


def plan_steps(traffic: Traffic, num_shards: int, latency: float) -> list[Step]:
    """The steps that take the least time found: permutes, an all-to-all, or both.

    Args:
      traffic: elements for each pair of different devices; zeros may be left out.
      num_shards: devices.
      latency: elements that the link carries in the latency of one collective.

    Example:
      >>> [(s.kind, s.numel) for s in plan_steps({(0, 1): 9, (1, 2): 9, (2, 0): 8}, 3, latency=1)]
      [('permute', 9)]
    """
    return list(_plan_steps(tuple((p, numel) for p, numel in sorted(traffic.items()) if numel), num_shards, latency))


@lru_cache(maxsize=64)  # the layers of a model look alike
def _plan_steps(items: tuple[tuple[tuple[int, int], int], ...], num_shards: int, latency: float) -> tuple[Step, ...]:
    if not items:
        return ()
    traffic = dict(items)
    best, best_cost = [], float("inf")
    for bound, chunk in _levels(traffic, num_shards, latency)[:_MAX_TRIED]:
        if bound >= best_cost:
            break
        steps = []
        if chunk:
            steps.append(Step("all_to_all", chunk, {p: min(numel, chunk) for p, numel in traffic.items()}))
        rest = {pair: numel - chunk for pair, numel in traffic.items() if numel > chunk}
        steps = plan_permutes(rest, num_shards, latency) + steps
        cost = steps_cost(steps, num_shards, latency)
        if cost < best_cost:
            best, best_cost = steps, cost
    return tuple(best)


def split_steps(steps: list[Step], num_shards: int, max_numel: int) -> list[Step]:
    """The same steps in parts whose messages on one device, padding included, stay within `max_numel`."""
    parts: list[Step] = []
    for step in steps:
        messages = 1 if step.kind == "permute" else num_shards
        size = max(1, max_numel // messages)
        for start in range(0, step.numel, size):
            amounts = {p: min(size, n - start) for p, n in step.amounts.items() if n > start}
            parts.append(Step(step.kind, min(size, step.numel - start), amounts))
    return parts
