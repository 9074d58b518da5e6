"""Loops inside the user's function: what jax's types ask of them, in words, and that nothing turns them off."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from models import make_mesh

import ragged_jax as rj

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = {"w": np.ones(4, np.float32)}


def scanned(mark):
    def loss(params, x):
        body = lambda total, row: (total + row @ params["w"], None)
        return lax.scan(body, mark(jnp.zeros(())), x)[0] / len(x)

    return loss


def looped(mark):
    return lambda params, x: lax.fori_loop(0, 2, lambda i, y: y + (x @ params["w"]).mean(), mark(jnp.zeros(()))) / 2


def branched(mark):
    def loss(params, x):
        return lax.cond(x[0, 0] > 9, lambda: mark(jnp.zeros(())), lambda: (x @ params["w"]).mean())

    return loss


@pytest.mark.parametrize("make", [scanned, looped, branched])
def test_a_carry_made_inside(make):
    tree = rj.shard_tree(W, make_mesh(4), axis="fsdp")
    for transform in (rj.value_and_grad, rj.apply):
        with pytest.raises(TypeError, match=r"(?s)What happened.*rj\.varying\(jnp\.zeros") as caught:
            transform(make(lambda x: x))(tree, X)
        assert isinstance(caught.value.__cause__, TypeError)
    value, grads = rj.value_and_grad(make(rj.varying))(tree, X)
    expected = jax.value_and_grad(make(rj.varying))(W, X)  # where nothing varies it does nothing
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(rj.full_params(grads)["w"], expected[1]["w"], rtol=1e-5)


def test_other_type_errors_are_left_alone():
    tree = rj.shard_tree(W, make_mesh(4), axis="fsdp")

    def wrong(params, x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as caught:
        rj.apply(wrong)(tree, X)
    assert "What happened" not in str(caught.value)


def test_the_types_are_always_checked(monkeypatch):
    """With `check_vma=False` gradients under replicas are wrong without a word."""
    calls, real = [], jax.shard_map
    monkeypatch.setattr(jax, "shard_map", lambda f, **kwargs: calls.append(kwargs) or real(f, **kwargs))
    tree = rj.shard_tree(W, make_mesh(4), axis="fsdp")
    rj.value_and_grad(scanned(rj.varying))(tree, X)
    rj.apply(scanned(rj.varying))(tree, X)
    assert [kwargs["check_vma"] for kwargs in calls] == [True, True]
    for name in rj._WHERE:
        if inspect.isfunction(value := getattr(rj, name)):
            assert not {"check_vma", "check_rep"} & set(inspect.signature(value).parameters), name
