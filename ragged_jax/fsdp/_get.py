"""One tensor of a sharded model, read without the rest."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..layout import Placement, Slab
from ._check import has_values, is_traced
from ._parts import Part, matching, names_in, parts_of
from ._slabs import compact, from_stored, slab_shape
from ._unit import Unit


def get(model: Any, name: str) -> Any:
    """One tensor of a sharded model, whole and without padding, or several as a dict.

    Only its own bytes leave the devices. Outside of jit it is a numpy array, and no device holds more than its shard
    on the way; where a tensor lies on devices of several processes, it is gathered, and all of them must call this.

    Args:
      model: a sharded pytree or a fully sharded Flax module.
      name: the tensor's path, `"blocks/3/mlp/kernel"`; or a pattern, `"blocks/*/kernel"`, for a dict of all that it
        matches. A tied tensor answers to each of its names, a stack gives all layers.

    Raises:
      KeyError: nothing is called so; the message lists near names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((3, 5)), "b": jnp.zeros(5)}, mesh, axis="fsdp")
      >>> get(tree, "b")
      array([0., 0., 0., 0., 0.], dtype=float32)
    """
    names = names_in(parts_of(model))
    places = {one: _place(*names[one]) for one in matching(name, names)}
    arrays = {one: names[one][0].slabs[slab.name] for one, (_, slab, _) in places.items()}
    has_values(arrays.values())

    def read(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {one: _read(*places[one], array) for one, array in arrays.items()}

    if any(is_traced(array) for array in arrays.values()):
        found: dict[str, Any] = read(arrays)
    elif all(array.is_fully_addressable for array in arrays.values()):
        found = {one: _joined(*places[one], array) for one, array in arrays.items()}
    else:
        found = {one: np.asarray(x.addressable_data(0)) for one, x in jax.jit(read)(arrays).items()}
    return found[name] if name in names else found


def _place(part: Part, name: str) -> tuple[Unit, Slab, Placement]:
    slabs = part.unit.bucket.slabs
    return next((part.unit, slab, p) for slab in slabs for p in slab.placements if p.tensor.name == name)


def _read(unit: Unit, slab: Slab, placement: Placement, array: jax.Array) -> jax.Array:
    """Under a trace. The tensor's rows are cut out of the slab before they are gathered."""
    if placement.tensor.splits:
        return unit.full({slab.name: array})[placement.tensor.name]
    lead, everywhere = int(unit.stacked), NamedSharding(unit.mesh, PartitionSpec())

    def rows(array: jax.Array) -> jax.Array:
        whole = compact(slab, array, unit.shares, lead)
        cut = slice(placement.offset // slab.width, placement.stop // slab.width)
        return whole if slab.sole else whole[(slice(None),) * lead + (cut,)]

    if AxisType.Explicit in unit.mesh.axis_types:
        mine: Any = jax.sharding.auto_axes(rows, axes=unit.mesh.axis_names, out_sharding=everywhere)(array)
    else:
        mine = jax.lax.with_sharding_constraint(rows(array), everywhere)
    return from_stored(placement, mine.reshape(*mine.shape[:lead], -1), lead)


def _joined(unit: Unit, slab: Slab, placement: Placement, array: jax.Array) -> np.ndarray:
    """From the devices that hold something of it, each giving what it holds."""
    if placement.tensor.splits:
        return unit.full({slab.name: array})[placement.tensor.name]
    lead = int(unit.stacked)
    by_start = {shard.index[lead].start or 0: shard.data for shard in array.addressable_shards}
    rows, width = slab_shape(slab, unit.share)[0], max(1, slab.shard_numel // max(1, slab.rows))
    pieces = []
    for k in range(unit.num_shards):
        low, high = unit._bounds(slab, k)
        start, stop = max(low, placement.offset), min(high, placement.stop)
        if start < stop:
            own = np.asarray(by_start[k * rows])  # sliced by numpy: jax would want the mesh that may be set
            cut = own[(slice(None),) * lead + (slice((start - low) // width, (stop - low) // width),)]
            pieces.append(np.asarray(cut).reshape(*cut.shape[:lead], -1))
    outer = array.shape[:lead]
    flat = np.concatenate(pieces, -1) if pieces else np.zeros((*outer, 0), array.dtype)
    return from_stored(placement, flat, lead)
