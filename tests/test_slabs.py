"""Between slabs and tensors: tiles and uneven shares, against a slow and obvious reference."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from models import Block, OddModel, assert_close, batches, device_nbytes, flat, loss_fn, make_mesh

import ragged_jax as rj
from ragged_jax.fsdp._slabs import from_stored, slab_of, slab_shape, tensors_of, to_stored
from ragged_jax.layout import Bucket, Layout, Placement, Slab, TensorSpec, stored_order, tile

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")

sizes = st.integers(1, 9)
shapes = st.tuples(sizes, sizes) | st.tuples(st.integers(1, 3), sizes, sizes)


@given(shapes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_tiles_are_stored_in_the_documented_order(shape, height, width, lead):
    placement = Placement(TensorSpec("w", shape, block=tile(height, width)), 0, "tiled")
    outer = (2, 3)[:lead]
    tensor = np.arange(np.prod((*outer, *shape))).reshape(*outer, *shape)
    stored = to_stored(placement, tensor, lead)
    order = stored_order(placement.tensor, "tiled")
    np.testing.assert_array_equal(stored, tensor.reshape(*outer, -1)[..., order])
    np.testing.assert_array_equal(from_stored(placement, stored, lead), tensor)


@pytest.mark.parametrize(
    "block", [(8, 128), (16, 128), (32, 32), (16, 64), (8, 16), (4, 32), (6, 32), (32, 48), (8, 256)]
)
@pytest.mark.parametrize("shape", [(64, 512), (3, 70, 300)])
@pytest.mark.parametrize("lead", [0, 1])
def test_tiles_that_suit_a_tpu_are_stored_in_the_same_order(block, shape, lead):
    """Traced arrays take another way than numpy's, by the tile's size."""
    placement = Placement(TensorSpec("w", shape, block=tile(*block)), 0, "tiled")
    tensor = np.arange((2 if lead else 1) * np.prod(shape)).reshape(*(2,)[:lead], *shape)
    stored = jax.jit(lambda x: to_stored(placement, x, lead))(tensor)
    order = stored_order(placement.tensor, "tiled")
    np.testing.assert_array_equal(stored, tensor.reshape(*tensor.shape[:lead], -1)[..., order])
    np.testing.assert_array_equal(jax.jit(lambda x: from_stored(placement, x, lead))(stored), tensor)


@st.composite
def slabs(draw):
    shares = draw(st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    num_parts = sum(shares) if shares else draw(st.integers(1, 4))
    width = draw(st.sampled_from([1, 2, 3]))
    placements, end = [], 0
    for i in range(draw(st.integers(1, 4))):
        storage = draw(st.sampled_from(["row_major", "tiled"]))
        shape = (draw(sizes), width * draw(sizes)) if width > 1 or storage == "tiled" else (draw(st.integers(0, 9)),)
        end += width * draw(st.integers(0, 3))
        block = tile(2, 2) if storage == "tiled" else rj.elements(1)
        placements.append(Placement(TensorSpec(f"t{i}", shape, block=block), end, storage))
        end = placements[-1].stop
    rows = -(-end // (width * num_parts)) + draw(st.integers(0, 2))
    return Slab("s", "float32", rows, width, tuple(placements)), num_parts, shares


@given(slabs(), st.integers(0, 1))
def test_a_slab_holds_its_tensors_and_zeros(drawn, lead):
    slab, num_parts, shares = drawn
    outer = (2,)[:lead]
    rng = np.random.default_rng(0)
    tensors = {p.tensor.name: rng.normal(size=(*outer, *p.tensor.shape)).astype(np.float32) for p in slab.placements}
    num_shards = len(shares) if shares else num_parts
    whole = slab_of(slab, tensors, num_shards, shares, lead)
    largest = max(shares or (1,))
    assert whole.shape == (*outer, *slab_shape(slab, largest * num_shards))
    expected = np.zeros((*outer, num_shards, largest, slab.shard_numel), np.float32)
    parts = [(k, i) for k, share in enumerate(shares or (1,) * num_shards) for i in range(share)]
    for placement in slab.placements:
        flat = tensors[placement.tensor.name].reshape(*outer, -1)
        for i, source in enumerate(stored_order(placement.tensor, placement.storage)):
            part, offset = divmod(placement.offset + i, slab.shard_numel)
            expected[(..., *parts[part], offset)] = flat[..., source]
    np.testing.assert_array_equal(whole.reshape(-1), expected.reshape(-1))
    back = tensors_of(slab, whole, shares, lead)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)


@given(st.permutations(range(3)), st.integers(0, 1))
def test_transposed_tensors(order, lead):
    placement = Placement(TensorSpec("w", (4, 3, 2)), 0, axis_order=tuple(order))
    tensor = np.random.default_rng(0).normal(size=(*(2,)[:lead], 4, 3, 2))
    stored = to_stored(placement, tensor, lead)
    transposed = tensor.transpose(*range(lead), *(dim + lead for dim in order))
    np.testing.assert_array_equal(stored, transposed.reshape(stored.shape))
    np.testing.assert_array_equal(from_stored(placement, stored, lead), tensor)


@cache
def one_device(scan):
    """Parameters, loss and gradients."""
    whole = OddModel(rngs=nnx.Rngs(0), scan=scan)
    loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(whole, batches(1)[0])
    return flat(nnx.state(whole, nnx.Param)), loss, flat(grads)


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({"storage": "tiled"}, tile(8, 8)),
        ({"axis_order": "auto"}, rj.elements(1)),
        ({"shares": (3, 2, 1, 1)}, rj.rows(2)),
        ({"shares": (3, 2, 1, 1), "storage": "tiled"}, tile(4, 4)),
        ({"profile": "torch-nccl"}, rj.rows(3)),
    ],
)
@pytest.mark.parametrize("scan", [False, True])
def test_whatever_the_planner_chooses_trains_the_same(options, block, scan):
    """Every kind of plan, end to end: one step's gradient equals one device's."""
    kwargs = {"block": block, "units": Block, "stacked": Block if scan else None}
    plan = rj.plan(nnx.eval_shape(lambda: OddModel(rngs=nnx.Rngs(0), scan=scan)), 4, **kwargs, **options)
    model = rj.fully_shard(OddModel(rngs=nnx.Rngs(0), scan=scan), make_mesh(4), axis="fsdp", plan=plan, **kwargs)
    assert set(device_nbytes(nnx.state(model, nnx.Param)).values()) == {plan.layout.shard_nbytes}
    params, expected, wanted = one_device(scan)
    assert_close(flat(rj.full_params(model)), params, rtol=0)
    loss, grads = nnx.jit(rj.value_and_grad(loss_fn))(model, batches(1)[0])
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    assert_close(flat(rj.full_params(grads, like=model)), wanted)


@pytest.mark.parametrize("shares", [None, (2, 2, 1, 1)])
def test_training_with_tiles_and_uneven_shares(shares):
    """By hand, so that it does not depend on what the planner would choose."""
    num_parts = sum(shares) if shares else 4
    w = TensorSpec("w", (30, 40), "float32", tile(8, 8))
    b = TensorSpec("b", (40,), "float32")
    slab = Slab("tiles", "float32", 320, 1, (Placement(w, 0, "tiled"), Placement(b, 1200)))
    v = Slab("v", "float32", 12 // num_parts, 5, (Placement(TensorSpec("v", (12, 5), "float32"), 0),), sole=True)
    layout = Layout(4, (Bucket("", (slab, v)),), shares).check()
    rng = np.random.default_rng(0)
    params = {
        "w": rng.normal(size=(30, 40)).astype(np.float32),
        "b": np.ones(40, np.float32),
        "v": rng.normal(size=(12, 5)).astype(np.float32),
    }
    x = rng.normal(size=(8, 30)).astype(np.float32)
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", block={"w": tile(8, 8)}, plan=layout)
    assert rj.get_layout(tree) == layout
    held = device_nbytes(tree)
    assert set(held.values()) == {layout.shard_nbytes}
    for name, value in rj.full_params(tree).items():
        np.testing.assert_array_equal(value, params[name])
    for name, value in jax.jit(rj.full_params)(tree).items():
        np.testing.assert_array_equal(value, params[name])

    def loss(p, x):
        return (jnp.tanh(x @ p["w"] + p["b"])[:, :12] @ p["v"]).var()

    mean_loss = lambda p, x: jnp.mean(jnp.stack([loss(p, part) for part in jnp.split(x, 4)]))
    expected, wanted = jax.value_and_grad(mean_loss)(params, x)
    got, grads = jax.jit(rj.value_and_grad(loss))(tree, x)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    for name, value in rj.full_params(grads).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7)
    again = rj.shard_like(rj.full_params(grads), tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(a, b)
