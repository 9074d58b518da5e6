"""Tensors that are stored in another order than that in which they are wanted: tile by tile, or transposed."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ..layout import Placement, row_major_index, stored_index
from ._manifest import TensorEntry
from ._runs import Run
from ._sources import Source

_WINDOW = 1 << 18  # elements that are put into another order at a time


def same_order(entry: TensorEntry, placement: Placement) -> bool:
    """Whether a tensor is stored in the order in which it is wanted."""
    if placement.storage == "tiled":
        height, width = placement.tensor.block.size
        rows, cols = placement.tensor.shape[-2:]
        return entry.tile == (min(height, rows), min(width, cols))
    order = placement.axis_order
    identity = order is None or order == tuple(range(len(order)))
    return entry.tile is None and (entry.axis_order == order or (identity and entry.axis_order is None))


def windows(offset: int, numel: int, size: int, chunk_nbytes: int) -> Iterator[tuple[int, int]]:
    """Cuts elements into ranges that are read one after the other, so that no chunk is in two of them.

    Args:
      offset: where the first element is in its file, in bytes.
      numel: how many there are.
      size: of one, in bytes.
      chunk_nbytes: the size of the file's chunks.
    """
    head = -offset % chunk_nbytes // size
    yield from pairwise([0, *range(head or _WINDOW, numel, _WINDOW), numel])


class Picking:
    """What is wanted of a stored tensor, and where it belongs.

    Args:
      source: which of its elements.
      stored: the order in which they lie in the file.
      placement: the order in which they are wanted.
      wanted: which, in that order, and where they belong.
    """

    def __init__(self, source: Source, stored: Placement, placement: Placement, wanted: Sequence[Run]):
        self._source, self._stored, self._placement = source, stored, placement
        self._first, self._at, self._numel = (np.array(x, np.int64) for x in zip(*sorted(wanted), strict=True))

    def places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Of a range of stored elements, which are wanted, and where these belong."""
        source = self._source
        index = row_major_index(self._stored, np.arange(start, stop)) - source.held
        inside = (index >= 0) & (index < source.numel)
        index[inside] = stored_index(self._placement, index[inside] + source.wanted)
        which = np.searchsorted(self._first, index, "right") - 1
        inside &= (which >= 0) & (index < self._first[which] + self._numel[which])
        chosen = which[inside]
        return inside, self._at[chosen] + index[inside] - self._first[chosen]
