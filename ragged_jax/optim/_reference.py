"""8-bit Adam in numpy: slow and obvious, the oracle of the JAX and the torch implementation. Needs no framework."""

import math
from typing import Any, NamedTuple

import numpy as np

from ..layout import Block, elements
from ._maps import MapName, code_map

F32 = np.float32
TINY = F32(2.0**-126)  # the smallest normal number; hardware flushes what is smaller
SMALLEST_SCALE = F32(2.0**-100)  # a block with a smaller absolute maximum is stored as zeros
LARGEST = F32(2.0**125)  # products saturate here, so that a sum of two has a normal reciprocal


def block_ids(shape: tuple[int, ...], block: Block) -> np.ndarray:
    """For each element of a tensor, the number of its quantisation block.

    Example:
      >>> from ragged_jax.layout import tile
      >>> block_ids((3, 4), tile(2, 2)).tolist()
      [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3]]
    """
    numel = math.prod(shape)
    if block.kind == "whole":
        return np.zeros(shape, np.int64)
    if block.kind == "elements":
        return (np.arange(numel) // block.size[0]).reshape(shape)
    dim = block.dim if block.kind == "rows" else len(shape) - 2
    index = np.indices(shape)
    member = np.zeros(shape, np.int64)
    for d in range(dim):
        member = member * shape[d] + index[d]
    height = block.size[0]
    ids = member * -(-shape[dim] // height) + index[dim] // height
    if block.kind == "rows":
        return ids
    width = block.size[1]
    return ids * -(-shape[-1] // width) + index[-1] // width


def flush(x: Any) -> Any:
    """With subnormal numbers as zero, as the hardware has them."""
    return np.where(np.abs(x) < TINY, F32(0), x)


def product(a: Any, b: Any) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(flush((a * b).astype(F32)), -LARGEST, LARGEST)


def quantise(
    x: np.ndarray, ids: np.ndarray, name: MapName, *, signed: bool, at_least: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8, shape of `x`) and scales (float32, one a block) of a float32 tensor in blocks `ids`."""
    table = code_map(name, signed=signed)
    scales = np.zeros(int(ids.max(initial=-1)) + 1, F32)
    np.maximum.at(scales, ids, np.abs(x))
    scales = np.where(scales < SMALLEST_SCALE, F32(0), scales)
    inverse = np.where(scales == 0, F32(0), F32(1) / np.where(scales == 0, F32(1), scales))
    y = flush(x) * inverse[ids]
    codes = np.searchsorted(table.midpoints, y, side="left")
    return np.maximum(codes, at_least).astype(np.uint8), scales


def dequantise(codes: np.ndarray, scales: np.ndarray, ids: np.ndarray, name: MapName, *, signed: bool) -> np.ndarray:
    """The float32 tensor that codes and scales stand for."""
    return flush(code_map(name, signed=signed).values[codes] * scales[ids])


def power(base: float, exponent: int) -> np.float32:
    """`base ** exponent` in float32 by repeated squaring, which is the same everywhere."""
    result, square = F32(1), F32(base)
    while exponent:
        if exponent & 1:
            result = flush(result * square)
        square, exponent = flush(square * square), exponent >> 1
    return F32(result)


class Moments(NamedTuple):
    """The 8-bit state of one tensor after `step` steps."""

    step: int
    mu_codes: np.ndarray
    mu_scales: np.ndarray
    nu_codes: np.ndarray
    nu_scales: np.ndarray


class Adam8bit:
    """`scale_by_adam8bit` for one tensor.

    Example:
      >>> adam = Adam8bit()
      >>> update, state = adam.update(np.ones((64, 64), np.float32), adam.init((64, 64)))
      >>> round(float(update[0, 0]), 3)
      1.0
    """

    def __init__(
        self,
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        *,
        block: Block = elements(256),  # noqa: B008
        map: MapName = "dynamic",
        clamp_second_moment: bool = True,
        nesterov: bool = False,
    ):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.map: MapName = map
        self.block, self.at_least, self.nesterov = block, int(clamp_second_moment), nesterov

    def init(self, shape: tuple[int, ...]) -> Moments:
        return self._store(0, np.zeros(shape, F32), np.zeros(shape, F32))

    def _store(self, count: int, m: np.ndarray, v: np.ndarray) -> Moments:
        ids = block_ids(m.shape, self.block)
        return Moments(
            count,
            *quantise(m, ids, self.map, signed=True),
            *quantise(v, ids, self.map, signed=False, at_least=self.at_least),
        )

    def update(self, grad: np.ndarray, state: Moments) -> tuple[np.ndarray, Moments]:
        """The update (float32) and the next state. The update comes from the moments before they are quantised."""
        g, ids, count = flush(grad.astype(F32)), block_ids(grad.shape, self.block), state.step + 1
        b1, b2, c1, c2 = F32(self.b1), F32(self.b2), F32(1 - self.b1), F32(1 - self.b2)
        m = dequantise(state.mu_codes, state.mu_scales, ids, self.map, signed=True)
        v = dequantise(state.nu_codes, state.nu_scales, ids, self.map, signed=False)
        m = flush(product(b1, m) + product(c1, g))
        v = flush(product(b2, v) + product(c2, product(g, g)))
        correct1, correct2 = F32(1) / (F32(1) - power(self.b1, count)), F32(1) / (F32(1) - power(self.b2, count))
        if self.nesterov:
            ahead = F32(1) / (F32(1) - power(self.b1, count + 1))
            first = flush(product(b1, product(m, ahead)) + product(c1, product(g, correct1)))
        else:
            first = product(m, correct1)
        return flush(first / (np.sqrt(product(v, correct2)) + F32(self.eps))), self._store(count, m, v)
