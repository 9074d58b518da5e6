"""Says where the tensors of a JAX model go."""

import sys
from typing import Any

from ..fsdp import Leaves, leaves_of
from ._routes import Kind, Routing, routing_of
from ._tensors import Rule, tensors_of


def routing(params: Any, *, route: Rule[Kind] | None = None, dims: Any = None) -> Routing:
    """Says which tensors `muon` would take, as which matrices, and which it would leave to AdamW.

    Args:
      params: a sharded or an ordinary model: a Flax NNX module or its state, a `ShardedTree`, a pytree of arrays.
      route, dims: as for `muon`.

    Example:
      >>> import jax.numpy as jnp
      >>> print(routing({"embed": jnp.ones((9, 4)), "mlp": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}}))
      adamw  embed       an embedding, shape (9, 4)
      adamw  mlp/bias    a bias, shape (8,)
      muon   mlp/kernel  a matrix, 1 of 4 x 8, shape (4, 8)
    """
    leaves = params if isinstance(params, Leaves) else leaves_of(_parameters(params))
    return routing_of(tensors_of(leaves), [leaf.path for leaf in leaves], route, dims)


def _parameters(params: Any) -> Any:
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module):
        return nnx.state(params, nnx.Param)
    return params
