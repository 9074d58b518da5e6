"""Parts of a sharded pytree: one to train and one that stays as it is."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import jax

from ..layout import listed
from ._sharded_tree import ShardedTree
from ._sink import WithSink

PathRule = str | tuple[str, ...] | Callable[[str], bool]


def partition(tree: ShardedTree, rule: PathRule) -> tuple[ShardedTree, ShardedTree]:
    """Splits a sharded tree in two of the same structure, with None for the arrays that the other one has.

    To train a part, differentiate and optimize the first and pass on the second: it has no gradients and no
    optimizer state, and no weight decay moves it. Nothing is moved, so that another partition may follow later.

    Args:
      tree: from `shard_tree`.
      rule: which tensors go to the first: a pattern of their paths, several, or a predicate on the path.

    Returns:
      What the rule chooses, and the rest. `combine` makes one of them again.

    Raises:
      ValueError: tensors of both parts share a slab, or the rule chooses nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from ragged_jax.fsdp import shard_tree, value_and_grad
      >>> mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
      >>> params = {"base": jnp.ones(3), "lora": jnp.zeros(3)}
      >>> tree = shard_tree(params, mesh, axis="fsdp", label={"lora": "lora"})
      >>> lora, base = partition(tree, "lora")
      >>> def loss(lora, base, x):
      ...     w = combine(lora, base)
      ...     return (x * (w["base"] + w["lora"])).mean()
      >>> _, grads = value_and_grad(loss)(lora, base, jnp.ones((jax.device_count(), 3)))
      >>> len(jax.tree.leaves(lora)), len(jax.tree.leaves(tree))
      (1, 2)
    """
    patterns = (rule,) if isinstance(rule, str) else rule
    choose = patterns if callable(patterns) else lambda name: any(fnmatchcase(name, p) for p in patterns)
    torn: list[str] = []
    first, rest = _split(tree, choose, torn)
    if torn:
        raise ValueError(
            "a slab cannot be split; these tensors share one:" + listed(torn) + "\nGive them labels when they are "
            "sharded, as in `shard_tree(..., label={'*lora*': 'lora'})`: then they do not."
        )
    if not jax.tree.leaves(first):
        names = ", ".join(t.name for part in _walk(tree) for t in part.unit.bucket.tensors)
        raise ValueError(f"rule={rule!r} chooses nothing; the tensors are {names}")
    return first, rest


def combine(*trees: Any) -> Any:
    """One pytree of several of the same structure: of each leaf the first that is not None.

    Works on trees from `partition`, and inside a function given to `value_and_grad` or `apply` on what they became.
    """

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, WithSink)

    return jax.tree.map(lambda *xs: next((x for x in xs if x is not None), None), *trees, is_leaf=is_leaf)


def _walk(tree: ShardedTree) -> Iterable[ShardedTree]:
    yield tree
    for child in tree.children.values():
        yield from _walk(child)


def _split(tree: ShardedTree, choose: Callable[[str], bool], torn: list[str]) -> tuple[ShardedTree, ShardedTree]:
    chosen: dict[str, bool] = {}
    for slab in tree.unit.bucket.slabs:
        votes: dict[bool, list[str]] = {True: [], False: []}
        for placement in slab.placements:
            votes[bool(choose(placement.tensor.name))].append(placement.tensor.name)
        chosen[slab.name] = bool(votes[True])
        if votes[True] and votes[False]:
            torn.append(f"{', '.join(votes[True])} (chosen) with {', '.join(votes[False])} (not chosen)")
    children = {name: _split(child, choose, torn) for name, child in tree.children.items()}
    first, rest = (
        tree.replace(
            {name: x if chosen[name] == side else None for name, x in tree.slabs.items()},  # type: ignore[misc]
            {name: pair[not side] for name, pair in children.items()},
        )
        for side in (True, False)
    )
    return first, rest
