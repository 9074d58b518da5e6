"""When units are gathered and dropped: hooks around a module's forward and backward."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from ragged_jax.layout import Layout, named

from ._reduction import Slot
from ._stored import Stored
from ._trees import lend_tensors, map_tensors, tensors_in
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
      bare_buffers: those that were made on `meta`, by path.

    Attributes:
      missing_buffers: paths of buffers that were made on `meta` and have no values yet.
    """

    def __init__(
        self, units: list[Unit], layout: Layout, distance: int, limit: int, bare_buffers: Mapping[str, torch.Tensor]
    ):
        self.units, self.layout, self.distance, self.limit = units, layout, distance, limit
        self._bare_buffers, self.missing_buffers = bare_buffers, set(bare_buffers)
        # Of the pass that runs, or of the last one if that raised. Autograd holds it no longer than the pass.
        self.backward: weakref.ref[Any] | None = None
        self._order: list[Unit] = []
        self._recording: list[Unit] = []
        self._waiting: list[Unit] = []  # with reductions on their way, oldest first
        self._recomputed: list[Unit] = []  # by activation checkpointing, and whole since

    @cached_property
    def slots(self) -> dict[int, Slot]:
        """The parameters, by the id of what a module shows of them: this rank's part, or the whole."""
        return {id(x): slot for unit in self.units for slot in unit.slots for x in (slot.shard, slot.whole)}

    @property
    def in_backward(self) -> bool:
        return self.backward is not None and self.backward() is not None and torch._C._current_graph_task_id() != -1

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Hooks the units to the modules that they belong to, in the same order."""
        for module, unit in zip(modules, self.units, strict=True):
            hooks = _Around(self, unit, Stored(module, set(modules)))
            module.register_forward_pre_hook(_Hook(hooks.before), with_kwargs=True, prepend=True)
            module.register_forward_hook(_Hook(hooks.after))
            module.register_forward_hook(_Hook(hooks.give_back), always_call=True)
            unit.on_gradient(_weakly(self.begin_backward))

    def before_forward(self, unit: Unit) -> None:
        """A unit's module is called."""
        self._abandon_failed_backward()
        again = self.in_backward  # by activation checkpointing
        self._drop_recomputed()
        if not again and unit is self.units[0]:
            self._recording = []
            self.notice_values()
            self._check_buffers()
            for other in self.units:  # whole since a pass that was not finished, they may be out of date
                other.reshard()
        unit.unshard()
        if not again:
            self._recording.append(unit)
            self._prefetch(unit, 1)

    def after_forward(self, unit: Unit) -> None:
        """It returns."""
        if self.in_backward:
            self._recomputed.append(unit)
            return
        if unit is self.units[0]:
            self._order = self._recording
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.reshard()
        unit.hide()  # what is kept for backward is not what optimizers, `zero_grad` and state dicts are to find

    def _drop_recomputed(self) -> None:
        """A checkpoint may span many units: each is gathered again for its own backward, which has not begun."""
        for unit in self._recomputed:
            if unit.reshard_after_forward and not unit.num_open_backwards:
                unit.reshard()
        self._recomputed = []

    def notice_values(self) -> None:
        """What was made on `meta` has values if it was written since: `load_state_dict` and torch's checkpoints do.

        All ranks call it. One without elements of a tensor cannot see that it was written, so they tell each other.
        """
        bare = [(unit, slot) for unit in self.units for slot in unit.slots if slot.name in unit.missing]
        if bare:
            written = torch.tensor([min(1, slot.shard._version) for _, slot in bare], device=self.units[0].device)
            for group in self.units[0].groups.each:
                dist.all_reduce(written, dist.ReduceOp.MAX, group=group)
            for (unit, slot), is_written in zip(bare, written.tolist(), strict=True):
                unit.missing -= {slot.name} if is_written else set()
        self.missing_buffers -= {path for path in self.missing_buffers if self._bare_buffers[path]._version}

    def _check_buffers(self) -> None:
        if self.missing_buffers:
            raise RuntimeError(
                f"these buffers were made on `meta` and have no values yet: {named(sorted(self.missing_buffers))}"
                ". Call `init_parameters`; checkpoints hold those that are persistent"
            )

    def begin_backward(self) -> None:
        """The first gradient of a pass is there."""
        self._abandon_failed_backward()
        if not self.in_backward:

            def end():
                self._end_backward()

            Variable._execution_engine.queue_callback(end)
            self.backward = weakref.ref(end)

    def before_backward(self, unit: Unit) -> None:
        """The gradient of one of a unit's outputs is there."""
        self.begin_backward()
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

    def _abandon_failed_backward(self) -> None:
        """After a pass that raised: what it left half done belongs to no step."""
        if self.backward is None or self.in_backward:
            return
        for unit in self.units:
            unit.num_open_backwards = 0
            unit.forget_gradients()
            unit.reshard()
        self._waiting, self._recomputed, self.backward = [], [], None

    def _end_backward(self) -> None:
        """Whatever has gradients and no inputs that need them."""
        for unit in reversed(self.units):
            unit.num_open_backwards = 0
            unit.reduce()
            unit.reshard()
        for unit in self.units:
            unit.end_backward()
        self._waiting, self._recomputed, self.backward = [], [], None

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


