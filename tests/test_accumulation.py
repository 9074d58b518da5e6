"""Gradient accumulation: the gradient of the whole batch, whatever the number of microbatches, and what it costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from models import assert_close, flat, make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.adapters._nnx import _units
from ragged_jax.preflight import hlo_report

X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
LAYERS = 3


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self, scan=False):
        self.scan = scan
        rngs = nnx.Rngs(0)
        if scan:
            self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
        else:
            self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Param(jnp.ones((6, 5)))
        self.unused = nnx.Param(jnp.ones((7,)))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        if self.scan:
            x = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        else:
            for layer in self.layers:
                x = layer(x)
        return x @ self.head[...]


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def mesh_of(num_devices):
    if num_devices == "2x3":
        return jax.make_mesh((2, 3), ("replica", "fsdp"), devices=jax.devices()[:6]), ("replica", "fsdp")
    return make_mesh(num_devices), "fsdp"


def shard(num_devices, scan=False, **kwargs):
    mesh, axis = mesh_of(num_devices)
    return rj.fully_shard(Net(scan), mesh, axis=axis, units=Layer, stacked=Layer if scan else None, **kwargs)


def grads_of(model, function=loss_fn, *args, **kwargs):
    value, grads = nnx.jit(rj.value_and_grad(function, **kwargs))(model, X, *args)
    return value, flat(rj.full_params(grads, like=model))


@pytest.mark.parametrize(
    ("num_devices", "scan", "num", "reduce"),
    [
        pytest.param(1, False, 4, "once", marks=pytest.mark.deep),
        (3, False, 2, "once"),
        (3, False, 2, "each"),
        pytest.param(8, False, 3, "once", marks=pytest.mark.deep),
        (1, True, 4, "each"),
        (3, True, 4, "once"),
        (3, True, 4, "each"),
        (8, True, 3, "once"),
        ("2x3", True, 2, "once"),
        pytest.param("2x3", False, 2, "each", marks=pytest.mark.deep),
    ],
)
def test_equals_one_device_and_the_whole_batch(num_devices, scan, num, reduce):
    expected_loss, expected = nnx.value_and_grad(loss_fn)(Net(scan), X)
    model = shard(num_devices, scan)
    for _, module, info in _units(model):
        slabs = poison_padding(info.unit, info.slabs(module))
        info.put_slabs(module, slabs)
    loss, grads = grads_of(model, num_microbatches=num, reduce=reduce)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_close(grads, flat(expected))
    assert (grads["unused"] == 0).all()
    assert model.calls[...] == num


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("scan", [False, True])
def test_pytrees(scan, reduce):
    rng = np.random.default_rng(1)
    layers = [{"w": rng.normal(size=(6, 6)).astype(np.float32)} for _ in range(3)]
    params = {
        "layers": jax.tree.map(lambda *x: np.stack(x), *layers) if scan else layers,
        "b": np.ones(5, np.float32),
    }
    units = {"units": "layers", "stacked": "layers"} if scan else {"units": "layers/*"}
    tree = rj.shard_tree(params, make_mesh(3), axis="fsdp", **units)

    def loss(p, x, wrap=lambda f: f):
        layer = wrap(lambda w, x: x + jnp.tanh(x @ w["w"]))
        if scan:
            x, _ = lax.scan(lambda x, w: (layer(w, x), None), x, p["layers"])
        else:
            for w in p["layers"]:
                x = layer(w, x)
        return (x**2).mean() * p["b"].sum()

    expected = jax.value_and_grad(loss)(params, X)
    run = rj.value_and_grad(lambda p, x: loss(p, x, rj.unsharded), num_microbatches=4, reduce=reduce)
    value, grads = jax.jit(run)(tree, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), rj.full_params(grads), expected[1])


def compiled(scan, **kwargs):
    report = hlo_report(nnx.jit(rj.value_and_grad(loss_fn, **kwargs)).lower(shard(3, scan), X).compile().compiled)
    return {kind: c.executed for kind, c in report.collectives.items()}


def test_the_number_of_collectives():
    """A layer has one slab, the root one more."""
    once = {num: compiled(True, num_microbatches=num) for num in (2, 4)}
    each = compiled(True, num_microbatches=4, reduce="each")
    assert once[2]["reduce-scatter"] == once[4]["reduce-scatter"] == 2  # the stack in one piece
    assert each["reduce-scatter"] == 4 * (LAYERS + 1)
    assert once[4]["all-gather"] - once[2]["all-gather"] >= 2 * 2 * LAYERS
    assert compiled(False, num_microbatches=4)["reduce-scatter"] == LAYERS + 1


class Noisy(nnx.Module):
    def __init__(self, axis_name="fsdp"):
        self.linear = nnx.Linear(6, 6, use_bias=False, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(6, momentum=0.5, axis_name=axis_name, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        self.mask = nnx.Intermediate(self.dropout(jnp.ones_like(x)))
        return self.norm(self.linear(x))


@pytest.mark.parametrize("axis_name", ["fsdp", None])
def test_state_passes_through_the_microbatches_in_order(axis_name):
    """Batch statistics are those of a microbatch: of all devices where they are given the axis."""
    model = rj.fully_shard(Noisy(axis_name), make_mesh(2), axis="fsdp", units=nnx.Linear)
    loss_fn = lambda model, x: ((model(x) - x[:, ::-1]) ** 2).mean()
    loss, grads = grads_of(model, loss_fn, num_microbatches=3, reduce="once" if axis_name else "each")
    whole, run = [Noisy(None), Noisy(None)], nnx.jit(nnx.value_and_grad(loss_fn))
    parts = X.reshape(2, 3, 4, 6)  # device, microbatch
    done = [
        run(whole[k], parts[:, i].reshape(8, 6) if axis_name else parts[k, i]) for i in range(3) for k in range(2)
    ]
    np.testing.assert_allclose(loss, np.mean([loss for loss, _ in done]), rtol=1e-6)
    assert_close(grads, flat(jax.tree.map(lambda *g: jnp.stack(g).mean(0), *(grads for _, grads in done))))
    for name in ("mean", "var"):
        expected = np.mean([getattr(m.norm, name)[...] for m in whole], axis=0)
        np.testing.assert_allclose(getattr(model.norm, name)[...], expected, rtol=1e-5, atol=1e-6)
    assert model.dropout.rngs.count[...] == 3
    masks = np.asarray(model.mask[...])  # of each example, in the order of the batch
    assert masks.shape == X.shape
    assert len({tuple(x.ravel()) for x in masks.reshape(6, 4, 6)}) == 6  # no two devices or microbatches agree


def test_outputs_are_joined_as_those_of_devices_are():
    def loss(model, x, key, table, nothing):
        assert nothing.shape == (4, 0)
        aux = {
            "x": x,
            "empty": x[:, :0],
            "mean": x.mean(),
            "same": lax.pmean(x.sum(0), "fsdp"),
            "random": jax.random.uniform(key, (1,)),
            "one": rj.replicated({"mean": x.mean(0), "text": "kept", "last": lax.pmax(jnp.argmax(x), "fsdp")}),
            "table": table * jnp.ones(()),
            "text": "kept",
        }
        return loss_fn(model, x), aux

    model = shard(2)
    args = (jax.random.key(0), rj.replicated(np.arange(5, dtype=np.float32)), np.zeros((24, 0)))
    (_, aux), _ = rj.value_and_grad(loss, has_aux=True, num_microbatches=3)(model, X, *args)
    np.testing.assert_array_equal(aux["x"], X)
    assert aux["empty"].shape == (24, 0)
    np.testing.assert_allclose(aux["mean"], X.mean(), rtol=1e-5)
    np.testing.assert_allclose(aux["same"], X.sum(0) / 6, rtol=1e-5)
    assert len(set(np.asarray(aux["random"]).tolist())) == 6
    np.testing.assert_array_equal(aux["table"], np.arange(5))
    np.testing.assert_allclose(aux["one"].pop("mean"), X.mean(0), rtol=1e-5, atol=1e-7)
    last = aux["one"].pop("last")  # integers have no mean
    assert last.dtype == jnp.int32
    assert last == max(part.argmax() for part in X.reshape(2, 3, 4, 6)[:, 2])
    assert aux["one"] == {"text": "kept"}
    assert aux["text"] == "kept"


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_a_parameter_that_gets_its_first_gradient_from_the_last_microbatch(reduce):
    def loss(p, x, last):
        return jnp.where(last.all(), (x * p["late"]).mean(), 0.0) + p["always"].sum()

    params = {"late": np.ones(6, np.float32), "always": np.ones(3, np.float32), "never": np.ones(4, np.float32)}
    tree = rj.shard_tree(params, make_mesh(2), axis="fsdp")
    last = np.arange(24).reshape(2, 3, 4) >= np.array([8, 20])[:, None, None]  # of each device's three
    run = rj.value_and_grad(loss, num_microbatches=3, reduce=reduce)
    grads = rj.full_params(jax.jit(run)(tree, X, last.reshape(24))[1])
    want = X.reshape(2, 3, 4, 6)[:, 2].sum((0, 1)) / (4 * 6 * 6)
    np.testing.assert_allclose(grads["late"], want, rtol=1e-5)
    np.testing.assert_allclose(grads["always"], 1)
    assert (grads["never"] == 0).all()


def test_dtypes_of_sums_and_of_the_reduction():
    """bfloat16 has 8 bits: 256 + 1 is 256, unless the sum is float32."""
    tree = rj.shard_tree({"w": jnp.ones(4, jnp.bfloat16)}, make_mesh(2), axis="fsdp")
    x = np.tile(np.array([256] + [1] * 7, np.float32), 2)

    def gradient(**kwargs):
        run = rj.value_and_grad(
            lambda p, x: p["w"].astype(jnp.float32).sum() * x.mean(), num_microbatches=8, **kwargs
        )
        return np.asarray(rj.full_params(run(tree, x)[1])["w"], np.float32)

    for reduce in ("once", "each"):
        np.testing.assert_array_equal(gradient(reduce=reduce), 32)
        np.testing.assert_array_equal(gradient(reduce=reduce, accumulate_dtype="float32"), 33)  # 263 / 8

    model = shard(2, precision=rj.MixedPrecision("bfloat16", "float32"))
    text = str(nnx.jit(rj.value_and_grad(loss_fn, num_microbatches=2)).lower(model, X).lowered.as_text())
    scatters = text.split("stablehlo.reduce_scatter")[1:]
    assert len(scatters) == LAYERS + 1
    assert all("f32" in s.split("}) : ")[1].split("\n")[0] for s in scatters)


def test_a_batch_that_does_not_divide_names_every_leaf():
    with pytest.raises(ValueError, match=r"into 5 microbatches[^$]*argument \[1\]: shape \(24, 6\)[^$]*\['y'\]"):
        rj.value_and_grad(lambda m, x, y: 0.0, num_microbatches=5)(shard(2), X, y=X)
    for wrong, said in (({"num_microbatches": 0}, "at least 1"), ({"reduce": "never"}, "neither 'once' nor 'each'")):
        with pytest.raises(ValueError, match=said):
            rj.value_and_grad(loss_fn, **wrong)


def test_a_scan_over_microbatches_of_the_users_own():
    params = {"w": np.ones((6, 3), np.float32)}
    tree, tx = rj.shard_tree(params, make_mesh(3), axis="fsdp"), optax.sgd(0.1)
    loss = lambda p, x: (jnp.tanh(x @ p["w"]) ** 2).mean()

    def step(params, parts, grad_fn):
        def body(total, x):
            value, grads = grad_fn(params, x)
            return jax.tree.map(jnp.add, total, grads), value

        total, losses = lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
        updates, _ = tx.update(jax.tree.map(lambda g: g / 4, total), tx.init(params))
        return losses.mean(), optax.apply_updates(params, updates)

    parts = X.reshape(4, 6, 6)
    expected = step(params, parts, jax.value_and_grad(loss))
    with jax.set_mesh(make_mesh(3)):
        got = jax.jit(lambda p, x: step(p, x, rj.value_and_grad(loss)))(tree, parts)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(rj.full_params(got[1])["w"], expected[1]["w"], rtol=1e-6)
