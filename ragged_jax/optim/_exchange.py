"""Runs on every device what `_owners` has planned: items to their owners, work on each, and back."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..fsdp._joined import vary
from ..fsdp._runs import taken
from ._owners import Class, Moves, Owners


def on_devices(owners: Owners, body: Callable, *, in_specs: Any = None, out_specs: Any = None) -> Callable:
    """A function of the slabs' arrays that runs `body` on the local parts, inside `shard_map` or outside of it.

    Args:
      owners: which slabs.
      body: from local arrays to local arrays.
      in_specs, out_specs: by default those of the slabs.
    """
    unit, specs = owners.unit, tuple(owners.specs)
    mapped = jax.jit(
        jax.shard_map(
            body,
            mesh=unit.mesh,
            in_specs=specs if in_specs is None else in_specs,
            out_specs=specs if out_specs is None else out_specs,
            axis_names=set(unit.axes),
        )
    )

    def run(*args: Any) -> Any:
        is_inside = unit.axis in jax.sharding.get_abstract_mesh().manual_axes
        return body(*args) if is_inside else mapped(*args)

    return run


def to_owners(owners: Owners, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside `shard_map`: from the local parts of the slabs, for each class its array (see `Class.shape`)."""
    axis, granule = owners.unit.axis, owners.granule
    pool = _joined([x.reshape(-1, granule) for x in arrays])
    owned = _move(owners.to_owners, pool, axis).reshape(-1)
    return [owned[c.start : c.stop].reshape(c.shape) for c in owners.classes]


def from_owners(owners: Owners, owned: Sequence[jax.Array]) -> list[jax.Array]:
    """Inside `shard_map`: the local parts of the slabs, zero where nothing came from; the inverse of `to_owners`."""
    pool = _joined([x.reshape(-1) for x in owned]).reshape(-1, owners.granule)
    local = _move(owners.back, pool, owners.unit.axis).reshape(-1)
    ends = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in owners.shapes)]).tolist()
    return [local[ends[i] : ends[i + 1]].reshape(shape) for i, shape in enumerate(owners.shapes)]


def each_owned(owners: Owners, cls: Class, function: Callable, skipped: Callable, xs: Any) -> Any:
    """`function` of each item that this device owns, one after the other; `skipped` of empty slots.

    Args:
      owners, cls: the class.
      function: of a slot of `xs`. Must not contain collectives: devices own different numbers of items.
      skipped: gives the same types at no cost.
      xs: pytree of arrays whose dim 0 counts slots.
    """
    count = jnp.asarray(cls.counts)[lax.axis_index(owners.unit.axis)]
    full = min(cls.counts) == cls.slots

    def one(i: Any, x: Any) -> Any:
        return function(x) if full else lax.cond(i < count, function, skipped, x)

    if cls.slots == 1:
        return jax.tree.map(lambda y: y[None], one(0, jax.tree.map(lambda x: x[0], xs)))
    return lax.scan(lambda _, ix: (None, one(*ix)), None, (jnp.arange(cls.slots), xs))[1]


def zeros(owners: Owners, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros of the type of what differs between devices."""
    return vary(jnp.zeros(shape, dtype), (owners.unit.axis,))


def _move(moves: Moves, pool: jax.Array, axis: str) -> jax.Array:
    received = [pool]
    for m in moves.messages:
        message = taken(m.take, pool, axis)
        if m.kind == "permute":
            received.append(lax.ppermute(message, axis, m.pairs))
        else:
            received.append(lax.all_to_all(message, axis, 0, 0, tiled=True))
    return taken(moves.put, _joined(received), axis)


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
