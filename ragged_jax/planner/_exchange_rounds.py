"""Rounds of static collectives that move a given traffic: the combinatorial heart of an exchange.

Two collectives are static enough for every backend. In a *permute* every device sends at most one message and
receives at most one, all padded to one size. In an *all-to-all* every device sends every other one a chunk,
all padded to one size. A schedule mixes them: an all-to-all carries what all pairs have in common, permutes
carry the peaks. Time is counted in elements: a collective costs `latency` elements (what the link would carry
in that time) plus what it makes a device send.

Finding the best permutes is NP-hard (preemptive open shop with set-up times); two heuristics compete, and
`static_bound` says how far from the best any schedule of these collectives could be.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

Traffic = Mapping[tuple[int, int], int]
"""Elements to move for each pair `(sender, receiver)` of different devices."""

Kind = Literal["permute", "all_to_all", "uneven_all_to_all"]

_MAX_LEVELS = 128  # sizes of the all-to-all chunk that are looked at
_MAX_TRIED = 6  # and for which permutes are planned
_MAX_EDGES = 1 << 14  # beyond it messages are not split between rounds, to stay fast
_MAX_SPLITS = 1 << 19  # edges times rounds that the splitting may look at


@dataclass(frozen=True, slots=True)
class Step:
    """One collective: its kind, the padded size of every message and what each pair truly moves in it."""

    kind: Kind
    numel: int
    amounts: Traffic


def most_numel(traffic: Traffic) -> int:
    """The most elements that one device sends or receives: no schedule takes less time than these."""
    sent, received = Counter(), Counter()
    for (sender, receiver), numel in traffic.items():
        sent[sender] += numel
        received[receiver] += numel
    return max([0, *sent.values(), *received.values()])


def steps_cost(steps: list[Step], num_shards: int, latency: float) -> float:
    """Time of the steps one after the other, in elements."""
    cost = 0.0
    for step in steps:
        if step.kind == "permute":
            cost += latency + step.numel
        elif step.kind == "all_to_all":
            cost += latency + (num_shards - 1) * step.numel
        else:
            cost += latency + most_numel(step.amounts)
    return cost


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


def colour(traffic: Traffic, *, nested: bool) -> list[Step]:
    """Permutes that carry whole messages, as few as the busiest device has messages.

    Edge colouring of a bipartite graph by alternating paths (König 1916), large messages first so that
    messages of like size share a round and pad each other little.

    Args:
      traffic: the messages.
      nested: whether the messages above any size must use as few rounds as they can on their own. That keeps
        the number of large rounds least, but moves messages between rounds more often.
    """
    edges = sorted(traffic, key=lambda pair: (-traffic[pair], pair))
    degree = Counter[tuple[int, int]]()
    for sender, receiver in edges:
        degree[0, sender] += 1
        degree[1, receiver] += 1
    limit = 0 if nested else max(degree.values(), default=0)
    seen, used = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    partner: dict[tuple[int, int, int], int] = {}  # (side, device, colour): the device at the other end
    for sender, receiver in edges:
        u, v = (0, sender), (1, receiver)
        seen[u] += 1
        seen[v] += 1
        limit = max(limit, seen[u], seen[v])
        every = (1 << limit) - 1
        free = every & ~(used[u] | used[v])
        if free:
            bit = free & -free
        else:
            bit = every & ~used[u]
            bit &= -bit
            other = every & ~used[v]
            other &= -other
            _flip(v, bit, other, partner, used)
        number = bit.bit_length() - 1
        partner[0, sender, number] = receiver
        partner[1, receiver, number] = sender
        used[u] |= bit
        used[v] |= bit
    rounds: list[dict[tuple[int, int], int]] = [{} for _ in range(limit)]
    for (side, device, number), other in partner.items():
        if side == 0:
            rounds[number][device, other] = traffic[device, other]
    return [_permute(amounts) for amounts in rounds if amounts]


def _flip(start, a: int, b: int, partner: dict, used: Counter) -> None:
    """Swaps colours `a` and `b` (as bits) along the path that leaves `start` by an `a` edge."""
    path, at, bit = [start], start, a
    while used[at] & bit:
        at = (1 - at[0], partner[(*at, bit.bit_length() - 1)])
        path.append(at)
        bit ^= a ^ b
    ends = [(x, y, b if i % 2 else a) for i, (x, y) in enumerate(pairwise(path))]
    for x, y, bit in ends:
        for node in (x, y):
            partner.pop((*node, bit.bit_length() - 1), None)
            used[node] &= ~bit
    for x, y, bit in ends:
        bit ^= a ^ b
        partner[(*x, bit.bit_length() - 1)] = y[1]
        partner[(*y, bit.bit_length() - 1)] = x[1]
        used[x] |= bit
        used[y] |= bit


def _permute(amounts: Traffic) -> Step:
    return Step("permute", max(amounts.values()), dict(sorted(amounts.items())))


def peel(traffic: Traffic, num_shards: int) -> Iterator[tuple[Step, dict[tuple[int, int], int]]]:
    """Permutes whose sizes add up to exactly the least possible; yields each with what is left after it.

    Traffic is filled up until every device sends and receives the same, which by Birkhoff's theorem is a sum
    of permutations. Each round takes the permutation whose smallest entry is largest, and as much of it.
    """
    rest = np.zeros((num_shards, num_shards), np.int64)
    for pair, numel in traffic.items():
        rest[pair] = numel
    slack, left = _slack(rest), most_numel(traffic)
    while left > 0:
        total = rest + slack
        receivers = _bottleneck_matching(total)
        at = np.arange(num_shards), receivers
        size = int(total[at].min())
        real = np.minimum(rest[at], size)
        rest[at] -= real
        slack[at] -= size - real
        left -= size
        amounts = {(i, int(j)): int(n) for i, (j, n) in enumerate(zip(receivers, real, strict=True)) if n}
        if amounts:
            senders, targets = np.nonzero(rest)
            remain = {(int(i), int(j)): int(rest[i, j]) for i, j in zip(senders, targets, strict=True)}
            yield _permute(amounts), remain


def _slack(matrix: np.ndarray) -> np.ndarray:
    """Padding that makes all rows and columns add up to the same, on entries in use as far as possible."""
    slack = np.zeros_like(matrix)
    size = max(matrix.sum(0).max(), matrix.sum(1).max())
    rows, columns = size - matrix.sum(1), size - matrix.sum(0)
    for in_use in (True, False):
        for i in np.nonzero(rows)[0]:
            for j in np.nonzero(columns)[0]:
                if (matrix[i, j] > 0) == in_use and rows[i] and columns[j]:
                    amount = min(rows[i], columns[j])
                    slack[i, j] += amount
                    rows[i] -= amount
                    columns[j] -= amount
    return slack


def _bottleneck_matching(matrix: np.ndarray) -> np.ndarray:
    """For each row its column in the perfect matching whose smallest entry is largest."""
    sizes = np.unique(matrix[matrix > 0])
    low, high, best = 0, len(sizes) - 1, _matching(matrix >= sizes[0])
    assert best is not None, "equal row and column sums always have a perfect matching"
    while low < high:
        middle = (low + high + 1) // 2
        found = _matching(matrix >= sizes[middle])
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    return best


def _matching(allowed: np.ndarray) -> np.ndarray | None:
    """A perfect matching by augmenting paths, rows as bit sets; None where there is none."""
    n = len(allowed)
    bits = [int.from_bytes(row.tobytes(), "little") for row in np.packbits(allowed, axis=1, bitorder="little")]
    row_of, column_of, free = [-1] * n, [-1] * n, (1 << n) - 1
    for root in range(n):
        queue, parent, unseen, end = [root], {}, (1 << n) - 1, -1
        for row in queue:
            new = bits[row] & unseen
            if new & free:
                end = (new & free & -(new & free)).bit_length() - 1
                parent[end] = row
                break
            unseen &= ~new
            while new:
                column = (new & -new).bit_length() - 1
                parent[column] = row
                queue.append(row_of[column])
                new &= new - 1
        if end < 0:
            return None
        free &= ~(1 << end)
        while end >= 0:
            row = parent[end]
            row_of[end], column_of[row], end = row, end, column_of[row]
    return np.array(column_of)


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
    traffic = {pair: numel for pair, numel in sorted(traffic.items()) if numel}
    if not traffic:
        return []
    best, best_cost = [], float("inf")
    for bound, chunk in _levels(traffic, num_shards, latency)[:_MAX_TRIED]:
        if bound >= best_cost:
            break
        steps = []
        if chunk:
            steps.append(Step("all_to_all", chunk, {p: min(numel, chunk) for p, numel in traffic.items()}))
        rest = {pair: numel - chunk for pair, numel in traffic.items() if numel > chunk}
        steps = _plan_permutes(rest, num_shards, latency) + steps
        cost = steps_cost(steps, num_shards, latency)
        if cost < best_cost:
            best, best_cost = steps, cost
    return best


def _whole(traffic: Traffic, num_shards: int, latency: float) -> list[Step]:
    options = [colour(traffic, nested=nested) for nested in (True, False)]
    return min(options, key=lambda steps: steps_cost(steps, num_shards, latency))


def _plan_permutes(traffic: Traffic, num_shards: int, latency: float) -> list[Step]:
    """Permutes: first some that split messages so that no bandwidth is lost, then whole messages."""
    best = _whole(traffic, num_shards, latency)
    if not traffic or len(traffic) > _MAX_EDGES:
        return best
    best_cost = steps_cost(best, num_shards, latency)
    head: list[Step] = []
    looked = 0
    for step, rest in peel(traffic, num_shards):
        head.append(step)
        cost = steps_cost(head, num_shards, latency)
        degree = max([0, *Counter(i for i, _ in rest).values(), *Counter(j for _, j in rest).values()])
        looked += len(rest) * max(1, degree)
        if cost + most_numel(rest) + latency * degree >= best_cost or looked > _MAX_SPLITS:
            break
        whole = head + _whole(rest, num_shards, latency)
        if (total := steps_cost(whole, num_shards, latency)) < best_cost:
            best, best_cost = whole, total
    return best


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
