"""Flax Linen: what composes with units that gather by interception."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_models import QUICK
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType
from linen_models import Layer, LinenBlock, LinenModel
from models import VOCAB, assert_close, device_nbytes, make_mesh

import ragged_jax as rj

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
KEY = jax.random.key(0)
TOKENS = np.random.default_rng(2).integers(0, VOCAB, (12, 6))


def named(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def language_loss(model: nn.Module):
    def loss(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


@cache
def reference(model: nn.Module):
    params = jax.jit(model.init)(KEY, TOKENS)["params"]
    loss, grads = QUICK(jax.value_and_grad(language_loss(model)))(params, TOKENS)
    return named(params), float(loss), named(grads)


@pytest.mark.parametrize(
    ("model", "units", "axis_type"),
    [
        (LinenModel(remat=True), LinenBlock, AxisType.Explicit),
        (LinenModel(scan=True, remat=True), (LinenBlock, nn.Embed), AxisType.Auto),
        (LinenModel(), (Layer, LinenBlock, "embed"), AxisType.Explicit),  # nested; the outer has nothing of its own
        (LinenModel(scan=True), lambda path, module: path == "blocks", AxisType.Explicit),
    ],
    ids=["remat", "scan-remat-embed", "nested", "the-scan-itself"],
)
def test_gradients_equal_one_device(model, units, axis_type):
    params, loss, grads = reference(model)
    mesh = make_mesh(3, axis_type)
    sharded = rj.fully_shard(model, mesh, axis="fsdp", units=units, block=rj.rows(1))
    assert isinstance(sharded, LinenModel)
    tree = sharded.init(KEY, jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype))["params"]
    got = named(rj.full_params(tree))
    assert got.keys() == params.keys()
    assert all((got[name] == x).all() for name, x in params.items())  # the same bits
    # The model itself does not matter to a step, only its parameters: the plain one takes them too.
    value, sharded_grads = QUICK(rj.value_and_grad(language_loss(model)))(tree, TOKENS)
    np.testing.assert_allclose(value, loss, rtol=2e-6)
    assert_close(named(rj.full_params(sharded_grads)), grads)
    again = rj.shard_like(rj.full_params(sharded_grads), tree)
    assert jax.tree.structure(again) == jax.tree.structure(sharded_grads)
    if "embed" in str(units):
        lowered = jax.jit(rj.value_and_grad(language_loss(model))).lower(tree, TOKENS)
        assert "unshard:embed" in lowered.as_text(debug_info=True)


@pytest.mark.parametrize("scan", [False, True])
def test_backward_gathers_again(scan):
    model, mesh = LinenModel(scan=scan), make_mesh(2)

    def gathers(**kwargs):
        tree = rj.fully_shard(model, mesh, axis="fsdp", units=LinenBlock, **kwargs).init(KEY, TOKENS)["params"]
        return str(jax.make_jaxpr(rj.value_and_grad(language_loss(model)))(tree, TOKENS)).count("all_gather[")

    units = 1 if scan else 2
    kept, again = gathers(reshard_after_forward=False), gathers()
    assert kept < again <= 2 * kept
    assert (again - kept) % units == 0


def test_plan_and_init_agree_and_no_device_holds_more():
    model = LinenModel(scan=True)
    plan = rj.plan(model, 7, jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype), units=LinenBlock, block=rj.rows(1))
    sharded = rj.fully_shard(model, make_mesh(7), axis="fsdp", units="*/block", block=rj.rows(1), plan=plan)
    tree = jax.jit(sharded.init)(KEY, TOKENS)["params"]
    assert rj.get_layout(tree) == plan.layout
    assert device_nbytes(tree) == {d.id: plan.layout.shard_nbytes for d in jax.devices()[:7]}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_init_never_makes_a_whole_tensor(axis_type):
    mesh = make_mesh(8, axis_type)
    model = rj.fully_shard(nn.Dense(1024), mesh, axis="fsdp")
    with jax.set_mesh(mesh):
        compiled = jax.jit(model.init).lower(KEY, jax.ShapeDtypeStruct((1, 2048), jnp.float32)).compile()
    share = 2048 * 1024 // 8
    arrays = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text())
    assert max(math.prod(map(int, shape.split(","))) for shape in arrays) == share
    memory = compiled.memory_analysis()  # threefry is a loop over two words an element, one of them held twice
    assert memory.temp_size_in_bytes <= 3 * 4 * share + 4096
    assert memory.output_size_in_bytes <= 4 * share + 4096


class Statistics(nn.Module):
    axis_name: str | None = None
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(6, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5, axis_name=self.axis_name)(x)
        return nn.Dropout(self.rate, deterministic=not train)(x)


class Twice(nn.Module):
    """A unit that is called twice, with a flag by keyword, statistics, dropout and sown values inside."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, train: bool):
        unit = Statistics(self.axis_name)
        y = unit(x, train=train)
        self.sow("intermediates", "first", y)
        return y + unit(x, train)


