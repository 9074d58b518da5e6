"""Plain pytrees of arrays, sharded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.sharding import Mesh
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr, tree_flatten_with_path

from ..layout import BlockRule, Layout, TensorSpec, block_for, elements
from ..planner import Group, Plan
from . import _check as check
from ._init import create
from ._labels import LabelRule, label_groups
from ._layout import make_layout, stack_length
from ._precision import PrecisionRule, precision_for
from ._processes import check_layout_on_all_processes
from ._split_rule import Specs, SplitRule, one_kind
from ._unit import Arrays, Unit

TreeUnits = str | tuple[str, ...] | Callable[[str, Any], bool] | None


@jax.tree_util.register_pytree_with_keys_class
class ShardedTree:
    """A pytree of arrays whose bytes are spread over a mesh axis.

    Itself a pytree: its leaves are the slabs' arrays, so `optax` transforms, `jit`, donation and `tree.map`
    work on it as on any other. A tensor that has a slab of its own is found there under its path with its
    natural shape. What the layout says travels along as static data.

    Attributes:
      slabs: by name, the arrays of this tree's own bucket; None for those that `partition` took away.
      children: by path, subtrees that are buckets of their own (`units=`).
      unit: the bucket on its mesh.
    """

    def __init__(self, slabs: Arrays, children: dict[str, "ShardedTree"], unit: Unit, treedef: Any, names: Any):
        self.slabs = slabs
        self.children = children
        self.unit = unit
        self._treedef = treedef  # of the original tree, where each child counts as one leaf
        self._names: tuple[str, ...] = names  # of its leaves: tensors and children

    def tree_flatten_with_keys(self):
        keyed = ((GetAttrKey("slabs"), self.slabs), (GetAttrKey("children"), self.children))
        return keyed, (self.unit, self._treedef, self._names)

    @classmethod
    def tree_unflatten(cls, static, parts):
        return cls(*parts, *static)

    def rebuild(self, tensors: Mapping[str, Any], children: Mapping[str, Any]) -> Any:
        """The original structure, with these leaves."""
        leaves = [children[name] if name in self.children else tensors.get(name) for name in self._names]
        return jax.tree.unflatten(self._treedef, leaves)

    def flatten_up_to(self, tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A tree of the original structure, as its leaves and its children's subtrees, by name.

        Raises:
          ValueError: the structures differ.
        """
        named = dict(zip(self._names, self._treedef.flatten_up_to(tree), strict=True))
        children = {name: named.pop(name) for name in self.children}
        return named, children

    def replace(self, slabs: Arrays, children: dict[str, "ShardedTree"]) -> "ShardedTree":
        """A tree of the same layout with other arrays."""
        return ShardedTree(slabs, children, self.unit, self._treedef, self._names)

    def __repr__(self):
        slabs = ", ".join(f"{name}: {getattr(x, 'shape', x)}" for name, x in self.slabs.items())
        inner = f"; children {', '.join(self.children)}" if self.children else ""
        return f"ShardedTree({self.unit.bucket.name or 'root'} over {self.unit.axis}: {{{slabs}}}{inner})"


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
    label: LabelRule = None,
    specs: Specs | None = None,
    check_processes: bool = True,
) -> ShardedTree:
    """Shards a pytree of arrays over a mesh axis, cutting each tensor only between blocks.

    Args:
      params: the tree, each device is sent its own part of each array; or a function of no arguments that makes it,
        whose arrays are then born as shards (see `create`).
      mesh: the devices, with `Auto` or `Explicit` axes.
      axis: the mesh axis to shard over; of several, the last one shards and the others replicate.
      block: what must stay whole; one rule, or a mapping from path patterns to rules. By default what the plan
        says, or else single elements.
      units: which subtrees are gathered on their own, by `unsharded`, rather than at the start of the step: a
        pattern of their path (`"layers/*"`), several, or a predicate on path and subtree.
      stacked: which of the units hold layers stacked on a leading dim, for `lax.scan`.
      plan: a plan or layout to follow instead of making one.
      precision: the dtypes to gather, reduce and compute in; one rule, or a mapping from patterns of units' paths.
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
      ValueError: an unknown axis, or units that match nothing.
      TypeError: leaves that are not arrays.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from ragged_jax.fsdp import full_params
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> tree = shard_tree({"w": jnp.ones((3, 5)), "b": jnp.zeros(5)}, mesh, axis="fsdp")
      >>> full_params(tree)["w"].shape
      (3, 5)
    """
    axes = check.mesh_axes(mesh, axis)
    root = _parse_checked(jax.eval_shape(params) if callable(params) else params, units, stacked)
    groups = label_groups((part.group(block or elements(1)) for part in root.walk()), label)
    groups = SplitRule.of(mesh, axes, specs).split(groups, {})
    one_kind(mesh, axes, groups)
    check.block_patterns(block, groups)
    check.patterns_match("precision", precision, [group.name for group in groups])
    layout = make_layout(groups, mesh.shape[axes[-1]], plan, same_blocks=block is not None)
    if check_processes:
        check_layout_on_all_processes(layout, mesh, axes, precision=precision)
    if not callable(params):
        return root.build(layout, mesh, axes, precision, lambda unit, own: unit.shard(own))
    abstract = root.build(layout, mesh, axes, precision, lambda unit, own: {})
    slabs, _ = create(lambda: (_by_name(params(), units, stacked), ()), units_in(abstract))
    return root.build(layout, mesh, axes, precision, lambda unit, own: slabs[unit.bucket.name])


