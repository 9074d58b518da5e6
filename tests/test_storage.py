"""Tiled storage: every tile contiguous, edge tiles at their own size, and cuts that spare them all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import TensorSpec, can_be_tiled, cuts, rows, stored_order, tile, tile_regions

tensors = st.builds(
    lambda stack, shape, block: TensorSpec("t", (*stack, *shape), "float32", tile(*block)),
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(st.integers(1, 14), st.integers(1, 14)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
)


def tile_of(tensor: TensorSpec) -> np.ndarray:
    """For each element, in row-major order, the number of its tile."""
    num_rows, num_cols = tensor.shape[-2:]
    r, c = tensor.block.size
    across = -(-num_cols // c)
    one = (np.arange(num_rows)[:, None] // r) * across + np.arange(num_cols)[None, :] // c
    members = tensor.numel // one.size
    return np.concatenate([(one + k * (one.max() + 1)).reshape(-1) for k in range(members)])


@given(tensors)
def test_tiles_are_contiguous(tensor):
    order = stored_order(tensor, "tiled")
    assert sorted(order) == list(range(tensor.numel))
    tiles = tile_of(tensor)[order]
    changes = 1 + np.flatnonzero(np.diff(tiles))
    assert len(changes) + 1 == len(set(tiles))
    granularity, tail = cuts(tensor, "tiled")
    legal = {0, tensor.numel, *changes}
    assert set(range(0, tensor.numel - tail + 1, granularity)) <= legal
    assert tail == 0 or tail < tensor.numel


@given(tensors)
def test_regions_read_back(tensor):
    """What a runtime does: region by region, reshape, transpose, put in place."""
    data = np.arange(tensor.numel)
    stored = data[stored_order(tensor, "tiled")]
    out = np.zeros((tensor.numel // (tensor.shape[-1] * tensor.shape[-2]), *tensor.shape[-2:]), int)
    for r in tile_regions(tensor):
        part = stored[r.start : r.start + r.numel].reshape(r.members, r.rows, r.cols, r.height, r.width)
        part = part.transpose(0, 1, 3, 2, 4).reshape(r.members, r.rows * r.height, r.cols * r.width)
        out[:, r.top : r.top + r.rows * r.height, r.left : r.left + r.cols * r.width] = part
    assert (out.reshape(-1) == data).all()


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((64, 64), (32, 32), (1024, 0)),
        ((2880, 2880), (128, 128), (16384, 0)),  # edges of half a tile
        ((32, 5760, 2880), (128, 128), (16384, 0)),
        ((50257, 768), (32, 32), (1024, 24 * 17 * 32)),  # a bottom edge of 17 rows stays in one piece
        ((10, 100), (32, 32), (320, 0)),  # the edge is shorter than a tile
    ],
)
def test_cuts(shape, block, expected):
    assert cuts(TensorSpec("t", shape, "bfloat16", tile(*block)), "tiled") == expected


def test_what_cannot_be_tiled():
    assert not can_be_tiled(TensorSpec("t", (4, 4), block=rows(2)))
    assert not can_be_tiled(TensorSpec("t", (4,), block=tile(2, 2)))
    assert not can_be_tiled(TensorSpec("t", (0, 4), block=tile(2, 2)))
    assert cuts(TensorSpec("t", (4, 4), block=rows(2)), "row_major") == (8, 0)
