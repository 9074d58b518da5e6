"""Gradient clipping."""

import torch
import torch.distributed as dist
from torch import nn

from ._fully_shard import runtime_of


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of a fully sharded module so that their total norm is at most `max_norm`.

    One all-reduce, whatever the number of parameters; a tied parameter counts once.

    Returns:
      The norm before, the same on every rank.
    """
    runtime = runtime_of(module)
    grads = [slot.shard.grad for unit in runtime.units for slot in unit.slots if slot.shard.grad is not None]
    group = runtime.units[0].groups.shard
    device = runtime.units[0].device
    if norm_type == float("inf"):
        total = torch.stack(
            [g.abs().max().float() for g in grads if g.numel()] or [torch.zeros((), device=device)]
        ).max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    else:
        norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in grads]
        total = torch.stack([*norms, torch.zeros((), device=device)]).pow(norm_type).sum()
        dist.all_reduce(total, group=group)
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return total
