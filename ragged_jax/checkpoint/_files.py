"""Reading a checkpoint's files: ranges of bytes, each checked before it is handed on."""

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ._bytes import advance, crc32
from ._manifest import CheckpointError, FileEntry

_MAX_OPEN = 64
_BATCH_NBYTES, _MAX_VECTORS = 1 << 20, 512  # of one system call: checked while they are in the processor's cache
_MAX_PARTS = 16  # a chunk of more parts is read whole and copied from


class Want(NamedTuple):
    """Bytes to read.

    Attributes:
      offset: where they start in their file.
      out: where they belong.
      name: of the tensor that they are of, for messages.
    """

    offset: int
    out: memoryview
    name: str = ""


class Damage(CheckpointError):
    """Bytes of a file are not what was written.

    Attributes:
      file: the file.
      start, stop: the range of bytes.
      name: of the tensor that was being read.
    """

    def __init__(self, file: FileEntry, start: int, stop: int, what: str, name: str = ""):
        super().__init__(f"{file.name}, bytes {start} to {stop}: {what}")
        self.file, self.start, self.stop, self.name = file, start, stop, name


class _Chunk(NamedTuple):
    """A chunk to read: the memory that its bytes go to, and what is copied from there once they are checked."""

    number: int
    nbytes: int
    views: list[memoryview]
    copies: list[tuple[memoryview, memoryview]]
    name: str


class Files:
    """Open files of one checkpoint. Safe to use from several threads."""

    def __init__(self, folder: Path, chunk_nbytes: int):
        self._folder, self._size = folder, chunk_nbytes
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._last = threading.local()  # the chunk of which a thread has taken a part before: it may want more
        self._lock = threading.Lock()

    def size_fault(self, file: FileEntry) -> str:
        """What is wrong with a file's size or kind, or nothing."""
        try:
            status = os.stat(self._folder / file.name)
        except OSError as error:
            return f"{file.name}: {error.strerror or error}"
        if not stat.S_ISREG(status.st_mode):
            return f"{file.name}: not a file"
        if status.st_size != file.nbytes:
            return f"{file.name}: {status.st_size} bytes, {file.nbytes} were written"
        return ""

    def read(self, file: FileEntry, wants: Sequence[Want]) -> None:
        """Fills memory with bytes of a file.

        Every chunk that holds some of them is read once. Whole chunks go straight to where they are wanted; of those
        that are cut the rest is read along, because the checksums are of whole chunks.

        Args:
          file: the file.
          wants: by rising offset, disjoint.

        Raises:
          Damage: a checksum is not right.
          CheckpointError: the file cannot be read.
        """
        batch: list[_Chunk] = []
        nbytes = vectors = 0
        for number, parts in groupby(cut(wants, self._size), lambda part: part.offset // self._size):
            chunk = self._chunk(file, number, list(parts))
            if chunk is None:
                continue
            full = nbytes >= _BATCH_NBYTES or vectors >= _MAX_VECTORS
            if batch and (full or number != batch[-1].number + 1):
                self._read_batch(file, batch)
                batch, nbytes, vectors = [], 0, 0
            batch.append(chunk)
            nbytes, vectors = nbytes + chunk.nbytes, vectors + len(chunk.views)
        if batch:
            self._read_batch(file, batch)

    def _chunk(self, file: FileEntry, number: int, parts: list[Want]) -> "_Chunk | None":
        """What is to be read of a chunk; nothing where the thread has it from before."""
        start, last = number * self._size, parts[-1]
        nbytes = min(self._size, file.nbytes - start)
        if last.offset + last.out.nbytes > start + nbytes:
            raise Damage(file, last.offset, last.offset + last.out.nbytes, "behind the end of the file", last.name)
        if len(parts) <= _MAX_PARTS and sum(part.out.nbytes for part in parts) == nbytes:
            return _Chunk(number, nbytes, [part.out for part in parts], [], parts[0].name)
        before = getattr(self._last, "chunk", ("", 0, memoryview(b"")))
        known = before[:2] == (file.name, number)
        whole = before[2] if known else np.empty(nbytes, np.uint8).data
        copies = [(out, whole[at - start : at - start + out.nbytes]) for at, out, _ in parts]
        if not known:
            return _Chunk(number, nbytes, [whole], copies, parts[0].name)
        for out, data in copies:
            out[:] = data
        return None

    def _read_batch(self, file: FileEntry, batch: list[_Chunk]) -> None:
        start, nbytes = batch[0].number * self._size, sum(chunk.nbytes for chunk in batch)
        views = [view for chunk in batch for view in chunk.views]
        try:
            opened, done = self._opened(file), 0
            while views:
                count = os.preadv(opened.descriptor, views, start + done)
                if count == 0:
                    raise Damage(file, start + done, start + nbytes, "the file ends before", batch[0].name)
                done += count
                advance(views, count)
        except OSError as error:
            what = error.strerror or str(error)
            raise Damage(file, start, start + nbytes, what, batch[0].name) from None
        for chunk in batch:
            found = 0
            for view in chunk.views:
                found = crc32(view, found)
            if found != file.crc32[chunk.number]:
                start = chunk.number * self._size
                raise Damage(file, start, start + chunk.nbytes, "the checksum is wrong", chunk.name)
            for out, data in chunk.copies:
                out[:] = data
            if chunk.copies:
                self._last.chunk = file.name, chunk.number, chunk.views[0]

    def _opened(self, file: FileEntry) -> "_Open":
        with self._lock:
            if (opened := self._open.pop(file.name, None)) is None:
                if fault := self.size_fault(file):
                    raise CheckpointError(fault)
                opened = _Open(self._folder / file.name)
                if len(self._open) >= _MAX_OPEN:
                    self._open.popitem(last=False)
            self._open[file.name] = opened
            return opened

    def close(self) -> None:
        with self._lock:
            self._last = threading.local()
            self._open.clear()


class _Open:
    """An open file, closed when no thread reads from it any more."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close):  # `os` may be gone when the interpreter ends
        if hasattr(self, "descriptor"):
            close(self.descriptor)


def cut(wants: Iterable[Want], nbytes: int) -> Iterator[Want]:
    """The same, cut where the file's offset is a multiple of `nbytes`."""
    for offset, out, name in wants:
        done = 0
        while done < out.nbytes:
            room = nbytes - (offset + done) % nbytes
            yield Want(offset + done, out[done : done + room], name)
            done += room