def units_in(tree: ShardedTree) -> list[Unit]:
    """The buckets of a sharded tree on their mesh, the root first."""
    return [tree.unit, *(unit for child in tree.children.values() for unit in units_in(child))]


def _by_name(params: Any, units: TreeUnits, stacked: TreeUnits) -> dict[str, Any]:
    parts = _parse_checked(params, units, stacked).walk()
    return {name: leaf for part in parts for name, leaf in part.own.items()}


def tree_groups(params: Any, block: BlockRule, units: TreeUnits, stacked: TreeUnits) -> list[Group]:
    """The tensors of a pytree as the planner sees them, bucket by bucket."""
    return [part.group(block) for part in _parse_checked(params, units, stacked).walk()]


@dataclass(frozen=True)
class _Part:
    """A subtree that becomes one bucket, and the units below it."""

    name: str
    treedef: Any
    names: tuple[str, ...]
    own: dict[str, Any]
    children: dict[str, "_Part"]
    stack: bool

    def walk(self) -> Iterator["_Part"]:
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

    def build(
        self, layout: Layout, mesh: Mesh, axes: tuple[str, ...], precision: PrecisionRule, shard: Callable
    ) -> ShardedTree:
        unit = Unit(layout.bucket(self.name), mesh, axes, layout.shares, precision_for(self.name, precision))
        children = {name: child.build(layout, mesh, axes, precision, shard) for name, child in self.children.items()}
        return ShardedTree(shard(unit, self.own), children, unit, self.treedef, self.names)


def _parse_checked(params: Any, units: TreeUnits, stacked: TreeUnits) -> _Part:
    root = _parse(params, "", units, stacked, stack=False)
    parts = list(root.walk())
    for rule, what in ((units, "units"), (stacked, "stacked")):
        if rule is not None and not any(what == "units" or part.stack for part in parts[1:]):
            raise ValueError(f"{what}={rule!r} matches no subtree; the leaves are {', '.join(_paths(params))}")
    check.distinct([name for part in parts for name in part.names])
    check.arrays_only({name: leaf for part in parts for name, leaf in part.own.items()})
    return root


def _parse(tree: Any, name: str, units: TreeUnits, stacked: TreeUnits, stack: bool) -> _Part:
    prefix = name and name + "/"
    found: dict[int, str] = {}
    for path, _ in tree_flatten_with_path(tree)[0] if units is not None else []:
        node = tree
        for depth, key in enumerate(path[:-1]):
            node, below = _child(node, key), prefix + _path(path[: depth + 1])
            if _matches(units, below, node):
                found[id(node)] = below
            if id(node) in found:
                break
    flat, treedef = tree_flatten_with_path(tree, is_leaf=lambda node: id(node) in found)
    own, children, names = {}, {}, []
    for path, leaf in flat:
        names.append(below := prefix + _path(path))
        if id(leaf) in found and not check.is_array(leaf):
            children[below] = _parse(leaf, below, units, stacked, _matches(stacked, below, leaf))
        else:
            own[below] = leaf
    return _Part(name, treedef, tuple(names), own, children, stack)


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


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, DictKey):
        return node[key.key]
    if isinstance(key, SequenceKey):
        return node[key.idx]
    if isinstance(key, GetAttrKey):
        return getattr(node, key.name)
    raise TypeError(f"cannot reach into {type(node).__name__} by {key}: register it with keys to use `units=`")
