"""Gradients that are added up whole and reduced once, at the end.

Autodiff sums the gradients of a value that is used several times, but it reduces each of them first when the value
was gathered. So a slab's shard gets a companion: a *sink*, zeros in the shape of the whole slab. `unshard_unit` reads
only the shard, and in backward it gives the gradient of the whole slab, packed and not reduced, to the sink.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from ._joined import vary
from ._precision import MixedPrecision, cast_floats, widened
from ._torus import psum_scatter


@jax.tree_util.register_pytree_with_keys_class
class WithSink:
    """A slab's shard and the sink of its gradient. It takes the place of the slab's array, also in scanned stacks."""

    def __init__(self, shard: Any, sink: Any):
        self.shard, self.sink = shard, sink

    @property
    def ndim(self) -> int:
        return self.shard.ndim

    def tree_flatten_with_keys(self):
        return ((GetAttrKey("shard"), self.shard), (GetAttrKey("sink"), self.sink)), None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def make_sink(shard: jax.Array, spec: PartitionSpec, axes: tuple[str, ...], dtype: DTypeLike | None) -> jax.Array:
    """The sink of a shard, inside `shard_map`. Of a replicated value, in its own shape.

    Args:
      shard: this device's part.
      spec: of the global array.
      axes: the mesh axes that split the batch; the last one shards.
      dtype: to add up in; None for the shard's own.
    """
    shape = list(shard.shape)
    if (dim := _sharded_dim(spec, axes[-1])) is not None:
        shape[dim] *= lax.axis_size(axes[-1])
    return vary(cast_floats(jnp.zeros(shape, shard.dtype), dtype), axes)


def drain(
    sum_: jax.Array,
    shard: jax.Array,
    spec: PartitionSpec,
    axes: tuple[str, ...],
    precision: MixedPrecision,
    num: int,
    mesh: Mesh | None,
) -> jax.Array:
    """The mean over devices and microbatches of what a sink has collected: the shard's gradient.

    Args:
      sum_: the sum over this device's microbatches.
      shard, spec, axes: as for `make_sink`.
      precision: the unit's.
      num: microbatches.
      mesh: of the slab; None for a value that is in none.
    """
    axis, replicas = axes[-1], axes[:-1]
    scale = 1 / (lax.axis_size(axes) * num)
    if (dim := _sharded_dim(spec, axis)) is None:
        return lax.psum(_scaled(sum_, scale, sum_.dtype), axes).astype(shard.dtype)
    return reduce_scatter(precision.summed(sum_), mesh, axis, replicas, dim, scale, shard.dtype)


def reduce_scatter(
    whole: jax.Array, mesh: Mesh | None, axis: str, replicas: Sequence[str], dim: int, scale: float, dtype: DTypeLike
) -> jax.Array:
    """The sum of `whole` over an axis and its replicas, times `scale`, in `dtype`; of it this device's part.

    Only the result is rounded to `dtype`: the sum may be too large for it, and a third is no number of bfloat16.
    """
    if not whole.size:  # XLA scatters no empty arrays. Every device skips the same ones.
        shape = list(whole.shape)
        shape[dim] //= lax.axis_size(axis)
        return whole.reshape(shape).astype(dtype)
    # A sum over many devices overflows float16, so there the mean is taken first.
    before, after = (scale, 1) if whole.dtype == jnp.float16 else (1, scale)
    part = psum_scatter(_scaled(whole, before, whole.dtype), mesh, axis, dim)
    if replicas:
        wide = max(whole.dtype, jnp.dtype(dtype), key=lambda d: d.itemsize)
        part = lax.psum(part.astype(wide), replicas)
    return _scaled(part, after, dtype)


def _scaled(x: jax.Array, scale: float, dtype: DTypeLike) -> jax.Array:
    if scale != 1:
        x = widened(x)
        x = x * jnp.asarray(scale, x.dtype)
    return x.astype(dtype)


def _sharded_dim(spec: PartitionSpec, axis: str) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if entry == axis or entry == (axis,)), None)
