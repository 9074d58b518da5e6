"""Trains a byte-level GPT, fully sharded, on the source files of Python's standard library.

    python examples/train_gpt.py                        # 8 virtual CPU devices, under 3 minutes on 2 cores
    python examples/train_gpt.py --devices 7            # any number; nothing has to divide
    python examples/train_gpt.py --block tile:32x32     # what no device boundary may cut
    python examples/train_gpt.py --data my_book.txt
    python examples/train_gpt.py --optimizer adamw8bit  # 2 bytes of optimizer state a parameter, not 8
    python examples/train_gpt.py --save-every 20            # kill it at any moment ...
    python examples/train_gpt.py --save-every 20 --resume   # ... and go on, also with another --devices

    python examples/train_gpt.py --processes 2          # two processes, each with half of the devices and the batch

Started by hand, on one machine or several (where jax can find the others itself, under Slurm, Open MPI or Kubernetes
or on a TPU pod, it is `--coordinator auto`):

    for i in 0 1; do
        python examples/train_gpt.py --coordinator localhost:8476 --num-processes 2 --process-id $i &
    done; wait
"""

import argparse
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import text
import tyro
from flax import nnx
from gpt import GPT, Block, GPTConfig
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from pictures import draw_losses
from rich.console import Console
from setting import launch, make_mesh, mib, nbytes_per_device, on_mesh, progress_bar, settle

import ragged_jax as rj
from ragged_jax.cli import block_rule
from ragged_jax.planner import draw, plan_table


