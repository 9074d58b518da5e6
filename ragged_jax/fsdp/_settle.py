"""Gradients that are reduced before the backward pass goes on.

A scan is one operation to the compiler's scheduler: what has not ended before it ends after it. The gradient of a
unit that is called beside a scan, such as the output matrix of a language model, would lie whole, or what it is made
from would, all through the backward pass of the layers. So what its reduction gives and the gradients of its inputs
are handed on together. The reduction still runs beside the products that these take.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def settling(run: Callable) -> Callable:
    """`run`, a function of shards and inputs, with the gradients of both handed on together."""

    def settled(*args: Any) -> Any:
        return run(*_together(args))

    return settled


@jax.custom_vjp
def _together(args: Any) -> Any:
    return args


def _forward(args):
    return args, None


def _backward(_, grads):
    leaves, treedef = jax.tree.flatten(grads)
    smooth = [x.dtype != jax.dtypes.float0 for x in leaves]
    made = iter(lax.optimization_barrier([x for x, is_smooth in zip(leaves, smooth, strict=True) if is_smooth]))
    return (jax.tree.unflatten(treedef, [next(made) if s else x for x, s in zip(leaves, smooth, strict=True)]),)


_together.defvjp(_forward, _backward)
