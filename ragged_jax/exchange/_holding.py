"""Where tensors lie in the arrays of a state: what each device's part of an array holds, by the tensors' names.

A name says which tensor it is in all of the state, as in a checkpoint: `opt/mu/blocks/3/kernel`. Two states that hold
tensors of the same names can be turned into each other, whatever their layouts, devices and stacks are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol

from ..checkpoint import Region, TensorEntry, layer_name, slab_tensors
from ..checkpoint import join as join_names
from ..fsdp import SlabOf
from ..layout import Layout, Placement, Segment, TensorSpec, boxes, segments

Index = tuple[slice, ...]
HERE = ("", "")  # the only buffer there is


class Holding(Protocol):
    """How an array holds tensors."""

    @property
    def of(self) -> SlabOf:
        """The slab whose sharding it has."""
        ...

    @property
    def group(self) -> str:
        """The bucket that it belongs to."""
        ...

    def tensors(self, dtype: str) -> Mapping[str, TensorEntry]:
        """By name, the tensors in it, when it is an array of this dtype."""
        ...

    def placement(self, name: str) -> Placement:
        """In which order the elements of a tensor are stored."""
        ...

    def segments(self, index: Index) -> tuple[Segment, ...]:
        """What one part of the array, given by its index, holds: ranges of stored elements.

        Of a tensor that other mesh axes split, these are elements of the slice that the part is of.
        """
        ...


@dataclass(frozen=True)
class InSlab:
    """Tensors of a slab, in an array of the slab's shape.

    Attributes:
      of: which slab.
      prefix, suffix: what the tensors' names begin and end with.
      only: some of its tensors; None for all.
      attributes: of each tensor, by its name in the bucket.
    """

    of: SlabOf
    prefix: str
    suffix: str = ""
    only: frozenset[str] | None = None
    attributes: Mapping[str, dict[str, str]] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.of.unit.bucket.name

    def name(self, tensor: str, layer: int) -> str:
        return join_names(self.prefix, layer_name(self.of.unit.bucket, tensor, layer), self.suffix)

    @cached_property
    def _placements(self) -> dict[str, Placement]:
        bucket = self.of.unit.bucket
        return {
            self.name(p.tensor.name, layer): p
            for p in self.of.slab.placements
            if self.only is None or p.tensor.name in self.only
            for layer in range(bucket.num_copies)
        }

    def tensors(self, dtype: str) -> dict[str, TensorEntry]:
        entries = slab_tensors(self.of.unit.bucket, self.of.slab, prefix=self.prefix, suffix=self.suffix, dtype=dtype)
        return {
            name: replace(entries[name], attributes=self.attributes.get(p.tensor.name, {}))
            for name, p in self._placements.items()
        }

    def placement(self, name: str) -> Placement:
        return self._placements[name]

    def segments(self, index: Index) -> tuple[Segment, ...]:
        return self._segments[self.of.unit.shard_at(self.of.slab, index)]

    def slice_boxes(self, index: Index) -> Iterator[tuple[str, slice, Region, tuple[int, ...]]]:
        """What one part of the array holds, as boxes of whole tensors.

        Returns:
          The tensor, the elements of the part, the box, and the order of its dims in which they are stored.
        """
        ranks = self.of.unit.coordinates(self.of.slab, index)
        for s in self.segments(index):
            placement, offset = self.placement(s.tensor), s.offset
            order = placement.axis_order or tuple(range(len(placement.tensor.shape)))
            first = placement.tensor.slice_start(ranks)
            for box in boxes(placement.stored_shape, s.start, s.stop):
                spans = dict(zip(order, box.region, strict=True))
                region = tuple((low + spans[dim][0], low + spans[dim][1]) for dim, low in enumerate(first))
                yield s.tensor, slice(offset, offset + box.numel), region, order
                offset += box.numel

    @cached_property
    def _segments(self) -> tuple[tuple[Segment, ...], ...]:
        numel = {p.tensor.name: p.tensor.numel for p in self.of.slab.placements}

        def one(s: Segment) -> list[Segment]:
            size = numel[s.tensor]  # the layers of a stack are one range
            return [
                Segment(
                    self.name(s.tensor, layer),
                    max(s.start - layer * size, 0),
                    min(s.stop - layer * size, size),
                    HERE,
                    s.offset + max(layer * size - s.start, 0),
                )
                for layer in range(s.start // size, -(-s.stop // size))
            ]

        held = _held(self.of)
        return tuple(
            tuple(part for s in device if self.only is None or s.tensor in self.only for part in one(s))
            for device in held
        )


@lru_cache(maxsize=1024)  # parameters and moments lie alike
def _held(of: SlabOf) -> tuple[tuple[Segment, ...], ...]:
    return segments(layout_of(of), order="stored")


@lru_cache(maxsize=1024)
def layout_of(of: SlabOf) -> Layout:
    """A layout of this slab alone."""
    unit = of.unit
    return Layout(unit.num_shards, (replace(unit.bucket, slabs=(of.slab,)),), unit.shares)


@dataclass(frozen=True)
class Compact:
    """What is kept for some tensors of a slab only, or once a block: on each device one after the other.

    Attributes:
      of: which slab.
      room: elements that each device has room for, a layer.
      entries: by name, the tensors.
      shards: for each shard, what it holds.
      placements: by name, of those that are not row-major.
    """

    of: SlabOf
    room: int
    entries: Mapping[str, TensorEntry]
    shards: Sequence[Sequence[Segment]]
    placements: Mapping[str, Placement] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.of.unit.bucket.name

    def tensors(self, dtype: str) -> Mapping[str, TensorEntry]:
        return {name: replace(entry, dtype=dtype) for name, entry in self.entries.items()}

    def placement(self, name: str) -> Placement:
        return self.placements.get(name) or Placement(TensorSpec(name, self.entries[name].shape), 0)

    def segments(self, index: Index) -> tuple[Segment, ...]:
        start = index[int(self.of.unit.stacked)].start or 0
        return tuple(self.shards[start // self.room]) if self.room else ()
