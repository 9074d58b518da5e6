"""What lies in a directory of checkpoints while one is written, and what becomes of it when a process is killed.

A temporary folder belongs to the process that holds the lock beside it. One whose lock is free is what a killed
process left, and the next save removes it.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".step"  # what the names of all that is no checkpoint begin with
_ABANDONED_SECONDS = 3600.0  # a message is rubbish when it is this old


def clean(path: Path) -> None:
    """Removes from a directory of checkpoints what killed processes left."""
    for found in path.glob(f"{TEMPORARY}*"):
        lock = found.with_suffix(".lock")
        if found.suffix == ".old" or (found.suffix == ".tmp" and not lock.exists()):
            discard(found)
        elif found == lock:
            _take_over(lock)
        elif found.suffix == ".error" and age(found) > _ABANDONED_SECONDS:
            found.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
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
            discard(lock.with_suffix(".tmp"))
            lock.unlink()


def discard(folder: Path) -> None:
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


def age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
