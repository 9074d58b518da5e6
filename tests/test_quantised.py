"""Quantised gathers: a byte a weight on the wire, exact shards, errors that are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_models import QUICK
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from models import assert_close, make_mesh, poison_padding

import ragged_jax as rj
from ragged_jax.fsdp import MixedPrecision
from ragged_jax.fsdp._quantised import pack, unpack
from ragged_jax.preflight import hlo_report

RNG = np.random.default_rng(0)
STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}  # the largest error, of the block's or the element's size


def there_and_back(x, dtype, block):
    return np.asarray(unpack(pack(jnp.asarray(x), dtype, block)[None], x.size, dtype, block, jnp.float32)[0])


@pytest.mark.parametrize("dtype", STEP)
@pytest.mark.parametrize("numel", [1, 64, 100, 129])
def test_each_block_keeps_its_own_scale(dtype, numel):
    x = (RNG.normal(size=numel) * 10.0 ** (np.arange(numel) // 64 * 6 - 3)).astype(np.float32)
    packed = pack(jnp.asarray(x), dtype, 64)
    assert packed.dtype == jnp.uint8
    assert packed.size == -(-numel // 64) * (64 + 4)
    wrong = np.abs(there_and_back(x, dtype, 64) - x)
    for start in range(0, numel, 64):
        part = slice(start, start + 64)
        assert wrong[part].max() <= 1.001 * STEP[dtype] * np.abs(x[part]).max()


@pytest.mark.parametrize("dtype", STEP)
def test_zeros_infinities_and_extremes(dtype):
    x = RNG.normal(size=(5, 8)).astype(np.float32)
    x[0] = 0
    x[1, 3], x[2, 4] = np.inf, np.nan
    x[3] *= 1e-44
    x[4] = np.finfo(np.float32).max * np.sign(x[4])
    y = there_and_back(x.reshape(-1), dtype, 8).reshape(5, 8)
    assert (y[0] == 0).all()
    assert [tuple(i) for i in np.argwhere(np.isnan(y))] == [(1, 3), (2, 4)]  # and their neighbours are as they were
    assert np.isfinite(y[[3, 4]]).all()
    fine = np.isfinite(x[:3])
    np.testing.assert_allclose(y[:3][fine], x[:3][fine], atol=STEP[dtype] * 4)
    np.testing.assert_allclose(y[4], x[4], rtol=1e-6)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(30, 30, rngs=rngs)

    def __call__(self, x):
        return x + nnx.tanh(self.linear(x))


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.split_rngs(splits=4)(nnx.vmap(Layer))(rngs)
        self.head = nnx.Linear(30, 3, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(scan(self.layers, x))


X = RNG.normal(size=(48, 30)).astype(np.float32)
Y = np.sin(X[:, :3] * 2)


def loss_fn(model, x, y):
    return ((model(x) - y) ** 2).mean()


def sharded(precision=None, num_devices=3):
    mesh = make_mesh(num_devices)
    return rj.fully_shard(Net(), mesh, axis="fsdp", units=Layer, stacked=Layer, precision=precision)


def train(model, steps=60):
    @nnx.jit
    def step(model, optimizer):
        loss, grads = rj.value_and_grad(loss_fn)(model, X, Y)
        optimizer.update(model, grads)
        return loss

    with jax.set_mesh(make_mesh(3)):  # otherwise the second step compiles again
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        return [float(step(model, optimizer)) for _ in range(steps)]


@pytest.fixture(scope="module")
def unquantised():
    return train(sharded())


@pytest.mark.parametrize(("dtype", "distance"), [("int8", 0.02), ("float8_e4m3fn", 0.08)])
def test_training_stays_near(dtype, distance, unquantised):
    """Largest difference of the loss, as a fraction of the first loss."""
    losses = train(sharded(MixedPrecision(gather_dtype=dtype, gather_block=64)))
    assert unquantised[-1] < 0.5 * unquantised[0]
    assert 0 < np.abs(np.array(losses) - unquantised).max() < distance * unquantised[0]


def test_the_wire_carries_bytes_and_backward_gathers_again():
    def report(precision):
        run = nnx.jit(rj.value_and_grad(loss_fn))
        return hlo_report(run.lower(sharded(precision), X, Y).compile().compiled)

    plain, small = report(None), report({"layers": MixedPrecision(gather_dtype="int8", gather_block=31)})
    assert small.collectives["all-gather"].executed == plain.collectives["all-gather"].executed
    assert small.collectives["reduce-scatter"] == plain.collectives["reduce-scatter"]
    saved = plain.collectives["all-gather"].nbytes - small.collectives["all-gather"].nbytes
    elements = 310  # on each device, ten blocks of 31
    assert saved == 2 * 4 * 3 * (4 * elements - (elements + 4 * 10))  # twice, layers, devices


def test_gradients_pass_straight_through_and_shards_stay_exact():
    params = {"w": RNG.normal(size=(30, 30)).astype(np.float32), "n": np.arange(3)}
    precision = MixedPrecision("bfloat16", "float32", gather_dtype="int8", gather_block=32)
    tree = rj.shard_tree(params, make_mesh(7), axis="fsdp", precision=precision)
    tree = tree.replace(poison_padding(tree.unit, tree.slabs), {})
    np.testing.assert_array_equal(rj.full_params(tree)["w"], params["w"])
    run = rj.value_and_grad(lambda p, x: (x @ p["w"].astype(jnp.float32)).mean(), allow_int=True)
    value, grads = jax.jit(run)(tree, X[:42])
    np.testing.assert_allclose(value, (X[:42] @ params["w"]).mean(), atol=5e-3)
    want = np.repeat(X[:42].mean(0)[:, None] / 30, 30, 1)
    np.testing.assert_allclose(rj.full_params(grads)["w"], want, atol=2e-2 * np.abs(want).max())
    arrived = rj.apply(lambda p, x: jax.lax.pmean(p["w"].astype(jnp.float32), "fsdp"))(tree, X[:42])
    error = rj.quantisation_error(tree)
    assert error.keys() == {"w"}
    assert 0 < error["w"].max <= 1.001 * STEP["int8"]
    assert 0 < error["w"].rms < 0.01
    wrong = np.abs(arrived - params["w"]).max() / np.abs(params["w"]).max()
    np.testing.assert_allclose(wrong, error["w"].max, atol=2.0**-8)  # bfloat16 comes on top


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.deep)])
def test_slices_of_stacked_layers(dtype):
    """Under tensor parallelism each device's part of a slice is quantised, layer by layer: alone and with others."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    shapes = {"up": (3, 30, 40), "down": (3, 40, 30), "odd": (3, 3, 30), "bias": (3, 40)}
    layers = {name: RNG.normal(size=shape).astype(np.float32) / 5 for name, shape in shapes.items()}
    specs = {"*/up": PartitionSpec(None, None, "tp"), "*/down": PartitionSpec(None, "tp"), "*/bias": (None, "tp")}
    how = {"units": "layers", "stacked": "layers", "specs": {name: PartitionSpec(*s) for name, s in specs.items()}}
    plan = rj.plan({"layers": layers}, 2, axis_sizes={"tp": 2}, min_slab_nbytes=1024, **how)
    assert {slab.sole for bucket in plan.layout.buckets for slab in bucket.slabs if slab.split_axes} == {True, False}
    precision = MixedPrecision(gather_dtype=dtype, gather_block=32)
    tree = rj.shard_tree({"layers": layers}, mesh, axis="fsdp", plan=plan, precision=precision, **how)

    def loss(params, x, wrap=lambda f: f):
        def layer(w, x):
            return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"] * w["odd"].sum(0)

        return jnp.square(jax.lax.scan(lambda x, w: (wrap(layer)(w, x), None), x, params["layers"])[0]).mean()

    def arrived(x):
        part = lambda x: np.stack([there_and_back(layer, dtype, 32).reshape(layer.shape) for layer in x])
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: part(np.asarray(x[index])))

    params = rj.full_params(jax.tree.map(arrived, tree))
    assert all((params["layers"][name] != x).any() for name, x in layers.items())
    run = rj.value_and_grad(lambda p, x: loss(p, x, rj.unsharded))
    (value, grads), (expected, want) = QUICK(run)(tree, X), QUICK(jax.value_and_grad(loss))(params, X)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    assert_close(rj.full_params(grads)["layers"], {name: np.asarray(g) for name, g in want["layers"].items()})


def test_errors_of_some_units():
    model = sharded({"layers": MixedPrecision(gather_dtype="float8_e4m3fn")})
    errors = rj.quantisation_error(model)
    assert errors.keys() == {"layers/linear/kernel", "layers/linear/bias"}
    assert errors["layers/linear/bias"] == (0, 0)  # they are zero
    assert 0 < errors["layers/linear/kernel"].rms < 2.0**-4
    assert rj.quantisation_error(sharded()) == {}
    for wrong in ({"gather_dtype": "int4"}, {"gather_dtype": "int8", "gather_block": 0}):
        with pytest.raises(ValueError, match="gather_"):
            MixedPrecision(**wrong)
