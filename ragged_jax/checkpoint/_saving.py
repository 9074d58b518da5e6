"""One save, as one of its ranks sees it: how the ranks meet in the file system, and how all fail when one does.

A checkpoint is written under a temporary name, brought to the disk, and renamed: it is there whole or not at all.
Rank 0 makes the temporary folder, every rank writes its files there and then its part of the manifest, and rank 0,
when it has all parts, writes the manifest and renames the folder. There is no collective, so a thread may do it while
the training goes on.

The first rank that fails says why in a file beside the folder, whose name no other save has. All others look for it
while they wait and between the files they write, and fail with what it says.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..layout import Layout, listed, named
from ._checkpoint import MANIFEST
from ._manifest import CheckpointError, Manifest, differences, merge
from ._safetensors import sync_folder, write_bytes
from ._temporary import TEMPORARY, age, discard, locked
from ._write import Part, write_parts

_WRITING_SECONDS = 2.0  # that a message may take from its first byte to its last
_OF_THE_SAVE = (CheckpointError, FileExistsError, TimeoutError)  # said by us, of all ranks


@dataclass(frozen=True)
class Saving:
    """One save, as one rank sees it.

    Attributes:
      path: the directory of checkpoints.
      step: to be saved.
      rank, num_ranks: of the writers.
      token: what tells this save from every other, the same on all ranks.
      timeout: seconds to wait for other ranks.
    """

    path: Path
    step: Any
    rank: int
    num_ranks: int
    token: str
    timeout: float

    @property
    def folder(self) -> Path:
        """The temporary one."""
        return self.path / f"{TEMPORARY}.{self.token}.tmp"

    @property
    def error(self) -> Path:
        """Where the first rank that fails says why. It outlives the temporary folder."""
        return self.folder.with_suffix(".error")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What a rank does for a save. If it fails, all ranks do, with one message."""
        try:
            yield
        except BaseException as error:
            said = self._fail(error)
            is_known = (type(said), str(said)) == (type(error), str(error))
            if self.num_ranks == 1 or not isinstance(error, Exception) or is_known:
                raise
            raise said from error

    def run(
        self,
        final: Path,
        declared: Manifest,
        parts: Iterable[Part],
        layouts: Mapping[str, Layout],
        begin: Callable[[], None],
    ) -> None:
        """Writes what this rank holds, and returns when the checkpoint is whole and in its place. Inside `together`.

        Args:
          final: that place.
          declared, parts, layouts: see `write_parts`.
          begin: what rank 0 does first.
        """
        if self.rank:
            self._follow(final, declared, parts, layouts)
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.folder.with_suffix(".lock")):
            begin()
            self.folder.mkdir()
            self._lead(final, declared, parts, layouts)

    def _lead(self, final: Path, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> None:
        if self.num_ranks > 1:
            claims = {0: declared, **self._collect("claim")}
            if found := differences(claims):
                raise CheckpointError("the ranks do not save the same tensors:" + listed(found))
        mine = self._write(declared, parts, layouts)
        others = self._collect("part")
        whole = merge([mine, *(others[rank] for rank in range(1, self.num_ranks))])
        if faults := [*whole.faults(), *whole.incomplete()]:
            raise CheckpointError("what the ranks saved is no checkpoint:" + listed(faults))
        for rank in others:
            self._mine("claim", rank).unlink()
            self._mine("part", rank).unlink()
        write_bytes(self.folder / MANIFEST, whole.to_bytes())
        sync_folder(self.folder)
        self._raise_if_failed()
        try:
            self.folder.rename(final)
        except OSError as error:
            if not final.exists():
                raise
            raise FileExistsError(f"another job has saved step {self.step} to {self.path}") from error
        sync_folder(self.path)

    def _follow(self, final: Path, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> None:
        self._wait(self.folder.exists, "rank 0 to begin")
        self._say("claim", declared)
        try:
            mine = self._write(declared, parts, layouts)
            sync_folder(self.folder)
            self._say("part", mine)
        except Exception:
            self._make_room()
            raise
        gone: list[float] = []

        def finished() -> bool:
            if self.folder.exists():
                return False
            self._raise_if_failed()  # a failure is said before the folder goes
            if final.exists():
                return True
            gone.append(time.monotonic())
            if gone[-1] - gone[0] > _WRITING_SECONDS:
                raise self._without_reason()
            return False

        self._wait(finished, "rank 0 to finish")

    def _write(self, declared: Manifest, parts: Iterable[Part], layouts: Mapping[str, Layout]) -> Manifest:
        return write_parts(self.folder, declared, parts, layouts, self.rank, before_each=self._raise_if_failed)

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
                if rank not in got and (path := self._mine(what, rank)).exists():
                    got[rank] = Manifest.from_bytes(path.read_bytes())
            return len(got) == self.num_ranks - 1

        self._wait(complete, lambda: f"rank {named(map(str, sorted(set(range(1, self.num_ranks)) - got.keys())))}")
        return got

    def _wait(self, ready: Callable[[], bool], whom: str | Callable[[], str]) -> None:
        end, pause = time.monotonic() + self.timeout, 0.001
        while True:
            self._raise_if_failed()
            if ready():
                return
            if time.monotonic() > end:
                who = whom if isinstance(whom, str) else whom()
                raise TimeoutError(f"step {self.step}: rank {self.rank} waited {self.timeout:g} s for {who}")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _raise_if_failed(self) -> None:
        if self.num_ranks > 1 and (said := self._said()):
            raise said

    def _said(self) -> Exception | None:
        """Why a rank has failed; nothing if none has, or if its message is being written."""
        try:
            kind, message = json.loads(self.error.read_text())
        except OSError:
            return None
        except ValueError:
            if age(self.error) < _WRITING_SECONDS:
                return None
            return self._without_reason()
        return next((of for of in _OF_THE_SAVE if of.__name__ == kind), CheckpointError)(message)

    def _without_reason(self) -> CheckpointError:
        return CheckpointError(f"step {self.step} was not saved: a rank failed and had no room to say why")

    def _fail(self, error: BaseException) -> Exception:
        """Makes it known that this rank has failed. Returns what all ranks are to raise."""
        if self.rank == 0:
            self._make_room()
        if isinstance(error, _OF_THE_SAVE) and getattr(error, "errno", None) is None:
            said: Exception = error
        else:
            text = f"step {self.step} was not saved: rank {self.rank}: {type(error).__name__}: {error}"
            said = CheckpointError(text)
        if self.num_ranks > 1:
            said = self._first_said(said)
        if self.rank == 0:
            doomed = self.folder.with_suffix(".old")
            with contextlib.suppress(OSError):  # where other ranks cannot put new files in it
                self.folder.rename(doomed)
            discard(doomed)
            discard(self.folder)
        return said

    def _make_room(self) -> None:
        """Removes the files of this rank: on a full disk, room for the message. Not once rank 0 may count on them."""
        for path in self.folder.glob(f"*.{self.rank:05d}.safetensors"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _first_said(self, mine: Exception) -> Exception:
        """What the first rank that failed says, which may be this one."""
        with contextlib.suppress(OSError):  # no room, or no permission: the others see an empty message, or none
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                with open(self.error, "x") as file:
                    json.dump([type(mine).__name__, str(mine)], file)
            except FileExistsError:
                end = time.monotonic() + 2 * _WRITING_SECONDS
                while (said := self._said()) is None and time.monotonic() < end:
                    time.sleep(0.01)
                return said or mine
        return mine
