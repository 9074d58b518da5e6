"""Tensors that other mesh axes split: one slice is planned, and every element has its place. Against numpy."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import (
    Bucket,
    Layout,
    LayoutError,
    Placement,
    RaggedShard,
    Slab,
    Split,
    StridedRaggedShard,
    TensorSpec,
    elements,
    rows,
    tile,
    whole,
)
from ragged_jax.planner import Group, hardware, plan, redistribution

AXES = {"tp": 2, "ep": 3}


@st.composite
def tensors(draw, name: str):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    axes = draw(st.lists(st.sampled_from(sorted(AXES)), unique=True, max_size=2))
    dims = sorted(draw(st.lists(st.integers(0, len(shape) - 1), min_size=len(axes), max_size=len(axes))))
    block = draw(st.sampled_from([elements(1), elements(4), rows(1), rows(2), tile(2, 2), whole()]))
    splits = tuple(Split(dim, AXES[axis], axis) for dim, axis in zip(dims, axes, strict=True))
    return TensorSpec(name, shape, "float32", block, splits=splits)


@st.composite
def models(draw):
    return [draw(tensors(f"t{i}")) for i in range(draw(st.integers(1, 6)))], draw(st.integers(1, 5))


@given(models())
def test_every_shard_is_a_flat_range_of_a_slice(model):
    specs, num_shards = model
    layout = plan([Group("", tuple(specs))], num_shards, min_slab_nbytes=8).layout.check()
    for spec in specs:
        whole_tensor = np.arange(math.prod(spec.full_shape)).reshape(spec.full_shape)
        placed = layout.ragged_shard(spec.name)
        ranks = list(np.ndindex(*(split.size for split in spec.splits)))
        seen = []
        for rank in ranks:
            part = whole_tensor  # cut by hand, one axis after the other
            for split, r in zip(spec.splits, rank, strict=True):
                part = np.split(part, split.size, axis=split.dim)[r]
            assert part.shape == spec.shape
            if spec.splits:
                assert isinstance(placed, StridedRaggedShard)
                np.testing.assert_array_equal(whole_tensor[placed.slice_of(spec.full_shape, rank)], part)
            numels = placed.local_numels(spec.full_shape)
            ends = np.cumsum((0, *numels))
            for k, (start, stop) in enumerate(layout.ranges(spec.name)):
                assert stop - start == numels[k]
                shard = part.reshape(-1)[ends[k] : ends[k + 1]]
                np.testing.assert_array_equal(shard, part.reshape(-1)[start:stop])
                seen.append(shard)
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), whole_tensor.reshape(-1))
    for bucket in layout.buckets:
        for slab in bucket.slabs:
            assert len({p.tensor.split_axes for p in slab.placements}) == 1
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.fingerprint == layout.fingerprint
    assert json.loads(layout.to_json())["version"] == (2 if any(spec.splits for spec in specs) else 1)


def split(name: str, shape: tuple[int, ...], dim: int, size: int = 2, axis: str = "tp") -> TensorSpec:
    return TensorSpec(name, shape, splits=(Split(dim, size, axis),))


def test_a_split_is_part_of_what_a_layout_is():
    of = lambda *specs: plan([Group("", specs)], 3).layout
    prints = {of(s).fingerprint for s in (split("w", (4, 4), 0), split("w", (4, 4), 1), TensorSpec("w", (4, 4)))}
    assert len(prints) == 3
    columns, rows_ = split("a", (5, 4), 1), split("b", (4, 5), 0)
    assert len(of(columns, rows_).buckets[0].slabs) == 1
    slabs = of(columns, rows_, TensorSpec("norm", (5,)), split("c", (3, 5), 0, 2, "ep")).buckets[0].slabs
    assert [slab.name for slab in slabs] == ["float32x1", "ep.float32x1", "tp.float32x1"]


def test_layouts_that_do_not_agree_on_their_slices_are_not_exchanged():
    a, b = (plan([Group("", (split("w", (4, 4), dim),))], 2).layout for dim in (0, 1))
    with pytest.raises(ValueError, match=r"w is float32.*split by 'tp' along dim 0 in the source"):
        redistribution(a, b, hardware("h100"))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: split("w", (4, 4), 2), "must name a dim"),
        (lambda: split("w", (4, 4), 0, 1), "a size from 2 on"),
        (lambda: split("w", (4, 4), 0, 2, ""), "an axis"),
        (lambda: TensorSpec("w", (4, 4), splits=(Split(1, 2, "a"), Split(0, 2, "b"))), "by rising dim"),
        (lambda: TensorSpec("w", (4, 4), splits=(Split(0, 2, "a"), Split(1, 2, "a"))), "each axis once"),
        (lambda: split("w", (2**30, 2**22), 0, 4), "more than 2"),
        (lambda: StridedRaggedShard((), RaggedShard((0,), (1,))), "pairs of a dim"),
        (lambda: StridedRaggedShard(((0, 0),), RaggedShard((0,), (1,))), "pairs of a dim"),
        (lambda: StridedRaggedShard(((0, 2),), RaggedShard((0,), (1,))).slice_shape((3,)), "equal slices"),
    ],
)
def test_bad_splits_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_faults_of_slabs_and_files():
    slab = Slab("s", "float32", 24, 1, (Placement(split("a", (4, 4), 0), 0), Placement(TensorSpec("b", (8,)), 16)))
    other = Slab("o", "float32", 8, 1, (Placement(split("c", (4, 2), 1, 4), 0),))
    faults = "\n".join(Layout(1, (Bucket("", (slab, other)),)).faults())
    assert "b is split by (), a is not" in faults
    assert "axis 'tp' splits tensors by 2 and by 4" in faults
    document = json.loads(plan([Group("", (split("w", (4, 4), 0),))], 2).layout.to_json())
    with pytest.raises(LayoutError, match="came with version 2"):
        Layout.from_json(json.dumps({**document, "version": 1}))
