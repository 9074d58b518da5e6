"""One optimizer step in torch on the parameters of a fully sharded transformer, in one process.

All update the same parameters with gradients of their own size, in turn, each round a ratio to the first: on a shared
machine only the ratios mean something. Muon has nobody to exchange with here, its time is matrix products.

    python benchmarks/torch_optim.py --rounds 15 --out benchmarks/results
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch import nn

import torch_bridge as tb
from ragged_jax.layout import elements


@dataclass(frozen=True)
class Arguments:
    """What to run.

    Attributes:
      layers: of the model.
      widths: d; layers have d x 3d, d x d, d x 4d and 4d x d, with biases, and two norms.
      rounds: steps of each optimizer, after two that are not counted.
      out: a folder for the results, `torch_optim.md`.
    """

    layers: int = 24
    widths: tuple[int, ...] = (128, 256)
    rounds: int = 15
    out: Path | None = None


def model_of(layers: int, d: int) -> nn.Module:
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}

    def block() -> nn.Module:
        norms = {"norm1": nn.LayerNorm(d), "norm2": nn.LayerNorm(d)}
        return nn.ModuleDict({**{name: nn.Linear(*size) for name, size in sizes.items()}, **norms})

    blocks = [block() for _ in range(layers)]
    return tb.fully_shard(nn.ModuleList(blocks), units=nn.ModuleDict, block=elements(256))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch.optim.AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "torch.optim.AdamW, foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "AdamW": lambda m: tb.optim.AdamW(m.parameters()),
    "AdamW8bit": lambda m: tb.optim.AdamW8bit(m.parameters()),
    "Muon": lambda m: tb.optim.Muon(m.parameters()),
}


def measured(layers: int, width: int, rounds: int) -> list[str]:
    models = {name: model_of(layers, width) for name in OPTIMIZERS}
    optimizers = {name: make(models[name]) for name, make in OPTIMIZERS.items()}
    times: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    for model in models.values():  # gradients as a backward pass leaves them: views of one buffer per unit
        for unit in tb._fully_shard.runtime_of(model).units:
            for memory, slots in unit._slots:
                grads = torch.randn_like(memory.shards)
                for slot in slots:
                    slot.shard.grad = slot.slab.piece(grads, slot.placement)
    for _ in range(rounds + 2):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            times[name].append(time.process_time() - start)
    first, lines = times[next(iter(times))], []
    for name, optimizer in optimizers.items():
        ratios = sorted(t / u for t, u in list(zip(times[name], first, strict=True))[2:])
        states = [x for state in optimizer.state.values() for key, x in state.items() if key != "step"]
        numel = sum(p.numel() for p in models[name].parameters())
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        nbytes = sum(x.nbytes for x in states) / numel
        lines.append(
            f"| {width} | {numel:,} | {name} | {1e3 * statistics.median(times[name][2:]):.1f} | "
            f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) | {nbytes:.2f} |"
        )
    return lines


def main(args: Arguments) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        lines = [
            "| d | parameters | optimizer | CPU ms a step | ratio (quartiles) | state, bytes a parameter |",
            "|---:|---:|---|---:|---:|---:|",
            *(line for width in args.widths for line in measured(args.layers, width, args.rounds)),
        ]
        dist.destroy_process_group()
    text = "\n".join(
        [f"torch {torch.__version__}, one thread, {args.rounds} rounds, {args.layers} layers", "", *lines]
    )
    print(text)
    if args.out:
        command = f"python benchmarks/torch_optim.py --rounds {args.rounds} --out benchmarks/results"
        (args.out / "torch_optim.md").write_text(f"# One optimizer step in torch\n\n`{command}`, {text}\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
