"""What to ask for instead, when what was asked for pads too much: in words, with the figures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..layout import Block, TensorSpec, can_be_tiled, tile
from ._group import Group
from ._plan import plan
from ._report import Plan
from ._table import size

_BEARABLE = 0.02  # padding, as a part of the model, below which there is nothing to say
_BETTER = 0.5  # an alternative must leave at most this part of the padding


def advise(groups: Sequence[Group], num_shards: int, **options: Any) -> tuple[str, ...]:
    """Alternatives to `plan(groups, num_shards, **options)` that pad less, each with its padding and its price.

    Args:
      groups, num_shards, options: as for `plan`.

    Returns:
      Sentences, the first about the plan itself; none where its padding is bearable.
    """
    asked = plan(groups, num_shards, **options)
    if asked.padding_fraction <= _BEARABLE:
        return ()
    lines = []
    for say, made in (
        _tiled(groups, num_shards, options),
        _merged(groups, num_shards, options),
        _fewer(groups, num_shards, options),
    ):
        if made and made.padding_fraction <= _BETTER * asked.padding_fraction:
            lines.append(f"{say}: {padding(made)}, {size(made.shard_nbytes)} on each device.")
    floor = percent(asked.floor_fraction)
    first = f"{num_shards} shards: {padding(asked)}, {size(asked.shard_nbytes)} on each device"
    return (f"{first}; no layout of these buckets that keeps blocks whole has less than {floor}.", *lines)


def percent(fraction: float) -> str:
    """`6.97 %`, or `15x` for what is fifteen times the model."""
    return f"{fraction + 1:.0f}x" if fraction >= 10 else f"{100 * fraction:.2f} %"


def padding(made: Plan) -> str:
    text = percent(made.padding_fraction)
    return f"{text} the model, padded" if text.endswith("x") else f"{text} padding"


_Alternative = tuple[str, Plan | None]


def _tiled(groups: Sequence[Group], num_shards: int, options: dict[str, Any]) -> _Alternative:
    """Tiles stored one by one, in place of whole rows."""
    if options.get("storage", "row_major") != "row_major":
        return "", None
    if any(can_be_tiled(tensor) for group in groups for tensor in group.tensors):
        say = "Store tensors tile by tile (storage='tiled'; un-tiling is a copy at each gather)"
        return say, plan(groups, num_shards, **{**options, "storage": "tiled"})
    sizes = {k for g in groups for t in g.tensors if (k := _square(t))}
    if not sizes:
        return "", None
    changed = [replace(g, tensors=tuple(_with_tiles(t) for t in g.tensors)) for g in groups]
    k = max(sizes)
    say = f"If {k} x {k} tiles, stored tile by tile, will do for blocks of {k} rows"
    return say, plan(changed, num_shards, **{**options, "storage": "tiled"})


def _square(tensor: TensorSpec) -> int:
    block = tensor.block
    return block.size[0] if block.kind == "rows" and len(tensor.shape) >= 2 and 1 < block.size[0] <= 256 else 0


def _with_tiles(tensor: TensorSpec) -> TensorSpec:
    k = _square(tensor)
    block: Block = tile(k, k) if k else tensor.block
    return replace(tensor, block=block)


def _merged(groups: Sequence[Group], num_shards: int, options: dict[str, Any]) -> _Alternative:
    """More layers in a bucket."""
    if options.get("merge", 1) != 1:
        return "", None
    made = plan(groups, num_shards, **{**options, "merge": "auto"})
    largest = max((bucket.unshard_nbytes for bucket in made.buckets), default=0)
    return f"Make one unit of several layers (as merge='auto' plans; the largest gathers {size(largest)})", made


def _fewer(groups: Sequence[Group], num_shards: int, options: dict[str, Any]) -> _Alternative:
    """The most shards, a divisor of those asked for, on which padding is bearable, replicated over the rest."""
    if options.get("shares"):
        return "", None
    made, fewer = None, num_shards
    for times in (2, 4, 8, 16, 32, 64):
        if num_shards % times:
            break
        fewer = num_shards // times
        made = plan(groups, fewer, **options)
        if made.padding_fraction <= 5 * _BEARABLE:
            break
    if fewer == 1:
        return f"Replicate over {num_shards}", made
    return f"Shard over {fewer} and replicate over {num_shards // fewer}", made
