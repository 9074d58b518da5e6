"""Seeing inside: describe, get, norms, find_nonfinite, and the scopes that a profile shows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from models import batches, flat, loss_fn, make_mesh, make_sharded, poison_padding
from rich.console import Console

import ragged_jax as rj
from ragged_jax.adapters._nnx import _units
from ragged_jax.planner import size
from ragged_jax.preflight import hlo_report

pytestmark = pytest.mark.filterwarnings("ignore:these tensors are smaller than one block:UserWarning")
RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": RNG.normal(size=(1001, 64)).astype(np.float32),
    "half": RNG.normal(size=(70, 64)).astype(jnp.bfloat16),
    "layers": {"w": RNG.normal(size=(3, 40, 56)).astype(np.float32), "b": RNG.normal(size=(3, 5)).astype(np.float32)},
    "counts": np.arange(5, dtype=np.int32),
    "nothing": np.zeros((0, 4), np.float32),
    "scalar": np.float32(-4.0),
}
OPTIONS = {"axis": "fsdp", "units": "layers", "stacked": "layers"}


def poisoned(model: nnx.Module) -> nnx.Module:
    for _, module, info in _units(model):
        info.put_slabs(module, poison_padding(info.unit, info.slabs(module)))
    return model


def poisoned_tree(tree: rj.ShardedTree) -> rj.ShardedTree:
    return tree.replace(
        poison_padding(tree.unit, tree.slabs), {name: poisoned_tree(child) for name, child in tree.children.items()}
    )


def norm(x: np.ndarray, stacked: bool = False) -> np.ndarray:
    wide = np.square(np.asarray(x, np.float64))
    return np.sqrt(wide.reshape(len(wide), -1).sum(1) if stacked else wide.sum())


def assert_norms(got, whole: nnx.State, scan: bool) -> None:
    expected = {name: norm(x, scan and name.startswith("blocks")) for name, x in flat(whole).items()}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-6, err_msg=name)
        assert got[name].dtype == jnp.float32


def test_norms_of_a_module_and_of_its_gradients_under_jit():
    model = poisoned(make_sharded(7, rj.rows(32), scan=True))

    @nnx.jit
    def step(model, tokens):
        _, grads = rj.value_and_grad(loss_fn)(model, tokens)
        return grads, rj.norms(grads), rj.norms(model), rj.norms(jax.tree.leaves(grads), like=model)

    grads, of_grads, of_params, of_bare_arrays = step(model, batches(1, 14)[0])
    assert_norms(of_grads, rj.full_params(grads, like=model), scan=True)
    assert_norms(of_bare_arrays, rj.full_params(grads, like=model), scan=True)
    assert_norms(of_params, rj.full_params(model), scan=True)


def test_norms_outside_of_jit():
    model = poisoned(make_sharded(7, rj.rows(32), axis_type=AxisType.Auto))
    assert_norms(rj.norms(model), rj.full_params(model), scan=False)


def test_norms_of_a_pytree_are_one_collective():
    tree = poisoned_tree(rj.shard_tree(PARAMS, make_mesh(7), **OPTIONS))
    got = rj.norms(tree)
    np.testing.assert_allclose(got["layers/w"], norm(PARAMS["layers"]["w"], True), rtol=1e-6)
    np.testing.assert_allclose(got["half"], norm(PARAMS["half"]), rtol=1e-6)  # summed in f32
    np.testing.assert_allclose(got["counts"], norm(PARAMS["counts"]), rtol=1e-6)
    assert got["scalar"] == 4
    assert set(got) == {"embedding", "half", "layers/w", "layers/b", "counts", "nothing", "scalar"}
    report = hlo_report(jax.jit(rj.norms).lower(tree).compile())
    assert {name: c.executed for name, c in report.collectives.items() if c.executed} == {"all-reduce": 1}


def test_norms_say_what_they_cannot_take():
    tree = rj.shard_tree(PARAMS, make_mesh(2), **OPTIONS)
    with pytest.raises(ValueError, match=r"several leaves hold .*embedding"):
        rj.norms({"mu": tree, "nu": tree})
    with pytest.raises(ValueError, match="the tree has 1 leaves"):
        rj.norms(jnp.ones(3), like=tree)


@pytest.mark.parametrize("storage", ["row_major", "tiled"])
def test_a_bad_element_is_found_with_its_device(storage):
    clean = rj.shard_tree(PARAMS, make_mesh(7), **OPTIONS)
    assert rj.find_nonfinite(poisoned_tree(clean)) == []
    bad = jax.tree.map(np.copy, PARAMS)
    bad["embedding"][700, 3] = np.nan
    bad["embedding"][900] = np.inf
    bad["layers"]["w"][2, 39, 55] = -np.inf
    bad["scalar"] = np.float32(np.nan)
    layout = rj.plan(bad, 7, units="layers", stacked="layers", block=rj.tile(8, 8), storage=storage)
    tree = rj.shard_tree(bad, make_mesh(7), plan=layout, **OPTIONS)
    found = {one.tensor: one for one in rj.find_nonfinite(poisoned_tree(tree))}
    assert set(found) == {"embedding", "layers/w", "scalar"}
    assert found["embedding"].index == (700, 3)
    assert found["embedding"].count == 65
    assert found["layers/w"].index == (2, 39, 55)
    assert found["scalar"].index == ()
    for one in found.values():
        assert dict(one.coordinates)["fsdp"] == one.device.id
    assert re.match(r"embedding\[700, 3\] on .* \(fsdp \d\), the first of 65", str(found["embedding"]))
    if storage == "row_major":
        ranges = layout.layout.ranges("embedding")
        (holder,) = [k for k, (start, stop) in enumerate(ranges) if start <= 700 * 64 + 3 < stop]
        assert found["embedding"].device.id == holder


def test_a_bad_gradient_of_a_module_is_found():
    model = make_sharded(5)
    path = ("blocks", "0", "up", "kernel")
    whole = {"/".join(map(str, p)): x for p, x in nnx.to_flat_state(rj.full_params(model))}
    bad = np.array(whole["/".join(path)].get_raw_value())
    bad[17, 33] = np.nan
    grads = rj.full_params(model)
    grads["blocks"][0]["up"]["kernel"] = nnx.Param(bad)
    (found,) = rj.find_nonfinite(rj.shard_like(grads, like=model))
    assert (found.tensor, found.index, found.count) == ("/".join(path), (17, 33), 1)
    (bare,) = rj.find_nonfinite(jax.tree.leaves(rj.shard_like(grads, like=model)), like=model)
    assert bare == found
    with pytest.raises(TypeError, match="cannot run under jit"):
        jax.jit(lambda grads: rj.find_nonfinite(grads))(rj.shard_like(grads, like=model))


def test_get_reads_one_tensor():
    model = make_sharded(7, rj.rows(32))
    whole = flat(rj.full_params(model))
    for name, value in whole.items():
        np.testing.assert_array_equal(rj.get(model, name), value, err_msg=name)
    np.testing.assert_array_equal(rj.get(model, "head/embedding"), whole["embed/embedding"])
    kernels = rj.get(model, "blocks/*/kernel")
    assert set(kernels) == {name for name in whole if name.startswith("blocks/") and name.endswith("/kernel")}
    with pytest.raises(KeyError, match=r"blocks/0/mix/kernl.*blocks/0/mix/kernel"):
        rj.get(model, "blocks/0/mix/kernl")


@pytest.mark.parametrize("shares", [None, (3, 1, 1, 1, 1)])
def test_get_of_a_pytree(shares):
    plan = rj.plan(PARAMS, 5, units="layers", stacked="layers", shares=shares)
    tree = rj.shard_tree(PARAMS, make_mesh(5), plan=plan, **OPTIONS)
    inside = jax.jit(lambda tree: rj.get(tree, "*"))(tree)
    for name, got in rj.get(tree, "*").items():
        want = PARAMS["layers"][name[7:]] if name.startswith("layers/") else PARAMS[name]
        assert got.dtype == np.asarray(want).dtype
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(inside[name], want)


def test_get_where_a_mesh_is_set():
    params, mesh = {"w": np.arange(15.0, dtype=np.float32).reshape(5, 3)}, make_mesh(3)
    tree = rj.shard_tree(params, mesh, axis="fsdp")
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(rj.get(tree, "w"), params["w"])


def test_get_moves_nothing_else():
    tree = rj.shard_tree(PARAMS, make_mesh(7), **OPTIONS)
    report = hlo_report(jax.jit(lambda tree: rj.get(tree, "half")).lower(tree).compile())
    assert report.wire_nbytes <= 4 * PARAMS["half"].nbytes  # the compiler may pad what is cut, and widens bf16
    assert report.wire_nbytes < PARAMS["embedding"].nbytes / 4


def test_describe():
    precision = rj.MixedPrecision("bfloat16", reduce_dtype="float32")
    model = make_sharded(7, rj.rows(32), precision={"blocks/*": precision}, reshard_after_forward=True)
    described, layout = rj.describe(model), rj.get_layout(model)
    assert [b.name for b in described.buckets] == ["", "blocks/0", "blocks/1"]
    assert described.device_nbytes == layout.shard_nbytes
    assert sum(b.padding_nbytes for b in described.buckets) == layout.padding_nbytes
    root, block, _ = described.buckets
    assert root.tied == (("embed/embedding", "head/embedding"),)
    assert (root.reshard, block.reshard) == (False, True)
    assert root.gathered_nbytes == 7 * root.device_nbytes
    assert block.gathered_nbytes == 7 * block.device_nbytes // 2  # in bfloat16
    assert block.precision == precision
    text = str(described)
    assert text == str(rj.describe(model))
    for part in (
        "mesh of fsdp 7",
        layout.fingerprint,
        "(root)",
        "embed/embedding = head/embedding",
    ):
        assert part in " ".join(text.split())
    assert "bfloat16" in text
    assert "blocks/1" not in text  # it is as blocks/0
    assert "(root): float32" in text.splitlines()
    assert "blocks/0 and 1 like it: float32; gathered as bfloat16; gradients reduced as float32" in text.splitlines()
    stack = rj.describe(make_sharded(3, scan=True)).buckets[1]
    assert stack.stack == 2
    assert stack.gathered_nbytes == 3 * stack.device_nbytes // 2


def test_a_description_fits_a_terminal_whatever_the_precision():
    mesh = jax.make_mesh((2, 3), ("replica", "fsdp"), devices=jax.devices()[:6])
    precision = rj.MixedPrecision("bfloat16", reduce_dtype="float32", gather_dtype="float8_e4m3fn")
    tree = rj.shard_tree(
        PARAMS, mesh, **{**OPTIONS, "axis": ("replica", "fsdp")}, precision=precision, label={"layers/w": "matrix"}
    )
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(rj.describe(tree))
    lines = [line.strip() for line in captured.get().splitlines()]
    text, (root, layers) = " ".join(lines), rj.describe(tree).buckets
    (total,) = (line for line in lines if line.startswith("total"))
    rows = lines[lines.index(next(line for line in lines if line.startswith("(root)"))) : lines.index(total)]
    assert [row.split()[0] for row in rows if row] == ["(root)", "layers"]  # a line for each bucket, none is folded
    assert total.split()[:4] == ["total", "2", "0", str(len(PARAMS) + 1)]  # tensors that are sole, that are packed
    assert "mesh of replica 2, fsdp 3, sharded over fsdp, replicated over replica" in text
    assert f"float8_e4m3fn on the wire (at most {size(root.wire_nbytes)})" in text
    (matrix,) = (slab for slab in layers.slabs if slab.placements[0].tensor.label)
    assert f"label matrix: {size(layers.stack * matrix.shard_nbytes)} per device" in lines


@pytest.mark.parametrize("scan", [False, True])
def test_profiles_name_the_units(scan):
    model = make_sharded(2, scan=scan)
    step = nnx.jit(rj.value_and_grad(loss_fn))
    text = step.lower(model, batches(1, 4)[0]).compile().as_text()
    collectives = [line for line in text.splitlines() if re.search(r" (all-gather|reduce-scatter)(-start)?\(", line)]
    for unit in ("root", *(["blocks"] if scan else ["blocks/0", "blocks/1"])):
        for scope, collective in (("unshard", "all-gather"), ("reduce", "reduce-scatter")):
            assert [line for line in collectives if re.search(f"{collective}.*{scope}:{unit}[/)]", line)], scope
