"""The rules of other systems in `benchmarks/rivals.py`, against their own code and figures."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragged_jax._shapes import read_shapes
from ragged_jax.layout import TensorSpec, rows

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from padding import BLOCKS, RIVALS, cell, only_matrices
from rivals import (
    fsdp2,
    megatron,
    megatron_experimental_layout,
    megatron_stable_layout,
    stable_chunk,
    up,
    zero3,
)

MODELS = Path(__file__).parent.parent / "benchmarks" / "models"
LLAMA = [
    TensorSpec(name, shape, "bfloat16", rows(1))
    for name, shape in {
        "q": (4096, 4096),
        "k": (1024, 4096),
        "v": (1024, 4096),
        "o": (4096, 4096),
        "gate": (14336, 4096),
        "up": (14336, 4096),
        "down": (4096, 14336),
        "norm1": (4096,),
        "norm2": (4096,),
    }.items()
]


@pytest.mark.parametrize(("num_shards", "percent"), [(8, 0.011), (64, 0.116), (256, 0.958), (1024, 7.69)])
def test_megatron_on_a_llama_layer(num_shards, percent):
    numel = sum(t.numel for t in LLAMA)
    for rule in (megatron_stable_layout, megatron_experimental_layout):
        shard = megatron(LLAMA, num_shards, rule)
        assert shard
        assert 100 * (num_shards * shard / numel - 1) == pytest.approx(percent, abs=0.006)


def test_fsdp2_and_zero3_on_a_llama_layer():
    numel = sum(t.numel for t in LLAMA)
    assert fsdp2(LLAMA, 1024) * 1024 == zero3(LLAMA, 1024) * 1024 == numel
    assert 100 * (fsdp2(LLAMA, 2048) * 2048 / numel - 1) == pytest.approx(3.85, abs=0.01)


def test_a_rule_that_cuts_a_row_does_not_count():
    tensors = [TensorSpec(f"t{i}", shape, block=rows(1)) for i, shape in enumerate([(4, 6), (2, 4), (2, 5)])]
    assert megatron(tensors, 2, megatron_stable_layout) is None
    assert up(7, 5) == 10


def random_shapes(seed: int) -> list[tuple[int, ...]]:
    chosen = random.Random(seed)
    return [tuple(chosen.randint(1, 9) for _ in range(chosen.randint(1, 3))) for _ in range(chosen.randint(1, 8))]


@pytest.mark.parametrize("seed", range(20))
def test_megatron_against_its_wheel(seed):
    """Sizes and offsets on random lists, by the published wheel's own functions."""
    torch = pytest.importorskip("torch")
    buffers = pytest.importorskip("megatron_fsdp.param_and_grad_buffer")
    layouts = pytest.importorskip("megatron_fsdp.experimental.layout")
    for shapes in (random_shapes(100 * seed + i) for i in range(100)):
        sizes = [(torch.Size(s).numel(), torch.Size(s)[1:].numel()) for s in shapes]
        for num_shards in (1, 2, 3, 8):
            size, placed = megatron_experimental_layout(sizes, num_shards)
            theirs = layouts.GlobalLayout.build(shapes, num_shards)
            assert (size, sorted((i, o) for o, i in placed)) == (
                theirs.size,
                list(enumerate(theirs.tensor_to_offset)),
            )
            order = sorted(range(len(sizes)), key=lambda i: -sizes[i][1])
            items, bucket, _ = buffers.build_data_parallel_buffer_index(
                [torch.Size(shapes[i]) for i in order],
                0,
                num_shards,
                True,
                SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params"),
                chunk_size_factor=stable_chunk(sizes),
            )
            size, placed = megatron_stable_layout(sizes, num_shards)
            assert size == bucket.size
            assert {order[k]: item.global_data_index for k, item in items.items()} == {i: o for o, i in placed}


DEEP_MODELS = ("mamba_2p8b", "mixtral_8x7b_fused")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "model", ["gpt2_124m", "llama31_8b", *(pytest.param(m, marks=pytest.mark.deep) for m in DEEP_MODELS)]
)
def test_never_more_bytes_than_a_rival(model, block):
    """A part of the grid in `benchmarks/results`; the whole is run by hand."""
    groups = only_matrices(read_shapes(MODELS / f"{model}.json", BLOCKS[block]), block)
    for num_shards in (7, 64, 1024):
        found = cell(groups, block, num_shards)
        assert found["bound"] <= found["padding"] * (1 + 1e-12)
        assert found["floor"] <= found["padding"] * (1 + 1e-12)
        for name in RIVALS:
            if found[name] is not None:
                assert found["padding"] <= found[name] + 1e-12 * (1 + found[name]), name


@pytest.mark.parametrize(
    ("model", "num_shards", "block", "percent"),
    [
        ("llama31_8b", 1024, "32 x 32", 0.01),
        ("llama31_8b", 256, "128 x 128", 0.09),
        ("gpt_oss_20b", 1024, "32 x 32", 0.13),  # 2880 is 22.5 tiles of 128
        ("gpt_oss_20b", 256, "128 x 128", 0.40),
        ("llama31_405b", 6, "32 rows", 0.08),
        ("qwen3_32b", 1024, "row", 0.03),
    ],
)
def test_padding_that_must_not_grow(model, num_shards, block, percent):
    groups = read_shapes(MODELS / f"{model}.json", BLOCKS[block])
    assert 100 * cell(groups, block, num_shards)["padding"] <= percent
