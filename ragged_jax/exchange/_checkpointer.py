"""`Checkpointer`: saves a JAX training state while the training goes on, and restores it on other devices."""

import json
import secrets
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..checkpoint import Checkpoint, CheckpointDirectory, in_threads
from ._state import items_of, layouts_of
from ._transfer import check_restorable, parts_of, restored

T = TypeVar("T")


class Checkpointer:
    """The checkpoints of a JAX training run.

    A state is any pytree: sharded models and optimizers, plain arrays of any sharding, random keys, numpy arrays and
    Python numbers. It is saved by tensor, without padding, so that it can be restored on any number of devices, with
    any layout, with layers stacked or in a list, and read as numpy arrays without JAX.

    Args:
      directory: that holds the checkpoints, the same for all processes.
      keep: how many to leave; older ones are removed when a new one is complete. None: all.
      background: whether `save` returns when the state has been copied to the host, and a thread does the writing.
      timeout: seconds that processes wait for each other before a save fails.

    With several processes, all of them make one and call its methods alike.

    Example:
      >>> import tempfile
      >>> import jax, jax.numpy as jnp
      >>> import ragged_jax as rj
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> params = rj.shard_tree({"w": jnp.ones((3, 5))}, mesh, axis="fsdp")
      >>> with Checkpointer(tempfile.mkdtemp(), keep=2) as checkpointer:
      ...     checkpointer.save(100, {"params": params, "key": jax.random.key(0)}, metadata={"position": 4096})
      ...     checkpointer.wait()
      ...     state = checkpointer.restore({"params": params, "key": jax.random.key(1)})
      >>> rj.full_params(state["params"])["w"].sum()
      np.float32(15.0)
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
        token = np.frombuffer(secrets.token_bytes(8), np.uint32)
        self._run = from_first(token).tobytes().hex()
        self._finalizer = weakref.finalize(self, _report, self._errors)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Saves a state. It may be changed or donated as soon as this returns.

        Args:
          step: higher than that of every checkpoint in the directory.
          state: the pytree.
          metadata: anything that JSON holds, such as the position in the data. Of several processes, the first's.

        Raises:
          TypeError: leaves that are neither arrays nor numbers, or metadata that is not JSON.
          OSError, ValueError: what went wrong when the save before this one was written in the background.
        """
        self.wait()
        metadata = json.loads(json.dumps(metadata, allow_nan=False))  # as it is now
        items, _ = items_of(state)
        rank, tensors = jax.process_index(), {n: t for item in items for n, t in item.tensors().items()}
        parts = list(parts_of(items, rank, copy=self._background))
        self._num_saves += 1
        arguments = {
            "layouts": layouts_of(items),
            "metadata": metadata if rank == 0 else None,
            "rank": rank,
            "num_ranks": jax.process_count(),
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

    def restore(self, like: T, step: int | None = None, *, cast: bool = False) -> T:
        """A state from a checkpoint.

        Args:
          like: a state of the same structure, on the devices and with the layout that are wanted now. Its leaves may
            be arrays or `jax.ShapeDtypeStruct`; their values do not matter, and they are not changed. A part of what
            was saved will do.
          step: which checkpoint; by default the latest.
          cast: whether tensors that were saved with another dtype are converted; otherwise they are an error.

        Raises:
          FileNotFoundError: there is no checkpoint, or not of this step.
          CheckpointError: it is damaged, or not of such a state; everything that is wrong is named.
        """
        with self.open(step) as checkpoint:
            return restore_from(checkpoint, like, cast=cast)

    def open(self, step: int | None = None) -> Checkpoint:
        """A checkpoint, by default the latest, to look into: its step, metadata and tensors."""
        self.wait()
        if step is None and (step := self.latest()) is None:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory.path}")
        return self.directory.open(int(step))

    def latest(self) -> int | None:
        """The step of the latest checkpoint whose files are all there, or None; the same on all processes."""
        self.wait()
        found = self.directory.latest() if jax.process_index() == 0 else None
        step = int(from_first(np.array(-1 if found is None else found, np.int32)))
        return None if step < 0 else step

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


def restore_from(checkpoint: Checkpoint, like: T, *, cast: bool = False) -> T:
    """A state from an open checkpoint of any kind; see `Checkpointer.restore`."""
    items, build = items_of(like)
    check_restorable(checkpoint, items, cast)
    slabs = [at for at, item in enumerate(items) if item.held is not None]
    done = in_threads(lambda at: restored(checkpoint, items[at], cast), slabs)
    rest = (at for at in range(len(items)) if at not in done)  # here, where the caller's context mesh is known
    done |= {at: restored(checkpoint, items[at], cast) for at in rest}
    return build([done[at] for at in range(len(items))])


def from_first(value: np.ndarray) -> np.ndarray:
    """What the first process says, on all of them."""
    return np.asarray(multihost_utils.broadcast_one_to_all(value)) if jax.process_count() > 1 else value


def _noting(write: Any, errors: list[BaseException]) -> Any:
    def run() -> None:
        try:
            write()
        except BaseException as error:
            errors.append(error)

    return run


def _report(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"a checkpoint was not saved: {error}", file=sys.stderr)
