"""`plan`: from the tensors of a model to its layout."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..layout import Block, Bucket, Layout, Placement, Slab, TensorSpec, itemsize
from ._bound import capacity_bound
from ._cost import slab_seconds
from ._hardware import HardwareProfile, hardware
from ._place import Item
from ._report import BucketReport, Plan
from ._slabs import Divider, Filled, Member

_Kind = tuple[str, tuple[int, ...], str]  # dtype, shape and block: the planner tells tensors apart by no more


@dataclass(frozen=True, slots=True)
class Group:
    """The tensors that are gathered together: what the planner turns into a bucket.

    Attributes:
      name: the module's path; empty for the root.
      tensors: its tensors, unsharded.
      stack: how many layers lie stacked under a scan; shapes are those of one layer.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    stack: int | None = None


def plan(
    groups: Sequence[Group],
    num_shards: int,
    *,
    profile: HardwareProfile | str = "h100",
    min_slab_nbytes: int = 1 << 16,
    align_nbytes: int | None = None,
) -> Plan:
    """Chooses where every tensor lies: deterministic, the same on every rank.

    A tensor whose blocks divide evenly over the shards along dim 0 keeps its natural shape in a slab of its
    own: no padding, no copy. The rest shares slabs, with others of the same granularity or where that fills
    gaps, at planned offsets. No bucket takes more bytes than cutting each of its tensors by itself would, in
    whole blocks along dim 0, nor than one slab for all that does not divide.

    Args:
      groups: the tensors of each bucket, in the order in which the forward pass needs them. The order of the
        tensors in a group does not matter.
      num_shards: devices that share the model.
      profile: the machine by which slabs are chosen, or its name in `PROFILES`.
      min_slab_nbytes: below this many unsharded bytes a tensor does not deserve a slab of its own.
      align_nbytes: tensors that share a slab start at multiples of it. By default 16 where tensors are views
        of the slab (torch), else nothing: XLA slices them out.

    Returns:
      The layout with its report.

    Raises:
      ValueError: no shards, or names that repeat, all of them named.

    Example:
      >>> from ragged_jax.layout import TensorSpec, rows
      >>> kernel = TensorSpec("mlp/kernel", (1024, 256), "float32", rows(32))
      >>> bias = TensorSpec("mlp/bias", (256,), "float32")
      >>> plan([Group("mlp", (kernel, bias))], num_shards=8).layout
      Layout(2 tensors in 1 buckets over 8 shards, 131200 bytes each, padding 0.00 %)
    """
    if type(num_shards) is not int or num_shards < 1:
        raise ValueError(f"num_shards must be an integer of at least 1, got {num_shards!r}")
    if isinstance(profile, str):
        profile = hardware(profile)
    if align_nbytes is None:
        align_nbytes = 1 if profile.unpack_copies else 16
    if type(align_nbytes) is not int or align_nbytes < 1:
        raise ValueError(f"align_nbytes must be an integer of at least 1, got {align_nbytes!r}")
    _check_names(groups)
    planner = _Planner(num_shards, min_slab_nbytes, align_nbytes, profile)
    buckets, reports = [], []
    for group in groups:
        bucket, report = planner.bucket(group)
        buckets.append(bucket)
        reports.append(report)
    return Plan(Layout(num_shards, tuple(buckets)), tuple(reports))


def _check_names(groups: Sequence[Group]) -> None:
    for what, names in (
        ("group", [group.name for group in groups]),
        ("tensor", [tensor.name for group in groups for tensor in group.tensors]),
    ):
        if len(set(names)) < len(names):
            repeated = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"{what} names must be unique; these repeat: {', '.join(map(repr, repeated))}")


