"""Which quantisation blocks a device holds of an array, and where. Static; no framework."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..layout import Block, Bucket, Placement, Slab, elements, listed, tile_regions

BlockChoice = Block | Mapping[str, Block | None]
"""One block for every tensor, or a mapping from patterns of the tensors' paths; None keeps a tensor in float32."""

DEFAULT = elements(256)


def check_choice(choice: BlockChoice) -> None:
    """Raises TypeError for what says no blocks."""
    for block in choice.values() if isinstance(choice, Mapping) else (choice,):
        if not isinstance(block, Block | None):
            raise TypeError(f"block={block!r} is neither a Block such as rj.elements(256) nor None")


def choose(name: str, shape: tuple[int, ...], rule: BlockChoice, min_numel: int) -> Block | None:
    """The block in which a tensor is quantised; None where its moments stay in float32.

    Depends on the tensor's name and global shape alone.
    """
    block: Block | None = DEFAULT
    if isinstance(rule, Mapping):
        block = next((b for pattern, b in rule.items() if fnmatchcase(name, pattern)), DEFAULT)
    else:
        block = rule
    if block is None or math.prod(shape) < max(1, min_numel):
        return None
    if block.kind in ("rows", "tile") and len(shape) < 2:  # no rows, no tiles: it would be a scale an element
        return None
    return block


