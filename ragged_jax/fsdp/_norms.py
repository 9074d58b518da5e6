"""Norms of parameters and gradients, tensor by tensor, in one collective."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ._per_slab import on_shards, slabs_and_others, tensors_on_shard
from ._splits import once, splitting_axes


def squared_norms(tree: Any, like: Any = None) -> dict[str, jax.Array]:
    """The sum of squares of every tensor, replicated, in float32 at least.

    All of them in one all-reduce, whose size is a number for each tensor and layer. What `norms` and clipping are
    made of. Padding is not looked at: it may hold anything.

    Args:
      tree: parameters or gradients: a sharded pytree, the state of a fully sharded Flax module, or a tree of bare
        arrays of their structure. Leaves that are no slabs are taken as they are.
      like: for bare arrays, the tree that says what they are.

    Returns:
      By the tensor's path, a scalar; for the layers of a stack, one number each.
    """
    slabs, others = slabs_and_others(tree, like)
    out: dict[str, jax.Array] = {}
    by_mesh: dict[Any, list] = {}
    for of, array in slabs:
        by_mesh.setdefault((of.unit.mesh, of.unit.axes), []).append((of, array))
    for (_, axes), group in by_mesh.items():
        splitting = splitting_axes(of.slab for of, _ in group)

        def local(shards, axes=axes, splitting=splitting):
            sums = [
                once(_sum_of_squares(jnp.where(rows[None, :, None], shard, 0), axis=(1, 2)), of.slab, splitting)
                for of, x in shards
                for _, shard, rows in tensors_on_shard(of, x)
            ]
            return lax.psum(jnp.concatenate(sums), (axes[-1], *splitting))

        sums, start = on_shards(local, group, PartitionSpec()), 0
        for of, _ in group:
            copies = of.unit.bucket.num_copies
            for placement in of.slab.placements:
                part = sums[start : start + copies]
                out[placement.tensor.name] = part if of.unit.stacked else part[0]
                start += copies
    return out | {leaf.path: _sum_of_squares(jnp.asarray(x), axis=None) for leaf, x in others}


def norms(tree: Any, like: Any = None) -> dict[str, jax.Array]:
    """The Euclidean norm of every tensor of a sharded tree, by its path, inside and outside of jit.

    One all-reduce for all of them; padding is not looked at. For how a step behaves: which layer's gradient grows.

    Args:
      tree: a sharded pytree, a fully sharded Flax module, or gradients of either.
      like: for a tree of bare arrays, the tree or module that they belong to.

    Returns:
      By path, a float32 scalar (float64 for float64); for the layers of a stack an array, one number each.

    Raises:
      ValueError: several leaves hold the same tensor, as in an optimizer's state, or `like` is of another structure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import shard_tree
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((4, 4)), "b": jnp.zeros(5)}, mesh, axis="fsdp")
      >>> {name: float(norm) for name, norm in norms(tree).items()}
      {'w': 4.0, 'b': 0.0}
    """
    return {name: jnp.sqrt(x) for name, x in squared_norms(tree, like).items()}


def total(squares: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of what `squared_norms` returns: the square of the global norm."""
    return jnp.sum(jnp.stack([jnp.sum(x) for x in squares.values()])) if squares else jnp.zeros(())


def _sum_of_squares(x: jax.Array, axis: Any) -> jax.Array:
    wide = x.astype(jnp.promote_types(jnp.float32, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32)
    return jnp.sum(jnp.square(jnp.abs(wide)), axis=axis)
