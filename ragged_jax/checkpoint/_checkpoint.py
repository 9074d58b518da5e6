"""`Checkpoint`: a saved state, read tensor by tensor and range by range, without any framework."""

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..layout import Layout, LayoutError, Placement, TensorSpec, itemsize, row_major_index, stored_index
from ._files import Damage, Files
from ._manifest import CheckpointError, FileEntry, Manifest, Region, TensorEntry, numel_of
from ._runs import Run, meet, runs_of
from ._safetensors import bytes_of

MANIFEST = "manifest.json"
_MAX_MANIFEST_NBYTES = 4 << 30
_WINDOW = 1 << 18  # elements that are put into another order at a time


class Source(NamedTuple):
    """Where elements of a wanted tensor come from: `numel` of them, in row-major order.

    Usually a whole tensor of the same name. A stack of layers may come from tensors of one layer each, and a layer
    from a stack.
    """

    name: str
    wanted: int
    held: int
    numel: int


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
            raise CheckpointError(f"{self.path} is damaged:\n" + "\n".join(f"  {fault}" for fault in faults))

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
            self._read_file(file, 0, memoryview(data))
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

    def read_region(self, name: str, region: Region, shape: tuple[int, ...]) -> np.ndarray:
        """A part of a tensor, given as a range `(start, stop)` of each dim.

        Args:
          name: of the tensor. A stack `P/rest` of layers may have been saved as `P/0/rest`, `P/1/rest` and so on, and
            a layer as part of such a stack.
          region: the part.
          shape: that the tensor is expected to have.
        """
        dtype = numpy_dtype(self.entry(self.sources(name, shape)[0].name).dtype)
        out = np.empty(tuple(stop - start for start, stop in region), dtype)
        runs = runs_of(region, shape) if region else [Run(0, 0, 1)]
        self.read_runs(name, runs, out.reshape(-1), Placement(TensorSpec(name, shape), 0))
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
        numel = math.prod(shape)
        if name in self.tensors:
            if (saved := self.tensors[name].shape) != tuple(shape):
                raise CheckpointError(f"{name}: saved with shape {saved}, wanted with {tuple(shape)}")
            return [Source(name, 0, 0, numel)]
        found = self._from_layers(name, shape) or self._from_stack(name, shape)
        if not found:
            self.entry(name)  # raises
        return found

    def _from_layers(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        if not shape or not shape[0]:
            return []
        steps, numel = name.split("/"), math.prod(shape[1:])
        for at in range(len(steps), -1, -1):
            names = ["/".join((*steps[:at], str(layer), *steps[at:])) for layer in range(shape[0])]
            if all(n in self.tensors and self.tensors[n].shape == tuple(shape[1:]) for n in names):
                return [Source(n, layer * numel, 0, numel) for layer, n in enumerate(names)]
        return []

    def _from_stack(self, name: str, shape: tuple[int, ...]) -> list[Source]:
        steps, numel = name.split("/"), math.prod(shape)
        for at in (at for at, step in enumerate(steps) if step.isdecimal()):
            stack, layer = "/".join((*steps[:at], *steps[at + 1 :])), int(steps[at])
            saved = self.tensors[stack].shape if stack in self.tensors else ()
            if saved[1:] == tuple(shape) and saved and layer < saved[0]:
                return [Source(stack, 0, layer * numel, numel)]
        return []

    def read_runs(self, name: str, wanted: Sequence[Run], out: np.ndarray, placement: Placement) -> None:
        """Fills parts of a flat array with ranges of a tensor.

        Args:
          name: of the tensor.
          wanted: which elements, in the order that `placement` says, and where in `out` they belong.
          out: flat and contiguous, of the dtype with which the tensor was saved.
          placement: shape and order of the tensor as it is wanted.
        """
        for source in self.sources(name, placement.tensor.shape):
            entry = self.entry(source.name)
            held, raw = self._held(entry), out.view(_raw(entry.dtype))
            ordered = _same_order(entry, placement)
            if ordered and (source.numel == placement.tensor.numel == entry.numel or entry.row_major):
                self._copy(source, entry, held, wanted, raw)
            else:
                self._scatter(source, entry, held, sorted(wanted), raw, placement)

    def read_part(self, name: str, start: int, out: np.ndarray, placement: Placement, *, cast: bool = False) -> None:
        """Fills a flat array with consecutive elements of a tensor.

        Args:
          name: of the tensor.
          start: the first of them, in the order that `placement` says.
          out: flat and contiguous.
          placement: shape and order of the tensor as it is wanted.
          cast: whether a tensor that was saved with another dtype is converted; otherwise it is an error.

        Raises:
          CheckpointError: there is no such tensor, or it is damaged.
          ValueError: it was saved with another dtype.
        """
        saved = self.entry(self.sources(name, placement.tensor.shape)[0].name).dtype
        if saved != str(out.dtype) and not cast:
            raise ValueError(f"{name}: saved as {saved}, wanted as {out.dtype}; `cast=True` would convert it")
        raw = out if saved == str(out.dtype) else np.empty(out.size, numpy_dtype(saved))
        self.read_runs(name, [Run(start, 0, out.size)], raw, placement)
        if raw is not out:
            out[:] = raw.astype(out.dtype)

    def _held(self, entry: TensorEntry) -> list[tuple[FileEntry, int, list[Run]]]:
        """Each piece of a tensor: its file, the place of its first element there in bytes, its runs from there."""
        return [
            (self.manifest.files[piece.file], piece.offset, runs_of(piece.region, entry.shape))
            for piece in entry.pieces
            if numel_of(piece.region)
        ]

    def _copy(self, source: Source, entry: TensorEntry, held: list, wanted: Sequence[Run], raw: np.ndarray) -> None:
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
                self._read_file(file, offset + at * size, target, source.name)

    def _scatter(
        self, source: Source, entry: TensorEntry, held: list, wanted: list[Run], raw: np.ndarray, placement: Placement
    ) -> None:
        """Where the orders differ: the tensor passes by window by window, and what is wanted of it is picked out."""
        if not wanted:
            return
        first, at, numel = (np.array(column, np.int64) for column in zip(*wanted, strict=True))
        there = entry.placement()
        for file, offset, runs in held:
            for run in runs:
                for start in range(0, run.numel, _WINDOW):
                    stored = np.arange(run.first + start, run.first + min(start + _WINDOW, run.numel))
                    index = row_major_index(there, stored) - source.held
                    inside = (index >= 0) & (index < source.numel)
                    index[inside] = stored_index(placement, index[inside] + source.wanted)
                    which = np.searchsorted(first, index, "right") - 1
                    inside &= (which >= 0) & (index < first[which] + numel[which])
                    if not inside.any():
                        continue
                    window = np.empty(len(stored), raw.dtype)
                    place = offset + (run.at + start) * raw.dtype.itemsize
                    self._read_file(file, place, bytes_of(window), source.name)
                    chosen = which[inside]
                    raw[at[chosen] + index[inside] - first[chosen]] = window[inside]

    def _read_file(self, file: FileEntry, offset: int, out: memoryview, name: str = "") -> None:
        try:
            self._files.read_into(file, offset, out)
        except Damage as damage:
            held = self.contents(file, damage.start, damage.stop)
            reading = f" (reading {name})" if name else ""
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
        return ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")

    def verify(self) -> list[str]:
        """Reads every byte. Returns what is wrong, by file, tensor and range; empty for a sound checkpoint."""
        faults = []
        for file in self.manifest.files:
            buffer = memoryview(bytearray(min(file.nbytes, self.manifest.chunk_nbytes)))
            for start in range(0, file.nbytes, self.manifest.chunk_nbytes):
                try:
                    self._read_file(file, start, buffer[: min(len(buffer), file.nbytes - start)])
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
        if path.stat().st_size > _MAX_MANIFEST_NBYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, more than any checkpoint's manifest")
        return Manifest.from_bytes(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; not a checkpoint, or not a whole one") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _same_order(entry: TensorEntry, placement: Placement) -> bool:
    if placement.storage == "tiled":
        height, width = placement.tensor.block.size
        rows, cols = placement.tensor.shape[-2:]
        return entry.tile == (min(height, rows), min(width, cols))
    order = placement.axis_order
    identity = order is None or order == tuple(range(len(order)))
    return entry.tile is None and (entry.axis_order == order or (identity and entry.axis_order is None))


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


def _raw(dtype: str) -> np.dtype:
    """A dtype of the same size that numpy knows, as what bytes are moved about."""
    return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}[itemsize(dtype)])


def read_tensor(path: str | Path, name: str) -> np.ndarray:
    """One tensor of the checkpoint in a folder, whole, as a numpy array."""
    with Checkpoint(path) as checkpoint:
        return checkpoint.read(name)
