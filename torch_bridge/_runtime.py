"""When units are gathered and dropped: hooks around a module's forward and backward."""

from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ragged_jax.layout import Layout, named

from ._unit import Unit


class Runtime:
    """What the units of one model share: the order in which they run, and how far ahead they are gathered.

    The order is what the first forward pass does. From then on, while a unit computes, the next ones are gathered,
    `distance` of them, as the plan's step schedule says; backward goes the other way. No more than `limit` units
    lie gathered or on their way, those kept for backward not counted.

    Reference: Zhao et al., "PyTorch FSDP", arXiv:2304.11277, sections 3.3 and 3.4.

    Args:
      units: the root first.
      layout: what they follow.
      distance, limit: of the schedule.

    Attributes:
      missing_buffers: paths of buffers that were made on `meta` and have no values yet.
    """

    def __init__(self, units: list[Unit], layout: Layout, distance: int, limit: int):
        self.units, self.layout, self.distance, self.limit = units, layout, distance, limit
        self.missing_buffers: set[str] = set()
        self.in_backward = False
        self._order: list[Unit] = []
        self._recording: list[Unit] = []
        self._waiting: list[Unit] = []  # with reductions on their way, oldest first

    def attach(self, module: nn.Module, unit: Unit) -> None:
        """Hooks a unit to the module that it belongs to."""

        def before(_, args, kwargs):
            return self._before(unit, args, kwargs)

        def after(_, args, output):
            return self._after(unit, output)

        eager: Any = torch.compiler.disable  # graphs end there: what is gathered and dropped is no part of them
        module.register_forward_pre_hook(eager(before), with_kwargs=True, prepend=True)
        module.register_forward_hook(eager(after))

    def _before(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.in_backward and torch._C._current_graph_task_id() == -1:
            self._abandon_backward()
        if not self.in_backward and unit is self.units[0]:
            self._recording = []
            self._check_buffers()
            for other in self.units:  # whole since a pass that was not finished, they may be out of date
                other.reshard()
        unit.unshard()
        if not self.in_backward:  # not when activation checkpointing runs it again
            self._recording.append(unit)
            self._prefetch(unit, 1)
        policy = unit.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)
        if not torch.is_grad_enabled():
            return args, kwargs
        flat, spec = tree_flatten((args, kwargs))
        at = [i for i, x in enumerate(flat) if torch.is_tensor(x) and x.requires_grad]
        if at:
            for i, x in zip(at, _AfterBackward.apply(self, unit, *(flat[i] for i in at)), strict=True):
                flat[i] = x
        return tree_unflatten(flat, spec)

    def _check_buffers(self) -> None:
        if self.missing_buffers:
            raise RuntimeError(
                f"these buffers were made on `meta` and have no values yet: {named(sorted(self.missing_buffers))}"
                ". Call `init_parameters`; checkpoints hold those that are persistent"
            )

    def _after(self, unit: Unit, output: Any) -> Any:
        if unit.policy.output_dtype is not None:
            output = _cast(output, unit.policy.output_dtype)
        if self.in_backward:
            return output
        if unit is self.units[0]:
            self._order = self._recording
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()
        if torch.is_grad_enabled():
            hook = _BeforeBackward(self, unit)
            for x in tree_flatten(output)[0]:
                if torch.is_tensor(x) and x.requires_grad:
                    x.register_hook(hook)
        return output

    def before_backward(self, unit: Unit) -> None:
        """The gradient of one of a unit's outputs is there."""
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        unit.unshard()
        self._prefetch(unit, -1)

    def after_backward(self, unit: Unit) -> None:
        """The gradients of a unit's inputs are there, and so are those of its parameters."""
        unit.reduce()
        if unit.num_open_backwards <= 0:
            unit.reshard()
        self._waiting.append(unit)
        while len(self._waiting) > self.limit:
            self._waiting.pop(0).finish_reduce()

    def _abandon_backward(self) -> None:
        """After a backward that raised: what it left half done belongs to no step."""
        for unit in self.units:
            unit.num_open_backwards = 0
            unit.forget_gradients()
        self._waiting, self.in_backward = [], False

    def _end_backward(self) -> None:
        """Whatever has gradients and no inputs that need them."""
        for unit in reversed(self.units):
            unit.num_open_backwards = 0
            unit.reduce()
            unit.reshard()
        for unit in self.units:
            unit.finish_reduce()
        self._waiting = []
        self.in_backward = False

    def _prefetch(self, unit: Unit, direction: int) -> None:
        if unit not in self._order or not self.distance:
            return
        at = self._order.index(unit)
        ahead = [
            self._order[i] for k in range(1, self.distance + 1) if 0 <= (i := at + direction * k) < len(self._order)
        ]
        for other in ahead:
            busy = sum(u.is_whole for u in self.units if u.reshard_after_forward)
            if busy < self.limit:
                other.start_unshard()


class _BeforeBackward:
    """The hook on an output. Counts, so that a module called twice is not dropped between its two backwards."""

    def __init__(self, runtime: Runtime, unit: Unit):
        self._runtime, self._unit, self._done = runtime, unit, False

    def __call__(self, grad: torch.Tensor) -> None:
        if not self._done:
            self._unit.num_open_backwards += 1
        self._done = True
        self._runtime.before_backward(self._unit)


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, runtime, unit, *inputs):
        ctx.runtime, ctx.unit = runtime, unit
        return inputs

    @staticmethod
    @once_differentiable  # the weights are gone by then
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.unit.num_open_backwards -= 1
        ctx.runtime.after_backward(ctx.unit)
        return (None, None, *grads)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
