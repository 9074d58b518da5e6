"""Permutes that move a given traffic: each device sends at most one message in a round, and receives one.

Finding the best ones is NP-hard (preemptive open shop with set-up times). Messages kept whole need the fewest
rounds but pad each other (`colour`); messages cut so that no bandwidth is lost need more rounds (`peel`). The
planner cuts for a while, moves the rest whole, and then removes rounds that fit into others (`dissolve`).
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ._traffic import Step, Traffic, most_messages, most_numel, permute, steps_cost

_MAX_EDGES = 1 << 14  # beyond it messages are not split between rounds, to stay fast
_MAX_SPLITS = 1 << 22  # edges times rounds that the splitting may look at


def plan_permutes(traffic: Traffic, num_shards: int, latency: float) -> list[Step]:
    """The permutes that take the least time found; `latency` in elements."""
    best = _whole(traffic, num_shards, latency)
    best_cost = steps_cost(best, num_shards, latency)
    if not traffic or len(traffic) > _MAX_EDGES:
        return dissolve(best, latency)
    cut: list[Step] = []
    looked = 0
    for step, rest in peel(traffic, num_shards):
        cut.append(step)
        messages = most_messages(rest)
        looked += len(rest) * max(1, messages)
        least = steps_cost(cut, num_shards, latency) + most_numel(rest) + latency * messages
        if least >= best_cost or looked > _MAX_SPLITS:
            break
        steps = cut + _whole(rest, num_shards, latency)
        if (cost := steps_cost(steps, num_shards, latency)) < best_cost:
            best, best_cost = steps, cost
    return dissolve(best, latency)


def _whole(traffic: Traffic, num_shards: int, latency: float) -> list[Step]:
    options = [colour(traffic, nested=nested) for nested in (True, False)]
    return min(options, key=lambda steps: steps_cost(steps, num_shards, latency))


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
    limit = 0 if nested else most_messages(traffic)
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
    return [permute(amounts) for amounts in rounds if amounts]


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
        yield permute(moved), {(int(i), int(j)): int(rest[i, j]) for i, j in np.argwhere(rest)}


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
        busy = [({(0, i) for i, _ in amounts} | {(1, j) for _, j in amounts}) for amounts in others]
        budget = latency + max(rounds[at].values())
        for pair, numel in sorted(rounds[at].items(), key=lambda item: (-item[1], item[0])):
            ends = {(0, pair[0]), (1, pair[1])}
            open_to = [k for k, amounts in enumerate(others) if pair in amounts or not busy[k] & ends]
            for grow in (False, True):
                for k in open_to:
                    taken = others[k].get(pair, 0)
                    amount = numel if grow else min(numel, sizes[k] - taken)
                    if amount > 0:
                        others[k][pair] = taken + amount
                        busy[k] |= ends
                        budget -= max(0, taken + amount - sizes[k])
                        sizes[k] = max(sizes[k], taken + amount)
                        numel -= amount
            if numel or budget <= 0:
                break
        else:
            rounds = others
            continue
        at += 1
    return [permute(amounts) for amounts in rounds]
