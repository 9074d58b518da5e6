"""What the checkpointers of all frameworks have in common: who writes a state, when, and what became of it."""

import json
import secrets
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Layout
from ._checkpoint import Checkpoint
from ._directory import CheckpointDirectory
from ._manifest import CheckpointError, TensorEntry
from ._write import Part


class BaseCheckpointer(ABC):
    """The checkpoints of a training run, as one of its ranks sees them.

    Args:
      directory: that holds the checkpoints, the same for all ranks.
      keep: how many to leave; older ones are removed when a new one is complete. None: all.
      background: whether `save` returns when the state has been copied to the host, and a thread does the writing.
      timeout: seconds that ranks wait for each other before a save fails.
    """

    def __init__(
        self, directory: str | Path, *, keep: int | None = None, background: bool = True, timeout: float = 600.0
    ):
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: at least the checkpoint that is being saved must stay")
        self.directory = CheckpointDirectory(directory)
        self._keep, self._background, self._timeout = keep, background, timeout
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._num_saves = 0
        token = np.frombuffer(secrets.token_bytes(8), np.int32)
        self._run = self._from_first(token).tobytes().hex()
        self._finalizer = weakref.finalize(self, _report, self._errors)

    @property
    @abstractmethod
    def _rank(self) -> int:
        """This one."""

    @property
    @abstractmethod
    def _num_ranks(self) -> int:
        """How many there are."""

    @abstractmethod
    def _from_first(self, value: np.ndarray) -> np.ndarray:
        """What the first rank says, on all of them: an array of int32."""

    def _save(
        self,
        step: int,
        tensors: Mapping[str, TensorEntry],
        parts: Iterable[Part],
        layouts: Mapping[str, Layout],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        """Writes a checkpoint, in the background if that is wanted; the save before has ended."""
        self._num_saves += 1
        arguments = {
            "layouts": layouts,
            "metadata": metadata if self._rank == 0 else None,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            "run": f"{self._run}-{self._num_saves}",
            "keep": self._keep,
            "timeout": self._timeout,
        }

        def write() -> None:
            self.directory.save(int(step), tensors, parts, **arguments)

        if self._background:
            self._thread = threading.Thread(target=_noting(write, self._errors), name=f"checkpoint of step {step}")
            self._thread.start()
        else:
            write()

    def open(self, step: int | None = None) -> Checkpoint:
        """A checkpoint, by default the latest, to look into: its step, metadata and tensors."""
        self.wait()
        if step is None and (step := self.latest()) is None:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory.path}")
        return self.directory.open(int(step))

    def latest(self) -> int | None:
        """The step of the latest checkpoint whose files are all there, or None; the same on all ranks."""
        self.wait()
        found = self.directory.latest() if self._rank == 0 else None
        (step,) = self._from_first(np.array([-1 if found is None else found], np.int32))
        return None if step < 0 else int(step)

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, rising."""
        self.wait()
        return self.directory.steps()

    def wait(self) -> None:
        """Returns when what is being saved is on disk.

        Raises:
          OSError, ValueError: it could not be saved.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any):
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            warnings.warn(f"a checkpoint was not saved: {failure}", UserWarning, stacklevel=2)


def as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Metadata as they are now, whatever becomes of the mapping.

    Raises:
      TypeError, ValueError: they are not JSON.
    """
    return json.loads(json.dumps(metadata, allow_nan=False))


def check_wanted(checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry], cast: bool) -> None:
    """Raises CheckpointError when a checkpoint does not hold what a state wants; every difference is listed."""
    faults = []
    for name, want in tensors.items():
        try:
            sources = checkpoint.sources(name, want.shape)
        except CheckpointError as error:
            faults.append(str(error).removeprefix(f"{checkpoint.path} has "))
            continue
        saved = checkpoint.entry(sources[0].name)
        if saved.dtype != want.dtype and not cast:
            faults.append(f"{name}: saved as {saved.dtype}, wanted as {want.dtype}; `cast=True` would convert it")
        if saved.attributes != want.attributes:
            faults.append(f"{name}: saved with {saved.attributes}, wanted with {want.attributes}")
    if faults:
        more = [f"and {len(faults) - 50} more"] if len(faults) > 50 else []
        raise CheckpointError(f"{checkpoint.path} is not of this state:\n  " + "\n  ".join([*faults[:50], *more]))


def _noting(write: Callable[[], None], errors: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            write()
        except BaseException as error:
            errors.append(error)

    return run


def _report(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"a checkpoint was not saved: {error}", file=sys.stderr)
