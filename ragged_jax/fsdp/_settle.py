"""Gradients that are reduced before the backward pass goes on.

A compiler puts off what the layers' backward pass does not wait for, and takes a scan over layers as one operation:
what has not ended before it ends after it. The gradient of a unit beside the layers, such as the output matrix of a
language model, would lie whole, or what it is made from would, all through them. So what its reduction gives and the
gradients of its inputs are handed on together. Before a scan the reduction still runs beside the products that these
take.

With replicas that is not so: the gradients of shards are the same on all replicas, those of inputs are not, and jax
would have both differ.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from ._joined import varying


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
    groups: dict[frozenset[str], list[int]] = {}  # a barrier would make all differ over the axes that any does
    for i, x in enumerate(leaves):
        if not isinstance(x, SymbolicZero) and x.dtype != jax.dtypes.float0:
            groups.setdefault(varying(x), []).append(i)
    for at in groups.values():
        for i, x in zip(at, lax.optimization_barrier([leaves[i] for i in at]), strict=True):
            leaves[i] = x
    return primals[0], jax.tree.unflatten(treedef, leaves)
