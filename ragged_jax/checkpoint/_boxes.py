"""Reading a tensor in another order than the one it is stored in: range by range, window by window."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..layout import Link, boxes
from ._manifest import Region

_CALL_NBYTES = 1 << 15  # reading on is cheaper than another call, up to about so many bytes


class Window(NamedTuple):
    """A part of a box that is read in one go.

    Attributes:
      box: the part, a range of each dim.
      first, numel: the elements that are read, in row-major order.
      shape: theirs as an array.
      picks: where the part is in that array.
    """

    box: Region
    first: int
    numel: int
    shape: tuple[int, ...]
    picks: tuple[slice, ...]


def windows(box: Region, dims: tuple[int, ...], itemsize: int, max_nbytes: int) -> Iterator[Window]:
    """What to read for a box of a row-major tensor.

    Rows of which most is wanted are read whole, many at a time; of others only what is wanted.

    Args:
      box: a range of each dim, none empty.
      dims: the tensor's shape.
      itemsize: bytes of an element.
      max_nbytes: of one window.
    """
    at = next((dim for dim, (low, high) in enumerate(box) if high - low > 1), len(box) - 1)
    if at < 0:
        yield Window((), 0, 1, (), ())
        return
    (low, high), inner = box[at], math.prod(dims[at + 1 :])
    used = math.prod(stop - start for start, stop in box[at + 1 :])
    if inner * itemsize > min(max_nbytes, used * itemsize + _CALL_NBYTES):
        for row in range(low, high):
            yield from windows((*box[:at], (row, row + 1), *box[at + 1 :]), dims, itemsize, max_nbytes)
        return
    before = 0
    for (start, _), size in zip(box[:at], dims, strict=False):
        before = before * size + start
    before *= dims[at]
    step = max(1, max_nbytes // max(1, inner * itemsize))
    for row in range(low, high, step):
        stop = min(row + step, high)
        yield Window(
            (*box[:at], (row, stop), *box[at + 1 :]),
            (before + row) * inner,
            (stop - row) * inner,
            (*(1,) * at, stop - row, *dims[at + 1 :]),
            (*(slice(None),) * (at + 1), *(slice(*span) for span in box[at + 1 :])),
        )


Read = Callable[[int, np.ndarray], None]
"""Fills a flat array with row-major elements of a tensor, from the given one on."""


def fill(link: Link, first: int, out: np.ndarray, read: Read, max_nbytes: int) -> None:
    """Fills in what one source tensor gives of a range of a target tensor.

    Args:
      link: where the source lies in the target.
      first: the target's row-major element that belongs at `out[0]`.
      out: flat and contiguous, of the source's dtype.
      read: reads the source.
      max_nbytes: to hold besides.
    """
    at = 0
    for box in (box.region for box in boxes(link.target_dims, first, first + len(out))):
        sizes = tuple(high - low for low, high in box)
        numel = math.prod(sizes)
        if _takes_part(box, link.target_index):
            _fill_box(link, box, out[at : at + numel].reshape(sizes), read, max_nbytes)
        at += numel


def _takes_part(box: Region, index: tuple[int | None, ...]) -> bool:
    return all(at is None or low <= at < high for (low, high), at in zip(box, index, strict=True))


def _fill_box(link: Link, box: Region, out: np.ndarray, read: Read, max_nbytes: int) -> None:
    """`out` has the shape of a box of the target's fine dims; what the source gives of it is filled in."""
    at = (slice(None) if t is None else t - low for (low, _), t in zip(box, link.target_index, strict=True))
    out = out[(*at, ...)]  # the dots keep what has no dims an array
    spans = [span for span, at in zip(box, link.target_index, strict=True) if at is None]
    back = np.argsort(link.axes) if link.axes else []
    shared = iter(spans[int(dim)] for dim in back)
    wanted = tuple(next(shared) if at is None else (at, at + 1) for at in link.source_index)
    given = [dim for dim, at in enumerate(link.source_index) if at is None]
    in_order = link.axes == tuple(range(len(link.axes)))
    for window in windows(wanted, link.source_dims, out.itemsize, max_nbytes):
        places = [slice(window.box[dim][0] - wanted[dim][0], window.box[dim][1] - wanted[dim][0]) for dim in given]
        target = out[(*(places[axis] for axis in link.axes), ...)]
        if in_order and target.size == window.numel and target.flags.c_contiguous:
            read(window.first, target.reshape(-1))
            continue
        data = np.empty(window.numel, out.dtype)
        read(window.first, data)
        part = data.reshape(window.shape)[window.picks]
        target[...] = part.reshape([part.shape[dim] for dim in given]).transpose(link.axes)
