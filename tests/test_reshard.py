"""Which units gather their weights again in backward. Counted in the traced program: XLA:CPU merges gathers."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import make_mesh

import ragged_jax as rj

X = np.ones((4, 6), np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return nnx.tanh(self.linear(x))


class Deep(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(12)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gathers(jaxpr, found=()) -> list[str]:
    """The scope of every gather, nested programs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            found = (*found, str(eqn.source_info.name_stack))
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found = gathers(inner, found)
    return found


def count(rule) -> dict[int, int]:
    """By layer, how often it is gathered."""
    model = rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=Layer, reshard_after_forward=rule)
    graphdef, state = nnx.split(model)
    loss = lambda model, x: (model(x) ** 2).mean()
    step = lambda state: rj.value_and_grad(loss)(nnx.merge(graphdef, state), X)
    found = [scope.split("unshard:layers/")[1].split("/")[0] for scope in gathers(jax.make_jaxpr(step)(state).jaxpr)]
    return {i: found.count(str(i)) for i in range(12)}


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (True, set()),
        (False, set(range(12))),
        (0, set()),
        (3, {9, 10, 11}),
        ({"layers/1?": False}, {10, 11}),
        ({"layers/3": True, "layers/?": False}, set(range(10)) - {3}),
    ],
)
def test_units_that_are_kept_are_gathered_once(rule, kept):
    assert count(rule) == {i: 1 if i in kept else 2 for i in range(12)}


def test_pytrees():
    params = {"layers": [{"w": np.eye(6, dtype=np.float32)} for _ in range(2)]}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", units="layers/*")

    def loss(p, x):
        for w, reshard in zip(p["layers"], (True, False), strict=True):
            x = rj.unsharded(lambda w, x: jax.numpy.tanh(x @ w["w"]), reshard=reshard)(w, x)
        return (x**2).mean()

    found = gathers(jax.make_jaxpr(rj.value_and_grad(loss))(tree, X).jaxpr)
    assert [sum(f"layers/{i}" in scope for scope in found) for i in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [
        ({"layer/*": False}, ValueError, r"reshard_after_forward: the patterns 'layer/\*' match nothing"),
        (13, ValueError, "the last 13 of 12 units"),
        (-1, ValueError, "-1"),
        ({"layers/*": 2}, TypeError, "neither a bool"),
        ("layers/*", TypeError, "neither a bool"),
    ],
)
def test_rules_that_mean_nothing(rule, error, match):
    with pytest.raises(error, match=match):
        rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=Layer, reshard_after_forward=rule)
