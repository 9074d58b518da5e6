"""What the leaves of a tree are: slabs, with the tensors in them, or ordinary arrays."""

from dataclasses import dataclass, field
from functools import cached_property, singledispatch
from typing import Any

import jax
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from ..layout import Slab
from ._sharded_tree import ShardedTree
from ._unit import Unit


@dataclass(frozen=True)
class SlabOf:
    """Which slab an array is.

    Attributes:
      unit: its bucket on the mesh.
      name: of the slab in the bucket.
    """

    unit: Unit
    name: str

    def __repr__(self):
        return f"SlabOf({self.name!r}, {self.unit!r})"

    @cached_property
    def slab(self) -> Slab:
        return next(slab for slab in self.unit.bucket.slabs if slab.name == self.name)


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree of parameters.

    Attributes:
      path: where it is in the tree, with slashes.
      shape, dtype: of the global array.
      of: which slab it is; None for an array that this library did not lay out.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    of: SlabOf | None = None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Leaves:
    """The leaves of a tree, in the order of `jax.tree.leaves`.

    A value, and a pytree node without leaves. A transform keeps it in its state: Flax gives its optimizers
    variables, which know what they are, when the state is made, but bare arrays when it is updated.
    """

    leaves: tuple[Leaf, ...]
    _hash: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __iter__(self):
        return iter(self.leaves)

    def __len__(self):
        return len(self.leaves)

    def __hash__(self):  # part of jit's cache key: asked for in every step
        if not self._hash:
            self._hash.append(hash(self.leaves))
        return self._hash[0]


@singledispatch
def slabs_in(node: Any) -> Any:
    """A node with a `SlabOf` in place of each leaf that is a slab; None for a node that cannot know."""
    return None


@slabs_in.register
def _(node: ShardedTree) -> ShardedTree:
    slabs = {name: jax.tree.map(lambda _, n=name: SlabOf(node.unit, n), x) for name, x in node.slabs.items()}
    return node.replace(slabs, {name: slabs_in(child) for name, child in node.children.items()})


def leaves_of(tree: Any) -> Leaves:
    """What the leaves of a tree are.

    Args:
      tree: of arrays, concrete or abstract: parameters, gradients or anything of their structure. Slabs are known
        in a `ShardedTree` and in the variables of a fully sharded Flax module.
    """

    def knows(node: Any) -> bool:
        return slabs_in(node) is not None

    known = jax.tree.map(lambda x: slabs_in(x) if knows(x) else x, tree, is_leaf=knows)
    slabs = jax.tree.leaves(known, is_leaf=lambda x: isinstance(x, SlabOf))
    flat = tree_flatten_with_path(tree)[0]
    return Leaves(
        tuple(
            Leaf(
                _path(path),
                tuple(jax.numpy.shape(x)),
                str(jax.numpy.result_type(x)),
                of if isinstance(of, SlabOf) else None,
            )
            for (path, x), of in zip(flat, slabs, strict=True)
        )
    )


def _path(path: tuple) -> str:
    """With slashes. The `value` attribute of a variable is no part of a parameter's name."""
    if len(path) > 1 and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return keystr(path, simple=True, separator="/")
