"""In which order the elements of a tensor are stored, and where that order may be cut.

`row_major` is the usual order; a tile of `r` rows then spans `r` whole rows. `tiled` stores tile after tile, so
that the tile itself is contiguous. Where the sizes do not divide into tiles, four regions follow one another:
full tiles, the right edge, the bottom edge, and the corner; in each the tiles have one size and lie row by row,
and a region holds those of every member of a stack before the next region begins.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

from ._tensor import TensorSpec

if TYPE_CHECKING:
    import numpy as np

Storage = Literal["row_major", "tiled"]


class TileRegion(NamedTuple):
    """Equal tiles that are stored one after another.

    A buffer of the region is un-tiled by `reshape(members, rows, cols, height, width)`, a transposition of
    `rows, height, cols, width`, and a reshape to `(members, rows * height, cols * width)`, whose first element
    belongs at `(top, left)` of each member.

    Attributes:
      start: where the region starts in the stored tensor, in elements.
      members: matrices in the stack.
      rows, cols: tiles in each direction.
      height, width: elements of a tile in each direction.
      top, left: the matrix element at which the region starts.
    """

    start: int
    members: int
    rows: int
    cols: int
    height: int
    width: int
    top: int
    left: int

    @property
    def numel(self) -> int:
        return self.members * self.rows * self.cols * self.tile_numel

    @property
    def tile_numel(self) -> int:
        return self.height * self.width


def can_be_tiled(tensor: TensorSpec) -> bool:
    """Whether tiled storage means anything for the tensor: a matrix, or a stack of them, in tiles."""
    return tensor.block.kind == "tile" and len(tensor.shape) >= 2 and tensor.numel > 0


def tile_regions(tensor: TensorSpec) -> tuple[TileRegion, ...]:
    """The regions of a tensor in tiled storage, in their order; empty ones are left out.

    Example:
      >>> from ragged_jax.layout import TensorSpec, tile
      >>> [(r.rows, r.cols, r.height, r.width) for r in tile_regions(TensorSpec("w", (5, 8), block=tile(2, 4)))]
      [(2, 2, 2, 4), (1, 2, 1, 4)]
    """
    num_rows, num_cols = tensor.shape[-2:]
    height, width = min(tensor.block.size[0], num_rows), min(tensor.block.size[1], num_cols)
    members = tensor.numel // (num_rows * num_cols)
    (rows, bottom), (cols, right) = divmod(num_rows, height), divmod(num_cols, width)
    regions, start = [], 0
    for grid in (
        (rows, cols, height, width, 0, 0),
        (rows, 1, height, right, 0, cols * width),
        (1, cols, bottom, width, rows * height, 0),
        (1, 1, bottom, right, rows * height, cols * width),
    ):
        region = TileRegion(start, members, *grid)
        if region.numel:
            regions.append(region)
            start += region.numel
    return tuple(regions)


def cuts(tensor: TensorSpec, storage: Storage) -> tuple[int, int]:
    """Where a stored tensor may be cut: `(granularity, tail)` in elements.

    Cuts at multiples of the granularity are legal, except inside the last `tail` elements: edge tiles whose
    ends do not fall on such multiples. Edges of a half or a quarter of a tile do, and leave no tail.
    """
    if storage == "row_major":
        return tensor.granularity, 0
    regions = tile_regions(tensor)
    granularity = regions[0].tile_numel
    for region in regions[1:]:
        first = -region.start % granularity  # the first multiple, counted from the region's start
        inside = range(first, region.numel, granularity)
        if inside and (first % region.tile_numel or (len(inside) > 1 and granularity % region.tile_numel)):
            return granularity, tensor.numel - region.start
    return granularity, 0


def stored_order(tensor: TensorSpec, storage: Storage) -> "np.ndarray":
    """For each place in the stored tensor, the row-major index of the element that lies there.

    `tensor.reshape(-1)[order]` stores, and `out[order] = stored` reads back. Slow and obvious: the oracle
    of the runtimes, which un-tile region by region.
    """
    import numpy as np

    index = np.arange(tensor.numel)
    if storage == "row_major":
        return index
    matrices = index.reshape(-1, *tensor.shape[-2:])
    parts = []
    for r in tile_regions(tensor):
        part = matrices[:, r.top : r.top + r.rows * r.height, r.left : r.left + r.cols * r.width]
        tiles = part.reshape(r.members, r.rows, r.height, r.cols, r.width).transpose(0, 1, 3, 2, 4)
        parts.append(tiles.reshape(-1))
    return np.concatenate(parts)
