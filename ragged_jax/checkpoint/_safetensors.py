"""Safetensors files, written with checksums.

The data of every entry starts at a multiple of 64 bytes, so that a mapped file can be used in place. The format
allows no gaps, so entries of bytes fill them; their names start with `FILLER`.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..layout import SAFETENSORS_DTYPES
from ._bytes import advance, bytes_of, crc32
from ._room import take_room

ALIGNMENT = 64
CHUNK_NBYTES = 1 << 18
_BATCH_NBYTES, _MAX_VECTORS = 1 << 20, 512
FILLER = "~fill/"
_RESERVED = "__metadata__"


class Entry(NamedTuple):
    """An array to write.

    Attributes:
      name: of the entry; unique in its file.
      dtype: its element type, as layouts name it.
      shape: of the array as the file shows it.
      data: contiguous buffers that make it up, one after the other, or `Lazy`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: tuple[Any, ...]


class Written(NamedTuple):
    """What was written.

    Attributes:
      nbytes: of the file.
      crc32: of each chunk of `CHUNK_NBYTES` bytes of the file, in turn.
      offsets: where the data of each entry starts in the file, in bytes.
    """

    nbytes: int
    crc32: tuple[int, ...]
    offsets: tuple[int, ...]


def write_safetensors(
    path: Path, entries: Sequence[Entry], *, alignment: int = ALIGNMENT, metadata: Mapping[str, str] | None = None
) -> Written:
    """Writes a new file and brings it to the disk.

    Args:
      path: the file.
      entries: what goes into it.
      alignment: of the data of every entry; 1 leaves no gaps, and so no fillers.
      metadata: texts for the header.

    Raises:
      FileExistsError: there is one.
      OSError: the disk is full, or the like. What was written by then stays there.
    """
    views = [[bytes_of(buffer) for buffer in entry.data] for entry in entries]
    sizes = [sum(view.nbytes for view in parts) for parts in views]
    header, starts, fillers = _header(entries, sizes, alignment, metadata)
    stream = [memoryview(header)]
    for parts, filler in zip(views, fillers, strict=True):
        stream += [*parts, filler]
    chunks = _write(path, stream)
    return Written(chunks.nbytes, chunks.done(), tuple(starts))


def _batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """What is written by one call: about 1 MiB, checksummed while it is in the processor's cache."""
    batch, nbytes = [], 0
    for view in views:
        for start in range(0, view.nbytes, CHUNK_NBYTES):
            batch.append(view[start : start + CHUNK_NBYTES])
            nbytes += batch[-1].nbytes
            if nbytes >= _BATCH_NBYTES or len(batch) == _MAX_VECTORS:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _write_all(descriptor: int, views: list[memoryview]) -> None:
    while views:
        advance(views, os.writev(descriptor, views))


def write_bytes(path: Path, data: bytes) -> Written:
    """The same for a file of another kind."""
    chunks = _write(path, [memoryview(data)])
    return Written(chunks.nbytes, chunks.done(), ())


def _write(path: Path, stream: Sequence[memoryview]) -> "_Chunks":
    chunks = _Chunks()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        take_room(descriptor, sum(view.nbytes for view in stream))
        for batch in _batches(stream):
            for view in batch:
                chunks.add(view)
            _write_all(descriptor, batch)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return chunks


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(
    entries: Sequence[Entry], sizes: Sequence[int], alignment: int, metadata: Mapping[str, str] | None
) -> tuple[bytes, list[int], list[memoryview]]:
    document: dict[str, Any] = {_RESERVED: dict(metadata)} if metadata else {}
    starts, fillers, end = [], [], 0
    for entry, nbytes in zip(entries, sizes, strict=True):
        if entry.name in document or entry.name == _RESERVED or entry.name.startswith(FILLER):
            raise ValueError(f"{entry.name!r} is twice in one file, or is a reserved name")
        shape, dtype = entry.shape, SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:  # complex128: pairs of floats
            shape, dtype = (*shape, 2), "F64"
        document[entry.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        starts.append(end)
        missing = -nbytes % alignment
        if missing:
            span = [end + nbytes, end + nbytes + missing]
            document[f"{FILLER}{len(starts)}"] = {"dtype": "U8", "shape": [missing], "data_offsets": span}
        fillers.append(memoryview(bytes(missing)))
        end += nbytes + missing
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, [len(header) + start for start in starts], fillers


class _Chunks:
    """Checksums of a stream, chunk by chunk."""

    def __init__(self):
        self.nbytes = 0
        self._sums: list[int] = []
        self._current = 0

    def add(self, view: memoryview) -> None:
        while view.nbytes:
            room = CHUNK_NBYTES - self.nbytes % CHUNK_NBYTES
            self._current = crc32(view[:room], self._current)
            taken = min(room, view.nbytes)
            self.nbytes += taken
            if taken == room:
                self._sums.append(self._current)
                self._current = 0
            view = view[taken:]

    def done(self) -> tuple[int, ...]:
        return (*self._sums, self._current) if self.nbytes % CHUNK_NBYTES else tuple(self._sums)


def entry_shape(stored_shape: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    """How a range of a tensor is shown in a file: as whole rows where it consists of them, else flat."""
    row = math.prod(stored_shape[1:])
    if stored_shape and row and start % row == stop % row == 0:
        return ((stop - start) // row, *stored_shape[1:])
    return () if not stored_shape else (stop - start,)
