"""`torch_bridge` as one of thousands of ranks: the `fake` backend moves nothing, all sizes are real."""

# ruff: noqa: E402

import pytest

torch = pytest.importorskip("torch", reason="the torch extra is not installed")
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_bridge as tb
from ragged_jax.layout import rows
from torch_bridge._fully_shard import runtime_of


class Layer(nn.Module):
    """Of a model with 668 million parameters."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + width // 4, bias=False)
        self.out = nn.Linear(width + width // 4, width, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        x = x + self.out(self.qkv(self.norm(x)))
        return x + self.down(nn.functional.silu(self.up(x)))


def model_of(vocab: int, width: int, inner: int, depth: int) -> nn.Sequential:
    layers = [Layer(width, inner) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(vocab, width), *layers, nn.Linear(width, vocab, bias=False))


@pytest.fixture(params=[(1024, 0), (1024, 1023), (8192, 4000)], ids=str)
def world(request):
    size, rank = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield size
    dist.destroy_process_group()


def test_bytes_of_a_rank(world):
    """From meta: a rank's memory is its share, with less than 2 % on top; nothing is ever whole."""
    with torch.device("meta"):
        model = model_of(32000, 2048, 5632, 16)
    total = sum(p.nbytes for p in model.parameters())
    planned = tb.plan_module(model, world, units=Layer).layout
    tb.fully_shard(model, units=Layer)
    assert tb.get_layout(model) == planned
    units = runtime_of(model).units
    held = sum(unit.shard_nbytes for unit in units)
    slabs = sum(len(bucket.slabs) for bucket in planned.buckets)
    assert planned.shard_nbytes <= held <= planned.shard_nbytes + 64 * slabs
    assert total / world <= planned.shard_nbytes < 1.02 * total / world
    assert all(unit.whole_nbytes == 0 for unit in units)
    for name, p in model.named_parameters():
        start, stop = planned.ranges(name.replace(".", "/"))[dist.get_rank()]
        assert p.shape == (stop - start,)


@pytest.mark.parametrize("units", ["[12]", ("1", "2"), (Layer, "nothing")])
def test_units_by_pattern(units):
    with torch.device("meta"):
        model = model_of(64, 16, 32, 2)
    assert tb.plan_module(model, 2, units=units).layout == tb.plan_module(model, 2, units=Layer).layout


@pytest.mark.parametrize("world", [(1024, 0)], indirect=True)
def test_a_unit_is_one_message_unless_a_plan_says_otherwise(world):
    """Tensors are views of their slab here, so nothing is gained by slabs of their own."""
    with torch.device("meta"):
        model = model_of(32000, 2048, 5632, 2)
    assert [len(bucket.slabs) for bucket in tb.plan_module(model, world, units=Layer).layout.buckets] == [1, 1, 1]
    assert len(tb.plan_module(model, world, units=Layer, profile="h100").layout.buckets[1].slabs) > 1
    tb.fully_shard(model, units=Layer)
    assert all(len(memory.slabs) == 1 for unit in runtime_of(model).units for memory in unit._memories)


@pytest.mark.parametrize("world", [(1024, 0)], indirect=True)
def test_matrices_that_one_rank_has_to_itself_are_reported(world):
    model = tb.fully_shard(model_of(1601, 48, 100, 3), units=Layer)
    (note,) = tb.optim.Muon(model.parameters(), adamw_lr=1e-3).routing.notes
    assert f"for {world} ranks: 0/weight, 1/down/weight, 1/out/weight, 1/qkv/weight, " in note
    assert ", 4/weight. A" in note, "the last of them"


def test_a_step(world):
    """Forward, backward and an optimizer's step, in blocks of rows; no more is whole than the schedule says."""
    model = tb.fully_shard(model_of(1601, 48, 100, 3), units=Layer, block=rows(8))
    units, most = runtime_of(model).units, []
    for layer in model[1:-1]:
        layer.up.register_forward_hook(lambda *_: most.append(sum(u.whole_nbytes for u in units[1:])))
    for _ in range(2):  # the first pass sees the order, the second gathers ahead
        logits = model(torch.zeros(2, 5, dtype=torch.long))
        assert logits.shape == (2, 5, 1601)
        logits.sum().backward()
    before = {name: p.shape for name, p in model.named_parameters()}
    assert all(p.grad.shape == p.shape for p in model.parameters())
    torch.optim.AdamW(model.parameters()).step()
    assert {name: p.shape for name, p in model.named_parameters()} == before
    layer = max(bucket.shard_nbytes for bucket in tb.get_layout(model).buckets[1:]) * world
    assert layer / 2 < min(most) < max(most) <= 2 * layer + 1024
    assert all(unit.whole_nbytes == 0 for unit in units)
