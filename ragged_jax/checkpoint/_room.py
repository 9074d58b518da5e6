"""Room on the disk for a whole file before anything is written to it."""

import ctypes
import errno
import os
import sys
from functools import cache
from typing import Any

_LEAST_NBYTES = 1 << 20  # smaller files do not gain by it


def take_room(descriptor: int, nbytes: int) -> None:
    """Makes a new file as long as it is going to be.

    A disk without so much room is known at once, and the kernel need not look for room time and again.
    File systems that cannot do it are left alone. `os.posix_fallocate` would write to every block there.

    Raises:
      OSError: there is no room, or the file may not become so long.
    """
    if nbytes < _LEAST_NBYTES or (fallocate := _fallocate()) is None:
        return
    if fallocate(descriptor, 0, 0, nbytes) and (number := ctypes.get_errno()) in _NO_ROOM:
        raise OSError(number, os.strerror(number))


_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@cache
def _fallocate() -> Any:
    """Linux's own, where a file's length is a 64-bit integer."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return found
