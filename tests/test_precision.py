"""Mixed precision: full-precision shards, low-precision collectives and compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import make_mesh

import ragged_jax as rj

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
BF16 = rj.MixedPrecision("bfloat16", reduce_dtype="float32", output_dtype="float32")


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return nnx.tanh(self.linear(x))


class Deep(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(2)])
        self.head = nnx.Linear(6, 2, rngs=nnx.Rngs(9))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def collectives(jaxpr) -> dict[str, set[str]]:
    """Dtypes of the operands of each kind of collective, nested jaxprs included."""
    found: dict[str, set[str]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("all_gather", "reduce_scatter"):
            found.setdefault(eqn.primitive.name, set()).add(str(eqn.invars[0].aval.dtype))
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                for name, dtypes in collectives(inner).items():
                    found.setdefault(name, set()).update(dtypes)
    return found


def make(**kwargs):
    return rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=Layer, **kwargs)


def trace(model):
    graphdef, state = nnx.split(model)
    step = lambda state: rj.value_and_grad(loss_fn)(nnx.merge(graphdef, state), X)
    return collectives(jax.make_jaxpr(step)(state).jaxpr)


@pytest.mark.parametrize(
    ("precision", "gathers", "reductions"),
    [
        (None, {"float32"}, {"float32"}),
        (rj.MixedPrecision(jnp.bfloat16), {"bfloat16"}, {"bfloat16"}),
        (BF16, {"bfloat16"}, {"float32"}),
        (rj.MixedPrecision(reduce_dtype="bfloat16"), {"float32"}, {"bfloat16"}),
        ({"layers/1": BF16}, {"bfloat16", "float32"}, {"float32"}),
    ],
)
def test_dtypes_of_the_collectives(precision, gathers, reductions):
    found = trace(make(precision=precision))
    assert found == {"all_gather": gathers, "reduce_scatter": reductions}


def test_shards_and_gradients_keep_their_dtype_and_the_numbers_are_those_of_bfloat16():
    def low(model, x):
        graphdef, state = nnx.split(model)
        low_state = jax.tree.map(lambda v: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v, state)
        for layer in (copy := nnx.merge(graphdef, low_state)).layers:
            x = layer(x.astype(jnp.bfloat16)).astype(jnp.float32)
        return (copy.head(x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    def loss(model, x):
        for layer in model.layers:
            x = layer(x)
        return (model.head(x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2).mean()

    expected_loss, expected = nnx.value_and_grad(low)(Deep(), X)
    model = make(precision=BF16)
    got_loss, grads = nnx.jit(rj.value_and_grad(loss))(model, X)
    assert {x.dtype for x in jax.tree.leaves((grads, nnx.state(model, nnx.Param)))} == {jnp.dtype("float32")}
    assert model.layers[0].calls[...] == 1
    assert model.layers[0].calls.dtype == jnp.int32
    np.testing.assert_allclose(got_loss, expected_loss, rtol=2e-2)
    full = rj.full_params(grads, like=model)
    for (path, got), (_, want) in zip(nnx.to_flat_state(full), nnx.to_flat_state(expected), strict=True):
        np.testing.assert_allclose(got[...], want[...], atol=2e-2 * np.abs(want[...]).max(), err_msg=str(path))


def test_pytrees():
    params = {"layers": [{"w": np.eye(6, dtype=np.float32)}] * 2, "n": np.arange(3)}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", units="layers/*", precision=BF16)
    seen = []

    def layer(w, x):
        seen.append((w["w"].dtype, x.dtype))
        return x @ w["w"]

    def run(p, x):
        assert p["n"].dtype == jnp.int32
        for w in p["layers"]:
            x = rj.unsharded(layer)(w, x)
        return x

    out = rj.apply(run)(tree, X)
    assert out.dtype == jnp.float32
    assert set(seen) == {(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))}
    np.testing.assert_allclose(out, X, rtol=1e-2)


def test_integers_are_refused():
    with pytest.raises(ValueError, match="param_dtype must be a floating dtype"):
        rj.MixedPrecision("int8")
