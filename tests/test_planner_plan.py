"""Whole plans: sound, deterministic, never worse than cutting each tensor alone, and shaped for the runtime."""

import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import Layout, TensorSpec, elements, itemsize, rows, tile, whole
from ragged_jax.planner import PROFILES, Group, advise, hardware, plan
from ragged_jax.planner._cost import untile_copies
from ragged_jax.planner._reference import smallest_shard

blocks = st.one_of(
    st.builds(elements, st.integers(1, 9)),
    st.builds(rows, st.integers(1, 4)),
    st.builds(tile, st.integers(1, 3), st.integers(1, 3)),
    st.just(whole()),
)
shapes = st.one_of(
    st.lists(st.integers(1, 12), min_size=2, max_size=3),
    st.lists(st.integers(0, 12), max_size=3),
).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "int32"])

stacks = st.sampled_from([None, 1, 3])


@st.composite
def models(draw, max_groups=3, max_tensors=6, dtypes=dtypes, stacks=stacks):
    groups = []
    for i in range(draw(st.integers(0, max_groups))):
        kinds = draw(st.lists(st.tuples(shapes, dtypes, blocks), max_size=max_tensors))
        kinds += kinds[: draw(st.integers(0, len(kinds)))]
        tensors = tuple(TensorSpec(f"{i}/{j}", *kind) for j, kind in enumerate(kinds))
        groups.append(Group(f"g{i}", tensors, draw(stacks)))
    return groups


options = st.fixed_dictionaries(
    {
        "profile": st.sampled_from(["h100", "v5p", "torch-nccl"]),
        "min_slab_nbytes": st.sampled_from([0, 64, 1 << 16]),
        "align_nbytes": st.sampled_from([None, 1, 16]),
        "storage": st.sampled_from(["row_major", "tiled", "auto"]),
        "axis_order": st.sampled_from(["natural", "auto"]),
    }
)


@given(models(), st.integers(1, 9), options)
def test_plans_are_sound(groups, num_shards, chosen):
    made = plan(groups, num_shards, **chosen)
    layout = made.layout.check()
    assert sorted(t.name for t in layout.tensors) == sorted(t.name for g in groups for t in g.tensors)
    assert {t.name: t for t in layout.tensors} == {t.name: t for g in groups for t in g.tensors}
    assert made.bound_nbytes <= layout.shard_nbytes
    assert made.floor_nbytes <= layout.shard_nbytes
    assert made.optimal == (made.bound_nbytes == layout.shard_nbytes)
    assert 0 <= made.bound_fraction <= made.padding_fraction or not layout.payload_nbytes
    for slab in (slab for bucket in layout.buckets for slab in bucket.slabs):
        if slab.sole:
            assert slab.placements[0].offset == 0
            assert slab.placements[0].stored_shape[0] == slab.rows * num_shards
            assert slab.placements[0].tensor.nbytes >= chosen["min_slab_nbytes"]
        for placement in slab.placements:  # unpacking is a slice of rows and a reshape
            assert placement.offset % slab.width == 0
            assert placement.tensor.numel % slab.width == 0


