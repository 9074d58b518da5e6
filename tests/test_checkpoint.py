"""Checkpoints by tensor: any layout to any other, bit for bit, and as plain numpy; the files' format."""

import json
import math
import os
from functools import partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ragged_jax.checkpoint import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointError,
    Manifest,
    Part,
    TensorEntry,
    _directory,
    _safetensors,
    layer_name,
    read_shard,
    read_tensor,
    shard_parts,
    slab_tensors,
)
from ragged_jax.fsdp._slabs import slab_of
from ragged_jax.layout import Layout, TensorSpec, elements, rows, tile, whole
from ragged_jax.planner import Group, bucket_costs, hardware, plan, redistribution

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "bool"]
BLOCKS = [elements(1), elements(6), rows(2), tile(2, 3), whole()]


@pytest.fixture(scope="module", autouse=True)
def no_waiting_for_the_disk():
    """What is read here is in the page cache; `test_checkpoint_faults.py` is about the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits of that type, NaNs among them."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    size = numpy_dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(math.prod(shape) * size), numpy_dtype(dtype)).reshape(shape)


@st.composite
def models(draw) -> list[tuple[str, tuple[int, ...], str, int | None]]:
    """Tensors of a root and of two layers that may be stacked: (bucket, shape, dtype, layers)."""
    shape = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    tensors = draw(st.lists(st.tuples(shape, st.sampled_from(DTYPES)), min_size=1, max_size=4))
    inner = draw(st.lists(st.tuples(shape, st.sampled_from(DTYPES)), max_size=3))
    return [("", s, d, None) for s, d in tensors] + [("layers", s, d, 2) for s, d in inner]


def groups_of(model, stacked: bool, block) -> list[Group]:
    root = Group("", tuple(TensorSpec(f"t{i}", s, d, block) for i, (b, s, d, _) in enumerate(model) if not b))
    inner = [(i, s, d) for i, (b, s, d, _) in enumerate(model) if b]
    if not inner:
        return [root]
    if stacked:
        return [root, Group("layers", tuple(TensorSpec(f"layers/t{i}", s, d, block) for i, s, d in inner), 2)]
    return [
        root,
        *(
            Group(f"layers/{k}", tuple(TensorSpec(f"layers/{k}/t{i}", s, d, block) for i, s, d in inner))
            for k in (0, 1)
        ),
    ]


@st.composite
def layouts(draw, model) -> Layout:
    num_shards = draw(st.integers(1, 8))
    return plan(
        groups_of(model, draw(st.booleans()), draw(st.sampled_from(BLOCKS))),
        num_shards,
        storage=draw(st.sampled_from(["row_major", "tiled"])),
        axis_order=draw(st.sampled_from(["natural", "auto"])),
        shares=draw(st.sampled_from([None, tuple(1 + k % 2 for k in range(num_shards))])),
        min_slab_nbytes=draw(st.sampled_from([0, 64])),
    ).layout


def values_of(layout: Layout, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Every tensor of a layout by its name in a checkpoint."""
    return {
        layer_name(bucket, tensor.name, layer): random_array(rng, tensor.shape, tensor.dtype)
        for bucket in layout.buckets
        for tensor in bucket.tensors
        for layer in range(bucket.num_copies)
    }


