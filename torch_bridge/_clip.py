"""Gradient clipping."""

from functools import reduce

import torch
import torch.distributed as dist
from torch import nn

from ._collectives import start_gather
from ._fully_shard import runtime_of


def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of a fully sharded module so that their total norm is at most `max_norm`.

    One gather of a number from each rank, whatever the number of parameters; a tied parameter counts once.

    Returns:
      The norm before, the same on every rank, in float32 or what gradients have that is wider.
    """
    runtime = runtime_of(module)
    grads = [slot.shard.grad for unit in runtime.units for slot in unit.slots if slot.shard.grad is not None]
    group, device = runtime.units[0].groups.shard, runtime.units[0].device
    kind = reduce(torch.promote_types, (g.dtype.to_real() for g in grads), torch.float32)
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, kind)) for g in grads if g.numel()
    ]
    here = torch.linalg.vector_norm(torch.stack([*norms, torch.zeros((), dtype=kind, device=device)]), norm_type)
    every = here.new_empty(dist.get_world_size(group))
    start_gather([every], [here.view(1)], group, None).wait()  # a maximum over ranks might lose NaN
    total = torch.linalg.vector_norm(every, norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale)
    return total
