"""One training run in two frameworks: JAX on 4 devices, PyTorch on 3 ranks, JAX on 2 devices.

    python examples/exchange_with_torch.py

A byte-level GPT learns the source files of Python's standard library with Muon and 8-bit AdamW. After a third of the
steps the run is saved; `exchange_torch_leg.py` goes on with the same data in the same order, and saves; JAX does the
rest. Parameters and optimizer state move as files: each rank reads its own part of them. The picture in `out` holds
the losses against those of the run that stays on 4 devices.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import text
import tyro
from flax import nnx
from gpt import GPT, Block, GPTConfig
from jax.sharding import Mesh
from pictures import draw_exchange
from setting import on_mesh, settle
from train_gpt import train_step

import ragged_jax as rj

TORCH_RANKS = 3
BLOCK = rj.elements(256)  # of 8-bit AdamW


@dataclass(frozen=True)
class Config:
    """Trains one GPT in JAX, in PyTorch and in JAX again.

    Attributes:
      data: a text file or a folder of them; Python's standard library by default.
      out: where checkpoints and the picture go.
      steps: of each leg.
      batch: sequences a step; 4, 3 and 2 divide it.
      length: bytes of a sequence.
      learning_rate: of AdamW; Muon's is ten times that.
      seed: of the model and of the order of the text.
      model: its sizes.
    """

    data: Path | None = None
    out: Path = Path("out/exchange")
    steps: int = 40
    batch: int = 12
    length: int = 64
    learning_rate: float = 2e-3
    seed: int = 0
    model: GPTConfig = field(default_factory=lambda: GPTConfig(depth=2, width=128, head_width=32))


def start(config: Config, mesh: Mesh) -> tuple[GPT, nnx.Optimizer]:
    """The untrained model and its optimizer."""
    make = lambda: GPT(config.model, rngs=nnx.Rngs(config.seed))
    model = rj.fully_shard(make, mesh, axis="fsdp", units=Block, block=BLOCK)
    adamw = rj.optim.adamw8bit(config.learning_rate, b2=0.95, weight_decay=0.01)
    optimizer = nnx.Optimizer(model, rj.optim.muon(10 * config.learning_rate, adamw=adamw), wrt=nnx.Param)
    settle(optimizer, mesh)
    return model, optimizer


def train(config: Config, mesh: Mesh, state: dict, first: int, stop: int) -> list[float]:
    """The losses of the steps from `first` to `stop`, in bits per byte."""
    corpus = text.load(config.data).train
    batches = on_mesh(text.batches(corpus, config.batch, config.length, config.seed, skip=first), mesh)
    return [
        float(train_step(state["model"], state["opt"], batch))
        for _, batch in zip(range(first, stop), batches, strict=False)
    ]


def torch_leg(config: Config, folder: Path, stop: int) -> None:
    """Three PyTorch ranks restore the last checkpoint, train up to a step, and save."""
    sizes = [config.model.depth, config.model.width, config.model.head_width]
    arguments = [folder, stop, config.batch, config.length, config.learning_rate, config.seed, *sizes]
    arguments += [config.data] if config.data else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TORCH_RANKS}"]
    program = Path(__file__).parent / "exchange_torch_leg.py"
    subprocess.run([*launcher, str(program), *map(str, arguments)], check=True)


def main(config: Config) -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # without effect on other platforms
    folder, steps = config.out / "checkpoints", config.steps
    if folder.exists():
        raise SystemExit(f"{folder} exists; remove it, or give another --out")
    meshes = [jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n]) for n in (4, 2)]

    with jax.set_mesh(meshes[0]), rj.Checkpointer(folder) as checkpointer:
        model, optimizer = start(config, meshes[0])
        state = {"model": model, "opt": optimizer}
        losses = train(config, meshes[0], state, 0, steps)
        checkpointer.save(steps, state, {"losses": losses})
        unbroken = losses + train(config, meshes[0], state, steps, 3 * steps)  # the run that stays
    print(f"JAX on 4 devices: {losses[0]:.3f} to {losses[-1]:.3f} bits per byte")

    torch_leg(config, folder, 2 * steps)

    with jax.set_mesh(meshes[1]), rj.Checkpointer(folder) as checkpointer:
        model, optimizer = start(config, meshes[1])
        state = checkpointer.restore({"model": model, "opt": optimizer})
        with checkpointer.open() as checkpoint:
            losses = checkpoint.metadata["losses"]
        losses += train(config, meshes[1], state, 2 * steps, 3 * steps)
    print(f"PyTorch on {TORCH_RANKS} ranks: to {losses[2 * steps - 1]:.3f}; JAX on 2 devices: to {losses[-1]:.3f}")

    apart = np.abs(np.array(losses) / unbroken - 1)
    print(f"from the run that stays, losses are apart by at most {apart.max():.1e} of their size")
    names = ["JAX, 4 devices", f"PyTorch, {TORCH_RANKS} ranks", "JAX, 2 devices"]
    legs = {name: losses[at * steps : (at + 1) * steps] for at, name in enumerate(names)}
    draw_exchange(legs, unbroken, config.out / "exchange.png")
    np.savetxt(config.out / "exchange.csv", np.transpose([losses, unbroken]), header="three legs, unbroken")
    print(f"exchange.png and exchange.csv are in {config.out}")


if __name__ == "__main__":
    main(tyro.cli(Config))
