"""Bytes: their checksums, views of them, and the dtypes of what they hold."""

import zlib
from typing import Any

import numpy as np

from ..layout import itemsize
from ._lazy import Lazy

try:
    from zlib_ng import zlib_ng  # pyright: ignore[reportMissingImports]
except ImportError:
    zlib_ng = zlib


def crc32(data: memoryview, start: int = 0) -> int:
    """CRC32 of bytes that follow others, of which it is `start`. zlib-ng has it many times as fast as Python."""
    return zlib_ng.crc32(data, start)


def bytes_of(buffer: Any) -> memoryview:
    """The bytes of an array or another contiguous buffer; `Lazy` as they are."""
    if isinstance(buffer, Lazy):
        return buffer  # pyright: ignore[reportReturnType]
    if isinstance(buffer, np.ndarray):  # bfloat16 and its like have no buffers of their own
        return np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
    return memoryview(buffer).cast("B")


def advance(views: list[memoryview], nbytes: int) -> None:
    """Takes the first bytes away, in place: those that were read or written."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views.pop(0).nbytes
    if views:
        views[0] = views[0][nbytes:]


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype that layouts call so. Those that numpy lacks come from ml_dtypes.

    Raises:
      ImportError: ml_dtypes is needed and not installed.
    """
    itemsize(name)
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def raw_dtype(name: str) -> np.dtype:
    """A dtype of the same size that numpy knows, as what bytes are moved about."""
    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}[itemsize(name)])
