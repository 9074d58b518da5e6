"""`CheckpointDirectory`: the checkpoints of a training run, and how a new one comes into being.

A checkpoint is written under a temporary name, brought to the disk, and renamed: it is there whole or not at all.
The ranks meet in the file system: rank 0 makes the temporary folder, every rank writes its files there and then its
part of the manifest, and rank 0, when it has all parts, writes the manifest and renames the folder. There is no
collective, so a thread may do it while the training goes on.

A temporary folder belongs to the process that holds the lock beside it. One whose lock is free is what a killed
process left, and the next save removes it.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..layout import Layout
from ._checkpoint import MANIFEST, Checkpoint
from ._manifest import CheckpointError, Manifest, TensorEntry, differences, merge
from ._safetensors import sync_folder, write_bytes
from ._write import Part, write_parts

_STEP = re.compile(r"step_(\d{8,})")
_ABANDONED_SECONDS = 3600.0  # a message is rubbish when it is this old


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
                warnings.warn(f"step {step} is passed over: {error}", UserWarning, stacklevel=3)
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
          keep: how many checkpoints to leave; older ones are removed. None: all.
          timeout: seconds to wait for other ranks.

        Returns:
          The checkpoint's folder.

        Raises:
          FileExistsError: there is a checkpoint of this or a later step.
          CheckpointError: ranks do not agree on the tensors, an element is missing or is there twice, or another
            rank failed; the same message on every rank.
          TimeoutError: a rank does not come; it is named.
          OSError: the disk is full, or the like.
        """
        if num_ranks > 1 and run is None:
            raise ValueError("several ranks save together by the same `run`, for example one that rank 0 broadcasts")
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep}: at least the checkpoint that is being saved must stay")
        json_only = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
        declared = Manifest(step, num_ranks, (), dict(tensors), metadata=json_only)
        saving = _Saving(self, step, rank, num_ranks, run or secrets.token_hex(8), timeout)
        saving.run(declared, parts, layouts or {})
        if rank == 0 and keep is not None:
            self._remove(self.steps()[:-keep])
        return self.folder(step)

    def _remove(self, steps: Iterable[int]) -> None:
        for step in steps:
            doomed = self.path / f".step_{step:08d}.{secrets.token_hex(8)}.old"
            with contextlib.suppress(FileNotFoundError):  # another job was faster
                self.folder(step).rename(doomed)
            _discard(doomed)

    def _clean(self) -> None:
        """Removes what killed processes left."""
        for path in self.path.glob(".step_*"):
            lock = path.with_suffix(".lock")
            if path.suffix == ".old" or (path.suffix == ".tmp" and not lock.exists()):
                _discard(path)
            elif path == lock:
                _take_over(lock)
            elif path.suffix == ".error" and _age(path) > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Saving:
    """One save, as one rank sees it."""

    directory: CheckpointDirectory
    step: int
    rank: int
    num_ranks: int
    token: str
    timeout: float

    @property
    def folder(self) -> Path:
        """The temporary one."""
        return self.directory.path / f".step_{self.step:08d}.{self.token}.tmp"

    @property
    def final(self) -> Path:
        return self.directory.folder(self.step)

    @property
    def error(self) -> Path:
        """Where rank 0 says why it failed. It outlives the temporary folder."""
        return self.folder.with_suffix(".error")

    def run(self, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> None:
        if self.rank:
            self._follow(declared, parts, layouts)
            return
        try:
            self.directory.path.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder.with_suffix(".lock")):
                self._begin()
                self._lead(declared, parts, layouts)
        except BaseException as error:
            self._fail(error)
            raise

    def _begin(self) -> None:
        self.directory._clean()
        later = [step for step in self.directory.steps() if step >= self.step]
        if later:
            raise FileExistsError(
                f"{self.directory.path} has a checkpoint of step {later[-1]} already; a step to save must be later. "
                "Remove the checkpoints that are not wanted, or save to another directory"
            )
        self.folder.mkdir()

    def _lead(self, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> None:
        if self.num_ranks > 1:
            claims = {0: declared, **self._collect("claim")}
            if found := differences(claims):
                raise CheckpointError("the ranks do not save the same tensors:\n  " + "\n  ".join(found))
        mine = write_parts(self.folder, declared, parts, layouts, rank=0)
        others = self._collect("part")
        whole = merge([mine, *(others[rank] for rank in range(1, self.num_ranks))])
        if faults := [*whole.faults(), *whole.incomplete()]:
            raise CheckpointError("what the ranks saved is no checkpoint:\n  " + "\n  ".join(faults))
        for rank in others:
            self._mine("claim", rank).unlink()
            self._mine("part", rank).unlink()
        write_bytes(self.folder / MANIFEST, whole.to_bytes())
        sync_folder(self.folder)
        try:
            self.folder.rename(self.final)
        except OSError as error:
            if not self.final.exists():
                raise
            raise FileExistsError(f"another job has saved step {self.step} to {self.directory.path}") from error
        sync_folder(self.directory.path)

    def _follow(self, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> None:
        self._wait(lambda: self.folder.exists(), "rank 0 to begin")
        try:
            self._say("claim", declared)
            self._say("part", write_parts(self.folder, declared, parts, layouts, self.rank))
            sync_folder(self.folder)
        except Exception as error:
            self._raise_if_failed()
            with contextlib.suppress(OSError):
                self._mine("failure").write_text(f"rank {self.rank}: {type(error).__name__}: {error}")
            raise
        self._wait(lambda: self.final.exists() and not self.folder.exists(), "rank 0 to finish")

    def _mine(self, what: str, rank: int | None = None) -> Path:
        return self.folder / f"{what}-{self.rank if rank is None else rank:05d}.json"

    def _say(self, what: str, manifest: Manifest) -> None:
        whole = self._mine(what).with_suffix(".writing")
        write_bytes(whole, manifest.to_bytes())
        whole.rename(self._mine(what))

    def _collect(self, what: str) -> dict[int, Manifest]:
        """What every other rank says, by rank."""
        got: dict[int, Manifest] = {}

        def complete() -> bool:
            for rank in range(1, self.num_ranks):
                if (failure := self._mine("failure", rank)).exists() and (text := failure.read_text()):
                    raise CheckpointError(f"step {self.step} was not saved: {text}")
                if rank not in got and (path := self._mine(what, rank)).exists():
                    got[rank] = Manifest.from_bytes(path.read_bytes())
            return len(got) == self.num_ranks - 1

        self._wait(complete, lambda: f"rank {_ranges(set(range(1, self.num_ranks)) - got.keys())}")
        return got

    def _wait(self, ready: Callable[[], bool], whom: str | Callable[[], str]) -> None:
        end, pause = time.monotonic() + self.timeout, 0.001
        while True:
            if self.rank:
                self._raise_if_failed()
            if ready():
                return
            if time.monotonic() > end:
                who = whom if isinstance(whom, str) else whom()
                raise TimeoutError(f"step {self.step}: rank {self.rank} waited {self.timeout:g} s for {who}")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _raise_if_failed(self) -> None:
        try:
            kind, message = json.loads(self.error.read_text())
        except (OSError, ValueError):  # there is none, or it is being written
            return
        raise FileExistsError(message) if kind == "FileExistsError" else CheckpointError(message)

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            if self.num_ranks > 1:
                text = str(error) if isinstance(error, CheckpointError | FileExistsError) else f"rank 0: {error!r}"
                self.error.write_text(json.dumps([type(error).__name__, text]))
        doomed = self.folder.with_suffix(".old")
        with contextlib.suppress(OSError):  # where other ranks cannot put new files in it
            self.folder.rename(doomed)
        _discard(doomed)
        _discard(self.folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    while True:
        with open(path, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file.fileno(), path):
                continue  # another job took it for a killed one's, before it was locked
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
            return


def _take_over(lock: Path) -> None:
    """Removes a lock that nobody holds, and the temporary folder that it is of."""
    with contextlib.suppress(OSError), open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file.fileno(), lock):
            _discard(lock.with_suffix(".tmp"))
            lock.unlink()


def _discard(folder: Path) -> None:
    """Removes a folder, or the link that somebody put in its place."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _ranges(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    return ", ".join(map(str, listed[:10])) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")
