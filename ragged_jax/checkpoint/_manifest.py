"""The manifest of a checkpoint: what it holds and where. `docs/design/checkpoints.md` describes the format."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..layout import STRICT, Document, Placement, TensorSpec, itemsize, listed, named, tile
from ._safetensors import CHUNK_NBYTES, FILLER

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # has no UTF-8
_SEAL = re.compile(rb',"blake2b":"([0-9a-f]{32})"}\n\Z')

_MAX_CHUNK_NBYTES = 1 << 26  # as much is read for a single number

Region = tuple[tuple[int, int], ...]
"""A part of a tensor: one `(start, stop)` of its stored elements, or one for each dim."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or not what was asked for. The message names every fault."""


MANIFEST_FILE = Document("ragged-checkpoint", 1, "checkpoint manifest", CheckpointError)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
      name: in the checkpoint's folder.
      nbytes: its size.
      crc32: of each chunk of it, in turn.
    """

    __pydantic_config__ = STRICT

    name: str
    nbytes: int
    crc32: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
      file: its place in the manifest's list of files.
      offset: where it starts in the file, in bytes.
      region: which part: one `(start, stop)` of the tensor's stored elements, or one for each dim.
    """

    file: int
    offset: int
    region: Region


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
      dtype, shape: of the whole tensor.
      pieces: where its elements are.
      tile: for one that is stored tile by tile, height and width of a tile.
      axis_order: for one that is stored transposed, its dims in the order in which they are stored.
      attributes: what else its reader must know, such as the block size of quantised codes.
    """

    __pydantic_config__ = STRICT

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    tile: tuple[int, int] | None = None
    axis_order: tuple[int, ...] | None = None
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * itemsize(self.dtype)

    @property
    def row_major(self) -> bool:
        return self.tile is None and self.axis_order is None

    def placement(self, name: str = "") -> Placement:
        """The tensor and its order in the layouts' words."""
        if self.tile is None:
            return Placement(TensorSpec(name, self.shape, self.dtype), 0, axis_order=self.axis_order)
        return Placement(TensorSpec(name, self.shape, self.dtype, tile(*self.tile)), 0, "tiled")

    def faults(self) -> Iterator[str]:
        """What is wrong with it, apart from its pieces."""
        try:
            placement = self.placement()
        except ValueError as error:
            yield str(error)
            return
        order = self.axis_order
        if order is not None and (self.tile or sorted(order) != list(range(len(self.shape)))):
            yield f"axis_order {order} does not fit shape {self.shape}"
        if placement.storage == "tiled" and (len(self.shape) < 2 or not self.numel):
            yield f"shape {self.shape} has no tiles"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint, or of what one rank contributed to it.

    Attributes:
      step: of the training.
      num_ranks: how many wrote it.
      files: the files in its folder, except for the manifest.
      tensors: by name.
      layouts: by the prefix of the names, the file with the layout that the tensors had when they were saved.
      metadata: the user's, anything that JSON holds.
      chunk_nbytes: the files' checksums are of chunks of this size.
    """

    __pydantic_config__ = STRICT

    step: int
    num_ranks: int
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    layouts: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    chunk_nbytes: int = CHUNK_NBYTES

    def to_bytes(self) -> bytes:
        """The document. It ends with a digest of all that comes before."""
        body = MANIFEST_FILE.dump(self).removesuffix("}").encode()
        return body + f',"blake2b":"{_digest(body)}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Reads what `to_bytes` wrote.

        Raises:
          CheckpointError: it was cut or changed, or is of a newer version, or breaks its own rules.
        """
        if (seal := _SEAL.search(data)) is None:
            raise CheckpointError("not a whole checkpoint manifest: it does not end with its digest")
        body = data[: seal.start()]
        if _digest(body) != seal[1].decode():
            raise CheckpointError("damaged: the digest at its end is not that of what it says")
        manifest = MANIFEST_FILE.load(cls, body + b"}")
        if found := list(manifest.faults()):
            raise CheckpointError("not a sound checkpoint manifest:" + listed(found))
        return manifest

    def faults(self) -> Iterator[str]:
        """Every way in which it breaks its own rules, except for pieces that are not there."""
        if not 0 <= self.step < 1 << 63:
            yield f"step {self.step} is not a number from 0 to 2**63 - 1"
        if self.num_ranks < 1 or not 0 < self.chunk_nbytes <= _MAX_CHUNK_NBYTES:
            yield f"num_ranks {self.num_ranks} or chunk_nbytes {self.chunk_nbytes} is too small or too large"
            return
        names = [file.name for file in self.files]
        yield from (f"{n!r:.80} is not a file name of a checkpoint" for n in names if not _SAFE_NAME.fullmatch(n))
        if len(set(names)) < len(names):
            yield "two files have the same name"
        for file in self.files:
            if file.nbytes < 0 or len(file.crc32) != -(-file.nbytes // self.chunk_nbytes):
                yield f"file {file.name}: {len(file.crc32)} checksums do not make {file.nbytes} bytes"
        for name, tensor in self.tensors.items():
            if faults := [*tensor.faults()]:
                yield from (f"tensor {name!r:.200}: {fault}" for fault in faults)
                continue
            for piece in tensor.pieces:
                if fault := self._piece_fault(tensor, piece):
                    yield f"tensor {name!r:.200}: {fault}"

    def _piece_fault(self, tensor: TensorEntry, piece: Piece) -> str:
        if not 0 <= piece.file < len(self.files):
            return f"a piece lies in file {piece.file} of {len(self.files)}"
        bounds = (tensor.numel,) if len(piece.region) == 1 else tensor.shape
        inside = len(bounds) == len(piece.region) and (len(bounds) == 1 or tensor.row_major)
        if not inside or any(not 0 <= low <= high <= n for (low, high), n in zip(piece.region, bounds, strict=True)):
            return f"a piece {piece.region} is no part of shape {tensor.shape}"
        file, nbytes = self.files[piece.file], numel_of(piece.region) * itemsize(tensor.dtype)
        if not 0 <= piece.offset <= file.nbytes - nbytes:
            return f"{nbytes} bytes from {piece.offset} on are not inside {file.name}, which has {file.nbytes}"
        return ""

    def incomplete(self) -> Iterator[str]:
        """Every tensor with elements that are in no piece, or in two."""
        for name, tensor in self.tensors.items():
            if fault := _cover_fault(tensor):
                yield f"{name}: {fault}"


def numel_of(region: Region) -> int:
    """Elements of a region."""
    return math.prod(stop - start for start, stop in region)


def _cover_fault(tensor: TensorEntry) -> str:
    regions = [piece.region for piece in tensor.pieces if numel_of(piece.region)]
    if all(len(region) == 1 for region in regions):
        bounds = [(0, 0), *sorted(region[0] for region in regions), (tensor.numel, tensor.numel)]
        for (_, end), (start, _) in pairwise(bounds):
            if end < start:
                return f"elements {end} to {start} of {tensor.numel} are missing"
            if end > start:
                return f"elements {start} to {end} are there twice"
        return ""
    if any(len(region) == 1 for region in regions):
        return "its pieces are ranges and boxes; they must all be of one kind"
    boxes = np.array(regions, np.int64).reshape(len(regions), -1, 2)  # a scalar is a box without dims
    for at, box in enumerate(boxes):
        meets = (boxes[at + 1 :, :, 0] < box[:, 1]) & (boxes[at + 1 :, :, 1] > box[:, 0])
        if meets.all(1).any():
            return f"the part {box.tolist()} meets another one"
    held = sum(map(numel_of, regions))
    return "" if held == tensor.numel else f"{tensor.numel - held} of {tensor.numel} elements are missing"


def merge(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of a checkpoint from what its ranks contributed, which declare the same tensors."""
    files: list[FileEntry] = []
    pieces: dict[str, list[Piece]] = {name: [] for name in parts[0].tensors}
    for part in parts:
        for name, tensor in part.tensors.items():
            pieces[name] += (piece._replace(file=piece.file + len(files)) for piece in tensor.pieces)
        files += part.files
    tensors = {name: replace(tensor, pieces=tuple(pieces[name])) for name, tensor in parts[0].tensors.items()}
    return replace(parts[0], files=tuple(files), tensors=tensors)


def differences(parts: Mapping[int, Manifest]) -> list[str]:
    """How the tensors that ranks declare differ from those of rank 0, one line for each tensor."""
    found = []
    first = parts[0].tensors
    for rank, part in sorted(parts.items()):
        if part.step != parts[0].step or part.num_ranks != parts[0].num_ranks:
            mine = f"step {parts[0].step} with {parts[0].num_ranks} ranks"
            found.append(f"rank {rank} saves step {part.step} with {part.num_ranks} ranks, rank 0 {mine}")
        for name in sorted(first.keys() | part.tensors.keys()):
            here, there = first.get(name), part.tensors.get(name)
            if (here and replace(here, pieces=())) != (there and replace(there, pieces=())):
                found.append(f"{name}: rank {rank} has {_brief(there)}, rank 0 {_brief(here)}")
    return found


def _brief(tensor: TensorEntry | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for tensor names that a file could not hold."""
    if bad := [n for n in names if not n or _SURROGATE.search(n) or n == "__metadata__" or n.startswith(FILLER)]:
        raise ValueError(f"no tensor can be called {named(map(ascii, bad))}: the files use it, or it is no text")


def as_metadata(values: Mapping[str, Any] | None) -> dict[str, Any]:
    """A user's metadata as they are now, whatever becomes of the mapping, and as they will be read.

    Raises:
      TypeError, ValueError: they are not JSON, or such that no reader takes: a text without UTF-8, deep nesting.
    """
    made = json.loads(json.dumps(dict(values or {}), allow_nan=False))
    try:
        return Manifest.from_bytes(Manifest(0, 1, (), {}, metadata=made).to_bytes()).metadata
    except ValueError as error:
        raise ValueError(f"these metadata could not be read again: {error}") from None


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
