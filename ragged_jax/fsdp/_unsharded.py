"""Subtrees that are gathered where a function uses them, and dropped after it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from ._precision import FULL
from ._remat import resharding
from ._tree import ShardedTree
from ._unshard import unshard_unit


def unshard(tree: ShardedTree) -> Any:
    """Inside the function given to `value_and_grad` or `apply`: the subtree with its tensors whole.

    Units below it stay sharded. What it returns is kept for the backward pass; see `unsharded`.
    """
    return tree.rebuild(unshard_unit(tree.unit, tree.slabs), tree.children)


def unsharded(function: Callable, *, policy: Callable | None = None) -> Callable:
    """`function`, with sharded subtrees among its arguments gathered on entry and dropped on exit.

    The backward pass gathers them again. `lax.scan` over a stacked subtree gives the body one layer at a time.

    Args:
      function: of arrays and pytrees, some of them sharded subtrees.
      policy: a `jax.checkpoint` policy, for what to keep; by default everything but gathered weights and what
        cheap arithmetic makes again.

    Example:
      >>> def layer(w, x):
      ...     return jax.nn.relu(x @ w["kernel"])
      >>> def model(params, x):
      ...     for w in params["layers"]:
      ...         x = unsharded(layer)(w, x)
      ...     return x
    """

    def leaves(args):
        return jax.tree.leaves(args, is_leaf=_is_sharded)

    @wraps(function)
    def wrapped(*args):
        units = [x for x in leaves(args) if _is_sharded(x)]

        precision = units[0].unit.precision if units else FULL

        def run(*args):
            parts = [unshard(x) if _is_sharded(x) else precision.inputs(x) for x in leaves(args)]
            opened = jax.tree.unflatten(jax.tree.structure(args, is_leaf=_is_sharded), parts)
            return precision.outputs(function(*opened))

        return resharding(run, policy, scanned=any(x.unit.stacked for x in units))(*args)

    return wrapped


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)
