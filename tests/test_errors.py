"""Contract 7: errors name every bad leaf by its path, the sizes and the remedy."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from models import Block, OddModel, make_mesh, make_sharded

import ragged_jax as rj

PARAMS = {"w": np.ones((6, 3), np.float32), "layers": [{"k": np.ones((4, 4), np.float32)}] * 2}
MESH = None


def tree(**kwargs):
    return rj.shard_tree(kwargs.pop("params", PARAMS), make_mesh(4), **{"axis": "fsdp", **kwargs})


def model(**kwargs):
    return rj.fully_shard(OddModel(rngs=nnx.Rngs(0)), make_mesh(4), **{"axis": "fsdp", **kwargs})


@pytest.mark.parametrize("shard", [tree, model])
@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"axis": "data"}, r"axis \['data'\] is not an axis of the mesh, which has \{'fsdp': 4\}"),
        ({"axis": ()}, "is not an axis of the mesh"),
        ({"axis": ("fsdp", "fsdp")}, "names a mesh axis twice"),
    ],
)
def test_axes(shard, kwargs, match):
    with pytest.raises(ValueError, match=match):
        shard(**kwargs)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: model(units=nnx.Conv), "matches no submodule; the model has Block, Embed"),
        (lambda: model(units=lambda path, module: False), "matches no submodule"),
        (
            lambda: model(units=Block, stacked=nnx.Linear),
            r"matches no unit; the units are \['blocks/0', 'blocks/1'\]",
        ),
        (lambda: model(units=Block, stacked=Block), r"unit 'blocks/0' is marked as stacked, but its leading dims"),
        (lambda: tree(units="blocks/*"), r"units='blocks/\*' matches no subtree; the leaves are layers/0/k"),
        (lambda: tree(units="layers/*", stacked="w"), "stacked='w' matches no unit; the units are layers/0"),
        (lambda: tree(block={"w": 32}), "is 32, not a Block"),
        (lambda: rj.fully_shard(make_sharded(4), make_mesh(4), axis="fsdp"), r"fully sharded already, at .*root"),
        (lambda: tree(params=tree()), "the tree is sharded already"),
        (lambda: tree(plan=rj.plan(PARAMS, 8)), "for 8 shards, the mesh has 4"),
        (lambda: tree(plan="layout.json"), "plan='layout.json' is neither a plan nor a layout"),
        (
            lambda: tree(plan=rj.plan({**PARAMS, "w": np.ones((5, 3))}, 4)),
            r"w: planned .*\(5, 3\).*model has .*\(6, 3\)",
        ),
        (
            lambda: tree(plan=rj.plan(PARAMS, 4), block=rj.rows(2)),
            r"w: planned .*elements\(1\).*model has .*rows\(2\)",
        ),
        (lambda: rj.full_params({"w": 1}), "dict is not sharded by this library"),
        (lambda: rj.full_params(nnx.state(make_sharded(4))), "give the model"),
        (lambda: rj.value_and_grad(lambda m, x: 0.0)({}, np.ones(4)), "not sharded models: 0: dict"),
        (lambda: rj.value_and_grad(lambda m, x: 0.0, argnums=2)(tree(), np.ones(4)), "argnums=2, but the function"),
        (lambda: rj.value_and_grad(lambda m, x: x)(tree(), np.ones(4)), r"must be a scalar, got shape \(1,\)"),
        (
            lambda: make_sharded(4)(np.ones((4, 4), int)),
            "OddModel.__call__ was called on a fully sharded module outside",
        ),
    ],
)
def test_requests_that_make_no_sense(call, match):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
        call()


def test_leaves_that_are_not_arrays_are_named_together():
    params = {"a": 1.5, "b": np.ones(3), "c": [jax.random.key(0), "text"]}
    with pytest.raises(TypeError) as error:
        tree(params=params)
    for part in ("a: float 1.5", "c/0: ", "of dtype key<fry>", "c/1: str 'text'", "Keep them out of the tree"):
        assert part in str(error.value)
    assert "b:" not in str(error.value)


def test_batches_that_do_not_divide_are_named_together():
    batch = {"tokens": np.ones((6, 5)), "mask": np.ones(8), "weights": np.ones((7,))}
    with pytest.raises(ValueError, match="split over 4 devices") as error:
        rj.value_and_grad(lambda p, batch, scale: 0.0)(tree(), batch, scale=np.ones(3))
    text = str(error.value)
    assert "argument [1]['tokens']: shape (6, 5)" in text
    assert "argument [1]['weights']: shape (7,)" in text
    assert "keyword argument ['scale']: shape (3,)" in text
    assert "mask" not in text
    assert "rj.replicated" in text
    assert "random key" not in text
    with pytest.raises(ValueError, match=r"\['dropout'\]: shape \(2,\), a random key without[^$]*wrap_key_data"):
        rj.value_and_grad(lambda p, rngs: 0.0)(tree(), {"dropout": jax.random.PRNGKey(0)})


@pytest.mark.parametrize(
    "draw", [jax.random.uniform, lambda key: linen.Dropout(0.5, False).apply({}, jnp.ones(3), rngs={"dropout": key})]
)
def test_a_key_without_a_type_that_divides(draw):
    """Two numbers for two devices: jax or Flax says that half a key is none, and the note why it was halved."""
    sharded = rj.shard_tree({"w": np.ones(4, np.float32)}, make_mesh(2), axis="fsdp")
    with pytest.raises(Exception, match=r"(?is)prng.*argument \[1\]\['a'\] was split, as a batch.*wrap_key_data"):
        rj.apply(lambda p, rngs: draw(rngs["a"]))(sharded, {"a": jax.random.PRNGKey(0)})


def test_blocks_larger_than_their_tensor():
    params = {"a": np.ones((8, 4), np.float32), "b": np.ones((64, 4), np.float32), "c": np.ones(3, np.float32)}
    with pytest.warns(UserWarning, match=r"a: shape \(8, 4\), block rows\(32\)") as caught:
        sharded = tree(params=params, block=rj.rows(32))
    assert "as large as the tensor allows" in str(caught[0].message)
    assert "b:" not in str(caught[0].message)
    dense = rj.fully_shard(linen.Dense(4), make_mesh(4), axis="fsdp", block=rj.rows(32))
    with pytest.warns(UserWarning, match="kernel") as of_nnx:
        rj.fully_shard(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), make_mesh(4), axis="fsdp", block=rj.rows(32))
    with pytest.warns(UserWarning, match="kernel") as of_linen:
        dense.init(jax.random.key(0), np.ones((1, 8), np.float32))
    files = [warning.filename for warning in (*caught, *of_nnx, *of_linen)]
    assert files == [__file__] * 3  # and not lines of the library
    assert {stop - start for start, stop in rj.get_layout(sharded).ranges("a")} == {0, 32}


def test_a_stack_used_as_a_layer():
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *PARAMS["layers"])
    sharded = tree(params={"layers": stacked}, units="layers", stacked="layers")
    layer = rj.unsharded(lambda w, x: x @ w["k"])
    with pytest.raises(ValueError, match="unit 'layers' does not have the shards of one layer"):
        rj.apply(lambda p, x: layer(p["layers"], x))(sharded, np.ones((4, 4), np.float32))
    teacher = make_sharded(4)
    with pytest.raises(ValueError, match="A model is an argument of the function given to"):
        rj.apply(lambda p, x: teacher.blocks[0](x))(sharded, np.ones((4, 5, 48), np.float32))


def test_a_packed_tensor_says_where_it_is():
    sharded = make_sharded(7)
    shift = sharded.blocks[0].shift
    for read in (lambda: shift[...], lambda: jnp.sum(shift)):
        with pytest.raises(RuntimeError, match="blocks/0/shift is sharded, in slab"):
            read()


def test_a_filter_that_tears_a_packed_slab_apart():
    sharded = make_sharded(7)
    biases = nnx.DiffState(0, lambda path, leaf: path[-1] == "bias")
    with pytest.raises(ValueError, match=r"cannot choose a part of a packed slab") as error:
        rj.value_and_grad(lambda m, x: 0.0, argnums=biases)(sharded, np.ones(7))
    assert "blocks/0/down/bias" in str(error.value)
    assert "fully_shard(..., label=...)" in str(error.value)


def test_patterns_that_match_nothing():
    params = {"layer": {"kernel": np.ones((8, 8), np.float32)}}
    low = rj.MixedPrecision("bfloat16")
    for option, match in (
        ({"block": {"*kernel": rj.rows(1), "*kernle": rj.rows(2)}}, r"block: the patterns '\*kernle' match nothing"),
        ({"precision": {"": low, "layers": low}}, "precision: the patterns 'layers' match nothing"),
    ):
        with pytest.raises(ValueError, match=match):
            rj.shard_tree(params, make_mesh(4), axis="fsdp", units="layer", **option)
        with pytest.raises(ValueError, match=match):
            rj.fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), make_mesh(4), axis="fsdp", **option)
    with pytest.raises(ValueError, match=r"'\*/kernle' match nothing; the names are 'layer/kernel'"):
        rj.plan(params, 4, block={"*/kernle": rj.rows(2)})


def test_a_filter_that_chooses_nothing():
    sharded = rj.fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), make_mesh(4), axis="fsdp", label={"bias": "vectors"})
    typo = nnx.DiffState(0, rj.labelled("vector"))
    with pytest.raises(ValueError, match=r"argument 0: its filter .* chooses no parameter. Labels: 'vectors'"):
        rj.value_and_grad(lambda m, x: m(x).mean(), argnums=typo)(sharded, np.ones((4, 8), np.float32))
    sharded = model(units=Block, label={"blocks/*/up/*": "up"})
    with pytest.raises(ValueError, match=r"Labels: 'up'$"):  # labels inside units count, too
        rj.value_and_grad(lambda m, x: 0.0, argnums=typo)(sharded, np.ones(4))


def test_shapes_without_values(tmp_path):
    shapes = rj.fully_shard(nnx.eval_shape(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))), make_mesh(4), axis="fsdp")
    for use in (
        rj.value_and_grad(lambda m, x: m(x).mean()),
        lambda m, x: rj.full_params(m),
        lambda m, x: rj.get(m, "kernel"),
        lambda m, x: rj.norms(m),
        lambda m, x: rj.redistribute(m, m),
        lambda m, x: rj.Checkpointer(tmp_path).save(0, {"model": m}),
    ):
        with pytest.raises(ValueError, match="this model has shapes and no values yet"):
            use(shapes, np.ones((4, 8), np.float32))


def test_what_is_no_precision_and_what_is_not_sharded():
    with pytest.raises(TypeError, match="precision='bfloat16' is neither a MixedPrecision"):
        tree(precision="bfloat16")
    with pytest.raises(TypeError, match="Linear is not sharded"):
        rj.describe(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="Dense is a Linen module and holds no parameters"):
        rj.describe(rj.fully_shard(linen.Dense(2), make_mesh(4), axis="fsdp"))


def test_a_sharded_module_can_be_printed():
    text = str(rj.fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), make_mesh(4), axis="fsdp"))
    assert "bias=PackedTensor(" in text
    assert "slab='float32x1'" in text


def test_what_is_sharded_is_copied_but_not_pickled():
    weights = {"layers": {"0": {"up": {"w": np.ones(4)}}}}
    tree = rj.shard_tree(weights, make_mesh(2), axis="fsdp", units="layers/*")
    assert list(tree.children["layers/0"].children) == []  # a pattern chooses nothing below what it chose
    copied = copy.deepcopy(tree)
    assert jax.tree.structure(copied) == jax.tree.structure(tree)
    with pytest.raises(TypeError, match=r"ShardedTree is sharded .* `rj\.Checkpointer`"):
        pickle.dumps(tree)


def test_units_and_specs_that_cannot_be():
    weights, mesh = {"layers": {"w": np.ones((2, 4))}}, make_mesh(2)
    with pytest.raises(ValueError, match=r"there are none; give `units=`, too"):
        rj.shard_tree(weights, mesh, axis="fsdp", stacked="layers")
    with pytest.raises(ValueError, match=r"stacked='nope' matches no unit; the units are layers"):
        rj.shard_tree(weights, mesh, axis="fsdp", units="layers", stacked="nope")
    with pytest.raises(ValueError, match=r"layers/w: .*'fsdp'.* names fsdp, which shards all tensors anyway"):
        rj.shard_tree(weights, mesh, axis="fsdp", specs={"*/w": jax.P("fsdp")})
