"""A range of a flattened tensor as boxes: what formats that know only rectangles can say of it."""

import math
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle in a tensor.

    Attributes:
      offsets: its first index along every dim.
      sizes: its length along every dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """It as `(start, stop)` of every dim."""
        return tuple((offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))


def boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Cuts elements `start` to `stop` of a tensor's row-major order into boxes.

    The boxes are as few as rising order allows, at most `2 * len(shape) - 1`: laid out one after the other they are
    the range again. Distributed checkpoints of PyTorch store such boxes.

    Raises:
      ValueError: the range is not within the tensor.

    Example:
      >>> [tuple(box) for box in boxes((4, 5), 3, 12)]
      [((0, 3), (1, 2)), ((1, 0), (1, 5)), ((2, 0), (1, 2))]
      >>> [tuple(box) for box in boxes((4, 5), 5, 20)]
      [((1, 0), (3, 5))]
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} of a tensor of shape {shape}")
    return tuple(_boxes(shape, start, stop)) if start < stop else ()


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if not shape:
        return [Box((), ())]
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:  # within one row
        return [_at(last, box) for box in _boxes(rest, start - last * row, stop - last * row)]
    head = (
        [_at(first - 1, box) for box in _boxes(rest, start - (first - 1) * row, row)] if start < first * row else []
    )
    body = [Box((first,) + (0,) * len(rest), (last - first, *rest))] if first < last else []
    tail = [_at(last, box) for box in _boxes(rest, 0, stop - last * row)] if last * row < stop else []
    return head + body + tail


def _at(index: int, box: Box) -> Box:
    return Box((index, *box.offsets), (1, *box.sizes))
