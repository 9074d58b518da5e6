"""Packing: offsets of several tensors in one slab, and the shard size that they need.

A slab of `num_shards` equal shards is one contiguous range. A tensor may start at any multiple of `unit` from
which every shard boundary inside it falls between two of its blocks. Sizes and offsets are in elements.
"""

import math
from collections.abc import Iterable, Sequence

from ..layout import TensorSpec

_FINE_CANDIDATES = 256  # shard sizes tried one by one above the bound before steps grow


def first_offset(position: int, tensor: TensorSpec, shard: int, unit: int) -> int:
    """The smallest legal start of `tensor` at or after `position` for shards of `shard` elements, or -1.

    The result never falls as `position` rises, which is why greedy placement is optimal for a given order.
    """
    numel, granularity = tensor.numel, tensor.granularity
    position = -(-position // unit) * unit
    if numel == 0:
        return position
    room = -position % shard or shard  # up to the next boundary
    if numel <= room:
        return position
    # One boundary inside: the start must agree with it modulo the granularity. More: so must the shard size.
    step = math.lcm(unit, granularity)
    if (room % math.gcd(unit, granularity)) == 0:
        start = _solve(position, room, unit, granularity, step)
        if start >= 0:
            inside = room - (start - position)
            if numel <= inside or numel - inside <= shard or shard % granularity == 0:
                return start
    boundary = position + room
    if numel <= shard or shard % granularity == 0:
        return boundary
    return -1 if unit % granularity == 0 else _later(boundary, tensor, shard, unit)


def _solve(position: int, room: int, unit: int, granularity: int, step: int) -> int:
    """The first multiple of `unit` at or after `position`, before the boundary `room` ahead, that lies a
    multiple of `granularity` ahead of that boundary; or -1."""
    for start in range(position, position + min(room, step), unit):
        if (position + room - start) % granularity == 0:
            return start
    return -1


def _later(boundary: int, tensor: TensorSpec, shard: int, unit: int) -> int:
    """For a tensor longer than a shard with two cuts at most: a start inside the shard after `boundary`."""
    numel, granularity = tensor.numel, tensor.granularity
    if numel > 2 * shard:
        return -1
    step = math.lcm(unit, granularity)
    start = _solve(boundary, shard, unit, granularity, step)
    last = boundary + shard - (numel - shard)  # from here on a single boundary lies inside
    if start < 0:
        return -1
    if start < last:
        start += -(-(last - start) // step) * step
    return start if start < boundary + shard else -1


def place(order: Sequence[TensorSpec], num_shards: int, shard: int, unit: int) -> list[int] | None:
    """Greedy offsets for tensors in the given order, or None when they do not fit."""
    offsets, position, end = [], 0, num_shards * shard
    for tensor in order:
        offset = first_offset(position, tensor, shard, unit)
        if offset < 0 or offset + tensor.numel > end:
            return None
        offsets.append(offset)
        position = offset + tensor.numel
    return offsets


def lower_bound(tensors: Iterable[TensorSpec], num_shards: int, unit: int) -> int:
    """A proven lower bound on the shard size of any single slab for these tensors, in elements.

    Three arguments: the elements must fit; the whole blocks of a tensor are spread over at most `num_shards`
    shards; and a tensor so long that two boundaries must fall into it forces its granularity to divide the
    shard size, for all such tensors together.
    """
    tensors = [t for t in tensors if t.numel]
    bound = -(-sum(t.numel for t in tensors) // num_shards)
    for t in tensors:
        bound = max(bound, -(-(t.numel // t.granularity) // num_shards) * t.granularity)
    while True:
        bound = -(-bound // unit) * unit
        forced = unit
        for t in tensors:
            if t.numel > bound + bound // t.granularity * t.granularity:
                forced = math.lcm(forced, t.granularity)
        rounded = -(-bound // forced) * forced
        if rounded == bound:
            return bound
        bound = rounded


def candidates(tensors: Sequence[TensorSpec], num_shards: int, unit: int) -> Iterable[int]:
    """Shard sizes worth trying, rising, from the bound to one that always fits.

    Whether a size fits is not monotone (a larger one may fail), so there is no bisection: small steps first,
    growing ones later, and among them every multiple of a granularity, where cuts are easy.
    """
    low = lower_bound(tensors, num_shards, unit)
    high = sum(-(-t.numel // unit) * unit for t in tensors)  # all on the first shard
    steps = {math.lcm(unit, t.granularity) for t in tensors}
    steps.add(math.lcm(*steps))
    tried = {min(low + i * unit, high) for i in range(_FINE_CANDIDATES)} | {high}
    for step in steps:
        tried |= {size for i in range(_FINE_CANDIDATES) if (size := (-(-low // step) + i) * step) <= high}
    size = low
    while size < high:
        tried.add(size)
        size += max(unit, size // 200 // unit * unit)
    return sorted(tried)


def pack(tensors: Sequence[TensorSpec], num_shards: int, unit: int) -> tuple[int, list[tuple[TensorSpec, int]]]:
    """The smallest shard size found for a single slab and where each tensor starts.

    Args:
      tensors: in any order; the result does not depend on it (names break ties).
      num_shards: shards of the slab.
      unit: starts and the shard size are multiples of it, in elements.

    Returns:
      The shard size in elements, and `(tensor, offset)` by rising offset.
    """
    by_name = sorted(tensors, key=lambda t: t.name)
    orders = [
        sorted(by_name, key=lambda t: (-t.granularity, -t.numel)),
        sorted(by_name, key=lambda t: (-t.numel, -t.granularity)),
        by_name,
    ]
    for shard in candidates(by_name, num_shards, unit):
        for order in orders:
            if (offsets := place(order, num_shards, shard, unit)) is not None:
                return shard, list(zip(order, offsets, strict=True))
    raise AssertionError("the largest candidate holds every tensor on one shard")
