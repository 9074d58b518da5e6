"""`torch_bridge.fully_shard` against PyTorch's own (FSDP2): losses, step times, copied bytes and peak memory.

On a machine with GPUs it runs on NCCL, one rank each; elsewhere on gloo with a few processes. Every round times all
variants in one set of processes, in turn and in the opposite order every other round, so that ratios are paired:

  python benchmarks/torch_cuda.py --world 2 4 --width 256 512

`ragged` starts collectives and waits where their result is used; `ragged sync` waits at once and prefetches nothing.
FSDP2 waits at once on a CPU. So `ragged sync` against FSDP2 is what fewer copies are worth, and `ragged` against
`ragged sync` what overlap is worth. Gloo reduces by an all-reduce: its times say little about NCCL.
"""

import argparse
import gc
import json
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.profiler import ProfilerActivity, profile

import torch_bridge as tb
from torch_bridge import _reduction, _unit

VOCAB, LAYERS, BATCH, LENGTH = 1024, 8, 4, 32
VARIANTS = ("fsdp2", "ragged", "ragged sync")
COPIES = {"aten::copy_", "aten::cat", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::_chunk_cat"}
FILLS = {"aten::fill_", "aten::zero_"}
SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1}


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
    gather, reduce = _unit.start_gather, _reduction.start_reduce
    if name == "ragged sync":
        _unit.start_gather, _reduction.start_reduce = waited(gather), waited(reduce)
    try:
        yield
    finally:
        _unit.start_gather, _reduction.start_reduce = gather, reduce


class Run:
    """A model under one variant, its optimizer and its data."""

    def __init__(self, name: str, width: int, device: torch.device, lr: float = 1e-3):
        self.name, self.device = name, device
        self.model = Model(width).to(device)
        if name == "fsdp2":
            for block in self.model.blocks:
                fsdp2(block)
            fsdp2(self.model)
        elif name != "plain":
            tb.fully_shard(self.model, units=Block, prefetch=0 if name == "ragged sync" else 1)
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

    def copied(self) -> dict[str, int]:
        """Bytes that one step copies and fills outside of collectives, by the profiler's record of operations."""
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
            self.step()
        with tempfile.TemporaryDirectory() as folder:
            record.export_chrome_trace(path := f"{folder}/trace.json")
            events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if "dur" in e]
        inside = [e for e in events if e["name"].startswith(("c10d::", "gloo:", "nccl:"))]
        return {kind: sum(_bytes(e) for e in _leaves(events, names, inside)) for kind, names in _KINDS.items()}


_KINDS = {"copied": COPIES, "filled": FILLS}


def _leaves(events: list[dict], names: set[str], inside: list[dict]) -> list[dict]:
    """Events of these names that contain no other of them, and lie in no collective."""
    found = [e for e in events if e["name"] in names and not any(_within(e, other) for other in inside)]
    return [e for e in found if not any(other is not e and _within(other, e) for other in found)]


def _within(a: dict, b: dict) -> bool:
    return a["tid"] == b["tid"] and b["ts"] <= a["ts"] and a["ts"] + a["dur"] <= b["ts"] + b["dur"]


def _bytes(event: dict) -> int:
    kind = event["args"].get("Input type", ["float"])[0]
    return _numel(event["args"]["Input Dims"][0]) * SIZES.get(kind, 4)


def _numel(dims: list) -> int:
    """Of a tensor, or of a list of them."""
    if dims and isinstance(dims[0], list):
        return sum(_numel(each) for each in dims)
    numel = 1
    for size in dims:
        numel *= size
    return numel


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
    plain = Run("plain", width, device)
    plain.step()
    own = plain.copied()  # by the model and the optimizer, with or without sharding
    del plain
    copied = {name: {kind: n - own[kind] for kind, n in run.copied().items()} for name, run in runs.items()}
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
        "copied by the model itself": own,
        "copied by sharding": copied,
        "milliseconds": {name: _quartiles([1e3 * t for t in times[name]]) for name in VARIANTS},
        "ratio to fsdp2": {
            name: _quartiles([a / b for a, b in zip(times[name], times["fsdp2"], strict=True)])
            for name in VARIANTS[1:]
        },
        "ragged over ragged sync": _quartiles(
            [a / b for a, b in zip(times["ragged"], times["ragged sync"], strict=True)]
        ),
    }


def peak(name: str, width: int, device: torch.device) -> dict:
    """Peak memory of one variant alone, above that of the process before: of the GPU, or resident."""
    cuda = device.type == "cuda"
    before = 0 if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run = Run(name, width, device)
    for _ in range(4):
        run.step()
    after = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak bytes": after - before}


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
    result = {"measure": measure, "peak": peak}[kind](*arguments, device)
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
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    found = []
    for world in options.world:
        for width in options.width:
            result = {"world": world, "width": width, **job(world, "measure", width, options.rounds, options.steps)}
            result["peak bytes"] = {name: job(world, "peak", name, width)["peak bytes"] for name in VARIANTS}
            found.append(result)
            print(json.dumps(result, indent=1), flush=True)
    if options.out:
        device = torch.cuda.get_device_name() if gpus else platform.processor() or platform.machine()
        facts = {"torch": torch.__version__, "device": device, "rounds": options.rounds, "steps": options.steps}
        options.out.write_text(json.dumps({**facts, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
