"""A training state in JAX as the named tensors of a checkpoint, and back.

The state may be any pytree. What is known to be a slab, in a `ShardedTree` or in a Flax object with a fully sharded
model's variables, becomes the tensors in it, under the path of the tree and then their own: `opt/0/mu/blocks/3/bias`.
Every other leaf is a tensor under its own path. Flax objects are taken as their states, so ties are saved once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh
from jax.tree_util import keystr, tree_flatten_with_path

from ..adapters import SLABS
from ..checkpoint import Region, TensorEntry, join
from ..fsdp import ShardedTree, SlabOf, Unit, not_split, slabs_in
from ..fsdp import _check as check
from ..layout import Layout, listed
from ..optim._adam8bit_state import ScaleByAdam8bitState
from ..optim._masks import PartitionState
from ._holding import Holding, InSlab
from ._quantised import EMPTY, Moments

PYTHON = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
_IMPL = "prng_impl"

K = TypeVar("K")


@dataclass(frozen=True)
class Item:
    """A leaf of a state.

    Attributes:
      name: of the tensor that an ordinary array is; else the prefix of its tensors' names.
      leaf: the array, or what stands for one.
      held: how tensors lie in it; None for an array that is a tensor itself.
      shape: of the tensor that an ordinary array is, where it is another than the array's.
      attributes: of it in a checkpoint.
      is_empty: whether it holds nothing at all.
    """

    name: str
    leaf: Any
    held: Holding | None = None
    shape: tuple[int, ...] | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)
    is_empty: bool = False

    def tensors(self) -> Mapping[str, TensorEntry]:
        """What it is in a checkpoint, by name."""
        if self.is_empty:
            return {}
        if self.held is not None:
            return self.held.tensors(str(self.leaf.dtype))
        if is_key(self.leaf):
            data = jax.eval_shape(jax.random.key_data, self.leaf)
            attributes = {_IMPL: str(key_impl(self.leaf))}
            return {self.name: TensorEntry(str(data.dtype), data.shape, attributes=attributes)}
        if type(self.leaf) in PYTHON:
            return {self.name: TensorEntry(PYTHON[type(self.leaf)], ())}
        shape = tuple(self.leaf.shape) if self.shape is None else self.shape
        return {self.name: TensorEntry(str(self.leaf.dtype), shape, attributes=dict(self.attributes))}


class _Raw(NamedTuple):
    """A leaf before it is known what its neighbours are: `name` as of an item, and what follows it in the path."""

    name: str
    suffix: str
    leaf: Any
    of: SlabOf | None


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and check.is_key(leaf)


def key_impl(leaf: Any) -> Any:
    """Which generator a random key is for, also one that has a shape only."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """A part of an array as ranges of its dims."""
    spans = (s.indices(size)[:2] for s, size in zip((*index, *[slice(None)] * len(shape)), shape, strict=False))
    return tuple(spans)


def sharding_of(item: Item) -> Any:
    """The sharding of what lies in a slab; by default that of the slab."""
    assert item.held is not None
    unit, slab = item.held.of.unit, item.held.of.slab
    sharding = getattr(item.leaf, "sharding", None)
    is_known = sharding is not None and not isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return sharding if is_known else unit.sharding(slab)


def items_of(state: Any) -> tuple[list[Item], Callable[[Sequence[Any]], Any]]:
    """The leaves of a state, and the function that makes the state of other leaves.

    Raises:
      TypeError: leaves that are neither arrays nor numbers; all of them named.
      ValueError: two leaves have the same name.
    """
    raws: list[_Raw] = []
    builders: list[tuple[int, Callable[[list[Any]], Any]]] = []
    flat, treedef = tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, _NODES))
    for path, node in flat:
        found, build = _node_items(_name(path), node)
        raws += found
        builders.append((len(found), build))
    moments = [Moments(path, x) for path, x in _nodes(state, ScaleByAdam8bitState)]
    owned = [
        (join(path, "inner", label), x.labels.tensors(label))
        for path, x in _nodes(state, PartitionState)
        for label in x.inner
    ]
    items = [_item(raw, moments, owned) for raw in raws]
    _check(items)

    def build_all(leaves: Sequence[Any]) -> Any:
        rest, nodes = list(leaves), []
        for count, build in builders:
            nodes.append(build(rest[:count]))
            del rest[:count]
        return jax.tree.unflatten(treedef, nodes)

    return items, build_all


def _nodes(state: Any, kind: type[K]) -> Iterator[tuple[str, K]]:
    """The states of this type, wherever they are, with their paths."""

    def stops(x: Any) -> bool:
        return isinstance(x, (*_NODES, kind))

    for path, node in tree_flatten_with_path(state, is_leaf=stops)[0]:
        inner = nnx.iter_graph(node) if isinstance(node, nnx.Pytree) else [((), node)]
        yield from ((join(_name(path), *map(str, below)), x) for below, x in inner if isinstance(x, kind))


_NODES = (ShardedTree, nnx.State, nnx.Pytree, nnx.Variable)


def _name(path: tuple) -> str:
    return keystr(path, simple=True, separator="/")


def _node_items(name: str, node: Any) -> tuple[list[_Raw], Callable[[list[Any]], Any]]:
    if isinstance(node, ShardedTree):
        marked = _marked(name, node)
        leaves, treedef = jax.tree.flatten(marked, is_leaf=lambda x: isinstance(x, _Raw))
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
    return [_Raw(name or "value", "", node, None)], lambda new: new[0]


def _marked(prefix: str, node: ShardedTree) -> ShardedTree:
    def mark(slab: str, value: Any) -> Any:
        of = SlabOf(node.unit, slab)
        flat, treedef = tree_flatten_with_path(value)
        return jax.tree.unflatten(treedef, [_Raw(prefix, _name(path), leaf, of) for path, leaf in flat])

    slabs: Any = {name: mark(name, value) for name, value in node.slabs.items()}
    return node.replace(slabs, {name: _marked(prefix, child) for name, child in node.children.items()})


def _item(raw: _Raw, moments: Sequence[Moments], owned: Sequence[tuple[str, frozenset[str]]]) -> Item:
    """A leaf by tensor. Of an array that optimizers share, only what belongs to the one whose state it is."""
    of, path = raw.of, raw.name if raw.of is None else join(raw.name, raw.suffix)
    only = next((names for head, names in owned if path.startswith(f"{head}/")), None)
    place = next(((m, found) for m in moments if (found := m.find(path))), None)
    if of is None:
        if place and (known := place[0].ordinary(*place[1])):
            name, shape, attributes = known
            return Item(name, raw.leaf, None, shape, attributes, is_empty=name == EMPTY)
        return Item(raw.name, raw.leaf)
    if any(p.storage == "tiled" for p in of.slab.placements):
        not_split([of.slab], "a checkpoint of what is stored tile by tile")
    if place:
        not_split([of.slab], "a checkpoint of optimizer state in 8 bits")
        moment, kind, rest = place[1]
        return Item(join(place[0].path, moment, rest), raw.leaf, place[0].holding(of, moment, kind, rest, only))
    if tuple(raw.leaf.shape) == of.unit.shape(of.slab):
        return Item(raw.name, raw.leaf, InSlab(of, raw.name, raw.suffix, only))
    return Item(join(raw.name, "slabs", of.unit.bucket.name, of.name, raw.suffix), raw.leaf)


def _state_items(name: str, state: nnx.State) -> tuple[list[_Raw], Callable[[list[Any]], Any]]:
    raws: list[_Raw] = []
    parts: list[tuple[Any, Any, int, Any]] = []
    for path, variable in nnx.to_flat_state(state):
        below = join(name, *map(str, path))
        if isinstance(variable, nnx.Variable):
            found, treedef = _variable_items(below, variable)
        else:
            found, treedef = [_Raw(below, "", variable, None)], None
        raws += found
        parts.append((path, variable, len(found), treedef))

    def build(leaves_of_all: list[Any]) -> nnx.State:
        rest, flat = list(leaves_of_all), []
        for path, variable, count, treedef in parts:
            leaves = rest[:count]
            del rest[:count]
            new = leaves[0] if treedef is None else variable.replace(jax.tree.unflatten(treedef, leaves))
            flat.append((path, new))
        return nnx.from_flat_state(flat)

    return raws, build


def _variable_items(name: str, variable: nnx.Variable) -> tuple[list[_Raw], Any]:
    flat, treedef = tree_flatten_with_path(variable.get_raw_value())
    known = jax.tree.leaves(slabs_in(variable), is_leaf=lambda x: isinstance(x, SlabOf))
    raws = []
    for (path, leaf), of in zip(flat, known, strict=True):
        if isinstance(of, SlabOf):
            raws.append(_Raw(_prefix(name, of), _name(path), leaf, of))
        else:
            raws.append(_Raw(join(name, _name(path)), "", leaf, None))
    return raws, treedef


def _prefix(name: str, of: SlabOf) -> str:
    """Where the sharded model, or what mirrors it, is in the state, from where one of its slabs is."""
    inner = of.name if of.slab.sole else join(of.unit.bucket.name, SLABS, of.name)
    if name != inner and not name.endswith(f"/{inner}"):
        raise ValueError(f"{name} is slab {of.name} of {of.unit.bucket.name!r}; save the whole model")
    return name.removesuffix(inner).removesuffix("/")


def _check(items: Sequence[Item]) -> None:
    bad = [item for item in items if not hasattr(item.leaf, "dtype") and type(item.leaf) not in PYTHON]
    large = [item for item in items if type(item.leaf) is int and not -(2**63) <= item.leaf < 2**63]
    if bad or large:
        listing = listed(f"{item.name}: {type(item.leaf).__name__}" for item in bad)
        listing += listed(f"{item.name}: more than 64 bits" for item in large)
        raise TypeError(f"a checkpoint holds arrays and numbers; give the rest as `metadata`:{listing}")
    check.distinct([name for item in items for name in item.tensors()])


def layouts_of(items: Sequence[Item]) -> dict[str, Layout]:
    """The layouts that the slabs of a state follow, by prefix."""
    units: dict[str, dict[Unit, None]] = {}
    for item in items:
        if isinstance(item.held, InSlab):
            units.setdefault(item.name, {})[item.held.of.unit] = None
    made: dict[frozenset, Layout] = {}
    layouts = {}
    for prefix, of in units.items():
        first, buckets = next(iter(of)), tuple(dict.fromkeys(unit.bucket for unit in of))
        same = frozenset((first.num_shards, first.shares, *buckets))
        layouts[prefix] = made.setdefault(same, Layout(first.num_shards, buckets, first.shares))
    return layouts
