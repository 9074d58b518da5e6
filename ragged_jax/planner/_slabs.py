"""Which tensors of a bucket share a slab: the division that costs least and never pads more than its rivals.

Tensors of equal granularity pack into one slab without loss: `ceil(blocks / num_shards)` blocks on each
shard, which is proven optimal and never more than cutting each tensor alone. Different granularities may fill
each other's gaps or force a large common multiple, so which of these *classes* share a slab is searched:
every set partition of up to six classes, best bound first, and pairwise merging beyond.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, groupby
from typing import NamedTuple

from ._bound import capacity_bound, lower_bound
from ._cost import slab_seconds
from ._hardware import HardwareProfile
from ._pack import Packing, pack
from ._place import Item

_MAX_CLASSES = 6  # 203 set partitions; 7 have 877
_MAX_GIANTS = 4  # kinds that may be set apart from the rest for their size
_WORTH = 1e-3  # a gain below this part of a bucket's cost is not worth a search


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
      tiled: whether it is stored tile by tile.
      untile: how many copies it then takes to read it.
    """

    kind: int
    numel: int
    granularity: int
    tail: int
    row: int
    fit: int
    copies: int
    tiled: bool = False
    untile: int = 0


class Filled(NamedTuple):
    """A slab and what lies in it.

    Attributes:
      width: elements of a row.
      shard_numel: elements on each shard.
      bound_numel: the slab's proven lower bound, in elements.
      placed: `(index of a kind, offset in elements)` by rising offset.
      tiled: the kinds that are stored tile by tile.
      sole: the tensor keeps its shape.
      axis_order: or has its dims in this order.
    """

    width: int
    shard_numel: int
    bound_numel: int
    placed: tuple[tuple[int, int], ...]
    tiled: frozenset[int] = frozenset()
    sole: bool = False
    axis_order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Pool:
    """Members that share a slab, with their packing worked out when asked for."""

    members: tuple[Member, ...]
    num_shards: int
    itemsize: int
    align: int
    profile: HardwareProfile
    limit_numel: int | None = None

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
    def packing(self) -> Packing | None:
        """The tensors' places; None when they need more than `limit_numel`."""
        return pack(self.items, self.num_shards, self.limit_numel and self.limit_numel // self.unit)

    @cached_property
    def shard_numel(self) -> int:
        assert self.packing is not None
        return self.unit * self.packing.shard

    def numel(self, at_bound: bool) -> int:
        """Elements on each shard, or the bound on them, which is cheap to know."""
        return self.bound_numel if at_bound else self.shard_numel

    @property
    def is_possible(self) -> bool:
        """Whether the tensors fit within the limit."""
        if self.limit_numel is not None and self.bound_numel > self.limit_numel:
            return False
        return self.packing is not None

    def seconds(self, shard_numel: int) -> float:
        """What the slab costs a step when each shard has so many elements."""
        copied, relaid, untiled = self._moved
        if shard_numel * self.num_shards == copied and len(self.members) == 1 == self.members[0].copies:
            copied = 0  # the tensor is the slab
        numels = (shard_numel, copied, relaid, untiled)
        return slab_seconds(self.profile, self.num_shards, *(numel * self.itemsize for numel in numels))

    @cached_property
    def _moved(self) -> tuple[int, int, int]:
        """Elements that are sliced out, of tensors with other rows than the slab's, and written to un-tile."""
        copied = relaid = untiled = 0
        for m in self.members:
            if m.tiled:
                untiled += m.numel * m.copies * m.untile
            else:
                copied += m.numel * m.copies
                relaid += m.numel * m.copies * (m.row not in (0, self.width))
        return copied, relaid, untiled

    def filled(self) -> Filled:
        assert self.packing is not None
        real = [member for member in self.members if member.numel]
        empty = [(m.kind, 0) for m in self.members if not m.numel for _ in range(m.copies)]
        placed = [(real[item].kind, offset * self.unit) for item, offset in self.packing.placed]
        tiled = frozenset(m.kind for m in self.members if m.tiled)
        return Filled(self.width, self.shard_numel, self.unit * self.packing.bound, tuple(empty + placed), tiled)


def to_item(member: Member, unit: int) -> Item:
    """The member in units; see `_place` for why this loses nothing."""
    size = -(-member.numel // unit)
    grain = math.lcm(unit, member.granularity) // unit
    if not member.tail:
        return Item(size, grain, 0, member.copies)
    body = (member.numel - member.tail) // (unit * grain) * grain
    return Item(size, grain, size - body, member.copies)


@dataclass(frozen=True)
class Divider:
    """Divides members of one dtype into pools.

    Attributes:
      num_shards: shards of each slab.
      itemsize: bytes of an element.
      align: tensors in a slab with others start at multiples of it, in elements.
      profile: what costs are weighed by.
    """

    num_shards: int
    itemsize: int
    align: int
    profile: HardwareProfile

    def divide(self, members: Sequence[Member], alone: Sequence[Member]) -> list[Pool]:
        """The cheapest division.

        Args:
          members: those that must share slabs or be padded.
          alone: those that divide without padding into slabs of their own.

        Returns:
          The pools. Tensors of `alone` that are in none keep slabs of their own; where filling gaps with them
          is what it takes to need no more than the usual rule, some are pooled.
        """
        apart = self._giants_apart(members, self._search(members, frozenset()))
        if not alone or not members:
            return apart
        needed = sum(p.shard_numel for p in apart) + sum(m.numel * m.copies for m in alone) // self.num_shards
        together = [*members, *alone]
        if _usual_size(together, self.num_shards) >= needed:
            return apart
        filled = self._search(together, frozenset(m.kind for m in alone))
        pooled = {m.kind for pool in filled for m in pool.members}
        left = sum(m.numel * m.copies for m in alone if m.kind not in pooled) // self.num_shards
        return filled if sum(pool.shard_numel for pool in filled) + left < needed else apart

    def _giants_apart(self, members: Sequence[Member], pools: list[Pool]) -> list[Pool]:
        """The pools, or the largest kinds in one pool and the rest divided anew where that pads less.

        A few kinds (experts) may be most of a bucket; a common multiple that they bear well need not be forced
        on the rest, even where granularities are the same.
        """
        needed = sum(pool.shard_numel for pool in pools)
        by_size = sorted((m for m in members if m.numel), key=lambda m: (-m.numel * m.copies, m.kind))
        for k in range(1, min(len(by_size), _MAX_GIANTS + 1)):
            giants, rest = tuple(by_size[:k]), by_size[k:]
            least = capacity_bound([to_item(m, 1) for m in rest], self.num_shards)
            pool = self._pool(giants, needed - least - 1)
            if pool.is_possible:
                divided = [pool, *self._search([m for m in members if m not in giants], frozenset())]
                if (numel := sum(pool.shard_numel for pool in divided)) < needed:
                    pools, needed = divided, numel
        return pools

    def _pool(self, members: tuple[Member, ...], limit: int | None) -> Pool:
        return Pool(members, self.num_shards, self.itemsize, self.align, self.profile, limit)

    def _search(self, members: Sequence[Member], alone: frozenset[int]) -> list[Pool]:
        """The cheapest division of classes among those where no pool needs more than its classes apart, and
        all together no more than one pool of all. A class that stays apart leaves out its kinds in `alone`."""
        by_class = sorted(members, key=lambda m: (-m.granularity, -m.numel, m.kind))
        classes = [tuple(group) for _, group in groupby(by_class, key=lambda m: m.granularity)]
        if not classes:
            return []
        singles = tuple(1 << bit for bit in range(len(classes)))
        known = {mask: self._pool(group, None) for mask, group in zip(singles, classes, strict=True)}
        rests = {mask: self._rest(known[mask], alone) for mask in singles}

        def pool(mask: int) -> Pool:
            if mask not in known:
                bits = [bit for bit in singles if mask & bit]
                apart = sum(known[bit].shard_numel for bit in bits)
                known[mask] = self._pool(tuple(m for bit in bits for m in known[bit].members), apart)
            return known[mask]

        def seconds(masks: Sequence[int], *, at_bound: bool = False) -> float:
            pools = (pool(mask) for mask in masks if mask not in rests)
            apart = sum(rests[mask][1] for mask in masks if mask in rests)
            return apart + sum(p.seconds(p.numel(at_bound)) for p in pools)

        best, cost = singles, seconds(singles)
        cap = sum(pool(mask).shard_numel for mask in singles)
        if len(singles) > 1:
            whole = (sum(singles),)
            if pool(*whole).is_possible:
                best, cost, cap = whole, seconds(whole), pool(*whole).shard_numel
            lower = partial(seconds, at_bound=True)
            divisions = _partitions(singles) if len(singles) <= _MAX_CLASSES else _merges(singles, lower)
            for bound, masks in sorted((lower(masks), masks) for masks in divisions):
                if bound >= cost * (1 - _WORTH):
                    break
                if not all(pool(mask).is_possible for mask in masks) or seconds(masks) >= cost:
                    continue
                if sum(pool(mask).shard_numel for mask in masks) <= cap:
                    best, cost = masks, seconds(masks)
        pools = [rests[mask][0] if mask in rests else known[mask] for mask in best]
        return [pool for pool in pools if pool is not None]

    def _rest(self, pool: Pool, alone: frozenset[int]) -> tuple[Pool | None, float]:
        """What is left of a class when its kinds in `alone` have slabs of their own, and the cost of it all."""
        rest = tuple(m for m in pool.members if m.kind not in alone)
        if len(rest) == len(pool.members):
            return pool, pool.seconds(pool.shard_numel)
        seconds = 0.0
        for m in pool.members:
            if m.kind in alone:
                shard_nbytes = m.numel // self.num_shards * self.itemsize
                seconds += m.copies * slab_seconds(self.profile, self.num_shards, shard_nbytes)
        left = self._pool(rest, None) if rest else None
        return left, seconds + (left.seconds(left.shard_numel) if left else 0.0)


def _usual_size(members: Sequence[Member], num_shards: int) -> int:
    """A lower bound, in elements, on the shard that Megatron-FSDP's rule arrives at for one buffer of all: its
    size is a multiple of a chunk, the common multiple of the rows of tensors that do not fit otherwise."""
    by_row = sorted((m for m in members if m.numel), key=lambda m: -m.granularity)
    if not by_row:
        return 0
    chunk = by_row[0].granularity
    for m in by_row:
        fits = chunk % m.granularity == 0 and m.numel % chunk == 0
        if m.granularity != chunk and not fits and m.numel >= chunk:
            chunk = math.lcm(chunk, m.granularity)
    total = sum(m.numel * m.copies for m in members)
    return -(-total // (num_shards * chunk)) * chunk


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


def _merges(singles: tuple[int, ...], bound: Callable[[Sequence[int]], float]) -> Iterator[tuple[int, ...]]:
    """The divisions on the way from one pool for each class to one for all, merging the best pair each time."""
    masks = singles
    while len(masks) > 1:
        yield masks
        pairs = ((*(m for m in masks if m not in pair), sum(pair)) for pair in combinations(masks, 2))
        masks = min(pairs, key=lambda division: (bound(division), division))
    yield masks
