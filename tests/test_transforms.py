"""`value_and_grad` and `apply` do what their namesakes do; state, randomness and outputs included."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from models import make_mesh

import ragged_jax as rj


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, rate: float = 0.0):
        self.first = nnx.Linear(6, 10, rngs=rngs)
        self.norm = nnx.BatchNorm(10, axis_name="fsdp", rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(10, 3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))

    def features(self, x):
        return self.first(x)


def make(num_devices=4, units=nnx.Linear, rate=0.0, **kwargs):
    model = Net(rngs=nnx.Rngs(0, dropout=1), rate=rate)
    return rj.fully_shard(model, make_mesh(num_devices), axis="fsdp", units=units, **kwargs)


X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def grads_of(model, *args, **kwargs):
    value, grads = nnx.jit(rj.value_and_grad(*args, **kwargs))(model, X)
    return value, grads


def test_aux_and_argnums():
    model = make()
    plain, grads = grads_of(model, loss_fn)
    (loss, aux), same = grads_of(model, lambda m, x: (loss_fn(m, x), {"out": m(x), "n": 3}), has_aux=True)
    assert loss == plain
    assert aux["out"].shape == (8, 3)
    assert aux["n"] == 3
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b), grads, same))
    value, (one,) = nnx.jit(rj.value_and_grad(lambda x, m: loss_fn(m, x), argnums=(1,)))(X, model)
    assert value == plain
    assert jax.tree.structure(one) == jax.tree.structure(grads)


def test_two_models():
    teacher, student = make(), make()

    def distance(student, teacher, x):
        return ((student(x) - teacher(x)) ** 2).mean()

    loss, (to_student, to_teacher) = nnx.jit(rj.value_and_grad(distance, argnums=(0, 1)))(student, teacher, X)
    assert loss < 1e-12
    assert jax.tree.structure(to_student) == jax.tree.structure(to_teacher)


def test_models_by_keyword_and_in_containers():
    model, teacher, rngs = make(), make(), nnx.Rngs(1)

    def draw(model, x, *, teacher, rngs):
        return model(x) - 2 * teacher(x), jax.random.uniform(rngs(), (1,))

    run = nnx.jit(rj.apply(draw))
    (out, first), (_, second) = run(model, X, teacher=teacher, rngs=rngs), run(model, X, teacher=teacher, rngs=rngs)
    np.testing.assert_allclose(out, -rj.apply(lambda m, x: m(x))(model, X), rtol=1e-4, atol=1e-5)
    assert len({*first.tolist(), *second.tolist()}) == 8  # other numbers on each device and in each call
    assert rngs.default.count[...] == 2
    with pytest.raises(TypeError, match=r"\[2\]\['t'\]: FullySharded(?s:.)*keyword argument \['r'\]\[0\]: Rngs"):
        rj.apply(lambda m, x, models, r: m(x))(model, X, {"t": teacher}, r=[rngs])


def test_diff_state_differentiates_a_part():
    class Adapter(nnx.Param):
        pass

    model = Net(rngs=nnx.Rngs(0))
    model.second.bias = Adapter(model.second.bias[...])
    model = rj.fully_shard(model, make_mesh(4), axis="fsdp", units=nnx.Linear)
    second = nnx.DiffState(0, lambda path, leaf: path[0] == "second")
    _, grads = nnx.jit(rj.value_and_grad(loss_fn, argnums=second))(model, X)
    assert {path[0] for path, _ in nnx.to_flat_state(grads)} == {"second"}
    # Variables of a type of their own have slabs of their own, so that they can be trained alone.
    _, grads = nnx.jit(rj.value_and_grad(loss_fn, argnums=nnx.DiffState(0, Adapter)))(model, X)
    (leaf,) = (leaf for _, leaf in nnx.to_flat_state(grads))
    assert type(leaf) is Adapter
    ((path, whole),) = nnx.to_flat_state(rj.full_params(grads, like=model))
    assert path == ("second", "bias")
    assert type(whole) is Adapter
    assert whole.shape == (3,)
    assert rj.get_layout(model).locate("second/bias").slab.name == "Adapter.float32x1"
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=Adapter)
    before = rj.full_params(model)
    optimizer.update(model, grads)
    after = rj.full_params(model)
    assert (before["second"]["bias"][...] != after["second"]["bias"][...]).all()
    assert (before["second"]["kernel"][...] == after["second"]["kernel"][...]).all()


def test_batch_statistics_are_those_of_the_whole_batch():
    whole, model = Net(rngs=nnx.Rngs(0, dropout=1)), make()
    whole.norm.axis_name = None
    expected, _ = nnx.value_and_grad(loss_fn)(whole, X)
    got, _ = grads_of(model, loss_fn)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    np.testing.assert_allclose(model.norm.mean[...], whole.norm.mean[...], rtol=1e-6)
    np.testing.assert_allclose(model.norm.var[...], whole.norm.var[...], rtol=1e-6)


def test_local_statistics_are_averaged_and_local_integers_refused():
    model = make()
    model.norm.axis_name = None
    grads_of(model, loss_fn)
    whole = Net(rngs=nnx.Rngs(0, dropout=1))
    whole.norm.axis_name = None
    for x in np.split(X, 4):
        whole(x)
    assert model.norm.mean[...].shape == (10,)
    assert not np.allclose(model.norm.mean[...], 0)

    class Counting(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.seen = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            self.seen[...] = (x > 0).sum()
            return self.linear(x)

    counting = rj.fully_shard(Counting(), make_mesh(4), axis="fsdp")
    with pytest.raises(TypeError, match=r"seen.*Reduce them over"):
        grads_of(counting, loss_fn)


def test_dropout_differs_between_devices_and_steps():
    model = make(rate=0.5)
    model.second.kernel  # noqa: B018 - still an attribute, whole or packed
    run = nnx.jit(rj.apply(lambda m, x: m.dropout(jnp.ones((1, 64)))))
    first, second = run(model, X), run(model, X)
    assert first.shape == (4, 64)
    assert len({tuple(row) for row in np.asarray(first)}) == 4
    assert not (first == second).all()
    assert model.dropout.rngs.count[...] == 2
    model.eval()
    assert (run(model, X) == 1).all()


def test_random_keys_among_the_arguments_differ_between_devices():
    draw = lambda m, x, key: jax.random.uniform(key, (1, 8))
    rows = nnx.jit(rj.apply(draw))(make(), X, jax.random.key(0))
    assert len({tuple(row) for row in np.asarray(rows)}) == 4
    with pytest.raises(TypeError, match=r"random keys that differ(?s:.)*: \['key'\]\. As arrays"):
        rj.apply(lambda m, x, key: {"key": key})(make(), X, jax.random.key(0))


def test_outputs_are_joined_by_what_they_are():
    def metrics(model, x, scale, *, table):
        return {
            "rows": x * scale,
            "mean": x.mean(),
            "count": (x > 0).sum(),
            "same": lax.pmean(x.sum(axis=0), "fsdp"),
            "table": table,
            "text": "kept",
            "none": None,
        }

    out = rj.apply(metrics)(make(), X, 2.0, table=rj.replicated(np.arange(5.0, dtype=np.float32)))
    np.testing.assert_allclose(out["rows"], 2 * X, rtol=1e-6)
    np.testing.assert_allclose(out["mean"], X.mean(), rtol=1e-5)
    np.testing.assert_allclose(out["count"], (X > 0).sum() / 4)
    np.testing.assert_allclose(out["same"], X.sum(axis=0) / 4, rtol=1e-5)
    assert out["table"].shape == (5,)
    assert out["text"] == "kept"
    assert out["none"] is None


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_outside_of_jit(axis_type):
    model = rj.fully_shard(Net(rngs=nnx.Rngs(0)), make_mesh(4, axis_type), axis="fsdp", units=nnx.Linear)
    eager = rj.value_and_grad(loss_fn)(model, X)[0]
    other = rj.fully_shard(Net(rngs=nnx.Rngs(0)), make_mesh(4, axis_type), axis="fsdp", units=nnx.Linear)
    assert eager == nnx.jit(rj.value_and_grad(loss_fn))(other, X)[0]


def test_public_methods_of_a_unit_gather_too():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(11, 6, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.embed.attend(self.embed(tokens))

    tokens = np.arange(8) % 11
    expected = Tied()(tokens)
    model = rj.fully_shard(Tied(), make_mesh(4), axis="fsdp", units=nnx.Embed)
    assert isinstance(model.embed, nnx.Embed)
    np.testing.assert_allclose(nnx.jit(rj.apply(lambda m, t: m(t)))(model, tokens), expected, rtol=1e-6, atol=1e-7)


def test_methods_of_the_root():
    expected = Net(rngs=nnx.Rngs(0)).features(X)
    got = nnx.jit(rj.apply(lambda m, x: m.features(x)))(make(), X)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_remat_by_the_user_composes():
    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: nnx.tanh(layer(x)))(layer, x)
            return x

    expected_loss, expected = nnx.value_and_grad(loss_fn)(Deep(), X)
    for reshard in (True, False):
        model = rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=nnx.Linear, reshard_after_forward=reshard)
        loss, grads = grads_of(model, loss_fn)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
        full = rj.full_params(grads, like=model)
        for (path, got), (other, want) in zip(nnx.to_flat_state(full), nnx.to_flat_state(expected), strict=True):
            assert path == other
            np.testing.assert_allclose(got[...], want[...], rtol=1e-5, atol=1e-7)


def test_methods_wrapped_by_flax_transforms_gather_too():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(6, 6, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return nnx.tanh(self.linear(x))

        @nnx.jit
        def twice(self, x):
            return self(self(x))

    class Deep(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(2)])

        def __call__(self, x):
            return self.layers[1].twice(self.layers[0](x))

    expected, _ = nnx.value_and_grad(loss_fn)(Deep(), X)
    got, _ = grads_of(rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=Layer), loss_fn)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_arguments_of_units_may_be_anything():
    class Layer(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5)

        def __call__(self, x, mask=None, *, scale: str, deterministic: bool, rngs=None):
            y = self.dropout(self.linear(x), deterministic=deterministic, rngs=rngs)
            return {"y": y * {"double": 2}[scale], "mask": mask}

    class Outer(nnx.Module):
        def __init__(self):
            self.layer = Layer()

        def __call__(self, x, rngs):
            x = self.layer(x, scale="double", deterministic=True)["y"]
            out = self.layer(x, jnp.ones(()), scale="double", deterministic=False, rngs=rngs)
            return out["y"] * out["mask"]

    model = rj.fully_shard(Outer(), make_mesh(4), axis="fsdp", units=Layer)
    rngs = nnx.Rngs(3)
    run = nnx.jit(rj.value_and_grad(lambda m, x, rngs: (m(x, rngs) ** 2).mean()))
    first, _ = run(model, X, rngs)
    second, _ = run(model, X, rngs)
    assert rngs.default.count[...] == 2
    assert first != second


def test_intermediates_are_joined_along_the_batch():
    class Remembering(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.linear(x)
            self.hidden = nnx.Intermediate(y)
            return y

    expected = Remembering()(X)
    model = rj.fully_shard(Remembering(), make_mesh(4), axis="fsdp")
    rj.apply(lambda m, x: m(x))(model, X)
    np.testing.assert_allclose(model.hidden[...], expected, rtol=1e-5)


def test_a_layer_used_twice_and_a_module_shared_by_two_units():
    class Twice(nnx.Module):
        def __init__(self):
            shared = nnx.Linear(6, 6, rngs=nnx.Rngs(9))
            self.a = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), shared)
            self.b = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(1)), shared)

        def __call__(self, x):
            return self.a(self.b(self.a(x)))

    expected_loss, expected = nnx.value_and_grad(loss_fn)(Twice(), X)
    model = rj.fully_shard(Twice(), make_mesh(4), axis="fsdp", units=nnx.Sequential)
    layout = rj.get_layout(model)
    assert layout.locate("a/layers/1/kernel").bucket.name == ""
    loss, grads = grads_of(model, loss_fn)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    got = dict(nnx.to_flat_state(rj.full_params(grads, like=model)))
    want = dict(nnx.to_flat_state(expected))
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path][...], want[path][...], rtol=1e-5, atol=1e-7)


def test_integers_in_a_pytree():
    params = {"w": np.ones((6, 3), np.float32), "table": np.arange(7, dtype=np.int32)}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp")

    def loss(p, x):
        return (x @ p["w"]).sum() * p["table"].sum().astype(jnp.float32)

    with pytest.raises(TypeError, match=r"table.*allow_int=True"):
        rj.value_and_grad(loss)(tree, X)
    _, grads = jax.jit(rj.value_and_grad(loss, allow_int=True))(tree, X)
    full = rj.full_params(grads)
    assert (full["table"] == 0).all()
    assert full["table"].dtype == np.int32
    np.testing.assert_allclose(full["w"], np.broadcast_to(X.sum(0)[:, None] / 4 * 21, (6, 3)), rtol=1e-5)


def test_strict_promotion():
    """The library itself never relies on implicit dtype or rank promotion."""
    params = {"w": jnp.ones((6, 3), jnp.bfloat16), "b": jnp.ones(3, jnp.float32)}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp")

    def loss(p, x):
        return (x.astype(jnp.bfloat16) @ p["w"]).astype(jnp.float32).mean() + p["b"].sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        value, grads = jax.jit(rj.value_and_grad(loss))(tree, X)
        jax.jit(rj.apply(lambda p, x: loss(p, x)))(tree, X)
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
