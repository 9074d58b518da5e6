"""Who works on what, and how it gets there: an exchange of slabs as tables that every device can follow.

Everything is counted in units, and what a device copies is a list of runs of them (see `fsdp/_runs.py`).
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from jax.sharding import PartitionSpec

from ..fsdp import Leaves, Unit, not_split
from ..fsdp._runs import Message, Runs, granule_of, in_units, profile_of
from ..layout import Bucket, Layout, Segment, segments
from ..planner import SHARDED, Exchange, Matrix, OwnerPlan, assign_owners, exchange
from ._forms import Form
from ._tensors import tensors_of

_OWNED, _SHARDED = "owned", "sharded"


@dataclass(frozen=True)
class Moves:
    """An exchange: messages, and where their units go. The pool of `put` is the source, then what was received."""

    messages: tuple[Message, ...]
    put: Runs


@dataclass(frozen=True)
class Class:
    """Items of one form, as many on each device as `counts` says.

    Attributes:
      form: of each.
      counts: for each device, how many it owns; for sharded items one number, of all.
      slots: the most that a device owns.
      shape: of the array that holds them on a device, `[slots, numel]`, or `[slots, rows, cols]` for the device's
        rows of sharded matrices.
      start: where that array starts in a device's buffer, in elements.
    """

    form: Form
    counts: tuple[int, ...]
    slots: int
    shape: tuple[int, ...]
    start: int

    @property
    def is_sharded(self) -> bool:
        return len(self.shape) == 3

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Owners:
    """The items of some slabs on one mesh, and the exchange that brings each to its owner and back.

    Attributes:
      unit: any of the slabs' units: says which mesh and axis.
      specs: partition specs of the slabs.
      leaves: indices of the slabs among the leaves of the tree.
      shapes: of their arrays on one device.
      classes: of the items.
      granule: elements of a unit.
      to_owners, back: the exchange and its reverse.
      plan: who owns what.
      sent_nbytes: the most that a device sends to the owners, padding included; as much comes back.
    """

    unit: Unit
    specs: tuple[PartitionSpec, ...]
    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    classes: tuple[Class, ...]
    granule: int
    to_owners: Moves
    back: Moves
    plan: OwnerPlan
    sent_nbytes: int

    @cached_property
    def order(self) -> str:
        """Which tensor lies in which slot of which device, in short: state of another order is another state."""
        lines = (f"{m.tensor}[{m.index}] {o} {s}" for m, o, s in zip(*self._placed, strict=True))
        text = "\n".join([self.unit.bucket.slabs[0].dtype, str(self.unit.shares), *lines])
        return f"on {self.unit.num_shards}, {hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def _placed(self) -> tuple:
        return self.plan.matrices, self.plan.owners, self.plan.slots

    def __hash__(self):  # part of a cache's key in every step
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.unit, self.leaves, self.shapes, self.classes, self.granule, self.to_owners))


@dataclass(frozen=True)
class _Item:
    tensor: str
    index: int
    form: Form

    @property
    def matrix(self) -> Matrix:
        return self.form.matrix(self.tensor, self.index)


Forms = tuple[tuple[int, Form], ...]
"""Indices of tensors, among all of the tree, with the form of their items."""


@lru_cache(maxsize=64)
def owners_of(leaves: Leaves, forms: Forms, *, shard: bool = True, tolerance: float = 0.05) -> tuple[Owners, ...]:
    """Plans the exchange of every slab that holds one of the tensors: one for each mesh and dtype.

    Args:
      leaves: of the tree.
      forms: of the tensors to bring to owners; those that are ordinary arrays are left out.
      shard: whether matrices that are too large for a fair share may be sharded.
      tolerance: how far above the mean a device's work may be.
    """
    tensors = tensors_of(leaves)
    groups: dict[tuple, list[tuple[int, Form]]] = defaultdict(list)
    used = {tensors[at].leaf for at, _ in forms}
    not_split(
        [leaf.of.slab for i, leaf in enumerate(leaves) if i in used and leaf.of is not None], "sending to owners"
    )
    for at, form in forms:
        leaf = leaves.leaves[tensors[at].leaf]
        if leaf.of is not None and form.numel:
            unit = leaf.of.unit
            groups[unit.mesh, unit.axes, unit.shares, leaf.dtype].append((at, form))
    return tuple(_plan(leaves, group, shard, tolerance) for group in groups.values())


def _plan(leaves: Leaves, forms: Sequence[tuple[int, Form]], shard: bool, tolerance: float) -> Owners:
    tensors = tensors_of(leaves)
    used = sorted({tensors[at].leaf for at, _ in forms})
    slabs = {at: leaves.leaves[at].of for at in used}
    unit = next(of.unit for of in slabs.values() if of is not None)
    layout = _layout(unit, {at: of for at, of in slabs.items() if of is not None})
    items = [
        _Item(f"{tensors[at].leaf}:{tensors[at].name}", index, form)
        for at, form in forms
        for index in range(tensors[at].numel // form.numel)
    ]
    plan, owners = _assign(items, layout, shard, tolerance)
    classes, wanted = _classes(items, owners, unit.num_shards)
    held = segments(layout, names={item.tensor for item in items}, order="stored")
    local = {
        at: unit.share * layout.bucket(str(at)).num_copies * layout.bucket(str(at)).slabs[0].shard_numel
        for at in used
    }
    granule = granule_of(
        held, wanted, [*local.values(), *(c.form.numel for c in classes), *(c.start for c in classes)]
    )
    made = exchange(
        in_units(held, granule),
        in_units(wanted, granule),
        profile_of(unit.mesh),
        dtype=leaves.leaves[used[0]].dtype,
        name="owners",
        num_copies=granule,
    )
    bases, end = {}, 0
    for at in used:
        bases[str(at), layout.bucket(str(at)).slabs[0].name] = end // granule
        end += local[at]
    total = max((c.stop for c in classes), default=0) // granule
    targets = {(kind, str(i)): c.start // granule for i, c in enumerate(classes) for kind in (_OWNED, _SHARDED)}
    return Owners(
        unit,
        tuple(of.unit.spec(of.slab) for of in slabs.values() if of is not None),
        tuple(used),
        tuple(_local_shape(leaves.leaves[at].of, unit) for at in used),
        classes,
        granule,
        _moves(made, bases, end // granule, targets, total),
        _moves(made.reversed(), targets, total, bases, end // granule),
        plan,
        made.sent_nbytes,
    )


def _local_shape(of, unit: Unit) -> tuple[int, ...]:
    shape, lead = of.unit.shape(of.slab), int(of.unit.stacked)
    return (*shape[:lead], shape[lead] // unit.num_shards, *shape[lead + 1 :])


def _layout(unit: Unit, slabs: dict) -> Layout:
    """The slabs as a layout in which no two tensors or buckets have the same name."""
    buckets = []
    for at, of in slabs.items():
        renamed = tuple(
            replace(p, tensor=replace(p.tensor, name=f"{at}:{p.tensor.name}")) for p in of.slab.placements
        )
        buckets.append(Bucket(str(at), (replace(of.slab, placements=renamed),), of.unit.bucket.stack))
    return Layout(unit.num_shards, tuple(buckets), unit.shares)


def _assign(items: list[_Item], layout: Layout, shard: bool, tolerance: float) -> tuple[OwnerPlan, dict]:
    """For each item its owner. What may not be sharded goes to the device with the least work."""
    by_matrix = {item.matrix: item for item in items}
    plan = assign_owners(by_matrix, layout.num_shards, layout=layout, tolerance=tolerance)
    plan = plan.settled(lambda m: shard and by_matrix[m].form.stored_matrix is not None)
    return plan, {by_matrix[m]: owner for m, owner in zip(plan.matrices, plan.owners, strict=True)}


def _classes(items: list[_Item], owners: dict, num: int) -> tuple[tuple[Class, ...], list[list[Segment]]]:
    """The classes, and for each device what it is to hold."""
    groups: dict[tuple[Form, bool], list[_Item]] = defaultdict(list)
    for item in items:
        groups[item.form, owners[item] == SHARDED].append(item)
    wanted: list[list[Segment]] = [[] for _ in range(num)]
    classes, end = [], 0
    for at, ((form, is_sharded), members) in enumerate(groups.items()):
        numel = form.numel
        if is_sharded and (stored := form.stored_matrix):
            own, cols = -(-stored[0] // num), stored[1]
            shape, counts = (len(members), own, cols), (len(members),)
            for slot, item in enumerate(members):
                first = item.index * numel
                for k in range(num):
                    low, high = (min(stored[0], i * own) * cols for i in (k, k + 1))
                    piece = Segment(item.tensor, first + low, first + high, (_SHARDED, str(at)), slot * own * cols)
                    wanted[k] += [piece] if low < high else []
        else:
            taken = [0] * num
            for item in members:
                k, first = owners[item], item.index * numel
                piece = Segment(item.tensor, first, first + numel, (_OWNED, str(at)), taken[k] * numel)
                wanted[k].append(piece)
                taken[k] += 1
            shape, counts = (max(taken), numel), tuple(taken)
        classes.append(Class(form, counts, shape[0], shape, end))
        end = classes[-1].stop
    return tuple(classes), wanted


def _moves(made: Exchange, sources: dict, pool: int, targets: dict, size: int) -> Moves:
    """An exchange as tables; `sources` and `targets` say where each buffer starts."""
    num, messages = made.num_shards, []
    puts = [
        (m.receiver, targets[m.target] + m.target_offset, sources[m.source] + m.source_offset, m.numel)
        for m in made.local
    ]
    received = pool
    for r in made.rounds:
        whole, takes = r.kind == "all_to_all", []
        for t in r.transfers:
            sent, got = (t.receiver * r.numel, t.sender * r.numel) if whole else (0, 0)
            for p in t.parts:
                takes.append((t.sender, sent + p.offset, sources[p.source] + p.source_offset, p.numel))
                place = targets[p.target] + p.target_offset
                puts.append((t.receiver, place, received + got + p.offset, p.numel))
        length = r.numel * (num if whole else 1)
        messages.append(Message(r.kind, r.numel, () if whole else r.pairs, Runs.of(length, pool, num, takes)))
        received += length
    return Moves(tuple(messages), Runs.of(size, received, num, puts))
