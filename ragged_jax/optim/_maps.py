"""Code maps: which 256 numbers the codes of an 8-bit state stand for. numpy only, so that torch can use them too."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from . import _tables

MapName = Literal["dynamic", "linear", "fp8"]

CELLS = 128  # of an octave: the top 7 bits of the mantissa


@dataclass(frozen=True)
class CodeMap:
    """256 rising numbers in [-1, 1], or in [0, 1] for moments that are never negative.

    A number's code is the count of midpoints between neighbouring values that lie strictly below it, so a tie goes to
    the lower code. The dynamic map is that of Dettmers et al., arXiv:2110.02861.

    Attributes:
      name: dynamic (its steps shrink with the value, over 7 decades), linear (equal steps), or fp8 (3 bits of
        mantissa: e4m3 with sign, and 5 bits of exponent without).
      signed: whether it holds negative values.
    """

    name: MapName
    signed: bool

    @cached_property
    def values(self) -> np.ndarray:
        """float32 [256], rising; a value may occur twice."""
        return _VALUES[self.name](self.signed).astype(np.float32)

    @cached_property
    def midpoints(self) -> np.ndarray:
        """float32 [255]."""
        return (self.values[:-1] + self.values[1:]) / np.float32(2)

    @cached_property
    def zero(self) -> int:
        """The code of zero."""
        return int(np.searchsorted(self.midpoints, np.float32(0), "left"))

    @cached_property
    def lowest(self) -> int:
        """The top 16 bits of the smallest magnitude with a cell of its own; what is smaller rounds to zero."""
        smallest = np.abs(self.midpoints[self.midpoints != 0]).min()
        return int(np.floor(np.log2(smallest)) + 126) * CELLS

    @cached_property
    def cells(self) -> np.ndarray:
        """int32: for each cell of numbers that share their top 16 bits, what tells the code.

        The upper half is the code of the cell's lowest number, the lower half the low bits that a number must exceed
        to have the next code (those of a negative number inverted, so that they rise with it). No cell holds two
        midpoints. Cells are sorted by magnitude, from `lowest` to that of 1, the positive before the negative.
        """
        key = np.arange(self.lowest, 127 * CELLS + 1, dtype=np.int64)
        signs = (0, 1) if self.signed else (0,)
        return np.concatenate([self._cells(key, negative=bool(sign)) for sign in signs]).astype(np.int32)

    def _cells(self, key: np.ndarray, *, negative: bool) -> np.ndarray:
        first, last = key << 16, key << 16 | 0xFFFF  # the bits of the numbers at its ends, by magnitude
        first = np.where(key == self.lowest, 0, first)
        if negative:
            lowest, highest = (_number(bits | 1 << 31) for bits in (last, first))
        else:
            lowest, highest = _number(first), _number(last)
        highest = np.minimum(highest, np.float32(1))
        low, high = (np.searchsorted(self.midpoints, x, "left") for x in (lowest, highest))
        if (high - low).max() > 1:
            raise ValueError(f"{self}: two midpoints in one cell")
        bits = self.midpoints[np.minimum(low, 254)].view(np.uint32).astype(np.int64) & 0xFFFF
        threshold = np.where(high > low, bits ^ 0xFFFF if negative else bits, 0xFFFF)
        return low << 16 | threshold


def _number(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def _dynamic(signed: bool) -> np.ndarray:
    if signed:
        positive = _tables.signed()
        return np.concatenate([-positive[::-1], [0], positive, [1]])
    return np.concatenate([[0], _tables.unsigned(), [1]])


def _linear(signed: bool) -> np.ndarray:
    if signed:  # symmetric around code 127, which is zero
        return np.concatenate([np.arange(-127, 128) / 127, [1]])
    return np.arange(256) / 255


def _fp8(signed: bool) -> np.ndarray:
    exponents = 16 if signed else 32
    fractions = np.arange(8) / 8
    normal = [(1 + fractions) * 2.0 ** (e - exponents) for e in range(1, exponents)]
    magnitudes = np.concatenate([fractions * 2.0 ** (1 - exponents), *normal])
    if not signed:
        return magnitudes / magnitudes.max()
    magnitudes = magnitudes[:-1] / magnitudes[-2]  # e4m3 has no number in its last place
    return np.concatenate([-magnitudes[:0:-1], magnitudes, np.ones(3)])


_VALUES = {"dynamic": _dynamic, "linear": _linear, "fp8": _fp8}


@cache
def code_map(name: MapName, *, signed: bool) -> CodeMap:
    """The map called `name`, with or without sign.

    Example:
      >>> code_map("dynamic", signed=True).zero, code_map("dynamic", signed=False).zero
      (127, 0)
    """
    if name not in _VALUES:
        raise ValueError(f"map={name!r} is unknown; choose from {', '.join(_VALUES)}")
    return CodeMap(name, signed)
