"""What every rank does with `torch_bridge.optim`; run by `fsdp_cases.py`."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from checks import scratch
from fsdp_cases import STEPS, Block, compare_losses, compare_states, data, loss_of, make, mine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_bridge as tb
from ragged_jax.layout import BlockRule, elements, rows, tile
from ragged_jax.optim._reference import Adam8bit
from torch_bridge._fully_shard import runtime_of

Make = Callable[[nn.Module], torch.optim.Optimizer]
PATTERN = {"*embed*": elements(256), "*up/weight": elements(512), "*": elements(256)}

RATE = 3e-3


def groups(model: nn.Module) -> list[dict]:
    """Norms and biases are not decayed, the first block learns slower; frozen parameters are there, too."""
    named = list(model.named_parameters())
    vectors = [(n, p) for n, p in named if "norm" in n or "bias" in n]
    slow = [(n, p) for n, p in named if n.startswith("blocks.0.") and all(p is not q for _, q in vectors)]
    rest = [(n, p) for n, p in named if all(p is not q for _, q in [*vectors, *slow])]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": slow, "lr": 1e-3}, {"params": rest}]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return tb.optim.AdamW(groups(model), lr=RATE, eps=1e-4)


def torch_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=RATE, eps=1e-4)


def adamw8bit(model: nn.Module) -> torch.optim.Optimizer:
    return tb.optim.AdamW8bit(groups(model), lr=RATE, eps=1e-4, block={"*down*": None, **PATTERN}, min_numel=1000)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Also where the layout has Flax's names and shapes, (in, out)."""
    options = {"coefficients": "polar_express", "weight_decay": 0.01, "adamw_lr": 3e-3, "adamw_eps": 1e-4}
    return tb.optim.Muon(model.named_parameters(), lr=0.01, **options)


def train(model: nn.Module, make_optimizer: Make, tokens: torch.Tensor, microbatches: int = 1) -> list[torch.Tensor]:
    optimizer, losses = make_optimizer(model), []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for batch in tokens:
        total = torch.zeros(())
        for i, part in enumerate(batch.chunk(microbatches)):
            if hasattr(model, "_ragged_runtime"):
                tb.set_requires_gradient_sync(model, i == microbatches - 1)
            loss = loss_of(model, part) / microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def parity(
    make_optimizer: Make,
    reference_optimizer: Make | None = None,
    *,
    steps: int = STEPS,
    in_8_bits: bool = False,
    **sharded: Any,
) -> None:
    """The losses and parameters equal those of one process with whole tensors and batches.

    On the odd model, with accumulation, activation checkpointing, a schedule and frozen parameters in the groups.
    """
    model, tokens = frozen_in_part(), data()[:steps, :, :4]
    tb.fully_shard(model, units=Block, **sharded)
    losses = train(model, make_optimizer, mine(tokens), 2)
    got = tb.full_state_dict(model)
    if dist.get_rank() == 0:
        reference = frozen_in_part()
        want = [train(reference, reference_optimizer or make_optimizer, tokens), reference.state_dict()]
    else:
        want = [None, None]
    dist.broadcast_object_list(want)
    want_losses, want_state = want
    compare_losses(losses, want_losses, 5e-3 if "mp_policy" in sharded else 1e-5)  # type: ignore
    if "mp_policy" not in sharded:
        compare = close_but_for_codes if in_8_bits else compare_states
        compare(got, want_state)  # type: ignore
    assert torch.equal(got["blocks.1.up.weight"], make().blocks[1].up.weight), "a frozen parameter was moved"


def frozen_in_part() -> nn.Module:
    model = make(remat="yes")
    model.blocks[1].up.weight.requires_grad_(False)
    return model


