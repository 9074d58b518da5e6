"""Between a tensor's row-major order and the order in which it is stored: index arithmetic on arrays.

`stored_order` lists a whole tensor and is the oracle of these two, which take any indices and no memory but theirs.
"""

import math
from typing import TYPE_CHECKING

from ._slab import Placement
from ._storage import tile_regions

if TYPE_CHECKING:
    import numpy as np


def row_major_index(placement: Placement, stored: "np.ndarray") -> "np.ndarray":
    """For places in the stored tensor, the row-major indices of the elements that lie there.

    Args:
      placement: the tensor and its order.
      stored: places, int64.

    Example:
      >>> import numpy as np
      >>> from ragged_jax.layout import TensorSpec
      >>> transposed = Placement(TensorSpec("w", (2, 3)), 0, axis_order=(1, 0))
      >>> row_major_index(transposed, np.arange(6))
      array([0, 3, 1, 4, 2, 5])
    """
    if placement.storage == "tiled":
        return _out_of_tiles(placement, stored)
    return _permuted(placement, stored, forward=False)


def stored_index(placement: Placement, index: "np.ndarray") -> "np.ndarray":
    """The inverse of `row_major_index`: where the elements of these row-major indices are stored."""
    if placement.storage == "tiled":
        return _into_tiles(placement, index)
    return _permuted(placement, index, forward=True)


def _permuted(placement: Placement, index: "np.ndarray", forward: bool) -> "np.ndarray":
    if (order := placement.axis_order) is None:
        return index
    shape, stored = placement.tensor.shape, placement.stored_shape
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    stored_strides = {dim: math.prod(stored[at + 1 :]) for at, dim in enumerate(order)}
    out = index * 0
    for dim, size in enumerate(shape):
        here, there = strides[dim], stored_strides[dim]
        if not forward:
            here, there = there, here
        out += index // here % size * there
    return out


def _out_of_tiles(placement: Placement, stored: "np.ndarray") -> "np.ndarray":
    num_rows, num_cols = placement.tensor.shape[-2:]
    out = stored.copy()
    for r in tile_regions(placement.tensor):
        inside = (stored >= r.start) & (stored < r.start + r.numel)
        tiles, at = divmod(stored[inside] - r.start, r.tile_numel)
        row, col = divmod(at, r.width)
        rows, tile_col = divmod(tiles, r.cols)
        member, tile_row = divmod(rows, r.rows)
        row, col = r.top + tile_row * r.height + row, r.left + tile_col * r.width + col
        out[inside] = (member * num_rows + row) * num_cols + col
    return out


def _into_tiles(placement: Placement, index: "np.ndarray") -> "np.ndarray":
    num_rows, num_cols = placement.tensor.shape[-2:]
    rows, col = divmod(index, num_cols)
    member, row = divmod(rows, num_rows)
    out = index.copy()
    for r in tile_regions(placement.tensor):
        inside = (row >= r.top) & (row < r.top + r.rows * r.height)
        inside &= (col >= r.left) & (col < r.left + r.cols * r.width)
        tile_row, in_row = divmod(row[inside] - r.top, r.height)
        tile_col, in_col = divmod(col[inside] - r.left, r.width)
        tile = (member[inside] * r.rows + tile_row) * r.cols + tile_col
        out[inside] = r.start + tile * r.tile_numel + in_row * r.width + in_col
    return out
