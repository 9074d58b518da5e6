"""Between a slab's array and its tensors: slices, reshapes, tiles. The same for numpy and for traced arrays.

Arrays may have leading dims (the layers of a stack), `lead` of them. With uneven `shares` a JAX array must still
give every device equally many rows, so each device's part is padded at its end to that of the largest share;
`compact` drops those rows from a whole array and `spread` puts them back.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..layout import Placement, Slab, TileRegion, tile_regions

Shares = tuple[int, ...] | None
SUBLANES, LANES = 8, 128  # a TPU's native tile


def slab_shape(slab: Slab, num_parts: int) -> tuple[int, ...]:
    """Shape of an array of `num_parts` parts of a slab: natural for a sole slab, 1-D for width 1."""
    if slab.sole:
        return (slab.rows * num_parts, *slab.placements[0].stored_shape[1:])
    return (slab.rows * num_parts,) if slab.width == 1 else (slab.rows * num_parts, slab.width)


def tensors_of(slab: Slab, array: Any, shares: Shares, lead: int = 0) -> dict[str, Any]:
    """The tensors of a whole slab: static slices and free reshapes, except where tiles are put in rows."""
    array = compact(slab, array, shares, lead)
    if slab.sole:
        placement = slab.placements[0]
        return {placement.tensor.name: _reorder(array, _inverse(placement.axis_order), lead)}
    tensors = {}
    for placement in slab.placements:
        stored = _rows(array, placement.offset // slab.width, placement.stop // slab.width, lead)
        tensors[placement.tensor.name] = from_stored(placement, stored, lead)
    return tensors


def slab_of(slab: Slab, tensors: Mapping[str, Any], num_shards: int, shares: Shares, lead: int = 0) -> Any:
    """The whole slab from its tensors, padding zero: the inverse of `tensors_of`."""
    first = tensors[slab.placements[0].tensor.name]
    if slab.sole:
        return spread(slab, _reorder(first, slab.placements[0].axis_order, lead), shares, lead)
    num_parts = sum(shares) if shares else num_shards
    tail = slab_shape(slab, num_parts)[1:]
    pieces, end = [], 0

    def pad_to(offset: int) -> None:
        if offset > end:
            pieces.append(np.zeros((*first.shape[:lead], (offset - end) // slab.width, *tail), first.dtype))

    for placement in slab.placements:
        if placement.tensor.numel:
            pad_to(placement.offset)
            stored = to_stored(placement, tensors[placement.tensor.name], lead)
            pieces.append(stored.reshape(*first.shape[:lead], -1, *tail))
            end = placement.stop
    pad_to(slab.shard_numel * num_parts)
    whole = _concatenate(pieces, lead) if pieces else np.zeros((*first.shape[:lead], 0, *tail), first.dtype)
    return spread(slab, whole, shares, lead)


def compact(slab: Slab, array: Any, shares: Shares, lead: int) -> Any:
    """Without the rows that make the devices' parts equal."""
    if shares is None or len(set(shares)) == 1:
        return array
    stride = max(shares) * slab.rows
    parts = [_rows(array, k * stride, k * stride + share * slab.rows, lead) for k, share in enumerate(shares)]
    return _concatenate(parts, lead)


def spread(slab: Slab, array: Any, shares: Shares, lead: int) -> Any:
    """With zero rows that make the devices' parts equal."""
    if shares is None or len(set(shares)) == 1:
        return array
    parts: list[Any] = []
    for end, share in zip(accumulate(shares), shares, strict=True):
        parts.append(_rows(array, (end - share) * slab.rows, end * slab.rows, lead))
        if missing := (max(shares) - share) * slab.rows:
            parts.append(np.zeros((*array.shape[:lead], missing, *array.shape[lead + 1 :]), array.dtype))
    return _concatenate(parts, lead)


def to_stored(placement: Placement, tensor: Any, lead: int = 0) -> Any:
    """The elements of a tensor in the order in which they are stored, flat."""
    if placement.storage == "row_major":
        return _reorder(tensor, placement.axis_order, lead).reshape(*tensor.shape[:lead], -1)
    matrices = tensor.reshape(*tensor.shape[:lead], -1, *tensor.shape[-2:])
    parts = []
    for r in tile_regions(placement.tensor):
        part = matrices[..., r.top : r.top + r.rows * r.height, r.left : r.left + r.cols * r.width]
        for shape, order in reversed(_steps(r, part)):
            part = part.reshape(*tensor.shape[:lead], *(shape[dim] for dim in order))
            part = _reorder(part, _inverse(order), lead)
        parts.append(part.reshape(*tensor.shape[:lead], -1))
    return _concatenate(parts, lead)


def from_stored(placement: Placement, stored: Any, lead: int = 0) -> Any:
    """The inverse of `to_stored`."""
    outer, shape = stored.shape[:lead], placement.tensor.shape
    if placement.storage == "row_major":
        whole = stored.reshape((*outer, *placement.stored_shape))
        return _reorder(whole, _inverse(placement.axis_order), lead)
    flat = stored.reshape(*outer, -1)
    rows: dict[int, list[Any]] = {}
    for r in tile_regions(placement.tensor):
        rows.setdefault(r.top, []).append(_matrices(r, _rows(flat, r.start, r.start + r.numel, lead), outer))
    bands = [_concatenate(row, -1) for _, row in sorted(rows.items())]
    return _concatenate(bands, -2).reshape((*outer, *shape))


def _matrices(r: TileRegion, flat: Any, outer: tuple[int, ...]) -> Any:
    """A region of tiles as a part of each matrix of the stack."""
    for shape, order in _steps(r, flat):
        flat = _reorder(flat.reshape(*outer, *shape), order, len(outer))
    return flat.reshape(*outer, r.members, r.rows * r.height, r.cols * r.width)


def _steps(r: TileRegion, array: Any) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Shapes, each with the transposition that follows it, by which a region's tiles become rows.

    One transposition would do. But a TPU holds the last two dims in native tiles of 8 x 128, so a dim of 32 at the
    end is padded to four times its size. Narrow tiles therefore go by three steps that all end in long dims, and
    the rows of others are given in groups of 8, which move as a whole (`docs/design/runtime.md` has the figures). A
    GPU does the same either way.
    """
    if isinstance(array, np.ndarray):
        return (((r.members, r.rows, r.cols, r.height, r.width), (0, 1, 3, 2, 4)),)
    side = LANES // r.width  # tiles side by side in a native one; each of them holds as many rows in a row of lanes
    if side > 1 and LANES % r.width == r.height % side == r.cols % side == 0:
        high, grid = r.height // side, (r.members, r.rows, r.cols // side)
        return (
            ((*grid, side, high, LANES), (3, 4, 5, 0, 1, 2)),
            ((side, high, side, r.width, *grid), (1, 2, 0, 3, 4, 5, 6)),
            ((r.height, LANES, *grid), (2, 3, 0, 4, 1)),
        )
    group = SUBLANES if r.height % SUBLANES == 0 else r.height
    return (((r.members, r.rows, r.cols, r.height // group, group, r.width), (0, 1, 3, 4, 2, 5)),)


def _reorder(array: Any, order: tuple[int, ...] | None, lead: int) -> Any:
    """With the dims behind the leading ones in another order."""
    return array if order is None else array.transpose(*range(lead), *(lead + dim for dim in order))


def _inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(order.index(dim) for dim in range(len(order)))


def _rows(array: Any, start: int, stop: int, lead: int) -> Any:
    return array[(slice(None),) * lead + (slice(start, stop),)]


def _concatenate(parts: Sequence[Any], axis: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    module = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
    return module.concatenate(parts, axis)
