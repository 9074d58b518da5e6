"""Whole tensors at their owners; masks, labels, factors and norms by tensor although tensors lie packed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from models import assert_close, make_mesh, make_sharded, poison_padding

import ragged_jax as rj
from ragged_jax import optim
from ragged_jax.preflight import hlo_report

SHAPES = {"a": (12, 20), "b": (20, 12), "bias": (12,), "layers": {"norm": (3, 8), "up": (3, 8, 10)}, "s": ()}
RNG = np.random.default_rng(0)


def normal():
    draw = lambda shape: jnp.asarray(RNG.normal(size=shape), jnp.float32)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


PARAMS, GRADS = normal(), normal()


def unstacked(tree):
    return {**tree, "layers": [jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(3)]}


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def shard(num_devices, tree=PARAMS):
    return rj.shard_tree(tree, make_mesh(num_devices), axis="fsdp", units="layers", stacked="layers")


def poisoned(tree):
    children = {name: poisoned(child) for name, child in tree.children.items()}
    return tree.replace(poison_padding(tree.unit, tree.slabs), children)


def shampoo_like(decay=0.9):
    """A small Shampoo: both sides of a matrix are whitened by the fourth root of their second moments."""

    def init(x):
        return tuple(jnp.zeros((n, n)) for n in x.shape)

    def root(m):
        values, vectors = jnp.linalg.eigh(m + 1e-4 * jnp.eye(len(m)))
        return (vectors * values**-0.25) @ vectors.T

    def update(g, state, params=None):
        if g.ndim != 2:
            return g, state
        left, right = (decay * m + (1 - decay) * gg for m, gg in zip(state, (g @ g.T, g.T @ g), strict=True))
        return root(left) @ g @ root(right), (left, right)

    return optax.GradientTransformation(init, update)


def each(tx):
    """The transform on every leaf alone, unsharded."""

    def init(params):
        return [tx.init(x) for x in jax.tree.leaves(params)]

    def update(updates, state, params):
        flat, treedef = jax.tree.flatten(updates)
        done = [tx.update(*x) for x in zip(flat, state, jax.tree.leaves(params), strict=True)]
        return jax.tree.unflatten(treedef, [u for u, _ in done]), [s for _, s in done]

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "tx",
    [optax.scale_by_trust_ratio(), optax.scale_by_factored_rms(min_dim_size_to_factor=8), shampoo_like()],
    ids=["trust_ratio", "adafactor", "shampoo"],
)
def test_transforms_of_whole_tensors(tx):
    alone, params, grads = each(tx), unstacked(PARAMS), unstacked(GRADS)
    state = alone.init(params)
    for _ in range(2):
        want, state = alone.update(grads, state, params)
    with jax.set_mesh(make_mesh(3)):
        tree, sharded = shard(3), optim.with_tensors(tx)
        state, update = sharded.init(tree), jax.jit(sharded.update)
        gradient = poisoned(rj.shard_like(GRADS, tree))
        for _ in range(2):
            got, state = update(gradient, state, tree)
    assert_close(flat(unstacked(rj.full_params(got))), flat(want), rtol=1e-4)
    assert all(x.sharding.spec[0] == "fsdp" for x in jax.tree.leaves(state.owned))
    assert update._cache_size() == 1


def test_norms():
    want = float(optax.tree.norm(GRADS))
    tree = poisoned(rj.shard_like(GRADS, shard(3)))
    np.testing.assert_allclose(optim.global_norm(GRADS), want, rtol=1e-6)
    compiled = jax.jit(optim.global_norm).lower(tree).compile()
    np.testing.assert_allclose(compiled(tree), want, rtol=1e-6)
    assert hlo_report(compiled).num_executed == 1
    norms = optim.tensor_norms(tree)
    for name, x in {"a": GRADS["a"], "layers/up": GRADS["layers"]["up"], "s": GRADS["s"]}.items():
        np.testing.assert_allclose(norms[name], np.linalg.norm(x), rtol=1e-6)
    specs = jax.tree.map(lambda x: x.sharding.spec, tree)
    inside = jax.shard_map(
        optim.global_norm, mesh=make_mesh(3), in_specs=(specs,), out_specs=jax.sharding.PartitionSpec()
    )
    np.testing.assert_allclose(jax.jit(inside)(tree), want, rtol=1e-6)
    clip, theirs = optim.clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)
    got, _ = clip.update(tree, clip.init(tree))
    assert_close(flat(rj.full_params(got)), flat(theirs.update(GRADS, theirs.init(GRADS))[0]), rtol=1e-6)


def test_decay_and_factors_by_tensor_do_not_depend_on_the_number_of_devices():
    is_matrix = lambda path, shape: len(shape) > 1 and "norm" not in path
    tx = optax.chain(
        optax.scale(2.0),
        optim.add_decayed_weights(0.1, mask=is_matrix),
        optim.scale_by_path({"layers/*": 0.5, "b": 3.0}),
    )
    want, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(want["b"], 3 * (2 * GRADS["b"] + 0.1 * PARAMS["b"]), rtol=1e-6)
    np.testing.assert_allclose(want["layers"]["norm"], GRADS["layers"]["norm"], rtol=1e-6)
    # optax goes by the arrays it sees: a bias in a packed slab is decayed or not as its neighbours are
    plain, results = optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), []
    for num_devices in (1, 3):
        tree = shard(num_devices)
        grads = rj.shard_like(GRADS, tree)
        got, _ = jax.jit(tx.update)(grads, tx.init(tree), tree)
        assert_close(flat(rj.full_params(got)), flat(want), rtol=1e-6)
        results.append(rj.full_params(plain.update(grads, plain.init(tree), tree)[0]))
    whole, _ = plain.update(GRADS, plain.init(PARAMS), PARAMS)
    assert any(not np.allclose(a, b) for r in results for a, b in zip(*map(jax.tree.leaves, (r, whole)), strict=True))


def test_masks_and_labels_for_optax_refuse_mixed_slabs():
    tree = shard(3)
    rule = {"*bias*": "vectors", "*": "matrices"}
    with pytest.raises(ValueError, match=r"slabs/float32x1: .*'vectors' for bias(.|\n)*label="):
        optim.labels(rule)(tree)
    with pytest.raises(ValueError, match="treated differently"):
        optax.adamw(1e-3, mask=optim.mask("*bias*")).init(tree)
    with pytest.raises(ValueError, match="has no label"):
        optim.partition({"x": optax.sgd(1.0)}, {"a": "x"}).init(tree)
    with pytest.raises(ValueError, match="without a transform"):
        optim.partition({"x": optax.sgd(1.0)}, {"*": "y"}).init(tree)
    # by tensor it is right all the same
    tx = optim.partition({"vectors": optax.sgd(1.0), "matrices": optax.adam(0.1)}, rule)
    got, _ = tx.update(rj.shard_like(GRADS, tree), tx.init(tree), tree)
    full = rj.full_params(got)
    np.testing.assert_allclose(full["bias"], -GRADS["bias"], rtol=1e-6)
    np.testing.assert_allclose(full["a"], -0.1 * np.sign(GRADS["a"]), rtol=1e-3)


def test_masks_of_a_flax_module_are_remembered():
    model = make_sharded(2)
    rule = lambda path, shape: path.startswith("blocks")
    optimizer = nnx.Optimizer(model, optax.masked(optax.scale(0.0), optim.mask(rule)), wrt=nnx.Param)
    before = rj.full_params(model)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    after = rj.full_params(model)
    assert (before["blocks"][0]["up"]["kernel"][...] == after["blocks"][0]["up"]["kernel"][...]).all()
    assert (before["temperature"][...] != after["temperature"][...]).all()
    known = optim.mask(rule, like=nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match="was seen before"):
        known({"other": jnp.ones(3)})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_by_tensor_where_other_axes_split_a_packed_slab(axis_type):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    params = {"up": jnp.ones((4, 8)), "ub": jnp.ones(8)}
    tree = rj.shard_tree(params, mesh, axis="fsdp", specs={"up": P(None, "tp"), "ub": P("tp")})
    zeros = jax.tree.map(jnp.zeros_like, tree)
    for tx, grads, want in (
        (optim.scale_by_path({"up": 0.5, "ub": 2.0}), tree, {"up": 0.5, "ub": 2.0}),
        (optim.add_decayed_weights(0.1, "up"), zeros, {"up": 0.1, "ub": 0.0}),
        (optim.partition({"a": optax.scale(3.0), "b": optax.scale(4.0)}, {"up": "a", "ub": "b"}), tree,
         {"up": 3.0, "ub": 4.0}),
    ):  # fmt: skip
        full = rj.full_params(tx.update(grads, tx.init(tree), tree)[0])
        for name, value in want.items():
            np.testing.assert_allclose(full[name], value, rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(optim.global_norm(tree), np.sqrt(32 + 8), rtol=1e-6)  # each element once
    with pytest.raises(NotImplementedError, match="split over other mesh axes: up, ub"):
        optim.with_tensors(optax.trace(0.9)).init(tree)


def test_state_of_other_owners_is_not_taken_for_this(tmp_path):
    params = {f"w{i}": jnp.full((8, 12), float(i)) for i in range(4)}
    tx = optim.with_tensors(optax.trace(0.9))
    states = {}
    for n in (1, 2, 4):
        tree = rj.shard_tree(params, make_mesh(n), axis="fsdp")
        states[n] = {"params": tree, "opt": tx.update(tree, tx.init(tree), tree)[1]}
    directory = rj.Checkpointer(tmp_path, background=False)
    directory.save(1, states[2])
    again = directory.restore(states[2])["opt"]
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(states[2]["opt"]), strict=True):
        np.testing.assert_array_equal(got, want)
    for n in (1, 4):
        with pytest.raises(rj.CheckpointError, match="not of this state"):
            directory.restore(states[n])


def test_slabs_of_more_rows_than_int32_counts():
    """Where elements may be cut anywhere and nothing divides, a row is one element: a layer of experts has 10^10."""
    large = {name: jax.ShapeDtypeStruct((2**16, size), "bfloat16") for name, size in (("w", 23459), ("v", 10002))}
    tree = rj.shard_tree(large, make_mesh(7), axis="fsdp")
    (slab,) = jax.tree.leaves(tree)
    assert (slab.ndim, slab.size > 2**31) == (1, True)
    for tx in (
        optim.clip_by_global_norm(1.0),
        optim.add_decayed_weights(0.1, "w"),
        optim.partition({"a": optax.scale(3.0), "b": optax.scale(4.0)}, {"w": "a", "v": "b"}),
    ):
        state = jax.eval_shape(tx.init, tree)
        assert jax.tree.leaves(jax.eval_shape(tx.update, tree, state, tree)[0])[0].shape == slab.shape


def test_by_tensor_inside_of_shard_map():
    params = {"w": PARAMS["a"][:5, :7], "v": PARAMS["bias"][:4], "x": PARAMS["bias"]}
    tree = rj.shard_tree(params, make_mesh(3), axis="fsdp")
    specs = jax.tree.map(lambda x: x.sharding.spec, tree)
    for tx in (
        optim.clip_by_global_norm(0.1),
        optim.add_decayed_weights(0.5, "w"),
        optim.partition({"a": optax.scale(3.0), "b": optax.scale(4.0)}, {"w": "a", "*": "b"}),
    ):
        step = lambda x, tx=tx: tx.update(x, tx.init(x), x)[0]
        inside = jax.shard_map(step, mesh=make_mesh(3), in_specs=(specs,), out_specs=specs)
        got, want = (rj.full_params(jax.jit(f)(poisoned(tree))) for f in (inside, step))
        assert flat(got).keys() == flat(want).keys()
        for name, value in flat(want).items():
            np.testing.assert_allclose(flat(got)[name], value, rtol=1e-6, err_msg=name)
