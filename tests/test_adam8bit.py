"""8-bit Adam: the same bits for every number of devices, for the unsharded arrays, and in numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from models import make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.layout import TensorSpec, rows
from ragged_jax.optim import adamw8bit, fused_adamw8bit, scale_by_adam8bit
from ragged_jax.optim._blocks import grid_of_slab
from ragged_jax.optim._reference import Adam8bit
from ragged_jax.planner import Group, plan

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
STEPS = 3
SHAPES = {"w": (96, 128), "odd": (1601, 48), "v": (101, 130), "small": (5,), "bias": (130,), "embed": (300, 20)}
RULE = {"embed": None}


@cache
def gradients(step: int) -> dict[str, np.ndarray]:
    """Heavy-tailed, with exact zeros."""
    rng = np.random.default_rng(step)
    made = {}
    for name, shape in SHAPES.items():
        g = rng.normal(size=shape) * 10 ** rng.uniform(-6, 1, shape)
        made[name] = (g * (rng.random(shape) > 0.1)).astype(np.float32)
    made["v"][:2] = 0
    return made


@cache
def expected(block: rj.Block, nesterov: bool = False) -> list[dict[str, np.ndarray]]:
    """By numpy: the updates of every step, for the tensors that are quantised."""
    adam, steps = Adam8bit(block=block, nesterov=nesterov), []
    states = {n: adam.init(s) for n, s in SHAPES.items() if np.prod(s) >= 4096 and n not in RULE}
    for i in range(STEPS):
        done = {n: adam.update(gradients(i)[n], state) for n, state in states.items()}
        states = {n: state for n, (_, state) in done.items()}
        steps.append({n: update for n, (update, _) in done.items()})
    return steps


def assert_bits(got: dict, want: dict, names=None) -> None:
    for name in names or want:
        np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint32), want[name].view(np.uint32), err_msg=name)


@cache
def unsharded(block: rj.Block, nesterov: bool = False) -> list[dict[str, np.ndarray]]:
    tx = scale_by_adam8bit(block={**RULE, "*": block}, nesterov=nesterov)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state, update, steps = tx.init(params), jax.jit(tx.update), []
    for i in range(STEPS):
        out, state = update(gradients(i), state)
        steps.append(jax.tree.map(np.asarray, out))
    return steps


@pytest.mark.parametrize(
    ("block", "nesterov"),
    [(rj.elements(256), False), (rj.rows(1), False), (rj.tile(32, 32), False), (rj.elements(256), True)],
    ids=repr,
)
def test_an_unsharded_array_has_the_bits_of_numpy(block, nesterov):
    for got, want in zip(unsharded(block, nesterov), expected(block, nesterov), strict=True):
        assert_bits(got, want)


@pytest.mark.parametrize(
    ("num_devices", "block"),
    [(1, rj.elements(256)), (3, rj.elements(256)), (8, rj.elements(256)), (3, rj.rows(1)), (8, rj.tile(32, 32))],
    ids=repr,
)
def test_the_same_bits_on_any_number_of_devices(num_devices, block):
    tx = scale_by_adam8bit(block={**RULE, "*": block})
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    mesh = make_mesh(num_devices, AxisType.Auto)
    tree = rj.shard_tree(params, mesh, axis="fsdp", block=block)
    state, update = jax.jit(tx.init)(tree), jax.jit(tx.update)
    for i, want in enumerate(unsharded(block)):
        grads = rj.shard_like(gradients(i), tree)
        grads = grads.replace(poison_padding(grads.unit, grads.slabs), {})
        out, state = update(grads, state)
        assert_bits(rj.full_params(out), want)
        for name, x in out.slabs.items():
            assert np.isfinite(np.asarray(x)).all(), name
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))


def test_layers_stacked_or_in_a_list_have_the_same_bits():
    rng = np.random.default_rng(0)
    stack = {name: rng.normal(size=(3, *SHAPES[name])).astype(np.float32) for name in ("v", "bias", "odd")}
    layers = {f"{i}": {name: x[i] for name, x in stack.items()} for i in range(3)}
    tx, mesh = scale_by_adam8bit(), make_mesh(3)

    def updated(params, **kwargs):
        tree = rj.shard_tree(params, mesh, axis="fsdp", block=rj.elements(256), **kwargs)
        state, update, out = tx.init(tree), jax.jit(tx.update), tree
        for _ in range(2):
            out, state = update(tree, state)
        return rj.full_params(out)

    together = updated({"layers": stack}, units="layers", stacked="layers")["layers"]
    for i, layer in updated(layers).items():
        assert_bits({name: x[int(i)] for name, x in together.items()}, layer)


@pytest.mark.parametrize("shares", [(2, 1), (1, 1, 3)])
def test_uneven_shares_have_the_same_bits(shares):
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    plan = rj.plan(params, len(shares), block=rj.elements(256), shares=shares)
    tree = rj.shard_tree(params, make_mesh(len(shares)), axis="fsdp", plan=plan)
    tx = scale_by_adam8bit(block=RULE)
    out, _ = jax.jit(tx.update)(rj.shard_like(gradients(0), tree), tx.init(tree))
    assert_bits(rj.full_params(out), unsharded(rj.elements(256))[0])


def test_what_stays_in_float32_is_adam():
    """With a fast second moment: `1 - 0.999**t` alone has a rounding error of 3e-5 in the first steps."""
    tx, ours = optax.scale_by_adam(b2=0.9), scale_by_adam8bit(b2=0.9, block=RULE)
    params = {name: jnp.zeros(SHAPES[name]) for name in ("embed", "bias", "small")}
    state, our_state = tx.init(params), ours.init(params)
    for i in range(STEPS):
        grads = {name: gradients(i)[name] for name in params}
        want, state = tx.update(grads, state)
        got, our_state = ours.update(grads, our_state)
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-6, atol=1e-7)


def test_cut_blocks_are_an_error_that_lists_them():
    tree = rj.shard_tree(
        {"w": np.zeros((300, 33)), "v": np.zeros((90, 50)), "b": np.zeros(7)}, make_mesh(7), axis="fsdp"
    )
    with pytest.raises(ValueError, match="blocks that are quantised together") as error:
        scale_by_adam8bit().init(tree)
    message = str(error.value)
    assert "w: shape (300, 33), quantised in elements(256), cut at element" in message
    assert "v: shape (90, 50)" in message
    assert "block=rj.elements(256)" in message
    assert "  b:" not in message
    scale_by_adam8bit(block={"w": None, "v": None}).init(tree)


def test_state_takes_two_bytes_a_parameter():
    params = {"a": jnp.zeros((512, 512)), "b": jnp.zeros((4096,)), "c": jnp.zeros((1000, 33))}
    tree = rj.shard_tree(params, make_mesh(8), axis="fsdp", block=rj.elements(256))
    for tree_ in (params, tree):
        state = scale_by_adam8bit().init(tree_)
        nbytes = sum(s.data.nbytes for x in jax.tree.leaves((state.mu, state.nu)) for s in x.addressable_shards)
        assert nbytes <= 2.1 * sum(x.size for x in jax.tree.leaves(tree_))


@pytest.mark.parametrize("scale", [0, 1e-45, 1e-39, 1e-30, 1e-20, 1.0, 1e20, 3e38])
def test_no_nan_from_finite_gradients(scale):
    rng = np.random.default_rng(0)
    g = rng.normal(size=(64, 128)).clip(-1, 1).astype(np.float32) * np.float32(scale)
    g[:4], g[10, 3] = 0, 3e38  # blocks of zeros, and an outlier
    tx = scale_by_adam8bit()
    state, update = tx.init(g), jax.jit(tx.update)
    for _ in range(3):
        u, state = update(g, state)
        assert np.isfinite(np.asarray(u)).all()
        assert not np.asarray(u)[:4].any()
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_stays_in_its_block(bad):
    g = np.ones((64, 128), np.float32)
    g[0, 5] = bad
    tx = scale_by_adam8bit()
    u, state = tx.update(g, tx.init(g))
    assert np.isnan(np.asarray(u)).sum() == 1
    u, _ = tx.update(np.ones_like(g), state)
    assert np.isnan(np.asarray(u)).sum() == 256


def test_the_clamp_keeps_small_curvatures_from_blowing_up():
    """A quadratic with curvatures over three decades in every block."""
    curvature = jnp.asarray(10 ** np.random.default_rng(0).uniform(-3, 0, (16, 256)), jnp.float32)
    start = jnp.asarray(np.random.default_rng(1).normal(size=(16, 256)), jnp.float32)

    def final(tx):
        def body(_, carry):
            x, state = carry
            updates, state = tx.update(curvature * x, state, x)
            return optax.apply_updates(x, updates), state

        x, _ = jax.jit(lambda: jax.lax.fori_loop(0, 600, body, (start, tx.init(start))))()
        return float((curvature * x**2).mean() / 2)

    rate = optax.cosine_decay_schedule(0.02, 600)
    fp32 = final(optax.adam(rate, b2=0.99))
    assert final(adamw8bit(rate, b2=0.99, weight_decay=0.0)) < 1.3 * fp32
    assert final(adamw8bit(rate, b2=0.99, weight_decay=0.0, clamp_second_moment=False)) > 3 * fp32


@pytest.mark.parametrize("num_devices", [1, 5])
def test_the_fused_step_is_the_transform(num_devices):
    params = {name: g * 0.1 for name, g in gradients(9).items()}
    tree = rj.shard_tree(params, make_mesh(num_devices), axis="fsdp", block=rj.elements(256))
    grads = rj.shard_like(gradients(0), tree)
    tx, fused = adamw8bit(1e-2, weight_decay=0.1), fused_adamw8bit(1e-2, weight_decay=0.1)
    updates, state = jax.jit(tx.update)(grads, tx.init(tree), tree)
    after, fused_state = jax.jit(fused.apply)(tree, grads, fused.init(tree))
    want = rj.full_params(optax.apply_updates(tree, updates))
    for name, x in rj.full_params(after).items():
        np.testing.assert_allclose(x, want[name], rtol=1e-6, atol=1e-7, err_msg=name)
    for x, y in zip(jax.tree.leaves(fused_state), jax.tree.leaves(state[0]), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("chunk", [5_000, None])
def test_chunks_change_no_bit(chunk):
    """In a loop with a remainder, in one go, for blocks that are a reshape and for those that are not."""
    tx = scale_by_adam8bit(block=RULE, chunk=chunk)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    tree = rj.shard_tree(params, make_mesh(2), axis="fsdp", block=rj.elements(256))
    alone, update = tx.init(params), jax.jit(tx.update)
    state = tx.init(tree)
    for i, want in enumerate(unsharded(rj.elements(256))[:2]):
        out, alone = update(gradients(i), alone)
        assert_bits(out, want)
        out, state = update(rj.shard_like(gradients(i), tree), state)
        assert_bits(rj.full_params(out), want)


def test_more_elements_on_a_device_than_int32_counts_are_refused():
    bucket = plan([Group("", (TensorSpec("w", (2**31 + 1, 3)), TensorSpec("v", (2**31 + 3,))))], 2).layout.buckets[0]
    for slab in bucket.slabs:
        grid, _ = grid_of_slab(bucket, slab, 2, None, {"w": rows(1), "*": None}, 4096)
        with pytest.raises(ValueError, match="more than an int32 counts: shard over more devices"):
            assert grid.exact_runs.size + grid.runs.size == 0
