"""What backward does to units, as jax has it, before XLA:CPU merges equal gathers and drops barriers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from models import make_mesh

import ragged_jax as rj
from ragged_jax.fsdp import drop_unsharded
from ragged_jax.fsdp._rules import layer_names
from ragged_jax.layout import Bucket, Layout

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


def equations(jaxpr):
    """Nested programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def gathers(jaxpr) -> list[int]:
    """The elements of each gathered shard."""
    return [eqn.invars[0].aval.size for eqn in equations(jaxpr) if eqn.primitive.name == "all_gather"]


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


def test_masks_of_floats_are_kept_and_those_of_integers_made_again():
    def masks(mask) -> int:
        run = jax.checkpoint(lambda x: jnp.where(mask(x), jnp.sin(x), 0).sum(), policy=drop_unsharded)
        kept = jax.tree.leaves(jax.vjp(run, jnp.arange(12.0).reshape(3, 4))[1])
        return [x.shape for x in kept if x.dtype == bool].count((3, 4))

    labels = jnp.array([2, 0, 1])
    at = lambda x: jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == labels[:, None]
    assert masks(lambda x: x > 3) == 1
    assert masks(at) == 0
    assert masks(lambda x: ~at(x) & (x > 3)) == 1, "of the two, the one of floats"


WIDE = 40  # of the head
OUTER = {"axis": "fsdp", "units": ("head", "layers"), "reshard_after_forward": False}


