"""Layout values: queries, JSON, validation."""

import json
import pickle

import pytest

from ragged_jax.layout import (
    Block,
    Bucket,
    Layout,
    LayoutError,
    Placement,
    RaggedShard,
    Slab,
    TensorSpec,
    block_for,
    elements,
    rows,
    tile,
    whole,
)


def small_layout() -> Layout:
    kernel = TensorSpec("mlp/kernel", (6, 4), "float32", rows(2))
    bias = TensorSpec("mlp/bias", (5,), "float32")
    scale = TensorSpec("scale", (), "float32")
    slab = Slab("float32x1", "float32", 16, 1, (Placement(kernel, 0), Placement(bias, 24), Placement(scale, 29)))
    sole = Slab("head", "bfloat16", 2, 3, (Placement(TensorSpec("head", (4, 3), "bfloat16"), 0),), sole=True)
    return Layout(2, (Bucket("mlp", (slab, sole)),))


@pytest.mark.parametrize(
    ("block", "shape", "granularity"),
    [
        (elements(1), (7, 5), 1),
        (elements(256), (7, 5), 35),
        (rows(2), (7, 5), 10),
        (rows(32), (7, 5), 35),
        (rows(2, dim=1), (3, 8, 5), 10),
        (rows(3, dim=1), (3, 8, 5), 40),
        (rows(1), (3, 3, 8, 16), 384),
        (tile(32, 32), (64, 48), 32 * 48),
        (tile(32, 32), (4, 64, 48), 32 * 48),
        (tile(32, 32), (4, 40, 48), 40 * 48),
        (whole(), (7, 5), 35),
        (rows(32), (7,), 1),
        (tile(2, 2), (), 1),
        (whole(), (7,), 7),
        (rows(2), (0, 4), 1),
    ],
)
def test_granularity(block, shape, granularity):
    assert block.granularity(shape) == granularity


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: elements(0), "integers of at least 1"),
        (lambda: rows(True), "integers of at least 1"),
        (lambda: rows(2.0), "integers of at least 1"),
        (lambda: Block("tile", (2,)), "takes 2 sizes"),
        (lambda: Block("column", (2,)), "unknown block kind"),
        (lambda: Block("tile", (2, 2), dim=1), "only rows"),
        (lambda: rows(2, dim=3).granularity((4, 4)), "names dim 3"),
        (lambda: TensorSpec("a", (2, -1)), "at least 0"),
        (lambda: TensorSpec("a", (2**30, 2**30)), "more than 2\\*\\*53"),
        (lambda: TensorSpec("a", (2,), "float12"), "unknown dtype"),
        (lambda: RaggedShard((1,), (1, 1)), "prefix"),
        (lambda: RaggedShard((0,), (0, 0)), "all zero"),
        (lambda: RaggedShard((0,), (1, 2)).local_numels((2, 2)), "does not divide"),
        (lambda: RaggedShard.from_numels((4,), (1, 2)), "do not make"),
        (lambda: block_for("a", {"*": 3}), "not a Block"),
    ],
)
def test_bad_values_are_refused(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def test_block_rules_by_pattern():
    rule = {"*/embedding": rows(1), "*/kernel": tile(2, 2)}
    assert block_for("a/b/kernel", rule) == tile(2, 2)
    assert block_for("a/embedding", rule) == rows(1)
    assert block_for("a/bias", rule) == elements(1)
    assert block_for("anything", whole()) == whole()


def test_ragged_shard_is_canonical():
    assert RaggedShard((0,), (2, 2, 4)) == RaggedShard((0,), (1, 1, 2))
    assert RaggedShard.from_numels((6, 4), (24, 0, 0)) == RaggedShard((), (1, 0, 0))
    assert RaggedShard.from_numels((6, 4), (2, 10, 12)).dims == (0, 1)
    assert RaggedShard.from_numels((0, 4), (0, 0)).local_numels((0, 4)) == (0, 0)


def test_queries():
    layout = small_layout().check()
    assert layout.ranges("mlp/kernel") == ((0, 16), (16, 24))
    assert layout.ranges("scale") == ((0, 0), (0, 1))
    assert layout.ragged_shard("mlp/kernel") == RaggedShard((0,), (2, 1))
    assert [(p.tensor.name, p.start, p.stop, p.offset) for p in layout.shard(1)] == [
        ("mlp/kernel", 16, 24, 0),
        ("mlp/bias", 0, 5, 8),
        ("scale", 0, 1, 13),
        ("head", 6, 12, 0),
    ]
    assert layout.shard_nbytes == 16 * 4 + 6 * 2
    assert layout.payload_nbytes == 30 * 4 + 12 * 2
    assert layout.padding_nbytes == 2 * 4
    assert "padding 5.56 %" in repr(layout)
    with pytest.raises(KeyError, match="did you mean mlp/kernel"):
        layout.locate("mlp/kernle")
    with pytest.raises(IndexError, match="over 2"):
        layout.shard(2)


def test_a_layout_is_a_value():
    layout = small_layout()
    assert layout.shard_nbytes
    assert layout.locate("head")  # fills caches, which must not travel or count
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout == small_layout()
    assert hash(again) == hash(layout)
    assert again.fingerprint == layout.fingerprint
    assert Layout.from_json(layout.to_json(indent=2)) == layout


def test_the_fingerprint_never_changes():
    """Ranks of different releases compare it, and files carry it."""
    assert small_layout().fingerprint == "754745ca552df2f3"


def test_a_malformed_file_gives_every_fault_by_path():
    document = json.loads(small_layout().to_json())
    slab = document["buckets"][0]["slabs"][0]
    slab["rows"] = "16"
    slab["extra"] = 1
    del slab["placements"][1]["offset"]
    slab["placements"][0]["tensor"]["block"]["kind"] = "column"
    with pytest.raises(LayoutError) as error:
        Layout.from_json(json.dumps(document))
    for path in (".rows", ".extra", ".placements[1].offset", ".placements[0].tensor.block"):
        assert f"buckets[0].slabs[0]{path}" in str(error.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not a layout file"),
        ("[1]", "must be an object"),
        ("[" * 100_000, "not a layout file"),
        ('{"format": "ragged-layout", "version": 1, "x": ' + "[" * 800 + "]" * 800 + "}", "nested too deeply"),
        ('{"format": "safetensors"}', "must be an object with"),
        ('{"format": "ragged-layout", "version": 3}', "version 3, this release reads up to 2: upgrade"),
        ('{"format": "ragged-layout", "version": "1"}', "not a known version"),
        ('{"format": "ragged-layout"}', "not a known version"),
    ],
)
def test_other_files_are_refused(text, match):
    with pytest.raises(LayoutError, match=match):
        Layout.from_json(text)


