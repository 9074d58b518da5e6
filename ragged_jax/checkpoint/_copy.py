"""Checkpoints copied: `TensorBytes` fetches a tensor while it is written, so that models need not fit in memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..layout import Placement, TensorSpec, itemsize
from ._bytes import numpy_dtype
from ._checkpoint import Checkpoint
from ._directory import CheckpointDirectory
from ._lazy import Lazy
from ._manifest import TensorEntry
from ._runs import Run
from ._write import Part

_WINDOW_NBYTES = 32 << 20


class TensorBytes(Lazy):
    """The bytes of a tensor of a checkpoint in row-major order, fetched window by window as they are sliced.

    Args:
      checkpoint: that holds it.
      name: the tensor's.
      dtype: to convert it to.
      fetched: is told how many bytes were fetched, time and again.

    Attributes:
      nbytes: all of them.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, dtype: str, fetched: Callable[[int], object] = lambda nbytes: None
    ):
        self._checkpoint, self._name, self._dtype, self._fetched = checkpoint, name, dtype, fetched
        entry = checkpoint.entry(name)
        self._numel, self._saved = entry.numel, entry.dtype
        self._placement = Placement(TensorSpec(name, entry.shape), 0)
        self._step = max(1, _WINDOW_NBYTES // max(itemsize(dtype), itemsize(entry.dtype)))  # elements of a window
        self._start, self._window = 0, memoryview(b"")
        self.nbytes = entry.numel * itemsize(dtype)

    def __getitem__(self, span: slice) -> memoryview:
        start, stop, _ = span.indices(self.nbytes)
        parts = []
        while start < stop:
            if not self._start <= start < self._start + self._window.nbytes:
                self._fetch(start)
            parts.append(self._window[start - self._start : stop - self._start])
            start += parts[-1].nbytes
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _fetch(self, at: int) -> None:
        size = itemsize(self._dtype)
        first = at // size // self._step * self._step
        numel = min(self._step, self._numel - first)
        same = self._saved == self._dtype
        data = np.empty(numel, np.dtype(f"V{size}") if same else numpy_dtype(self._saved))
        self._checkpoint.read_runs(self._name, [Run(first, 0, numel)], data, self._placement)
        if not same:
            data = data.astype(numpy_dtype(self._dtype))
        self._start, self._window = first * size, data.view(np.uint8).data
        self._fetched(data.nbytes)


def converted(saved: str, dtype: str | None) -> str:
    """The dtype that a tensor is converted to: only floating-point ones are."""
    return dtype if dtype is not None and "float" in saved else saved


def copy_checkpoint(
    source: Checkpoint,
    directory: CheckpointDirectory,
    step: int = 0,
    *,
    dtype: str | None = None,
    fetched: Callable[[int], object] = lambda nbytes: None,
) -> Path:
    """Saves all tensors of a checkpoint, of whatever kind, as a new one.

    At most a window of 32 MiB is in memory for each of the few tensors that are written at a time.

    Args:
      source: the checkpoint.
      directory: that the new one goes to.
      step: of the new one.
      dtype: to convert floating-point tensors to; by default they stay as they are.
      fetched: is told, time and again, how many bytes more were read.

    Raises:
      FileExistsError: the directory has this or a later step already.
      OSError: the disk is full, or the like. Nothing is left behind.
    """
    tensors, parts = {}, []
    for name, entry in source.tensors.items():
        to = converted(entry.dtype, dtype)
        tensors[name] = TensorEntry(to, entry.shape, attributes=entry.attributes)
        parts.append(Part(name, ((0, entry.numel),), TensorBytes(source, name, to, fetched), _group(name)))
    return directory.save(step, tensors, parts, metadata=source.metadata)


def _group(name: str) -> str:
    """The file that a tensor goes to: one for each numbered layer."""
    steps = name.split("/")[:-1]
    number = next((at for at, step in enumerate(steps) if step.isdecimal()), None)
    return "/".join(steps[: number + 1]) if number is not None else ""
