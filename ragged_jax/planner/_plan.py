"""`plan`: from the tensors of a model to its layout."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..layout import Bucket, Layout, Placement, Slab, TensorSpec, itemsize
from ._pack import lower_bound, pack
from ._report import BucketReport, Plan


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
    min_slab_nbytes: int = 1 << 16,
    align_nbytes: int = 32,
) -> Plan:
    """Chooses where every tensor lies: deterministic, the same on every rank.

    A tensor whose blocks divide evenly over the shards along dim 0 keeps its natural shape in a slab of its
    own: no padding, no copy. The rest is packed with others of the same row width at planned offsets.

    Args:
      groups: the tensors of each bucket, in the order in which the forward pass needs them.
      num_shards: devices that share the model.
      min_slab_nbytes: below this many unsharded bytes a tensor does not deserve a collective of its own.
      align_nbytes: tensors in a packed slab start at multiples of it.

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
    names = Counter(t.name for group in groups for t in group.tensors)
    if repeated := sorted(name for name, count in names.items() if count > 1):
        raise ValueError(f"tensor names must be unique; these repeat: {', '.join(repeated)}")
    buckets, reports = [], []
    for group in groups:
        bucket, bound = _plan_bucket(group, num_shards, min_slab_nbytes, align_nbytes)
        buckets.append(bucket)
        reports.append(BucketReport.of(bucket, num_shards, bound))
    return Plan(Layout(num_shards, tuple(buckets)), tuple(reports))


def _plan_bucket(group: Group, num_shards: int, min_nbytes: int, align: int) -> tuple[Bucket, int]:
    """The bucket, and a lower bound on its bytes per shard for slabs formed in this way."""
    slabs, bound, pools = [], 0, defaultdict(list)
    for tensor in group.tensors:
        if tensor.nbytes >= min_nbytes and _divides(tensor, num_shards):
            slabs.append(_sole(tensor, num_shards))
            bound += slabs[-1].shard_nbytes
        else:
            pools[tensor.dtype].append(tensor)
    for dtype, tensors in sorted(pools.items()):
        for width, members in _by_width(tensors, min_nbytes).items():
            unit = math.lcm(width, max(1, align // itemsize(dtype)))
            shard, placed = pack(members, num_shards, unit)
            placements = tuple(Placement(t, offset) for t, offset in placed)
            name = f"{dtype}x{width}"
            slabs.append(Slab(name, dtype, shard // width, width, placements))
            bound += lower_bound(members, num_shards, unit) * itemsize(dtype)
    copies = 1 if group.stack is None else group.stack
    return Bucket(group.name, tuple(slabs), group.stack), bound * copies


def _divides(tensor: TensorSpec, num_shards: int) -> bool:
    """Whether the shards can each hold the same number of whole blocks and of indices of dim 0."""
    if not tensor.shape or tensor.numel == 0 or tensor.shape[0] % num_shards:
        return False
    return num_shards == 1 or tensor.numel // num_shards % tensor.granularity == 0


def _sole(tensor: TensorSpec, num_shards: int) -> Slab:
    rows = tensor.shape[0] // num_shards
    width = tensor.numel // tensor.shape[0]
    return Slab(tensor.name, tensor.dtype, rows, width, (Placement(tensor, 0),), sole=True)


def _by_width(tensors: Sequence[TensorSpec], min_nbytes: int) -> dict[int, list[TensorSpec]]:
    """Pools of tensors that share a slab, by its row width.

    Matrices pool by their last dim, so that a tensor is a run of whole rows and unpacking is a slice and a
    free reshape. A vector joins the widest pool whose rows it fills. Pools too small for a collective of
    their own, and whatever fits no pool, share one flat slab.
    """
    pools: dict[int, list[TensorSpec]] = defaultdict(list)
    for tensor in tensors:
        if len(tensor.shape) >= 2 and tensor.numel:
            pools[tensor.shape[-1]].append(tensor)
    flat: list[TensorSpec] = []
    for width in sorted(pools):
        if sum(t.nbytes for t in pools[width]) < min_nbytes:
            flat += pools.pop(width)
    for tensor in tensors:
        if len(tensor.shape) < 2 or tensor.numel == 0:
            home = max((w for w in pools if tensor.numel % w == 0), default=None)
            (flat if home is None else pools[home]).append(tensor)
    if flat:
        pools[1] = pools.get(1, []) + flat
    return {width: pools[width] for width in sorted(pools)}