@pytest.mark.parametrize(
    ("placement", "fault"),
    [
        (
            Placement(TensorSpec("a", (2, 4)), 0, axis_order=(1, 1)),
            "a: axis_order (1, 1) is no order of the 2 dims",
        ),
        (
            Placement(TensorSpec("a", (2, 4), block=rows(1)), 0, axis_order=(1, 0)),
            "a: blocks of rows(1) do not lie",
        ),
        (
            Placement(TensorSpec("a", (2, 4)), 0, "tiled"),
            "a is tiled, but elements(1) of a shape (2, 4) has no tiles",
        ),
        (
            Placement(TensorSpec("a", (3, 4), block=tile(2, 2)), 0, "tiled"),
            "a is cut inside a block of tile(2, 2)",
        ),
    ],
)
def test_faults_of_storage(placement, fault):
    layout = Layout(2, (Bucket("", (Slab("s", "float32", 6, 1, (placement,)),)),))
    assert any(fault in found for found in layout.faults())


@pytest.mark.parametrize("shares", [(1,), (1, 0), (1, 2, 3)])
def test_faults_of_shares(shares):
    assert "must be 2 numbers of at least 1" in Layout(2, (), shares).faults()[0]


def test_faults_that_only_the_whole_can_show():
    kernel = TensorSpec("kernel", (6, 4), "float32", rows(3))
    bias = TensorSpec("bias", (4,), "bfloat16")
    slab = Slab("a", "float32", 16, 1, (Placement(kernel, 0), Placement(bias, 22), Placement(bias, 29)))
    sole = Slab("b", "float32", 3, 4, (Placement(TensorSpec("c", (5, 4)), 0),), sole=True)
    layout = Layout(2, (Bucket("", (slab, sole, sole)), Bucket("", ())))
    with pytest.raises(LayoutError) as error:
        Layout.from_json(layout.to_json())
    for fault in (
        "tensor 'bias' lies in 2 places",
        "2 buckets are called ''",
        "2 slabs are called 'b'",
        "kernel is cut inside a block of rows(3), at element 16",
        "bias is bfloat16, the slab float32",
        "bias starts at 22, before 24",
        "tensors end at 33, the slab at 32",
        "a sole slab holds one tensor of 6 rows",
    ):
        assert fault in str(error.value)


def test_sizes_that_no_model_has_are_refused():
    """A few bytes of a file must not make a reader count to 10^12, or ask for so much memory."""
    large = Bucket("a", (Slab("s", "int8", 2**40, 2**14, (Placement(TensorSpec("w", (2**14,), "int8"), 0),)),))
    with pytest.raises(LayoutError, match=r"rows of 16384 on each of 2 parts are more than 2\*\*53 elements"):
        Layout(2, (large,)).check()
    with pytest.raises(LayoutError, match="stack is 1000000000000, must be between 0 and 1048576"):
        Layout(2, (Bucket("a", (), 10**12),)).check()
