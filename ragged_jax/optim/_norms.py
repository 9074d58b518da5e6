"""Norms of what is sharded, packed and padded: each element once, padding never, one scalar collective."""

from collections import defaultdict
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..fsdp import Leaf, Leaves, leaves_of
from ..fsdp._joined import vary
from ..fsdp._splits import once, splitting_axes
from ._masks import remember, row_pieces
from ._tensors import tensors_of

_FEW = 32


def tensor_norms(tree: Any, like: Any = None) -> dict[str, jax.Array]:
    """The L2 norm of every tensor, by name; those of a stack of layers over all layers. One collective a mesh.

    Args:
      tree: of arrays, sharded or not; outside of `shard_map`, or inside, where slabs are local parts and all other
        arrays must be the same on every device. A tied tensor is one leaf and counts once.
      like: a tree of the same structure that knows its slabs, or its `Leaves`, where `tree` does not: the gradients
        of a Flax module, as bare arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> tensor_norms({"a": jnp.array([3.0, 4.0])})
      {'a': Array(5., dtype=float32)}
    """
    leaves = _leaves(tree, like)
    return {t.name: jnp.sqrt(x) for t, x in zip(tensors_of(leaves), _squares(tree, leaves), strict=True)}


def global_norm(tree: Any, like: Any = None) -> jax.Array:
    """The L2 norm of a whole tree, in float32: right for slabs with padding, whatever the padding holds.

    Args:
      tree, like: as for `tensor_norms`.

    Example:
      >>> import jax.numpy as jnp
      >>> float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}))
      5.0
    """
    return jnp.sqrt(sum(_squares(tree, _leaves(tree, like)), start=jnp.zeros(())))


def clip_by_global_norm(max_norm: Any) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` by `global_norm`.

    Args:
      max_norm: the largest norm that updates may have.
    """

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = global_norm(updates, state.leaves)
        factor = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformation(remember, update)


def _leaves(tree: Any, like: Any) -> Leaves:
    if like is None:
        return leaves_of(tree)
    return like if isinstance(like, Leaves) else leaves_of(like)


def _squares(tree: Any, leaves: Leaves) -> list[jax.Array]:
    """Sums of squares of every tensor, in the order of `tensors_of`."""
    flat, found = jax.tree.leaves(tree), {}
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, leaf in enumerate(leaves):
        if leaf.of is None:
            found[i] = [_square(flat[i])]
        else:
            groups[leaf.of.unit.mesh, leaf.of.unit.axes].append(i)
    for (mesh, axes), mine in groups.items():
        run = _on_mesh(tuple(leaves.leaves[i] for i in mine), mesh, axes)
        sums = run(*(flat[i] for i in mine))
        at = 0
        for i in mine:
            many = len(leaves.leaves[i].of.slab.placements)  # type: ignore
            found[i] = list(sums[at : at + many])
            at += many
    return [x for i in range(len(flat)) for x in found[i]]


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)))


@lru_cache(maxsize=64)
def _on_mesh(leaves: tuple[Leaf, ...], mesh: Any, axes: tuple[str, ...]) -> Any:
    slabs = [leaf.of.slab for leaf in leaves if leaf.of is not None]
    others = splitting_axes(slabs)
    summed = (axes[-1], *others)

    def body(*arrays: jax.Array) -> jax.Array:
        parts = zip(leaves, slabs, arrays, strict=True)
        sums = [once(_local(leaf, x), slab, others) for leaf, slab, x in parts]
        return lax.psum(vary(jnp.concatenate(sums), summed), summed)

    specs = tuple(leaf.of.unit.spec(leaf.of.slab) for leaf in leaves if leaf.of is not None)
    everywhere = jax.sharding.PartitionSpec()
    names = {*axes, *others}
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=everywhere, axis_names=names))

    def run(*arrays: jax.Array) -> jax.Array:
        inside = jax.sharding.get_abstract_mesh().manual_axes
        if axes[-1] not in inside:
            return mapped(*arrays)
        if missing := [axis for axis in others if axis not in inside]:
            raise ValueError(f"tensors are split over {', '.join(missing)}: norms inside `shard_map` need these, too")
        return body(*arrays)

    return run


def _local(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Sums of squares of a slab's tensors over the rows of this device."""
    unit, slab = leaf.of.unit, leaf.of.slab  # type: ignore
    many = len(slab.placements)
    lead = unit.stacked + bool(slab.split_axes and not slab.sole)  # behind the dims of layers and of slices
    if x.size == 0:
        return jnp.zeros(many)
    rest = tuple(d for d in range(x.ndim) if d != lead)
    rows = jnp.sum(jnp.square(jnp.abs(x).astype(jnp.float32)), axis=rest)
    starts, which = (jnp.asarray(table)[lax.axis_index(unit.axis)] for table in row_pieces(leaf))
    here = jnp.arange(len(rows), dtype=jnp.int32)
    if len(starts) <= _FEW:  # no arrays of the length of `rows`, which may be that of the slab
        ends = jnp.append(starts[1:], len(rows))
        rows = jnp.where((starts[:, None] <= here) & (here < ends[:, None]), rows, 0).sum(1)
    else:
        which = which[jnp.searchsorted(starts, here, side="right") - 1]
    # Padding may hold anything, so it is dropped and not multiplied by zero.
    return jax.ops.segment_sum(rows, jnp.where(which < 0, many, which), many + 1)[:many]