class _Planner:
    """Plans groups one by one; equal ones, such as layers, once."""

    def __init__(self, num_shards: int, min_nbytes: int, align_nbytes: int, profile: HardwareProfile):
        self.num_shards, self.min_nbytes, self.align_nbytes = num_shards, min_nbytes, align_nbytes
        self.profile = profile
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
            by_kind.setdefault((tensor.dtype, tensor.shape, text), []).append(tensor)
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
            placements = tuple([Placement(next(tensors[kind]), offset) for kind, offset in filled.placed])
            if filled.sole:
                name = placements[0].tensor.name
            else:
                name = f"{dtype}x{filled.width}"
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
        items = [
            Item(tensor.nbytes, tensor.granularity * itemsize(tensor.dtype), 0, count)
            for tensor, count in zip(tensors, copies, strict=True)
            if tensor.numel
        ]
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
        narrow, seconds = self._fill(tensors, copies, False)
        if self.profile.tile is None:
            return narrow
        wide, seconds_of_wide = self._fill(tensors, copies, True)
        return wide if seconds_of_wide <= seconds else narrow

    def _fill(
        self, tensors: Sequence[TensorSpec], copies: Sequence[int], wide: bool
    ) -> tuple[list[tuple[str, Filled]], float]:
        """The slabs as `(dtype, slab)` and what they cost a step.

        Args:
          tensors: one of each kind.
          copies: how many there are of each kind.
          wide: whether matrices are cut between rows only, so that slabs have rows of the tensors' own width.
        """
        filled: list[tuple[str, Filled]] = []
        seconds = 0.0
        pools: dict[str, tuple[list[Member], list[Member]]] = defaultdict(lambda: ([], []))
        for index, (tensor, count) in enumerate(zip(tensors, copies, strict=True)):
            members, alone = pools[tensor.dtype]
            member = _member(index, tensor, count, wide)
            (alone if self._divides(member, tensor.nbytes) else members).append(member)
        for dtype, (members, alone) in sorted(pools.items()):
            size = itemsize(dtype)
            align = max(1, self.align_nbytes // size)
            chosen = Divider(self.num_shards, size, align, self.profile).divide(members, alone)
            pooled = {member.kind for pool in chosen for member in pool.members}
            for member in alone:
                if member.kind not in pooled:
                    slab = self._own_slab(member, tensors[member.kind])
                    filled += [(dtype, slab)] * member.copies
                    relaid = 0 if slab.sole or member.row in (0, slab.width) else member.numel * size
                    cost = slab_seconds(self.profile, self.num_shards, slab.shard_numel * size, 0, relaid)
                    seconds += member.copies * cost
            filled += [(dtype, pool.filled()) for pool in chosen]
            seconds += sum(pool.seconds(pool.shard_numel) for pool in chosen)
        return filled, seconds

    def _divides(self, member: Member, nbytes: int) -> bool:
        """Whether each shard can hold the same number of whole blocks, in a slab worth gathering."""
        if member.numel == 0 or nbytes < self.min_nbytes or member.numel % self.num_shards:
            return False
        return self.num_shards == 1 or member.numel // self.num_shards % member.granularity == 0

    def _own_slab(self, member: Member, tensor: TensorSpec) -> Filled:
        """A slab that the tensor fills without padding, in its natural shape where dim 0 divides."""
        shard_numel = tensor.numel // self.num_shards
        sole = bool(tensor.shape) and tensor.shape[0] % self.num_shards == 0
        if sole:
            width = tensor.numel // tensor.shape[0]
        else:
            width = math.gcd(member.fit, shard_numel) if member.row else 1
        return Filled(width, shard_numel, shard_numel, ((member.kind, 0),), sole)


def _member(index: int, tensor: TensorSpec, copies: int, wide: bool) -> Member:
    shape, block, numel, granularity = tensor.shape, tensor.block, tensor.numel, tensor.granularity
    if len(shape) < 2 or numel == 0:
        return Member(index, numel, granularity, 0, 0, numel, copies)
    row = math.prod(shape[block.dim + 1 :]) if block.kind == "rows" else shape[-1]
    if wide:
        return Member(index, numel, math.lcm(granularity, row), 0, row, row, copies)
    return Member(index, numel, granularity, 0, row, math.gcd(row, granularity), copies)
