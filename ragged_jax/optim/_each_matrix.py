"""A function of matrices on the stored elements that hold them."""

from typing import Any

import jax
import jax.numpy as jnp

from ..fsdp._slabs import from_stored, to_stored
from ._forms import Form


def each_matrix(form: Form, function: Any, stored: jax.Array) -> jax.Array:
    """`function` of every `[batch, rows, cols]`, on stored elements."""
    x = from_stored(form.item, stored)
    rest = [d for d in range(x.ndim) if d not in form.reduction + form.output]
    order = (*rest, *form.reduction, *form.output)
    inner = tuple(x.shape[d] for d in order)
    x = x.transpose(order).reshape(-1, form.rows, sum(form.columns))
    ends = [sum(form.columns[: i + 1]) for i in range(len(form.columns))]
    if len(set(form.columns)) == 1 and len(form.columns) > 1:  # one batch
        parts = x.reshape(-1, form.rows, len(form.columns), form.columns[0]).swapaxes(1, 2)
        x = function(parts).swapaxes(1, 2).reshape(x.shape)
    elif len(form.columns) > 1:
        x = jnp.concatenate(
            [function(x[..., end - width : end]) for end, width in zip(ends, form.columns, strict=True)], -1
        )
    else:
        x = function(x[0])[None] if x.shape[0] == 1 else function(x)
    x = x.reshape(inner).transpose([order.index(d) for d in range(len(order))])
    return to_stored(form.item, x)
