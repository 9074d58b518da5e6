"""Gradients that are reduced before the backward pass goes on.

A scan is one operation to the compiler's scheduler: what has not ended before it ends after it. The gradient of a
unit that is called beside a scan, such as the output matrix of a language model, would lie whole, or what it is made
from would, all through the backward pass of the layers. So what its reduction gives and the gradients of its inputs
are handed on together. The reduction still runs beside the products that these take.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero


def settling(run: Callable) -> Callable:
    """`run`, a function of shards and inputs, with the gradients of both handed on together."""

    def settled(*args: Any) -> Any:
        return run(*_together(args))

    return settled


@jax.custom_jvp
def _together(args: Any) -> Any:
    return args


@partial(_together.defjvp, symbolic_zeros=True)
def _tangents_together(primals, tangents):
    # A linear map, whose transpose is what is meant. Users may also go forward through a unit, by its inputs.
    leaves, treedef = jax.tree.flatten(tangents[0])
    smooth = [not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0 for x in leaves]
    made = iter(lax.optimization_barrier([x for x, is_smooth in zip(leaves, smooth, strict=True) if is_smooth]))
    together = [next(made) if is_smooth else x for x, is_smooth in zip(leaves, smooth, strict=True)]
    return primals[0], jax.tree.unflatten(treedef, together)
