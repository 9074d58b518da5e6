"""`Layout`: every bucket of a model for a number of shards, as a value."""

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from ._errors import STRICT, LayoutError
from ._json import Document
from ._listed import listed
from ._ragged_shard import RaggedShard, StridedRaggedShard
from ._slab import Bucket, Placement, Slab
from ._storage import can_be_tiled, cuts
from ._tensor import MAX_NUMEL, TensorSpec

MAX_SHARDS = MAX_LAYERS = 2**20
LAYOUT_FILE = Document("ragged-layout", 2, "layout file", LayoutError, since={"splits": 2})


class Location(NamedTuple):
    """Where a tensor lies."""

    bucket: Bucket
    slab: Slab
    placement: Placement


class Piece(NamedTuple):
    """A range of one tensor on one shard.

    Attributes:
      tensor: the tensor.
      start, stop: the range in the tensor's stored order (row-major, unless it is tiled), in elements.
      bucket, slab: names of where it lies.
      offset: where the range starts in the shard's own part of the slab, in elements.
    """

    tensor: TensorSpec
    start: int
    stop: int
    bucket: str
    slab: str
    offset: int


@dataclass(frozen=True)
class Layout:
    """Where every element of a model lies when it is sharded over `num_shards` devices.

    A value: equal, hashable, picklable, and the same on every rank. `check` holds it against its own rules.

    Where other mesh axes split a tensor (`TensorSpec.splits`), the layout speaks of one slice. All of them lie
    alike, each with shards of its own; ranges, offsets and bytes are what one rank of those axes sees.

    Attributes:
      num_shards: how many devices share the model.
      buckets: in the order in which the forward pass needs them.
      shares: for devices of different memory, how many parts of each slab every device holds, e.g.
        `(2, 2, 1, 1)`; slabs then give the size of one part. None: one each.
    """

    __pydantic_config__ = STRICT

    num_shards: int
    buckets: tuple[Bucket, ...]
    shares: tuple[int, ...] | None = None

    @cached_property
    def _locations(self) -> dict[str, Location]:
        return {p.tensor.name: Location(b, s, p) for b in self.buckets for s in b.slabs for p in s.placements}

    def __getstate__(self):
        return {"num_shards": self.num_shards, "buckets": self.buckets, "shares": self.shares}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """For each shard boundary, from 0 on, the parts of a slab before it."""
        return tuple(accumulate(self.shares or (1,) * self.num_shards, initial=0))

    @property
    def num_parts(self) -> int:
        """Equal parts of each slab: the number of shards, or the sum of the shares."""
        return self._ends[-1]

    @property
    def largest_share(self) -> int:
        return max(self.shares) if self.shares else 1

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    def bucket(self, name: str) -> Bucket:
        """The bucket called `name`."""
        for bucket in self.buckets:
            if bucket.name == name:
                return bucket
        raise KeyError(f"no bucket {name!r}; the layout has {[b.name for b in self.buckets]}")

    def locate(self, name: str) -> Location:
        """Where the tensor called `name` lies.

        Raises:
          KeyError: there is no such tensor; the message names the closest.
        """
        try:
            return self._locations[name]
        except KeyError:
            from difflib import get_close_matches

            near = get_close_matches(name, self._locations, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise KeyError(f"no tensor {name!r} in the layout{hint}") from None

    def ranges(self, name: str) -> tuple[tuple[int, int], ...]:
        """For each shard, the `(start, stop)` range of the tensor that it holds, in elements."""
        _, slab, placement = self.locate(name)
        size, offset, numel = slab.shard_numel, placement.offset, placement.tensor.numel
        bounds = [min(max(end * size - offset, 0), numel) for end in self._ends]
        return tuple(pairwise(bounds))

    def ragged_shard(self, name: str) -> RaggedShard | StridedRaggedShard:
        """The tensor's placement in the exchange form (dims, local units), strided where other axes split it.

        Raises:
          ValueError: the tensor is stored tile by tile or transposed, which that form cannot say.
        """
        placement = self.locate(name).placement
        if placement.storage != "row_major" or placement.axis_order:
            how = "transposed" if placement.axis_order else "tile by tile"
            raise ValueError(f"{name} is stored {how}; RaggedShard speaks of row-major tensors only")
        numels = [stop - start for start, stop in self.ranges(name)]
        ragged = RaggedShard.from_numels(placement.tensor.shape, numels)
        splits = tuple((split.dim, split.size) for split in placement.tensor.splits)
        return StridedRaggedShard(splits, ragged) if splits else ragged

    def shard(self, k: int) -> tuple[Piece, ...]:
        """What shard `k` holds: a non-empty range of each tensor that reaches it."""
        if not 0 <= k < self.num_shards:
            raise IndexError(f"shard {k} of a layout over {self.num_shards}")
        return tuple(self._pieces(k))

    def _pieces(self, k: int) -> Iterator[Piece]:
        for bucket in self.buckets:
            for slab in bucket.slabs:
                low, high = self._ends[k] * slab.shard_numel, self._ends[k + 1] * slab.shard_numel
                for placement in slab.placements:
                    tensor, offset = placement.tensor, placement.offset
                    start, stop = max(low, offset), min(high, offset + tensor.numel)
                    if start < stop:
                        yield Piece(tensor, start - offset, stop - offset, bucket.name, slab.name, start - low)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the model on each device, padding included; with uneven shares, on the largest."""
        return self.largest_share * sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the unsharded model; of a tensor that other axes split, those of one slice."""
        return sum(bucket.payload_nbytes for bucket in self.buckets)

    @property
    def padding_nbytes(self) -> int:
        """Bytes over all devices that belong to no tensor, where each device holds its own share."""
        return self.num_parts * sum(bucket.shard_nbytes for bucket in self.buckets) - self.payload_nbytes

    @property
    def spmd_padding_nbytes(self) -> int:
        """The same where every device must hold as much as the largest, as in a JAX array."""
        return self.num_shards * self.shard_nbytes - self.payload_nbytes

    @property
    def padding_fraction(self) -> float:
        """Padding over payload, in bytes."""
        return self.padding_nbytes / self.payload_nbytes if self.payload_nbytes else 0.0

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that ranks compare: the same layout, the same digits, on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self, *, indent: int | None = None) -> str:
        """The layout as a versioned JSON document."""
        return LAYOUT_FILE.dump(self, indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """Reads what `to_json` wrote. The text may come from anywhere: it is validated whole.

        Raises:
          LayoutError: naming every fault by its path, or that the file is of a newer version.
        """
        return LAYOUT_FILE.load(cls, text).check()

    def faults(self) -> list[str]:
        """Every way in which the layout breaks its own rules, by path; empty for a sound one."""
        if not 1 <= self.num_shards <= MAX_SHARDS:
            return [f"num_shards is {self.num_shards}, must be between 1 and {MAX_SHARDS}"]
        if self.shares is not None and max(self.shares, default=0) > MAX_SHARDS:
            return [f"a share is {max(self.shares)}, must be at most {MAX_SHARDS}"]
        if self.shares is not None and (len(self.shares) != self.num_shards or min(self.shares) < 1):
            return [f"shares {self.shares} must be {self.num_shards} numbers of at least 1"]
        found = []
        names = Counter(tensor.name for tensor in self.tensors)
        found += [f"tensor {name!r} lies in {count} places" for name, count in names.items() if count > 1]
        buckets = Counter(bucket.name for bucket in self.buckets)
        found += [f"{count} buckets are called {name!r}" for name, count in buckets.items() if count > 1]
        sizes = sorted({pair for tensor in self.tensors for pair in tensor.split_axes})
        found += [f"axis {a!r} splits tensors by {n} and by {m}" for (a, n), (b, m) in pairwise(sizes) if a == b]
        for bucket in self.buckets:
            if bucket.stack is not None and not 0 <= bucket.stack <= MAX_LAYERS:
                found.append(f"bucket {bucket.name!r}: stack is {bucket.stack}, must be between 0 and {MAX_LAYERS}")
            slabs = Counter(slab.name for slab in bucket.slabs)
            found += [f"bucket {bucket.name!r}: {n} slabs are called {s!r}" for s, n in slabs.items() if n > 1]
            for slab in bucket.slabs:
                found += [f"bucket {bucket.name!r}, slab {slab.name!r}: {f}" for f in self._slab_faults(slab)]
        return found

    def _slab_faults(self, slab: Slab) -> Iterator[str]:
        if slab.rows < 0 or slab.width < 1:
            yield f"rows {slab.rows} must be at least 0 and width {slab.width} at least 1"
            return
        if self.num_parts * slab.shard_numel > MAX_NUMEL:
            yield f"{slab.rows} rows of {slab.width} on each of {self.num_parts} parts are more than 2**53 elements"
            return
        if slab.sole:
            shapes = [p.stored_shape for p in slab.placements if not _bad_axis_order(p)]
            length = slab.rows * self.num_parts
            if len(shapes) != 1 or not shapes[0] or shapes[0][0] != length:
                yield f"a sole slab holds one tensor of {length} rows, got {shapes}"
            if any(p.storage != "row_major" for p in slab.placements):
                yield "a sole slab keeps its tensor's shape, so it cannot be tiled"
            if any(p.offset or p.tensor.name != slab.name for p in slab.placements):
                yield "a sole slab has its tensor's name, and the tensor starts at 0"
        end, size = 0, self.num_parts * slab.shard_numel
        for placement in slab.placements:
            tensor, offset = placement.tensor, placement.offset
            if tensor.label != slab.placements[0].tensor.label:
                yield f"{tensor.name} is labelled {tensor.label!r}, {slab.placements[0].tensor.name} is not"
            if tensor.split_axes != slab.placements[0].tensor.split_axes:
                yield f"{tensor.name} is split by {tensor.split_axes}, {slab.placements[0].tensor.name} is not"
            if tensor.dtype != slab.dtype:
                yield f"{tensor.name} is {tensor.dtype}, the slab {slab.dtype}"
            if offset < end:
                yield f"{tensor.name} starts at {offset}, before {end}, where the tensor ahead of it ends"
            if offset % slab.width or tensor.numel % slab.width:
                yield f"{tensor.name} does not fill rows of {slab.width}: {tensor.numel} elements from {offset} on"
            end = max(end, offset + tensor.numel)
            if placement.storage == "tiled" and not can_be_tiled(tensor):
                yield f"{tensor.name} is tiled, but {tensor.block!r} of a shape {tensor.shape} has no tiles"
            elif fault := _bad_axis_order(placement):
                yield fault
            elif cut := self._first_bad_cut(placement, slab.shard_numel):
                yield f"{tensor.name} is cut inside a block of {tensor.block!r}, at element {cut}"
        if end > size:
            yield f"tensors end at {end}, the slab at {size}"

    def _first_bad_cut(self, placement: Placement, part_numel: int) -> int:
        """The first element of the stored tensor where a shard boundary cuts one of its blocks, or 0."""
        numel, offset = placement.tensor.numel, placement.offset
        if numel == 0 or part_numel == 0:
            return 0
        granularity, tail = cuts(placement.tensor, placement.storage)
        first = bisect_right(self._ends, offset // part_numel)
        for end in self._ends[first:-1]:
            cut = end * part_numel - offset
            if cut >= numel:
                break
            if cut % granularity or cut > numel - tail:
                return cut
        return 0

    def check(self) -> "Layout":
        """Returns the layout when it is sound.

        Raises:
          LayoutError: listing every fault.
        """
        if found := self.faults():
            raise LayoutError("not a valid layout:" + listed(found))
        return self

    def __repr__(self):
        return (
            f"Layout({len(self.tensors)} tensors in {len(self.buckets)} buckets over {self.num_shards} shards, "
            f"{self.shard_nbytes} bytes each, padding {100 * self.padding_fraction:.2f} %)"
        )


def _bad_axis_order(placement: Placement) -> str:
    """What is wrong with a placement's axis order, or nothing."""
    tensor, order = placement.tensor, placement.axis_order
    if order is None:
        return ""
    if sorted(order) != list(range(len(tensor.shape))):
        return f"{tensor.name}: axis_order {order} is no order of the {len(tensor.shape)} dims"
    if placement.storage != "row_major" or (tensor.granularity != 1 and tensor.block.kind != "whole"):
        return f"{tensor.name}: blocks of {tensor.block!r} do not lie together when the tensor is transposed"
    return ""
