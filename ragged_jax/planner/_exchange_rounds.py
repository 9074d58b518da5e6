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
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

Traffic = Mapping[tuple[int, int], int]
"""Elements to move for each pair `(sender, receiver)` of different devices."""

Kind = Literal["permute", "all_to_all", "uneven_all_to_all"]

_MAX_LEVELS = 128  # sizes of the all-to-all chunk that are looked at
_MAX_TRIED = 6  # and for which permutes are planned
_MAX_EDGES = 1 << 14  # beyond it messages are not split between rounds, to stay fast
_MAX_SPLITS = 1 << 22  # edges times rounds that the splitting may look at


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

    Filled up until every device sends and receives the same, traffic is a sum of permutations (Birkhoff). A
    pair can be filled up by as much as both its ends have slack. Each round takes the permutation whose
    smallest filled entry is largest: the largest round after which the rest still fits in what is left.
    """
    rest = np.zeros((num_shards, num_shards), np.int64)
    for pair, numel in traffic.items():
        rest[pair] = numel
    senders = np.arange(num_shards)
    while rest.any():
        sent, received = rest.sum(1), rest.sum(0)
        left = max(sent.max(), received.max())
        filled = rest + np.minimum.outer(left - sent, left - received)
        size, receivers = _bottleneck_matching(filled, rest)
        amounts = np.minimum(rest[senders, receivers], size)
        rest[senders, receivers] -= amounts
        moved = {(i, int(receivers[i])): int(amounts[i]) for i in np.nonzero(amounts)[0].tolist()}
        yield _permute(moved), {(int(i), int(j)): int(rest[i, j]) for i, j in np.argwhere(rest)}


def _bottleneck_matching(filled: np.ndarray, rest: np.ndarray) -> tuple[int, np.ndarray]:
    """The largest size for which a perfect matching of entries so large exists, and for each row its column.

    Of those matchings, one that finishes many messages, so that fewer rounds are needed later.
    """
    sizes = np.unique(filled[filled > 0])
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _matching(filled >= sizes[middle]) is None:
            high = middle - 1
        else:
            low = middle
    size = int(sizes[low])
    allowed = filled >= size
    best = _matching(allowed & (rest > 0) & (rest <= size), allowed & (rest > 0), allowed)
    assert best is not None, "equal row and column sums always have a perfect matching"
    return size, best


def _matching(*layers: np.ndarray) -> np.ndarray | None:
    """A perfect matching of the last layer's entries that prefers those of the first; None if there is none.

    Augmenting paths, rows as bit sets. A row or column that is matched in one layer stays so in the next.
    """
    n = len(layers[0])
    row_of, column_of, free = [-1] * n, [-1] * n, (1 << n) - 1
    for allowed in layers:
        packed = np.packbits(allowed, axis=1, bitorder="little")
        bits = [int.from_bytes(row.tobytes(), "little") for row in packed]
        last = allowed is layers[-1]
        for root in range(n):
            if column_of[root] >= 0:
                continue
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
                if last:
                    return None
                continue
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
        steps = dissolve(_plan_permutes(rest, num_shards, latency), latency) + steps
        cost = steps_cost(steps, num_shards, latency)
        if cost < best_cost:
            best, best_cost = steps, cost
    return tuple(best)


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


def dissolve(steps: list[Step], latency: float) -> list[Step]:
    """The permutes without those whose messages fit into the others, where that saves time.

    A message may ride in any other round in which its pair has room left or both its ends are idle, and may
    lengthen it: all the rounds' sizes may grow together by less than the latency and the size saved.
    """
    rounds = [dict(step.amounts) for step in sorted(steps, key=lambda step: step.numel)]
    at = 0
    while at < len(rounds):
        others = [dict(amounts) for amounts in rounds[:at] + rounds[at + 1 :]]
        sizes = [max(amounts.values()) for amounts in others]
        budget = latency + max(rounds[at].values())
        for pair, numel in sorted(rounds[at].items(), key=lambda item: (-item[1], item[0])):
            open_to = [k for k, amounts in enumerate(others) if pair in amounts or not _touches(amounts, pair)]
            for grow in (False, True):
                for k in open_to:
                    taken = others[k].get(pair, 0)
                    amount = numel if grow else min(numel, sizes[k] - taken)
                    if amount > 0:
                        others[k][pair] = taken + amount
                        budget -= max(0, taken + amount - sizes[k])
                        sizes[k] = max(sizes[k], taken + amount)
                        numel -= amount
            if numel or budget <= 0:
                break
        else:
            rounds = others
            continue
        at += 1
    return [_permute(amounts) for amounts in rounds]


def _touches(amounts: Traffic, pair: tuple[int, int]) -> bool:
    return any(pair[0] == sender or pair[1] == receiver for sender, receiver in amounts)


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
