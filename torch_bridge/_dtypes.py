"""Names of dtypes in a layout, and torch's own."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """The name that layouts use, which is numpy's: `float32`, `bfloat16`, `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`.

    Raises:
      ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