def whole_slabs(layout: Layout, values: dict[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """The slabs of a layout, `[layers, parts, elements of a part]`, from the tensors: by the runtime's own code."""
    slabs = {}
    for bucket in layout.buckets:
        for slab in bucket.slabs:
            layers = [
                slab_of(
                    slab,
                    {p.tensor.name: values[layer_name(bucket, p.tensor.name, k)] for p in slab.placements},
                    layout.num_parts,
                    None,
                ).reshape(layout.num_parts, -1)
                for k in range(bucket.num_copies)
            ]
            slabs[bucket.name, slab.name] = np.stack(layers)
    return slabs


def shards_of(layout: Layout, values: dict[str, np.ndarray]) -> list[dict[tuple[str, str], np.ndarray]]:
    """For each shard its buffers."""
    wholes, ends = whole_slabs(layout, values), np.cumsum([0, *(layout.shares or (1,) * layout.num_shards)])
    return [{at: x[:, low:high].reshape(len(x), -1) for at, x in wholes.items()} for low, high in pairwise(ends)]


def save_layout(path, layout: Layout, values: dict[str, np.ndarray], step: int = 1, num_ranks: int = 1) -> Checkpoint:
    """What the shards hold, with padding poisoned where the type has NaNs, saved by one rank."""
    tensors = {n: t for b in layout.buckets for s in b.slabs for n, t in slab_tensors(b, s).items()}
    parts = [p for k, buffers in enumerate(shards_of(layout, values)) for p in shard_parts(layout, k, buffers)]
    return Checkpoint(CheckpointDirectory(path).save(step, tensors, parts, layouts={"": layout}))


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


@given(st.data())
def test_any_layout_to_any_other(tmp_path_factory, data):
    model = data.draw(models())
    saved, wanted = data.draw(layouts(model)), data.draw(layouts(model))
    values = values_of(saved, np.random.default_rng(data.draw(st.integers(0, 9))))
    assert values.keys() == values_of(wanted, np.random.default_rng(0)).keys()
    with save_layout(tmp_path_factory.mktemp("any"), saved, values) as checkpoint:
        assert checkpoint.verify() == []
        assert checkpoint.layouts == {"": saved}
        for name, value in values.items():
            assert same_bits(checkpoint.read(name), value), name
        for k, want in enumerate(shards_of(wanted, values)):
            got = read_shard(checkpoint, wanted, k)
            assert got.keys() == want.keys()
            for at, buffer in want.items():
                assert got[at].tobytes() == buffer.tobytes(), (k, at)


@given(st.data())
def test_boxes(tmp_path_factory, data):
    """A tensor saved in boxes, as an array sharded over several dims is, read by other boxes."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3).map(tuple))
    value = random_array(np.random.default_rng(0), shape, "bfloat16")

    def boxes():
        cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        grids = np.meshgrid(*[np.arange(len(c) - 1) for c in cuts], indexing="ij")
        index = np.stack([g.ravel() for g in grids], 1)
        return [tuple((cuts[d][i], cuts[d][i + 1]) for d, i in enumerate(row)) for row in index.tolist()]

    def part(box):
        return value[tuple(slice(*span) for span in box)]

    parts = [Part("w", box, np.ascontiguousarray(part(box))) for box in boxes()]
    folder = CheckpointDirectory(tmp_path_factory.mktemp("boxes"))
    with Checkpoint(folder.save(0, {"w": TensorEntry("bfloat16", shape)}, parts)) as checkpoint:
        assert same_bits(checkpoint.read("w"), value)
        for box in boxes():
            assert same_bits(checkpoint.read_region("w", box, shape), np.ascontiguousarray(part(box)))


def save(path, values: dict[str, np.ndarray], step: int = 1, **kwargs) -> Checkpoint:
    tensors = {name: TensorEntry(str(x.dtype), x.shape) for name, x in values.items()}
    parts = [Part(name, ((0, x.size),), x) for name, x in values.items()]
    return Checkpoint(CheckpointDirectory(path).save(step, tensors, parts, **kwargs))


def test_stacked_and_listed_plain_tensors_are_the_same(tmp_path):
    stack = np.arange(24.0).reshape(3, 4, 2)
    with save(tmp_path / "stack", {"layers/w": stack}) as checkpoint:
        for layer in range(3):
            got = checkpoint.read_region(f"layers/{layer}/w", ((1, 4), (0, 2)), (4, 2))
            np.testing.assert_array_equal(got, stack[layer, 1:])
        with pytest.raises(CheckpointError, match="no tensor 'layers/3/w'"):
            checkpoint.sources("layers/3/w", (4, 2))
    with save(tmp_path / "list", {f"layers/{i}/w": x for i, x in enumerate(stack)}) as checkpoint:
        got = checkpoint.read_region("layers/w", ((1, 3), (2, 4), (0, 1)), stack.shape)
        np.testing.assert_array_equal(got, stack[1:, 2:, :1])
        for layers in (2, 4):
            message = rf"layers/w: saved with shape \(3, 4, 2\), wanted with \({layers}, 4, 2\)"
            with pytest.raises(CheckpointError, match=message):
                checkpoint.read_region("layers/w", ((0, 1), (0, 4), (0, 2)), (layers, 4, 2))


def test_the_files_open_with_safetensors(tmp_path):
    layout = plan([Group("a/b", (TensorSpec("w", (5, 3), "bfloat16"), TensorSpec("b", (7,), "float32")))], 3).layout
    values = values_of(layout, np.random.default_rng(0))
    checkpoint = save_layout(tmp_path, layout, values)
    path = checkpoint.path / "a.b.00000.safetensors"
    with safe_open(path, "np") as file:
        for name, value in values.items():
            assert same_bits(file.get_tensor(name), value)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert all((start + entry["data_offsets"][0]) % 64 == 0 for name, entry in header.items() if name in values)
    for name, entry in checkpoint.tensors.items():  # the manifest alone is enough, too
        (piece,) = entry.pieces
        data = path.read_bytes()[piece.offset : piece.offset + entry.nbytes]
        assert data == values[name].tobytes()


def test_padding_is_never_written(tmp_path):
    layout = plan(
        [Group("", (TensorSpec("w", (5, 7), "float32", rows(1)), TensorSpec("b", (3,), "float32")))], 4
    ).layout
    assert layout.padding_nbytes > 0
    values = values_of(layout, np.random.default_rng(0))
    shards = shards_of(layout, values)
    for k, buffers in enumerate(shards):
        used = {at: np.zeros(x.shape[1], bool) for at, x in buffers.items()}
        for piece in layout.shard(k):
            used[piece.bucket, piece.slab][piece.offset : piece.offset + piece.stop - piece.start] = True
        for at, x in buffers.items():
            x[:, ~used[at]] = np.nan
    tensors = {n: t for b in layout.buckets for s in b.slabs for n, t in slab_tensors(b, s).items()}
    parts = [part for k in range(4) for part in shard_parts(layout, k, shards[k])]
    assert sum(part.data.nbytes for part in parts) == layout.payload_nbytes
    with Checkpoint(CheckpointDirectory(tmp_path).save(1, tensors, parts)) as checkpoint:
        assert all(same_bits(checkpoint.read(name), value) for name, value in values.items())


def test_scalars_empty_tensors_attributes_and_metadata(tmp_path):
    values = {
        "step": np.array(12345678901),
        "flag": np.array(True),
        "pi": np.array(math.pi),
        "z": np.array(1 + 2j),
        "nothing": np.zeros((0, 4), np.float32),
    }
    tensors = {n: TensorEntry(str(x.dtype), x.shape, attributes={"block": "256"}) for n, x in values.items()}
    parts = [Part(name, ((0, x.size),), x, "-") for name, x in values.items() if name != "pi"]
    parts.append(Part("pi", (), values["pi"]))  # a box without dims
    metadata = {"position": [3, 4096], "rng": "a state", "lr": 0.1, "none": None}
    path = CheckpointDirectory(tmp_path).save(7, tensors, parts, metadata=metadata)
    with Checkpoint(path) as checkpoint:
        assert (checkpoint.step, checkpoint.metadata) == (7, metadata)
        assert checkpoint.entry("flag").attributes == {"block": "256"}
        assert len(checkpoint) == 5
        for name, value in values.items():
            assert same_bits(checkpoint.read(name), value)
    assert read_tensor(path, "step") == 12345678901


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    """A shard of one of eight reads its eighth and at most a chunk more at each end."""
    import os

    spec = TensorSpec("w", (8 << 10, 1 << 10), "float32")
    old, new = (plan([Group("", (spec,))], n).layout for n in (3, 8))
    value = np.arange(8 << 20, dtype=np.float32).reshape(8 << 10, 1 << 10)
    with save_layout(tmp_path, old, {"w": value}) as checkpoint:
        nbytes, real = [], os.preadv

        def counted(descriptor, buffers, offset):
            nbytes.append(real(descriptor, buffers, offset))
            return nbytes[-1]

        monkeypatch.setattr(os, "preadv", counted)
        got = read_shard(checkpoint, new, 5)["", "w"]
        assert np.array_equal(got, value[5 << 10 : 6 << 10].reshape(-1))
        assert value.nbytes / 8 <= sum(nbytes) <= value.nbytes / 8 + (2 << 20)


@pytest.mark.parametrize(
    ("region", "data", "message"),
    [
        (((0, 4),), np.zeros(4, np.float32), "w: elements 4 to 6 of 6 are missing"),
        (((0, 6),), np.zeros(5, np.float32), r"w: \(\(0, 6\),\) of float32 are 24 bytes, given 20"),
        (((0, 7),), np.zeros(7, np.float32), "no part of shape"),
        (((0, 2), (0, 3), (0, 1)), np.zeros(6, np.float32), "no part of shape"),
    ],
)
def test_bad_parts_are_refused(tmp_path, region, data, message):
    folder = CheckpointDirectory(tmp_path)
    with pytest.raises(ValueError, match=message):
        folder.save(1, {"w": TensorEntry("float32", (2, 3))}, [Part("w", region, data)])
    assert list(tmp_path.iterdir()) == []


def test_what_no_file_can_hold_is_refused(tmp_path):
    for name in ("", "__metadata__", "~fill/1", "a\ud800"):
        with pytest.raises(ValueError, match="no tensor can be called"):
            save(tmp_path, {name: np.zeros(1)})
    with pytest.raises(ValueError, match="not JSON compliant"):
        save(tmp_path, {"w": np.zeros(1)}, metadata={"loss": math.nan})
    deep: list = []
    for _ in range(300):
        deep = [deep]
    for unreadable in (os.fsdecode(b"/data/\xff"), deep):
        with pytest.raises(ValueError, match="could not be read again"):
            save(tmp_path, {"w": np.zeros(1)}, metadata={"position": unreadable})
    assert not list(tmp_path.iterdir())
    for step, name in enumerate(("ü/重み", "../../w", "/abs", "a//b", "a\nb", "x" * 3000)):
        with save(tmp_path, {name: np.ones(3)}, step) as checkpoint:
            assert np.array_equal(checkpoint.read(name), np.ones(3))
            (path,) = checkpoint.path.glob("*.safetensors")
            with safe_open(path, "np") as file:
                assert np.array_equal(file.get_tensor(name), np.ones(3))


def test_elements_that_are_there_twice(tmp_path):
    parts = [Part("w", ((0, 4),), np.zeros(4, np.float32)), Part("w", ((3, 6),), np.zeros(3, np.float32))]
    with pytest.raises(CheckpointError, match="w: elements 3 to 4 are there twice"):
        CheckpointDirectory(tmp_path).save(1, {"w": TensorEntry("float32", (6,))}, parts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["files"][0].update(name="../evil"), "not a file name"),
        (lambda d: d["files"][0].update(name="/etc/passwd"), "not a file name"),
        (lambda d: d["files"][0].update(crc32=[]), "0 checksums do not make"),
        (lambda d: d["files"].append(dict(d["files"][0])), "two files have the same name"),
        (lambda d: d["tensors"]["w"].update(shape=[2**40, 2**40]), "2\\*\\*53"),
        (lambda d: d["tensors"]["w"].update(shape=[-2, 3]), "at least 0"),
        (lambda d: d["tensors"]["w"].update(dtype="float7"), "unknown dtype"),
        (lambda d: d["tensors"]["w"].update(axis_order=[0, 0]), "axis_order"),
        (lambda d: d["tensors"]["w"].update(tile=[0, 2]), "integers of at least 1"),
        (lambda d: d["tensors"]["w"]["pieces"][0].__setitem__(0, 5), "lies in file 5 of 1"),
        (lambda d: d["tensors"]["w"]["pieces"][0].__setitem__(1, 2**62), "not inside"),
        (lambda d: d["tensors"]["w"]["pieces"][0].__setitem__(1, -8), "not inside"),
        (lambda d: d["tensors"]["w"]["pieces"][0].__setitem__(2, [[0, 5]]), None),
        (lambda d: d["tensors"]["w"].update(surprise=1), "surprise"),
        (lambda d: d.update(version=2), "upgrade"),
        (lambda d: d.update(format="other"), "not a checkpoint manifest"),
        (lambda d: d.update(step="1"), "step"),
        (lambda d: d.update(chunk_nbytes=0), "too small"),
        (lambda d: d.update(chunk_nbytes=2**40), "too large"),
        (lambda d: d.update(step=2**63), "not a number from 0"),
    ],
)
def test_a_hostile_manifest(tmp_path, change, message):
    """Sealed properly, so that only the checks of its contents can refuse it."""
    checkpoint = save(tmp_path, {"w": np.zeros((2, 3), np.float32)})
    document = json.loads((checkpoint.path / "manifest.json").read_bytes())
    del document["blake2b"]
    change(document)
    from ragged_jax.checkpoint._manifest import _digest

    body = json.dumps(document).removesuffix("}").encode()
    sealed = body + f',"blake2b":"{_digest(body)}"}}\n'.encode()
    (checkpoint.path / "manifest.json").write_bytes(sealed)
    with pytest.raises(CheckpointError, match=message or "elements 5 to 6 of 6 are missing"):
        Checkpoint(checkpoint.path)


def test_checksums_are_those_of_zlib():
    import zlib

    from ragged_jax.checkpoint._bytes import crc32

    data = memoryview(np.random.default_rng(0).bytes(100_000))
    for cut in (0, 1, 77_777):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


def test_what_is_read_together_is_read_once(tmp_path, monkeypatch):
    """Neighbours, and parts with gaps between them, overlapping ones and a great many small ones."""
    import os

    value = np.arange(1 << 20, dtype=np.int32)
    spans = [(0, 70_000), (70_000, 200_000), (200_007, 200_009), (300_000, 1 << 20), (5, 250_000), (5, 6)]
    spans += [(k, k + 3) for k in range(200_010, 260_000, 7)]
    with save(tmp_path, {"w": value}) as checkpoint:
        nbytes, real = [], os.preadv
        monkeypatch.setattr(os, "preadv", lambda *args: nbytes.append(real(*args)) or nbytes[-1])
        with checkpoint.batch() as batch:
            got = [checkpoint.read_region("w", (span,), value.shape, batch) for span in spans]
        for (start, stop), x in zip(spans, got, strict=True):
            assert np.array_equal(x, value[start:stop])
        assert sum(nbytes) <= value.nbytes + 250_000 * 4 + 4 * (1 << 18)  # all of it, and what overlaps again


@pytest.mark.parametrize("chunk_nbytes", [1 << 12, 1 << 26])
def test_other_orders_with_chunks_of_any_size(tmp_path, monkeypatch, chunk_nbytes):
    """The format leaves the size of chunks to the writer."""
    value = np.arange(600 * 1000, dtype=np.uint16).reshape(600, 1000)
    monkeypatch.setattr(_safetensors, "CHUNK_NBYTES", chunk_nbytes)
    entry, part = TensorEntry("uint16", value.shape, axis_order=(1, 0)), np.ascontiguousarray(value.T)
    declared = partial(_directory.Manifest, chunk_nbytes=chunk_nbytes)
    monkeypatch.setattr(_directory, "Manifest", declared)
    path = CheckpointDirectory(tmp_path).save(1, {"w": entry}, [Part("w", ((0, value.size),), part)])
    with Checkpoint(path) as checkpoint:
        assert checkpoint.manifest.chunk_nbytes == chunk_nbytes
        assert same_bits(checkpoint.read("w"), value)


def test_a_stack_of_no_layers(tmp_path):
    layout = plan([Group("m", (TensorSpec("m/w", (4, 4)),), stack=0)], 2).layout
    buffers = {("m", slab.name): np.zeros((0, slab.shard_numel), np.float32) for slab in layout.bucket("m").slabs}
    assert list(shard_parts(layout, 0, buffers)) == []
    assert bucket_costs(layout, hardware("cpu"), tokens=1) == redistribution(layout, layout, hardware("cpu")) == ()


def test_the_manifest_is_a_value():
    entry = TensorEntry("float32", (2, 3), tile=(1, 3))
    manifest = Manifest(3, 1, (), {"w": entry}, metadata={"a": [1, {"b": "c"}]})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
