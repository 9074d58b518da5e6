"""Index arithmetic between two ways of holding the same tensors: what must go where.

A tensor is a range of elements, normally in row-major order, the layers of a stacked bucket one after the other. A
`Segment` says where a part of that range lies in one device's memory. `overlap` meets the segments of what is
held with those of what is wanted. Nothing here knows about collectives, so checkpoints and both frameworks
use it alike. All sizes and offsets are in elements.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from ._layout import Layout
from ._listed import named
from ._slab import Placement
from ._storage import stored_order

Buffer = tuple[str, str]
"""A buffer on every device, for a layout `(bucket, slab)`. Its elements are counted in row-major order."""


class Segment(NamedTuple):
    """A range of one tensor in the memory of one device.

    Attributes:
      tensor: its name.
      start, stop: the range in the tensor's row-major order (see `segments` for others), in elements.
      buffer: which of the device's buffers.
      offset: where the range starts in that buffer, in elements.
    """

    tensor: str
    start: int
    stop: int
    buffer: Buffer
    offset: int


class Move(NamedTuple):
    """Elements that lie in a row at both ends: `source` on the sender becomes `target` on the receiver.

    Where sender and receiver are the same device, it is a copy in its memory and no traffic.
    """

    sender: int
    receiver: int
    source: Buffer
    source_offset: int
    target: Buffer
    target_offset: int
    numel: int


Order = Literal["row_major", "stored"]


def segments(
    layout: Layout, *, names: Collection[str] | None = None, per_layer: bool = False, order: Order = "row_major"
) -> tuple[tuple[Segment, ...], ...]:
    """What every shard of a layout holds, by rising buffer offset within a slab.

    With uneven shares every layer of a stack takes the room of the largest share, as in a JAX array.

    Args:
      layout: the layout.
      names: only these tensors; all of them by default.
      per_layer: whether a stacked bucket counts as its first layer only (its other layers look the same).
        Otherwise every layer is listed, and the tensor's range runs over all of them.
      order: of a tensor's elements. `row_major` always means the same, but cuts a tensor that is stored tile by
        tile or transposed into its rows or even elements. `stored` does not, and is right where all that the
        segments are held against stores the tensor in the same order.

    Example:
      >>> from ragged_jax.layout import Bucket, Placement, Slab, TensorSpec
      >>> kernel = TensorSpec("kernel", (4, 2))
      >>> slab = Slab("kernel", "float32", 2, 2, (Placement(kernel, 0),), sole=True)
      >>> segments(Layout(2, (Bucket("mlp", (slab,)),)))[1]
      (Segment(tensor='kernel', start=4, stop=8, buffer=('mlp', 'kernel'), offset=0),)
    """
    held: list[list[Segment]] = [[] for _ in range(layout.num_shards)]
    for bucket in layout.buckets:
        num_layers = 1 if per_layer else bucket.num_copies
        for slab in bucket.slabs:
            buffer, size = (bucket.name, slab.name), slab.shard_numel
            for placement in slab.placements:
                tensor = placement.tensor
                if (names is not None and tensor.name not in names) or not tensor.numel:
                    continue
                runs = stored_runs(placement) if order == "row_major" else [(0, 0, tensor.numel)]
                for k, start, stop, offset in _pieces(layout, placement, size):
                    pieces = list(cut_runs(runs, start, stop))
                    for layer in range(num_layers):
                        shift, at = layer * tensor.numel, offset + layer * layout.largest_share * size
                        for first, stored, numel in pieces:
                            low = first + shift
                            held[k].append(Segment(tensor.name, low, low + numel, buffer, at + stored - start))
    return tuple(tuple(sorted(device, key=lambda s: (s.buffer, s.offset))) for device in held)


def _pieces(layout: Layout, placement: Placement, size: int) -> Iterator[tuple[int, int, int, int]]:
    """`(shard, start, stop, offset)`: the stored elements on each shard, and where they lie in it."""
    ends, offset = layout._ends, placement.offset
    for k in range(bisect_right(ends, offset // size) - 1, layout.num_shards):
        if ends[k] * size >= placement.stop:
            break
        low, high = max(offset, ends[k] * size), min(placement.stop, ends[k + 1] * size)
        yield k, low - offset, high - offset, low - ends[k] * size


def stored_runs(placement: Placement) -> list[tuple[int, int, int]]:
    """`(first, stored, numel)`: row-major elements from `first` on that are stored together, by rising `stored`."""
    tensor = placement.tensor
    if placement.storage == "row_major" and placement.axis_order is None:
        return [(0, 0, tensor.numel)]
    index = stored_order(tensor, placement.storage)
    if placement.axis_order is not None:
        index = index.reshape(tensor.shape).transpose(placement.axis_order).reshape(-1)
    starts = [0, *((index[1:] - index[:-1] != 1).nonzero()[0] + 1).tolist(), tensor.numel]
    return [(int(index[low]), low, high - low) for low, high in pairwise(starts)]


def cut_runs(runs: list[tuple[int, int, int]], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The runs `(first, stored, numel)`, by rising `stored`, between two places in the stored tensor."""
    for first, stored, numel in runs[max(0, bisect_right(runs, start, key=lambda run: run[1]) - 1) :]:
        if stored >= stop:
            break
        low, high = max(start, stored), min(stop, stored + numel)
        yield first + low - stored, low, high - low


