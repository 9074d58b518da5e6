"""A pytree of arrays as shards: what it is outside a step, and how parts of it become whole inside one."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from ..layout import named
from ._check import is_array
from ._pickle import only_copied
from ._precision import FULL
from ._remat import resharding
from ._settle import settling
from ._unit import Arrays, Unit
from ._unshard import unshard_unit


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

    @property
    def is_stack(self) -> bool:
        """Inside `shard_map`: whether the arrays hold all layers of a stack, as they do until a scan takes one."""
        slabs = self.unit.bucket.slabs if self.unit.stacked else ()
        arrays = ((self.slabs[slab.name], slab) for slab in slabs)
        return any(x is not None and x.ndim > len(self.unit.inner_shape(slab)) for x, slab in arrays)

    def __contains__(self, key: Any) -> bool:
        """Whether the original tree has something under this key."""
        return any(self._below(key, name) for name in self._names)

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            raise KeyError(f"{key!r}; {self._whereabouts()}")
        raise RuntimeError(self._whereabouts(key))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'ShardedTree' object has no attribute {name!r}")
        value = getattr(jax.tree.unflatten(self._treedef, self._names), name, None)  # names for tensors
        if value is not None and not callable(value) and not set(self._names) & set(map(str, jax.tree.leaves(value))):
            return value  # a static field
        raise AttributeError(self._whereabouts(name if name in self else None) + f" (asked for attribute {name!r})")

    def _below(self, key: Any, name: str) -> bool:
        root = self.unit.bucket.name
        return f"{name}/".startswith(f"{root}/{key}/" if root else f"{key}/")

    def _whereabouts(self, key: Any = None) -> str:
        """Where tensors are, and how to get at them."""
        names = [name for name in self._names if key is None or self._below(key, name)]
        listing = named(names)
        return (
            f"these tensors are sharded, in unit {self.unit.bucket.name or '(root)'!r}: {listing}. They are whole "
            "inside a function given to `value_and_grad` or `apply`; those of a unit where it is used: in methods of "
            "its Flax module, or in a function wrapped by `rj.unsharded`. `rj.full_params(tree)` gives all of them"
        )

    def __repr__(self):
        slabs = ", ".join(f"{name}: {getattr(x, 'shape', x)}" for name, x in self.slabs.items())
        inner = f"; children {', '.join(self.children)}" if self.children else ""
        return f"ShardedTree({self.unit.bucket.name or 'root'} over {self.unit.axis}: {{{slabs}}}{inner})"


def _copied(tree: ShardedTree) -> ShardedTree:
    return tree.replace(dict(tree.slabs), dict(tree.children))


for _name, _method in only_copied(_copied, lambda tree: jax.tree.map(lambda x: x.copy(), tree)).items():
    setattr(ShardedTree, _name, _method)


def units_in(tree: ShardedTree) -> list[Unit]:
    """The buckets of a sharded tree on their mesh, the root first."""
    return [tree.unit, *(unit for child in tree.children.values() for unit in units_in(child))]


def unshard(tree: ShardedTree) -> Any:
    """Inside the function given to `value_and_grad` or `apply`: the subtree with its tensors whole.

    Units below it stay sharded. What it returns is kept for the backward pass; see `unsharded`.

    Raises:
      RuntimeError: it was called elsewhere.
    """
    if tree.unit.axis not in jax.sharding.get_abstract_mesh().manual_axes:
        raise RuntimeError(
            f"unit {tree.unit.bucket.name or '(root)'!r} was used outside of this library's `value_and_grad` and "
            "`apply`; write `rj.apply(lambda params, x: ...)(params, x)`"
        )
    return tree.rebuild(unshard_unit(tree.unit, tree.slabs), tree.children)


def unsharded(function: Callable, *, policy: Callable | None = None, reshard: bool | None = None) -> Callable:
    """`function`, with sharded subtrees among its arguments gathered on entry and dropped on exit.

    The backward pass gathers them again. `lax.scan` over a stacked subtree gives the body one layer at a time.

    Args:
      function: of arrays and pytrees, some of them sharded subtrees.
      policy: a `jax.checkpoint` policy, for what to keep; by default that of the tree (see `shard_tree`).
      reshard: False keeps the gathered weights for the backward pass; by default what the tree says. In a scan they
        are kept for all layers or none.

    Example:
      >>> def layer(w, x):
      ...     return jax.nn.relu(x @ w["kernel"])
      >>> def model(params, x):
      ...     for w in params["layers"]:
      ...         x = unsharded(layer)(w, x)
      ...     return x
    """

    if not callable(function):
        raise TypeError(f"unsharded takes a function and gives one, got {type(function).__name__}; see `unshard`")

    @wraps(function)
    def wrapped(*args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_sharded)
        units = [x.unit for x in leaves if _is_sharded(x)]
        precision, kept = (units[0].precision, units[0].policy) if units else (FULL, None)
        dynamic = [_is_sharded(x) or is_array(x) for x in leaves]  # a flag stays what it is

        def run(values):
            parts, given = [], iter(values)
            for leaf, is_dynamic in zip(leaves, dynamic, strict=True):
                value = next(given) if is_dynamic else leaf
                parts.append(unshard(value) if _is_sharded(value) else precision.inputs(value))
            args, kwargs = jax.tree.unflatten(treedef, parts)
            return precision.outputs(function(*args, **kwargs))

        values = [leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic]
        gathered = run
        if all(unit.reshard for unit in units) if reshard is None else reshard:
            gathered = resharding(run, policy or kept, scanned=any(unit.stacked for unit in units))
        if any(unit.beside_layers for unit in units):
            gathered = settling(gathered)
        return gathered(values)

    return wrapped


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)
