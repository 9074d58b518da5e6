"""Contract 1: any number of devices gives one device's losses and parameters, and padding is invisible."""

from functools import cache

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from models import (
    OddModel,
    assert_close,
    batches,
    flat,
    loss_fn,
    make_mesh,
    make_sharded,
    poison_padding,
    train_sharded,
    train_whole,
)

import ragged_jax as rj
from ragged_jax.adapters._nnx import _units

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
STEPS = 20
BLOCKS = {"rows1": rj.rows(1), "rows32": rj.rows(32), "tile": rj.tile(32, 32), "whole": rj.whole()}


@cache
def reference(scan: bool, size: int):
    model = OddModel(rngs=nnx.Rngs(0), scan=scan)
    losses = train_whole(model, data=batches(STEPS, size))
    return losses, flat(nnx.state(model, nnx.Param))


def check(model, scan: bool = False):
    size = 840 if rj.get_layout(model).num_shards == 5 else 168  # the batch, which each number of devices divides
    losses, params = reference(scan, size)
    np.testing.assert_allclose(train_sharded(model, data=batches(STEPS, size)), losses, rtol=2e-5)
    assert losses[-1] < losses[0] - 0.1
    assert_close(flat(rj.full_params(model)), params)
    assert model.num_calls[...] == STEPS


FEW = [(3, "whole"), (6, "tile"), (8, "rows32")]  # the contract suite has other numbers
GRID = [(n, block) for n in (1, 2, 3, 5, 6, 7, 8) for block in BLOCKS]


@pytest.mark.parametrize(
    ("num_devices", "block"),
    [pytest.param(*case, marks=[] if case in FEW else [pytest.mark.deep]) for case in GRID],
)
def test_layers_in_a_list(num_devices, block):
    check(make_sharded(num_devices, BLOCKS[block]))


@pytest.mark.parametrize(
    ("num_devices", "block"),
    [(3, "rows32"), *(pytest.param(*case, marks=pytest.mark.deep) for case in ((7, "tile"), (8, "whole")))],
)
def test_layers_stacked_for_a_scan(num_devices, block):
    check(make_sharded(num_devices, BLOCKS[block], scan=True), scan=True)


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.deep), True])
def test_auto_axes(scan):
    check(make_sharded(6, rj.rows(1), scan=scan, axis_type=AxisType.Auto), scan=scan)


@pytest.mark.parametrize(
    "kwargs", [{"reshard_after_forward": False}, {"policy": jax.checkpoint_policies.nothing_saveable}]
)
def test_what_is_kept_for_backward_changes_no_number(kwargs):
    check(make_sharded(3, rj.rows(1), **kwargs))


def test_without_units_everything_is_gathered_at_once():
    model = rj.fully_shard(OddModel(rngs=nnx.Rngs(0)), make_mesh(3), axis="fsdp")
    check(model)


def test_replicas_of_shards():
    mesh = jax.make_mesh((2, 3), ("replica", "fsdp"), devices=jax.devices()[:6])
    model = OddModel(rngs=nnx.Rngs(0))
    check(rj.fully_shard(model, mesh, axis=("replica", "fsdp"), units=type(model.blocks[0]), block=rj.rows(1)))


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.deep), True])
def test_poisoned_padding_changes_nothing(scan):
    clean, dirty = make_sharded(7, rj.rows(32), scan), make_sharded(7, rj.rows(32), scan)
    for _, module, info in _units(dirty):
        slabs = poison_padding(info.unit, info.slabs(module))
        assert any(np.isnan(x).any() for x in slabs.values())
        info.put_slabs(module, slabs)
    data = batches(3)
    assert train_sharded(dirty, data=data) == train_sharded(clean, data=data)
    clean, dirty = flat(rj.full_params(clean)), flat(rj.full_params(dirty))
    assert all((dirty[name] == value).all() for name, value in clean.items())


def tree_loss(params, tokens, wrap=lambda layer: layer):
    def layer(w, x):
        return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"] + w["shift"].sum()

    x = params["embedding"][tokens[:, :-1]]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = wrap(layer)(w, x)
    else:
        x, _ = jax.lax.scan(lambda x, w: (wrap(layer)(w, x), None), x, params["layers"])
    logits = (x * params["scale"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def tree_params(scan: bool):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.normal(size=shape) / 7).astype(np.float32)

    layers = [
        {"up": normal(48, 100), "down": normal(100, 48), "bias": normal(100), "shift": normal(5)} for _ in range(2)
    ]
    if scan:
        layers = jax.tree.map(lambda *xs: np.stack(xs), *layers)
    return {
        "embedding": normal(1601, 48),
        "layers": layers,
        "scale": np.float32(2),
        "nothing": np.zeros((0, 3), np.float32),
    }


@pytest.mark.parametrize(
    ("num_devices", "scan", "units"),
    [
        (5, False, "layers/*"),
        (8, True, "layers"),
        pytest.param(6, False, None, marks=pytest.mark.deep),
        pytest.param(7, True, None, marks=pytest.mark.deep),
    ],
)
def test_plain_pytrees(num_devices, scan, units):
    params, tx = tree_params(scan), optax.adamw(3e-3, eps=1e-4)
    tree = rj.shard_tree(
        params,
        make_mesh(num_devices),
        axis="fsdp",
        block=rj.rows(1),
        units=units,
        stacked=units if scan and units else None,
    )
    loss = (lambda p, t: tree_loss(p, t, rj.unsharded)) if units else tree_loss

    def run(params, grad_fn):
        @jax.jit
        def step(params, state, tokens):
            loss, grads = grad_fn(params, tokens)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        losses, state = [], tx.init(params)
        for tokens in batches(STEPS):
            params, state, value = step(params, state, tokens)
            losses.append(float(value))
        return losses, params

    losses, expected = run(params, jax.value_and_grad(tree_loss))
    got, tree = run(tree, rj.value_and_grad(loss))
    np.testing.assert_allclose(got, losses, rtol=2e-5)
    named = [dict(jax.tree_util.tree_leaves_with_path(x)) for x in (rj.full_params(tree), expected)]
    assert_close(*({jax.tree_util.keystr(k): np.asarray(v) for k, v in x.items()} for x in named))


def test_gradients_equal_one_device_and_shard_like_agrees():
    model, whole = make_sharded(5, rj.rows(1)), OddModel(rngs=nnx.Rngs(0))
    tokens = batches(1)[0]
    loss, grads = nnx.jit(rj.value_and_grad(loss_fn))(model, tokens)
    expected_loss, expected = nnx.jit(nnx.value_and_grad(loss_fn))(whole, tokens)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    assert_close(flat(rj.full_params(grads, like=model)), flat(expected))
    sharded = rj.shard_like(expected, model)
    assert jax.tree.structure(sharded) == jax.tree.structure(grads)
    assert_close(flat(sharded), flat(grads))
