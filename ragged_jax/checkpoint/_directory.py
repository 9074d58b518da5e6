"""`CheckpointDirectory`: the checkpoints of a training run, and how a new one comes into being."""

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .._warned import warn
from ..layout import Layout
from ._checkpoint import Checkpoint
from ._manifest import CheckpointError, Manifest, TensorEntry, as_metadata
from ._saving import Saving
from ._temporary import TEMPORARY, clean, discard
from ._write import Part

_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")  # as `folder` writes them


@dataclass(frozen=True)
class CheckpointDirectory:
    """The checkpoints of a training run, one folder `step_00000100` for each.

    Attributes:
      path: the folder that holds them. It is made when something is saved.
    """

    path: Path

    def __init__(self, path: str | Path):
        object.__setattr__(self, "path", Path(path))

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, rising."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"step_{step:08d}"

    def latest(self) -> int | None:
        """The last step with a checkpoint whose files are all there, or None.

        Warns of later ones that are damaged, and says how.
        """
        if (found := self.find_latest()) is None:
            return None
        found[1].close()
        return found[0]

    def find_latest(self) -> tuple[int, Checkpoint] | None:
        """The same, and the checkpoint."""
        for step in reversed(self.steps()):
            try:
                return step, Checkpoint(self.folder(step))
            except CheckpointError as error:
                warn(f"step {step} is passed over: {error}")
        return None

    def open(self, step: int | None = None) -> Checkpoint:
        """The checkpoint of a step, by default of the latest.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: it is damaged.
        """
        if step is None:
            if (found := self.find_latest()) is None:
                raise FileNotFoundError(f"there is no checkpoint in {self.path}")
            return found[1]
        if not self.folder(step).exists():
            raise FileNotFoundError(f"there is no checkpoint of step {step} in {self.path}, which has {self.steps()}")
        return Checkpoint(self.folder(step))

    def save(
        self,
        step: int,
        tensors: Mapping[str, TensorEntry],
        parts: Iterable[Part],
        *,
        layouts: Mapping[str, Layout] | None = None,
        metadata: Mapping[str, Any] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        run: str | None = None,
        keep: int | None = None,
        timeout: float = 600.0,
    ) -> Path:
        """Saves a checkpoint. When this returns it is on disk, whole.

        Every rank calls this with the same arguments but for `parts` and `rank`. If two jobs save to one directory,
        each step belongs to the one that finishes it first, and the other's save is an error.

        Args:
          step: higher than that of every checkpoint in the directory.
          tensors: what is saved, without pieces.
          parts: the pieces that this rank holds. Together the ranks hold every element once.
          layouts: by prefix of tensor names, the layouts that the tensors follow.
          metadata: anything that JSON holds.
          rank, num_ranks: of the writers.
          run: what tells this save from every other, the same on all ranks; needed when there are several.
          keep: how many checkpoints to leave; older ones are removed, or else a warning says why not. None: all.
          timeout: seconds to wait for other ranks.

        Returns:
          The checkpoint's folder.

        Raises:
          FileExistsError: there is a checkpoint of this or a later step.
          CheckpointError: ranks do not agree on the tensors, an element is missing or is there twice, or one of
            several ranks failed; the same message on every rank.
          TimeoutError: a rank does not come; it is named.
          OSError: of a rank that saves alone: the disk is full, or the like.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: at least the checkpoint that is being saved must stay")
        if num_ranks > 1 and run is None:
            raise ValueError("several ranks save together by the same `run`, for example one that rank 0 broadcasts")
        saving = Saving(self.path, step, rank, num_ranks, run or secrets.token_hex(8), timeout)
        with saving.together():
            declared = Manifest(step, num_ranks, (), dict(tensors), metadata=as_metadata(metadata))
            saving.run(self.folder(step), declared, parts, layouts or {}, begin=partial(self._begin, step))
        if rank == 0 and keep is not None:
            self._remove(self.steps()[:-keep])
        return self.folder(step)

    def _begin(self, step: int) -> None:
        clean(self.path)
        if later := [found for found in self.steps() if found >= step]:
            raise FileExistsError(
                f"{self.path} has a checkpoint of step {later[-1]} already; a step to save must be later. "
                "Remove the checkpoints that are not wanted, or save to another directory"
            )

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            doomed = self.path / f"{TEMPORARY}.{secrets.token_hex(8)}.old"
            try:
                self.folder(step).rename(doomed)
            except FileNotFoundError:  # another job was faster
                continue
            except OSError as error:  # the new one is saved all the same
                warn(f"step {step} is one more than to keep, and stays: {error}")
            discard(doomed)
