"""Overlaps of two layouts against an element-by-element reference."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import Segment, TensorSpec, elements, overlap, rows, segments, stored_order, tile
from ragged_jax.planner import Group, hardware, plan, redistribution


@st.composite
def layouts(draw, num_shards):
    """Two layouts of the same tensors over the same devices, blocks and slabs differing."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5))
    stack = draw(st.sampled_from([None, 2]))
    pair = []
    for _ in range(2):
        block = rows(draw(st.integers(1, 3)))
        tensors = tuple(TensorSpec(f"t{i}", shape, "float32", block) for i, shape in enumerate(shapes))
        cut = draw(st.integers(0, len(tensors)))
        groups = [Group("a", tensors[:cut], stack), Group("b", tensors[cut:], stack)]
        pair.append(
            plan([g for g in groups if g.tensors], num_shards, min_slab_nbytes=draw(st.sampled_from([0, 128])))
        )
    return pair[0].layout, pair[1].layout


def slow_contents(held):
    """For each device, what every element of its buffers is: {(buffer, offset): (tensor, element)}."""
    return [
        {(s.buffer, s.offset + i): (s.tensor, s.start + i) for s in device for i in range(s.stop - s.start)}
        for device in held
    ]


@given(st.data(), st.integers(1, 5))
def test_overlap_moves_every_element_once(data, num_shards):
    held, wanted = map(segments, data.draw(layouts(num_shards)))
    before, after = slow_contents(held), slow_contents(wanted)
    arrived = [{} for _ in range(num_shards)]
    for m in overlap(held, wanted):
        for i in range(m.numel):
            place = m.target, m.target_offset + i
            assert place not in arrived[m.receiver]
            arrived[m.receiver][place] = before[m.sender][m.source, m.source_offset + i]
    assert arrived == after


@given(st.data())
def test_segments_agree_with_ranges(data):
    layout, _ = data.draw(layouts(3))
    held = segments(layout, per_layer=True)
    for tensor in layout.tensors:
        found = [[(s.start, s.stop) for s in device if s.tensor == tensor.name] for device in held]
        assert found == [[r] if r[0] < r[1] else [] for r in layout.ranges(tensor.name)]
    whole = segments(layout)
    assert sum(s.stop - s.start for d in whole for s in d) == sum(
        b.num_copies * t.numel for b in layout.buckets for t in b.tensors
    )
    assert segments(layout, names=[]) == ((), (), ())


def test_own_copy_first_then_the_first_holder():
    source, target = ("s", ""), ("t", "")
    replicated = [[Segment("x", 0, 8, source, 0)]] * 2 + [[Segment("x", 4, 8, source, 0)]]
    wanted = [[Segment("x", 2, 6, target, 0)]] * 3
    assert [
        (m.sender, m.receiver, m.source_offset, m.target_offset, m.numel) for m in overlap(replicated, wanted)
    ] == [
        (0, 0, 2, 0, 4),
        (0, 2, 2, 0, 2),
        (1, 1, 2, 0, 4),
        (2, 2, 0, 2, 2),
    ]


def test_neighbours_are_joined():
    held = [[Segment("x", 0, 4, ("s", ""), 0), Segment("y", 0, 4, ("s", ""), 4)]]
    wanted = [[], [Segment("x", 0, 4, ("t", ""), 8), Segment("y", 0, 4, ("t", ""), 12)]]
    assert [m.numel for m in overlap(held, wanted)] == [8]


def test_what_nobody_holds_is_named():
    held = [[Segment("x", 0, 4, ("s", ""), 0)]]
    with pytest.raises(ValueError, match=r"x\[4:6\] for device 0, y\[0:1\] for device 0"):
        overlap(held, [[Segment("x", 2, 6, ("t", ""), 0), Segment("y", 0, 1, ("t", ""), 4)]])


def test_large_layouts_overlap_quickly():
    tensors = tuple(TensorSpec(f"t{i}", (256, 64)) for i in range(20))
    held = segments(plan([Group("a", tensors)], 64, min_slab_nbytes=0).layout)
    wanted = segments(plan([Group("a", tensors)], 64, min_slab_nbytes=1 << 30).layout)
    moves = overlap(held, wanted)
    assert sum(m.numel for m in moves) == 20 * 256 * 64
    assert np.all(np.diff([m.sender for m in moves]) >= 0)


def slow_buffers(layout):
    """Every device's buffers as `(tensor, row-major element of all layers)`, from whole slabs cut into shards."""
    devices = [{} for _ in range(layout.num_shards)]
    parts = list(accumulate(layout.shares or [1] * layout.num_shards, initial=0))
    for bucket in layout.buckets:
        for slab in bucket.slabs:
            for layer in range(bucket.num_copies):
                whole = [None] * (parts[-1] * slab.shard_numel)
                for p in slab.placements:
                    index = np.arange(p.tensor.numel)
                    if p.storage == "tiled":
                        index = stored_order(p.tensor, "tiled")
                    if p.axis_order:
                        index = index.reshape(p.tensor.shape).transpose(p.axis_order).reshape(-1)
                    for at, element in enumerate(index.tolist()):
                        whole[p.offset + at] = p.tensor.name, layer * p.tensor.numel + element
                for k, device in enumerate(devices):
                    shard = whole[parts[k] * slab.shard_numel : parts[k + 1] * slab.shard_numel]
                    room = layer * layout.largest_share * slab.shard_numel
                    device |= {((bucket.name, slab.name), room + at): e for at, e in enumerate(shard) if e}
    return devices


@st.composite
def any_layout(draw, shapes, num_shards, stack):
    block = draw(st.sampled_from([elements(1), rows(2), tile(2, 3), tile(3, 2)]))
    tensors = tuple(TensorSpec(f"t{i}", shape, "float32", block) for i, shape in enumerate(shapes))
    return plan(
        [Group("a", tensors, stack)],
        num_shards,
        storage=draw(st.sampled_from(["row_major", "tiled"])),
        axis_order=draw(st.sampled_from(["natural", "auto"])),
        shares=draw(st.none() | st.lists(st.integers(1, 3), min_size=num_shards, max_size=num_shards)),
        min_slab_nbytes=draw(st.sampled_from([0, 128])),
    ).layout


@given(st.data(), st.integers(1, 4), st.sampled_from([None, 2]))
def test_storage_orders_and_uneven_shares(data, num_shards, stack):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 8)), min_size=1, max_size=4))
    held, wanted = (data.draw(any_layout(shapes, num_shards, stack)) for _ in range(2))
    before, after = slow_buffers(held), slow_buffers(wanted)
    assert slow_contents(segments(held)) == before
    arrived = [{} for _ in range(num_shards)]
    exchanges = redistribution(held, wanted, hardware("cpu"), uneven=True)
    per_copy = {e.num_copies for e in exchanges}
    assert per_copy <= {1, stack or 1}
    for e in exchanges:
        moves = [(m.sender, m.receiver, m) for m in e.local]
        moves += [(t.sender, t.receiver, p) for r in e.rounds for t in r.transfers for p in t.parts]
        strides = [
            {(b.name, s.name): x.largest_share * s.shard_numel for b in x.buckets for s in b.slabs}
            for x in (held, wanted)
        ]
        for sender, receiver, m in moves:
            for copy in range(e.num_copies):
                for i in range(m.numel):
                    source = m.source_offset + i + copy * strides[0][m.source]
                    target = m.target_offset + i + copy * strides[1][m.target]
                    arrived[receiver][m.target, target] = before[sender][m.source, source]
    assert arrived == after
