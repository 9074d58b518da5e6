"""Linen units: a method of a module whose parameters are shards gathers them, runs, and drops them.

Nothing in the model changes. `value_and_grad` and `apply` put an interceptor in force, which looks at the parameters
of each module that is called. Where it finds a sharded subtree, it runs the method under Flax's own lifted
transforms, so that scans, remat, random streams and mutable collections compose as they do with those.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from ..fsdp import ShardedTree, around_calls, drop_unsharded, settling, unshard
from ..fsdp import _check as check

_RUN = "_run_unsharded"  # the name of the function that is lifted


def gather_units(next_fun: Callable, args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
    """An interceptor for `nn.intercept_methods`."""
    tree = params_of(context.module)
    if not isinstance(tree, ShardedTree) or context.method_name == _RUN:
        return next_fun(*args, **kwargs)
    if context.method_name == "setup":
        return None  # it would read parameters; the copy of the module that has them whole sets itself up
    if context.module.scope.is_mutable_collection("params"):
        raise ValueError(
            f"`mutable` lets unit {tree.unit.bucket.name!r} change its parameters, which are sharded and gathered "
            "to be read. Name the collections that change, as in `mutable=['batch_stats']`, or all but "
            "these: `mutable=flax.linen.DenyList('params')`"
        )
    # The scan inside will call with one layer; a lifted function, which is no method, calls those it needs.
    if tree.is_stack or not hasattr(context.module, context.method_name):
        return next_fun(*args, **kwargs)
    return _gathered(context.module, context.method_name, tree, args, kwargs)


def params_of(module: nn.Module) -> Any:
    """The parameters of a bound module: a mapping, or the sharded tree that stands for one."""
    return None if module.scope is None else module.scope.variables().get("params")


def _gathered(module: nn.Module, name: str, tree: ShardedTree, args: tuple, kwargs: dict[str, Any]) -> Any:
    unit = tree.unit
    leaves, treedef = jax.tree.flatten((args, kwargs))
    dynamic = [check.is_array(x) for x in leaves]  # a flag stays what it is

    def _run_unsharded(module: nn.Module, values: list) -> Any:
        given = iter(unit.precision.inputs(values))
        parts = [next(given) if is_dynamic else leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, parts)
        return unit.precision.outputs(getattr(module, name)(*args, **kwargs))

    def lifted(tree: ShardedTree, values: list) -> Any:
        # Not mutable in fact, since `params` is not. But what is said to be read only Flax turns into a FrozenDict.
        run = nn.map_variables(_run_unsharded, "params", lambda held: {**held, "params": unshard(tree)}, mutable=True)
        if unit.reshard:
            run = nn.remat(run, policy=unit.policy or drop_unsharded, prevent_cse=not unit.stacked)
        return run(module, values)

    run = settling(lifted) if unit.beside_layers else lifted
    return run(tree, [leaf for leaf, is_dynamic in zip(leaves, dynamic, strict=True) if is_dynamic])


around_calls.append(lambda: nn.intercept_methods(gather_units))
