"""Where the quantisation blocks of a parameter's local elements lie, as shapes that torch can reduce over."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ragged_jax.layout import Block
from ragged_jax.optim._blocks import BlockChoice, Part, choose, grid_of_slab

from ._sharded import Local


@dataclass(frozen=True)
class Shape:
    """Equal blocks: strips of `across` tiles of `height` x `width` each; or any blocks, by number.

    Attributes:
      height, across, width: of a strip; flat blocks have height and across 1.
      ids: of what has no such shape: the blocks of its elements.
    """

    height: int = 1
    across: int = 1
    width: int = 1
    ids: Part | None = None

    @property
    def strip_numel(self) -> int:
        return self.height * self.across * self.width

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Elements, in a shape that scales broadcast against."""
        if self.ids is not None:
            return x
        if self.height == self.across == 1:
            return x.view(-1, self.width)
        return x.view(-1, self.height, self.across, self.width)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each block of a view, 1-D. NaN is larger than all."""
        x = x.abs()
        if self.ids is not None:
            ids = self._numbers(x)
            return x.new_zeros(int(ids[-1]) + 1).scatter_reduce_(0, ids, x, "amax")
        return x.amax(1) if x.ndim == 2 else x.amax((1, 3)).view(-1)

    def spread(self, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Scales, 1-D, to broadcast against a view."""
        if self.ids is not None:
            return scales[self._numbers(like)]
        return scales[:, None] if like.ndim == 2 else scales.view(-1, 1, self.across, 1)

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        assert self.ids is not None
        return self.ids.block_of(torch.arange(x.numel(), device=x.device))


@dataclass(frozen=True)
class Piece:
    """Some of a parameter's local elements and their blocks, both as ranges."""

    shape: Shape
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Quantised:
    """The blocks of one parameter.

    Attributes:
      block: in which it is quantised.
      first, stop: which of the tensor's blocks this process has.
      num_blocks: of the whole tensor.
      pieces: of the local elements, of one shape each.
    """

    block: Block
    first: int
    stop: int
    num_blocks: int
    pieces: tuple[Piece, ...]


def blocks_of(local: Local, rule: BlockChoice, min_numel: int) -> Quantised | None:
    """The blocks of what a process holds of a tensor; None where it keeps its moments in float32."""
    block = choose(local.name, local.shape, rule, min_numel)
    if block is None:
        return None
    part, numel = Part(local.shape, block, 0), local.stop - local.start
    total = part.block_of(part.numel - 1) + 1
    first = part.block_of(local.start) if local.start < part.numel else total
    count = part.block_of(numel - 1) + 1 if numel else 0
    return Quantised(block, first, first + count, total, tuple(_pieces(part, numel, count)))


def _pieces(part: Part, numel: int, count: int) -> Iterator[Piece]:
    if not numel:
        return
    block = part.block
    assert block is not None
    if block.kind == "tile" and part.divides:
        height, width = block.size
        yield Piece(Shape(height, part.shape[-1] // width, width), 0, numel, 0, count)
    elif block.kind == "tile" or (block.dim and not part.divides):
        yield Piece(Shape(ids=part), 0, numel, 0, count)
    else:  # one after the other; the last may be smaller
        width = part.granularity
        full = numel // width
        if full:
            yield Piece(Shape(width=width), 0, full * width, 0, full)
        if full * width < numel:
            yield Piece(Shape(width=numel - full * width), full * width, numel, full, count)


def cut_blocks(local: Local, rule: BlockChoice, min_numel: int) -> list[str]:
    """What is wrong with a tensor of which a boundary between ranks cuts blocks; empty if nothing is."""
    if local.home is None:
        return []
    unit, slot = local.home.unit, local.home.slot
    alone = replace(slot.slab.slab, placements=(slot.placement,))
    num_shards = local.home.runtime.layout.num_shards
    return grid_of_slab(unit.bucket, alone, num_shards, unit.shares, rule, min_numel)[1]
