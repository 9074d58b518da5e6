"""Gathers in two steps, for the slices whose compiler makes a sum of a gather in one."""

import re
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


@given(st.tuples(*[st.sampled_from([2, 3, 4, 8])] * 3), st.permutations(range(3)), st.integers(1, 24))
def test_each_chip_has_all_parts_in_order(sizes, order, rows):
    mesh = Slice(sizes, tuple(order), "TPU v4")
    steps = gather_steps(mesh, "fsdp", rows)  # type: ignore[arg-type]
    assert len(steps) == (2 if mesh.size >= 32 else 1)
    assert gathered(steps, mesh.size) == [list(range(mesh.size))] * mesh.size
    if len(steps) == 2:
        (first,), line = {len(group) for group in steps[0]}, sizes[order[-1]]
        in_tiles = [n for n in range(line, mesh.size) if mesh.size % n == 0 and n * rows % 8 == 0]
        assert first == (in_tiles[0] if in_tiles else line)  # a whole line of chips, or more


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
    with patch("ragged_jax.fsdp._torus.gather_steps", lambda *_: two):
        twice = list(run())
    for (n, (value, grads)), (m, (other, other_grads)) in zip(once, twice, strict=True):
        assert m == 2 * n > 0
        assert value == other
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(grads), jax.device_get(other_grads))


def test_matrices_behind_each_other_are_gathered_as_one():
    experts = jax.random.normal(jax.random.key(0), (6, 64, 128)) / 8
    x = jax.random.normal(jax.random.key(1), (6, 64))

    def run():
        def loss(params, x):
            return (jax.numpy.einsum("bd,edf->bef", x, params["experts"]) ** 2).mean()

        sharded = rj.shard_tree({"experts": experts}, make_mesh(3), axis="fsdp")
        step = jax.jit(rj.value_and_grad(loss)).lower(sharded, x)
        (gathered,) = re.findall(r"stablehlo.all_gather.*-> tensor<([\dx]*)xf32>", step.as_text())
        return gathered, step.compile()(sharded, x)

    shape, (value, grads) = run()
    with (
        patch("ragged_jax.fsdp._torus.has_tpus", lambda mesh: True),
        patch("ragged_jax.fsdp._torus.gather_steps", lambda *_: (None,)),
    ):
        other_shape, (other, other_grads) = run()
    assert (shape, other_shape) == ("6x64x128", "384x128")
    assert value == other
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(grads), jax.device_get(other_grads))


@pytest.mark.parametrize("kwargs", [{}, {"num_microbatches": 2}])
def test_reductions_with_a_dim_for_the_parts_give_the_same(kwargs):
    """Of matrices with slabs of their own, and of stacks of them."""
    keys = iter(jax.random.split(jax.random.key(0), 3))
    tree = {"w": jax.random.normal(next(keys), (192, 128)) / 14}
    tree |= {"layers": {"w": jax.random.normal(next(keys), (2, 192, 192)) / 14}}
    x = jax.random.normal(next(keys), (12, 192))

    def run():
        def loss(params, x):
            layer = rj.unsharded(lambda w, x: jax.numpy.tanh(x @ w["w"]))
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
            return ((x @ params["w"]) ** 2).mean()

        sharded = rj.shard_tree(tree, make_mesh(3), axis="fsdp", units="layers", stacked="layers")
        step = jax.jit(rj.value_and_grad(loss, **kwargs)).lower(sharded, x)
        kinds = re.findall(r"\(tensor<([\dx]*)xf32>\) -> tensor<([\dx]*)xf32>", "".join(_scatters(step.as_text())))
        return kinds, step.compile()(sharded, x)

    kinds, (value, grads) = run()
    with (
        patch("ragged_jax.fsdp._torus.has_tpus", lambda mesh: True),
        patch("ragged_jax.fsdp._torus.gather_steps", lambda *_: (None,)),
        patch("ragged_jax.fsdp._torus._WIDE", 1),
    ):
        others, (other, other_grads) = run()
    layers = ("2x192x192", "2x64x192") if kwargs else ("192x192", "64x192")
    assert sorted(kinds) == sorted([("192x128", "64x128"), layers])
    layers = ("2x3x64x192", "2x1x64x192") if kwargs else ("3x64x192", "1x64x192")
    assert sorted(others) == sorted([("3x64x128", "1x64x128"), layers])
    assert value == other
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(grads), jax.device_get(other_grads))


def _scatters(text: str) -> list[str]:
    """The types of the reduce-scatters of a program, each after its body."""
    return [part.split("}) : ", 1)[1].split("\n", 1)[0] for part in text.split("stablehlo.reduce_scatter")[1:]]