@pytest.mark.parametrize("axis_name", [None, "fsdp"])
def test_statistics_and_dropout(axis_name):
    model, x = Twice(axis_name), np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    mesh = make_mesh(2)
    plain = rj.fully_shard(Twice(), mesh, axis="fsdp", units=Statistics)
    variables = plain.init(KEY, x, train=False)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(variables["batch_stats"]))

    def loss(params, stats, x, key):
        out, left = model.apply(
            {"params": params, "batch_stats": stats}, x, True, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.square(out).mean(), (out, rj.replicated(left["batch_stats"]))

    step = jax.jit(rj.value_and_grad(loss, has_aux=True))
    stats = rj.replicated(variables["batch_stats"])
    (_, (out, left)), _ = step(variables["params"], stats, np.concatenate([x[:4], x[:4]]), KEY)
    assert jax.tree.structure(left) == jax.tree.structure(variables["batch_stats"])
    out = np.asarray(out)
    assert ((out[:4] == 0) != (out[4:] == 0)).any()  # the same rows, other masks
    (_, (_, left)), _ = step(variables["params"], stats, x, KEY)
    h = x @ rj.full_params(variables["params"])["Statistics_0"]["Dense_0"]["kernel"]
    mean = left["Statistics_0"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.75 * h.mean(0), rtol=1e-5, atol=1e-6)  # moved twice by a half
    evaluate = rj.apply(lambda params, stats, x: model.apply({"params": params, "batch_stats": stats}, x, False))
    expected = Twice().apply({"params": rj.full_params(variables["params"]), "batch_stats": left}, x, False)
    np.testing.assert_allclose(evaluate(variables["params"], rj.replicated(left), x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis_name", [None, "fsdp"])
def test_statistics_of_microbatches(axis_name):
    """All microbatches find the statistics that were given; what they leave is averaged, and so is the gradient."""
    model, x = Statistics(axis_name, rate=0.0), np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
    plain = Statistics(rate=0.0)
    variables = plain.init(KEY, x, True)
    params = rj.shard_tree(variables["params"], make_mesh(2), axis="fsdp", units="Dense_0")

    def loss(model, mark, params, stats, x):
        given = {"params": params, "batch_stats": stats}
        out, left = model.apply(given, x, True, mutable=nn.DenyList("params"))
        return jnp.square(out - x[:, ::-1]).mean(), mark(left["batch_stats"])

    run = rj.value_and_grad(partial(loss, model, rj.replicated), has_aux=True, num_microbatches=3)
    (value, left), grads = jax.jit(run)(params, rj.replicated(variables["batch_stats"]), x)
    one = jax.jit(jax.value_and_grad(partial(loss, plain, lambda x: x), has_aux=True))
    parts = x.reshape(2, 3, 4, 6)  # device, microbatch
    parts = parts.swapaxes(0, 1).reshape(3, 8, 6) if axis_name else parts.reshape(6, 4, 6)
    done = [one(variables["params"], variables["batch_stats"], part) for part in parts]
    (expected, stats), want = jax.tree.map(lambda *x: jnp.stack(x).mean(0), *done)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(named(left), named(stats))
    assert_close(named(rj.full_params(grads)), named(want))
    with pytest.raises(ValueError, match=r"unit 'Dense_0' change its parameters[^$]*DenyList\('params'\)"):
        rj.apply(lambda p, x: model.apply({"params": p}, x, True, mutable=True))(params, x)


def test_mixed_precision():
    model, seen = LinenModel(), []

    def watch(next_fun, args, kwargs, context):
        if isinstance(context.module, nn.Dense):
            seen.append((args[0].dtype, context.module.variables["params"]["kernel"].dtype))
        return next_fun(*args, **kwargs)

    rule = {"blocks_*": rj.MixedPrecision("bfloat16", output_dtype="float32")}
    sharded = rj.fully_shard(model, make_mesh(2), axis="fsdp", units=LinenBlock, precision=rule)
    tree = sharded.init(KEY, TOKENS)["params"]
    with nn.intercept_methods(watch):
        loss, grads = rj.value_and_grad(language_loss(model))(tree, TOKENS)
    assert set(seen) == {(jnp.dtype("bfloat16"),) * 2}
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, reference(model)[1], rtol=2e-2)


def test_whole_unit_methods_and_errors():
    mesh, model = make_mesh(2), LinenModel()
    shard = rj.fully_shard
    with pytest.raises(ValueError, match=r"'nope/\*' matches no submodule .* blocks_0/block \(LinenBlock\)"):
        shard(model, mesh, axis="fsdp", units="nope/*").init(KEY, TOKENS)
    with pytest.raises(ValueError, match=r"(?s)blocks_0/block: a single layer, .*Dense_1/kernel: \(48, 100\).*Leave"):
        shard(model, mesh, axis="fsdp", units=LinenBlock, stacked=LinenBlock).init(KEY, TOKENS)
    with pytest.raises(ValueError, match=r"(?s)blocks/block: stacked, but not said to be"):
        shard(LinenModel(scan=True), mesh, axis="fsdp", units=LinenBlock, stacked="no").init(KEY, TOKENS)
    plan = rj.plan(model, 3, TOKENS, units=LinenBlock)
    with pytest.raises(
        ValueError, match=r"(?s)for 3 shards, the mesh has 2.*embed/embedding: planned .* the model has"
    ):
        shard(nn.Embed(3, 2, name="embed"), mesh, axis="fsdp", plan=plan).init(KEY, TOKENS)
    with pytest.raises(ValueError, match=r"axis .* is not an axis of the mesh"):
        shard(model, mesh, axis="data")
    sharded = shard(model, mesh, axis="fsdp", units=(LinenBlock, nn.Embed))
    with pytest.raises(ValueError, match="already"):
        shard(sharded, mesh, axis="fsdp")
    with pytest.raises(TypeError, match="wrt"):
        shard(model, mesh, axis="fsdp", wrt=nn.Module)
    with pytest.raises(TypeError, match="takes a Flax module, got dict"):
        shard({}, mesh, axis="fsdp")
    tree = sharded.init(KEY, TOKENS)["params"]
    with pytest.raises(RuntimeError, match=r"LinenModel.apply .* outside .* write `rj.apply"):
        sharded.apply({"params": tree}, TOKENS)
    with pytest.raises(RuntimeError, match=r"unit 'embed': embed/embedding"):  # reached into, past its methods
        rj.apply(lambda p, x: p["embed"]["embedding"][x])(tree, TOKENS)
    attend = rj.apply(lambda p, x: model.apply({"params": p}, x, method=lambda m, x: m.embed.attend(x)))
    x = np.ones((2, 48), np.float32)
    np.testing.assert_allclose(attend(tree, x), x @ rj.full_params(tree)["embed"]["embedding"].T, rtol=1e-5)
    _, variables = sharded.init_with_output(KEY, TOKENS)
    assert jax.tree.structure(variables["params"]) == jax.tree.structure(tree)


def test_statistics_that_differ_need_a_mean():
    tree = rj.shard_tree({"w": np.ones(4, np.float32)}, make_mesh(2), axis="fsdp")
    x = np.arange(4, dtype=np.float32)
    assert rj.apply(lambda p, x: rj.replicated({"m": x.max()}))(tree, x) == {"m": 2.0}
    np.testing.assert_array_equal(rj.apply(lambda p, x: rj.replicated(x))(tree, x), [1, 2])
    with pytest.raises(TypeError, match="no mean"):
        rj.apply(lambda p, x: rj.replicated(lax.axis_index("fsdp")))(tree, x)
    differing = lambda p, x: (x.mean(), rj.replicated(lax.axis_index("fsdp")))
    with pytest.raises(TypeError, match="no mean"):
        rj.value_and_grad(differing, has_aux=True, num_microbatches=2)(tree, x)
