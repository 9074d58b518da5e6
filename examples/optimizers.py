"""AdamW, AdamW in 8 bits and Muon on the byte-level GPT, fully sharded: their loss against the step, as a picture.

    python examples/optimizers.py                 # 4 virtual CPU devices, 4 optimizers of 300 steps, some minutes
    python examples/optimizers.py --devices 7     # the same curves up to rounding

Everything but the optimizer is the same: first weights, order of the text, schedule. What an optimizer must not have
cut (blocks of 256 elements, tiles) is what the model is sharded in.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax
import text
import tyro
from flax import nnx
from gpt import GPT, Block, GPTConfig
from pictures import draw_optimizers
from rich.console import Console
from setting import make_mesh, on_mesh, settle

import ragged_jax as rj


@dataclass(frozen=True)
class Config:
    """Trains one model with several optimizers.

    Attributes:
      data: a text file or a folder of them; Python's standard library by default.
      out: where the picture and the losses go.
      devices: how many share the model.
      steps: optimizer steps.
      batch: sequences a step, rounded up to a multiple of the devices.
      length: bytes of a sequence.
      learning_rate: of AdamW, its peak; a cosine leads from there to zero.
      muon_learning_rate: of the matrices that Muon updates.
      seed: of the model and of the order of the text.
      model: its sizes.
    """

    data: Path | None = None
    out: Path = Path("out")
    devices: int = 4
    steps: int = 300
    batch: int = 8
    length: int = 64
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.02
    seed: int = 0
    model: GPTConfig = field(default_factory=lambda: GPTConfig(depth=2, width=128))


def contenders(config: Config) -> dict[str, tuple[rj.Block, Callable[[], Any]]]:
    """By name: what no device boundary may cut, and the optimizer."""

    def falling(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, config.steps // 10, config.steps)

    adam = falling(config.learning_rate)
    tiles, elements = rj.tile(32, 32), rj.elements(256)
    return {
        "AdamW": (elements, lambda: optax.adamw(adam, b2=0.95)),
        "AdamW 8-bit": (elements, lambda: rj.optim.adamw8bit(adam, b2=0.95)),
        "AdamW 8-bit, 32 x 32 tiles": (tiles, lambda: rj.optim.adamw8bit(adam, b2=0.95, block=tiles)),
        "Muon": (elements, lambda: rj.optim.muon(falling(config.muon_learning_rate), adamw_learning_rate=adam)),
    }


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    """Bits per byte of windows [sequences, length + 1]."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean() / math.log(2)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = rj.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def main(config: Config) -> None:
    mesh = make_mesh(config.devices, None, None, None)
    console = Console(highlight=False)
    batch_size = -(-config.batch // mesh.size) * mesh.size
    corpus = text.load(config.data)
    losses: dict[str, list[float]] = {}
    with jax.set_mesh(mesh):
        for name, (block, make) in contenders(config).items():
            new = lambda: GPT(config.model, rngs=nnx.Rngs(config.seed))
            model = rj.fully_shard(new, mesh, axis="fsdp", units=Block, block=block)
            tx = optax.chain(rj.optim.clip_by_global_norm(1.0), make())
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            settle(optimizer, mesh)
            if name == "Muon":
                console.print(str(rj.optim.routing(model)), markup=False)
            batches = on_mesh(text.batches(corpus.train, batch_size, config.length, config.seed), mesh)
            losses[name] = [float(train_step(model, optimizer, next(batches))) for _ in range(config.steps)]
            last = losses[name][-max(1, config.steps // 10) :]
            console.print(f"{name}: {sum(last) / len(last):.3f} bits/byte over the last tenth of the steps")
    config.out.mkdir(parents=True, exist_ok=True)
    draw_optimizers(losses, config.out / "optimizers.png")
    with (config.out / "optimizers.csv").open("w", newline="") as file:
        csv.writer(file).writerows([losses, *zip(*losses.values(), strict=True)])
    console.print(f"optimizers.png and optimizers.csv are in {config.out}")


if __name__ == "__main__":
    main(tyro.cli(Config))
