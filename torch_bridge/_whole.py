"""`WholeParameter`: the gradient of a linear layer is computed where it will be reduced.

A weight's gradient is a matrix product. Autograd would allocate it, and it would be copied into what is reduced. Here
the product is written there, and added there when a weight is used again. Gradients of all else are autograd's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only


class WholeParameter(nn.Parameter):
    """A parameter that is a view of a gathered slab.

    Attributes:
      place: gives the memory that its gradient is to be written to, of its own shape. None leaves it to autograd.

    Reference: the fused accumulation of weight gradients in Megatron-LM (Narayanan et al., arXiv:2104.04473).
    """

    place: Callable[[], torch.Tensor] | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(issubclass(cls, kind) for kind in types):  # another subclass is to see an ordinary parameter
            args, kwargs = tree_map_only(cls, _as_tensor, (args, kwargs))
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and torch.is_grad_enabled():
                return _linear(*args, **kwargs)
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


def _as_tensor(x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    placed = isinstance(weight, WholeParameter) and weight.place is not None and weight.requires_grad
    placed = placed and (bias is None or bias.ndim == 1)
    return (_Linear.apply if placed and _is_plain(input, weight) else F.linear)(input, weight, bias)


def _is_plain(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a linear layer is nothing but matrix products, of strided tensors of one dtype."""
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.layout == torch.strided
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.leaf = weight  # what was saved may come back as another tensor
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        with torch._C.DisableTorchFunctionSubclass():
            rows = _rows(grad)
            return (
                grad @ weight.conj() if for_x else None,
                _accumulate(ctx, rows.mT, _rows(x).conj()) if for_weight else None,
                rows.sum(0) if for_bias else None,
            )


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _accumulate(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """Adds a product to the gradient of the weight; returns it instead where autograd is to have it."""
    if torch.is_grad_enabled() or ctx.leaf._backward_hooks:  # `create_graph`, or somebody wants to see it
        return left @ right
    try:
        if not torch._C._will_engine_execute_node(ctx.next_functions[1][0]):
            return None
    except RuntimeError:  # `torch.autograd.grad` asks for this very gradient
        return left @ right
    if ctx.leaf.grad is None:
        ctx.leaf.grad = torch.mm(left, right, out=ctx.leaf.place())
    else:
        ctx.leaf.grad.addmm_(left, right)
    return None
