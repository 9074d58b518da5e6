"""Exchanges between two layouts, and between a layout and the owners of its matrices."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..layout import Bucket, Layout, Order, Split, listed, segments
from ._exchange import Exchange, exchange
from ._hardware import HardwareProfile
from ._owners import OwnerPlan


def redistribution(
    source: Layout,
    target: Layout,
    profile: HardwareProfile,
    *,
    uneven: bool = False,
    max_padding: float | None = None,
    max_message_nbytes: int | None = None,
    group_nbytes: float | None = None,
) -> tuple[Exchange, ...]:
    """Exchanges that turn one layout into another, never needing more than a bucket's memory at a time.

    One exchange for each dtype of each bucket of the target; small buckets share one until they are together
    as large as the largest, which saves latency and costs no memory. A bucket whose layers are stacked alike
    in both layouts is exchanged in one go with a leading dim (`num_copies`).

    Args:
      source, target: layouts of the same tensors; the number of shards may differ.
      profile, uneven, max_padding, max_message_nbytes: as for `exchange`.
      group_nbytes: bytes per device of the buckets that share an exchange, instead of those of the largest
        bucket. Fewer and larger exchanges lose less time to latency: `math.inf` takes the whole model at once.

    Raises:
      ValueError: a tensor is missing on one side, or its shape or dtype differs; all of them named.
    """
    _check_same(source, target)
    exchanges = []
    limit = group_nbytes or max((bucket.shard_nbytes for bucket in target.buckets), default=0)
    stack_of = {tensor.name: bucket.num_copies for bucket in source.buckets for tensor in bucket.tensors}
    for buckets in _merged(target.buckets, limit):
        groups: dict[tuple[str, int, Order], set[str]] = defaultdict(set)
        for bucket in buckets:
            for tensor in bucket.tensors if bucket.num_copies else ():
                alike = stack_of[tensor.name] == bucket.num_copies
                order = "stored" if _stored_alike(source, target, tensor.name) else "row_major"
                groups[tensor.dtype, bucket.num_copies if alike else 1, order].add(tensor.name)
        for (dtype, num_copies, order), names in sorted(groups.items()):
            per_layer = num_copies > 1
            exchanges.append(
                exchange(
                    _segments_of(source, source.buckets, names, per_layer, order),
                    _segments_of(target, buckets, names, per_layer, order),
                    profile,
                    dtype=dtype,
                    name=" + ".join(b.name or "(root)" for b in buckets),
                    num_copies=num_copies,
                    uneven=uneven,
                    max_padding=max_padding,
                    max_message_nbytes=max_message_nbytes,
                )
            )
    return tuple(exchanges)


def _segments_of(layout: Layout, buckets: Sequence[Bucket], names: set[str], per_layer: bool, order: Order):
    some = tuple(b for b in buckets if any(t.name in names for t in b.tensors))
    part = Layout(layout.num_shards, some, layout.shares)
    return segments(part, names=names, per_layer=per_layer, order=order)


def _stored_alike(source: Layout, target: Layout, name: str) -> bool:
    """Whether the tensor's elements lie in the same order in both layouts."""
    a, b = source.locate(name).placement, target.locate(name).placement
    tiles = (a.tensor.block, a.tensor.shape) == (b.tensor.block, b.tensor.shape)
    if (a.storage, a.axis_order) != (b.storage, b.axis_order):
        return False
    return tiles if a.storage == "tiled" else a.axis_order is None or a.tensor.shape == b.tensor.shape


def _merged(buckets: Sequence[Bucket], limit: float) -> Iterator[tuple[Bucket, ...]]:
    """Buckets in order, several together up to `limit` bytes per device; stacked ones alone."""
    run: list[Bucket] = []
    for bucket in buckets:
        if bucket.num_copies > 1:
            yield (bucket,)
            continue
        if run and sum(b.shard_nbytes for b in [*run, bucket]) > limit:
            yield tuple(run)
            run = []
        run.append(bucket)
    if run:
        yield tuple(run)


def _check_same(source: Layout, target: Layout) -> None:
    ends = [
        {t.name: (t.dtype, b.num_copies * t.numel, t.splits, t.shape) for b in layout.buckets for t in b.tensors}
        for layout in (source, target)
    ]
    faults = [f"{name} is not in the target" for name in ends[0].keys() - ends[1].keys()]
    faults += [f"{name} is not in the source" for name in ends[1].keys() - ends[0].keys()]
    for name in ends[0].keys() & ends[1].keys():
        a, b = ends[0][name], ends[1][name]
        if a[:3] != b[:3]:
            faults.append(f"{name} is {_text(*a)} in the source and {_text(*b)} in the target")
    if faults:
        raise ValueError("the layouts hold different tensors:" + listed(sorted(faults)))


def _text(dtype: str, numel: int, splits: tuple[Split, ...], shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}" + "".join(f", split by {s.axis!r} along dim {s.dim}" for s in splits)


def owner_exchange(
    layout: Layout,
    owners: OwnerPlan,
    profile: HardwareProfile,
    *,
    uneven: bool = False,
    max_padding: float | None = None,
    max_message_nbytes: int | None = None,
    dtype: str | None = None,
) -> tuple[Exchange, ...]:
    """Exchanges, one for each dtype, that bring every matrix whole to its owner; `reversed()` brings it back.

    The owner's buffers are `("owned", "ROWSxCOLS")`, `OwnerPlan.num_slots` matrices each; matrices that are
    marked as sharded stay where they are.

    Args:
      layout: where the matrices lie.
      owners: who works on which.
      profile, uneven, max_padding, max_message_nbytes: as for `exchange`.
      dtype: of what is moved (momentum), where it is not the tensors' own.

    Raises:
      ValueError: the owners are for another number of devices.
      KeyError: a matrix is of a tensor that the layout does not have.
    """
    if owners.num_shards != layout.num_shards:
        raise ValueError(f"owners on {owners.num_shards} devices, the layout has {layout.num_shards}")
    groups: dict[str, set[str]] = defaultdict(set)
    for name in {m.tensor for m, owner in zip(owners.matrices, owners.owners, strict=True) if owner >= 0}:
        groups[dtype or layout.locate(name).placement.tensor.dtype].add(name)
    wanted = owners.segments()
    return tuple(
        exchange(
            segments(layout, names=names, order="stored"),
            [[s for s in device if s.tensor in names] for device in wanted],
            profile,
            dtype=kind,
            name="owners",
            uneven=uneven,
            max_padding=max_padding,
            max_message_nbytes=max_message_nbytes,
        )
        for kind, names in sorted(groups.items())
    )