@dataclass(frozen=True)
class Part:
    """Consecutive stored elements that belong together: a tensor, or one region of its tiles.

    Attributes:
      shape: of the tensor, or (numel,) for a region.
      block: in which it is quantised; None for float32.
      offset: of its first element in the global slab.
    """

    shape: tuple[int, ...]
    block: Block | None
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def granularity(self) -> int:
        """Elements between two places where it may be cut, from its start."""
        return 1 if self.block is None else self.block.granularity(self.shape)

    @cached_property
    def run(self) -> int:
        """Consecutive elements that surely lie in one block, from any multiple of it on."""
        assert self.block is not None
        if self.block.kind != "tile":
            return math.gcd(self.granularity, self._contiguous)
        return math.gcd(self.block.size[1], self.shape[-1])

    @property
    def _contiguous(self) -> int:
        block = self.block
        if block is None or block.kind == "whole":
            return self.numel
        if block.kind == "elements":
            return block.size[0]
        row = math.prod(self.shape[block.dim + 1 :])
        return row * math.gcd(block.size[0], self.shape[block.dim])

    def block_of(self, index: Any) -> Any:
        """The number of the block of an element, counted from a legal cut, as is the index; of any integer type."""
        block, shape = self.block, self.shape
        assert block is not None
        if block.kind == "whole":
            return index * 0
        if block.kind == "elements":
            return index // block.size[0]
        dim = block.dim if block.kind == "rows" else len(shape) - 2
        row = math.prod(shape[dim + 1 :])
        member, in_column = shape[dim] * row, -(-shape[dim] // block.size[0])
        down = index // member * in_column + index % member // (block.size[0] * row)
        if block.kind == "rows":
            return down
        return down * -(-row // block.size[1]) + index % row // block.size[1]

    @property
    def divides(self) -> bool:
        """Whether all of its blocks have full size."""
        block, shape = self.block, self.shape
        if block is None or block.kind == "whole":
            return True
        if block.kind == "elements":
            return self.numel % block.size[0] == 0
        if block.kind == "rows":
            return shape[block.dim] % block.size[0] == 0
        return shape[-2] % block.size[0] == shape[-1] % block.size[1] == 0


@dataclass(frozen=True)
class Grid:
    """The blocks of one array on each of the devices that share it.

    A value. Every layer of a stack looks the same.

    Attributes:
      parts: what is quantised.
      exact: what stays in float32.
      bounds: for each device, where its elements start in the slab; and where those of the last one end.
      room: elements that each device has room for, a layer.
    """

    parts: tuple[Part, ...]
    exact: tuple[Part, ...]
    bounds: tuple[int, ...]
    room: int
    _hash: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __hash__(self):
        if not self._hash:
            self._hash.append(hash((self.parts, self.exact, self.bounds, self.room)))
        return self._hash[0]

    @property
    def num_devices(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def padded(self) -> bool:
        """Whether a device has room for more than its elements."""
        return sum(p.numel for p in self.parts + self.exact) < self.room * self.num_devices

    @cached_property
    def view(self) -> tuple[int, int, int, int] | None:
        """The shape (strips, height, blocks in a strip, width) that makes blocks of a device's elements.

        None where no shape does.
        """
        if self.padded or self.exact or len(self.parts) != 1 or not self.room:
            return None
        (part,) = self.parts
        if not part.divides or self.room % part.granularity or part.block is None:
            return None
        if part.block.kind == "tile":
            height, width = part.block.size
            return self.room // (height * part.shape[-1]), height, part.shape[-1] // width, width
        return self.room // part.granularity, 1, 1, part.granularity

    @cached_property
    def num_blocks(self) -> int:
        """Blocks that each device has room for, a layer."""
        if self.view:
            return self.view[0] * self.view[2]
        return int(self._table(self.parts, blocks=True)[:, :, 2].sum(1).max(initial=0)) if self.parts else 0

    @cached_property
    def num_exact(self) -> int:
        """Elements in float32 that each device has room for, a layer."""
        if not self.parts:
            return self.room
        return int(self.exact_runs[:, :, 1].sum(1).max(initial=0)) if self.exact else 0

    @cached_property
    def runs(self) -> np.ndarray:
        """int32 [devices, parts, 3]: of each part on a device, where it starts, its length, and its first block."""
        table = self._table(self.parts, blocks=True)
        counts = table[:, :, 2]
        first = np.cumsum(counts, 1) - counts
        return self._int32(np.stack([table[:, :, 0], table[:, :, 1], first], -1))

    @cached_property
    def exact_runs(self) -> np.ndarray:
        """The same of what stays in float32, where every element is a block."""
        table = self._table(self.exact, blocks=False)
        return self._int32(
            np.stack([table[:, :, 0], table[:, :, 1], np.cumsum(table[:, :, 1], 1) - table[:, :, 1]], -1)
        )

    def _int32(self, table: np.ndarray) -> np.ndarray:
        """Places as devices count them, who have no larger integers."""
        if self.room >= 2**31:
            raise ValueError(
                f"a device would hold {self.room:,} elements of one packed slab, more than an int32 counts: shard "
                "over more devices, or in smaller units"
            )
        return table.astype(np.int32)

    def _table(self, parts: Sequence[Part], *, blocks: bool) -> np.ndarray:
        table = np.zeros((self.num_devices, len(parts), 3), np.int64)
        for k, (low, high) in enumerate(pairwise(self.bounds)):
            for p, part in enumerate(parts):
                start, stop = max(low, part.offset), min(high, part.offset + part.numel)
                if start < stop:
                    count = part.block_of(stop - start - 1) + 1 if blocks else 0
                    table[k, p] = start - low, stop - start, count
        return table

    @cached_property
    def unit(self) -> int:
        """Elements that lie in one block and one part together, wherever they are on any device."""
        sizes = [self.room, *(part.run for part in self.parts), *(int(x) for x in np.unique(self.runs[:, :, :2]))]
        return math.gcd(*sizes, *(int(x) for x in np.unique(self.exact_runs[:, :, :2])))

    def faults(self) -> list[str]:
        """Where a boundary between devices cuts a block."""
        found = []
        for part in self.parts:
            for k, boundary in enumerate(self.bounds[1:-1]):
                at = boundary - part.offset
                if 0 < at < part.numel and at % part.granularity:
                    found.append(f"cut at element {at:,} between devices {k} and {k + 1}")
                    break
        return found


def grid_of_array(name: str, shape: tuple[int, ...], rule: BlockChoice, min_numel: int) -> Grid:
    """The blocks of an ordinary array."""
    part = Part(shape, choose(name, shape, rule, min_numel), 0)
    chosen = (part,) if part.block else ()
    return Grid(chosen, () if chosen else (part,), (0, part.numel), part.numel)


def grid_of_slab(
    bucket: Bucket, slab: Slab, num_shards: int, shares: tuple[int, ...] | None, rule: BlockChoice, min_numel: int
) -> tuple[Grid, list[str]]:
    """The blocks of a slab, and what is wrong with it: a line for every tensor whose blocks are not whole."""
    ends = tuple(accumulate(shares or (1,) * num_shards, initial=0))
    bounds = tuple(end * slab.shard_numel for end in ends)
    room = slab.shard_numel * max(shares or (1,))
    parts, exact, faults = [], [], []
    for placement in slab.placements:
        tensor = placement.tensor
        block = choose(tensor.name, tensor.full_shape, rule, min_numel)
        found, wrong = parts_of_placement(placement, block)
        (exact if block is None else parts).extend(found)
        wrong = wrong or [*Grid(tuple(found), (), bounds, room).faults()][:1]
        faults += [f"{tensor.name}: shape {tensor.shape}, quantised in {block!r}, {fault}" for fault in wrong]
    return Grid(tuple(parts), tuple(exact), bounds, room), faults


def parts_of_placement(placement: Placement, block: Block | None) -> tuple[list[Part], list[str]]:
    """The parts of a tensor in a slab that is quantised in these blocks, and what is wrong with it."""
    tensor, offset = placement.tensor, placement.offset
    if not tensor.numel:
        return [], []
    if block is None or block.kind == "whole":
        return [Part(tensor.shape, block, offset)], []
    if placement.axis_order is not None:
        return [], ["but stored transposed"]
    if placement.storage == "row_major":
        return [Part(tensor.shape, block, offset)], []
    if block != tensor.block:
        return [], [f"but stored by tiles of {tensor.block!r}"]
    regions = tile_regions(tensor)
    return [Part((r.numel,), elements(r.tile_numel), offset + r.start) for r in regions], []


def not_whole(faults: Iterable[str]) -> ValueError:
    """The error of a transform whose blocks a device boundary cuts."""
    return ValueError(
        "blocks that are quantised together must lie on one device, but of these tensors they do not:"
        + listed(faults)
        + "\nShard them in the same blocks (block=rj.elements(256), or a multiple, for the default), quantise them "
        'in the blocks in which they are sharded, or keep them in float32 (block={"pattern of their path": None}).'
    )
