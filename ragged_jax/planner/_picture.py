"""A layout as a picture: shards side by side, tensors in colours, padding hatched."""

from collections.abc import Iterator
from pathlib import Path

from ..layout import Bucket, Layout, Slab
from ._table import size

_MAX_ROWS = 8  # buckets drawn; equal layers are drawn once
_MAX_LEGEND = 16
_WIDTH = 12.0  # inches

# Okabe-Ito and lighter relatives: distinct for colour-blind readers, in an order where neighbours differ.
_COLOURS = [
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#7a68a6",
    "#66a61e",
    "#a6761d",
    "#8dd3c7",
    "#fb8072",
]
_PADDING = {"facecolor": "#f4f4f4", "edgecolor": "#b0b0b0", "hatch": "/////", "linewidth": 0}


def draw(layout: Layout, path: str | Path, *, title: str = "") -> None:
    """Draws a layout into a file whose suffix names the format (`.png`, `.svg`, `.pdf`).

    Each row is a bucket (of equal layers the first, with their number) and each column a shard, filled from the
    bottom: the height is bytes on the device. A tensor has one colour, wherever its pieces lie; white lines
    separate slabs; padding is hatched.

    Args:
      layout: what to draw.
      path: the file to write.
      title: a heading in place of the layout's own figures.

    Raises:
      ImportError: matplotlib is missing; the message says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'ragged-jax[plot]'") from None

    rows = _distinct(layout)
    hidden = max(0, len(rows) - _MAX_ROWS)
    rows = rows[:_MAX_ROWS] or [(Bucket("", ()), 1)]
    heights = [min(3.0, 1.2 + 0.12 * sum(len(s.placements) for s in b.slabs)) for b, _ in rows]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.55 * len(rows) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(rows), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (bucket, copies) in zip(all_axes, rows, strict=True):
        _draw_bucket(axes, layout, bucket, copies)
    all_axes[-1].set_xlabel("shard")
    note = f"  ({hidden} more kinds of buckets not drawn)" if hidden else ""
    heading = title or (
        f"{len(layout.tensors)} tensors on {layout.num_shards} shards, {size(layout.shard_nbytes)} each, "
        f"padding {100 * layout.padding_fraction:.2f} %"
    )
    figure.suptitle(heading + note, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _distinct(layout: Layout) -> list[tuple[Bucket, int]]:
    """One bucket of each shape, with how many there are."""
    counts: dict[tuple, int] = {}
    first: dict[tuple, Bucket] = {}
    for bucket in layout.buckets:
        key = tuple((s.dtype, s.rows, s.width, tuple(p.offset for p in s.placements)) for s in bucket.slabs)
        first.setdefault(key, bucket)
        counts[key] = counts.get(key, 0) + bucket.num_copies
    return [(bucket, counts[key]) for key, bucket in first.items()]


def _draw_bucket(axes, layout: Layout, bucket: Bucket, copies: int) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    num_shards, shares = layout.num_shards, layout.shares or (1,) * layout.num_shards
    colours: dict[str, str] = {}
    boxes: dict[str | None, list[list[tuple[float, float]]]] = {None: []}  # by colour; None is padding
    part_nbytes = sum(slab.shard_nbytes for slab in bucket.slabs)
    total = max(1, layout.largest_share * part_nbytes)
    base, lines = [0] * num_shards, []
    for slab in bucket.slabs:
        scale = slab.shard_nbytes / max(1, slab.shard_numel)
        low = 0
        for k, share in enumerate(shares):
            for name, start, stop in _pieces(slab, low, low + share * slab.shard_numel):
                if name is not None and name not in colours:
                    colours[name] = _COLOURS[len(colours) % len(_COLOURS)]
                box = _box(k, num_shards, base[k] + start * scale, base[k] + stop * scale)
                boxes.setdefault(None if name is None else colours[name], []).append(box)
            base[k] += share * slab.shard_nbytes
            low += share * slab.shard_numel
        lines.append(base[0])
    padding = boxes.pop(None)
    axes.add_collection(PolyCollection(padding, **_PADDING))
    edge = 0.3 if len(colours) <= 100 else 0
    for colour, drawn in boxes.items():
        axes.add_collection(PolyCollection(drawn, facecolor=colour, edgecolor="white", linewidth=edge))
    payload = {p.tensor.name: p.tensor.nbytes for s in bucket.slabs for p in s.placements}
    common = len(_common_prefix(list(colours), bucket.name))
    by_size = sorted(colours, key=lambda name: -payload[name])
    largest = [Patch(color=colours[name], label=name[common:]) for name in by_size]
    if len(largest) > _MAX_LEGEND:
        rest = Patch(color="none", label=f"and {len(largest) - _MAX_LEGEND + 1} more")
        largest = [*largest[: _MAX_LEGEND - 1], rest]
    if padding:
        largest.append(Patch(**{**_PADDING, "linewidth": 0.5}, label="padding"))
    if len(lines) <= 40 and not layout.shares:
        axes.hlines(lines[:-1], 0, num_shards, color="white", linewidth=1.6)
    axes.set_xlim(0, num_shards)
    axes.set_ylim(0, total)
    step = max(1, -(-num_shards // 32))
    axes.set_xticks([k + 0.5 for k in range(0, num_shards, step)], [str(k) for k in range(0, num_shards, step)])
    axes.tick_params(length=0, labelsize=8)
    axes.set_yticks([0, total], ["0", size(total)])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    times = f"  x {copies}" if copies > 1 else ""
    padded = layout.num_parts * part_nbytes / sum(payload.values()) - 1 if sum(payload.values()) else 0.0
    axes.set_title(
        f"{bucket.name or '(root)'}{times}   {size(total)} on each shard, padding {100 * padded:.2f} %",
        fontsize=9,
        loc="left",
    )
    columns = 1 if len(largest) <= 9 else 2
    axes.legend(
        handles=largest, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False, ncols=columns
    )


def _pieces(slab: Slab, low: int, high: int) -> Iterator[tuple[str | None, int, int]]:
    """What lies in a range of a slab, counted from its start: `(tensor or None for padding, start, stop)`."""
    end = low
    for placement in slab.placements:
        start, stop = max(low, placement.offset), min(high, placement.stop)
        if start < stop:
            if start > end:
                yield None, end - low, start - low
            yield placement.tensor.name, start - low, stop - low
            end = stop
    if end < high:
        yield None, end - low, high - low


def _box(k: int, num_shards: int, bottom: float, top: float) -> list[tuple[float, float]]:
    """The corners of a box in the column of shard `k`, with air between columns that are wide enough."""
    air = 0.04 if num_shards <= 128 else 0.0
    return [(k + air, bottom), (k + 1 - air, bottom), (k + 1 - air, top), (k + air, top)]


def _common_prefix(names: list[str], bucket: str) -> str:
    """What all names share, up to a separator, so that the legend shows what differs."""
    prefix = f"{bucket}/" if bucket else ""
    if prefix and all(name.startswith(prefix) for name in names):
        return prefix
    if len(names) < 2:
        return ""
    low, high = min(names), max(names)
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(map(len, names)))
    cut = max(low.rfind(separator, 0, shared) for separator in "/#")
    return low[: cut + 1]
