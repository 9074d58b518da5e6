"""Contract 2: bytes per device are what the plan says, and nothing is silently replicated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from models import Block, OddModel, batches, device_nbytes, loss_fn, make_mesh, make_sharded

import ragged_jax as rj

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")


def assert_sharded(tree, num_devices: int):
    """No array of the tree is replicated: each device holds one N-th of each."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.ndim:
            assert leaf.addressable_shards[0].data.size * num_devices == leaf.size, (path, leaf.sharding)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("block", [rj.rows(1), rj.tile(32, 32)], ids=repr)
@pytest.mark.parametrize("num_devices", [1, 3, 7, 8])
def test_parameters(num_devices, block, scan):
    plan = rj.plan(
        nnx.eval_shape(lambda: OddModel(rngs=nnx.Rngs(0), scan=scan)),
        num_devices,
        block=block,
        units=Block,
        stacked=Block if scan else None,
    )
    model = make_sharded(num_devices, block, scan)
    assert rj.get_layout(model) == plan.layout
    params = nnx.state(model, nnx.Param)
    assert device_nbytes(params) == {d.id: plan.layout.shard_nbytes for d in jax.devices()[:num_devices]}
    assert_sharded(params, num_devices)
    assert plan.layout.payload_nbytes == sum(x.nbytes for x in jax.tree.leaves(rj.full_params(model)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("under_jit", [False, True])
def test_optimizer_state_is_born_sharded_and_stays_so(axis_type, under_jit):
    model = make_sharded(7, rj.rows(1), axis_type=axis_type)
    make = lambda model: nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    optimizer = nnx.jit(make)(model) if under_jit else make(model)
    layout = rj.get_layout(model)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, grads = rj.value_and_grad(loss_fn)(model, tokens)
        optimizer.update(model, grads)
        return loss, grads

    for _ in range(2):
        moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
        assert_sharded(moments, 7)
        assert set(device_nbytes(moments).values()) == {2 * layout.shard_nbytes}
        assert_sharded(nnx.state(model, nnx.Param), 7)
        _, grads = step(model, optimizer, batches(1)[0])
        assert_sharded(grads, 7)


def test_optimizer_state_of_a_pytree_is_born_sharded():
    params = {"w": np.ones((100, 64), np.float32), "b": np.zeros(5, np.float32)}
    tree = rj.shard_tree(params, make_mesh(7), axis="fsdp")
    with jax.set_mesh(make_mesh(7)):
        for init in (optax.adam(1e-3).init, jax.jit(optax.adam(1e-3).init)):
            assert_sharded([x for x in jax.tree.leaves(init(tree)) if x.ndim], 7)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_step_keeps_every_sharding_and_compiles_once(axis_type):
    """Under `jax.set_mesh` the optimizer's counters are born on the mesh, so that the first step fits the second."""
    with jax.set_mesh(make_mesh(6, axis_type)):
        model = make_sharded(6, rj.rows(1), axis_type=axis_type)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        traces = 0

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, tokens):
            nonlocal traces
            traces += 1
            loss, grads = rj.value_and_grad(loss_fn)(model, tokens)
            optimizer.update(model, grads)
            return loss

        def arrays():
            return jax.tree.leaves(nnx.state((model, optimizer)))

        types, shardings, old = [jax.typeof(x) for x in arrays()], [x.sharding for x in arrays()], arrays()
        for tokens in batches(3):
            step(model, optimizer, tokens)
        assert [jax.typeof(x) for x in arrays()] == types
        assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(arrays(), shardings, strict=True))
        assert traces == 1
        assert all(x.is_deleted() for x in old if x.ndim)


def test_no_device_holds_more_than_its_share_while_sharding():
    """The parts that are sent are slices: no device array of a whole packed slab is ever made."""
    params = {"w": np.random.default_rng(0).normal(size=(1000, 64)).astype(np.float32)}
    before = {id(x) for x in jax.live_arrays()}
    tree = rj.shard_tree(params, make_mesh(7), axis="fsdp", block=rj.rows(1))
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(x.nbytes for x in new) == rj.get_layout(tree).shard_nbytes * 7
    full = rj.full_params(tree)
    assert isinstance(full["w"], np.ndarray)
    np.testing.assert_array_equal(full["w"], params["w"])
    on_one_device = [x for x in jax.live_arrays() if id(x) not in before and len(x.devices()) == 1]
    assert max((x.nbytes for x in on_one_device), default=0) <= rj.get_layout(tree).shard_nbytes


def test_sole_tensors_keep_name_and_shape():
    params = {"w": jnp.ones((16384, 256)), "v": jnp.ones((1021, 256))}
    tree = rj.shard_tree(params, make_mesh(8), axis="fsdp", block=rj.rows(32))
    assert tree.slabs["w"].shape == (16384, 256)
    assert isinstance(tree.slabs["w"].sharding, NamedSharding)
    assert "v" not in tree.slabs

    class Wide(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(1024, 4096, rngs=nnx.Rngs(0))

    model = rj.fully_shard(Wide(), make_mesh(8), axis="fsdp", block=rj.rows(32))
    assert model.up.kernel.shape == (1024, 4096)
    assert model.up.kernel.get_value().addressable_shards[0].data.shape == (128, 4096)
    assert ("up", "kernel") in dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
