"""Which parameters of a torch model go to Muon, as which matrices, and which to AdamW."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ragged_jax.optim._forms import MatrixDims
from ragged_jax.optim._routes import Kind, Routing, routing_of
from ragged_jax.optim._tensor import Rule, Tensor, decide

from ._sharded import Local, local_of


def tensor_of(local: Local, leaf: int = 0) -> Tensor:
    """A parameter as the rules of routing see it."""
    spec = local.placement.tensor
    placement = None if local.home is None else local.placement
    return Tensor(spec.name, spec.shape, spec.dtype, leaf, placement)


def dims_of(tensor: Tensor, rule: Any = None) -> Any:
    """The `MatrixDims` of a tensor: what the rule says, or what its name and shape suggest.

    Weights of torch have their outputs first. Those of convolutions (three dims and more, `conv` in the path)
    multiply over all other dims; of all others the last two dims are matrices, and the dims before them a batch.
    """
    if rule is not None and (dims := decide(rule, tensor)) is not None:
        return dims
    ndim = len(tensor.shape)
    if ndim >= 3 and any("conv" in part for part in tensor.name.lower().split("/")):
        return MatrixDims(tuple(range(1 - ndim, 0)), -ndim)
    return MatrixDims(-1, -2)


def routing(params: nn.Module | Iterable[Any], *, route: Rule[Kind] | None = None, dims: Any = None) -> Routing:
    """Says which tensors `Muon` would take, as which matrices, and which it would leave to AdamW.

    Args:
      params: a module, sharded or not, or parameters as an optimizer takes them.
      route, dims: as for `Muon`.

    Example:
      >>> model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "up": nn.Linear(4, 8)})
      >>> print(routing(model))
      adamw  embed/weight  an embedding, shape (9, 4)
      muon   up/weight     a matrix, 1 of 4 x 8, shape (8, 4)
      adamw  up/bias       a bias, shape (8,)
    """
    named = params.named_parameters() if isinstance(params, nn.Module) else params
    locals_ = [local_of(x, "") if isinstance(x, torch.Tensor) else local_of(x[1], x[0]) for x in named]
    return routing_of_locals(locals_, route, dims)


def routing_of_locals(locals_: list[Local], route: Any, dims: Any) -> Routing:
    tensors = [tensor_of(local, i) for i, local in enumerate(locals_)]
    return routing_of(tensors, [tensor.name for tensor in tensors], route, dims, dims_of)
