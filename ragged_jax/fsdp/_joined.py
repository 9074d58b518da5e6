"""How values of many devices become one: by what jax's types say of whether they differ."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_flatten_with_path

from ._check import is_key


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes over which a traced value may differ."""
    kind: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    if hasattr(kind, "manual_axis_type"):
        return kind.manual_axis_type.varying
    return kind.vma  # the name of other jax releases


def vary(x: Any, axes: Sequence[str]) -> Any:
    """`x`, typed as one that may differ over all of `axes`."""
    missing = tuple(a for a in axes if a not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def paths(tree: Any) -> frozenset[str]:
    """The paths of a tree's leaves."""
    return frozenset(keystr(path) for path, _ in tree_flatten_with_path(tree)[0])


@jax.tree_util.register_pytree_node_class
class replicated:
    """Marks an argument of `value_and_grad` or `apply` that every device gets whole, instead of its share.

    Around an output of the function (or a part of one, such as updated batch statistics) it says that there is one
    value of it: floats that differ between devices are averaged instead of concatenated. Integers must not differ
    between devices; of several microbatches they are what the last one returned.
    """

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, values):
        return cls(*values)


class Joined:
    """Sorts the leaves of a pytree inside `shard_map`, and puts them back together outside.

    A leaf that is the same on all devices is passed on whole, an array that differs is concatenated along dim 0,
    a scalar that differs is averaged, and so is all that is marked as `replicated`.

    Args:
      axes: the mesh axes over which leaves may differ.
      known: paths of state that came in whole and must leave so; where it differs, it is averaged.
    """

    def __init__(self, axes: tuple[str, ...], known: frozenset[str] = frozenset()):
        self.axes, self.known = axes, known
        self._plan: list[tuple[str, Any]] = []
        self._treedef: Any = None

    def split(self, tree: Any) -> dict[str, list]:
        """Inside: the leaves by how they leave, `whole` or `split`.

        Raises:
          TypeError: known state differs that has no mean; every such leaf is named.
        """
        tree, known = _unmarked(tree)
        known |= self.known
        flat, self._treedef = tree_flatten_with_path(tree)
        named = [(keystr(path), leaf) for path, leaf in flat]
        arrays = [(name, x) for name, x in named if isinstance(x, jax.Array)]
        if bad := [name for name, x in arrays if name in known and varying(x) and not _is_float(x)]:
            raise TypeError(
                "after the call these state leaves differ between devices and, not being floats, have no mean: "
                f"{', '.join(bad)}. Reduce them over {self.axes} inside the function."
            )
        if bad := [name for name, x in arrays if is_key(x) and varying(x) and not x.ndim]:
            raise TypeError(
                f"these outputs are random keys that differ between devices, of which there is no mean: "
                f"{', '.join(bad)}. As arrays, `key[None]`, they are concatenated."
            )
        parts: dict[str, list] = {"whole": [], "split": []}
        self._plan = []
        for name, leaf in named:
            if not isinstance(leaf, jax.Array):
                self._plan.append(("constant", leaf))
                continue
            kind = "split" if varying(leaf) and leaf.ndim and name not in known else "whole"
            self._plan.append((kind, None))
            parts[kind].append(self._split_leaf(leaf, kind))
        return parts

    def _split_leaf(self, leaf: jax.Array, kind: str) -> jax.Array:
        if not varying(leaf):
            return leaf
        if kind == "split":
            return vary(leaf, self.axes)
        number = leaf if _is_float(leaf) else leaf.astype(jnp.float32)
        return lax.pmean(vary(number, self.axes), self.axes)

    def join(self, parts: dict[str, list]) -> Any:
        """Outside: the tree of the global arrays that the parts have become."""
        queues = {kind: iter(values) for kind, values in parts.items()}
        leaves = [leaf if kind == "constant" else next(queues[kind]) for kind, leaf in self._plan]
        return jax.tree.unflatten(self._treedef, leaves)


def marks(tree: Any) -> list[bool]:
    """For each leaf of a tree, whether it is marked as `replicated`."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_marked)
    return [_is_marked(node) for node in nodes for _ in jax.tree.leaves(node)]


def _is_marked(x: Any) -> bool:
    return isinstance(x, replicated)


def _unmarked(tree: Any) -> tuple[Any, frozenset[str]]:
    """The tree without its `replicated` marks, and the paths of the leaves that were under one."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=_is_marked)
    inner = (tree_flatten_with_path(x.value)[0] for _, x in flat if _is_marked(x))
    outer = (path for path, x in flat if _is_marked(x))
    found = {keystr((*path, *rest)) for path, leaves in zip(outer, inner, strict=True) for rest, _ in leaves}
    return jax.tree.map(lambda x: x.value if _is_marked(x) else x, tree, is_leaf=_is_marked), frozenset(found)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
