"""One bucket from one group: which tensors are alike, and which have slabs of their own."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Literal

from ..layout import (
    Block,
    Bucket,
    Placement,
    Slab,
    Split,
    TensorSpec,
    can_be_tiled,
    cuts,
    itemsize,
    tile_regions,
)
from ._bound import capacity_bound
from ._cost import slab_seconds, untile_copies
from ._group import Group
from ._hardware import HardwareProfile
from ._place import Item
from ._report import BucketReport
from ._slabs import Divider, Filled, Member

Storage = Literal["row_major", "tiled", "auto"]
AxisOrder = Literal["natural", "auto"] | Mapping[str, tuple[int, ...]]

_Kind = tuple[str, str, tuple[int, ...], str, tuple[Split, ...], tuple[int, ...]]
"""Label, dtype, shape, block, splits, wanted order: no more tells tensors apart."""


class BucketPlanner:
    """Plans groups one by one; equal ones, such as layers, once."""

    def __init__(
        self,
        *,
        num_shards: int,
        min_nbytes: int,
        align_nbytes: int,
        profile: HardwareProfile,
        storage: Storage,
        axis_order: AxisOrder,
    ):
        self.num_shards, self.min_nbytes, self.align_nbytes = num_shards, min_nbytes, align_nbytes
        self.profile, self.storage = profile, storage
        self.axis_order: AxisOrder = axis_order
        self._texts: dict[Block, str] = {}
        self._known: dict[tuple[tuple[_Kind, int], ...], tuple[list[tuple[str, Filled]], BucketReport]] = {}

    def bucket(self, group: Group) -> tuple[Bucket, BucketReport]:
        by_kind: dict[_Kind, list[TensorSpec]] = {}
        texts: dict[int, str] = {}  # by identity, which spares hashing a block that many tensors share
        for tensor in sorted(group.tensors, key=attrgetter("name")):
            block = tensor.block
            text = texts.get(id(block))
            if text is None:
                text = texts[id(block)] = self._texts.get(block) or self._texts.setdefault(block, repr(block))
            order = wanted_order(tensor, self.axis_order)
            kind = (tensor.label, tensor.dtype, tensor.shape, text, tensor.splits, order)
            by_kind.setdefault(kind, []).append(tensor)
        kinds = sorted(by_kind)
        signature = tuple([(kind, len(by_kind[kind])) for kind in kinds])
        if signature not in self._known:
            self._known[signature] = self._template(
                [by_kind[kind][0] for kind in kinds], [count for _, count in signature]
            )
        template, report = self._known[signature]
        tensors = [iter(by_kind[kind]) for kind in kinds]
        slabs, names = [], Counter()
        for dtype, filled in template:
            if filled.axis_order:
                placements = (Placement(next(tensors[filled.placed[0][0]]), 0, axis_order=filled.axis_order),)
            elif filled.tiled:
                placements = tuple(
                    Placement(next(tensors[kind]), offset, "tiled" if kind in filled.tiled else "row_major")
                    for kind, offset in filled.placed
                )
            else:
                placements = tuple([Placement(next(tensors[kind]), offset) for kind, offset in filled.placed])
            if filled.sole:
                name = placements[0].tensor.name
            else:
                first = placements[0].tensor
                parts = (first.label, "-".join(axis for axis, _ in first.split_axes), f"{dtype}x{filled.width}")
                name = ".".join(filter(None, parts))
                names[name] += 1
                name += f".{names[name]}" if names[name] > 1 else ""
            rows = filled.shard_numel // filled.width
            slabs.append(Slab(name, dtype, rows, filled.width, placements, filled.sole))
        return Bucket(group.name, tuple(slabs), group.stack), report.named(group.name, group.stack)

    def _template(
        self, tensors: Sequence[TensorSpec], copies: Sequence[int]
    ) -> tuple[list[tuple[str, Filled]], BucketReport]:
        """The slabs for so many tensors of each kind, and the figures of one layer of them."""
        slabs = self._cheapest(tensors, copies)
        items = [item for t, count in zip(tensors, copies, strict=True) for item in _free_items(t, count)]
        shard_nbytes = sum(f.shard_numel * itemsize(dtype) for dtype, f in slabs)
        num_sole = sum(f.sole for _, f in slabs)
        report = BucketReport(
            name="",
            num_sole=num_sole,
            num_packed=sum(copies) - num_sole,
            payload_nbytes=sum(item.size * item.copies for item in items),
            shard_nbytes=shard_nbytes,
            bound_nbytes=sum(f.bound_numel * itemsize(dtype) for dtype, f in slabs),
            floor_nbytes=capacity_bound(items, self.num_shards) if items else 0,
            unshard_nbytes=self.num_shards * shard_nbytes,
        )
        return slabs, report

    def _cheapest(self, tensors: Sequence[TensorSpec], copies: Sequence[int]) -> list[tuple[str, Filled]]:
        """The cheapest of the ways to read the tensors that the profile and the storage allow."""
        ways = [self._members(tensors, copies, wide=False, tiled=self.storage == "tiled")]
        if self.profile.tile is not None:
            ways.append(self._members(tensors, copies, wide=True, tiled=self.storage == "tiled"))
        if self.storage == "auto":
            ways.append(self._members(tensors, copies, wide=False, tiled=True))
        return min((self._fill(tensors, members) for members in ways), key=lambda way: way[1])[0]

    def _members(
        self, tensors: Sequence[TensorSpec], copies: Sequence[int], *, wide: bool, tiled: bool
    ) -> list[Member]:
        """One member for each kind; see `_member`."""
        members = []
        for kind, (tensor, count) in enumerate(zip(tensors, copies, strict=True)):
            member = _member(kind, tensor, count, wide)
            keep = self.storage == "auto" and self._divides(member, tensor.nbytes)
            if tiled and not keep and can_be_tiled(tensor):
                member = _tiled_member(kind, tensor, count, self.profile)
            members.append(member)
        return members

    def _fill(
        self, tensors: Sequence[TensorSpec], all_members: Sequence[Member]
    ) -> tuple[list[tuple[str, Filled]], float]:
        """The slabs as `(dtype, slab)` and what they cost a step, for one tensor and member of each kind."""
        filled: list[tuple[str, Filled]] = []
        seconds = 0.0
        pools: dict[tuple[str, str, Any], tuple[list[Member], list[Member]]] = defaultdict(lambda: ([], []))
        for tensor, member in zip(tensors, all_members, strict=True):
            members, alone = pools[tensor.dtype, tensor.label, tensor.split_axes]
            # Where tensors are views of a slab, one of their own would only be a message more.
            apart = self.profile.unpack_copies and self._divides(member, tensor.nbytes)
            (alone if apart else members).append(member)
        for (dtype, *_), (members, alone) in sorted(pools.items()):
            size = itemsize(dtype)
            align = max(1, self.align_nbytes // size)
            chosen = Divider(self.num_shards, size, align, self.profile).divide(members, alone)
            pooled = {member.kind for pool in chosen for member in pool.members}
            for member in alone:
                if member.kind not in pooled:
                    slab = self._own_slab(member, tensors[member.kind])
                    filled += [(dtype, slab)] * member.copies
                    nbytes = member.numel * size
                    relaid = 0 if slab.sole or member.tiled or member.row in (0, slab.width) else nbytes
                    untiled = nbytes * member.untile
                    cost = slab_seconds(self.profile, self.num_shards, slab.shard_numel * size, 0, relaid, untiled)
                    seconds += member.copies * cost
            filled += [(dtype, pool.filled()) for pool in chosen]
            seconds += sum(pool.seconds(pool.shard_numel) for pool in chosen)
        return filled, seconds

    def _divides(self, member: Member, nbytes: int) -> bool:
        """Whether each shard can hold the same number of whole blocks, in a slab worth gathering."""
        if member.numel == 0 or nbytes < self.min_nbytes or member.numel % self.num_shards:
            return False
        if self.num_shards == 1:
            return True
        return not member.tail and member.numel // self.num_shards % member.granularity == 0

    def _own_slab(self, member: Member, tensor: TensorSpec) -> Filled:
        """A slab that the tensor fills without padding, in its natural shape where dim 0 divides."""
        shard_numel = tensor.numel // self.num_shards
        tiled = frozenset([member.kind] if member.tiled else [])
        placed = ((member.kind, 0),)
        if not member.tiled and (order := self._axis_order(tensor)):
            width = tensor.numel // tensor.shape[order[0]]
            transposed = None if order == tuple(range(len(order))) else order
            return Filled(width, shard_numel, shard_numel, placed, tiled, True, transposed)
        width = math.gcd(member.fit, shard_numel) if member.row else 1
        return Filled(width, shard_numel, shard_numel, placed, tiled)

    def _axis_order(self, tensor: TensorSpec) -> tuple[int, ...] | None:
        """The dims with one in front that divides: the first, or another where that is asked for and elements
        may be cut anywhere. None: there is none."""
        dims = tuple(range(len(tensor.shape)))
        orders = [(front, *dims[:front], *dims[front + 1 :]) for front in dims]
        if tensor.granularity > 1:
            orders = orders[:1]
        elif self.axis_order != "auto":
            orders = [order for order in (wanted_order(tensor, self.axis_order), dims) if order]
        return next((order for order in orders if tensor.shape[order[0]] % self.num_shards == 0), None)


def wanted_order(tensor: TensorSpec, axis_order: AxisOrder) -> tuple[int, ...]:
    """The order of the first pattern that the tensor's name matches, or none."""
    if isinstance(axis_order, str):
        return ()
    return next((tuple(order) for p, order in axis_order.items() if fnmatchcase(tensor.name, p)), ())


