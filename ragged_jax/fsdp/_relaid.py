"""Sharded models in another layout, abstractly: what a state is to become."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import jax
from jax.sharding import Mesh

from ..layout import Layout
from ..planner import Group
from . import _check as check
from ._layout import make_layout
from ._leaves import Leaves
from ._sharded_tree import ShardedTree, units_in
from ._unit import Unit


@singledispatch
def relaid_registry(node: Any, layout: Layout, mesh: Mesh | None) -> Any:
    """A sharded model in another layout, abstractly; NotImplemented for what is none."""
    return NotImplemented


def relaid(state: Any, layout: Layout, mesh: Mesh | None = None) -> Any:
    """A state with its sharded models in another layout, of shapes instead of arrays.

    Args:
      state: a pytree of sharded pytrees, fully sharded Flax modules, and ordinary arrays, which stay as they are.
      layout: for the same tensors, in the same buckets.
      mesh: where it is to be; by default where it is.

    Raises:
      ValueError: the layout is for other tensors, buckets, or another number of shards than the mesh has.
      TypeError: there is no sharded model in the state, or an optimizer's state that knows its layout.
    """

    def is_model(node: Any) -> bool:
        return relaid_registry.dispatch(type(node)) is not relaid_registry.dispatch(object)

    flat, treedef = jax.tree.flatten(state, is_leaf=lambda x: is_model(x) or isinstance(x, Leaves))
    if any(isinstance(x, Leaves) for x in flat):
        raise TypeError(
            "an optimizer's state that knows its layout takes more than a Layout: give a state as it is wanted, "
            "`{'params': new, 'opt': jax.eval_shape(tx.init, new)}`"
        )
    if not any(is_model(x) for x in flat):
        raise TypeError("there is no sharded model in the state; give a state as it is wanted instead of a Layout")
    return jax.tree.unflatten(treedef, [relaid_registry(x, layout, mesh) if is_model(x) else x for x in flat])


def relaid_units(units: Sequence[Unit], layout: Layout, mesh: Mesh | None) -> dict[str, Unit]:
    """The units of a model in another layout, by the names of their buckets."""
    groups = [Group(u.bucket.name, u.bucket.tensors, u.bucket.stack) for u in units]
    mesh = units[0].mesh if mesh is None else mesh
    check.mesh_axes(mesh, units[0].axes)
    make_layout(groups, mesh.shape[units[0].axis], layout, same_blocks=False)
    return {
        u.bucket.name: replace(u, bucket=layout.bucket(u.bucket.name), mesh=mesh, shares=layout.shares) for u in units
    }


@relaid_registry.register
def _(tree: ShardedTree, layout: Layout, mesh: Mesh | None) -> ShardedTree:
    return _with_units(tree, relaid_units(units_in(tree), layout, mesh))


def _with_units(tree: ShardedTree, units: Mapping[str, Unit]) -> ShardedTree:
    unit = units[tree.unit.bucket.name]
    children = {name: _with_units(child, units) for name, child in tree.children.items()}
    made = tree.replace({slab.name: unit.abstract(slab) for slab in unit.bucket.slabs}, children)  # type: ignore[misc]
    made.unit = unit
    return made
