"""Directories as Hugging Face lays them out: safetensors files and an index, in and out, a window at a time."""

import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Link, NameMap, distinct_keys, itemsize, listed
from ._checkpoint import Checkpoint
from ._copy import TensorBytes, converted
from ._headers import Header, read_header
from ._manifest import CheckpointError, FileEntry, Manifest, TensorEntry
from ._safetensors import Entry, sync_folder, write_bytes, write_safetensors
from ._views import Renamed, RowMajor, whole

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


class HuggingFaceFolder(RowMajor):
    """The tensors of a Hugging Face directory, or of a single safetensors file, by the names that they have there.

    Opening it reads the headers of the files. They have no checksums, so damage is found only where it changes a
    header or a size.

    Args:
      path: the directory: with an index, or else all its safetensors files; or one such file.

    Raises:
      CheckpointError: files are missing or cut, or are no safetensors files; every one is named.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        headers = _headers(path)
        self._at = {n: (file, entry) for file, header in headers.items() for n, entry in header.entries.items()}
        entries = {name: TensorEntry(entry.dtype, entry.shape) for name, (_, entry) in self._at.items()}
        files = tuple(FileEntry(file.name, header.nbytes, ()) for file, header in headers.items())
        config = _read_json(path / CONFIG) if (path / CONFIG).is_file() else None
        super().__init__(path, Manifest(0, 1, files, entries, metadata={"config": config} if config else {}))

    def links(self, name: str) -> Sequence[Link]:
        return [whole(name, self.entry(name).shape)]

    def read_source(self, source: str, first: int, out: np.ndarray) -> None:
        file, entry = self._at[source]
        view, offset = out.view(np.uint8).data, entry.offset + first * out.itemsize
        with file.open("rb", buffering=0) as opened:
            while view.nbytes:
                if not (count := os.preadv(opened.fileno(), [view], offset)):
                    raise CheckpointError(f"{file}: ends at {offset}, inside {source}")
                view, offset = view[count:], offset + count


def _headers(path: Path) -> dict[Path, Header]:
    """Of each file, its header without the arrays that the index does not name."""
    if path.is_file():
        return {path: read_header(path)}
    index = _read_json(path / INDEX, distinct_keys) if (path / INDEX).is_file() else None
    if index is None:
        files: dict[str, set[str] | None] = {file.name: None for file in sorted(path.glob("*.safetensors"))}
        if not files:
            raise CheckpointError(f"{path}: neither {INDEX} nor safetensors files are there")
    else:
        named: dict[str, set[str]] = defaultdict(set)
        where = index.get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise CheckpointError(f"{path / INDEX}: has no weight_map of tensors to files")
        for name, file in where.items():
            named[file].add(name)
        files = dict(sorted(named.items()))
    headers, faults = {}, []
    for file, names in files.items():
        if Path(file).name != file:
            faults.append(f"{file!r:.100} is not a file beside the index")
            continue
        try:
            header = read_header(path / file)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            faults.append(f"{ascii(file)[1:-1]:.100}: {getattr(error, 'strerror', None) or error}")
            continue
        if names is not None:
            faults += (
                f"{file}: has no {name}, which the index says it has"
                for name in sorted(names - header.entries.keys())
            )
            header = header._replace(entries={n: e for n, e in header.entries.items() if n in names})
        headers[path / file] = header
    seen: dict[str, Path] = {}
    for file, header in headers.items():
        faults += (f"{name} is in {seen[name].name} and in {file.name}" for name in header.entries if name in seen)
        seen |= dict.fromkeys(header.entries, file)
    if faults:
        raise CheckpointError(f"{path} is not whole:" + listed(faults))
    return headers


def _read_json(path: Path, object_pairs_hook: Any = None) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=object_pairs_hook)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: {type(document).__name__} instead of an object")
    return document


def open_huggingface(
    path: str | Path,
    names: NameMap | None = None,
    *,
    prefix: str = "",
    targets: Mapping[str, tuple[int, ...]] | None = None,
) -> Checkpoint:
    """A Hugging Face directory as a checkpoint: its tensors by our names, read part by part.

    Args:
      path: the directory, or a single safetensors file.
      names: from our names to those in the files, such as `NAME_MAPS["bert"]`; by default they are the same.
      prefix: what our names begin with besides, such as `model`.
      targets: the shapes of the tensors that are wanted, by our names without prefix, if they are known.

    Raises:
      CheckpointError: files are missing, cut or no safetensors files.
      NameMapError: naming every tensor that is missing, that the map does not know, or that has another shape.
    """
    if not isinstance(names, NameMap | None):
        raise TypeError(f"names must be a NameMap, got {type(names).__name__}; see `NameMap` and `NAME_MAPS`")
    return Renamed(HuggingFaceFolder(path), names and names.inverse, prefix=prefix, targets=targets)


def write_huggingface(
    checkpoint: Checkpoint,
    path: str | Path,
    names: NameMap | None = None,
    *,
    only: str = "",
    dtype: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_file_nbytes: int = 5_000_000_000,
    fetched: Callable[[int], object] = lambda nbytes: None,
) -> Path:
    """Writes tensors of a checkpoint as a Hugging Face directory.

    The directory is there whole or not at all. At most a window of 32 MiB is in memory for each of the tensors that
    are written; of a tensor that is saved transposed or tile by tile all of it.

    Args:
      checkpoint: that holds them.
      path: the directory. It must not exist, or be empty.
      names: from the checkpoint's names to those in the files; by default they are the same.
      only: take only the tensors below this prefix, without it.
      dtype: to convert floating-point tensors to; by default they stay as they are.
      config: what `config.json` says; by default what `checkpoint.metadata["config"]` says, if it is there.
      max_file_nbytes: how much goes into one file, but for a tensor that is larger.
      fetched: is told, time and again, how many bytes more were read.

    Raises:
      FileExistsError: there is something already.
      NameMapError: naming every tensor that is missing, that the map does not know, or that does not fit.
      OSError: the disk is full, or the like. Nothing is left behind.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already")
    source = Renamed(checkpoint, names, only=only)
    if wrong := [f"{name}: {entry.dtype}" for name, entry in source.tensors.items() if entry.dtype == "complex128"]:
        raise CheckpointError(f"safetensors has no such dtype: {', '.join(wrong)}")
    config = config if config is not None else checkpoint.metadata.get("config")
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    folder.mkdir()
    try:
        _write_all(folder, source, dtype, max_file_nbytes, fetched)
        if config is not None:
            write_bytes(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")
        sync_folder(folder)
        folder.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return path


def _write_all(folder: Path, source: Renamed, dtype: str | None, max_file_nbytes: int, fetched: Any) -> None:
    entries = [
        Entry(name, (to := converted(entry.dtype, dtype)), entry.shape, (TensorBytes(source, name, to, fetched),))
        for name, entry in source.tensors.items()
    ]
    files = _split(entries, max_file_nbytes)
    where, total = {}, 0
    for number, group in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        held = {entry.name for entry in group}
        tied = {alias: name for alias, name in source.aliases.items() if name in held}
        write_safetensors(folder / file, group, alignment=1, metadata={"format": "pt", **tied})
        where |= dict.fromkeys(held, file)
        total += sum(entry.data[0].nbytes for entry in group)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_bytes(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def _split(entries: Iterable[Entry], max_nbytes: int) -> list[list[Entry]]:
    """By file. In each of them the wider dtypes come first, so that all are aligned."""
    files: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        size = entry.data[0].nbytes
        if files[-1] and nbytes + size > max_nbytes:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += size
    return [sorted(group, key=lambda entry: -itemsize(entry.dtype)) for group in files]
