"""What the checkpointers of all frameworks have in common: who writes a state, when, and what became of it."""

import secrets
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._warned import warn
from ..layout import Layout, listed
from ._checkpoint import Checkpoint
from ._directory import CheckpointDirectory
from ._manifest import CheckpointError, TensorEntry, as_metadata
from ._saving import Saving
from ._sources import left_out
from ._write import Part, check_tensors

_NOTHING, _FAILED = -1, -2  # in place of a step


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

    @abstractmethod
    def _contents(self, state: Any) -> tuple[Mapping[str, TensorEntry], Iterable[Part], Mapping[str, Layout]]:
        """Of a state: its tensors, the parts that this rank holds, and its layouts by prefix."""

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Saves a state. It may be changed or donated as soon as this returns.

        Args:
          step: higher than that of every checkpoint in the directory.
          state: as the class says.
          metadata: anything that JSON holds, such as the position in the data. Of several ranks, the first's.

        Raises:
          TypeError, ValueError: what a checkpoint cannot hold, all of it named; or metadata that are not JSON.
          OSError, ValueError: what went wrong when the save before this one was written in the background.
          CheckpointError: one of several ranks failed; the same on all. In the background, the others hear of it by
            their next call.
        """
        self._num_saves += 1
        run, rank, num_ranks = f"{self._run}-{self._num_saves}", self._rank, self._num_ranks
        with Saving(self.directory.path, step, rank, num_ranks, run, self._timeout).together():
            self.wait()
            step, metadata = int(step), as_metadata(metadata)
            tensors, parts, layouts = self._contents(state)
            check_tensors(tensors)  # here, and not when a thread writes them
        options: dict[str, Any] = {"layouts": layouts, "metadata": None if rank else metadata, "keep": self._keep}
        options |= {"rank": rank, "num_ranks": num_ranks, "run": run, "timeout": self._timeout}

        def write() -> None:
            self.directory.save(step, tensors, parts, **options)

        if self._background:
            self._thread = threading.Thread(target=_noting(write, self._errors), name=f"checkpoint of step {step}")
            self._thread.start()
        else:
            write()

    def open(self, step: int | None = None) -> Checkpoint:
        """A checkpoint, by default the latest, to look into: its step, metadata and tensors."""
        self.wait()
        if step is not None:
            return self.directory.open(int(step))
        step, checkpoint = self._find_latest()
        if step is None:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory.path}")
        return checkpoint or self.directory.open(step)

    def latest(self) -> int | None:
        """The step of the latest checkpoint whose files are all there, or None; the same on all ranks."""
        self.wait()
        step, checkpoint = self._find_latest()
        if checkpoint is not None:
            checkpoint.close()
        return step

    def _find_latest(self) -> tuple[int | None, Checkpoint | None]:
        """The step that the first rank finds, the same on all ranks; on the first one the checkpoint, too.

        Where the first rank cannot look, all ranks raise, for the others wait for its word.
        """
        found = failure = None
        if self._rank == 0:
            try:
                found = self.directory.find_latest()
            except Exception as error:
                failure = error
        said = _FAILED if failure else _NOTHING if found is None else found[0]
        words = self._from_first(np.array([said], np.int64).view(np.int32))
        (step,) = np.ascontiguousarray(words).view(np.int64)
        if step == _FAILED:
            raise failure or CheckpointError(
                f"the first rank could not look for checkpoints in {self.directory.path}"
            )
        return None if step == _NOTHING else int(step), found and found[1]

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
            warn(f"a checkpoint was not saved: {failure}")


def check_wanted(
    checkpoint: Checkpoint,
    tensors: Mapping[str, TensorEntry],
    *,
    cast: bool,
    fewer_layers: bool = False,
    numbers: Collection[str] = (),
) -> None:
    """Raises CheckpointError when a checkpoint does not hold what a state wants; every difference is listed.

    Args:
      checkpoint: of any kind.
      tensors: what the state wants, by name.
      cast: whether another dtype is no fault.
      fewer_layers: whether it is none that layers were saved which the state lacks.
      numbers: names of Python numbers, which have no width: a step that was counted under jit is an int32.
    """
    faults, taken = [], []
    for name, want in tensors.items():
        try:
            sources = checkpoint.sources(name, want.shape)
        except CheckpointError as error:
            faults.append(str(error).removeprefix(f"{checkpoint.path} has "))
            continue
        taken += sources
        saved = checkpoint.entry(sources[0].name)
        fits = name in numbers and saved.dtype.rstrip("0123456789") == want.dtype.rstrip("0123456789")
        if saved.dtype != want.dtype and not cast and not fits:
            faults.append(f"{name}: saved as {saved.dtype}, wanted as {want.dtype}; `cast=True` would convert it")
        if saved.attributes != want.attributes:
            faults.append(f"{name}: saved with {saved.attributes}, wanted with {want.attributes}")
    if not fewer_layers:
        faults += (f"{fault}; `fewer_layers=True` leaves them out" for fault in left_out(checkpoint.tensors, taken))
    if faults:
        raise CheckpointError(f"{checkpoint.path} is not of this state:" + listed(faults))


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
