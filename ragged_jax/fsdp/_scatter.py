"""Tensors that are spread over the devices become a slab, and none of them is whole anywhere on the way.

To concatenate arrays across their cuts the compiler gathers them. Here each device sends its part of a tensor to the
devices whose shards it belongs to, in rounds in which everyone sends one part and receives one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..layout import Slab
from ._slabs import slab_shape, to_stored
from ._unit import Shares

GATHERED = 1  # a tensor of at most so many shards of its slab is gathered, which takes no more room than a shard


def scattered(
    slab: Slab, tensors: Sequence[jax.Array], mesh: Mesh, axis: str, shares: Shares, lead: int
) -> jax.Array:
    """Under a trace, a packed slab from its tensors, in the order of its placements.

    Args:
      slab: the slab.
      tensors: whole ones by type, which the compiler may hold in parts.
      mesh: with `Auto` axes.
      axis: the mesh axis over which the slab is cut.
      shares, lead: as for `slab_of`.
    """
    parts = shares or (1,) * mesh.shape[axis]
    tail, outer = slab_shape(slab, 1)[1:], tensors[0].shape[:lead]
    bounds = [slab.rows * end for end in accumulate(parts, initial=0)]
    whole = jnp.zeros((*outer, slab.rows * max(parts) * len(parts), *tail), slab.dtype)
    for start, piece in _pieces(slab, tensors, lead, tail):
        whole, piece = lax.optimization_barrier(
            (whole, piece)
        )  # one after another, so that few are gathered at a time
        whole = _with_piece(whole, piece, start, bounds, mesh, axis, lead)
    return whole


def _pieces(slab: Slab, tensors: Sequence[jax.Array], lead: int, tail: tuple) -> Iterator[tuple[int, jax.Array]]:
    """The rows of the slab that hold something and where they start, neighbours joined while they are small."""
    run, first, end = [], 0, 0
    for placement, tensor in zip(slab.placements, tensors, strict=True):
        if not placement.tensor.numel:
            continue
        start, stop = placement.offset // slab.width, placement.stop // slab.width
        rows = to_stored(placement, tensor, lead).reshape(*tensor.shape[:lead], stop - start, *tail)
        if run and stop - first > GATHERED * slab.rows:
            yield first, jnp.concatenate(run, lead)
            run = []
        if not run:
            first = end = start
        if start > end:
            run.append(np.zeros((*rows.shape[:lead], start - end, *tail), rows.dtype))
        run.append(rows)
        end = stop
    if run:
        yield first, jnp.concatenate(run, lead)


def _with_piece(
    whole: jax.Array, piece: jax.Array, start: int, bounds: Sequence[int], mesh: Mesh, axis: str, lead: int
) -> jax.Array:
    """`whole`, cut over the axis, with the rows of `piece` from row `start` on. Shard k begins at row `bounds[k]`."""
    num_shards, num_rows = mesh.shape[axis], piece.shape[lead]
    shard = whole.shape[lead] // num_shards
    cut = PartitionSpec(*[None] * lead, axis)
    in_parts = num_rows > GATHERED * shard
    part = -(-num_rows // num_shards) if in_parts else num_rows
    if in_parts:
        piece = jnp.pad(piece, _only(piece.ndim, lead, (0, part * num_shards - num_rows)))
    piece = lax.with_sharding_constraint(piece, NamedSharding(mesh, cut if in_parts else PartitionSpec()))
    rounds = _rounds(num_rows, part, start, bounds) if in_parts else [[(0, k) for k in range(num_shards)]]

    def local(mine: jax.Array, part_of_piece: jax.Array) -> jax.Array:
        k = lax.axis_index(axis)
        row = lax.broadcasted_iota(jnp.int32, mine.shape, lead)
        for pairs in rounds:
            # In rows of the receiver's shard: where the sender's part begins, and which of them it fills.
            begins, low, high = np.full((3, num_shards), shard, np.int32)
            for sender, receiver in pairs:
                first, own = start + sender * part, bounds[receiver : receiver + 2]
                last = min(first + part, start + num_rows, own[1])
                begins[receiver] = min(max(first - own[0], -part), shard)
                low[receiver], high[receiver] = max(first - own[0], 0), max(last - own[0], 0)
            got = lax.ppermute(part_of_piece, axis, pairs) if in_parts else part_of_piece
            around = jnp.pad(got, _only(got.ndim, lead, (shard, shard)))
            aligned = lax.dynamic_slice_in_dim(around, shard - jnp.asarray(begins)[k], shard, lead)
            mine = jnp.where((row >= jnp.asarray(low)[k]) & (row < jnp.asarray(high)[k]), aligned, mine)
        return mine

    specs = (cut, cut if in_parts else PartitionSpec())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=cut, axis_names={axis})(whole, piece)


def _rounds(num_rows: int, part: int, start: int, bounds: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs of sender and receiver, such that in each round nobody sends or receives twice."""
    rounds: list[list[tuple[int, int]]] = []
    for sender in range(-(-num_rows // part)):
        low, high = start + sender * part, start + min(num_rows, (sender + 1) * part)
        for receiver in range(bisect_right(bounds, low) - 1, bisect_left(bounds, high)):
            free = (r for r in rounds if all(s != sender and t != receiver for s, t in r))
            if (chosen := next(free, None)) is None:
                rounds.append(chosen := [])
            chosen.append((sender, receiver))
    return rounds


def _only(ndim: int, dim: int, padding: tuple[int, int]) -> list[tuple[int, int]]:
    return [padding if d == dim else (0, 0) for d in range(ndim)]
