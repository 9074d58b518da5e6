"""Reading a checkpoint's files: ranges of bytes, each checked before it is handed on."""

import os
import stat
import threading
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np

from ._manifest import CheckpointError, FileEntry

_MAX_OPEN = 64
_BATCH_CHUNKS = 64


class Damage(CheckpointError):
    """Bytes of a file are not what was written.

    Attributes:
      file: the file.
      start, stop: the range of bytes.
    """

    def __init__(self, file: FileEntry, start: int, stop: int, what: str):
        super().__init__(f"{file.name}, bytes {start} to {stop}: {what}")
        self.file, self.start, self.stop = file, start, stop


class Files:
    """Open files of one checkpoint. Safe to use from several threads."""

    def __init__(self, folder: Path, chunk_nbytes: int):
        self._folder, self._chunk = folder, chunk_nbytes
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._last = threading.local()  # the chunk at the edge of the range that a thread read before
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

    def read_into(self, file: FileEntry, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a file from `offset` on.

        Whole chunks go straight to where they are wanted. Of those that are cut the rest is read along, because the
        checksums are of whole chunks.

        Raises:
          Damage: a checksum is not right.
          CheckpointError: the file cannot be read.
        """
        position, end = offset, offset + out.nbytes
        while position < end:
            chunk, skipped = divmod(position, self._chunk)
            if skipped == 0 and (count := min((end - position) // self._chunk, _BATCH_CHUNKS)):
                target = out[position - offset : position - offset + count * self._chunk]
                self._read(file, position, target)
                for at in range(count):
                    self._check(file, chunk + at, target[at * self._chunk : (at + 1) * self._chunk])
                position += target.nbytes
                continue
            data = self._edge(file, chunk)
            taken = min(end - position, data.nbytes - skipped)
            if taken <= 0:
                raise Damage(file, position, end, "behind the end of the file")
            out[position - offset : position - offset + taken] = data[skipped : skipped + taken]
            position += taken

    def _edge(self, file: FileEntry, chunk: int) -> memoryview:
        last = getattr(self._last, "chunk", None)
        if last and last[:2] == (file.name, chunk):
            return last[2]
        start = chunk * self._chunk
        data = np.empty(max(0, min(self._chunk, file.nbytes - start)), np.uint8).data
        self._read(file, start, data)
        self._check(file, chunk, data)
        self._last.chunk = file.name, chunk, data
        return data

    def _check(self, file: FileEntry, chunk: int, data: memoryview) -> None:
        if zlib.crc32(data) != file.crc32[chunk]:
            start = chunk * self._chunk
            raise Damage(file, start, start + data.nbytes, "the checksum is wrong")

    def _read(self, file: FileEntry, offset: int, out: memoryview) -> None:
        try:
            opened = self._opened(file)
            done = 0
            while done < out.nbytes:
                count = os.preadv(opened.descriptor, [out[done:]], offset + done)
                if count == 0:
                    raise Damage(file, offset + done, offset + out.nbytes, "the file ends before")
                done += count
        except OSError as error:
            raise Damage(file, offset, offset + out.nbytes, error.strerror or str(error)) from None

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

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)
