"""AdamW over a unit's memory: one kernel for all parameters that lie together."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from ._joined import Row, joined, zeros_beside
from ._sharded import ShardedOptimizer, StateTensor, by_step, flat

_MOMENTS = (("exp_avg", "mu"), ("exp_avg_sq", "nu"))  # names of torch, and of optax
_FUSED = ("cpu", "cuda")  # where torch has the kernel


class AdamW(ShardedOptimizer):
    """`torch.optim.AdamW` that updates all parameters which lie together in memory at once.

    Takes the parameters of a fully sharded module, ordinary ones, and groups of both. State has the names of
    `torch.optim.AdamW`; `named_state` gives it those of `optax.adamw`.

    Args:
      params: parameters, named parameters or groups.
      lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; each may differ by group.

    Example:
      >>> model = torch.nn.Linear(4, 4)
      >>> optimizer = AdamW(model.parameters(), lr=1e-2)
      >>> model(torch.ones(4)).sum().backward()
      >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _make_state(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        make_adamw_state(self.state, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        adamw_update(group, [(p, self.state[p]) for p in params])

    def _named(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> Iterable[StateTensor]:
        return named_moments(self, p, state, "0")


def make_adamw_state(states: Any, params: list[torch.Tensor]) -> None:
    for dtype in {p.dtype for p in params}:
        some = [p for p in params if p.dtype == dtype]
        for key, _ in _MOMENTS:
            zeros = zeros_beside([flat(p) for p in some], [p.numel() for p in some], dtype)
            for p, x in zip(some, zeros, strict=True):
                states[p][key] = x.view(p.shape)


def adamw_update(group: dict[str, Any], states: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
    """One step of some parameters."""
    own = dict(states)
    for step, params in by_step(states).items():
        rows: list[Row] = [
            (p.detach(), p.grad.detach(), *(own[p][key] for key, _ in _MOMENTS))
            for p in params
            if p.grad is not None and p.numel()
        ]
        flat_rows = [tuple(x.view(-1) for x in row) for row in rows if all(x.is_contiguous() for x in row)]
        rows = [*joined(flat_rows), *(row for row in rows if not all(x.is_contiguous() for x in row))]
        if not rows:
            continue
        values, grads, first, second = (list(column) for column in zip(*rows, strict=True))
        fused = all(x.is_floating_point() and x.device.type in _FUSED for x in values)
        steps = [torch.full((), float(step - 1), device=x.device if fused else "cpu") for x in values]
        beta1, beta2 = group["betas"]
        adamw(
            values, grads, first, second, [], steps, fused=fused, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
        )  # fmt: skip


def named_moments(
    optimizer: ShardedOptimizer, p: torch.Tensor, state: dict[str, torch.Tensor], prefix: str
) -> Iterable[StateTensor]:
    local = optimizer.local(p)
    for key, moment in _MOMENTS:
        yield StateTensor(
            local.name,
            f"{prefix}/{moment}",
            "",
            local.shape,
            local.start,
            local.stop,
            local.placement.axis_order,
            None,
            state[key].view(-1),
        )
