"""Where tensors may start in one slab, and the best order for a given shard size.

A slab is one contiguous range of `num_shards` equal shards. Everything here counts in *units*: the slab's row
width (times the alignment asked for), at whose multiples tensors start and shards end. A tensor of `n`
elements in blocks of `g` is, in units of `u` elements, a tensor of `ceil(n / u)` units that may be cut at
multiples of `lcm(u, g) / u` units: starts, boundaries and therefore their distance are multiples of `u`, and
`n <= room` says the same as `ceil(n / u) <= room / u` when the room is a multiple of `u`. So no other module
thinks about alignment.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Item(NamedTuple):
    """Equal tensors, in units.

    Attributes:
      size: units of one tensor, at least 1.
      grain: units between two legal cuts, counted from its start.
      tail: units at its end that no cut may touch, beyond what `grain` says (edge tiles).
      copies: how many there are.
    """

    size: int
    grain: int
    tail: int = 0
    copies: int = 1


Run = tuple[int, int]  # (index of an item, how many of it follow one another)


def first_offset(position: int, item: Item, shard: int) -> int | None:
    """The smallest legal start at or after `position`, or None when no start is legal.

    Two boundaries inside a tensor lie a multiple of `shard` apart, so they are both legal only where `grain`
    divides `shard`. In the shard of `position` the earliest start with a boundary inside is the one that cuts
    off the longest legal head; if that leaves too much for one more shard, so does every later start. A tensor
    that starts at a boundary meets the same question with a whole shard of room, and from there on all
    repeats. The result never falls as `position` rises: greedy placement is optimal for a given order.

    Example:
      >>> first_offset(3, Item(size=8, grain=4), shard=10)  # cut after 4 of 8 units
      6
      >>> first_offset(3, Item(size=8, grain=8), shard=10)  # not to be cut: moves to the next shard
      10
    """
    ahead = shard - position % shard
    for start, room in ((position, ahead), (position + ahead, shard)):
        if item.size <= room:
            return start
        head = _longest_head(room, item, shard)
        if head:
            return start + room - head
    return None


def _longest_head(room: int, item: Item, shard: int) -> int:
    """The most units, up to `room`, before a first boundary such that every boundary is legal; 0 if none."""
    size, grain, tail, _ = item
    head = min(room, size - max(tail, 1)) // grain * grain
    if size - head <= shard:
        return head
    if shard % grain:
        return 0
    if tail and (rest := (size - head - 1) % shard + 1) < tail:  # the last boundary falls into the tail
        more = -(-(tail - rest) // grain) * grain
        return max(0, head - more) if rest + more <= shard else 0
    return head


def place(items: Sequence[Item], runs: Iterable[Run], num_shards: int, shard: int) -> list[tuple[int, int]] | None:
    """Greedy starts for the runs in the given order: `(item, offset)` each, or None when they do not fit."""
    placed: list[tuple[int, int]] = []
    position, capacity = 0, num_shards * shard
    for index, count in runs:
        item = items[index]
        size = item.size
        seamless = not item.tail and size % item.grain == 0 and shard % item.grain == 0
        while count:
            start = first_offset(position, item, shard)
            if start is None or start + size > capacity:
                return None
            # From a start in step with the grain, equal tensors follow one another without a gap.
            follow = count if seamless and start % item.grain == 0 else 1
            position = start + follow * size
            if position > capacity:
                return None
            placed += [(index, offset) for offset in range(start, position, size)]
            count -= follow
    return placed


def best_fit(items: Sequence[Item], num_shards: int, shard: int) -> list[Run] | None:
    """An order found by always taking the item that leaves the smallest gap, the coarsest of equals.

    A good guess where the exact search is too long; None when it does not fit.
    """
    left = [item.copies for item in items]
    rank = sorted(range(len(items)), key=lambda i: (-items[i].grain, -items[i].size))
    runs: list[Run] = []
    position, capacity = 0, num_shards * shard
    while any(left):
        best, best_start = -1, capacity + 1
        for index in rank:
            if left[index]:
                start = first_offset(position, items[index], shard)
                if start is not None and start < best_start:
                    best, best_start = index, start
                    if start == position:
                        break
        if best < 0 or best_start + items[best].size > capacity:
            return None
        position = best_start + items[best].size
        left[best] -= 1
        if runs and runs[-1][0] == best:
            runs[-1] = (best, runs[-1][1] + 1)
        else:
            runs.append((best, 1))
    return runs


def num_states(items: Sequence[Item]) -> int:
    """Multisets of placed tensors that the exact search looks at."""
    states = 1
    for item in items:
        states *= item.copies + 1
    return states


def best_order(items: Sequence[Item], num_shards: int, shard: int) -> list[Run] | None:
    """The order whose greedy placement ends first; None proves that no order and no offsets fit.

    A dynamic programme over multisets of placed tensors. It is exact because `first_offset` is monotone: what
    is still to come can only gain when what is placed ends earlier.
    """
    strides, states = [], 1
    for item in items:
        strides.append(states)
        states *= item.copies + 1
    ends: list[int | None] = [None] * states
    came: list[int] = [-1] * states
    ends[0] = 0
    slack = num_shards * shard - sum(item.size * item.copies for item in items)
    used = [0] * states  # units of the tensors in each multiset: gaps may not exceed the slack
    steps = list(zip(range(len(items)), items, strides, strict=True))
    for state in range(states - 1):
        end = ends[state]
        if end is None:
            continue
        for index, item, stride in steps:
            if state // stride % (item.copies + 1) == item.copies:
                continue
            start = first_offset(end, item, shard)
            total = used[state] + item.size
            if start is None or start + item.size - total > slack:
                continue
            after = state + stride
            known = ends[after]
            if known is None or start + item.size < known:
                ends[after], came[after], used[after] = start + item.size, index, total
    if ends[-1] is None:
        return None
    order: list[Run] = []
    state = states - 1
    while state:
        index = came[state]
        order.append((index, 1))
        state -= strides[index]
    return order[::-1]
