"""The two collectives of a bucket, inside `shard_map`: gather on the way in, reduce-scatter on the way back.

Plain autodiff through the slices of a packed slab adds one padded buffer per tensor and doubles a bf16 step;
the `custom_vjp` here packs the gradients of a slab once and reduce-scatters the result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..layout import Bucket, Slab
from ._precision import FULL, MixedPrecision

Arrays = dict[str, jax.Array]


def slab_shape(slab: Slab, num_shards: int) -> tuple[int, ...]:
    """Shape of a slab's array over `num_shards` shards: natural for a sole slab, 1-D for width 1."""
    if slab.sole:
        return (slab.rows * num_shards, *slab.placements[0].tensor.shape[1:])
    return (slab.rows * num_shards,) if slab.width == 1 else (slab.rows * num_shards, slab.width)


def unshard(
    bucket: Bucket, shards: Arrays, axis: str, data_axes: tuple[str, ...], precision: MixedPrecision = FULL
) -> Arrays:
    """All-gathers a bucket. To be called inside `shard_map` with `axis` manual.

    Its gradient is the mean over the data axes of the devices' gradients, born sharded.

    Args:
      bucket: what lies where; of one layer when it is a stack.
      shards: by slab name, this device's part.
      axis: the mesh axis that the slabs are sharded over.
      data_axes: every mesh axis over which the batch is split.
      precision: the dtypes of the two collectives.

    Returns:
      By tensor name, the whole tensors.
    """
    replicas = tuple(a for a in data_axes if a != axis)
    if replicas:  # cast the shard, not the gathered copy: its transpose, a psum, then adds up shards
        shards = {name: lax.pcast(x, replicas, to="varying") for name, x in shards.items()}
    smooth = {name: x for name, x in shards.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    with jax.named_scope(f"unshard:{bucket.name or 'root'}"):
        tensors: Arrays = dict(_gather(bucket, axis, data_axes, precision, smooth))  # type: ignore[arg-type]
        for slab in bucket.slabs:
            if slab.name not in smooth:
                tensors |= _views(slab, lax.all_gather(shards[slab.name], axis, tiled=True))
    return tensors


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(
    bucket: Bucket, axis: str, data_axes: tuple[str, ...], precision: MixedPrecision, shards: Arrays
) -> Arrays:
    tensors: Arrays = {}
    for slab in bucket.slabs:
        if slab.name in shards:
            tensors |= _views(slab, lax.all_gather(precision.gathered(shards[slab.name]), axis, tiled=True))
    return tensors


def _gather_fwd(bucket, axis, data_axes, precision, shards):
    return _gather(bucket, axis, data_axes, precision, shards), None


def _gather_bwd(bucket, axis, data_axes, precision, _, grads):
    with jax.named_scope(f"reduce:{bucket.name or 'root'}"):
        num_shards, scale = lax.axis_size(axis), 1 / lax.axis_size(data_axes)
        shards = {}
        for slab in bucket.slabs:
            if slab.placements[0].tensor.name in grads:
                packed = precision.reduced(pack(slab, grads, num_shards))
                shard = lax.psum_scatter(packed, axis, tiled=True).astype(slab.dtype)
                shards[slab.name] = shard * jnp.asarray(scale, shard.dtype)
    return (shards,)


_gather.defvjp(_gather_fwd, _gather_bwd)


def _views(slab: Slab, array: jax.Array) -> Arrays:
    """The tensors of a whole slab: static slices and free reshapes."""
    if slab.sole:
        return {slab.placements[0].tensor.name: array}
    return {
        p.tensor.name: array[p.offset // slab.width : p.stop // slab.width].reshape(p.tensor.shape)
        for p in slab.placements
    }


def pack(slab: Slab, tensors: Arrays, num_shards: int) -> jax.Array:
    """The whole slab from its tensors, padding zero: the inverse of the views."""
    if slab.sole:
        return tensors[slab.placements[0].tensor.name]
    pieces, end = [], 0
    shape = slab_shape(slab, num_shards)
    dtype = next((tensors[p.tensor.name].dtype for p in slab.placements), slab.dtype)

    def padding(numel):
        return jnp.zeros((numel // slab.width, *shape[1:]), dtype)

    for placement in slab.placements:
        if placement.tensor.numel:
            if placement.offset > end:
                pieces.append(padding(placement.offset - end))
            pieces.append(tensors[placement.tensor.name].reshape(-1, *shape[1:]))
            end = placement.stop
    if (rest := slab.rows * slab.width * num_shards - end) > 0:
        pieces.append(padding(rest))
    return jnp.concatenate(pieces) if pieces else padding(0)
