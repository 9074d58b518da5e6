"""Owners of whole matrices: balance, determinism, affinity."""

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragged_jax.layout import TensorSpec, rows, whole
from ragged_jax.planner import SHARDED, Group, Matrix, assign_owners, matrices, plan

# (rows, cols, how many in the whole model), embeddings and heads excluded
LLAMA_8B = [(4096, 4096, 64), (1024, 4096, 64), (14336, 4096, 64), (4096, 14336, 32)]
LLAMA_70B = [(8192, 8192, 160), (1024, 8192, 160), (28672, 8192, 160), (8192, 28672, 80)]
QWEN3_32B = [(8192, 5120, 64), (1024, 5120, 128), (5120, 8192, 64), (25600, 5120, 128), (5120, 25600, 64)]
QWEN3_06B = [(2048, 1024, 28), (1024, 1024, 56), (1024, 2048, 28), (3072, 1024, 56), (1024, 3072, 28)]
GPT_OSS_20B = [
    *[(4096, 2880, 24), (512, 2880, 48), (2880, 4096, 24), (32, 2880, 24)],
    *[(2880, 5760, 24 * 32), (2880, 2880, 24 * 32)],
]
DEEPSEEK_V3 = [
    *[(1536, 7168, 61), (24576, 1536, 61), (576, 7168, 61), (32768, 512, 61), (7168, 16384, 61)],
    *[(18432, 7168, 6), (7168, 18432, 3), (2048, 7168, 2 * 58 * 257), (7168, 2048, 58 * 257), (256, 7168, 58)],
]
MODELS = {
    "llama-8b": LLAMA_8B,
    "llama-70b": LLAMA_70B,
    "qwen3-32b": QWEN3_32B,
    "qwen3-0.6b": QWEN3_06B,
    "gpt-oss-20b": GPT_OSS_20B,
    "deepseek-v3": DEEPSEEK_V3,
}


def model(shapes) -> list[Matrix]:
    return [Matrix(f"tensor{at}", i, r, c) for at, (r, c, n) in enumerate(shapes) for i in range(n)]


@pytest.mark.parametrize("num_shards", [6, 8, 64, 256])
@pytest.mark.parametrize("name", MODELS)
def test_llms_balance_within_five_percent(name, num_shards):
    owners = assign_owners(model(MODELS[name]), num_shards)
    assert owners.bound <= owners.imbalance <= 1.05
    assert sum(owners.loads) == pytest.approx(5 * sum(m.cost for m in owners.matrices))


def test_nothing_is_sharded_where_matrices_are_plenty():
    for name in ("llama-70b", "qwen3-32b", "deepseek-v3"):
        assert assign_owners(model(MODELS[name]), 64).sharded_fraction == 0


def test_a_dominant_matrix_is_sharded_and_the_rest_balances():
    small = [Matrix("small", i, 128, 128) for i in range(32)]
    owners = assign_owners([*small, Matrix("big", 0, 512, 512)], 8)
    assert owners.owners[owners.matrices.index(Matrix("big", 0, 512, 512))] == SHARDED
    assert owners.owners.count(SHARDED) == 1
    assert owners.imbalance == 1


def test_seventy_thousand_matrices_in_a_moment():
    kimi = model([(2048, 7168, 2 * 60 * 385), (7168, 2048, 60 * 385)])
    start = time.perf_counter()
    owners = assign_owners(kimi, 16384, tolerance=0.3)
    assert time.perf_counter() - start < 5
    assert len(owners.owners) == 69300


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9)), max_size=6))
    return model(sizes), draw(st.integers(1, 9)), draw(st.sampled_from([0.0, 0.05, 0.3, 10.0]))


@given(cases(), st.randoms(use_true_random=False))
def test_properties(case, rng: random.Random):
    some, num_shards, tolerance = case
    owners = assign_owners(some, num_shards, tolerance=tolerance)
    shuffled = rng.sample(some, len(some))
    assert assign_owners(shuffled, num_shards, tolerance=tolerance) == owners
    assert owners.matrices == tuple(sorted(some))
    assert owners.bound * (1 - 1e-12) <= owners.imbalance <= (1 + tolerance) * (1 + 1e-12)
    assert 0 <= owners.sharded_fraction <= 1
    assert sum(owners.numels) == sum(m.numel for m, o in zip(owners.matrices, owners.owners, strict=True) if o >= 0)
    places = [(o, m.rows, m.cols, s) for m, o, s in zip(some, owners.owners, owners.slots, strict=False)]
    assert len(set(places)) == len(places)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 4))
def test_the_bound_and_graham_against_all_assignments(sides, num_shards):
    some = [Matrix(f"m{i}", 0, side, side) for i, side in enumerate(sides)]
    owners = assign_owners(some, num_shards, tolerance=1e9)
    costs = [m.cost for m in owners.matrices]
    best = min(
        max(sum(c for c, o in zip(costs, choice, strict=True) if o == k) for k in range(num_shards))
        for choice in itertools.product(range(num_shards), repeat=len(costs))
    )
    optimum = best * num_shards / sum(costs)
    assert owners.bound <= optimum * (1 + 1e-12)
    assert owners.imbalance <= optimum * (4 / 3) * (1 + 1e-12)  # Graham 1969


def test_matrices_stay_where_they_lie_when_balance_allows():
    experts = TensorSpec("moe/up", (16, 8, 32), "float32", rows(8, dim=1))
    layout = plan([Group("moe", (experts,), stack=3)], 4, min_slab_nbytes=0).layout
    found = matrices(layout)
    assert [m.index for m in found] == list(range(48))
    owners = assign_owners(found, 4, layout=layout)
    assert owners.owners == tuple(index % 16 // 4 for index in range(48))
    assert owners.num_slots == {(8, 32): 12}


def test_affinity_in_a_packed_slab():
    tensors = tuple(TensorSpec(f"m{i}", (10, 10), "float32", whole()) for i in range(6))
    layout = plan([Group("block", tensors)], 3, min_slab_nbytes=1 << 20).layout
    owners = assign_owners(matrices(layout), 3, layout=layout)
    for matrix, owner in zip(owners.matrices, owners.owners, strict=True):
        start, stop = layout.ranges(matrix.tensor)[owner]
        assert stop - start == 100


def test_matrices_of_chosen_tensors():
    kernel, bias = TensorSpec("conv", (3, 3, 4, 8)), TensorSpec("bias", (8,))
    layout = plan([Group("", (kernel, bias))], 2).layout
    assert matrices(layout, {"conv": (36, 8)}) == (Matrix("conv", 0, 36, 8),)
    assert len(matrices(layout, ["conv"])) == len(matrices(layout)) == 9
    with pytest.raises(ValueError, match=r"bias of shape \(8,\) is not a stack"):
        matrices(layout, ["bias", "conv"])


def test_errors_and_nothing():
    assert assign_owners([], 4).imbalance == 1
    with pytest.raises(ValueError, match=r"twice: a\[0\]"):
        assign_owners([Matrix("a", 0, 2, 2), Matrix("a", 0, 2, 2)], 2)
    with pytest.raises(ValueError, match="num_shards is 0"):
        assign_owners([], 0)
    with pytest.raises(ValueError, match="not a matrix"):
        Matrix("a", 0, 0, 2)
