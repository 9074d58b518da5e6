"""Codes and scales of blocks in torch, with the bits of the numpy reference on every device.

Each operation rounds once: torch runs one kernel for each, so that no compiler contracts a product and a sum. What
is not normal is flushed, as XLA and the reference do.
"""

from functools import cache

import numpy as np
import torch

from ragged_jax.optim._maps import CELLS, CodeMap
from ragged_jax.optim._reference import LARGEST, SMALLEST_SCALE, TINY

_LARGEST, _SMALLEST_SCALE = float(LARGEST), float(SMALLEST_SCALE)
_SUBNORMAL = float(np.nextafter(TINY, np.float32(0)))  # the largest


def flush(x: torch.Tensor) -> torch.Tensor:
    """With subnormal numbers as zero."""
    return torch.nn.functional.hardshrink(x, _SUBNORMAL)


def product(x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor:
    """`x * y`, saturating at 2**125. NaN stays NaN."""
    return flush(x * y).clamp_(-_LARGEST, _LARGEST)


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root, rounded right: in float32 torch's own on a CPU is one off for every fifth number."""
    return x.double().sqrt_().float() if x.device.type == "cpu" else x.sqrt()


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """The scales of blocks with this largest magnitude."""
    return torch.where(largest < _SMALLEST_SCALE, 0.0, largest)


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """What elements are multiplied with before they are coded."""
    return torch.where(scales == 0, 0.0, scales.reciprocal())


def decode(codes: torch.Tensor, scales: torch.Tensor, table: CodeMap) -> torch.Tensor:
    """The float32 numbers that codes stand for. `scales` broadcasts against them."""
    values = _values(table, codes.device).index_select(0, codes.reshape(-1).int())
    return flush(values.view(codes.shape).mul_(scales))


def encode(x: torch.Tensor, inverses: torch.Tensor, table: CodeMap, at_least: int = 0) -> torch.Tensor:
    """uint8 codes of float32 numbers in blocks of these inverse scales, which broadcast against them.

    The upper 16 bits of a number select a cell that holds at most one midpoint; adding the lower ones to the cell's
    entry carries over where they exceed that midpoint's.
    """
    bits = (x * inverses).view(torch.int32)
    sign = bits >> 31
    low = sign.bitwise_xor_(bits).bitwise_and_(0xFFFF)  # inverted for negative numbers, so that it rises
    cell = (bits >> 16).bitwise_and_(0xFFFF)
    code = _cells(table, x.device).index_select(0, cell.view(-1)).view(x.shape).add_(low)
    code = code.bitwise_right_shift_(16)
    return (code.clamp_(min=at_least) if at_least else code).to(torch.uint8)


@cache
def _values(table: CodeMap, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table.values).to(device)


@cache
def _cells(table: CodeMap, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(cells(table)).to(device)


def cells(table: CodeMap) -> np.ndarray:
    """int32 [65536]: for the upper 16 bits of a float32, its code where the lower are 0, and what they lack to carry.

    Example:
      >>> from ragged_jax.optim import code_map
      >>> int(cells(code_map("dynamic", signed=True))[np.float32(1).view(np.uint32) >> 16] >> 16)
      255
    """
    upper = np.arange(1 << 16)
    negative, key = upper >> 15, upper & 0x7FFF
    last = 127 * CELLS - table.lowest
    cell = np.clip(key - table.lowest, 0, last)
    if not table.signed:  # only a negative zero could come up
        found = np.where(negative, np.int32(0xFFFF), table.cells[cell])
    else:
        found = table.cells[cell + negative * (last + 1)]
    return (found ^ 0xFFFF).astype(np.int32)