@given(models(stacks=st.none()), st.integers(1, 9), st.sampled_from([0, 1 << 16]))
def test_never_worse_than_cutting_each_tensor_alone(groups, num_shards, min_nbytes):
    layout = plan(groups, num_shards, min_slab_nbytes=min_nbytes).layout
    alone = 0
    for tensor in (tensor for group in groups for tensor in group.tensors):
        shard = -(-tensor.num_blocks // num_shards) * tensor.granularity
        alone += shard * itemsize(tensor.dtype)
    assert layout.shard_nbytes <= alone


@given(models(max_groups=1, max_tensors=4, dtypes=st.just("float32"), stacks=st.none()), st.integers(2, 4))
def test_never_worse_than_the_best_single_slab(groups, num_shards):
    """With everything too small for a slab of its own, one slab for all is among the choices."""
    tensors = [tensor for group in groups for tensor in group.tensors if tensor.numel <= 24][:4]
    made = plan([Group("", tuple(tensors))], num_shards)
    best = smallest_shard([(t.numel, t.granularity) for t in tensors], num_shards)
    if len(made.layout.buckets[0].slabs) == 1 and made.layout.buckets[0].slabs[0].width == 1:
        assert made.layout.shard_nbytes == made.bound_nbytes == 4 * best


@given(models(), st.lists(st.integers(1, 4), min_size=1, max_size=5), options)
def test_plans_with_shares_are_sound(groups, shares, chosen):
    made = plan(groups, len(shares), shares=shares, **chosen)
    layout = made.layout.check()
    assert Layout.from_json(layout.to_json()) == layout
    total = sum(shares)
    for name in (t.name for t in layout.tensors):
        held = [stop - start for start, stop in layout.ranges(name)]
        assert sum(held) == layout.locate(name).placement.tensor.numel
    per_part = [0] * len(shares)
    for k in range(len(shares)):
        per_part[k] = sum((p.stop - p.start) * itemsize(p.tensor.dtype) for p in layout.shard(k))
        if not any(group.stack for group in groups):
            assert per_part[k] * max(shares) <= layout.shard_nbytes * shares[k]
    assert layout.padding_nbytes >= 0
    assert layout.num_parts <= total
    assert made.bound_nbytes <= layout.shard_nbytes == made.shard_nbytes


@given(models(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_order_of_tensors_does_not_matter(groups, num_shards, random: random.Random):
    shuffled = [
        Group(group.name, tuple(random.sample(group.tensors, len(group.tensors))), group.stack) for group in groups
    ]
    assert plan(groups, num_shards).layout == plan(shuffled, num_shards).layout


@given(models(max_groups=2), st.integers(1, 9))
def test_names_do_not_matter(groups, num_shards):
    """New names in the same order: the same slabs and offsets."""
    renamed = [
        Group(
            "new" + g.name,
            tuple(TensorSpec("x" + t.name, t.shape, t.dtype, t.block) for t in g.tensors),
            g.stack,
        )
        for g in groups
    ]
    for old, new in zip(
        plan(groups, num_shards).layout.buckets, plan(renamed, num_shards).layout.buckets, strict=True
    ):
        assert [(s.rows, s.width, [p.offset for p in s.placements]) for s in old.slabs] == [
            (s.rows, s.width, [p.offset for p in s.placements]) for s in new.slabs
        ]


def llama(num_layers: int = 3) -> list[Group]:
    shapes = {"q": (1024, 1024), "k": (256, 1024), "down": (1024, 2816), "up": (2816, 1024), "norm": (1024,)}
    return [
        Group(
            f"layers/{i}",
            tuple(TensorSpec(f"layers/{i}/{name}", s, "bfloat16", rows(32)) for name, s in shapes.items()),
        )
        for i in range(num_layers)
    ]


def test_the_same_plan_in_every_process():
    """Hash seeds and processes change nothing."""
    here = plan(llama(), 48).layout.fingerprint
    program = (
        "import sys, json; sys.path.insert(0, 'tests');"
        "from test_planner_plan import llama; from ragged_jax.planner import plan;"
        "print(json.dumps(plan(llama(), 48).layout.fingerprint))"
    )
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        )
        assert json.loads(out.stdout) == here


def test_a_layout_that_divides_is_all_sole():
    made = plan(llama(), 8)
    assert made.optimal
    assert made.padding_fraction == 0
    for bucket in made.layout.buckets:
        assert {s.name.rpartition("/")[2] for s in bucket.slabs if s.sole} == {"down", "k", "q", "up"}
        (packed,) = (s for s in bucket.slabs if not s.sole)
        assert (packed.width, len(packed.placements)) == (1, 1)
    assert Layout.from_json(made.layout.to_json()) == made.layout


def test_equal_layers_are_equal():
    first, *others = plan(llama(), 96).layout.buckets
    for other in others:
        for a, b in zip(first.slabs, other.slabs, strict=True):
            assert [p.offset for p in a.placements] == [p.offset for p in b.placements]


def test_rows_of_stacks_share_a_slab_by_their_own_width():
    experts = TensorSpec("experts", (5, 64, 32), "float32", rows(8, dim=1))
    router = TensorSpec("router", (5, 32), "float32", rows(1))
    (bucket,) = plan([Group("moe", (experts, router))], 6).layout.check().buckets
    assert {s.width for s in bucket.slabs} == {32}


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_plans(profile):
    plan(llama(), 96, profile=profile).layout.check()


def test_on_tpu_rows_keep_their_width():
    """Element blocks may be cut anywhere, but a slab of another width is laid out anew at each gather."""
    groups = [Group("", tuple(TensorSpec(n, (1000, 512), "float32") for n in "ab"))]
    assert {s.width for s in plan(groups, 64, profile="v5p").layout.buckets[0].slabs} == {512}
    assert plan(groups, 64, profile="h100").layout.padding_nbytes == 0


_ORDERS = r"(?s)'v' matches no tensor\n  w: \(0,\) is no order of the dims of shape \(2, 4\)"


@pytest.mark.parametrize(
    ("groups", "num_shards", "keywords", "match"),
    [
        ([], 0, {}, "num_shards must be an integer of at least 1, got 0"),
        ([], True, {}, "num_shards must be"),
        ([], 2.0, {}, "num_shards must be"),
        ([], 2, {"align_nbytes": 0}, "align_nbytes must be"),
        ([], 2, {"merge": 0}, "merge must be 'auto' or a number of layers of at least 1, got 0"),
        ([], 2, {"axis_order": "any"}, "axis_order must be natural, auto or a mapping of patterns, got 'any'"),
        ([Group("a", (TensorSpec("w", (2, 4)),))], 2, {"axis_order": {"v": (1, 0), "w": (0,)}}, _ORDERS),
        ([], 2, {"storage": "tile"}, "storage must be one of row_major, tiled, auto, got 'tile'"),
        ([], 2, {"shares": (1, 2, 3)}, "shares must be 2 integers of at least 1, got .1, 2, 3."),
        ([], 2, {"shares": (1, 0)}, "shares must be 2 integers"),
        ([], 2, {"profile": "h1000"}, "no hardware profile 'h1000'; choose from a100"),
        ([Group("a", ()), Group("a", ())], 2, {}, "group names must be unique; these repeat: 'a'"),
        ([Group("a", (TensorSpec("t", (1,)), TensorSpec("t", (2,))))], 2, {}, "tensor names .* repeat: 't'"),
    ],
)
def test_bad_input(groups, num_shards, keywords, match):
    with pytest.raises(ValueError, match=match):
        plan(groups, num_shards, **keywords)


def test_an_empty_model():
    made = plan([], 3)
    assert made.layout.shard_nbytes == made.bound_nbytes == 0
    assert made.optimal
    assert plan([Group("a", ())], 3).layout.buckets[0].slabs == ()


def test_scalars_and_empty_tensors():
    tensors = (TensorSpec("s", ()), TensorSpec("e", (0, 4)), TensorSpec("i", (3,), "int32"))
    layout = plan([Group("", tensors)], 2).layout.check()
    assert {s.dtype for s in layout.buckets[0].slabs} == {"float32", "int32"}
    assert layout.shard_nbytes == 4 + 8


def test_tiled_storage_takes_the_tile_as_the_granule():
    """32 x 32 tiles of a Llama-like layer on 1,024 shards."""
    groups = [
        Group(g.name, tuple(TensorSpec(t.name, t.shape, t.dtype, tile(32, 32)) for t in g.tensors)) for g in llama(1)
    ]
    row_major, tiled, auto = (plan(groups, 1024, storage=storage) for storage in ("row_major", "tiled", "auto"))
    assert row_major.padding_fraction > 5
    assert tiled.padding_fraction < 0.12
    assert tiled.floor_nbytes <= tiled.layout.shard_nbytes
    assert tiled.optimal
    assert auto.layout == tiled.layout
    for slab in tiled.layout.buckets[0].slabs:
        for placement in slab.placements:
            is_matrix = len(placement.tensor.shape) == 2
            assert placement.storage == ("tiled" if is_matrix else "row_major")
            assert slab.width == 32 or not is_matrix
    with pytest.raises(ValueError, match="stored tile by tile"):
        tiled.layout.ragged_shard("layers/0/q")


def test_auto_storage_leaves_alone_what_divides():
    groups = [Group("", (TensorSpec("w", (1024, 1024), "bfloat16", tile(32, 32)),))]
    assert plan(groups, 8, storage="auto").layout == plan(groups, 8).layout
    assert plan(groups, 8).layout.buckets[0].slabs[0].sole


def test_uneven_shares():
    layout = plan(llama(1), 4, shares=(4, 4, 2, 2)).layout.check()
    assert layout.shares == (2, 2, 1, 1)
    held = [sum((p.stop - p.start) for p in layout.shard(k)) for k in range(4)]
    assert held[0] == held[1] > 1.8 * held[2]
    assert plan(llama(1), 4, shares=(3, 3, 3, 3)).layout == plan(llama(1), 4).layout
    assert layout.spmd_padding_nbytes >= layout.padding_nbytes + layout.payload_nbytes // 4


def test_giants_may_lie_apart():
    """Experts and attention share a granularity; a common multiple that suits the experts need not bind all."""
    experts = [TensorSpec(f"e{i}", (7 * 64, 128), "bfloat16", rows(1)) for i in range(8)]
    others = [TensorSpec(f"a{i}", (128, 128 * 7), "bfloat16", rows(1)) for i in range(2)]
    made = plan([Group("", (*experts, *others))], 96)
    made.layout.check()
    assert made.bound_nbytes <= made.layout.shard_nbytes


def test_merging_layers_brings_padding_down():
    """Blocks of 128 rows: the more layers lie together, the smaller the largest block is beside them."""
    groups = [
        Group(g.name, tuple(TensorSpec(t.name, t.shape, t.dtype, rows(128)) for t in g.tensors)) for g in llama(8)
    ]
    paddings = [plan(groups, 24, merge=layers).padding_fraction for layers in (1, 2, 4, 8)]
    assert paddings == sorted(paddings, reverse=True)
    assert paddings[-1] < 0.2 * paddings[0]
    made = plan(groups, 24, merge="auto")
    assert made.padding_fraction < 0.5 * paddings[0]
    assert made.layout.check().buckets[0].name.startswith("layers/0..")
    assert sorted(t.name for t in made.layout.tensors) == sorted(t.name for g in groups for t in g.tensors)
    assert plan(llama(8), 8, merge="auto").layout == plan(llama(8), 8).layout


def test_only_like_neighbours_merge():
    a, b, c = llama(3)
    other = Group("other", (TensorSpec("x", (3,)),))
    stacked = Group("stacked", (TensorSpec("y", (3,)),), stack=4)
    names = [bucket.name for bucket in plan([other, a, b, c, stacked], 4, merge=2).layout.buckets]
    assert names == ["other", "layers/0..layers/1", "layers/2", "stacked"]


def test_advice_gives_figures():
    groups = [
        Group(g.name, tuple(TensorSpec(t.name, t.shape, t.dtype, rows(128)) for t in g.tensors)) for g in llama(8)
    ]
    text = "\n".join(advise(groups, 1024))
    assert "% padding" in text
    assert "128 x 128 tiles, stored tile by tile" in text
    assert "merge" in text
    assert "replicate" in text
    assert advise(llama(1), 8) == ()
    tiled = "\n".join(advise([Group("", (TensorSpec("w", (512, 512), block=tile(64, 64)),))], 64))
    assert "storage='tiled'" in tiled


def test_another_dim_may_lie_in_front():
    """Where elements may be cut anywhere, not where blocks are rows."""
    groups = [
        Group("a", (TensorSpec("kernel", (3, 5, 1024)),)),
        Group("b", (TensorSpec("table", (3, 8192), block=rows(1)),)),
    ]
    natural, auto = (plan(groups, 8, axis_order=order, min_slab_nbytes=0) for order in ("natural", "auto"))
    assert not any(slab.sole for bucket in natural.layout.buckets for slab in bucket.slabs)
    (kernel,), (table,) = (bucket.slabs for bucket in auto.layout.check().buckets)
    assert (kernel.rows, kernel.width, kernel.placements[0].axis_order) == (128, 15, (2, 0, 1))
    assert not table.sole
    assert Layout.from_json(auto.layout.to_json()) == auto.layout
    with pytest.raises(ValueError, match="stored transposed"):
        auto.layout.ragged_shard("kernel")


def test_a_pattern_chooses_the_order_of_the_dims():
    """Of some of the tensors of a shape, and only where the dim in front divides and elements may be cut anywhere."""
    shapes = {"0/q": (96, 64), "0/o": (96, 64), "1/q": (64, 96), "2/q": (96, 60), "3/q": (2, 4, 6), "4/q": (96, 64)}
    tensors = [TensorSpec(n, s, block=rows(1) if n == "4/q" else elements(1)) for n, s in shapes.items()]
    wanted = {"3/*": (0, 2, 1), "*/q": (1, 0)}
    orders = {}
    for num_shards in (2, 8):
        layout = plan([Group("", tuple(tensors))], num_shards, axis_order=wanted, min_slab_nbytes=0).layout.check()
        placements = [p for slab in layout.bucket("").slabs for p in slab.placements]
        orders[num_shards] = {p.tensor.name: p.axis_order for p in placements}
    expected = dict.fromkeys(shapes) | {"0/q": (1, 0), "1/q": (1, 0)}
    assert orders == {2: expected | {"2/q": (1, 0), "3/q": (0, 2, 1)}, 8: expected}


@pytest.mark.parametrize(
    ("profile", "tile", "copies"),
    [
        ("h100", (8, 128), 1),
        ("h100", (32, 32), 1),
        ("v5p", (8, 128), 0),
        ("v6e", (128, 128), 1),
        ("v5p", (32, 32), 3),
    ],
)
def test_untiling_costs_what_the_compilers_make_of_it(profile, tile, copies):
    """`benchmarks/results/untile.md`: copies of one tensor in forward."""
    assert untile_copies(hardware(profile), *tile) == copies


@pytest.mark.parametrize(("block", "storage"), [(tile(8, 128), "tiled"), (tile(32, 32), "row_major")])
def test_on_tpu_native_tiles_are_stored_tile_by_tile_and_narrow_ones_only_against_more_padding(block, storage):
    """63 rows of 32 tiles over 32 shards: by rows 1.6 % of padding and one copy, by tiles none, or three copies."""
    height, width = block.size
    group = Group("", (TensorSpec("w", (63 * height, 32 * width), "bfloat16", block),))
    made = plan([group], 32, profile="v5p", storage="auto")
    assert made.layout.bucket("").slabs[0].placements[0].storage == storage
