"""The moments of 8-bit Adam by tensor: its codes, the scales of its blocks, or its float32 where it is not quantised.

Which elements share a scale is decided by a tensor's global shape. So `opt/mu/blocks/3/kernel/codes`, in the shape of
the tensor, and `opt/mu/blocks/3/kernel/scales`, one for each block in row-major order, are the same in every layout.
A moment that is kept in float32 is `opt/mu/blocks/3/bias`, as that of Adam in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..checkpoint import TensorEntry, join, layer_name, runs_of, slab_tensors
from ..fsdp import SlabOf
from ..layout import Block, Placement, Segment, cut_runs, tile_regions
from ..optim._adam8bit_state import ScaleByAdam8bitState
from ..optim._blocks import Grid, Part, not_whole, parts_of_placement
from ._holding import HERE, Compact, Holding, InSlab

_MOMENTS, _KINDS = ("mu", "nu"), ("codes", "scales", "exact")
CODES, SCALES = "codes", "scales"
EMPTY = "an array that holds nothing"


Known = tuple[str, tuple[int, ...] | None, dict[str, str]]


@dataclass(frozen=True)
class Moments:
    """An 8-bit optimizer's state at a path of a state."""

    path: str
    state: ScaleByAdam8bitState

    def find(self, path: str) -> tuple[str, str, str] | None:
        """For a path in one of its moments: the moment (`mu`), the kind of array, and the rest of the path."""
        for moment in _MOMENTS:
            for kind in _KINDS:
                head = join(self.path, moment, kind)
                if path == head or path.startswith(f"{head}/"):
                    return moment, kind, path[len(head) + 1 :]
        return None

    def holding(self, of: SlabOf, moment: str, kind: str, rest: str, only: frozenset[str] | None = None) -> Holding:
        """How one of the three arrays of a slab's moment holds tensors: all of the slab's, or some only.

        Raises:
          ValueError: a device boundary cuts blocks; every such tensor is listed.
        """
        quantisation = self.state.quantisation
        grid, faults = quantisation.grid_of_slab(of)
        if faults:
            raise not_whole(faults)
        prefix = join(self.path, moment, rest)
        blocks = {p.tensor.name: quantisation.block_of(p.tensor.name, p.tensor.shape) for p in of.slab.placements}
        mine = {name for name in blocks if only is None or name in only}
        said = {name: self._attributes(moment, block) for name, block in blocks.items() if block and name in mine}
        if kind == CODES:
            return InSlab(of, prefix, CODES, frozenset(said), said)
        if kind == SCALES:
            return _scales(of, prefix, grid, blocks, said)
        if not grid.parts:
            return InSlab(of, prefix, only=only)
        return _exact(of, prefix, grid, [p for p in of.slab.placements if not blocks[p.tensor.name]], mine)

    def ordinary(
        self, moment: str, kind: str, rest: str
    ) -> tuple[str, tuple[int, ...] | None, dict[str, str]] | None:
        """Of an ordinary array's moment: name, shape and attributes in a checkpoint; no name for an empty array.

        None where it is not known which parameter it belongs to.
        """
        leaf = next((leaf for leaf in self.state.leaves if leaf.of is None and leaf.path == rest), None)
        if leaf is None:
            return None
        grid, _ = self.state.quantisation.grid(leaf)
        name = join(self.path, moment, rest)
        if not grid.parts:
            return (name if kind == "exact" else EMPTY), None, {}
        said = self._attributes(moment, grid.parts[0].block)
        if kind == CODES:
            return join(name, CODES), None, said
        return (join(name, SCALES), (num_blocks(grid.parts[0]),), said) if kind == SCALES else (EMPTY, None, {})

    def _attributes(self, moment: str, block: Block | None) -> dict[str, str]:
        signed = "signed" if moment == "mu" else "unsigned"
        return {"block": repr(block), "code_map": f"{self.state.quantisation.map} {signed}"}


def num_blocks(part: Part) -> int:
    """Blocks of a tensor."""
    return int(part.block_of(part.numel - 1)) + 1


def _scales(of: SlabOf, prefix: str, grid: Grid, blocks: dict, said: dict) -> Compact:
    bucket = of.unit.bucket
    entries: dict[str, TensorEntry] = {}
    members: list[tuple[str, Part, list]] = []
    for p in of.slab.placements:
        tensor = p.tensor
        if not (block := blocks[tensor.name]):
            continue
        count = num_blocks(Part(tensor.shape, block, 0))
        for layer in range(bucket.num_copies) if tensor.name in said else ():
            name = join(prefix, layer_name(bucket, tensor.name, layer), SCALES)
            entries[name] = TensorEntry("float32", (count,), attributes=said[tensor.name])
        members += [(tensor.name, part, runs) for part, runs in _numbered(p, block, count)]
    shards = []
    for k, (low, high) in enumerate(pairwise(grid.bounds)):
        held = []
        for at, (tensor, part, runs) in enumerate(members):
            start, stop = max(low, part.offset) - part.offset, min(high, part.offset + part.numel) - part.offset
            if start >= stop or tensor not in said:
                continue
            first, last = int(part.block_of(start)), int(part.block_of(stop - 1))
            for layer in range(bucket.num_copies):
                name = join(prefix, layer_name(bucket, tensor, layer), SCALES)
                offset = layer * grid.num_blocks + int(grid.runs[k, at, 2])
                for number, place, count in cut_runs(runs, first, last + 1):
                    held.append(Segment(name, number, number + count, HERE, offset + place - first))
        shards.append(held)
    return Compact(of, grid.num_blocks, entries, shards)


def _numbered(placement: Placement, block: Block, count: int) -> Iterator[tuple[Part, list[tuple[int, int, int]]]]:
    """The parts of a tensor, and which of its blocks (in row-major order) theirs are, in runs."""
    parts, _ = parts_of_placement(placement, block)
    if placement.storage == "row_major" or block.kind == "whole":
        yield from ((part, [(0, 0, count)]) for part in parts)
        return
    (rows, cols), regions = placement.tensor.shape[-2:], tile_regions(placement.tensor)
    height, width = regions[0].height, regions[0].width
    grid = regions[0].members, -(-rows // height), -(-cols // width)
    for part, r in zip(parts, regions, strict=True):
        top, left = r.top // height, r.left // width
        box = ((0, r.members), (top, top + r.rows), (left, left + r.cols))
        yield part, [(run.first, run.at, run.numel) for run in runs_of(box, grid)]


def _exact(of: SlabOf, prefix: str, grid: Grid, placements: Sequence[Placement], mine: set[str]) -> Compact:
    bucket = of.unit.bucket
    slab = replace(of.slab, placements=tuple(p for p in placements if p.tensor.name in mine))
    entries = slab_tensors(bucket, slab, prefix=prefix, dtype="float32")
    found: dict[str, Placement] = {}
    shards: list[list[Segment]] = [[] for _ in range(grid.num_devices)]
    for layer in range(bucket.num_copies):
        for p in placements:
            found[join(prefix, layer_name(bucket, p.tensor.name, layer))] = p
    filled = [p for p in placements if p.tensor.numel]
    for k, (low, _) in enumerate(pairwise(grid.bounds)):
        for p, (start, numel, first) in zip(filled, grid.exact_runs[k].tolist(), strict=True):
            for layer in range(bucket.num_copies) if numel and p.tensor.name in mine else ():
                name, begin = join(prefix, layer_name(bucket, p.tensor.name, layer)), low + start - p.offset
                shards[k].append(Segment(name, begin, begin + numel, HERE, layer * grid.num_exact + first))
    return Compact(of, grid.num_exact, entries, shards, found)
