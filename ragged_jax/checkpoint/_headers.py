"""What safetensors files say of themselves, read as untrusted input."""

import json
import math
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..layout import SAFETENSORS_DTYPES, distinct_keys, itemsize, listed
from ._manifest import CheckpointError

_MAX_HEADER_NBYTES = 100 << 20  # what the safetensors library itself accepts
_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


class HeaderEntry(NamedTuple):
    """An array of a safetensors file.

    Attributes:
      dtype: as layouts name it.
      shape: of the array.
      offset: where its bytes start in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The header of a safetensors file.

    Attributes:
      entries: its arrays by name.
      metadata: texts by name.
      nbytes: of the whole file.
    """

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    nbytes: int


def read_header(path: Path, *, with_data: bool = True) -> Header:
    """The header of a safetensors file; no array is read.

    Args:
      path: the file.
      with_data: whether the arrays must be there, too, and not the first bytes of a file alone.

    Raises:
      CheckpointError: it is not one, or is cut; every fault is named.
      OSError: it cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would never end
        raise CheckpointError(f"{path}: not a file")
    with path.open("rb") as file:
        size = status.st_size
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > min(_MAX_HEADER_NBYTES, size - 8):
            raise CheckpointError(f"{path}: not a safetensors file: it claims a header of {num_bytes} bytes")
        try:
            document = json.loads(file.read(num_bytes), object_pairs_hook=distinct_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors header: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: not a safetensors header: {type(document).__name__} instead of an object")
    metadata = document.pop("__metadata__", None) or {}
    entries, faults = {}, []
    for name, value in document.items():
        try:
            entries[name] = _entry(value, 8 + num_bytes, size if with_data else math.inf)
        except ValueError as error:
            faults.append(f"{name!r:.200}: {error}")
    faults += _overlaps(entries)
    if faults:
        raise CheckpointError(f"{path}: its header is not sound:" + listed(faults))
    return Header(entries, metadata if isinstance(metadata, dict) else {}, size)


def _overlaps(entries: dict[str, HeaderEntry]) -> Iterator[str]:
    """Arrays that share bytes, which the format does not allow."""
    held = sorted((e.offset, e.offset + math.prod(e.shape) * itemsize(e.dtype), name) for name, e in entries.items())
    held = [span for span in held if span[0] < span[1]]
    for (_, end, name), (start, _, other) in pairwise(held):
        if start < end:
            yield f"{other!r:.200}: shares bytes with {name!r:.200}"


def _entry(value: Any, start: int, size: float) -> HeaderEntry:
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(low), int(high)]}:
            pass
        case _:
            raise ValueError(f"{value!r:.200} is not an array's dtype, shape and data_offsets")
    if (dtype := _DTYPES.get(code)) is None:
        raise ValueError(f"dtype {code!r:.20} is not known; there are {', '.join(_DTYPES)}")
    if any(type(dim) is not int or dim < 0 for dim in shape) or len(shape) > 64:
        raise ValueError(f"{shape!r:.200} is no shape")
    nbytes = math.prod(shape) * itemsize(dtype)
    if not 0 <= low <= high or high - low != nbytes:
        raise ValueError(f"{dtype}{shape} are {nbytes} bytes, not those from {low} to {high}")
    if start + high > size:
        raise ValueError(f"its bytes end at {start + high}, but the file has {size}: it was cut")
    return HeaderEntry(dtype, tuple(shape), start + low)
