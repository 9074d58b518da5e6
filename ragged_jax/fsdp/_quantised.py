"""Gathers of quantised weights: a byte for each element and a float32 scale for each block of them.

Blocks are consecutive elements of what one device holds, so none spans two devices. Bytes and scales travel in one
collective, as uint8, which no backend widens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from ._torus import all_gather

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def packed_nbytes(numel: int, block: int) -> int:
    """Bytes of what `pack` makes of a shard of `numel` elements."""
    num_blocks = -(-numel // block)
    return num_blocks * (block + 4)


def pack(shard: jax.Array, dtype: str, block: int) -> jax.Array:
    """A shard as bytes, 1-D: all elements, the last block padded with zeros, then the scales.

    The largest finite element of a block becomes the largest of `dtype`. Elements that are not finite become NaN and
    leave the others of their block as they are.
    """
    flat = shard.reshape(-1).astype(jnp.float32)
    x = jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    finite, largest = jnp.isfinite(x), LARGEST[dtype]
    scale = jnp.max(jnp.where(finite, jnp.abs(x), 0), axis=1, keepdims=True) / largest
    y = jnp.clip(jnp.where(finite, x / jnp.where(scale > 0, scale, 1), 0), -largest, largest)
    # int8 has a number to spare for NaN
    q = jnp.where(finite, jnp.round(y), -128).astype(jnp.int8) if dtype == "int8" else _float8(y, finite, dtype)
    parts = (q, scale)
    return jnp.concatenate([lax.bitcast_convert_type(part, jnp.uint8).reshape(-1) for part in parts])


def _float8(y: jax.Array, finite: jax.Array, dtype: str) -> jax.Array:
    return jnp.where(finite, y, jnp.nan).astype(dtype)


def unpack(packed: jax.Array, numel: int, dtype: str, block: int, out_dtype: Any) -> jax.Array:
    """The elements of several shards `[n, bytes]`: `[n, numel]`."""
    num_blocks = -(-numel // block)
    q = lax.bitcast_convert_type(packed[:, : num_blocks * block], jnp.dtype(dtype)).astype(jnp.float32)
    scale = lax.bitcast_convert_type(packed[:, num_blocks * block :].reshape(-1, num_blocks, 4), jnp.float32)
    if dtype == "int8":
        q = jnp.where(q == -128, jnp.nan, q)
    x = q.reshape(-1, num_blocks, block) * scale[..., None]
    return x.reshape(-1, num_blocks * block)[:, :numel].astype(out_dtype)


def gather_quantised(shard: jax.Array, mesh: Mesh, axis: str, dtype: str, block: int, out_dtype: Any) -> jax.Array:
    """`all_gather(shard, mesh, axis)`, nearly."""

    # In one piece, because a scan that is differentiated computes ahead what depends on no layer: zeros and NaNs in
    # the shape of the weights. Out of the `shard_map` for split tensors jax cannot even bring them.
    @partial(jax.checkpoint, prevent_cse=False)
    def gathered(shard: jax.Array) -> jax.Array:
        packed = all_gather(pack(shard, dtype, block)[None], mesh, axis)
        return unpack(packed, shard.size, dtype, block, out_dtype).reshape(-1, *shard.shape[1:])

    return gathered(shard)
