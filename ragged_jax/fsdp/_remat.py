"""What the backward pass keeps of a unit: activations yes, gathered weights no."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Values that cost next to nothing to make again. Casts and copies, because were they kept, that of a gathered weight
# would stand in for the weight itself and nothing would be freed. Plain arithmetic, because it fuses into whatever
# reads it: keeping the six intermediate values of a gelu costs more memory and time than making them again.
# Comparisons of floats are kept: a mask is one byte, what it is made from four. Those of integers are not: positions
# and labels are mostly at hand, and the mask of the labels of a language model is a byte for each logit.
_COPIES = frozenset(
    {
        "all_gather",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "expand_dims",
        "iota",
        "name",
        "pad",
        "pvary",
        "reduce_precision",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "squeeze",
        "transpose",
    }
)
_ARITHMETIC = frozenset(
    {
        "abs",
        "add",
        "add_any",
        "clamp",
        "div",
        "integer_pow",
        "max",
        "min",
        "mul",
        "neg",
        "select_n",
        "sign",
        "square",
        "sub",
    }
)
_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})


def drop_unsharded(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: keep what plain autodiff keeps, except gathered weights and cheap arithmetic.

    Results of products, convolutions, reductions, transcendental functions and comparisons of floats are kept.
    """
    return not _is_cheap(primitive, avals, params)


def _is_cheap(primitive: Any, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    if (call := params.get("call_jaxpr")) is not None:  # of a custom_vjp, as `unshard` is: what it consists of
        return _gathers(call) or _all_cheap(call)
    if primitive.name == "shard_map":  # over the axes that split tensors
        return _all_cheap(params["jaxpr"])
    if primitive.name in _COMPARISONS:
        return not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)
    return primitive.name in _COPIES or primitive.name in _ARITHMETIC


def _all_cheap(jaxpr: Any) -> bool:
    return all(_is_cheap(eqn.primitive, [x.aval for x in eqn.invars], eqn.params) for eqn in jaxpr.eqns)


def _gathers(jaxpr: Any) -> bool:
    """Whether a program gathers weights, which it may quantise before and dequantise after."""
    inner = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params]
    return any(eqn.primitive.name == "all_gather" for eqn in jaxpr.eqns) or any(map(_gathers, inner))


def resharding(run: Callable, policy: Callable | None, scanned: bool) -> Callable:
    """`run`, with its unsharded weights gathered again in backward instead of kept.

    Args:
      run: a function of shards that gathers them itself.
      policy: what else to keep; None for everything that is not cheap to make again.
      scanned: whether `run` is the body of a scan, whose iterations the compiler cannot merge anyway. Without
        barriers it may overlap a gather with the computation before it.
    """
    return jax.checkpoint(run, policy=policy or drop_unsharded, prevent_cse=not scanned)
