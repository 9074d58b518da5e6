"""Collectives in the form that the TPU compiler makes of them what they are, and no sums.

On slices of three dims, of v5p from 64 chips on and of v4 from 32, the TPU compiler makes of an all-gather over all
chips an all-reduce of the whole array, zero but for this chip's part: twice the bytes, and nothing runs beside it.
Over some of the chips it gathers. So there a gather goes along a line of chips first and then over all such lines,
which sends hardly more. `benchmarks/tpu_collectives.py` shows what becomes of which.

Matrices that lie one behind the other, of experts for one, are gathered as one matrix. Of more dims the compiler
wants the one that is gathered outermost, also in the stack of all layers that the shard is cut from, and copies that.

A reduce-scatter of a very wide matrix by rows, 64 of 128,256 to a chip for one, becomes an all-reduce; with a dim in
front for the parts it does not.
"""

from functools import cache

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

Groups = tuple[tuple[int, ...], ...]

_MIN_CHIPS = {"TPU v4": 32}
_MIN_CHIPS_OF_OTHERS = 64
_SUBLANES = 8  # rows of a tile: where they do not divide the rows, another shape is a copy
_WIDE = 2**16  # columns; for narrower ones it is not needed, and has their products read other layouts


def all_gather(x: jax.Array, mesh: Mesh, axis: str) -> jax.Array:
    """`lax.all_gather(x, axis, tiled=True)` inside `shard_map`, in as many steps as the chips call for."""
    tail = x.shape[1:]
    if x.ndim > 2 and x.shape[-2] % _SUBLANES == 0 and has_tpus(mesh):
        x = x.reshape(-1, x.shape[-1])
    for groups in gather_steps(mesh, axis, x.shape[0] if x.ndim == 2 else _SUBLANES):
        x = lax.all_gather(x, axis, axis_index_groups=groups, tiled=True)
    return x.reshape(-1, *tail)


def psum_scatter(x: jax.Array, mesh: Mesh | None, axis: str, dim: int) -> jax.Array:
    """`lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)` inside `shard_map`."""
    is_wide = x.ndim - dim == 2 and x.shape[-1] >= _WIDE and x.shape[dim] % (_SUBLANES * lax.axis_size(axis)) == 0
    if mesh is None or not is_wide or not has_tpus(mesh):
        return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    parts = x.reshape(*x.shape[:dim], lax.axis_size(axis), -1, x.shape[-1])
    return lax.psum_scatter(parts, axis, scatter_dimension=dim)


def has_tpus(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform == "tpu"


@cache
def gather_steps(mesh: Mesh, axis: str, rows: int = _SUBLANES) -> tuple[Groups | None, ...]:
    """Who gathers with whom, step by step, in indices along the axis; None for all of them at once.

    The first step goes along a line of chips, or over as many as make whole tiles of the `rows` of each: the second
    step's parts lie one behind the other then, and would have to be copied.
    """
    size = mesh.shape[axis]
    chips = list(mesh.devices.flat)
    if not has_tpus(mesh) or size < max(mesh.size, _MIN_CHIPS.get(chips[0].device_kind, _MIN_CHIPS_OF_OTHERS)):
        return (None,)
    where = np.array([chip.coords for chip in chips])
    if np.count_nonzero(np.ptp(where, axis=0)) < 3:
        return (None,)
    line = next(n for n in range(size // 2, 0, -1) if size % n == 0 and _on_lines(where, n))
    line = line if line > 1 else next(n for n in range(2, size + 1) if size % n == 0)
    first = next((n for n in range(line, size) if size % n == 0 and n * rows % _SUBLANES == 0), line)
    index = np.arange(size).reshape(-1, first)
    return tuple(tuple(map(tuple, groups.tolist())) for groups in (index, index.T))


def _on_lines(where: np.ndarray, n: int) -> bool:
    """Whether any `n` chips in a row, from the first on, differ in one coordinate at most."""
    return bool((np.count_nonzero(np.ptp(where.reshape(-1, n, where.shape[1]), axis=1), axis=1) <= 1).all())
