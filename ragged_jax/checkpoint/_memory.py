"""Memory for much data."""

import contextlib
import math
import mmap

import numpy as np

from ._safetensors import ALIGNMENT

_PAGE_NBYTES = 2 << 20


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, so that jax takes it on CPU without a copy.

    What is large comes in pages of 2 MiB where the system has them: to fill new memory takes a third of the time.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _PAGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = np.empty(nbytes + ALIGNMENT, np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        return room[first : first + nbytes].view(dtype).reshape(shape)
    rest = nbytes % _PAGE_NBYTES
    pages = mmap.mmap(-1, nbytes - rest + (rest and _PAGE_NBYTES), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the rest is in small pages, so that no memory is lost
        pages.madvise(mmap.MADV_HUGEPAGE, 0, nbytes - rest)
    return np.frombuffer(pages, np.uint8, nbytes).view(dtype).reshape(shape)
