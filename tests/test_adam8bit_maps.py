"""Codes: the maps, the exact midpoint rule, and blocks, each against something obvious."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_jax import layout, planner
from ragged_jax.optim._blocks import Part, grid_of_slab
from ragged_jax.optim._maps import code_map
from ragged_jax.optim._quantise import decode, encode, product
from ragged_jax.optim._reference import block_ids, quantise

MAPS = [(name, signed) for name in ("dynamic", "linear", "fp8") for signed in (True, False)]
every_map = pytest.mark.parametrize(("name", "signed"), MAPS)


def edges(cells: int) -> np.ndarray:
    """`cells` equal cells from 0.1 to 1 in float32, each edge rounded once, counted from the nearer end."""
    low, step, i = (
        np.float32(0.1),
        np.float32((np.float32(1) - np.float32(0.1)) / np.float32(cells)),
        np.arange(cells + 1),
    )
    from_low = (np.float64(step) * i + np.float64(low)).astype(np.float32)
    from_high = (1 - np.float64(step) * (cells - i)).astype(np.float32)
    return np.where(i < (cells + 1) // 2, from_low, from_high)


def rule(signed: bool, dtype) -> np.ndarray:
    """The dynamic map as it is defined, by way of `dtype`: decades in equal cells, their centres."""
    values = [np.array([0.0, 1.0])]
    for i in range(7):
        cells = 2 ** (i + (not signed))
        cut = edges(cells) if dtype is np.float32 else np.linspace(0.1, 1, cells + 1)
        centres = (cut[:-1] + cut[1:]) / dtype(2) * dtype(10.0 ** (i - 6))
        values += [centres, -centres] if signed else [centres]
    return np.sort(np.concatenate(values)).astype(np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_map_is_its_rule(signed):
    table = code_map("dynamic", signed=signed)
    assert table.values.shape == (256,)
    assert table.zero == (127 if signed else 0)
    np.testing.assert_array_equal(table.values, rule(signed, np.float32))
    np.testing.assert_allclose(table.values, rule(signed, np.float64), rtol=0, atol=6e-8)


@every_map
def test_every_map_rises_from_end_to_end(name, signed):
    table = code_map(name, signed=signed)
    assert (np.diff(table.values) >= 0).all()
    assert table.values[-1] == 1
    assert table.values[table.zero] == 0
    assert (table.values[0] < -0.99) if signed else (table.values[0] == 0)


def hard_numbers(name: str, signed: bool) -> np.ndarray:
    """A million random numbers, and every one at which a rounding could go wrong."""
    rng, table = np.random.default_rng(0), code_map(name, signed=signed)
    sign = rng.choice([-1, 1], 10**6) if signed else 1
    random = np.concatenate([rng.random(500_000), 10 ** rng.uniform(-12, 0, 500_000)]) * sign
    edges = [*table.midpoints, *table.values, 0, 1, 2.0**-126, *2.0 ** -np.arange(40), *(np.arange(128) / 128)]
    edges = np.array(edges, np.float32)
    near = [edges, np.nextafter(edges, np.float32(2)), np.nextafter(edges, np.float32(-2))]
    cells = (np.arange(60 * 128) + 67 * 128 << 16).astype(np.uint32).view(np.float32)
    near += [cells, np.nextafter(cells, np.float32(2)), np.nextafter(cells, np.float32(-2))]
    adversarial = np.concatenate(near)
    if signed:
        adversarial = np.concatenate([adversarial, -adversarial])
    numbers = np.concatenate([random.astype(np.float32), adversarial]).clip(-1 if signed else 0, 1)
    return np.where(np.abs(numbers) < 2.0**-126, np.float32(0), numbers)


@every_map
def test_the_midpoint_rule_is_exact(name, signed):
    """Against a search, and against torch where it is installed."""
    numbers, table = hard_numbers(name, signed), code_map(name, signed=signed)
    got = np.asarray(jax.jit(lambda x: encode(x, jnp.float32(1), table))(numbers))
    np.testing.assert_array_equal(got, np.searchsorted(table.midpoints, numbers, side="left"))
    np.testing.assert_array_equal(decode(jnp.arange(256), jnp.float32(1), table), table.values)
    try:
        import torch
    except ModuleNotFoundError:
        return
    want = torch.bucketize(torch.from_numpy(numbers), torch.from_numpy(table.midpoints))
    np.testing.assert_array_equal(got, want.numpy())


@every_map
def test_a_code_stands_for_the_nearest_value(name, signed):
    table = code_map(name, signed=signed)
    numbers = np.random.default_rng(1).uniform(-1 if signed else 0, 1, 2000).astype(np.float32)
    codes, scales = quantise(numbers, np.zeros(2000, int), name, signed=signed)
    y = numbers / scales
    distance = np.abs(table.values[codes] - y)
    assert (distance <= np.abs(table.values[:, None] - y).min(0) + 1e-7).all()


BLOCKS = st.one_of(
    st.builds(layout.elements, st.integers(1, 40)),
    st.builds(layout.rows, st.integers(1, 6)),
    st.builds(layout.tile, st.integers(1, 6), st.integers(1, 6)),
    st.just(layout.whole()),
)
SHAPES = st.lists(st.integers(1, 12), min_size=2, max_size=3).map(tuple)


@given(SHAPES, BLOCKS)
def test_block_numbers_are_arithmetic(shape, block):
    numbers = Part(shape, block, 0).block_of(np.arange(math.prod(shape)))
    np.testing.assert_array_equal(numbers, block_ids(shape, block).reshape(-1))


@settings(max_examples=60)
@given(st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=4), BLOCKS, st.integers(1, 5))
def test_every_device_knows_its_blocks(tensors, block, num_shards):
    """Elements of one block get one number on one device, those of others another, and padding none."""
    specs = [layout.TensorSpec(f"{'q' if q else 'f'}{i}", s, block=block) for i, (s, q) in enumerate(tensors)]
    bucket = planner.plan([planner.Group("", tuple(specs))], num_shards).layout.buckets[0]
    for slab in bucket.slabs:
        grid, faults = grid_of_slab(bucket, slab, num_shards, None, {"f*": None, "*": block}, 1)
        assert not faults
        want = {}
        for placement in slab.placements:
            if placement.tensor.name.startswith("q"):
                stored = layout.stored_order(placement.tensor, placement.storage)
                ids = block_ids(placement.tensor.shape, block).reshape(-1)[stored]
                want |= {placement.offset + i: (placement.tensor.name, int(b)) for i, b in enumerate(ids)}
        got = {}
        for k in range(num_shards):
            for p, part in enumerate(grid.parts):
                at, length, first = (int(x) for x in grid.runs[k, p])
                for unit in range(0, length, grid.unit):
                    assert at % grid.unit == length % grid.unit == 0
                    number = int(first + part.block_of(unit))
                    assert number < grid.num_blocks
                    for i in range(grid.unit):
                        got[k * slab.shard_numel + at + unit + i] = (k, number)
        assert got.keys() == want.keys()
        pairs = {(got[i], want[i]) for i in got}
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def test_products_are_rounded():
    """The compiler contracts a plain `a * b + c * d`; `product` keeps it from doing so."""
    m, g = np.random.default_rng(0).normal(size=(2, 10**6)).astype(np.float32)
    b, c = np.float32(0.9), np.float32(0.1)
    want = b * m + c * g
    assert (np.asarray(jax.jit(lambda m, g: b * m + c * g)(m, g)) != want).any()
    np.testing.assert_array_equal(jax.jit(lambda m, g: product(b, m) + product(c, g))(m, g), want)