class NnxModel(nnx.Module):
    def __init__(self, scan):
        layer = lambda key: nnx.Linear(6, 6, rngs=nnx.Rngs(params=key))
        keys = jax.random.split(jax.random.key(0), 3)
        self.layers = nnx.vmap(layer)(keys) if scan else nnx.List([layer(key) for key in keys])
        self.head = nnx.Linear(6, WIDE, rngs=nnx.Rngs(0))

    def __call__(self, x):
        if not isinstance(self.layers, nnx.Linear):
            return self.head(self.layers[2](self.layers[1](self.layers[0](x))))
        return self.head(nnx.scan(lambda w, x: w(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x))


class LinenModel(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if not self.scan:
            for i in range(3):
                x = nn.Dense(6, name=f"layers_{i}")(x)
            return nn.Dense(WIDE, name="head")(x)
        scan = nn.scan(
            lambda w, x, _: (w(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.Dense(WIDE, name="head")(scan(nn.Dense(6, name="layers"), x, None)[0])


def barriers(kind: str, scan: bool) -> list[list[tuple[int, ...]]]:
    """The shapes of what each barrier of a step holds together."""
    mesh = make_mesh(4)
    stacked = {"stacked": "layers"} if scan else {}
    if kind == "nnx":
        names = OUTER["units"] if scan else ("head", "layers/*")
        model = rj.fully_shard(NnxModel(scan), mesh, **OUTER | {"units": names}, **stacked)
        graphdef, state = nnx.split(model)
        step = lambda s, x: rj.value_and_grad(lambda model, x: (model(x) ** 2).mean())(nnx.merge(graphdef, s), x)
    elif kind == "linen":
        model = LinenModel(scan)
        state = model.init(jax.random.key(0), X)["params"]
        state = rj.shard_tree(state, mesh, **OUTER | {"units": ("head", "layers*")}, **stacked)
        step = rj.value_and_grad(lambda p, x: (model.apply({"params": p}, x) ** 2).mean())
    else:
        layers = np.ones((3, 6, 6), np.float32)
        state = {"head": {"w": np.ones((6, WIDE), np.float32)}}
        state |= {"layers": {"w": layers} if scan else [{"w": w} for w in layers]}
        state = rj.shard_tree(state, mesh, **OUTER | {"units": ("head", "layers" if scan else "layers/*")}, **stacked)
        layer = rj.unsharded(lambda w, x: x @ w["w"])

        def loss(p, x):
            if scan:
                x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["layers"])
            else:
                for w in p["layers"]:
                    x = layer(w, x)
            return (layer(p["head"], x) ** 2).mean()

        step = rj.value_and_grad(loss)
    found = [eqn for eqn in equations(jax.make_jaxpr(step)(state, X).jaxpr) if eqn.primitive.name.endswith("barrier")]
    return [[x.aval.shape for x in eqn.outvars] for eqn in found]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("kind", ["nnx", "linen", "pytree"])
def test_beside_layers_gradients_are_reduced_before_backward_goes_on(kind, scan):
    """The gradient of the head's input is handed to the layers together with the shards of those of its weights.

    The layers have no barrier of their own: the reduction of one may run beside the next.
    """
    (held,) = barriers(kind, scan)
    assert (1, 6) in held, "the gradient of this device's part of the batch"
    assert sum(np.prod(shape) for shape in held if shape != (1, 6)) == -(-(6 * WIDE + WIDE * (kind != "pytree")) // 4)


WIDER = np.ones((6, 9), np.float32)
LAYER, OTHER, STACK = ({"w": np.ones(shape, np.float32)} for shape in ((4, 4), (5, 4), (3, 4, 4)))


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"embed": OTHER, "layers": [LAYER, LAYER], "head": LAYER}, {"layers/0", "layers/1", "head"}),
        ({"embed": OTHER, "stack": STACK, "layers": [OTHER, OTHER]}, {"stack"}),
        ({"embed": OTHER, "head": LAYER}, set()),
        ({"embed": OTHER, "layers": [LAYER, {"w": np.ones((4, 6), np.float32)}, LAYER], "head": {"w": WIDER}}, set()),
    ],
)
def test_layers_are_stacked_units_or_else_those_that_have_others_like_them(tree, names):
    units = ("embed", "stack", "layers/*", "head")
    assert layer_names(rj.plan(tree, 2, units=units, stacked="stack" if "stack" in tree else None).layout) == names
    assert layer_names(Layout(2, (Bucket("", ()), Bucket("dropout", ())))) == set(), "what has no parameters is none"


def test_beside_layers_with_replicas():
    params = {"head": {"w": np.eye(6, 5, dtype=np.float32)}, "layers": {"w": np.ones((3, 6, 6), np.float32) / 6}}
    mesh = jax.make_mesh((2, 2), ("replica", "fsdp"), devices=jax.devices()[:4])
    axes = {"axis": ("replica", "fsdp"), "units": ("head", "layers"), "stacked": "layers"}

    def loss(p, x):
        layer = rj.unsharded(lambda w, x: x @ w["w"])
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, p["layers"])
        return (layer(p["head"], x) ** 2).mean()

    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    value, grads = jax.jit(rj.value_and_grad(loss))(rj.shard_tree(params, mesh, **axes), x)
    want, expected = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), rj.full_params(grads), expected)


def test_forward_mode_goes_through_a_unit_beside_a_scan_by_its_inputs():
    params = {"layers": {"w": jnp.zeros((2, 6, 6))}, "head": {"w": jnp.arange(18.0).reshape(6, 3) / 9}}
    tree = rj.shard_tree(params, make_mesh(2), axis="fsdp", units=("layers", "head"), stacked="layers")

    def loss_fn(head, params, x):
        """A penalty on how the output changes with the input."""
        return (jax.jvp(lambda x: head(params["head"], x), (x,), (jnp.ones_like(x),))[1] ** 2).mean()

    def head(params, x):
        return jnp.sin(x @ params["w"])

    x = jnp.linspace(0, 1, 24).reshape(4, 6)
    loss, grads = jax.jit(rj.value_and_grad(partial(loss_fn, rj.unsharded(head))))(tree, x)
    want, wanted = jax.jit(jax.value_and_grad(partial(loss_fn, head)))(params, x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(rj.full_params(grads)["head"]["w"], wanted["head"]["w"], rtol=1e-4, atol=1e-6)


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
