"""How much each system pads: 29 models, 17 numbers of shards, 7 kinds of block, against the rules of others.

    python benchmarks/padding.py --out benchmarks/results    # the whole grid: minutes
    python benchmarks/padding.py --models gpt2_124m --shards 8 64 --blocks "32 rows"

Everything is arithmetic on shapes. Padding is elements on all devices over elements of the model, less one.
"""

import argparse
import csv
import gc
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rivals import (
    fsdp1,
    fsdp1_flat,
    fsdp2,
    megatron,
    megatron_experimental_layout,
    megatron_stable_layout,
    named_sharding,
    zero3,
)

from ragged_jax._shapes import read_shapes
from ragged_jax.layout import Block, TensorSpec, elements, itemsize, rows, tile, whole
from ragged_jax.planner import Group, plan

HERE = Path(__file__).parent
MODELS = sorted(path.stem for path in (HERE / "models").glob("*.json"))
SHARDS = (2, 3, 4, 6, 7, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 16384)
BLOCKS: dict[str, Block] = {
    "element": elements(1),
    "row": rows(1),
    "32 rows": rows(32),
    "128 rows": rows(128),
    "32 x 32": tile(32, 32),
    "128 x 128": tile(128, 128),
    "whole": whole(),
}
CUTS_ANYWHERE = {"FSDP1": fsdp1, "FSDP1 flat": fsdp1_flat, "ZeRO-3": zero3}
KEEPS_BLOCKS: dict[str, Callable[[Sequence[TensorSpec], int], int | None]] = {
    "FSDP2": fsdp2,
    "Megatron": lambda tensors, n: megatron(tensors, n, megatron_stable_layout),
    "Megatron v2": lambda tensors, n: megatron(tensors, n, megatron_experimental_layout),
    "NamedSharding": named_sharding,
}
RIVALS = {**CUTS_ANYWHERE, **KEEPS_BLOCKS}


def only_matrices(groups: Sequence[Group], block: str) -> list[Group]:
    """Vectors may be cut anywhere, also where matrices are kept whole."""
    if block != "whole":
        return list(groups)
    free = elements(1)
    return [
        replace(g, tensors=tuple(replace(t, block=free) if len(t.shape) < 2 else t for t in g.tensors))
        for g in groups
    ]


