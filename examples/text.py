"""Text as bytes: where it comes from, what is held out, batches of it, and the bigram model to beat."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELD_OUT_EVERY = 20  # of the files


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes of other files to be judged by.

    Attributes:
      train, held_out: uint8 arrays.
      source: where they come from, for people.
    """

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load(data: Path | None) -> Text:
    """Python's own standard library, or the text in a file or below a folder.

    Every 20th file, in the order of their paths, is held out; of a single file the last twentieth is.
    """
    root = data or Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        whole = np.fromfile(root, np.uint8)
        cut = len(whole) - len(whole) // HELD_OUT_EVERY
        return Text(whole[:cut], whole[cut:], str(root))
    files = sorted(root.rglob("*") if data else _library(root))
    files = [f for f in files if f.is_file() and f.stat().st_size]
    if len(files) < HELD_OUT_EVERY:
        raise SystemExit(f"{root} holds {len(files)} files; {HELD_OUT_EVERY} are the least, one of them to hold out")
    held_out = files[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    chosen = set(held_out)
    train = [f for f in files if f not in chosen]
    return Text(_join(train), _join(held_out), f"{len(files)} files of {root}")


def _library(root: Path) -> Iterator[Path]:
    """The library's sources: neither its tests nor what pip installed."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return (f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))


def _join(files: list[Path]) -> np.ndarray:
    return np.concatenate([np.fromfile(f, np.uint8) for f in files])


def batches(text: np.ndarray, size: int, length: int, seed: int, skip: int = 0) -> Iterator[np.ndarray]:
    """Endless batches [size, length + 1] of windows that start anywhere in the text: inputs and, one on, targets.

    The first `skip` batches are left out, for a run that has had them already.
    """
    rng = np.random.default_rng(seed)
    for _ in range(skip):
        rng.integers(0, len(text) - length, size)
    while True:
        starts = rng.integers(0, len(text) - length, size)
        yield text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows [count, length + 1] that lie evenly over the text."""
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def bigram_bits(train: np.ndarray, judged: np.ndarray) -> float:
    """Bits per byte, on windows [count, length + 1], of the table "which byte follows which" of all of `train`."""
    counts = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=1 << 16).reshape(256, 256)
    smooth = counts + 0.01
    bits = -np.log2(smooth / smooth.sum(1, keepdims=True))
    return float(bits[judged[:, :-1], judged[:, 1:]].mean())
