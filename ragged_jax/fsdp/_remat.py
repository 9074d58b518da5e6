"""What the backward pass keeps of a unit: activations yes, gathered weights no."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

# Values that cost next to nothing to make again. Were they kept, a cast or a transpose of a gathered weight
# would stand in for the weight itself and nothing would be freed.
_CHEAP = frozenset(
    {
        "all_gather",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "expand_dims",
        "name",
        "pad",
        "pvary",
        "reduce_precision",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)


def drop_unsharded(primitive: Any, *_, **params: Any) -> bool:
    """A `jax.checkpoint` policy: keep what plain autodiff keeps, except gathered weights and their copies."""
    return not _is_cheap(primitive, params)


def _is_cheap(primitive: Any, params: Mapping[str, Any]) -> bool:
    if (call := params.get("call_jaxpr")) is not None:  # of a custom_vjp, as `unshard` is: what it consists of
        return all(_is_cheap(eqn.primitive, eqn.params) for eqn in call.eqns)
    return primitive.name in _CHEAP


def resharding(run: Callable, policy: Callable | None, scanned: bool) -> Callable:
    """`run`, with its unsharded weights gathered again in backward instead of kept.

    Args:
      run: a function of shards that gathers them itself.
      policy: what else to keep; None for everything that plain autodiff keeps.
      scanned: whether `run` is the body of a scan, whose iterations the compiler cannot merge anyway. Without
        barriers it may overlap a gather with the computation before it.
    """
    return jax.checkpoint(run, policy=policy or drop_unsharded, prevent_cse=not scanned)
