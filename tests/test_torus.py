"""Gathers in two steps, for the slices whose compiler makes a sum of a gather in one."""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import make_mesh

import ragged_jax as rj
from ragged_jax.fsdp._torus import gather_steps


@dataclass(frozen=True)
class Slice:
    """A mesh of TPU chips that are not here, as far as its gathers are concerned."""

    sizes: tuple[int, ...]
    order: tuple[int, ...] = (0, 1, 2)  # of the coordinates, from the slowest to the fastest along the mesh axis
    kind: str = "TPU v5"

    @property
    def devices(self):
        where = np.indices([self.sizes[dim] for dim in self.order]).reshape(len(self.sizes), -1).T
        where = where[:, np.argsort(self.order)]
        found = np.empty(len(where), object)
        found[:] = [
            SimpleNamespace(platform="tpu", device_kind=self.kind, coords=tuple(map(int, at))) for at in where
        ]
        return found

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def shape(self) -> dict[str, int]:
        return {"fsdp": self.size}


def gathered(steps, size: int) -> list[list[int]]:
    """What every chip holds, if each brings its own number: a gather puts the parts of its group in order."""
    held = [[at] for at in range(size)]
    for groups in steps:
        now = list(held)
        for group in groups or [range(size)]:
            for at in group:
                now[at] = [x for other in group for x in held[other]]
        held = now
    return held


@given(st.tuples(*[st.sampled_from([2, 3, 4, 8])] * 3), st.permutations(range(3)))
def test_each_chip_has_all_parts_in_order(sizes, order):
    mesh = Slice(sizes, tuple(order), "TPU v4")
    steps = gather_steps(mesh, "fsdp")  # type: ignore[arg-type]
    assert len(steps) == (2 if mesh.size >= 32 else 1)
    assert gathered(steps, mesh.size) == [list(range(mesh.size))] * mesh.size
    if len(steps) == 2:
        assert {len(group) for group in steps[0]} == {sizes[order[-1]]}  # a whole line of chips


@pytest.mark.parametrize("sizes", [(8, 8, 1), (16, 16, 1), (2, 4, 4)])
def test_one_gather_where_it_stays_one(sizes):
    assert gather_steps(Slice(sizes), "fsdp") == (None,)  # type: ignore[arg-type]


def test_two_steps_train_as_one_does():
    tree = {"w": jax.random.normal(jax.random.key(0), (37, 5)), "b": jax.numpy.ones(5)}
    mesh, x = make_mesh(6), jax.random.normal(jax.random.key(1), (12, 37))
    groups = np.arange(6).reshape(3, 2)
    two = tuple(tuple(map(tuple, part.tolist())) for part in (groups, groups.T))

    def run():
        def loss(params, x):  # a new function each time, which no cache knows
            return ((x @ params["w"] + params["b"]) ** 2).mean()

        for precision in (None, rj.MixedPrecision("bfloat16", gather_dtype="int8")):
            sharded = rj.shard_tree(tree, mesh, axis="fsdp", precision=precision)
            text = jax.jit(rj.value_and_grad(loss)).lower(sharded, x).as_text()
            yield text.count("stablehlo.all_gather"), rj.value_and_grad(loss)(sharded, x)

    once = list(run())
    with patch("ragged_jax.fsdp._torus.gather_steps", lambda mesh, axis: two):
        twice = list(run())
    for (n, (value, grads)), (m, (other, other_grads)) in zip(once, twice, strict=True):
        assert m == 2 * n > 0
        assert value == other
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(grads), jax.device_get(other_grads))
