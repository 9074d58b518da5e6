"""The results of `torch_cuda.py` for people."""

import statistics
from collections import Counter

from torch_copies import INSIDE, OWN

VARIANTS = ("fsdp2", "ragged sync, its collectives", "ragged sync", "ragged")
STAGES = [*zip(VARIANTS[1:], VARIANTS, strict=False), ("ragged sync", "fsdp2"), ("ragged", "fsdp2")]
_FSDP2 = ("FSDP::all_gather", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce")


def table(facts: dict[str, str], found: list[dict]) -> str:
    """Step times, copied bytes and peak memory as tables."""
    lines = ["# `torch_bridge.fully_shard` against FSDP2", "", *(f"- {key}: `{x}`" for key, x in facts.items()), ""]
    lines += [
        "Step time: median [quartiles] of paired ratios. `copies`: the same collectives as FSDP2's, waited for at",
        "once, as FSDP2 does on a CPU, so what fewer copies are worth. `collectives`: those that suit gloo, waited",
        "for at once. `overlap`: waited for where results are used. `sync` and `ragged`: the products, over FSDP2.",
        "",
        "| ranks | d | FSDP2, ms | copies | collectives | overlap | sync | ragged | loss difference |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in found:
        cells = (_spread(r["ratio of variants"][f"{a} / {b}"]) for a, b in STAGES)
        difference = max(r["largest relative loss difference"].values())
        head = f"| {r['world']} | {r['width']} | {r['milliseconds']['fsdp2'][1]:.1f} |"
        lines.append(f"{head} {' | '.join(cells)} | {difference:.1e} |")
    lines += [
        "",
        "MiB that a step copies on each rank outside of collectives, those of the model and the optimizer themselves",
        "left out (profiler, by the range they are in). Casts count as copies. `own parts`: what a gather on a CPU",
        "copies of a rank's own shard to its place, which torch's all-gather does inside.",
        "",
        "| ranks | d | precision | FSDP2 | gathers in | gathers out | gradients | ragged | gathers | gradients "
        "| ragged / FSDP2 | own parts | with own parts | in collectives: FSDP2 | ragged |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in found:
        for precision, by in r["bytes of a step"].items():
            theirs, ours = (_outside(by, name) for name in ("fsdp2", "ragged"))
            counts = {name: Counter(by[name]["copied"]) for name in by}
            gradients = ours - counts["ragged"]["unshard"]
            own = counts["ragged"][OWN]
            sizes = [theirs, *(counts["fsdp2"][x] for x in _FSDP2), ours, counts["ragged"]["unshard"], gradients]
            cells = [*map(_mib, sizes), f"{ours / theirs:.3f}", _mib(own), f"{(ours + own) / theirs:.3f}"]
            cells += [_mib(counts[name][INSIDE]) for name in ("fsdp2", "ragged")]
            lines.append(f"| {r['world']} | {r['width']} | {precision} | {' | '.join(cells)} |")
    lines += [
        "",
        "Peak memory of steps above that of the process before, MiB, median of processes (a GPU's, or resident).",
        "",
        f"| ranks | d | {' | '.join(VARIANTS)} | ragged / FSDP2 |",
        f"|---:|---:|{'---:|' * (len(VARIANTS) + 1)}",
    ]
    for r in found:
        peaks = [statistics.median(r["peak bytes"][name]) for name in VARIANTS]
        cells = [*(f"{x / 2**20:.1f}" for x in peaks), f"{peaks[-1] / peaks[0]:.3f}"]
        lines.append(f"| {r['world']} | {r['width']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    low, middle, high = values
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


def _outside(by: dict, name: str) -> int:
    """Copied by sharding: the model's own copies are elsewhere, too."""
    plain = sum(by["plain"]["copied"].values())
    return sum(n for label, n in by[name]["copied"].items() if label not in (INSIDE, OWN)) - plain


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f}"
