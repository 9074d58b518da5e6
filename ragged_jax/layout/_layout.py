"""`Layout`: every bucket of a model for a number of shards, as a value."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ._errors import STRICT, LayoutError
from ._json import dump, load
from ._ragged_shard import RaggedShard
from ._slab import Bucket, Placement, Slab
from ._tensor import TensorSpec


class Location(NamedTuple):
    """Where a tensor lies."""

    bucket: Bucket
    slab: Slab
    placement: Placement


class Piece(NamedTuple):
    """A range of one tensor on one shard.

    Attributes:
      tensor: the tensor.
      start, stop: the range in the tensor's row-major order, in elements.
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

    Attributes:
      num_shards: how many devices share the model.
      buckets: in the order in which the forward pass needs them.
    """

    __pydantic_config__ = STRICT

    num_shards: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def _locations(self) -> dict[str, Location]:
        return {p.tensor.name: Location(b, s, p) for b in self.buckets for s in b.slabs for p in s.placements}

    def __getstate__(self):
        return {"num_shards": self.num_shards, "buckets": self.buckets}

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
        _, slab, (tensor, offset) = _unpack(self.locate(name))
        size, numel = slab.shard_numel, tensor.numel
        bounds = [min(max(k * size - offset, 0), numel) for k in range(self.num_shards + 1)]
        return tuple(pairwise(bounds))

    def ragged_shard(self, name: str) -> RaggedShard:
        """The tensor's placement in the exchange form (dims, local units)."""
        numels = [stop - start for start, stop in self.ranges(name)]
        return RaggedShard.from_numels(self.locate(name).placement.tensor.shape, numels)

    def shard(self, k: int) -> tuple[Piece, ...]:
        """What shard `k` holds: a non-empty range of each tensor that reaches it."""
        if not 0 <= k < self.num_shards:
            raise IndexError(f"shard {k} of a layout over {self.num_shards}")
        return tuple(self._pieces(k))

    def _pieces(self, k: int) -> Iterator[Piece]:
        for bucket in self.buckets:
            for slab in bucket.slabs:
                low, high = k * slab.shard_numel, (k + 1) * slab.shard_numel
                for tensor, offset in map(_pair, slab.placements):
                    start, stop = max(low, offset), min(high, offset + tensor.numel)
                    if start < stop:
                        yield Piece(tensor, start - offset, stop - offset, bucket.name, slab.name, start - low)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of the model on each device, padding included."""
        return sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the unsharded model."""
        return sum(bucket.payload_nbytes for bucket in self.buckets)

    @property
    def padding_nbytes(self) -> int:
        """Bytes over all devices that belong to no tensor."""
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
        return dump(self, indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Layout":
        """Reads what `to_json` wrote. The text may come from anywhere: it is validated whole.

        Raises:
          LayoutError: naming every fault by its path, or that the file is of a newer version.
        """
        return load(cls, text).check()

    def faults(self) -> list[str]:
        """Every way in which the layout breaks its own rules, by path; empty for a sound one."""
        found = [] if self.num_shards >= 1 else [f"num_shards is {self.num_shards}, must be at least 1"]
        names = Counter(tensor.name for tensor in self.tensors)
        found += [f"tensor {name!r} lies in {count} places" for name, count in names.items() if count > 1]
        buckets = Counter(bucket.name for bucket in self.buckets)
        found += [f"{count} buckets are called {name!r}" for name, count in buckets.items() if count > 1]
        for bucket in self.buckets:
            slabs = Counter(slab.name for slab in bucket.slabs)
            found += [f"bucket {bucket.name!r}: {n} slabs are called {s!r}" for s, n in slabs.items() if n > 1]
            for slab in bucket.slabs:
                found += [f"bucket {bucket.name!r}, slab {slab.name!r}: {f}" for f in self._slab_faults(slab)]
        return found

    def _slab_faults(self, slab: Slab) -> Iterator[str]:
        if slab.rows < 0 or slab.width < 1:
            yield f"rows {slab.rows} must be at least 0 and width {slab.width} at least 1"
            return
        if slab.sole:
            shapes = [p.tensor.shape for p in slab.placements]
            if len(shapes) != 1 or not shapes[0] or shapes[0][0] != slab.rows * self.num_shards:
                yield f"a sole slab holds one tensor of {slab.rows * self.num_shards} rows, got {shapes}"
        end = 0
        for tensor, offset in map(_pair, slab.placements):
            if tensor.dtype != slab.dtype:
                yield f"{tensor.name} is {tensor.dtype}, the slab {slab.dtype}"
            if offset < end:
                yield f"{tensor.name} starts at {offset}, before {end}, where the tensor ahead of it ends"
            end = max(end, offset + tensor.numel)
            if cut := _first_bad_cut(tensor, offset, slab.shard_numel):
                yield f"{tensor.name} is cut inside a block of {tensor.block!r}, at element {cut}"
        if end > self.num_shards * slab.shard_numel:
            yield f"tensors end at {end}, the slab at {self.num_shards * slab.shard_numel}"

    def check(self) -> "Layout":
        """Returns the layout when it is sound.

        Raises:
          LayoutError: listing every fault.
        """
        if found := self.faults():
            raise LayoutError("not a valid layout:\n" + "\n".join(f"  {fault}" for fault in found))
        return self

    def __repr__(self):
        return (
            f"Layout({len(self.tensors)} tensors in {len(self.buckets)} buckets over {self.num_shards} shards, "
            f"{self.shard_nbytes} bytes each, padding {100 * self.padding_fraction:.2f} %)"
        )


def _pair(placement: Placement) -> tuple[TensorSpec, int]:
    return placement.tensor, placement.offset


def _unpack(location: Location) -> tuple[Bucket, Slab, tuple[TensorSpec, int]]:
    return location.bucket, location.slab, _pair(location.placement)


def _first_bad_cut(tensor: TensorSpec, offset: int, shard_numel: int) -> int:
    """The first element of the tensor where a shard boundary cuts one of its blocks, or 0."""
    numel, granularity = tensor.numel, tensor.granularity
    if numel == 0 or shard_numel == 0:
        return 0
    first = shard_numel - offset % shard_numel  # distance from the tensor's start to the next boundary
    if first >= numel:
        return 0
    if first % granularity:
        return first
    if first + shard_numel < numel and shard_numel % granularity:
        return first + shard_numel
    return 0
