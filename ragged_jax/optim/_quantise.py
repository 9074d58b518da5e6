"""Codes and scales of blocks, as JAX operations that give the same bits in every program.

A compiler may round `a * b + c` once or twice, and does so differently in differently shaped programs. `product`
puts a clamp behind the multiplication, which no compiler can take for the identity.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._maps import CELLS, CodeMap
from ._reference import LARGEST, SMALLEST_SCALE

SMALLEST_BITS = int(SMALLEST_SCALE.view(np.int32))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a * b`, rounded, saturating at 2**125, so that a sum of two has a reciprocal. NaN stays NaN."""
    return lax.clamp(-LARGEST, a * b, LARGEST)


def magnitude(x: jax.Array) -> jax.Array:
    """float32 as int32 that rises with the absolute value; NaN is the largest."""
    return lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)


def scale_of(largest: jax.Array) -> jax.Array:
    """The scale of blocks whose largest `magnitude` this is: the number itself, or zero if it is next to nothing."""
    return lax.bitcast_convert_type(jnp.where(largest < SMALLEST_BITS, np.int32(0), largest), jnp.float32)


def encode(x: jax.Array, scale: jax.Array, code_map: CodeMap, at_least: int = 0) -> jax.Array:
    """uint8 codes of `x`, float32, in blocks of these scales (broadcast against it)."""
    y = x * jnp.where(scale == 0, np.float32(0), 1 / scale)
    cells = jnp.asarray(code_map.cells)
    code = encode_with(lambda cell: cells.at[cell].get(mode="promise_in_bounds"), y, code_map)
    if at_least:
        code = jnp.maximum(code, at_least)
    return code.astype(jnp.uint8)


def encode_with(cells: Callable[[jax.Array], jax.Array], y: jax.Array, code_map: CodeMap) -> jax.Array:
    """int32 codes of numbers between -1 and 1; `cells` looks up in the map's table of them."""
    bits = lax.bitcast_convert_type(y, jnp.int32)
    low = bits & np.int32(0xFFFF)
    last = 127 * CELLS - code_map.lowest
    cell = jnp.clip(((bits & np.int32(0x7FFFFFFF)) >> 16) - code_map.lowest, 0, last)
    if code_map.signed:
        negative = bits < 0
        cell = jnp.where(negative, cell + (last + 1), cell)
        low = jnp.where(negative, low ^ 0xFFFF, low)
    found = cells(cell)
    return (found >> 16) + (low > (found & 0xFFFF))


def decode(codes: jax.Array, scale: jax.Array, code_map: CodeMap) -> jax.Array:
    """The float32 numbers that codes stand for."""
    values = jnp.asarray(code_map.values)
    return values.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds") * scale
