"""Loss scaling: float16 gradients that are too small on their own, and overflow that stays to be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import make_mesh

import ragged_jax as rj

X = np.full((12, 4), 2.0**-13, np.float32)
FLOAT16 = rj.MixedPrecision("float16")


def loss(params, x):
    """Its gradient by `w` is 2**-26 / 3: nothing in float16, whose smallest number is 2**-24."""
    return ((x.astype(jnp.float16) @ params["w"]).astype(jnp.float32) * 2.0**-13).mean()


def sharded():
    return rj.shard_tree({"w": np.ones((4, 3), np.float32)}, make_mesh(3), axis="fsdp", precision=FLOAT16)


@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}, {"num_microbatches": 2, "reduce": "each"}])
def test_gradients_that_underflow_without_it(kwargs):
    expected_loss, expected = jax.value_and_grad(loss)({"w": jnp.ones((4, 3), jnp.float32)}, X)
    assert (expected["w"] > 0).all()
    _, lost = rj.value_and_grad(loss, **kwargs)(sharded(), X)
    assert (rj.full_params(lost)["w"] == 0).all()

    @jax.jit
    def step(params, scale):
        return rj.value_and_grad(loss, loss_scale=scale, **kwargs)(params, X)

    for scale in (2.0**12, 2.0**15):  # one program for both
        value, grads = step(sharded(), jnp.float32(scale))
        np.testing.assert_allclose(value, expected_loss, rtol=1e-3)
        np.testing.assert_allclose(rj.full_params(grads)["w"], 2.0**-26 / 3, rtol=1e-2)
    assert step._cache_size() == 1
    static, _ = rj.value_and_grad(loss, loss_scale=4096, **kwargs)(sharded(), X)
    np.testing.assert_allclose(static, expected_loss, rtol=1e-3)


def test_overflow_is_seen_and_skipped():
    tx = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=5)
    big = lambda params, x: loss(params, x) * 2.0**15

    @jax.jit
    def step(params, state, scale):
        value, grads = rj.value_and_grad(big, loss_scale=scale)(params, X)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, scale.adjust(rj.all_finite(grads)), value, grads

    with jax.set_mesh(make_mesh(3)):
        params = sharded()
        state, scale = tx.init(params), rj.DynamicLossScale(jnp.float32(2.0**20), period=2, factor=2.0**5)
        new, state, scale, value, grads = step(params, state, scale)
        assert np.isfinite(value)
        assert not np.isfinite(rj.full_params(grads)["w"]).all()
        assert scale.value == 2.0**15
        np.testing.assert_array_equal(rj.full_params(new)["w"], 1)
        for expected in (2.0**15, 2.0**20):
            new, state, scale, _, _ = step(new, state, scale)
            assert scale.value == expected
        np.testing.assert_allclose(1 - rj.full_params(new)["w"], 2 * 2.0**-11 / 3, rtol=1e-2)
    assert step._cache_size() == 1
