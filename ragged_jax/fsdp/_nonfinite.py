"""Where a NaN or an infinity is: in which tensor, at which index, on which device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ..layout import Placement, stored_order
from ._check import is_traced
from ._leaves import SlabOf
from ._per_slab import on_shards, slabs_and_others, tensors_on_shard
from ._splits import once, splitting_axes
from ._unit import on_host


@dataclass(frozen=True, repr=False)
class NonFinite:
    """A tensor with elements that are NaN or infinite.

    Attributes:
      tensor: its path.
      index: of the first of them, in the order in which the tensor is stored; of a stack, with the layer in front.
      count: how many there are.
      device: the `jax.Device` that holds the first; None for an array that is no slab.
      coordinates: of that device, by mesh axis.
    """

    tensor: str
    index: tuple[int, ...]
    count: int
    device: Any = None
    coordinates: tuple[tuple[str, int], ...] = ()

    def __repr__(self):
        where = ", ".join(f"{axis} {k}" for axis, k in self.coordinates)
        at = f" on {self.device} ({where})" if self.device is not None else ""
        which = f"the first of {self.count} that are" if self.count > 1 else "the only one that is"
        return f"{self.tensor}{list(self.index)}{at}, {which} not finite"


def find_nonfinite(tree: Any, like: Any = None) -> list[NonFinite]:
    """The tensors of a sharded tree that hold NaNs or infinities, by where the first one is. Padding is ignored.

    Every device looks through its own shard, without a collective. To be called outside of jit.

    Args:
      tree: parameters or gradients, as for `norms`.
      like: for a tree of bare arrays, the tree or module that they belong to.

    Returns:
      What was found, in the order of the tree; empty if all is well.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((4, 4)).at[2, 1].set(jnp.nan)}, mesh, axis="fsdp")
      >>> [(found.tensor, found.index, found.count) for found in find_nonfinite(tree)]
      [('w', (2, 1), 1)]
    """
    slabs, others = slabs_and_others(tree, like)
    if any(is_traced(x) for _, x in (*slabs, *others)):
        raise TypeError("find_nonfinite gives names and devices and cannot run under jit; call it between steps")
    slabs = [(of, x) for of, x in slabs if jnp.issubdtype(x.dtype, jnp.inexact)]
    found = []
    if slabs:
        splitting = splitting_axes(of.slab for of, _ in slabs)
        axes = (slabs[0][0].unit.axis, *splitting)
        run = partial(_first_and_count, splitting=splitting)
        firsts, counts = (on_host(x) for x in on_shards(run, slabs, PartitionSpec(axes)))
        column = 0
        for of, _ in slabs:
            copies = of.unit.bucket.num_copies
            for placement in of.slab.placements:
                here = slice(column, column + copies)
                found += _report(of, placement, axes, firsts[:, here], counts[:, here])
                column += copies
    for leaf, x in others:
        if jnp.issubdtype(x.dtype, jnp.inexact) and (bad := np.argwhere(~np.isfinite(on_host(x)))).size:
            found.append(NonFinite(leaf.path, tuple(map(int, bad[0])), len(bad)))
    return found


def _first_and_count(shards: Any, splitting: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Inside: for each tensor and layer, where in the shard the first bad element is (-1: nowhere), and how many."""
    firsts, counts = [], []
    for of, x in shards:
        for _, shard, rows in tensors_on_shard(of, x):
            bad = (rows[None, :, None] & ~jnp.isfinite(shard)).reshape(len(shard), -1)
            counts.append(once(bad.sum(1, dtype=jnp.int32), of.slab, splitting))
            firsts.append(jnp.where(bad.any(1), jnp.argmax(bad, 1), -1) if bad.shape[1] else counts[-1] - 1)
    return jnp.concatenate(firsts)[None], jnp.concatenate(counts)[None]


def _report(
    of: SlabOf, placement: Placement, axes: tuple[str, ...], firsts: np.ndarray, counts: np.ndarray
) -> list[NonFinite]:
    if not counts.any():
        return []
    unit, tensor = of.unit, placement.tensor
    layer = int(np.flatnonzero(counts.any(0))[0])
    device = int(np.flatnonzero(counts[:, layer])[0])
    at = dict(zip(axes, map(int, np.unravel_index(device, [unit.mesh.shape[a] for a in axes])), strict=True))
    stored = unit._bounds(of.slab, at[unit.axis])[0] + int(firsts[device, layer]) - placement.offset
    if placement.storage == "tiled":
        index = np.unravel_index(stored_order(tensor, "tiled")[stored], tensor.shape)
    else:
        index = np.unravel_index(stored, placement.stored_shape)
        if placement.axis_order is not None:
            index = tuple(index[placement.axis_order.index(dim)] for dim in range(len(index)))
    index = [int(i) + low for i, low in zip(index, tensor.slice_start(at), strict=True)]
    place = tuple(at.get(axis, 0) for axis in unit.mesh.axis_names)
    return [
        NonFinite(
            tensor.name,
            (*([layer] if unit.stacked else []), *index),
            int(counts.sum()),
            unit.mesh.devices[place],
            tuple(zip(unit.mesh.axis_names, place, strict=True)),
        )
    ]
