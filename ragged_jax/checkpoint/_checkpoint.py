"""`Checkpoint`: a saved state, read tensor by tensor and range by range, without any framework."""

import stat
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import (
    Layout,
    LayoutError,
    Placement,
    TensorSpec,
    itemsize,
    listed,
    named,
)
from ._batch import Batch
from ._bytes import bytes_of, numpy_dtype, raw_dtype
from ._files import Damage, Files, Want
from ._manifest import CheckpointError, FileEntry, Manifest, Region, TensorEntry, numel_of
from ._order import Picking, same_order, windows
from ._runs import Run, meet, runs_of
from ._sources import Source, find_sources, shape_of

MANIFEST = "manifest.json"
_MAX_MANIFEST_NBYTES = 4 << 30


class Checkpoint:
    """A checkpoint on disk.

    Opening it reads the manifest and looks at the sizes of the files. Numbers are read when they are asked for, and
    each is checked before it is returned.

    Args:
      path: the checkpoint's folder.

    Raises:
      CheckpointError: it is incomplete or damaged; every missing or cut file is named, with the tensors in it.

    Attributes:
      path: its folder.
      manifest: what it holds and where.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> from ragged_jax.checkpoint import CheckpointDirectory, Part, TensorEntry
      >>> folder = CheckpointDirectory(tempfile.mkdtemp())
      >>> entry, part = TensorEntry("float32", (3,)), Part("w", ((0, 3),), np.arange(3, dtype=np.float32))
      >>> path = folder.save(7, {"w": entry}, [part])
      >>> with Checkpoint(path) as checkpoint:
      ...     checkpoint.step, checkpoint.read("w")
      (7, array([0., 1., 2.], dtype=float32))
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self._files = Files(self.path, self.manifest.chunk_nbytes)
        faults = [fault for file in self.manifest.files if (fault := self._size_fault(file))]
        faults += self.manifest.incomplete()
        if faults:
            raise CheckpointError(f"{self.path} is damaged:" + listed(faults))

    def _size_fault(self, file: FileEntry) -> str:
        fault = self._files.size_fault(file)
        return f"{fault}; it holds {self.contents(file, 0, file.nbytes) or 'no tensor'}" if fault else ""

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def metadata(self) -> dict[str, Any]:
        """What the user saved along with the tensors."""
        return self.manifest.metadata

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """By name."""
        return self.manifest.tensors

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """By prefix of the tensors' names, the layouts that they had when they were saved."""
        files = {file.name: file for file in self.manifest.files}
        layouts = {}
        for prefix, name in self.manifest.layouts.items():
            if (file := files.get(name)) is None:
                raise CheckpointError(f"{self.path}: the layout of {prefix!r} is in {name!r}, which is not there")
            data = bytearray(file.nbytes)
            self._read(file, [Want(0, memoryview(data))])
            try:
                layouts[prefix] = Layout.from_json(bytes(data))
            except LayoutError as error:
                raise LayoutError(f"{self.path / name}: {error}") from None
        return layouts

    def read(self, name: str) -> np.ndarray:
        """A whole tensor in its own shape.

        Raises:
          CheckpointError: there is none of this name, or its bytes are damaged; file, tensor and range are named.
          ImportError: a dtype that numpy lacks, when ml_dtypes is not installed.
        """
        shape = self.entry(name).shape
        return self.read_region(name, tuple((0, size) for size in shape), shape)

    def batch(self) -> Batch:
        """Collects what is to be read, and reads it together when the block of `with checkpoint.batch()` ends.

        Until then the memory that is to be filled is as it was.
        """
        return Batch(self._read, self.manifest.chunk_nbytes)

    def read_region(
        self, name: str, region: Region, shape: tuple[int, ...], batch: Batch | None = None
    ) -> np.ndarray:
        """A part of a tensor, given as a range `(start, stop)` of each dim.

        Args:
          name: of the tensor. A stack `P/rest` of layers may have been saved as `P/0/rest`, `P/1/rest` and so on, and
            a layer as part of such a stack.
          region: the part.
          shape: that the tensor is expected to have.
          batch: that it is read with. None: it is read now.
        """
        dtype = numpy_dtype(self.entry(self.sources(name, shape)[0].name).dtype)
        out = np.empty(tuple(stop - start for start, stop in region), dtype)
        runs = runs_of(region, shape) if region else [Run(0, 0, 1)]
        self.read_runs(name, runs, out.reshape(-1), Placement(TensorSpec(name, shape), 0), batch)
        return out

    def entry(self, name: str) -> TensorEntry:
        """What the manifest says of a tensor."""
        if name not in self.tensors:
            near = get_close_matches(name, self.tensors, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise CheckpointError(f"{self.path} has no tensor {name!r}{hint}")
        return self.tensors[name]

    def sources(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        """Where a tensor's elements come from.

        Raises:
          CheckpointError: there is no such tensor, nor layers or a stack that it is made of, or it has another shape.
        """
        if not (found := find_sources(self.tensors, name, shape)):
            saved = shape_of(self.tensors, name) or self.entry(name).shape
            raise CheckpointError(f"{name}: saved with shape {saved}, wanted with {tuple(shape)}")
        return found

    def read_runs(
        self, name: str, wanted: Sequence[Run], out: np.ndarray, placement: Placement, batch: Batch | None = None
    ) -> None:
        """Fills parts of a flat array with ranges of a tensor.

        Args:
          name: of the tensor.
          wanted: which elements, in the order that `placement` says, and where in `out` they belong.
          out: flat and contiguous, of the dtype with which the tensor was saved.
          placement: shape and order of the tensor as it is wanted.
          batch: that they are read with. None: they are read now.
        """
        if batch is None:
            with self.batch() as own:
                self.read_runs(name, wanted, out, placement, own)
            return
        for source in self.sources(name, placement.tensor.shape):
            entry = self.entry(source.name)
            held, raw = self._held(entry), out.view(raw_dtype(entry.dtype))
            ordered = same_order(entry, placement)
            if ordered and (source.numel == placement.tensor.numel == entry.numel or entry.row_major):
                self._copy(source, held, wanted, raw, batch)
            else:
                self._scatter(source, entry, held, wanted, raw, placement)

    def read_part(
        self,
        name: str,
        start: int,
        out: np.ndarray,
        placement: Placement,
        *,
        cast: bool = False,
        batch: Batch | None = None,
    ) -> None:
        """Fills a flat array with consecutive elements of a tensor.

        Args:
          name: of the tensor.
          start: the first of them, in the order that `placement` says.
          out: flat and contiguous.
          placement: shape and order of the tensor as it is wanted.
          cast: whether a tensor that was saved with another dtype is converted; otherwise it is an error.
          batch: that they are read with. None: they are read now.

        Raises:
          CheckpointError: there is no such tensor, or it is damaged.
          ValueError: it was saved with another dtype.
        """
        saved = self.entry(self.sources(name, placement.tensor.shape)[0].name).dtype
        if saved == str(out.dtype):
            self.read_runs(name, [Run(start, 0, out.size)], out, placement, batch)
        elif cast:
            raw = np.empty(out.size, numpy_dtype(saved))
            self.read_runs(name, [Run(start, 0, out.size)], raw, placement)
            out[:] = raw.astype(out.dtype)
        else:
            raise ValueError(f"{name}: saved as {saved}, wanted as {out.dtype}; `cast=True` would convert it")

    def _held(self, entry: TensorEntry) -> list[tuple[FileEntry, int, list[Run]]]:
        """Each piece of a tensor: its file, the place of its first element there in bytes, its runs from there."""
        return [
            (self.manifest.files[piece.file], piece.offset, runs_of(piece.region, entry.shape))
            for piece in entry.pieces
            if numel_of(piece.region)
        ]

    def _copy(self, source: Source, held: list, wanted: Sequence[Run], raw: np.ndarray, batch: Batch) -> None:
        """Where what is read lies in the order in which it is wanted."""
        size, low, high = raw.dtype.itemsize, source.wanted, source.wanted + source.numel
        clipped = []
        for run in wanted:
            first, stop = max(run.first, low), min(run.first + run.numel, high)
            if first < stop:
                clipped.append(Run(first, run.at + first - run.first, stop - first))
        data = bytes_of(raw)
        for file, offset, runs in held:
            for at, to, numel in meet(runs, clipped, source.held - source.wanted):
                target = data[to * size : (to + numel) * size]
                batch.add(file, Want(offset + at * size, target, source.name))

    def _scatter(
        self, source: Source, entry: TensorEntry, held: list, wanted: Sequence[Run], raw: np.ndarray, to: Placement
    ) -> None:
        """Where the orders differ: the tensor passes by window by window, and what is wanted of it is picked out."""
        if not wanted:
            return
        size, picking = raw.dtype.itemsize, Picking(source, entry.placement(), to, wanted)
        for file, offset, runs in held:
            for first, at, numel in runs:
                base = offset + at * size
                for start, stop in windows(base, numel, size, self.manifest.chunk_nbytes):
                    inside, places = picking.places(first + start, first + stop)
                    if inside.any():
                        window = np.empty(stop - start, raw.dtype)
                        self._read(file, [Want(base + start * size, bytes_of(window), source.name)])
                        raw[places] = window[inside]

    def _read(self, file: FileEntry, wants: Sequence[Want]) -> None:
        try:
            self._files.read(file, wants)
        except Damage as damage:
            held = self.contents(file, damage.start, damage.stop)
            reading = f" (reading {damage.name})" if damage.name else ""
            raise CheckpointError(f"{self.path}: {damage}; there lie {held or 'no numbers'}{reading}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def contents(self, file: FileEntry, start: int, stop: int) -> str:
        """The tensors in a range of bytes of a file, with the ranges of their stored elements."""
        found = []
        for name, entry in self.tensors.items():
            size = itemsize(entry.dtype)
            for piece in entry.pieces:
                nbytes = numel_of(piece.region) * size
                if self.manifest.files[piece.file] is file and piece.offset < stop and piece.offset + nbytes > start:
                    low = max(0, start - piece.offset) // size
                    high = -(-(min(stop - piece.offset, nbytes)) // size)
                    base = piece.region[0][0] if len(piece.region) == 1 else 0
                    found.append(f"{name}[{base + low}:{base + high}]")
        return named(found)

    def verify(self) -> list[str]:
        """Reads every byte. Returns what is wrong, by file, tensor and range; empty for a sound checkpoint."""
        faults = []
        for file in self.manifest.files:
            buffer = memoryview(bytearray(min(file.nbytes, self.manifest.chunk_nbytes)))
            for start in range(0, file.nbytes, self.manifest.chunk_nbytes):
                try:
                    self._read(file, [Want(start, buffer[: min(len(buffer), file.nbytes - start)])])
                except CheckpointError as error:
                    faults.append(str(error))
        return faults

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def close(self) -> None:
        self._files.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        nbytes = sum(entry.nbytes for entry in self.tensors.values())
        return f"Checkpoint({self.path}: step {self.step}, {len(self)} tensors, {nbytes} bytes)"


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise CheckpointError("not a file")
        if status.st_size > _MAX_MANIFEST_NBYTES:
            raise CheckpointError(f"{status.st_size} bytes are more than any checkpoint's manifest has")
        return Manifest.from_bytes(path.read_bytes())
    except OSError as error:
        inside = ", ".join(sorted(found.name for found in folder.glob("step_*")))
        hint = f"that is one of {inside}" if inside else "not a checkpoint, or not a whole one"
        raise CheckpointError(f"{path}: {error.strerror or error}; {hint}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_tensor(path: str | Path, name: str) -> np.ndarray:
    """One tensor of the checkpoint in a folder, whole, as a numpy array."""
    with Checkpoint(path) as checkpoint:
        return checkpoint.read(name)
