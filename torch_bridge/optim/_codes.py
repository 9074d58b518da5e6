"""Codes and scales of blocks in torch, with the bits of the numpy reference on every device.

Each operation rounds once: torch runs one kernel for each, so that no compiler contracts a product and a sum. What
is not normal is flushed, as XLA and the reference do.
"""

from functools import cache
from typing import ClassVar

import numpy as np
import torch

from ragged_jax.optim._maps import CELLS, CodeMap
from ragged_jax.optim._reference import LARGEST, SMALLEST_SCALE, TINY

_LARGEST = float(LARGEST)
_SUBNORMAL, _TOO_SMALL = (float(np.nextafter(x, np.float32(0))) for x in (TINY, SMALLEST_SCALE))  # the largest ones
_hardshrink = torch.ops.aten.hardshrink.out


class Buffers(dict[str, torch.Tensor]):
    """Memory of one shape for intermediate results, by name; made when first asked for. The rest is float32."""

    _DTYPES: ClassVar = {"cell": torch.int32, "low": torch.int32, "root": torch.float64}

    def __init__(self, scratch: "Scratch", like: torch.Tensor):
        super().__init__()
        self._scratch, self._shape, self._device = scratch, like.shape, like.device

    def __missing__(self, name: str) -> torch.Tensor:
        dtype = self._DTYPES.get(name, torch.float32)
        flat = self._scratch.memory(name, self._shape.numel(), dtype, self._device)
        self[name] = flat.view(self._shape)
        return self[name]


class Scratch:
    """Memory for intermediate results that is taken once and used for every chunk of a step.

    A result of its own for each operation would cost a CPU more in page faults than in arithmetic.
    """

    def __init__(self):
        self._memory: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._buffers: dict[tuple[torch.Size, torch.device], Buffers] = {}

    def __call__(self, like: torch.Tensor) -> Buffers:
        """Memory of the shape of `like`; the same every time."""
        key = like.shape, like.device
        if (found := self._buffers.get(key)) is None:
            found = self._buffers[key] = Buffers(self, like)
        return found

    def memory(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if (found := self._memory.get((name, device))) is None or found.numel() < numel:
            found = self._memory[name, device] = torch.empty(numel, dtype=dtype, device=device)
        return found[:numel]


def flush_(x: torch.Tensor) -> torch.Tensor:
    """In place, subnormal numbers as zero."""
    return _hardshrink(x, _SUBNORMAL, out=x)


def product_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x * y` in place of `x`, saturating at 2**125. NaN stays NaN."""
    return flush_(x.mul_(y)).clamp_(-_LARGEST, _LARGEST)


def magnify_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same without a flush: of normal numbers with what is at least 1, or where the next product flushes."""
    return x.mul_(y).clamp_(-_LARGEST, _LARGEST)


def magnify(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same in `out`."""
    return torch.mul(x, y, out=out).clamp_(-_LARGEST, _LARGEST)


def sqrt_(x: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """The square root, rounded right, as torch's own in float32 on a CPU is not; NaN stays NaN."""
    if x.device.type != "cpu":
        return x.sqrt_()
    if torch.get_num_threads() == 1:
        numbers = x.numpy()
        np.sqrt(numbers, out=numbers)
        return x
    return x.copy_(buffers["root"].copy_(x).sqrt_())


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """The scales of blocks with this largest magnitude."""
    return _hardshrink(largest, _TOO_SMALL, out=torch.empty_like(largest))


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """What elements are multiplied with before they are coded."""
    return scales.reciprocal().nan_to_num_(nan=float("nan"), posinf=0.0)  # infinite where a scale is zero


def decode(codes: torch.Tensor, scales: torch.Tensor, table: CodeMap, out: torch.Tensor, buffers: Buffers) -> None:
    """In `out`, the float32 numbers that codes stand for. `scales` broadcasts against them.

    What is not normal is not flushed yet: a product with a number of at most 1 comes next, and has the same bits.
    """
    index = buffers["cell"].copy_(codes)
    torch.index_select(_values(table, codes.device), 0, index.view(-1), out=out.view(-1))
    out.mul_(scales)


def encode(
    x: torch.Tensor, inverses: torch.Tensor, table: CodeMap, at_least: int, out: torch.Tensor, buffers: Buffers
) -> None:
    """In `out`, uint8, codes of float32 numbers in blocks of these inverse scales, which broadcast against them.

    The upper 16 bits of a number select a cell that holds at most one midpoint; adding the number to the cell's
    entry carries over where its lower bits exceed that midpoint's.
    """
    bits = torch.mul(x, inverses, out=buffers["scaled"]).view(torch.int32)
    cell, code = buffers["low"], buffers["cell"]
    if table.signed:
        number = torch.bitwise_right_shift(bits, 31, out=cell).bitwise_xor_(bits)  # rises with the magnitude
        cell = bits.bitwise_right_shift_(16)
    else:
        number = bits
        torch.bitwise_right_shift(bits, 16, out=cell)
    cell.bitwise_and_(0xFFFF)
    torch.index_select(_cells(table, x.device, at_least), 0, cell.view(-1), out=code.view(-1))
    out.copy_(code.add_(number).bitwise_right_shift_(16))


@cache
def _values(table: CodeMap, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(table.values).to(device)


@cache
def _cells(table: CodeMap, device: torch.device, at_least: int) -> torch.Tensor:
    return torch.from_numpy(cells(table, at_least)).to(device)


def cells(table: CodeMap, at_least: int = 0) -> np.ndarray:
    """int32 [65536]: for the upper 16 bits of a float32, what is to be added to all of its bits.

    The upper half of the sum is its code, or `at_least`. Of a negative number in a signed map the bits are inverted.

    Example:
      >>> from ragged_jax.optim import code_map
      >>> one = np.float32(1).view(np.int32)
      >>> int(cells(code_map("dynamic", signed=True))[one >> 16] + one >> 16)
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
    code_and_lack = np.maximum(found.astype(np.int64) ^ 0xFFFF, at_least << 16)
    added = upper ^ 0xFFFF * negative if table.signed else upper
    return (code_and_lack - (added << 16)).astype(np.uint32).view(np.int32)
