"""What one rank writes: its files, and the part of the manifest that describes them."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..layout import Layout, itemsize, listed
from ._bytes import bytes_of
from ._manifest import FileEntry, Manifest, Piece, Region, TensorEntry, check_names, numel_of
from ._safetensors import Entry, Written, entry_shape, write_bytes, write_safetensors
from ._threads import in_threads

_AT_ONCE = 16  # files: most of them wait for the disk, which syncs several in the time of one


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that this rank saves.

    Attributes:
      tensor: its name.
      region: which elements: one `(start, stop)` of the stored elements, or one for each dim.
      data: them, in a contiguous buffer.
      group: what is saved in the same file, normally a bucket.
    """

    tensor: str
    region: Region
    data: Any
    group: str = ""


def write_parts(
    folder: Path,
    declared: Manifest,
    parts: Iterable[Part],
    layouts: Mapping[str, Layout],
    rank: int,
    before_each: Callable[[], None] = lambda: None,
) -> Manifest:
    """Writes the files of one rank, one for each group.

    Args:
      folder: that they go to.
      declared: step, tensors (without pieces) and metadata, the same on all ranks.
      parts: what this rank holds.
      layouts: by prefix of tensor names. Rank 0 writes them.
      rank: of the writer.
      before_each: called before each file; what it raises ends the writing.

    Returns:
      This rank's part of the manifest.

    Raises:
      ValueError: a part is not one of a declared tensor; all of them are listed.
      OSError: a file cannot be written.
    """
    parts = list(parts)
    _check(declared.tensors, parts)
    groups: dict[str, dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        if numel_of(part.region):
            groups[part.group][part.tensor].append(part)
    planned = {group: [j for of in tensors.values() for j in _joined(of)] for group, tensors in groups.items()}
    names = _file_names(groups, rank)

    jobs: dict[str, Callable[[], Written]] = {
        names[group]: partial(write_safetensors, folder / names[group], _entries(declared.tensors, planned[group]))
        for group in groups
    }
    layout_files: dict[str, str] = {}
    for at, layout in enumerate(dict.fromkeys(layouts.values()) if rank == 0 else ()):
        name = f"layout-{at}.json" if at else "layout.json"
        jobs[name] = lambda name=name, layout=layout: write_bytes(folder / name, layout.to_json().encode())
        layout_files |= {prefix: name for prefix, of in layouts.items() if of == layout}

    def written(name: str) -> Written:
        before_each()
        return jobs[name]()

    done = in_threads(written, list(jobs), _AT_ONCE)
    files = [FileEntry(name, written.nbytes, written.crc32) for name, written in done.items()]
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for number, group in enumerate(groups):
        for part, offset in zip(planned[group], done[names[group]].offsets, strict=True):
            pieces[part.tensor].append(Piece(number, offset, part.region))
    tensors = {name: replace(t, pieces=tuple(pieces[name])) for name, t in declared.tensors.items() if name in pieces}
    return replace(declared, files=tuple(files), tensors=declared.tensors | tensors, layouts=layout_files)


def check_tensors(tensors: Mapping[str, TensorEntry]) -> None:
    """Raises ValueError for tensors that no checkpoint can hold; all of them are listed."""
    check_names(tensors)
    _raise([f"{name}: {fault}" for name, tensor in tensors.items() for fault in tensor.faults()])


def _raise(wrong: Sequence[str]) -> None:
    if wrong:
        raise ValueError("these tensors cannot be saved:" + listed(wrong))


def _check(tensors: Mapping[str, TensorEntry], parts: Sequence[Part]) -> None:
    check_tensors(tensors)
    wrong = []
    for part in parts:
        if (tensor := tensors.get(part.tensor)) is None:
            wrong.append(f"{part.tensor}: not declared")
            continue
        nbytes, given = numel_of(part.region) * itemsize(tensor.dtype), bytes_of(part.data).nbytes
        if nbytes != given:
            wrong.append(f"{part.tensor}: {part.region} of {tensor.dtype} are {nbytes} bytes, given {given}")
    _raise(wrong)


class _Joined(NamedTuple):
    """Parts of a tensor that follow each other, as one."""

    tensor: str
    region: Region
    data: tuple[Any, ...]


def _joined(parts: Sequence[Part]) -> Iterator[_Joined]:
    """What devices of one rank hold of a tensor: ranges that follow each other become one."""
    last: _Joined | None = None
    for part in sorted(parts, key=lambda part: part.region):
        if last and len(last.region) == len(part.region) == 1 and last.region[0][1] == part.region[0][0]:
            last = last._replace(region=((last.region[0][0], part.region[0][1]),), data=(*last.data, part.data))
            continue
        if last:
            yield last
        last = _Joined(part.tensor, part.region, (part.data,))
    if last:
        yield last


def _entries(tensors: Mapping[str, TensorEntry], parts: Sequence[_Joined]) -> list[Entry]:
    entries, seen = [], defaultdict(int)
    for part in parts:
        tensor = tensors[part.tensor]
        if tensor.tile is not None:
            shape = (numel_of(part.region),)
        elif len(part.region) == 1:
            shape = entry_shape(tensor.placement().stored_shape, *part.region[0])
        else:
            shape = tuple(stop - start for start, stop in part.region)
        seen[part.tensor] += 1
        name = part.tensor if seen[part.tensor] == 1 else f"{part.tensor}#{seen[part.tensor]}"
        entries.append(Entry(name, tensor.dtype, shape, part.data))
    return entries


def _file_names(groups: Iterable[str], rank: int) -> dict[str, str]:
    names: dict[str, str] = {}
    for group in groups:
        stem = re.sub(r"[^A-Za-z0-9_-]+", ".", group).strip(".-")[:120] or "root"
        taken, number = stem, 2
        while f"{taken}.{rank:05d}.safetensors" in names.values():
            taken, number = f"{stem}-{number}", number + 1
        names[group] = f"{taken}.{rank:05d}.safetensors"
    return names
