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


class Scratch:
    """Memory for intermediate results that is taken once and used for every chunk of a step.

    A result of its own for each operation would cost a CPU more in page faults than in arithmetic.
    """

    def __init__(self):
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}

    def __call__(self, name: str, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory of the shape of `like`; under one name, the same every time."""
        key = name, dtype, like.device
        if (view := self._views.get((*key, like.shape))) is None:
            if key not in self._buffers or self._buffers[key].numel() < like.numel():
                self._buffers[key] = torch.empty(like.numel(), dtype=dtype, device=like.device)
                self._views = {k: x for k, x in self._views.items() if k[:3] != key}
            view = self._buffers[key][: like.numel()].view(like.shape)
            self._views[(*key, like.shape)] = view
        return view


def flush_(x: torch.Tensor) -> torch.Tensor:
    """In place, subnormal numbers as zero."""
    return torch.ops.aten.hardshrink.out(x, _SUBNORMAL, out=x)


def product_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x * y` in place of `x`, saturating at 2**125. NaN stays NaN."""
    return flush_(x.mul_(y)).clamp_(-_LARGEST, _LARGEST)


def product(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in `out`."""
    return flush_(torch.mul(x, y, out=out)).clamp_(-_LARGEST, _LARGEST)


def sqrt_(x: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """The square root, rounded right, as torch's own in float32 on a CPU is not; NaN stays NaN."""
    if x.device.type != "cpu":
        return x.sqrt_()
    if torch.get_num_threads() == 1:
        numbers = x.numpy()
        np.sqrt(numbers, out=numbers)
        return x
    return x.copy_(scratch("root", x, torch.float64).copy_(x).sqrt_())


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """The scales of blocks with this largest magnitude."""
    return torch.where(largest < _SMALLEST_SCALE, 0.0, largest)


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """What elements are multiplied with before they are coded."""
    return torch.where(scales == 0, 0.0, scales.reciprocal())


def decode(codes: torch.Tensor, scales: torch.Tensor, table: CodeMap, out: torch.Tensor, scratch: Scratch):
    """In `out`, the float32 numbers that codes stand for. `scales` broadcasts against them."""
    index = scratch("cell", codes, torch.int32).copy_(codes)
    torch.index_select(_values(table, codes.device), 0, index.view(-1), out=out.view(-1))
    return flush_(out.mul_(scales))


def encode(
    x: torch.Tensor, inverses: torch.Tensor, table: CodeMap, at_least: int, out: torch.Tensor, scratch: Scratch
) -> None:
    """In `out`, uint8, codes of float32 numbers in blocks of these inverse scales, which broadcast against them.

    The upper 16 bits of a number select a cell that holds at most one midpoint; adding the lower ones to the cell's
    entry carries over where they exceed that midpoint's.
    """
    bits = torch.mul(x, inverses, out=scratch("scaled", x)).view(torch.int32)
    low = scratch("low", x, torch.int32)
    if table.signed:
        torch.bitwise_right_shift(bits, 31, out=low)
        low.bitwise_xor_(bits).bitwise_and_(0xFFFF)  # inverted for negative numbers, so that it rises
    else:
        torch.bitwise_and(bits, 0xFFFF, out=low)
    cell = bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    code = scratch("cell", x, torch.int32)
    torch.index_select(_cells(table, x.device), 0, cell.view(-1), out=code.view(-1))
    code.add_(low).bitwise_right_shift_(16)
    out.copy_(code.clamp_(min=at_least) if at_least else code)


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
