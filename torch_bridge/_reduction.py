"""One reduction of a unit's gradients: packed where they are not yet, summed over the ranks, added to the shards'."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ragged_jax.layout import Placement

from ._collectives import Work, start_reduce
from ._memory import Memory, SlabRange
from ._views import Seen, stored_part, view_of


class Groups:
    """The ranks that take part.

    They are torch's own, and are not kept alive: a group that a module holds to the end of a program takes gloo's
    threads down with it, and the process is aborted after all its work.

    Args:
      shard: those that share the model.
      replicate: those that hold the same part of it, or None.
      mesh: where they come from, if it was given.
    """

    def __init__(
        self, shard: dist.ProcessGroup, replicate: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
    ):
        self._shard, self._replicate = ref(shard), None if replicate is None else ref(replicate)
        self.mesh = mesh

    @property
    def shard(self) -> dist.ProcessGroup:
        return _alive(self._shard)

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        return None if self._replicate is None else _alive(self._replicate)

    @property
    def each(self) -> list[dist.ProcessGroup]:
        """Those of shards, and those of replicas if there are any. Through both every rank hears of every other."""
        return [self.shard] if self.replicate is None else [self.shard, self.replicate]

    @property
    def num_ranks(self) -> int:
        return math.prod(map(dist.get_world_size, self.each))


def _alive(group: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    if (found := group()) is None:
        raise RuntimeError("the process group of this module was destroyed")
    return found


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of a unit.

    Attributes:
      placement: where it lies in its slab.
      slab: where that lies.
      seen: how the layout's tensor becomes the parameter.
      uses: the modules that have it, with the attribute's name; several when it is tied.
      shard: what this rank holds of it, 1-D in stored order: what the module shows and optimizers update.
      whole: the parameter as a view of the gathered slab: what the module shows while it computes.
    """

    placement: Placement
    slab: SlabRange
    seen: Seen
    uses: list[tuple[nn.Module, str]]
    shard: nn.Parameter
    whole: nn.Parameter

    @property
    def name(self) -> str:
        """What the layout calls it."""
        return self.placement.tensor.name

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter in a whole slab."""
        return view_of(whole, self.placement, self.seen)

    def take(self, tensor: torch.Tensor) -> None:
        """Sets this rank's part to that of a whole tensor."""
        with torch.no_grad():
            part = stored_part(tensor.detach(), self.placement, self.seen, *self.slab.local(self.placement))
            self.shard.data.copy_(part)

    def show(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.uses:
            module._parameters[attribute] = parameter


class Reduction:
    """The gradients of the slabs of one dtype, on their way.

    A slab goes whole, with zeros where a parameter has no gradient: of a unit that all ranks run, each may leave
    other parameters unused.

    Args:
      memory: of the slabs.
      slots: the parameters to reduce; their whole gradients are taken away.
      groups: the ranks.
      shares: parts of a slab that each rank holds, or None for one each.
    """

    def __init__(
        self,
        memory: Memory,
        slots: Sequence[Slot],
        groups: Groups,
        shares: tuple[int, ...] | None,
    ):
        self._memory, self._slots, self._groups = memory, slots, groups
        scale = 1 / groups.num_ranks
        # A sum over many ranks overflows float16, so there the mean is taken first.
        before, self._after = (scale, 1.0) if memory.reduce_dtype == torch.float16 else (1.0, scale)
        used = list(dict.fromkeys(slot.slab for slot in slots))
        wholes = self._packed(used)
        self._shards = wholes.new_empty(memory.shards.numel(), dtype=memory.reduce_dtype)
        if before != 1:
            wholes.mul_(before)
        self._reduced = [slab.shard(self._shards) for slab in used]
        packed = [slab.whole(wholes) for slab in used]
        self._work: Work | None = start_reduce(self._reduced, packed, groups.shard, shares)

    def _packed(self, slabs: list[SlabRange]) -> torch.Tensor:
        """The gradients in one buffer, taken away from where they were."""
        if self._memory.total is not None:
            add_up(self._memory, self._slots)
            wholes = self._memory.total
            self._memory.forget_gradients()
            return wholes
        wholes = self._memory.gradients
        used = {id(slot.placement): slot for slot in self._slots if slot.whole.grad is not None}
        for slab in slabs:
            whole, end = slab.whole(wholes), 0
            for placement in slab.slab.placements:
                if (slot := used.get(id(placement))) and (grad := slot.whole.grad) is not None:
                    whole[end : placement.offset].zero_()
                    grad = _dense(grad)
                    if not self._memory.has_gradient(grad):
                        slot.view(whole).copy_(grad)
                    end = placement.stop
            whole[end:].zero_()
        for slot in self._slots:
            slot.whole.grad = None
        self._memory.forget_gradients()
        return wholes

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None  # and with it the packed gradients

    def finish(self, held: dict[nn.Parameter, torch.Tensor]) -> None:
        """Waits, and adds the means to the gradients of the shards, or to what is held for those with hooks."""
        self.wait()
        if self._groups.replicate is not None:
            for shard in self._reduced:
                dist.all_reduce(shard, group=self._groups.replicate)
        dtype = self._memory.shards.dtype
        means = self._shards.to(torch.promote_types(dtype, self._shards.dtype))
        if self._after != 1:  # before a sum that a narrower dtype does not hold is cast to it
            means.mul_(self._after)
        means = means.to(dtype)
        for slot in self._slots:
            piece = slot.slab.piece(means, slot.placement)
            if has_hooks(slot.shard):
                held[slot.shard] = held[slot.shard].add_(piece) if slot.shard in held else piece
            else:
                accumulate(slot.shard, piece)


def add_up(memory: Memory, slots: Sequence[Slot]) -> None:
    """Adds whole gradients to those of earlier passes, in the dtype in which ranks' gradients are summed.

    Where that is no wider than their own, autograd adds them up.
    """
    own = memory.wholes.dtype
    if torch.promote_types(own, memory.reduce_dtype) == own:
        return
    total = memory.take_total()
    for slot in slots:
        if (grad := slot.whole.grad) is not None:
            slot.view(slot.slab.whole(total)).add_(_dense(grad))
            slot.whole.grad = None
    memory.drop_gradients()


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody wants to be called with its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Adds to the gradient of a parameter."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def accumulate_with_hooks(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """The same, and calls hooks as autograd would: before, when they may give another gradient, and after."""
    for hook in [*(parameter._backward_hooks or {}).values()]:
        given = hook(gradient)
        gradient = gradient if given is None else given
    accumulate(parameter, gradient)
    for hook in [*(parameter._post_accumulate_grad_hooks or {}).values()]:
        hook(parameter)
