"""Subtrees that are gathered where a function uses them, and dropped after it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from ._check import is_array
from ._precision import FULL
from ._remat import resharding
from ._tree import ShardedTree
from ._unshard import unshard_unit


def unshard(tree: ShardedTree) -> Any:
    """Inside the function given to `value_and_grad` or `apply`: the subtree with its tensors whole.

    Units below it stay sharded. What it returns is kept for the backward pass; see `unsharded`.
    """
    return tree.rebuild(unshard_unit(tree.unit, tree.slabs), tree.children)


def unsharded(function: Callable, *, policy: Callable | None = None, reshard: bool = True) -> Callable:
    """`function`, with sharded subtrees among its arguments gathered on entry and dropped on exit.

    The backward pass gathers them again. `lax.scan` over a stacked subtree gives the body one layer at a time.

    Args:
      function: of arrays and pytrees, some of them sharded subtrees.
      policy: a `jax.checkpoint` policy, for what to keep; by default everything but gathered weights and what
        cheap arithmetic makes again.
      reshard: False keeps the gathered weights for the backward pass: for the last layers, say, which it needs
        first. In a scan they are kept for all layers.

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
        precision = units[0].precision if units else FULL
        dynamic = [_is_sharded(x) or is_array(x) for x in leaves]  # a flag stays what it is

        def run(values):
            parts, given = [], iter(values)
            for leaf, is_dynamic in zip(leaves, dynamic, strict=True):
                value = next(given) if is_dynamic else leaf
                parts.append(unshard(value) if _is_sharded(value) else precision.inputs(value))
            args, kwargs = jax.tree.unflatten(treedef, parts)
            return precision.outputs(function(*args, **kwargs))

        values = [leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic]
        if reshard:
            return resharding(run, policy, scanned=any(unit.stacked for unit in units))(values)
        return run(values)

    return wrapped


def _is_sharded(x: Any) -> bool:
    return isinstance(x, ShardedTree)
