"""Random bits of every element by its place in its tensor, so that they do not depend on where it lies."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any
from zlib import crc32

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..fsdp import Leaf, not_split
from ..layout import Placement, tile_regions

Bits = Callable[[Any, Any], Array]
"""From the index of an element in a device's array and how far on, to its random bits; both broadcast."""


def mixed(x: Any) -> Array:
    """A bijection of uint32 in which every bit of the input flips each bit of the output with probability near 1/2.

    "lowbias32" of Wellons' search for such functions (nullprogram.com/blog/2018/07/31), in the public domain.
    """
    x = jnp.asarray(x, jnp.uint32)
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def key_of(seed: Any, count: Any) -> Array:
    """What the bits of a step depend on beside name and place; uint32 scalar."""
    return mixed(mixed(seed) + jnp.asarray(count).astype(jnp.uint32))


@dataclass(frozen=True, eq=False)
class Places:
    """Where in its tensor each element of an array lies, on each device.

    Attributes:
      placements: of the tensors.
      names: uint32, one a tensor: of its name.
      starts, which, shifts: of shape [devices, pieces]; the elements of a layer from `start` on belong to tensor
        `which`, and `shift` (mod 2**32) is added to their index to have that in the stored tensor.
      room: elements of a layer on a device.
    """

    placements: tuple[Placement | None, ...]
    names: np.ndarray
    starts: np.ndarray
    which: np.ndarray
    shifts: np.ndarray
    room: int
    numels: np.ndarray

    def bits(self, key: Array, device: Any) -> Bits:
        """The bits of a device's elements, which it holds as [layers, room]: uint32.

        All elements from an index to as far on as is asked for must be of one layer and one piece.
        """
        salts = mixed(mixed(self.names) ^ key)

        def bits(at: Any, on: Any) -> Array:
            at, on = jnp.asarray(at, jnp.uint32), jnp.asarray(on, jnp.uint32)
            layer, at = at // np.uint32(self.room), at % np.uint32(self.room)
            if self.starts.shape[1] == 1:
                piece: Any = 0
            else:
                starts = jnp.asarray(self.starts)[device]
                piece = jnp.searchsorted(starts, at, side="right", method="scan_unrolled") - 1
            tensor = jnp.asarray(self.which)[device][piece]
            index = at + jnp.asarray(self.shifts)[device][piece] + on
            for number, placement in enumerate(self.placements):
                if (natural := _natural(placement, index)) is not index:
                    index = jnp.where(tensor == number, natural, index)
            place = index + layer * jnp.asarray(self.numels)[tensor]
            return mixed(mixed(place) ^ salts[tensor])

        return bits


@lru_cache(maxsize=4096)
def places_of(leaf: Leaf) -> Places:
    """The places of a leaf's elements."""
    if leaf.of is None:
        zero = np.zeros((1, 1), np.uint32)
        numel = max(1, math.prod(leaf.shape))
        return Places((None,), _names([leaf.path]), zero, zero, zero, numel, np.array([numel % 2**32], np.uint32))
    unit, slab = leaf.of.unit, leaf.of.slab
    not_split([slab], "stochastic rounding")
    ends = [end * slab.shard_numel for end in accumulate(unit.shares or (1,) * unit.num_shards, initial=0)]
    table = []
    for k in range(unit.num_shards):
        held = [
            (max(p.offset, ends[k]) - ends[k], number, ends[k] - p.offset)
            for number, p in enumerate(slab.placements)
            if max(p.offset, ends[k]) < min(p.stop, ends[k + 1])
        ]
        table.append(held or [(0, 0, 0)])
    width = max(map(len, table))
    # What lies before the first piece is padding, and so is what is cut off by a repeated last one.
    full = np.array([[(0, *row[0][1:]), *row[1:], *[row[-1]] * (width - len(row))] for row in table], np.int64)
    starts, which, shifts = (full % 2**32).astype(np.uint32).transpose(2, 0, 1)
    numels = np.array([p.tensor.numel % 2**32 for p in slab.placements], np.uint32)
    names = _names([p.tensor.name for p in slab.placements])
    return Places(slab.placements, names, starts, which, shifts, max(1, slab.shard_numel * unit.share), numels)


def _names(names: list[str]) -> np.ndarray:
    return np.array([crc32(name.encode()) for name in names], np.uint32)


def _natural(placement: Placement | None, index: Array) -> Array:
    """From the index of stored elements to that in the tensor as the user knows it."""
    if placement is None or not placement.tensor.numel:
        return index
    shape = placement.tensor.shape
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    if placement.storage == "row_major":
        order = placement.axis_order
        return index if order is None else _moved(index, placement.stored_shape, [strides[d] for d in order])
    found, matrix, row = index, math.prod(shape[-2:]), shape[-1]
    for r in tile_regions(placement.tensor):
        sizes, steps = (r.members, r.rows, r.cols, r.height, r.width), (matrix, r.height * row, r.width, row, 1)
        inside = _moved(index - np.uint32(r.start), sizes, steps) + np.uint32(r.top * row + r.left)
        found = jnp.where((index >= np.uint32(r.start)) & (index < np.uint32(r.start + r.numel)), inside, found)
    return found


def _moved(index: Array, sizes: Any, steps: Any) -> Array:
    """The sum of an index's coordinates in an array of these sizes, each times its step."""
    total = jnp.zeros_like(index)
    for size, step in zip(reversed(sizes), reversed(steps), strict=True):
        total = total + index % np.uint32(size) * np.uint32(step)
        index = index // np.uint32(size)
    return total
