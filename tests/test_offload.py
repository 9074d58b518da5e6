"""Optimizer state and parameters in host memory between steps: where they are, and that no number changes."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from models import assert_close, flat, make_mesh

import ragged_jax as rj

TX = optax.adamw(1e-2, eps=1e-3)
DATA = np.random.default_rng(0).normal(size=(4, 12, 40)).astype(np.float32)


def params():
    rng = np.random.default_rng(1)
    return {"w": rng.normal(size=(40, 1000)).astype(np.float32), "b": np.ones(7, np.float32)}


def loss(p, x):
    return ((x @ p["w"]) ** 2).mean() + (p["b"] ** 2).sum()


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def run(tree, tx, on_host):
    """Donated steps; what each leaves, and how often the step was traced."""
    traces = 0

    @jax.jit(donate_argnums=(0, 1))
    def step(tree, state, x):
        nonlocal traces
        traces += 1
        tree = rj.to_memory(tree, "device")
        value, grads = rj.value_and_grad(loss)(tree, x)
        updates, state = tx.update(grads, state, tree)
        tree = optax.apply_updates(tree, updates)
        return rj.to_memory(tree, "pinned_host") if on_host else tree, state, value, grads

    state, losses, grads = tx.init(tree), [], None
    for x in DATA:
        before = (tree, state)
        shardings = [a.sharding for a in jax.tree.leaves(before)]
        tree, state, value, grads = step(tree, state, x)
        assert all(a.is_deleted() for a in jax.tree.leaves(before) if a.ndim)
        after = jax.tree.leaves((tree, state))
        assert all(a.sharding.is_equivalent_to(s, a.ndim) for a, s in zip(after, shardings, strict=True))
        losses.append(float(value))
    return tree, state, losses, grads, traces


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_from_and_to_host_memory(axis_type):
    mesh = make_mesh(3, axis_type)
    with jax.set_mesh(mesh):
        shard = lambda: rj.shard_tree(params(), mesh, axis="fsdp")
        plain, plain_state, losses, _, _ = run(shard(), TX, on_host=False)
        tree = rj.to_memory(shard(), "pinned_host")
        assert kinds(tree) == {"pinned_host"}
        assert_close(rj.full_params(tree), params(), rtol=0)
        tree, state, got, grads, traces = run(tree, rj.offload(TX), on_host=True)
    assert traces == 1
    assert kinds(tree) == kinds(state) == {"pinned_host"}
    assert kinds(plain) == kinds(plain_state) == kinds(grads) == {"device"}
    assert got == losses
    assert_close(rj.full_params(tree), rj.full_params(plain), rtol=0)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(plain_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_on_the_host_are_moved_before_they_are_gathered():
    mesh = make_mesh(3)
    with jax.set_mesh(mesh):
        there = rj.shard_tree(params(), mesh, axis="fsdp")
        here = rj.to_memory(there, "pinned_host")
        for grad_fn in (rj.value_and_grad(loss), jax.jit(rj.value_and_grad(loss))):
            (a, ga), (b, gb) = grad_fn(there, DATA[0]), grad_fn(here, DATA[0])
            assert a == b
            assert kinds(gb) == {"device"}
            assert_close(rj.full_params(gb), rj.full_params(ga), rtol=0)


def test_flax_modules_and_their_optimizers():
    mesh = make_mesh(3, AxisType.Auto)
    with jax.set_mesh(mesh):
        results = []
        for tx, kind in ((TX, "device"), (rj.offload(TX), "pinned_host")):
            model = rj.fully_shard(nnx.Linear(40, 1000, rngs=nnx.Rngs(0)), mesh, axis="fsdp")
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

            @nnx.jit
            def step(model, optimizer, x):
                value, grads = rj.value_and_grad(lambda m, x: (m(x) ** 2).mean())(model, x)
                optimizer.update(model, grads)
                return value

            losses = [float(step(model, optimizer, x)) for x in DATA]
            assert kinds(nnx.state(optimizer.opt_state)) == {kind}
            results.append((losses, flat(rj.full_params(model))))
    assert results[0][0] == results[1][0]
    assert_close(results[1][1], results[0][1], rtol=0)


def test_an_unknown_memory():
    with pytest.raises(ValueError, match="must be one of device, pinned_host, got 'disk'"):
        rj.to_memory({}, "disk")  # type: ignore[arg-type]