@dataclass(frozen=True)
class Config:
    """Trains a byte-level GPT with ragged FSDP.

    Attributes:
      data: a text file or a folder of them; Python's standard library by default.
      out: where the pictures go.
      devices: how many share the model; by default 8 virtual ones on a CPU and all there are elsewhere.
      block: what no device boundary may cut: rows:32, tile:32x32, elements:256 or whole.
      steps: optimizer steps.
      batch: sequences a step, rounded up to a multiple of the devices.
      length: bytes of a sequence.
      optimizer: adamw, or adamw8bit, whose blocks of 256 elements `block` must not cut.
      learning_rate: its peak, after a tenth of the steps; a cosine leads from there to zero.
      save_every: steps between checkpoints, which go to `out`; 0 for none.
      resume: go on from the last checkpoint in `out`, if there is one.
      held_out: how many bytes of the held-out files judge the model.
      sample: bytes to write in the end.
      seed: of the model and of the order of the text.
      processes: start so many of this here, which share the devices and the batch.
      coordinator: host:port of process 0 when several run this, or auto.
      num_processes: how many run it.
      process_id: which of them this is.
      model: its sizes.
    """

    data: Path | None = None
    out: Path = Path("out")
    devices: int | None = None
    block: str = "rows:32"
    steps: int = 240
    batch: int = 8
    length: int = 64
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    learning_rate: float = 1e-3
    save_every: int = 0
    resume: bool = False
    held_out: int = 32768
    sample: int = 48
    seed: int = 0
    processes: int | None = None
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    model: GPTConfig = field(default_factory=GPTConfig)


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    """Bits per byte of windows [sequences, length + 1]."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean() / math.log(2)


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = rj.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model: GPT, batch: jax.Array) -> jax.Array:
    return rj.apply(loss_fn)(model, batch)


def write_on(model: GPT, tokens: jax.Array, key: jax.Array, start: int) -> jax.Array:
    """Replaces `tokens` [sequences, length] from position `start` on by what the model draws, byte after byte."""

    def write(tokens, position):
        logits = model(tokens)[:, position - 1]
        drawn = jax.random.categorical(jax.random.fold_in(key, position), logits)
        return tokens.at[:, position].set(drawn), None

    return jax.lax.scan(write, tokens, jnp.arange(start, tokens.shape[1]))[0]


@nnx.jit(static_argnames="start")
def sample_step(model: GPT, tokens: jax.Array, key: jax.Array, start: int) -> jax.Array:
    return rj.apply(write_on)(model, tokens, key, start)


def main(config: Config) -> None:
    try:
        block = block_rule(config.block)  # as `ragged-jax plan` reads it
    except argparse.ArgumentTypeError as error:
        raise SystemExit(f"--block {error}") from None
    if config.processes is not None and config.num_processes is None:
        raise SystemExit(launch(config.processes))
    mesh = make_mesh(config.devices, config.coordinator, config.num_processes, config.process_id)
    console = Console(quiet=jax.process_index() > 0, highlight=False)
    batch_size = -(-config.batch // mesh.size) * mesh.size
    corpus = text.load(config.data)
    judged_size = 4 * batch_size  # sequences at a time: no backward pass, more room
    num_judged = -(-config.held_out // (config.length * judged_size)) * judged_size
    judged = text.windows(corpus.held_out, num_judged, config.length)
    bigram = text.bigram_bits(corpus.train, judged)

    make = lambda: GPT(config.model, rngs=nnx.Rngs(config.seed))
    plan = rj.plan(nnx.eval_shape(make), mesh.size, units=Block, block=block)
    model = rj.fully_shard(make, mesh, axis="fsdp", units=Block, plan=plan)  # parameters are born as shards
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, config.steps // 10, config.steps)
    adam = optax.adamw if config.optimizer == "adamw" else rj.optim.adamw8bit
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adam(schedule, b2=0.95))
    optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)
    settle(optimizer, mesh)

    memory = f"{mib(nbytes_per_device(nnx.state((model, optimizer))))} a device"
    console.print(plan_table(plan))
    console.print(
        f"{sum(math.prod(t.shape) for t in plan.layout.tensors):,} parameters; with Adam's state {memory}, "
        f"{mesh.size} devices\n{len(corpus.train):,} bytes to train on: {corpus.source}"
    )
    before = evaluate(model, judged, judged_size, mesh)
    console.print(f"held out, before: {before:.3f} bits/byte; a bigram model: {bigram:.3f}")

    checkpoints = rj.Checkpointer(config.out / "checkpoints", keep=2) if config.save_every or config.resume else None
    losses: list[float] = []
    if checkpoints and (steps := checkpoints.steps()):
        if not config.resume:
            raise SystemExit(f"{config.out} has checkpoints of steps {steps}: give --resume, or another --out")
        state = checkpoints.restore({"model": model, "optimizer": optimizer})
        model, optimizer = state["model"], state["optimizer"]
        with checkpoints.open() as checkpoint:
            losses = checkpoint.metadata["losses"]
        console.print(f"going on from step {len(losses)}")
    first = len(losses)
    batches = on_mesh(text.batches(corpus.train, batch_size, config.length, config.seed, skip=first), mesh)
    start = time.perf_counter()
    with progress_bar(console) as bar, checkpoints or nullcontext():
        task = bar.add_task("", total=config.steps, completed=first, loss=before, speed=0.0, memory=memory)
        for step, batch in zip(range(first, config.steps), batches, strict=False):
            losses.append(float(train_step(model, optimizer, batch)))
            if step == first:
                start = time.perf_counter()  # the first step also compiles
            speed = (step - first) * batch_size * config.length / max(1e-9, time.perf_counter() - start)
            bar.update(task, advance=1, loss=losses[-1], speed=speed)
            if checkpoints and config.save_every and (step + 1) % config.save_every == 0:
                checkpoints.save(step + 1, {"model": model, "optimizer": optimizer}, {"losses": losses})
            if (step + 1) % max(1, config.steps // 10) == 0:
                bar.print(f"step {step + 1}: loss {losses[-1]:.3f} bits/byte, {speed:,.0f} tokens/s, {memory}")

    for prompt, written in sample(model, judged[: mesh.size], config, mesh)[:3]:
        console.print(f"  {prompt} -> {written}", markup=False)
    after = evaluate(model, judged, judged_size, mesh)
    console.print(f"held out, after: {after:.3f} bits/byte; a bigram model: {bigram:.3f}")
    if jax.process_index() == 0:
        config.out.mkdir(parents=True, exist_ok=True)
        draw(plan.layout, config.out / "layout.png")
        draw_losses(losses, before, after, bigram, config.out / "loss.png")
        np.savetxt(config.out / "loss.csv", losses, header="bits per byte, step by step")
        console.print(f"layout.png, loss.png and loss.csv are in {config.out}")


def evaluate(model: GPT, judged: np.ndarray, batch_size: int, mesh: Mesh) -> float:
    """Mean bits per byte on windows whose number `batch_size` divides."""
    batches = on_mesh(iter(np.split(judged, len(judged) // batch_size)), mesh)
    return float(np.mean([eval_step(model, batch) for batch in batches]))


def sample(model: GPT, judged: np.ndarray, config: Config, mesh: Mesh) -> list[tuple[bytes, bytes]]:
    """Continues the beginnings of held-out windows, one on each device: pairs of the beginning and what follows."""
    start = min(32, config.length)
    tokens = np.pad(judged[:, :start], [(0, 0), (0, config.sample)])
    written = sample_step(model, next(on_mesh(iter([tokens]), mesh)), jax.random.key(config.seed), start)
    rows = multihost_utils.process_allgather(written, tiled=True).astype(np.uint8)
    return [(row[:start].tobytes(), row[start:].tobytes()) for row in rows]


if __name__ == "__main__":
    main(tyro.cli(Config))
