"""Which tensors of a bucket share a slab: the division that costs least and never pads more than its rivals.

Tensors of equal granularity pack into one slab without loss: `ceil(blocks / num_shards)` blocks on each
shard, which is proven optimal and never more than cutting each tensor alone. Different granularities may fill
each other's gaps or force a large common multiple, so which of these *classes* share a slab is searched:
every set partition of up to six classes, best bound first, and pairwise merging beyond.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby
from typing import NamedTuple

from ._bound import capacity_bound, lower_bound
from ._cost import slab_seconds
from ._hardware import HardwareProfile
from ._pack import Packing, pack
from ._place import Item

_MAX_CLASSES = 6  # 203 set partitions; 7 have 877


class Member(NamedTuple):
    """Equal tensors of one bucket. Sizes in elements.

    Attributes:
      kind: which kind of tensor, an index of the caller's.
      numel: elements of one tensor.
      granularity: elements between two legal cuts.
      tail: elements at the end that no cut may touch.
      row: elements of its own rows; 0 for a vector, which has none.
      fit: what the width of a slab that holds it must divide.
      copies: how many there are.
    """

    kind: int
    numel: int
    granularity: int
    tail: int
    row: int
    fit: int
    copies: int


class Filled(NamedTuple):
    """A slab and what lies in it.

    Attributes:
      width: elements of a row.
      shard_numel: elements on each shard.
      bound_numel: the slab's proven lower bound, in elements.
      placed: `(index of a kind, offset in elements)` by rising offset.
      sole: the tensor keeps its shape.
    """

    width: int
    shard_numel: int
    bound_numel: int
    placed: tuple[tuple[int, int], ...]
    sole: bool = False


@dataclass(frozen=True)
class Pool:
    """Members that share a slab, with their packing worked out when asked for."""

    members: tuple[Member, ...]
    num_shards: int
    itemsize: int
    align: int
    profile: HardwareProfile

    @cached_property
    def width(self) -> int:
        """The largest row that fits all; vectors alone lie flat."""
        if not any(member.row for member in self.members):
            return 1
        return math.gcd(*(member.fit for member in self.members)) or 1

    @cached_property
    def unit(self) -> int:
        alone = len(self.members) == 1 == self.members[0].copies
        return self.width if alone else math.lcm(self.width, self.align)

    @cached_property
    def items(self) -> list[Item]:
        return [to_item(member, self.unit) for member in self.members if member.numel]

    @cached_property
    def bound_numel(self) -> int:
        return self.unit * lower_bound(self.items, self.num_shards) if self.items else 0

    @cached_property
    def packing(self) -> Packing:
        return pack(self.items, self.num_shards)

    @cached_property
    def shard_numel(self) -> int:
        return self.unit * self.packing.shard

    def seconds(self, shard_numel: int) -> float:
        nbytes = self.itemsize * sum(member.numel * member.copies for member in self.members)
        exact = len(self.members) == 1 == self.members[0].copies
        copied = 0 if exact and shard_numel * self.num_shards == self.members[0].numel else nbytes
        relaid = sum(m.numel * m.copies for m in self.members if m.row not in (0, self.width))
        return slab_seconds(
            self.profile, self.num_shards, shard_numel * self.itemsize, copied, relaid * self.itemsize
        )

    def filled(self) -> Filled:
        real = [member for member in self.members if member.numel]
        empty = [(m.kind, 0) for m in self.members if not m.numel for _ in range(m.copies)]
        placed = [(real[item].kind, offset * self.unit) for item, offset in self.packing.placed]
        return Filled(self.width, self.shard_numel, self.unit * self.packing.bound, tuple(empty + placed))


def to_item(member: Member, unit: int) -> Item:
    """The member in units; see `_place` for why this loses nothing."""
    size = -(-member.numel // unit)
    grain = math.lcm(unit, member.granularity) // unit
    if not member.tail:
        return Item(size, grain, 0, member.copies)
    body = (member.numel - member.tail) // (unit * grain) * grain
    return Item(size, grain, size - body, member.copies)


def divide(
    members: Sequence[Member],
    alone: Sequence[Member],
    num_shards: int,
    itemsize: int,
    align: int,
    profile: HardwareProfile,
) -> list[Pool]:
    """Divides members of one dtype into pools.

    Args:
      members: those that must share slabs or be padded.
      alone: those that divide without padding into slabs of their own. They come back only where filling gaps
        with them costs less than the copies that this takes.
      num_shards: shards of each slab.
      itemsize: bytes of an element.
      align: tensors in a slab with others start at multiples of it, in elements.
      profile: what the cost is weighed by.

    Returns:
      The pools; tensors of `alone` that are in none keep their own slabs.
    """
    apart = _search(members, num_shards, itemsize, align, profile)
    if not alone or not members:
        return apart
    together = [*members, *alone]
    padded = sum(pool.shard_numel for pool in apart) + sum(m.numel * m.copies for m in alone) // num_shards
    floor = capacity_bound([to_item(member, 1) for member in together if member.numel], num_shards)
    seconds = sum(pool.seconds(pool.shard_numel) for pool in apart)
    for member in alone:
        shard_nbytes = member.numel // num_shards * itemsize
        seconds += member.copies * slab_seconds(profile, num_shards, shard_nbytes, 0, 0)
    nbytes = itemsize * sum(member.numel * member.copies for member in together)
    if slab_seconds(profile, num_shards, floor * itemsize, nbytes, 0) >= seconds:
        return apart
    pools = _search(together, num_shards, itemsize, align, profile)
    better = sum(pool.seconds(pool.shard_numel) for pool in pools) < seconds
    return pools if better and sum(pool.shard_numel for pool in pools) <= padded else apart


def _search(
    members: Sequence[Member], num_shards: int, itemsize: int, align: int, profile: HardwareProfile
) -> list[Pool]:
    """The cheapest division into pools among those that need no more than a slab for each class, and no more
    than one slab for all."""
    by_class = sorted(members, key=lambda m: (-m.granularity, -m.numel, m.kind))
    classes = [tuple(group) for _, group in groupby(by_class, key=lambda m: m.granularity)]
    known: dict[int, Pool] = {}

    def pool(mask: int) -> Pool:
        if mask not in known:
            chosen = tuple(m for bit, group in enumerate(classes) if mask >> bit & 1 for m in group)
            known[mask] = Pool(chosen, num_shards, itemsize, align, profile)
        return known[mask]

    def bound(masks: Sequence[int]) -> float:
        return sum(pool(mask).seconds(pool(mask).bound_numel) for mask in masks)

    def numel(masks: Sequence[int]) -> int:
        return sum(pool(mask).shard_numel for mask in masks)

    def seconds(masks: Sequence[int]) -> float:
        return sum(pool(mask).seconds(pool(mask).shard_numel) for mask in masks)

    singles = tuple(1 << bit for bit in range(len(classes)))
    whole = (sum(singles),)
    best = singles
    if not singles or len(singles) == 1:
        return [pool(mask) for mask in singles]
    cap = numel(singles)
    if pool(whole[0]).bound_numel < cap and numel(whole) < cap:
        best, cap = whole, numel(whole)
    cost = seconds(best)
    divisions = list(_partitions(singles)) if len(singles) <= _MAX_CLASSES else _merges(singles, bound)
    for lower, masks in sorted((bound(masks), masks) for masks in divisions):
        if lower >= cost:
            break
        if numel(masks) <= cap and seconds(masks) < cost:
            best, cost = masks, seconds(masks)
    return [pool(mask) for mask in best]


def _partitions(singles: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every division of the classes into pools."""
    if not singles:
        yield ()
        return
    first, rest = singles[0], singles[1:]
    for division in _partitions(rest):
        yield (first, *division)
        for i, mask in enumerate(division):
            yield (*division[:i], mask | first, *division[i + 1 :])


def _merges(singles: tuple[int, ...], bound) -> Iterator[tuple[int, ...]]:
    """The divisions on the way from one pool for each class to one for all, merging the best pair each time."""
    masks = singles
    while len(masks) > 1:
        yield masks
        pairs = ((*(m for m in masks if m not in pair), pair[0] | pair[1]) for pair in combinations(masks, 2))
        masks = min(pairs, key=lambda division: (bound(division), division))
    yield masks