class _Around:
    """The hooks around a module's forward.

    Args:
      runtime: of the model.
      unit: the module's.
      stored: what it keeps.
    """

    def __init__(self, runtime: Runtime, unit: Unit, stored: Stored):
        self._runtime, self._unit, self._stored = runtime, unit, stored
        self._hooked = WeakTensorKeyDictionary()  # of what is kept from one forward to the next
        self._lent: list[list[Callable[[], None]]] = []  # for each call that runs, what ends its loans

    @property
    def _is_inner(self) -> bool:
        """Whether the module's forward has called the module itself."""
        return len(self._lent) > 1

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._lent.append([])
        if not self._is_inner:
            self._runtime.before_forward(self._unit)
        policy = self._unit.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            args, kwargs = self._lend(_to(policy.param_dtype), (args, kwargs))
        if not torch.is_grad_enabled():
            return args, kwargs
        found = list({id(x): x for x in tensors_in((args, kwargs)) if x.requires_grad}.values())
        if not found:
            return args, kwargs
        made = dict(zip(map(id, found), _AfterBackward.apply(self._runtime, self._unit, *found), strict=True))
        return self._lend(lambda x: made.get(id(x), x), (args, kwargs))

    def _lend(self, function: Callable[[torch.Tensor], torch.Tensor], inputs: Any) -> Any:
        inputs, give_back = lend_tensors(function, inputs)
        if give_back is not None:
            self._lent[-1].append(give_back)
        return inputs

    def give_back(self, *_: Any) -> None:
        """The module has returned, or raised."""
        for give_back in reversed(self._lent.pop() if self._lent else []):
            give_back()

    def after(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._unit.policy.output_dtype is not None:
            output = map_tensors(_to(self._unit.policy.output_dtype), output)
        if not self._is_inner:
            self._runtime.after_forward(self._unit)
            _check_memory(output, self._unit)
        if torch.is_grad_enabled():
            hook = _BeforeBackward(self._runtime, self._unit)
            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(hook)
            for x in self._stored.with_graph():
                if x not in self._hooked:
                    self._hooked[x] = x.register_hook(hook)
        return output


def _check_memory(output: Any, unit: Unit) -> None:
    """Raises RuntimeError where a unit returns a parameter that was dropped: reading it would end the process."""
    for x in tensors_in(output):
        is_plain = isinstance(x, nn.Parameter) or (type(x) is torch.Tensor and x.layout == torch.strided)
        if is_plain and x.numel() and not x.untyped_storage().nbytes():
            raise RuntimeError(
                f"unit {unit.bucket.name!r} returns a parameter, or a view of one, which is dropped when it returns; "
                "return a `clone()` of it, or what is computed from it"
            )


class _Hook:
    """A function that modules have as a hook, and that no copy of them can have: it would drive the first one."""

    def __init__(self, function: Any):
        self._function = torch.compiler.disable(function)  # what is gathered and dropped is no part of graphs

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a fully sharded module cannot be deep-copied or pickled: its hooks and its memory are its own. For a "
            "second model, copy the module before `fully_shard`, shard the copy with `plan=get_layout(module)`, and "
            "load `module.state_dict()` into it: no rank needs more than its own parts. To save, use "
            "`Checkpointer`, or `full_state_dict` for whole tensors"
        )


class _BeforeBackward:
    """The hook on an output. Counts, so that a module called twice is not dropped between its two backwards."""

    def __init__(self, runtime: Runtime, unit: Unit):
        self._runtime, self._unit = runtime, unit
        self._counted: Any = None  # in which pass: a graph that is retained goes through several

    def __call__(self, grad: torch.Tensor) -> None:
        self._runtime.before_backward(self._unit)
        if self._counted is not self._runtime.backward:
            self._unit.num_open_backwards += 1
            self._counted = self._runtime.backward


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, runtime, unit, *inputs):
        ctx.runtime, ctx.unit = runtime, unit
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    @once_differentiable  # the weights are gone by then
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.unit.num_open_backwards -= 1
        ctx.runtime.after_backward(ctx.unit)
        return (None, None, *grads)


def _weakly(method: Any) -> Any:
    """Calls a method of an object that is not kept alive for it."""
    held = weakref.WeakMethod(method)

    def call(*_):
        if (found := held()) is not None:
            found()

    return call


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.to(dtype) if x.is_floating_point() else x
