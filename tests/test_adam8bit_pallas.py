"""The Pallas kernels of 8-bit AdamW, interpreted: the bits of the XLA path."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_mesh

import ragged_jax as rj
from ragged_jax.optim import code_map, fused_adamw8bit
from ragged_jax.optim._adam8bit import _applied, _numbers
from ragged_jax.optim._formula import Rules
from ragged_jax.optim._pallas import _call, _Lanes

RNG = np.random.default_rng(0)
SHAPES = {"w": (72, 256), "odd": (33, 250), "b": (5,)}  # the second has a last block that is not full


def heavy(shape):
    x = RNG.normal(size=shape) * 10 ** RNG.uniform(-6, 1, shape)
    return jnp.asarray(x * (RNG.random(shape) > 0.1), jnp.float32)


def steps(kernel, params, grads, **options):
    optimizer = fused_adamw8bit(1e-2, weight_decay=0.1, kernel=kernel, **options)
    apply, state = jax.jit(optimizer.apply), optimizer.init(params)
    for g in grads:
        params, state = apply(params, g, state)
    return params, state


@pytest.mark.parametrize("num_devices", [None, 3])
def test_the_bits_of_the_xla_path(num_devices):
    params, grads = {n: heavy(s) for n, s in SHAPES.items()}, [{n: heavy(s) for n, s in SHAPES.items()}] * 2
    if num_devices:
        plan = rj.plan(params, num_devices, block=rj.elements(256), min_slab_nbytes=0)
        params = rj.shard_tree(params, make_mesh(num_devices), axis="fsdp", plan=plan)
        grads = [rj.shard_like(g, params) for g in grads]
    got, want = (steps(kernel, params, grads) for kernel in ("pallas", "xla"))
    text = jax.jit(fused_adamw8bit(1e-2, kernel="pallas").apply).trace(params, grads[0], got[1]).jaxpr
    assert "pallas_call" in str(text)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_the_kernel_for_tpu_has_the_bits_of_that_for_gpu():
    """Three steps; blocks of zeros, one with an outlier, and a number of blocks that is no power of two."""
    rules, finish = Rules("dynamic", 1, False, None), _applied(0.1)
    start = (heavy((300, 256)), *(jnp.zeros((300, 256), jnp.uint8), jnp.zeros(300)) * 2)
    grads, out = [heavy((300, 256)).at[:2].set(0).at[5, 7].set(3e38) for _ in range(3)], {}
    for body in ("gpu", "tpu"):
        run, held = jax.jit(partial(_call, body, True, rules, finish, True)), start
        for i, g in enumerate(grads):
            held = run(_numbers(jnp.int32(i + 1), 0.9, 0.999, 1e-8, 1e-2), held[0], g, *held[1:])
        out[body] = held
    for x, y in zip(out["gpu"], out["tpu"], strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", ["dynamic", "linear", "fp8"])
def test_the_search_along_lanes_is_exact(name, signed):
    """All midpoints and values with their neighbours, against a search of the midpoints."""
    own = code_map(name, signed=signed)
    edges = np.concatenate([own.midpoints, own.values]).astype(np.float32)
    some = np.concatenate([edges, np.nextafter(edges, np.float32(2)), np.nextafter(edges, np.float32(-2))])
    some = np.resize(some[(np.abs(some) >= 2.0**-126) | (some == 0)], (16, 128))
    tables = [jnp.asarray(t) for t in _Lanes.tables(own)]
    got = jax.jit(partial(_Lanes.codes, own=own))(tables, some)
    np.testing.assert_array_equal(np.asarray(got), np.searchsorted(own.midpoints, some, side="left"))
    codes = jnp.arange(256).reshape(2, 128)
    np.testing.assert_array_equal(_Lanes.values(tables, codes).reshape(-1), own.values)


def test_what_the_kernel_does_not_do_is_an_error():
    with pytest.raises(ValueError, match="choose from xla, pallas"):
        fused_adamw8bit(1e-3, kernel="triton")
    with pytest.raises(ValueError, match="rounds to nearest"):
        fused_adamw8bit(1e-3, kernel="pallas", stochastic_rounding=True)
