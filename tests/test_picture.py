"""The picture of a layout: drawn without a display, for any number of shards and tensors."""

import builtins

import pytest
from test_planner_plan import llama

from ragged_jax.layout import Layout, TensorSpec, rows
from ragged_jax.planner import Group, draw, plan
from ragged_jax.planner._picture import _distinct, _pieces


def test_every_byte_of_a_shard_is_drawn_once():
    layout = plan(llama(1), 96).layout
    for slab in layout.buckets[0].slabs:
        for k in range(96):
            pieces = list(_pieces(slab, k * slab.shard_numel, (k + 1) * slab.shard_numel))
            assert [start for _, start, _ in pieces] == [0, *(stop for _, _, stop in pieces[:-1])]
            assert pieces[-1][2] == slab.shard_numel
            names = [p.tensor.name for p in layout.shard(k) if p.slab == slab.name]
            assert [name for name, *_ in pieces if name] == names


def test_equal_layers_are_drawn_once():
    assert [(b.name, n) for b, n in _distinct(plan(llama(5), 96).layout)] == [("layers/0", 5)]


@pytest.mark.parametrize("num_shards", [1, 7, 64])
def test_it_draws(tmp_path, num_shards):
    many = tuple(TensorSpec(f"t{i}", (i + 3, 8), "float32", rows(2)) for i in range(300))
    layout = plan([*llama(2), Group("many", many), Group("none", ())], num_shards).layout
    draw(layout, tmp_path / "layout.png")
    assert (tmp_path / "layout.png").read_bytes()[:4] == b"\x89PNG"


def test_uneven_shares(tmp_path):
    draw(plan(llama(1), 3, shares=(2, 2, 1)).layout, tmp_path / "layout.png")


def test_an_empty_layout(tmp_path):
    draw(Layout(2, ()), tmp_path / "layout.svg")


def test_matplotlib_is_asked_for_by_name(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'ragged-jax\[plot\]'"):
        draw(Layout(2, ()), tmp_path / "layout.png")
