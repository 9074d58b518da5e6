"""8-bit Adam: the same bits for every number of devices, for the unsharded arrays, and in numpy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from models import make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.optim import scale_by_adam8bit
from ragged_jax.optim._reference import Adam8bit

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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("block", [rj.elements(256), rj.rows(1), rj.tile(32, 32)], ids=repr)
def test_an_unsharded_array_has_the_bits_of_numpy(block, nesterov):
    for got, want in zip(unsharded(block, nesterov), expected(block, nesterov), strict=True):
        assert_bits(got, want)


@pytest.mark.parametrize("block", [rj.elements(256), rj.rows(1), rj.tile(32, 32)], ids=repr)
@pytest.mark.parametrize("num_devices", [1, 3, 8])
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