def overlap(
    held: Sequence[Iterable[Segment]],
    wanted: Sequence[Iterable[Segment]],
    replicas: Sequence[int] | None = None,
) -> tuple[Move, ...]:
    """The moves that give every device the segments it wants, out of those that are held.

    Several devices may want the same elements, and several may hold them: a device then takes its own copy, else
    one of its own replica, else the one on the first device that has it. Moves that continue each other at both ends
    are one.

    Args:
      held: for each device, what it holds.
      wanted: for each device, what it is to hold.
      replicas: for each device, to which of several copies of everything it belongs.

    Returns:
      Moves sorted by sender, receiver, and place in the sender's memory.

    Raises:
      ValueError: elements are wanted that nobody holds; all of them named.
    """
    own = [_by_tensor((k, s) for s in device) for k, device in enumerate(held)]
    anywhere = _by_tensor((k, s) for k, device in enumerate(held) for s in device)
    alike = {
        r: _by_tensor((k, s) for k, device in enumerate(held) if replicas[k] == r for s in device)
        for r in set(replicas or ())
        if replicas is not None
    }
    moves: list[Move] = []
    missing: list[str] = []
    for receiver, device in enumerate(wanted):
        covers = [own[receiver]] if receiver < len(own) else []
        covers += [alike[replicas[receiver]]] if replicas else []
        for segment in device:
            rest = [segment]
            for cover in (*covers, anywhere):
                rest = [gap for part in rest for gap in _take(receiver, part, cover, moves)]
            for gap in rest:
                missing.append(f"{gap.tensor}[{gap.start}:{gap.stop}] for device {receiver}")
    if missing:
        raise ValueError("no device holds " + named(missing))
    return tuple(_joined(sorted(moves)))


class _Cover(NamedTuple):
    """Disjoint segments of one tensor by rising start, with their devices and their stops."""

    devices: list[int]
    segments: list[Segment]
    stops: list[int]


def _by_tensor(held: Iterable[tuple[int, Segment]]) -> Mapping[str, _Cover]:
    """For each tensor, a disjoint cover of what is held, lower devices first where copies overlap."""
    groups: dict[str, list[tuple[int, int, int, Segment]]] = defaultdict(list)
    for device, s in held:
        groups[s.tensor].append((s.start, device, -s.stop, s))
    covers = {}
    for tensor, items in groups.items():
        cover, end = _Cover([], [], []), 0
        for start, device, _, s in sorted(items):
            if s.stop > end and s.stop > start:
                cover.devices.append(device)
                cover.segments.append(_part(s, end, s.stop) if start < end else s)
                cover.stops.append(s.stop)
                end = s.stop
        covers[tensor] = cover
    return covers


def _take(receiver: int, want: Segment, covers: Mapping[str, _Cover], moves: list[Move]) -> list[Segment]:
    """Appends the moves that the cover can serve; returns the parts of `want` that it cannot."""
    cover = covers.get(want.tensor)
    if cover is None:
        return [want] if want.start < want.stop else []
    gaps, position = [], want.start
    for at in range(bisect_right(cover.stops, want.start), len(cover.stops)):
        have = cover.segments[at]
        if have.start >= want.stop:
            break
        low, high = max(position, have.start), min(want.stop, have.stop)
        if position < low:
            gaps.append(_part(want, position, low))
        source_offset, target_offset = have.offset + low - have.start, want.offset + low - want.start
        moves.append(
            Move(cover.devices[at], receiver, have.buffer, source_offset, want.buffer, target_offset, high - low)
        )
        position = high
    return [*gaps, _part(want, position, want.stop)] if position < want.stop else gaps


def _part(segment: Segment, start: int, stop: int) -> Segment:
    return segment._replace(start=start, stop=stop, offset=segment.offset + start - segment.start)


def _joined(moves: list[Move]) -> Iterator[Move]:
    last: Move | None = None
    for move in moves:
        if last and last[:3] == move[:3] and last.target == move.target:
            ahead = last.source_offset + last.numel == move.source_offset
            if ahead and last.target_offset + last.numel == move.target_offset:
                last = last._replace(numel=last.numel + move.numel)
                continue
        if last:
            yield last
        last = move
    if last:
        yield last
