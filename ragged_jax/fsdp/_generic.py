"""Functions on any sharded model; an adapter registers its own kind of model with them."""

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from .. import planner
from ..layout import BlockRule, Layout, elements
from ..planner import Group, Plan
from . import _check as check
from ._labels import LabelRule, label_groups
from ._sharded_tree import ShardedTree, units_in
from ._split_rule import Specs, SplitRule
from ._tree import tree_groups
from ._unit import Unit


def _unknown(model: Any) -> TypeError:
    if hasattr(model, "fully_sharded") and hasattr(model, "init"):
        name = type(model).__name__.removeprefix("FullySharded")
        return TypeError(f"{name} is a Linen module and holds no parameters; give the params that its `init` made")
    return TypeError(
        f"{type(model).__name__} is not sharded by this library; use `shard_tree` on a pytree of arrays or "
        "`fully_shard` on a Flax module first"
    )


@singledispatch
def full_params_registry(tree: Any, like: Any) -> Any:
    raise _unknown(tree)


def full_params(tree: Any, like: Any = None) -> Any:
    """All tensors of a sharded model, whole and without padding, under their own names.

    Outside of jit they are numpy arrays on the host, brought there slab by slab; no device holds more than its
    own shard on the way.

    Args:
      tree: a sharded pytree or a fully sharded Flax module; or, with `like`, the `nnx.State` of one, such as
        its gradients.
      like: the module that the state belongs to.

    Returns:
      The original structure: a pytree, or the `nnx.State` of the unsharded module.
    """
    return full_params_registry(tree, like)


@singledispatch
def shard_like_registry(like: Any, tree: Any) -> Any:
    raise _unknown(like)


def shard_like(tree: Any, like: Any) -> Any:
    """Shards a tree of whole arrays (gradients, say) the way a sharded model is.

    Args:
      tree: a tree of the unsharded model's structure: a pytree, or an `nnx.State`.
      like: the sharded model.

    Returns:
      A tree of the sharded model's structure.
    """
    return shard_like_registry(like, tree)


@singledispatch
def units_of(model: Any) -> list[Unit]:
    """The buckets of a sharded model on their mesh, the root first."""
    raise _unknown(model)


def get_layout(model: Any) -> Layout:
    """The layout that a sharded model follows."""
    units = units_of(model)
    return Layout(units[0].num_shards, tuple(unit.bucket for unit in units), units[0].shares)


@singledispatch
def groups_of(model: Any, block: BlockRule, units: Any, stacked: Any, *inputs: Any) -> list[Group]:
    """What the planner needs to know of an unsharded model; abstract arrays will do."""
    if inputs:
        raise TypeError(f"only a Linen module is planned with example inputs; {type(model).__name__} has its arrays")
    return tree_groups(model, block, units, stacked)


def plan(
    model: Any,
    num_shards: int,
    *inputs: Any,
    block: BlockRule = elements(1),  # noqa: B008
    units: Any = None,
    stacked: Any = None,
    label: LabelRule = None,
    specs: Specs | None = None,
    axis_sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """Plans a model without touching its values: what would lie where, and how much of it is padding.

    Args:
      model: a Flax module, or a pytree, of arrays or of `jax.ShapeDtypeStruct` (see `nnx.eval_shape`).
      num_shards: how many devices would share it.
      inputs: of a Linen module, example inputs as its `init` takes them after the key; shapes will do.
      block, units, stacked, label: as for `fully_shard` and `shard_tree`, which take the result as `plan=`.
      specs: as for them; the variables of a Flax module are not asked.
      axis_sizes: of the mesh axes that the specs name, e.g. `{"tp": 4}`.
      options: of `ragged_jax.planner.plan`, such as `profile`, `storage`, `axis_order` and `shares`.

    Example:
      >>> import jax
      >>> plan({"w": jax.ShapeDtypeStruct((1000, 64), "float32")}, 7).padding_fraction < 0.01
      True
    """
    groups = label_groups(groups_of(model, block, units, stacked, *inputs), label)
    if specs:
        groups = SplitRule(axis_sizes or {}, specs).split(groups, {})
    check.block_patterns(block, groups)
    return planner.plan(groups, num_shards, **options)


@full_params_registry.register
def _(tree: ShardedTree, like: Any = None) -> Any:
    children = {name: full_params(child) for name, child in tree.children.items()}
    return tree.rebuild(tree.unit.full(tree.slabs), children)


@shard_like_registry.register
def _(like: ShardedTree, tree: Any) -> ShardedTree:
    own, subtrees = like.flatten_up_to(tree)
    children = {name: shard_like(subtrees[name], child) for name, child in like.children.items()}
    return like.replace(like.unit.shard(own), children)


@units_of.register
def _(model: ShardedTree) -> list[Unit]:
    return units_in(model)