def distinct(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Each group once, with how many are like it (a shapes file writes `name[k]`)."""
    counts: dict[str, int] = defaultdict(int)
    first: dict[str, Group] = {}
    for group in groups:
        name = group.name.partition("[")[0]
        counts[name] += 1
        first.setdefault(name, group)
    return [(first[name], count) for name, count in counts.items()]


def cell(groups: Sequence[Group], block: str, num_shards: int) -> dict[str, float | int | bool | None]:
    """Elements on each device under every rule that respects the block."""
    gc.collect()
    start = time.perf_counter()
    made = plan(groups, num_shards, storage="tiled" if " x " in block else "row_major")
    seconds = time.perf_counter() - start
    payload = sum(bucket.payload_nbytes for bucket in made.buckets)
    result: dict[str, float | int | bool | None] = {
        "padding": made.padding_fraction,
        "bound": made.bound_fraction,
        "floor": made.floor_fraction,
        "optimal": made.optimal,
        "seconds": seconds,
        "slabs": max(len(bucket.slabs) for bucket in made.layout.buckets),
    }
    for name, rule in RIVALS.items():
        if name in CUTS_ANYWHERE and block != "element":
            result[name] = None
            continue
        numels = [(rule(group.tensors, num_shards), count) for group, count in distinct(groups)]
        if any(numel is None for numel, _ in numels):
            result[name] = None
        else:
            result[name] = (
                itemsize(groups[0].tensors[0].dtype)
                * num_shards
                * sum(n * count for n, count in numels if n)
                / payload
                - 1
            )
    return result


def percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value + 1:.0f}x" if value >= 10 else f"{100 * value:.2f}"


def report(cells: list[dict]) -> str:
    """The tables of `results/padding.md`."""
    import numpy

    lines = [
        "# Padding, planner against other rules",
        "",
        "Command: `python benchmarks/padding.py --out benchmarks/results`. "
        f"Machine: {platform.machine()}, Python {platform.python_version()}, numpy {numpy.__version__}; "
        "one process on shared cores. "
        "Profile h100, no merging of layers, defaults otherwise. All cells are in `padding.csv`.",
        "",
        "Padding is a percentage of the model (`12x`: twelve times the model in all). *bound*: proven for the "
        "chosen slabs. *floor*: proven for any layout at all with whole blocks. A rival counts in a cell when "
        "it cuts no block there. Tiles are planned with tiled storage; rivals then cut whole rows of tiles.",
        "",
        "| block | cells | optimal | gap <= 0.5 point | worst gap | median padding | FSDP2 | Megatron | "
        "NamedSharding | better / equal / worse than the best rival |",
        "|-|-|-|-|-|-|-|-|-|-|",
    ]
    for block in [*BLOCKS, "all"]:
        chosen = [c for c in cells if block in (c["block"], "all")]
        if not chosen:
            continue
        gaps = [100 * (c["padding"] - c["bound"]) for c in chosen]
        versus = [_versus(c) for c in chosen]
        medians = [
            percent(statistics.median([c[name] for c in chosen if c[name] is not None] or [0.0]))
            for name in ("padding", "FSDP2", "Megatron", "NamedSharding")
        ]
        lines.append(
            f"| {block} | {len(chosen)} | {sum(c['optimal'] for c in chosen)} "
            f"| {sum(gap <= 0.5 for gap in gaps)} | {max(gaps):.2f} | {' | '.join(medians)} "
            f"| {versus.count(1)} / {versus.count(0)} / {versus.count(-1)} |"
        )
    seconds = [1e3 * c["seconds"] for c in cells]
    lines += [
        "",
        f"Time of a plan of a whole model: median {statistics.median(seconds):.2f} ms, "
        f"99th percentile {sorted(seconds)[int(0.99 * len(seconds))]:.0f} ms, worst {max(seconds):.0f} ms "
        f"({_where(max(cells, key=lambda c: c['seconds']))}).",
        "",
    ]
    for block in BLOCKS:
        lines += _table(cells, block)
    return "\n".join(lines)


def _versus(c: dict) -> int:
    best = min((c[name] for name in RIVALS if c[name] is not None), default=float("inf"))
    difference = best - c["padding"]
    return 0 if abs(difference) < 1e-12 * (1 + best) else (1 if difference > 0 else -1)


def _where(c: dict) -> str:
    return f"{c['model']}, {c['shards']} shards, {c['block']}"


def _table(cells: list[dict], block: str) -> list[str]:
    shards = [n for n in (8, 64, 96, 256, 1024) if any(c["shards"] == n for c in cells)]
    by = {(c["model"], c["shards"]): c for c in cells if c["block"] == block}
    if not by or not shards:
        return []
    lines = [
        f"## {block}",
        "",
        "Planner / FSDP2 / Megatron stable, in percent.",
        "",
        "| model | " + " | ".join(f"N = {n}" for n in shards) + " |",
        "|-|" + "-|" * len(shards),
    ]
    for model in dict.fromkeys(c["model"] for c in cells):
        entries = [
            " / ".join(percent(by[model, n][name]) for name in ("padding", "FSDP2", "Megatron")) for n in shards
        ]
        lines.append(f"| {model} | " + " | ".join(entries) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--shards", nargs="+", type=int, default=SHARDS)
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--out", type=Path, help="folder for padding.csv and padding.md; default: print only")
    args = parser.parse_args()
    cells: list[dict] = []
    for model in args.models:
        for block in args.blocks:
            groups = only_matrices(read_shapes(HERE / "models" / f"{model}.json", BLOCKS[block]), block)
            for num_shards in args.shards:
                measured = cell(groups, block, num_shards)
                cells.append({"model": model, "block": block, "shards": num_shards, **measured})
        print(model, f"{sum(c['seconds'] for c in cells):.1f} s planning so far", flush=True)
    for c in cells:
        if _versus(c) < 0:
            print("worse than a rival:", _where(c), {k: c[k] for k in ("padding", *RIVALS)})
    text = report(cells)
    if args.out:
        args.out.mkdir(exist_ok=True)
        (args.out / "padding.md").write_text(text)
        with (args.out / "padding.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(cells[0]))
            writer.writeheader()
            for c in cells:
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in c.items()})
    print(text)


if __name__ == "__main__":
    main()
