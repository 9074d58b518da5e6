"""`torch_bridge.fully_shard` against PyTorch's own (FSDP2): losses, step times, copied bytes and peak memory.

On a machine with GPUs it runs on NCCL, one rank each; elsewhere on gloo with a few processes. Every round times all
variants in one set of processes, in turn and in the opposite order every other round, so that ratios are paired:

  python benchmarks/torch_cuda.py --world 2 4 --width 256 512

FSDP2 waits for a collective at once on a CPU. `ragged sync, its collectives` does so too, prefetches nothing and
calls what FSDP2 calls: against FSDP2 that is what fewer copies are worth. `ragged sync` replaces what gloo is slow
at; `ragged` waits where results are used, so that they overlap. On NCCL the first two are the same.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch_copies import copies_of
from torch_cuda_table import STAGES, VARIANTS, table

import torch_bridge as tb
from torch_bridge import _collectives, _reduction, _unit

VOCAB, LAYERS, BATCH, LENGTH = 1024, 8, 4, 32
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16, summed in float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, 64)).transpose(1, 2) for y in self.mix(self.norms[0](x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(LAYERS)])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def waited(start: Callable) -> Callable:
    """The same collective, waited for at once."""

    def started(*args):
        work = start(*args)
        work.wait()
        return _Done()

    return started


class _Done:
    def wait(self) -> None:
        pass


@contextmanager
def variant_of_collectives(name: str) -> Iterator[None]:
    gather, reduce, on_cpu = _unit.start_gather, _reduction.start_reduce, _collectives._is_on_cpu
    if "sync" in name:
        _unit.start_gather, _reduction.start_reduce = waited(gather), waited(reduce)
    if "its collectives" in name:
        _collectives._is_on_cpu = lambda _: False
    try:
        yield
    finally:
        _unit.start_gather, _reduction.start_reduce, _collectives._is_on_cpu = gather, reduce, on_cpu


class Run:
    """A model under one variant, its optimizer and its data."""

    def __init__(self, name: str, width: int, device: torch.device, lr: float = 1e-3, precision: str = "float32"):
        self.name, self.device = name, device
        self.model = Model(width).to(device)
        policy = POLICIES[precision]
        if name == "fsdp2":
            for block in self.model.blocks:
                fsdp2(block, mp_policy=policy)
            fsdp2(self.model, mp_policy=policy)
        elif name == "plain":
            self.model.to(policy.param_dtype or torch.float32)
        else:
            tb.fully_shard(self.model, units=Block, prefetch=0 if "sync" in name else 1, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr, foreach=True)
        shape = (max(BATCH, dist.get_world_size()), LENGTH + 1)
        tokens = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))
        self.tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()].to(device)

    def step(self) -> torch.Tensor:
        with variant_of_collectives(self.name):
            logits = self.model(self.tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        self._rest()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._rest()
        return (time.perf_counter() - start) / steps

    def _rest(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def copied(self) -> dict[str, dict[str, int]]:
        return copies_of(self.step, self.device.type == "cpu")


def losses(run: Run, steps: int) -> list[float]:
    made = []
    for _ in range(steps):
        total = run.step()
        dist.all_reduce(total)
        made.append(float(total) / dist.get_world_size())
    return made


def measure(width: int, rounds: int, steps: int, device: torch.device) -> dict:
    """Everything that is compared in one set of processes."""
    still = losses(Run("ragged", width, device, lr=0.0), 2)
    runs = {name: Run(name, width, device) for name in VARIANTS}
    first = {name: losses(run, 5) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for k in range(rounds + 1):
        for name in VARIANTS if k % 2 else reversed(VARIANTS):
            seconds = runs[name].seconds(steps)
            if k:
                times[name].append(seconds)
    return {
        "losses": first,
        "largest relative loss difference": {
            name: max(abs(a / b - 1) for a, b in zip(first[name], first["fsdp2"], strict=True)) for name in VARIANTS
        },
        "loss moves": first["fsdp2"][0] - first["fsdp2"][-1],
        "loss moves at lr 0": still[0] - still[1],
        "milliseconds": {name: _quartiles([1e3 * t for t in times[name]]) for name in VARIANTS},
        "ratio of variants": {
            f"{a} / {b}": _quartiles([x / y for x, y in zip(times[a], times[b], strict=True)]) for a, b in STAGES
        },
    }


def copies(width: int, device: torch.device) -> dict:
    """Bytes that a step copies and fills: of FSDP2, of the runtime, and of the model itself, by precision."""
    found = {}
    for precision in POLICIES:
        found[precision] = {}
        for name in ("plain", "fsdp2", "ragged"):
            run = Run(name, width, device, precision=precision)
            run.step()
            found[precision][name] = run.copied()
    return found


def peak(name: str, width: int, device: torch.device) -> dict:
    """Peak memory of steps of one variant alone, above that of the process before: of the GPU, or resident."""
    cuda = device.type == "cuda"
    before = 0 if cuda else _resident("VmRSS")
    run = Run(name, width, device)
    for _ in range(2):  # the optimizer has its state then
        run.step()
    gc.collect()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    for _ in range(4):
        run.step()
    return {"peak bytes": (torch.cuda.max_memory_allocated() if cuda else _resident("VmHWM")) - before}


def _resident(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def _quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(x, 4) for x in statistics.quantiles(values, n=4, method="inclusive")]


def rank_main(rank: int, world: int, folder: str, kind: str, arguments: tuple) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world, store=store)
    result = {"measure": measure, "copies": copies, "peak": peak}[kind](*arguments, device)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    gc.collect()  # models in cycles hold the group
    dist.destroy_process_group()


def job(world: int, kind: str, *arguments: object) -> dict:
    """Runs one set of processes; the first rank's result."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder, kind, arguments), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
        return json.loads(Path(folder, "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpus = torch.cuda.device_count()
    parser.add_argument("--world", type=int, nargs="+", default=[gpus] if gpus else [2, 4])
    parser.add_argument("--width", type=int, nargs="+", default=[4096] if gpus else [256, 512])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="of each variant in a round")
    parser.add_argument("--peaks", type=int, default=3, help="processes in which peak memory is measured")
    parser.add_argument("--out", type=Path, help="a folder for the results, torch_cuda.json and torch_cuda.md")
    options = parser.parse_args()
    found = []
    for world in options.world:
        for width in options.width:
            result = {"world": world, "width": width, **job(world, "measure", width, options.rounds, options.steps)}
            result["bytes of a step"] = job(world, "copies", width)
            result["peak bytes"] = {
                name: sorted(job(world, "peak", name, width)["peak bytes"] for _ in range(options.peaks))
                for name in VARIANTS
            }
            found.append(result)
            print(json.dumps(result, indent=1), flush=True)
    facts = {
        "command": f"python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "device": ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
        or f"{os.cpu_count()} cores, {_cpu()}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}, {'NCCL' if gpus else 'gloo'}",
        "model": f"{LAYERS} blocks, vocabulary {VOCAB}, {BATCH} x {LENGTH} tokens over all ranks, AdamW",
        "rounds": f"{options.rounds} of {options.steps} steps of each variant, paired",
    }
    text = table(facts, found)
    print(text)
    if options.out:
        (options.out / "torch_cuda.json").write_text(json.dumps({**facts, "results": found}, indent=1) + "\n")
        (options.out / "torch_cuda.md").write_text(text)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((x.partition(": ")[2] for x in lines if x.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
