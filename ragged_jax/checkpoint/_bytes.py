"""Bytes: their checksums, and views of them."""

import zlib
from typing import Any

import numpy as np

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
