"""Warnings that point at the user's line."""

import inspect
import warnings
from pathlib import Path

_OURS = tuple(f"{Path(__file__).parents[1] / package}/" for package in ("ragged_jax", "torch_bridge"))


def warn(message: str) -> None:
    """A UserWarning of the line that called the library: the innermost one outside of it.

    As with `skip_file_prefixes`, which `warnings.warn` has from Python 3.12 on.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