def close_but_for_codes(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Sums in another order may end on the other side of a midpoint: a few elements, and by a part of the rate."""
    far = total = 0
    for name, x in want.items():
        if x.is_floating_point() and "unused" not in name and x.numel():
            off = (got[name] - x).abs()
            assert off.max() < RATE / 3, name
            far, total = far + int((off > 2e-5 * x.abs().max()).sum()), total + x.numel()
    assert far <= 2e-3 * total, f"{far} of {total}"


def hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    parity(adamw, torch_adamw, mesh=mesh)
    parity(adamw8bit, block=PATTERN, in_8_bits=True, mesh=mesh)
    parity(muon, mesh=mesh)


def mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parity(adamw, torch_adamw, steps=8, mp_policy=policy)
    parity(adamw8bit, block=PATTERN, in_8_bits=True, steps=8, mp_policy=policy)
    parity(muon, steps=8, mp_policy=policy)


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Of whole tensors, heavy-tailed, with exact zeros."""
    rng, made = np.random.default_rng(step), {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            g = rng.normal(size=p.shape) * 10 ** rng.uniform(-6, 1, p.shape) * (rng.random(p.shape) > 0.1)
            made[name.replace(".", "/")] = torch.from_numpy(np.asarray(g, np.float32))
    return made


def give(model: nn.Module, optimizer: tb.optim.ShardedOptimizer, grads: dict[str, torch.Tensor]) -> None:
    """To each rank its part of whole gradients."""
    for p in model.parameters():
        if (local := optimizer.local(p)).name in grads:
            p.grad = grads[local.name].reshape(-1)[local.start : local.stop].clone().view(p.shape)


def bits(block: BlockRule, numpy_block, shares: bool = False) -> None:
    """Codes and scales equal those of numpy, every block once, and take two bytes for each parameter."""
    whole, model = make(), make()
    size = dist.get_world_size()
    uneven = tb.plan_module(model, size, units=Block, block=block, shares=[1 + k for k in range(size)])
    tb.fully_shard(model, units=Block, **({"plan": uneven} if shares else {"block": block}))
    optimizer = tb.optim.AdamW8bit(model.parameters(), block=numpy_block)
    adam, states = Adam8bit(block=numpy_block), {}
    for step in range(3):
        grads = gradients(whole, step)
        give(model, optimizer, grads)
        optimizer.step()
        for name, g in grads.items():
            if g.numel() >= 4096:
                states[name] = adam.update(g.numpy(), states.get(name) or adam.init(g.shape))[1]
    assert {"embed/weight", "blocks/0/mix/weight"} <= states.keys()
    seen = dict.fromkeys(states, 0)
    for x in optimizer.named_state().values():
        if x.part == "exact":
            assert x.tensor not in states
            continue
        whole_state = getattr(states[x.tensor], f"{x.moment[2:]}_{x.part}").reshape(-1)
        assert x.shape == (whole_state.shape if x.part == "scales" else optimizer_shape(optimizer, x.tensor))
        np.testing.assert_array_equal(x.data.numpy(), whole_state[x.start : x.stop], err_msg=x.name)
        seen[x.tensor] += x.data.nbytes
    total = torch.tensor([*seen.values()])
    dist.all_reduce(total)
    for nbytes, name in zip(total.tolist(), seen, strict=True):
        q = states[name]
        assert nbytes == q.mu_codes.size + q.nu_codes.size + 4 * (q.mu_scales.size + q.nu_scales.size), name
        assert nbytes <= 2.1 * q.mu_codes.size


def optimizer_shape(optimizer: tb.optim.ShardedOptimizer, tensor: str) -> tuple[int, ...]:
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next(local.shape for p in params if (local := optimizer.local(p)).name == tensor)


def cut_blocks_raise() -> None:
    model = make()
    tb.fully_shard(model, units=Block, block=rows(1))
    try:
        tb.optim.AdamW8bit(model.parameters())
        message = ""
    except ValueError as error:
        message = str(error)
    if dist.get_world_size() > 1:
        for text in ("embed/weight: shape (1601, 48), quantised in elements(256), cut at element", "block="):
            assert text in message, message
    else:
        assert not message


def each_optimizer() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    for make_optimizer in (adamw, adamw8bit, muon):
        model = make()
        model.embed.weight.requires_grad_(False)
        tb.fully_shard(model, units=Block, block=PATTERN)
        yield model, make_optimizer(model)


def nothing_between_parameters_is_touched() -> None:
    """Padding, and a parameter that is frozen after the model was sharded, between others that are updated."""
    for model, optimizer in each_optimizer():
        model.blocks[0].down.weight.requires_grad_(False)
        frozen = model.blocks[0].down.weight.detach().clone()
        gaps = []
        for unit in runtime_of(model).units:
            for memory, slots in unit._slots:
                if memory.shards.is_floating_point():
                    gap = torch.ones_like(memory.shards, dtype=torch.bool)
                    for slot in slots:
                        slot.slab.piece(gap, slot.placement).fill_(False)
                    memory.shards[gap] = 7.0
                    gaps.append((memory, gap))
        for batch in mine(data()[:2]):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(bool((memory.shards[gap] == 7).all()) for memory, gap in gaps)
        assert sum(int(gap.sum()) for _, gap in gaps)
        assert torch.equal(model.blocks[0].down.weight, frozen)


def state_dicts() -> None:
    """Training goes on with the same bits after the state was saved and loaded, by name and in a checkpoint, too."""
    for (model, optimizer), (copy, fresh), (named, by_name), (again, restored) in zip(
        *(each_optimizer() for _ in range(4)), strict=True
    ):
        tokens = mine(data()[:3])

        def steps(m, o, batches):
            for batch in batches:
                loss_of(m, batch).backward()
                o.step()
                o.zero_grad()

        steps(model, optimizer, tokens[:2])
        for other in (copy, named):
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                p.data.copy_(q)
        fresh.load_state_dict(optimizer.state_dict())
        into = by_name.named_state()
        for name, x in optimizer.named_state().items():
            into[name].data.copy_(x.data)
        by_name.num_steps = optimizer.num_steps
        with scratch() as folder, tb.Checkpointer(folder, background=False) as checkpointer:
            checkpointer.save(2, {"model": model, "opt": optimizer})
            checkpointer.restore({"model": again, "opt": restored})
        assert optimizer.num_steps == restored.num_steps == 2
        models = model, copy, named, again
        for m, o in zip(models, (optimizer, fresh, by_name, restored), strict=True):
            steps(m, o, tokens[2:])
        for p, *others in zip(*(m.parameters() for m in models), strict=True):
            assert all(torch.equal(p, q) for q in others)


def one_exchange_each_way() -> None:
    """Muon starts two collectives for all matrices, and makes of gradients what whole tensors would."""
    reference, model = make(), make()
    tb.fully_shard(model, units=Block)
    optimizer, whole = muon(model), muon(reference)
    grads = {name: g.clamp(-1, 1) for name, g in gradients(reference, 0).items()}
    give(model, optimizer, grads)
    give(reference, whole, grads)
    whole.step()
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        optimizer.step()
    compare_states(tb.full_state_dict(model), reference.state_dict(), rtol=1e-6)
    assert exchange.call_count == 2 * (dist.get_world_size() > 1)
    assert optimizer.routing["blocks/0/up/weight"].to == "muon"
    assert optimizer.routing["embed/weight"].why == "an embedding"
    (owners,) = optimizer._owners.values()
    assert len(owners.plan.matrices) == 12  # three matrices and one that is not used, of three blocks
    count = torch.tensor([len(owners.owned)])
    dist.all_reduce(count)
    assert int(count) == 12


CASES: dict[str, Callable[[], None]] = {
    "AdamW": lambda: parity(adamw, torch_adamw),
    "AdamW8bit": lambda: parity(adamw8bit, block=PATTERN, in_8_bits=True),
    "Muon": lambda: parity(muon),
    "bits of elements": lambda: bits(elements(256), elements(256)),
    "bits of rows, uneven": lambda: bits(rows(3), rows(3), shares=True),
    "bits of tiles": lambda: bits(tile(32, 16), tile(32, 16)),
    "cut blocks": cut_blocks_raise,
    "between parameters": nothing_between_parameters_is_touched,
    "state dicts": state_dicts,
    "one exchange": one_exchange_each_way,
}
TWO_RANKS = {
    "optimizers in mixed precision": mixed_precision,
    "Muon, transposed": lambda: parity(muon, steps=5, names=tb.flax_names(make())),
}
FOUR_RANKS = {**{name: CASES[name] for name in ("AdamW", "AdamW8bit", "Muon")}, "optimizers, hsdp": hsdp}
