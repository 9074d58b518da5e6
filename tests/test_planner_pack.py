"""Packing against an exhaustive reference, and the proofs it claims."""

import math
from itertools import islice

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ragged_jax.planner._bound import admissible, lower_bound
from ragged_jax.planner._pack import pack
from ragged_jax.planner._place import Item, best_fit, best_order, first_offset, place
from ragged_jax.planner._reference import is_whole, smallest_shard

shards = st.integers(1, 5)
items = st.builds(lambda size, grain: Item(size, grain), st.integers(1, 14), st.integers(1, 8))


def tailed():
    """Items whose last units must not be cut."""
    return st.builds(
        lambda body, grain, tail: Item(body * grain + tail, grain, tail),
        st.integers(0, 5),
        st.integers(1, 5),
        st.integers(1, 9),
    )


def legal(start: int, item: Item, shard: int) -> bool:
    last_cut = item.size - max(item.tail, 1)
    cuts = [c - start for c in range(start + 1, start + item.size) if c % shard == 0]
    return all(cut % item.grain == 0 and cut <= last_cut for cut in cuts)


@given(st.one_of(items, tailed()), st.integers(1, 16), st.integers(0, 40))
def test_first_offset_is_the_first_legal_one(item, shard, position):
    starts = (s for s in range(position, position + 4 * shard + 40) if legal(s, item, shard))
    assert first_offset(position, item, shard) == next(starts, None)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4), shards, st.integers(1, 4))
@example([(7, 4), (5, 5), (3, 1)], 3, 2)
def test_the_optimum_of_small_cases(tensors, num_shards, unit):
    """Partial last blocks, starts at multiples of a unit, tensors without elements."""
    packed = [Item(-(-numel // unit), math.lcm(unit, granularity) // unit) for numel, granularity in tensors if numel]
    packing = pack(packed, num_shards)
    assert packing
    assert packing.shard == packing.bound
    assert packing.shard * unit == smallest_shard(tensors, num_shards, unit)


@given(st.lists(st.tuples(st.one_of(items, tailed()), st.integers(1, 9)), min_size=1, max_size=7), shards)
def test_packings_are_sound(members, num_shards):
    members = [item._replace(copies=count) for item, count in members]
    packing = pack(members, num_shards)
    assert packing
    shard, bound, placed = packing
    assert pack(members, num_shards, shard) == packing
    assert pack(members, num_shards, shard - 1) is None
    assert lower_bound(members, num_shards) <= bound <= shard
    end = 0
    for index, offset in placed:
        assert offset >= end
        assert legal(offset, members[index], shard)
        end = offset + members[index].size
    assert end <= num_shards * shard
    assert sorted(i for i, _ in placed) == [i for i, m in enumerate(members) for _ in range(m.copies)]


@given(st.lists(items, min_size=1, max_size=4), shards, st.integers(1, 30))
def test_the_exact_search_finds_what_any_order_finds(members, num_shards, shard):
    runs = best_order(members, num_shards, shard)
    if runs is None:
        assert best_fit(members, num_shards, shard) is None
        assert place(members, [(i, 1) for i in range(len(members))], num_shards, shard) is None
    else:
        assert place(members, runs, num_shards, shard) is not None


@given(st.lists(st.one_of(items, tailed()), min_size=1, max_size=4))
def test_admissible_sizes_leave_out_only_the_impossible(members):
    """A size is left out when one of the tensors alone, or two cut ones together, cannot live with it."""
    sizes = set(islice(admissible(members, 1), 60))
    for shard in range(1, min(60, max(sizes))):
        alone = all(any(legal(s, m, shard) for s in range(2 * shard)) for m in members)
        assert shard in sizes or not alone


@pytest.mark.parametrize(
    ("members", "num_shards", "shard"),
    [
        ([Item(10, 1)], 4, 3),
        ([Item(8, 4), Item(6, 3)], 2, 8),  # 7 would cut one of them inside a block
        ([Item(9, 4)], 2, 5),  # a partial last block alone on the second shard
        ([Item(5, 5, copies=3)], 2, 10),
        ([Item(4096, 32, copies=4), Item(4096, 1, copies=2)], 1, 6 * 4096),
        ([], 3, 0),
    ],
)
def test_known_optima(members, num_shards, shard):
    packing = pack(members, num_shards)
    assert packing
    assert (packing.shard, packing.bound) == (shard, shard)


def test_a_larger_size_may_fail():
    """Why there is no bisection."""
    members = [Item(12, 4)]
    fits = [s for s in range(1, 14) if best_order(members, 3, s)]
    assert fits == [4, 8, 9, 10, 11, 12, 13]
    assert is_whole(0, 12, 4, 8)
