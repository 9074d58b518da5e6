"""Frozen parameters and LoRA: no gradient, no reduction, no optimizer state, no decay; and unfreezing later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import assert_close, device_nbytes, flat, make_mesh

import ragged_jax as rj
from ragged_jax.preflight import hlo_report

TOKENS = np.random.default_rng(0).integers(0, 61, (4, 12, 7))
LABEL = {"*lora*": "lora"}
LORA = rj.labelled("lora")


class Block(nnx.Module):
    def __init__(self, rngs, width=24, rank=2):
        self.mix = nnx.LoRALinear(width, width, lora_rank=rank, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 50, rngs=rngs)
        self.down = nnx.Linear(50, width, rngs=rngs)
        self.mix.lora.lora_b[...] = jax.random.normal(rngs.params(), (rank, width)) / 5

    def __call__(self, x):
        mean = jnp.cumsum(self.mix(x), 1) / jnp.arange(1, 1 + x.shape[1])[:, None]
        return x + self.down(nnx.gelu(self.up(x + mean)))


class GPT(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(61, 24, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def is_lora(path, _):
    return any("lora" in str(key) for key in path)


def sharded(label=LABEL):
    return rj.fully_shard(GPT(), make_mesh(3), axis="fsdp", units=Block, label=label)


def stepper(model, wrt, value_and_grad):
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-4, weight_decay=0.1), wrt=wrt)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, grads = value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))(model, tokens)
        optimizer.update(model, grads)
        return loss

    return optimizer, step


def train(model, wrts, value_and_grad):
    """Two steps with each filter, a new optimizer for each."""
    losses = []
    for wrt, batches in zip(wrts, (TOKENS[:2], TOKENS[2:]), strict=True):
        optimizer, step = stepper(model, wrt, value_and_grad)
        losses += [float(step(model, optimizer, tokens)) for tokens in batches]
    return losses


def test_lora_and_then_all_of_it_as_on_one_device():
    whole, model = GPT(), sharded()
    expected = train(whole, (nnx.All(nnx.Param, is_lora), nnx.Param), nnx.value_and_grad)
    layout = rj.get_layout(model)
    with jax.set_mesh(make_mesh(3)):  # otherwise the second steps compile again
        got = train(model, (LORA, nnx.Param), rj.value_and_grad)
    np.testing.assert_allclose(got, expected, rtol=2e-5)
    assert_close(flat(rj.full_params(model)), flat(nnx.state(whole, nnx.Param)), rtol=1e-4)
    assert rj.get_layout(model) == layout


@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}])
def test_frozen_slabs_cost_nothing(kwargs):
    model = sharded()
    before = flat(rj.full_params(model))
    lora = [s for b in rj.get_layout(model).buckets for s in b.slabs if s.placements[0].tensor.label.endswith("lora")]
    value_and_grad = lambda *a, **k: rj.value_and_grad(*a, **k, **kwargs)
    optimizer, step = stepper(model, LORA, value_and_grad)
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert set(device_nbytes(moments).values()) == {2 * sum(slab.shard_nbytes for slab in lora)}
    report = hlo_report(step.lower(model, optimizer, TOKENS[0]).compile().compiled)
    assert report.collectives["reduce-scatter"].executed == len(lora) == 1
    step(model, optimizer, TOKENS[0])
    after = flat(rj.full_params(model))
    assert {name for name in before if (before[name] != after[name]).any()} == {n for n in before if "lora" in n}
    optimizer, step = stepper(model, nnx.Param, value_and_grad)
    report = hlo_report(step.lower(model, optimizer, TOKENS[0]).compile().compiled)
    assert report.collectives["reduce-scatter"].executed > 1  # and the count can tell


def test_labels():
    model = sharded(label=lambda path: "first" if path.startswith("blocks/0") else "")
    assert {is_first[1] for is_first, _ in nnx.to_flat_state(nnx.state(model, rj.labelled("first")))} == {0}
    assert rj.plan(GPT(), 3, units=Block, label=LABEL).layout == rj.get_layout(sharded())
    with pytest.raises(ValueError, match=r"label: the patterns '\*lorra\*' match nothing"):
        sharded({"*lorra*": "lora"})
    with pytest.raises(TypeError, match=r"got 3; a label is a string"):
        sharded({"*lora*": 3})
    with pytest.raises(ValueError, match=r"share one(?s:.)*label="):
        rj.value_and_grad(loss_fn, argnums=nnx.DiffState(0, lambda path, _: "up" in path))(sharded(), TOKENS[0])


PARAMS = {
    "layers": {f"{i}": {"w": np.eye(6, dtype=np.float32), "a": np.ones((6, 1), np.float32)} for i in range(2)},
    "head": np.ones((6, 2), np.float32),
    "head_a": np.full(2, 0.5, np.float32),
}
X = np.random.default_rng(2).normal(size=(6, 6)).astype(np.float32)


def tree_loss(params, x, wrap=lambda f: f):
    for w in params["layers"].values():
        x = wrap(lambda w, x: jnp.tanh(x @ (w["w"] + 0.1 * w["a"])))(w, x)
    return ((x @ params["head"] + params["head_a"]) ** 2).mean()


@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}])
def test_pytrees(kwargs):
    label = {"*a": "a"}
    tree = rj.shard_tree(PARAMS, make_mesh(3), axis="fsdp", units="layers/*", label=label)
    part, rest = rj.partition(tree, "*a")
    assert sorted(x.size for x in jax.tree.leaves(part)) == [3, 6, 6]
    assert jax.tree.structure(rj.combine(part, rest)) == jax.tree.structure(tree)
    np.testing.assert_array_equal(rj.get(part, "*")["head_a"], PARAMS["head_a"])
    with pytest.raises(KeyError, match=r"'head'; there are head_a"):
        rj.get(part, "head")
    loss = lambda part, rest, x: tree_loss(rj.combine(part, rest), x, rj.unsharded)
    run = jax.jit(rj.value_and_grad(loss, **kwargs))
    value, grads = run(part, rest, X)
    expected_value, expected = jax.value_and_grad(tree_loss)(PARAMS, X)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    full = rj.full_params(grads)
    assert full["head"] is None
    np.testing.assert_allclose(full["head_a"], expected["head_a"], rtol=1e-5)
    for i in "01":
        assert full["layers"][i]["w"] is None
        np.testing.assert_allclose(full["layers"][i]["a"], expected["layers"][i]["a"], rtol=1e-5, atol=1e-7)
    assert hlo_report(run.lower(part, rest, X).compile()).collectives["reduce-scatter"].executed == 3
    state = optax.adamw(1e-2).init(part)
    assert sum(x.size for x in jax.tree.leaves(state)) == 2 * 15 + 1
    # Later: all of it.
    _, grads = jax.jit(rj.value_and_grad(lambda p, x: tree_loss(p, x, rj.unsharded), **kwargs))(
        rj.combine(part, rest), X
    )
    full = rj.full_params(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), full, expected)


def test_a_partition_that_tears_a_slab_or_is_empty():
    tree = rj.shard_tree(PARAMS, make_mesh(3), axis="fsdp", units="layers/*")
    with pytest.raises(
        ValueError, match=r"layers/0/a \(chosen\) with layers/0/w(?s:.)*layers/1/a \(chosen\)(?s:.)*label="
    ):
        rj.partition(tree, ("*a", "nothing"))
    with pytest.raises(ValueError, match=r"chooses nothing; the tensors are .*layers/0/w"):
        rj.partition(tree, lambda path: False)
