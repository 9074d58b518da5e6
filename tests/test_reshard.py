"""Which units gather their weights again in backward; counted before XLA:CPU merges equal gathers."""

import jax
import numpy as np
import pytest
from flax import nnx
from models import make_mesh

import ragged_jax as rj

X = np.ones((4, 6), np.float32)


class Layer(nnx.Module):
    def __init__(self, i):
        self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(i))
        self.mark = nnx.Param(np.zeros(8 * i, np.float32))  # by the size of its shard a layer is known

    def __call__(self, x):
        return nnx.tanh(self.linear(x))


class Deep(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Layer(i) for i in range(12)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gathers(jaxpr, found=()) -> list[int]:
    """The elements of each gathered shard, nested programs included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            found = (*found, eqn.invars[0].aval.size)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found = gathers(inner, found)
    return found


def count(rule) -> list[int]:
    """How often each layer is gathered."""
    model = rj.fully_shard(Deep(), make_mesh(4), axis="fsdp", units=Layer, reshard_after_forward=rule)
    graphdef, state = nnx.split(model)
    loss = lambda model, x: (model(x) ** 2).mean()
    found = gathers(jax.make_jaxpr(lambda s: rj.value_and_grad(loss)(nnx.merge(graphdef, s), X))(state).jaxpr)
    return [found.count(sum(s.shard_numel for s in bucket.slabs)) for bucket in rj.get_layout(model).buckets[1:]]


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
    # Backward needs no weight of the first layer: nothing is differentiated by its input.
    assert count(rule) == [1 if i in kept | {0} else 2 for i in range(12)]


def test_pytrees():
    params = {"layers": [{"w": np.eye(6, dtype=np.float32), "mark": np.zeros(8 * i, np.float32)} for i in range(3)]}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", units="layers/*")

    def loss(p, x):
        for w, reshard in zip(p["layers"], (True, True, False), strict=True):
            x = rj.unsharded(lambda w, x: jax.numpy.tanh(x @ w["w"]), reshard=reshard)(w, x)
        return (x**2).mean()

    found = gathers(jax.make_jaxpr(rj.value_and_grad(loss))(tree, X).jaxpr)
    assert [found.count(9 + 2 * i) for i in range(3)] == [1, 2, 1]


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
