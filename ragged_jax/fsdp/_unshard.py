"""The two collectives of a bucket, inside `shard_map`: gather on the way in, reduce-scatter on the way back.

Plain autodiff through the slices of a packed slab adds one padded buffer per tensor and doubles a bf16 step;
the `custom_vjp` here packs the gradients of a slab once and reduce-scatters the result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ..layout import Slab
from ._joined import vary
from ._sink import WithSink, reduce_scatter
from ._slabs import slab_of, slab_shape, tensors_of
from ._unit import Arrays, Unit


def unshard_unit(unit: Unit, shards: Arrays) -> Arrays:
    """All-gathers (one layer of) a bucket. To be called inside `shard_map` with the unit's axes manual.

    Its gradient is the mean over the data axes of the devices' gradients, born sharded; or, of a shard `WithSink`,
    this device's own gradient of the whole slab, given to the sink.

    Args:
      unit: the bucket on its mesh.
      shards: by slab name, this device's part. Slabs that are left out, or None, are not gathered.

    Returns:
      By tensor name, the whole tensors.

    Raises:
      ValueError: a shard has another shape than the layout says, which happens when a stack is used as a
        single layer or the reverse.
    """
    shards = {name: x for name, x in shards.items() if x is not None}
    sinks = {name: x.sink for name, x in shards.items() if isinstance(x, WithSink)}
    shards = {name: x.shard if name in sinks else x for name, x in shards.items()}  # type: ignore[attr-defined]
    _check(unit, shards)
    if replicas := tuple(a for a in unit.axes if a != unit.axis):
        # Cast the shard, not the gathered copy: its transpose, a psum, then adds up shards.
        shards = {name: lax.pcast(x, replicas, to="varying") for name, x in shards.items()}
    smooth = {name: x for name, x in shards.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    with jax.named_scope(f"unshard:{unit.bucket.name or 'root'}"):
        dtypes = tuple((name, str(sink.dtype)) for name, sink in sinks.items())
        tensors: Arrays = dict(_gather(unit, dtypes, smooth, sinks))  # type: ignore[arg-type]
        for slab in unit.bucket.slabs:
            if slab.name in shards and slab.name not in smooth:
                tensors |= tensors_of(slab, _whole(unit, slab, shards[slab.name]), unit.shares)
    return tensors


def _check(unit: Unit, shards: Arrays) -> None:
    wrong = []
    for slab in unit.bucket.slabs:
        if slab.name not in shards:
            continue
        expected, got = slab_shape(slab, unit.share), shards[slab.name].shape
        if got != expected:
            wrong.append(f"  {slab.name}: {got} on this device, planned {expected}")
    if wrong:
        raise ValueError(
            f"unit {unit.bucket.name or '(root)'!r} does not have the shards of one layer:\n"
            + "\n".join(wrong)
            + "\nLayers stacked for a scan need `stacked=` when they are sharded, and are used inside the scan."
        )


def _whole(unit: Unit, slab: Slab, shard: jax.Array) -> jax.Array:
    # XLA gathers no empty arrays. Every device skips the same ones.
    return lax.all_gather(shard, unit.axis, tiled=True) if slab.shard_numel else shard


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(unit: Unit, sink_dtypes: tuple[tuple[str, str], ...], shards: Arrays, sinks: Arrays) -> Arrays:
    tensors: Arrays = {}
    for slab in unit.bucket.slabs:
        if slab.name in shards:
            shard = unit.precision.gathered(shards[slab.name])
            tensors |= tensors_of(slab, _whole(unit, slab, shard), unit.shares)
    return tensors


def _gather_fwd(unit, sink_dtypes, shards, sinks):
    return _gather(unit, sink_dtypes, shards, sinks), None


def _gather_bwd(unit, sink_dtypes, _, grads):
    scale, dtypes = 1 / lax.axis_size(unit.axes), dict(sink_dtypes)
    shards, sinks = {}, {}
    with jax.named_scope(f"reduce:{unit.bucket.name or 'root'}"):
        for slab in unit.bucket.slabs:
            if slab.placements[0].tensor.name not in grads:
                continue
            whole = jnp.asarray(slab_of(slab, grads, unit.num_shards, unit.shares))
            if slab.name in dtypes:
                shards[slab.name], sinks[slab.name] = None, vary(whole.astype(dtypes[slab.name]), unit.axes)
            else:
                part = reduce_scatter(unit.precision.reduced(whole), unit.axis, 0, scale, slab.dtype)
                shards[slab.name] = vary(part, unit.axes)
    return shards, sinks


_gather.defvjp(_gather_fwd, _gather_bwd)