def _member(index: int, tensor: TensorSpec, copies: int, wide: bool) -> Member:
    shape, block, numel, granularity = tensor.shape, tensor.block, tensor.numel, tensor.granularity
    if len(shape) < 2 or numel == 0:
        return Member(index, numel, granularity, 0, 0, numel, copies)
    row = math.prod(shape[block.dim + 1 :]) if block.kind == "rows" else shape[-1]
    if wide:
        return Member(index, numel, math.lcm(granularity, row), 0, row, row, copies)
    return Member(index, numel, granularity, 0, row, math.gcd(row, granularity), copies)


def _tiled_member(index: int, tensor: TensorSpec, copies: int, profile: HardwareProfile) -> Member:
    """The tensor stored tile by tile, in rows of one tile's width."""
    granularity, tail = cuts(tensor, "tiled")
    row = min(tensor.block.size[1], tensor.shape[-1])
    untile = untile_copies(profile, *tensor.block.size)
    return Member(index, tensor.numel, granularity, tail, row, math.gcd(row, tensor.numel), copies, True, untile)


def _free_items(tensor: TensorSpec, copies: int) -> list[Item]:
    """The tensor in bytes, as blocks that may lie anywhere. A tile is one wherever its rows are."""
    if not tensor.numel:
        return []
    size = itemsize(tensor.dtype)
    if not can_be_tiled(tensor):
        return [Item(tensor.nbytes, tensor.granularity * size, 0, copies)]
    return [Item(r.numel * size, r.tile_numel * size, 0, copies) for r in tile_regions(tensor)]
