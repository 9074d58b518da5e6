"""Plain pytrees of arrays: which subtrees become units, and how they are sharded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import Mesh
from jax.tree_util import all_leaves, keystr, tree_flatten_with_path

from ..layout import BlockRule, Layout, TensorSpec, block_for
from ..planner import Group, Plan
from . import _check as check
from ._init import create
from ._labels import LabelRule
from ._layout import stack_length
from ._precision import PrecisionRule
from ._reshard import ReshardRule
from ._rules import Rules
from ._sharded_tree import ShardedTree
from ._split_rule import Specs
from ._unit import Arrays, Unit

TreeUnits = str | tuple[str, ...] | Callable[[str, Any], bool] | None


def shard_tree(
    params: Any | Callable[[], Any],
    mesh: Mesh,
    *,
    axis: str | tuple[str, ...],
    block: BlockRule | None = None,
    units: TreeUnits = None,
    stacked: TreeUnits = None,
    plan: Plan | Layout | None = None,
    precision: PrecisionRule = None,
    reshard_after_forward: ReshardRule = True,
    policy: Callable | None = None,
    label: LabelRule = None,
    specs: Specs | None = None,
    check_processes: bool = True,
) -> ShardedTree:
    """Shards a pytree of arrays over a mesh axis, cutting each tensor only between blocks.

    Args:
      params: the tree, each device is sent its own part of each array; or a function of no arguments that makes it,
        whose arrays are then born as shards (see `create`). An array at two paths becomes two tensors, as it has two
        gradients in any pytree; weights that are to stay tied are used from one path.
      mesh: the devices, with `Auto` or `Explicit` axes.
      axis: the mesh axis to shard over; of several, the last one shards and the others replicate.
      block: what must stay whole; one rule, or a mapping from path patterns to rules. By default what the plan
        says, or else single elements.
      units: which subtrees are gathered on their own, by `unsharded`, rather than at the start of the step: a
        pattern of their path (`"layers/*"`, which chooses nothing below what it has chosen), several, or a predicate
        on path and subtree.
      stacked: which of the units hold layers stacked on a leading dim, for `lax.scan`.
      plan: a plan or layout to follow instead of making one.
      precision: the dtypes to gather, reduce and compute in; one rule, or a mapping from patterns of units' paths.
      reshard_after_forward: drop a unit's gathered weights and gather them again in backward; as for `fully_shard`.
      policy: a `jax.checkpoint` policy for what units keep for the backward pass; by default everything but
        gathered weights and what cheap arithmetic makes again.
      label: names for parts that are to be trained apart: a mapping from path patterns to labels, or a function of
        the path. Tensors of different labels never share a slab; see `partition`.
      specs: how tensors are split over other mesh axes (tensor and expert parallelism): a mapping from path patterns
        to partition specs of the array, its layer dim included, such as `{"*/up/kernel": PartitionSpec(None, "tp")}`.
        Each slice is then sharded by itself, and is never gathered over those axes.
      check_processes: where several processes take part, compare layouts before anything is sharded, so that all of
        them fail with one message instead of hanging (see `check_same_on_all_processes`).

    Returns:
      The sharded tree.

    Raises:
      ValueError: an unknown axis, units that match nothing, or a tree that is sharded already.
      TypeError: leaves that are not arrays.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import full_params
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((3, 5)), "b": jnp.zeros(5)}, mesh, axis="fsdp")
      >>> full_params(tree)["w"].shape
      (3, 5)
    """
    rules = Rules(mesh, axis, block, plan, reshard_after_forward, policy, precision, label, specs, check_processes)
    make = params if callable(params) and all_leaves([params]) else None  # a module may be callable
    if any(map(_is_sharded, jax.tree.leaves(params, is_leaf=_is_sharded))):
        raise ValueError("the tree is sharded already; `rj.redistribute(tree, like)` moves it to another layout")
    root = parse(params if make is None else jax.eval_shape(make), units, stacked)
    made = rules.units(subtree.group(rules.blocks) for subtree in root.walk())
    if make is None:
        return root.build(made)
    slabs, _ = create(lambda: (_by_name(make(), units, stacked), ()), list(made.values()))
    return root.build(made, lambda unit, own: slabs[unit.bucket.name])


def _is_sharded(node: Any) -> bool:
    return isinstance(node, ShardedTree)


def _by_name(params: Any, units: TreeUnits, stacked: TreeUnits) -> dict[str, Any]:
    subtrees = parse(params, units, stacked).walk()
    return {name: leaf for subtree in subtrees for name, leaf in subtree.own.items()}


def tree_groups(params: Any, block: BlockRule, units: TreeUnits, stacked: TreeUnits) -> list[Group]:
    """The tensors of a pytree as the planner sees them, bucket by bucket."""
    return [subtree.group(block) for subtree in parse(params, units, stacked).walk()]


@dataclass(frozen=True)
class Subtree:
    """A subtree that becomes one bucket, and the units below it."""

    name: str
    treedef: Any
    names: tuple[str, ...]
    own: dict[str, Any]
    children: dict[str, "Subtree"]
    stack: bool

    def walk(self) -> Iterator["Subtree"]:
        yield self
        for child in self.children.values():
            yield from child.walk()

    def group(self, block: BlockRule) -> Group:
        length = stack_length(self.name, {n: x.shape for n, x in self.own.items()}) if self.stack else None
        specs = (
            TensorSpec(n, tuple(x.shape[self.stack :]), str(check.canonical_dtype(x)), block_for(n, block))
            for n, x in self.own.items()
        )
        return Group(self.name, tuple(specs), length)

    def build(self, units: Mapping[str, Unit], place: Callable[[Unit, Arrays], Arrays] = Unit.shard) -> ShardedTree:
        """The sharded tree of these tensors.

        Args:
          units: the buckets on their mesh, by name.
          place: makes the arrays of a unit's slabs from its tensors.
        """
        unit = units[self.name]
        children = {name: child.build(units, place) for name, child in self.children.items()}
        return ShardedTree(place(unit, self.own), children, unit, self.treedef, self.names)


def parse(params: Any, units: TreeUnits, stacked: TreeUnits) -> Subtree:
    """The root of a pytree with its units below it.

    Raises:
      ValueError: units that match nothing, or ambiguous paths.
      TypeError: leaves that are not arrays.
    """
    root = _parse(params, "", units, stacked, stack=False)
    parts = list(root.walk())
    if units is None and stacked is not None:
        raise ValueError(f"stacked={stacked!r} says which units are stacked, and there are none; give `units=`, too")
    for rule, what in ((units, "units"), (stacked, "stacked")):
        if rule is not None and not any(what == "units" or part.stack for part in parts[1:]):
            among = [part.name for part in parts[1:]] or _paths(params)
            kind = "unit; the units" if parts[1:] else "subtree; the leaves"
            raise ValueError(f"{what}={rule!r} matches no {kind} are {', '.join(among)}")
    check.distinct([name for part in parts for name in part.names])
    check.arrays_only({name: leaf for part in parts for name, leaf in part.own.items()})
    return root


def _parse(tree: Any, name: str, units: TreeUnits, stacked: TreeUnits, stack: bool) -> Subtree:
    prefix = name and name + "/"
    units = _below(units, name)

    def is_unit(path: tuple, node: Any) -> bool:
        has_leaves = bool(path and jax.tree.leaves(node)) and not all_leaves([node])
        return has_leaves and _matches(units, prefix + _path(path), node)

    flat, treedef = tree_flatten_with_path(tree, is_leaf=is_unit, is_leaf_takes_path=True)
    own, children, names = {}, {}, []
    for path, leaf in flat:
        names.append(below := prefix + _path(path))
        if not all_leaves([leaf]):
            children[below] = _parse(leaf, below, units, stacked, _matches(stacked, below, leaf))
        else:
            own[below] = leaf
    return Subtree(name, treedef, tuple(names), own, children, stack)


def _paths(tree: Any) -> list[str]:
    return [_path(path) for path, _ in tree_flatten_with_path(tree)[0]]


def _path(path: tuple) -> str:
    return keystr(path, simple=True, separator="/")


def _matches(rule: TreeUnits, path: str, subtree: Any) -> bool:
    if rule is None:
        return False
    if callable(rule):
        return rule(path, subtree)
    return any(fnmatchcase(path, pattern) for pattern in ((rule,) if isinstance(rule, str) else rule))


def _below(rule: TreeUnits, name: str) -> TreeUnits:
    """The rule for what lies below a subtree: `layers/*` means `layers/0` and nothing in it."""
    if not name or rule is None or callable(rule):
        return rule
    return tuple(p for p in ((rule,) if isinstance(rule, str) else rule) if not fnmatchcase(name, p))
