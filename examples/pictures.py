"""How the loss fell, as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only, also where there is no screen
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, ScalarFormatter


def draw_losses(losses: Sequence[float], before: float, after: float, bigram: float, path: Path) -> None:
    """Writes a PNG of the loss of each step, the held-out loss and the line to beat, in bits per byte."""
    steps = np.arange(1, len(losses) + 1)
    window = max(1, len(losses) // 20)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="one batch")
    axes.plot(steps, _trailing_mean(losses, window), color="tab:blue", linewidth=2, label=f"mean of {window}")
    axes.plot([0, len(losses)], [before, after], "o", color="tab:red", clip_on=False, zorder=3, label="held out")
    axes.annotate(
        f"{after:.2f}",
        (len(losses), after),
        (0, -9),
        textcoords="offset points",
        color="tab:red",
        ha="center",
        va="top",
    )
    axes.axhline(bigram, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"bigram model, {bigram:.2f}", (0, bigram), (4, -4), textcoords="offset points", va="top")
    axes.set(xlabel="step", ylabel="bits per byte", yscale="log", xlim=(0, len(losses)))
    axes.set_yticks([2, 3, 4, 5, 6, 7, 8])
    axes.set_ylim(min(2, 0.95 * min(losses)), max(8.5, 1.05 * max(losses)))
    _finish(figure, axes, path)


def draw_optimizers(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Writes a PNG of the loss of each step by optimizer, each a trailing mean, in bits per byte."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps, styles = max(map(len, losses.values())), ("-", "--", ":", "-.")
    window = max(1, steps // 20)
    for i, (name, values) in enumerate(losses.items()):
        axes.plot(np.arange(1, len(values) + 1), _trailing_mean(values, window), styles[i % 4], label=name)
    axes.set(xlabel="step", ylabel=f"bits per byte, mean of {window} steps", yscale="log", xlim=(0, steps))
    axes.set_yticks([3, 4, 5, 6, 7, 8])
    _finish(figure, axes, path)


def _finish(figure: Any, axes: Any, path: Path) -> None:
    """The look of a loss against steps, and the file."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _trailing_mean(values: Sequence[float], window: int) -> np.ndarray:
    """At each place the mean of the last `window` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    return (total[stop] - total[start]) / (stop - start)


def draw_exchange(legs: Mapping[str, Sequence[float]], unbroken: Sequence[float], path: Path) -> None:
    """Writes a PNG of the losses of a run's legs, by name, and of how far they are from those of one that stays."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(7, 5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    above.plot(
        np.arange(1, len(unbroken) + 1), unbroken, color="black", linewidth=4, alpha=0.2, label="one run in JAX"
    )
    done = 0
    for number, (name, losses) in enumerate(legs.items()):
        steps = np.arange(done + 1, done + len(losses) + 1)
        apart = np.abs(np.array(losses) / unbroken[done : done + len(losses)] - 1)
        above.plot(steps, losses, color=f"C{number}", linewidth=1.5, label=name)
        below.semilogy(steps, np.maximum(apart, 1e-9), ".", color=f"C{number}", markersize=3)
        done += len(losses)
        if done < len(unbroken):
            for axes in (above, below):
                axes.axvline(done + 0.5, color="black", linestyle=":", linewidth=1)
    above.set(ylabel="bits per byte", xlim=(0, done + 1))
    below.set(xlabel="step", ylabel="relative\ndifference", ylim=(5e-10, 1e-2))
    below.axhline(1e-3, color="tab:red", linestyle="--", linewidth=1)
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
