"""Stochastic rounding: unbiased, and the same bits on any mesh, in any layout, and for ordinary arrays."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import make_mesh

import ragged_jax as rj
from ragged_jax.optim import fused_adamw8bit, stochastic_round, stochastic_rounding
from ragged_jax.optim._places import key_of, mixed

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
SHAPES = {
    "layers": {"norm": (4, 128), "up": (4, 64, 128)},
    "odd": (1601, 48), "wide": (32, 1001), "tile": (96, 160), "bias": (130,), "embed": (301, 20), "scale": (),
}  # fmt: skip
RULE = {"embed": None, "wide": None}


@cache
def tree(seed: int, dtype: str = "bfloat16") -> dict:
    rng = np.random.default_rng(seed)
    draw = lambda shape: np.asarray(jnp.asarray(rng.normal(size=shape), dtype))
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16), err_msg=str(path))


OPTIMIZER = fused_adamw8bit(1e-2, block={**RULE, "*": rj.elements(256)}, stochastic_rounding=True, seed=3)


def fused(params, grads):
    apply, state = jax.jit(OPTIMIZER.apply), OPTIMIZER.init(params)
    for _ in range(2):
        params, state = apply(params, grads, state)
    return params


def chained(params, grads):
    tx = optax.chain(optax.scale(-(2.0**-10)), stochastic_rounding(3))
    state, after = tx.init(params), params

    @jax.jit
    def step(params, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        after, state = step(after, state)
    return after


@cache
def unsharded(run):
    return jax.tree.map(np.asarray, run(tree(0), tree(1)))


def shard(num_devices, packed):
    """In packed or sole slabs, with stacked layers."""
    how = {"units": "layers", "stacked": "layers"}
    smallest = 1 << 20 if packed else 0
    plan = rj.plan(tree(0), num_devices, block=rj.elements(256), min_slab_nbytes=smallest, **how)
    return rj.shard_tree(tree(0), make_mesh(num_devices), axis="fsdp", plan=plan, **how)


@pytest.mark.parametrize("run", [fused, chained])
@pytest.mark.parametrize(("num_devices", "packed"), [(3, False), (8, True)])
def test_the_same_bits_on_any_mesh(run, num_devices, packed):
    """Padding, tensors in 8 bits and in float32."""
    with jax.set_mesh(make_mesh(num_devices)):
        params = shard(num_devices, packed)
        after = run(params, rj.shard_like(tree(1), params))
    assert_same(rj.full_params(after), unsharded(run))


def test_the_same_bits_after_a_checkpoint_on_other_devices(tmp_path):
    """One step on 3 devices and the next one on 8: 8-bit moments, bfloat16 parameters and the count go along."""
    checkpointer = rj.Checkpointer(tmp_path, background=False)
    for step, (num_devices, packed) in enumerate(((3, False), (8, True))):
        with jax.set_mesh(make_mesh(num_devices)):
            params = shard(num_devices, packed)
            state = params, OPTIMIZER.init(params)
            params, state = checkpointer.restore(state) if step else state
            state = jax.jit(OPTIMIZER.apply)(params, rj.shard_like(tree(1), params), state)
            checkpointer.save(step, state)
    assert_same(rj.full_params(state[0]), unsharded(fused))


@pytest.mark.parametrize(
    "options",
    [
        {"shares": (2, 1, 1)},
        {"block": {"tile": rj.tile(32, 32), "odd": rj.tile(32, 32)}, "storage": "tiled"},
        {"axis_order": "auto"},
    ],
    ids=["uneven shares", "tiles with edges", "transposed"],
)
def test_the_same_bits_in_any_layout(options):
    given = {k: x for k, x in tree(0).items() if k != "layers"}
    plan = rj.plan(given, 3, min_slab_nbytes=0, **options)
    stored = [p for b in plan.layout.buckets for s in b.slabs for p in s.placements]
    assert plan.layout.shares or any(p.storage == "tiled" or p.axis_order for p in stored)
    with jax.set_mesh(make_mesh(3)):
        params = rj.shard_tree(given, make_mesh(3), axis="fsdp", plan=plan)
        after = chained(params, rj.shard_like({k: tree(1)[k] for k in given}, params))
    assert_same(rj.full_params(after), {k: unsharded(chained)[k] for k in given})


def test_the_mean_is_exact():
    """Within 5 standard errors, over elements and over steps; the seed and the name matter, and neighbours differ."""
    fractions = np.array([0.0, 2**-16, 0.01, 0.3, 0.5, 0.9, 1 - 2**-16])
    values = np.concatenate([sign * scale * (1 + fractions / 128) for sign in (1, -1) for scale in (1.0, 2.0**-90)])
    values = values.astype(np.float32)
    by_place = mixed(mixed(np.arange(2**16, dtype=np.uint32)) ^ key_of(0, 1))
    by_step = jax.vmap(lambda count: mixed(mixed(np.uint32(7)) ^ key_of(0, count)))(np.arange(2**16))
    for bits in (by_place, by_step):
        got = np.asarray(jax.jit(stochastic_round)(values[:, None], bits), np.float64)
        ulp = 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)
        share = np.abs(values / ulp) % 1
        error = np.abs(got.mean(1) - values) / ulp
        assert (error <= 5 * np.sqrt(share * (1 - share) / 2**16)).all(), error
        high = np.asarray(bits >> 16, np.float64) / 2**16 - 0.5
        assert abs((high[1:] * high[:-1]).mean() * 12) < 5 / 2**8
    special = np.array([0, np.inf, -np.inf, np.nan, 1, -2.5], np.float32)
    np.testing.assert_array_equal(np.asarray(stochastic_round(special, np.uint32(2**32 - 1)), np.float32), special)
    other = mixed(mixed(np.arange(2**16, dtype=np.uint32)) ^ key_of(1, 1))
    assert np.corrcoef(np.asarray(by_place >> 16, float), np.asarray(other >> 16, float))[0, 1] < 5 / 2**8


def test_small_updates_are_not_lost():
    """A thousand steps of a thousandth of an ulp move the mean by one; to nearest they move nothing."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}

    def after(tx):
        def body(carry, _):
            params, state = carry
            updates, state = tx.update({"w": jnp.full((64, 64), 2.0**-17, jnp.float32)}, state, params)
            return (optax.apply_updates(params, updates), state), None

        (new, _), _ = jax.jit(lambda c: jax.lax.scan(body, c, length=1024))((params, tx.init(params)))
        return np.asarray(new["w"], np.float64)

    assert (after(optax.identity()) == 1).all()
    got = after(stochastic_rounding())
    np.testing.assert_allclose(got.mean(), 1 + 2**-7, atol=5 * 2**-7 / 64)
    assert got.std() > 2**-9
    with pytest.raises(ValueError, match="needs the parameters"):
        stochastic_rounding().update(params, stochastic_rounding().init(params))
