"""A training state in JAX as the named tensors of a checkpoint, and back.

The state may be any pytree. What is known to be a slab, in a `ShardedTree` or in a Flax object with a fully sharded
model's variables, becomes the tensors in it, under the path of the tree and then their own: `opt/0/mu/blocks/3/bias`.
Every other leaf is a tensor under its own path. Flax objects are taken as their states, so ties are saved once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from ..adapters import SLABS
from ..checkpoint import TensorEntry, join, slab_tensors
from ..fsdp import ShardedTree, SlabOf, Unit, not_split, slabs_in
from ..fsdp import _check as check
from ..layout import Layout

PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_IMPL = "prng_impl"


@dataclass(frozen=True)
class Item:
    """A leaf of a state.

    Attributes:
      prefix: of its tensors' names; for an ordinary leaf the whole name.
      suffix: what follows the tensors' names, where a slab has several leaves.
      leaf: the array, or what stands for one.
      of: which slab it is, if it is one.
    """

    prefix: str
    suffix: str
    leaf: Any
    of: SlabOf | None

    def tensors(self) -> dict[str, TensorEntry]:
        """What it is in a checkpoint, by name."""
        if self.of is not None:
            bucket, dtype = self.of.unit.bucket, str(self.leaf.dtype)
            return slab_tensors(bucket, self.of.slab, prefix=self.prefix, suffix=self.suffix, dtype=dtype)
        if is_key(self.leaf):
            data = jax.eval_shape(jax.random.key_data, self.leaf)
            attributes = {_IMPL: str(jax.random.key_impl(self.leaf))}
            return {self.prefix: TensorEntry(str(data.dtype), data.shape, attributes=attributes)}
        if type(self.leaf) in PYTHON:
            return {self.prefix: TensorEntry(PYTHON[type(self.leaf)], ())}
        return {self.prefix: TensorEntry(str(self.leaf.dtype), tuple(self.leaf.shape))}


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and check.is_key(leaf)


def items_of(state: Any) -> tuple[list[Item], Callable[[Sequence[Any]], Any]]:
    """The leaves of a state, and the function that makes the state of other leaves.

    Raises:
      TypeError: leaves that are neither arrays nor numbers; all of them named.
      ValueError: two leaves have the same name.
    """
    items: list[Item] = []
    builders: list[tuple[int, Callable[[list[Any]], Any]]] = []
    flat, treedef = tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, _NODES))
    for path, node in flat:
        found, build = _node_items(_name(path), node)
        items += found
        builders.append((len(found), build))
    _check(items)

    def build_all(leaves: Sequence[Any]) -> Any:
        rest, nodes = list(leaves), []
        for count, build in builders:
            nodes.append(build(rest[:count]))
            del rest[:count]
        return jax.tree.unflatten(treedef, nodes)

    return items, build_all


_NODES = (ShardedTree, nnx.State, nnx.Pytree, nnx.Variable)


def _name(path: tuple) -> str:
    return keystr(path, simple=True, separator="/")


def _node_items(name: str, node: Any) -> tuple[list[Item], Callable[[list[Any]], Any]]:
    if isinstance(node, ShardedTree):
        marked = _marked(name, node)
        leaves, treedef = jax.tree.flatten(marked, is_leaf=lambda x: isinstance(x, Item))
        return leaves, lambda new: jax.tree.unflatten(treedef, new)
    if isinstance(node, nnx.State):
        return _state_items(name, node)
    if isinstance(node, nnx.Variable):
        items, treedef = _variable_items(name, node)
        return items, lambda new: node.replace(jax.tree.unflatten(treedef, new))
    if isinstance(node, nnx.Pytree):
        graphdef, state = nnx.split(node)
        items, build = _state_items(name, state)
        return items, lambda new: nnx.merge(graphdef, build(new))
    return [Item(name or "value", "", node, None)], lambda new: new[0]


def _marked(prefix: str, node: ShardedTree) -> ShardedTree:
    def mark(slab: str, value: Any) -> Any:
        of = SlabOf(node.unit, slab)
        flat, treedef = tree_flatten_with_path(value)
        return jax.tree.unflatten(treedef, [_item(prefix, _name(path), leaf, of) for path, leaf in flat])

    slabs: Any = {name: mark(name, value) for name, value in node.slabs.items()}
    return node.replace(slabs, {name: _marked(prefix, child) for name, child in node.children.items()})


def _item(prefix: str, suffix: str, leaf: Any, of: SlabOf) -> Item:
    not_split([of.slab], "a checkpoint")
    if tuple(leaf.shape) == of.unit.shape(of.slab):
        return Item(prefix, suffix, leaf, of)
    return Item(join(prefix, "slabs", of.unit.bucket.name, of.name, suffix), "", leaf, None)


def _state_items(name: str, state: nnx.State) -> tuple[list[Item], Callable[[list[Any]], Any]]:
    items: list[Item] = []
    parts: list[tuple[Any, Any, int, Any]] = []
    for path, variable in nnx.to_flat_state(state):
        below = join(name, *map(str, path))
        if isinstance(variable, nnx.Variable):
            found, treedef = _variable_items(below, variable)
        else:
            found, treedef = [Item(below, "", variable, None)], None
        items += found
        parts.append((path, variable, len(found), treedef))

    def build(leaves_of_all: list[Any]) -> nnx.State:
        rest, flat = list(leaves_of_all), []
        for path, variable, count, treedef in parts:
            leaves = rest[:count]
            del rest[:count]
            new = leaves[0] if treedef is None else variable.replace(jax.tree.unflatten(treedef, leaves))
            flat.append((path, new))
        return nnx.from_flat_state(flat)

    return items, build


def _variable_items(name: str, variable: nnx.Variable) -> tuple[list[Item], Any]:
    flat, treedef = tree_flatten_with_path(variable.get_raw_value())
    known = jax.tree.leaves(slabs_in(variable), is_leaf=lambda x: isinstance(x, SlabOf))
    items = []
    for (path, leaf), of in zip(flat, known, strict=True):
        if isinstance(of, SlabOf):
            items.append(_item(_prefix(name, of), _name(path), leaf, of))
        else:
            items.append(Item(join(name, _name(path)), "", leaf, None))
    return items, treedef


def _prefix(name: str, of: SlabOf) -> str:
    """Where the sharded model, or what mirrors it, is in the state, from where one of its slabs is."""
    inner = of.name if of.slab.sole else join(of.unit.bucket.name, SLABS, of.name)
    if name != inner and not name.endswith(f"/{inner}"):
        raise ValueError(f"{name} is slab {of.name} of {of.unit.bucket.name!r}; save the whole model")
    return name.removesuffix(inner).removesuffix("/")


def _check(items: Sequence[Item]) -> None:
    bad = [item for item in items if not hasattr(item.leaf, "dtype") and type(item.leaf) not in PYTHON]
    if bad:
        listing = "\n".join(f"  {item.prefix}: {type(item.leaf).__name__}" for item in bad)
        raise TypeError(f"a checkpoint holds arrays and numbers; give the rest as `metadata`:\n{listing}")
    check.distinct([name for item in items for name in item.tensors()])


def layouts_of(items: Sequence[Item]) -> dict[str, Layout]:
    """The layouts that the slabs of a state follow, by prefix."""
    units: dict[str, dict[Unit, None]] = {}
    for item in items:
        if item.of is not None:
            units.setdefault(item.prefix, {})[item.of.unit] = None
    made: dict[frozenset, Layout] = {}
    layouts = {}
    for prefix, of in units.items():
        first, buckets = next(iter(of)), tuple(dict.fromkeys(unit.bucket for unit in of))
        same = frozenset((first.num_shards, first.shares, *buckets))
        layouts[prefix] = made.setdefault(same, Layout(first.num_shards, buckets, first.shares))
    return layouts
