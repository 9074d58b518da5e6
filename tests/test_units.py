"""Which subtrees of a pytree become units: gathered on their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ragged_jax as rj
from ragged_jax.fsdp._tree import parse

W = jax.ShapeDtypeStruct((4, 3), jnp.float32)
TREE = {
    "layers": [{"mlp": {"up": W, "down": W}, "norm": W}, {"mlp": {"up": W, "down": W}, "norm": W}],
    "head": {"w": W},
}


@pytest.mark.parametrize(
    ("units", "want"),
    [
        (None, ["root"]),
        ("*", ["root", "layers", "head"]),
        ("layers/*", ["root", "layers/0", "layers/1"]),
        (("layers/*", "layers/*/mlp"), ["root", "layers/0", "layers/0/mlp", "layers/1", "layers/1/mlp"]),
        ("*/mlp", ["root", "layers/0/mlp", "layers/1/mlp"]),
        (lambda path, subtree: "w" in subtree, ["root", "head"]),
    ],
)
def test_units(units, want):
    found = list(parse(TREE, units, None).walk())
    assert sorted(part.name or "root" for part in found) == sorted(want)
    names = [name for part in found for name in part.own]
    assert len(names) == len(set(names)) == 7, "each leaf is in one unit"


@pytest.mark.parametrize("units", ["a", lambda path, subtree: path == "a", ("a", "c/*")])
def test_an_object_at_two_paths_is_two_as_jax_sees_it(units):
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    shared = {"w": w}
    params = {"a": shared, "b": shared, "c": {"d": shared, "e": w}}
    root = parse(params, units, None)
    assert list(root.children) == (["a", "c/d"] if isinstance(units, tuple) else ["a"])
    assert list(root.own) == [name for name in ("b/w", "c/d/w", "c/e") if name[:3] not in root.children]

    def loss(params, x, wrap=lambda f: f):
        layer = wrap(lambda p, x: jnp.tanh(x @ p["w"]).sum())
        return layer(params["a"], x) + (x @ params["b"]["w"]).sum() * params["c"]["e"].sum()

    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    tree, x = rj.shard_tree(params, mesh, axis="fsdp", units=units), np.ones((2, 4), np.float32)
    grads = rj.full_params(rj.value_and_grad(lambda p, x: loss(p, x, rj.unsharded) / len(x))(tree, x)[1])
    want = jax.grad(lambda p, x: sum(loss(p, row[None]) for row in x) / len(x))(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), grads, want)


def test_a_plan_that_joins_units_says_what_to_do():
    params = {"layers": [{"w": np.ones((8, 4), np.float32)} for _ in range(4)]}
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    plan = rj.plan(params, 2, units="layers/*", merge=2)
    with pytest.raises(ValueError, match=r"are layers/0\.\.layers/1, .* units layers/0, .*: .*`merge=` joins"):
        rj.shard_tree(params, mesh, axis="fsdp", units="layers/*", plan=plan)
    with pytest.raises(ValueError, match=r"units \(root\), layers/3: plan with the units of the model$"):
        rj.shard_tree(params, mesh, axis="fsdp", units="layers/3", plan=rj.plan(params, 2, units="layers/*"))


def test_patterns_choose_modules_and_no_lists_of_them():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Sequential(nnx.Linear(4, 4, rngs=rngs)) for _ in range(2)])
            self.parts = nnx.Dict(head=nnx.Linear(4, 2, rngs=rngs))

    model = Model(nnx.Rngs(0))
    for units, names in (("*", {"blocks/0", "blocks/1", "parts/head"}), ("*blocks*", {"blocks/0", "blocks/1"})):
        buckets = rj.plan(model, 2, units=units).layout.buckets
        assert {bucket.name for bucket in buckets if bucket.tensors} - {""} == names
    with pytest.raises(ValueError, match="has Linear, Sequential, their paths are blocks/0/layers/0, "):
        rj.plan(model, 2, units=nnx.List)
