"""The middle of `exchange_with_torch.py`: PyTorch ranks go on with what JAX devices began.

torchrun --nproc-per-node 3 exchange_torch_leg.py FOLDER STOP BATCH LENGTH RATE SEED DEPTH WIDTH HEAD [DATA]
"""

import math
import sys
from pathlib import Path

import text
import torch
import torch.distributed as dist
from gpt_torch import GPT, Block
from torch import nn

import torch_bridge as tb
from ragged_jax.layout import elements

ADAMW = "opt/opt_state/inner/adamw"  # where `ragged_jax.optim.muon` keeps the state of its second optimizer


def start(sizes: list[int], rate: float) -> dict:
    """The model, nowhere whole and without values, and its two optimizers, under the names of the JAX job."""
    with torch.device("meta"):
        model = GPT(*sizes)
    tb.fully_shard(model, units=Block, block=elements(256), names=tb.flax_names(model))
    routes = tb.optim.routing(model).routes
    hidden = [p for p, route in zip(model.parameters(), routes, strict=True) if route.to == "muon"]
    others = [p for p, route in zip(model.parameters(), routes, strict=True) if route.to == "adamw"]
    muon = tb.optim.Muon(hidden, lr=10 * rate)
    adamw = tb.optim.AdamW8bit(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    return {"model": model, "opt": muon, ADAMW: adamw}


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Bits per byte of windows [sequences, length + 1]."""
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / math.log(2)


def train_step(state: dict, batch: torch.Tensor) -> float:
    loss = loss_fn(state["model"], batch.chunk(dist.get_world_size())[dist.get_rank()].long())
    loss.backward()
    for optimizer in (state["opt"], state[ADAMW]):
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    return loss.item() / dist.get_world_size()


def main(folder: str, stop: str, batch: str, length: str, rate: str, seed: str, *rest: str) -> None:
    dist.init_process_group("gloo")
    sizes, data = [int(size) for size in rest[:3]], Path(rest[3]) if rest[3:] else None
    state = start(sizes, float(rate))
    with tb.Checkpointer(folder, state_names={ADAMW: tb.ADAMW.at("")}) as checkpointer:
        checkpointer.restore(state)
        with checkpointer.open() as checkpoint:
            losses = checkpoint.metadata["losses"]
        corpus = text.load(data).train
        batches = text.batches(corpus, int(batch), int(length), int(seed), skip=len(losses))
        while len(losses) < int(stop):
            losses.append(train_step(state, torch.from_numpy(next(batches))))
        checkpointer.save(int(stop), state, {"losses": losses})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
