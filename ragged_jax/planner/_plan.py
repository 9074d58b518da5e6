"""`plan`: from the tensors of a model to its layout."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from ..layout import Layout, listed
from ._bucket import AxisOrder, BucketPlanner, Storage, wanted_order
from ._group import Group
from ._hardware import HardwareProfile, hardware
from ._merge import merge_layers
from ._report import Plan


def plan(
    groups: Sequence[Group],
    num_shards: int,
    *,
    profile: HardwareProfile | str = "h100",
    storage: Storage = "row_major",
    axis_order: AxisOrder = "natural",
    merge: int | Literal["auto"] = 1,
    shares: Sequence[int] | None = None,
    min_slab_nbytes: int = 1 << 16,
    align_nbytes: int | None = None,
) -> Plan:
    """Chooses where every tensor lies: deterministic, the same on every rank.

    A tensor whose blocks divide evenly over the shards along dim 0 keeps its natural shape in a slab of its
    own: no padding, no copy. The rest shares slabs, with others of the same granularity or where that fills
    gaps, at planned offsets. In torch, where a tensor is a view of its slab, all tensors share slabs: a message
    less for each. No bucket takes more bytes than cutting each of its tensors by itself would, in whole blocks
    along dim 0, nor than one slab for all that does not divide.

    Args:
      groups: the tensors of each bucket, in the order in which the forward pass needs them. The order of the
        tensors in a group does not matter.
      num_shards: devices that share the model.
      profile: the machine by which slabs are chosen, or its name in `PROFILES`.
      storage: whether tensors with tile blocks are stored tile by tile, so that a tile, not the rows it spans,
        is what no device boundary may cut. `auto` does so where the cost model finds that padding costs more
        than un-tiling, and leaves tensors that divide in their natural shape.
      axis_order: `auto` may store a tensor that can be cut anywhere with another dim in front, where that one
        divides over the shards and the first does not. A mapping from patterns to dims, as in
        `{"*/query": (1, 0)}`, stores tensors of that name so where they can be cut anywhere, the dim in front
        divides and they have slabs of their own; the first pattern that matches wins. The dims are those of
        one layer.
      merge: how many like layers that follow one another share a bucket. `auto` doubles the number, up to 8,
        as long as that saves at least a hundredth of the model; the gathered bucket grows with it. It says what units
        of several layers would be worth: `fully_shard` gathers what the model's units are, and follows no such plan.
      shares: for devices of different memory, how many parts of the model each holds, e.g. `(2, 2, 1, 1)`.
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
      >>> plan([Group("mlp", (kernel, bias))], num_shards=8)
      Plan(Layout(2 tensors in 1 buckets over 8 shards, 131200 bytes each, padding 0.00 %), bound 0.00 %)
    """
    if type(num_shards) is not int or num_shards < 1:
        raise ValueError(f"num_shards must be an integer of at least 1, got {num_shards!r}")
    if isinstance(profile, str):
        profile = hardware(profile)
    if align_nbytes is None:
        align_nbytes = 1 if profile.unpack_copies else 16
    if type(align_nbytes) is not int or align_nbytes < 1:
        raise ValueError(f"align_nbytes must be an integer of at least 1, got {align_nbytes!r}")
    if storage not in get_args(Storage):
        raise ValueError(f"storage must be one of {', '.join(get_args(Storage))}, got {storage!r}")
    _check_axis_order(axis_order, groups)
    if merge != "auto" and (type(merge) is not int or merge < 1):
        raise ValueError(f"merge must be 'auto' or a number of layers of at least 1, got {merge!r}")
    shares = _canonical(shares, num_shards)
    _check_names(groups)
    planner = BucketPlanner(
        num_shards=sum(shares) if shares else num_shards,
        min_nbytes=min_slab_nbytes,
        align_nbytes=align_nbytes,
        profile=profile,
        storage=storage,
        axis_order=axis_order,
    )
    made = _plan(planner, merge_layers(groups, 1 if merge == "auto" else merge), num_shards, shares)
    for num_layers in _MERGES if merge == "auto" else ():
        more = _plan(planner, merge_layers(groups, num_layers), num_shards, shares)
        if made.padding_fraction - more.padding_fraction < _WORTH_MERGING:
            break
        made = more
    return made


_MERGES = (2, 4, 8)
_WORTH_MERGING = 0.01  # of the model


def _plan(planner: BucketPlanner, groups: Sequence[Group], num_shards: int, shares: tuple[int, ...] | None) -> Plan:
    planned = [planner.bucket(group) for group in groups]
    buckets, reports = tuple(bucket for bucket, _ in planned), tuple(report for _, report in planned)
    return Plan(Layout(num_shards, buckets, shares), reports)


def _canonical(shares: Sequence[int] | None, num_shards: int) -> tuple[int, ...] | None:
    """Shares without a common factor; None when they are all equal."""
    if shares is None:
        return None
    if len(shares) != num_shards or any(type(share) is not int or share < 1 for share in shares):
        raise ValueError(f"shares must be {num_shards} integers of at least 1, got {tuple(shares)}")
    divisor = math.gcd(*shares)
    return None if len(set(shares)) == 1 else tuple(share // divisor for share in shares)


def _check_axis_order(axis_order: AxisOrder, groups: Sequence[Group]) -> None:
    if axis_order in ("natural", "auto"):
        return
    if not isinstance(axis_order, Mapping):
        raise ValueError(f"axis_order must be natural, auto or a mapping of patterns, got {axis_order!r}")
    tensors = [tensor for group in groups for tensor in group.tensors]
    faults = [f"{p!r} matches no tensor" for p in axis_order if not any(fnmatchcase(t.name, p) for t in tensors)]
    for tensor in tensors:
        order = wanted_order(tensor, axis_order)
        if order and sorted(order) != list(range(len(tensor.shape))):
            faults.append(f"{tensor.name}: {order} is no order of the dims of shape {tensor.shape}")
    if faults:
        raise ValueError("tensors cannot be stored as axis_order says:" + listed(faults))


def _check_names(groups: Sequence[Group]) -> None:
    for what, names in (
        ("group", [group.name for group in groups]),
        ("tensor", [tensor.name for group in groups for tensor in group.tensors]),
    ):
        if len(set(names)) < len(names):
            repeated = sorted(name for name, count in Counter(names).items() if count > 1)
            raise ValueError(f"{what} names must be unique; these repeat: {', '.join(map(repr, repeated))}")
