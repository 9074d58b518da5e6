"""The two collectives of a bucket, inside `shard_map`: gather on the way in, reduce-scatter on the way back.

Plain autodiff through the slices of a packed slab adds one padded buffer per tensor and doubles a bf16 step;
the `custom_vjp` here packs the gradients of a slab once and reduce-scatters the result.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..layout import Slab, listed
from ._joined import vary
from ._quantised import gather_quantised
from ._sink import WithSink, reduce_scatter
from ._slabs import slab_of, slab_shape, tensors_of
from ._splits import on_slices, tensor_spec
from ._torus import all_gather
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
    smooth = {name: x for name, x in shards.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    with jax.named_scope(f"unshard:{unit.bucket.name or 'root'}"):
        dtypes = tuple((name, str(sink.dtype)) for name, sink in sinks.items())
        tensors: Arrays = dict(_gather(unit, dtypes, smooth, sinks))  # type: ignore[arg-type]
        rest = {name: x for name, x in shards.items() if name not in smooth}
        return tensors | _gathered(unit, rest, _whole)


def _check(unit: Unit, shards: Arrays) -> None:
    wrong = []
    for slab in unit.bucket.slabs:
        if slab.name not in shards:
            continue
        expected, got = unit.inner_shape(slab), shards[slab.name].shape
        if got != expected:
            wrong.append(f"{slab.name}: {got} on this device, planned {expected}")
    if wrong:
        raise ValueError(
            f"unit {unit.bucket.name or '(root)'!r} does not have the shards of one layer:"
            + listed(wrong)
            + "\nLayers stacked for a scan need `stacked=` when they are sharded, and are used inside the scan. A "
            "model is an argument of the function given to `value_and_grad` or `apply`, which cannot close over it."
        )


def _gathered(unit: Unit, shards: Arrays, gather: Callable[[Unit, Slab, jax.Array], jax.Array]) -> Arrays:
    """The tensors of some of a bucket's slabs. Where other axes split them, each slice is gathered by itself."""
    chosen = [slab for slab in unit.bucket.slabs if slab.name in shards]

    def local(shards: Arrays) -> Arrays:
        tensors: Arrays = {}
        for slab in chosen:
            shard = vary(shards[slab.name].reshape(slab_shape(slab, unit.share)), unit.axes)
            tensors |= tensors_of(slab, gather(unit, slab, shard), unit.shares)
        return tensors

    slab_specs, tensor_specs = _slice_specs(unit, chosen)
    return on_slices(local, (slab_specs,), tensor_specs)(shards)


def _slice_specs(unit: Unit, slabs: Sequence[Slab]) -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
    """How slabs and their tensors are laid out over the axes that split them."""
    tensors = [p.tensor for slab in slabs for p in slab.placements]
    return (
        {slab.name: unit.inner_spec(slab) for slab in slabs},
        {tensor.name: tensor_spec(tensor.splits, len(tensor.shape)) for tensor in tensors},
    )


def _whole(unit: Unit, slab: Slab, shard: jax.Array) -> jax.Array:
    # XLA gathers no empty arrays. Every device skips the same ones.
    return all_gather(shard, unit.mesh, unit.axis) if slab.shard_numel else shard


def _whole_smooth(unit: Unit, slab: Slab, shard: jax.Array) -> jax.Array:
    precision = unit.precision
    if precision.gather_dtype is None or not slab.shard_numel or not jnp.issubdtype(shard.dtype, jnp.floating):
        return _whole(unit, slab, precision.gathered(shard))
    dtype = precision.param_dtype or shard.dtype
    return gather_quantised(shard, unit.mesh, unit.axis, str(precision.gather_dtype), precision.gather_block, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(unit: Unit, sink_dtypes: tuple[tuple[str, str], ...], shards: Arrays, sinks: Arrays) -> Arrays:
    return _gathered(unit, shards, _whole_smooth)


def _gather_fwd(unit, sink_dtypes, shards, sinks):
    return _gather(unit, sink_dtypes, shards, sinks), None


def _gather_bwd(unit, sink_dtypes, _, grads):
    scale, dtypes, replicas = 1 / lax.axis_size(unit.axes), dict(sink_dtypes), unit.axes[:-1]
    chosen = [slab for slab in unit.bucket.slabs if slab.placements[0].tensor.name in grads]
    slab_specs, tensor_specs = _slice_specs(unit, chosen)

    def local(grads: Arrays) -> Arrays:
        parts: Arrays = {}
        for slab in chosen:
            part = vary(jnp.asarray(slab_of(slab, grads, unit.num_shards, unit.shares)), unit.axes)
            if slab.name in dtypes:
                part = part.astype(dtypes[slab.name])
            else:
                part = unit.precision.reduced(part)
                part = reduce_scatter(part, unit.mesh, unit.axis, replicas, 0, scale, slab.dtype)
            leads = len(slab_specs[slab.name]) > part.ndim
            parts[slab.name] = part[None] if leads else part
        return parts

    with jax.named_scope(f"reduce:{unit.bucket.name or 'root'}"):
        parts = on_slices(local, (tensor_specs,), slab_specs)(grads)
    shards = {name: None if name in dtypes else part for name, part in parts.items()}
    return shards, {name: part for name, part in parts.items() if name in dtypes}


_gather.defvjp(_gather_fwd, _gather_bwd)
