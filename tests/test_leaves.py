"""What the leaves of a tree are, as optimizer transforms learn it when their state is made."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from models import make_mesh, make_sharded

import ragged_jax as rj
from ragged_jax.fsdp import Leaves, leaves_of


class Seen(NamedTuple):
    leaves: Leaves
    mu: optax.Params


def seeing() -> optax.GradientTransformation:
    """Remembers what its parameters are, and checks that they are still that when they are updated."""

    def init(params) -> Any:
        return Seen(leaves_of(params), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None) -> Any:
        assert [x.shape for x in jax.tree.leaves(updates)] == [leaf.shape for leaf in state.leaves]
        return jax.tree.map(jnp.negative, updates), Seen(state.leaves, updates)

    return optax.GradientTransformation(init, update)


def tensors(leaves: Leaves) -> dict[str, str]:
    return {p.tensor.name: leaf.path for leaf in leaves if leaf.of is not None for p in leaf.of.slab.placements}


def test_every_slab_of_a_pytree_is_known():
    params = {"a": jnp.ones((300, 128)), "b": jnp.ones(7), "in": {"w": jnp.ones((5, 3)), "n": jnp.zeros((), int)}}
    tree = rj.shard_tree(params, make_mesh(4), axis="fsdp", units="in")
    leaves = leaves_of({"tree": tree, "other": jnp.ones(3, jnp.bfloat16)})
    assert sorted(tensors(leaves)) == ["a", "b", "in/n", "in/w"]
    assert [(leaf.shape, leaf.dtype) for leaf in leaves if leaf.of is None] == [((3,), "bfloat16")]
    assert tensors(leaves)["a"] == "tree/slabs/a"
    assert leaves == leaves_of({"tree": jax.tree.map(jnp.zeros_like, tree), "other": jnp.ones(3, jnp.bfloat16)})


WRAPS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_an_optimizer_of_a_module_remembers_its_slabs(wrap):
    model, traces = make_sharded(3), []
    want = sorted(t.name for bucket in rj.get_layout(model).buckets for t in bucket.tensors)
    assert sorted(tensors(leaves_of(nnx.state(model, nnx.Param)))) == want

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))

    before = rj.full_params(model)["temperature"].get_value()
    with jax.set_mesh(make_mesh(3)):
        optimizer = nnx.Optimizer(model, wrap(seeing()), wrt=nnx.Param)
        found = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, Leaves))
        (leaves,) = (x for x in found if isinstance(x, Leaves))
        assert sorted(tensors(leaves)) == want
        assert tensors(leaves)["blocks/0/up/kernel"].startswith("blocks/0/")
        for _ in range(2):
            step(model, optimizer)
    assert rj.full_params(model)["temperature"].get_value() < before
    assert len(traces) == 1
