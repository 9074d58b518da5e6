"""`Unit`: a bucket on this rank, and how its parameters become whole and sharded again."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ragged_jax.layout import Bucket, Placement, named

from ._collectives import Work, adds_parts, start_gather
from ._memory import Memory, SlabRange, allocate
from ._plan import Part
from ._reduction import Groups, Reduction, Slot, accumulate_with_hooks, add_up
from ._views import Seen, view_of
from ._whole import WholeParameter

PLACED_NUMEL = 2**16  # of smaller gradients a copy costs less than a product that is called from Python


class Unit:
    """A bucket of parameters that are gathered and reduced together.

    All slabs of one dtype lie in one allocation, sharded and gathered. Parameters are views of it: nothing is
    copied on the way in. On the way out, gradients of linear layers are computed where they are reduced, and others
    are copied once. Dropping the gathered slabs gives their memory back and keeps the views, so that autograd's
    graph is valid again when they are gathered again.

    Args:
      bucket: its layout.
      shares: parts of each slab that every rank holds, or None for one each.
      part: the module with its unsharded parameters; this rank's part of their values is copied, if they have any.
      device: where its memory is.
      groups: the ranks.
      policy: dtypes to gather, compute and reduce in.
      reshard_after_forward: whether the gathered slabs are dropped between forward and backward.
      is_brief: whether all of its gradients are made one soon after the other. If not, as in a root around other
        units, memory for all is not taken with the first.

    Attributes:
      missing: names of parameters that were made on `meta` and have no values yet.
    """

    def __init__(
        self,
        bucket: Bucket,
        shares: tuple[int, ...] | None,
        part: Part,
        device: torch.device,
        groups: Groups,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool,
        is_brief: bool = True,
    ):
        self.bucket, self.shares, self.groups, self.policy = bucket, shares, groups, policy
        self.reshard_after_forward = reshard_after_forward
        self.requires_gradient_sync = True
        self.is_held = False  # whole until further notice
        self.num_open_backwards = 0  # calls of the module whose backward has begun and not ended
        self.device, self._is_brief = device, is_brief
        self.missing = {name for name, x in part.tensors.items() if x.is_meta}
        self._gathering: list[Work] = []
        self._adds_up = False  # whether passes without a reduction came before, on all ranks alike
        self._reducing: list[Reduction] = []
        self._held: dict[nn.Parameter, torch.Tensor] = {}  # of shards with hooks, what a pass has come to so far
        self._is_whole = self._is_shown = False  # the second: the module shows them
        rank, size = dist.get_rank(groups.shard), dist.get_world_size(groups.shard)
        dtypes = self._compute_dtype, policy.reduce_dtype, adds_parts(device, shares)
        self._memories = allocate(bucket, shares or (1,) * size, rank, self.device, *dtypes)
        with torch.no_grad():
            self._slots = [(m, [*self._fill(m, part)]) for m in self._memories]
        self._shown = [  # looked at before every gather: nothing but what is compared
            (slot.shard, slot.shard.data_ptr(), module._parameters, attribute, slot.name)
            for slot in self.slots
            for module, attribute in slot.uses
        ]
        for memory in self._memories:
            memory.drop()

    def _compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.policy.param_dtype or dtype if dtype.is_floating_point else dtype

    def _fill(self, memory: Memory, part: Part) -> Iterator[Slot]:
        for slab in memory.slabs:
            whole = slab.whole(memory.view)
            for placement in slab.slab.placements:
                name = placement.tensor.name
                tensor, seen = part.tensors[name], part.seen[name]
                shard = nn.Parameter(slab.piece(memory.shards.data, placement), tensor.requires_grad)
                view = view_of(whole, placement, seen)
                placed = self._is_brief and view.dtype == memory.gradient_dtype and view.ndim == 2
                if placed and view.numel() >= PLACED_NUMEL:
                    full = WholeParameter(view, tensor.requires_grad)
                    full.place = partial(_place, memory, slab, placement, seen)
                else:
                    full = nn.Parameter(view, tensor.requires_grad)
                slot = Slot(placement, slab, seen, part.uses[name], shard, full)
                if not tensor.is_meta:
                    slot.take(tensor)
                slot.show(slot.shard)
                yield slot

    @cached_property
    def slots(self) -> list[Slot]:
        """Its parameters."""
        return [slot for _, slots in self._slots for slot in slots]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's parts, padding included."""
        return sum(memory.shards.nbytes for memory in self._memories)

    @property
    def whole_nbytes(self) -> int:
        """Bytes that the gathered slabs take up now."""
        return sum(memory.wholes.untyped_storage().nbytes() for memory in self._memories)

    @property
    def is_whole(self) -> bool:
        """Whether the parameters are whole or on their way."""
        return self._is_whole or bool(self._gathering)

    def on_gradient(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Has a function called whenever autograd adds to the gradient of a whole parameter."""
        for slot in self.slots:
            if slot.whole.is_floating_point() or slot.whole.is_complex():
                trained = slot.whole.requires_grad
                slot.whole.requires_grad_(True).register_post_accumulate_grad_hook(hook)
                slot.whole.requires_grad_(trained)

    def start_unshard(self) -> None:
        """Starts to gather, unless the parameters are whole or on their way."""
        if self.is_whole:
            return
        self._check_values()
        self._check_shards()
        with torch.no_grad(), torch.profiler.record_function(f"unshard:{self.bucket.name or 'root'}"):
            for memory in self._memories:
                memory.take()
                self._gathering += self._start_gather(memory, memory.wholes)

    def _check_values(self) -> None:
        """Raises RuntimeError when parameters have no values yet."""
        if self.missing:
            raise RuntimeError(
                f"these parameters were made on `meta` and have no values yet: {named(sorted(self.missing))}. "
                "Restore a checkpoint, or call `init_parameters`"
            )

    def _check_shards(self) -> None:
        """Raises RuntimeError when parameters are no longer views of the unit's memory."""
        lost = {
            name
            for shard, address, parameters, attribute, name in self._shown
            if shard.data_ptr() != address or parameters.get(attribute) is not shard
        }
        if lost:
            names = ", ".join(sorted(lost))
            raise RuntimeError(
                f"these parameters were replaced or moved after `fully_shard`: {names}. Convert the module "
                "(`.to`, `.bfloat16()`) before it is sharded; load values inside `unsharded(module, writeback=True)`"
            )

    def _start_gather(self, memory: Memory, wholes: torch.Tensor) -> list[Work]:
        slabs = [slab for slab in memory.slabs if slab.numel]
        if not slabs:
            return []
        shards = [slab.shard(memory.shards) for slab in slabs]
        if wholes.dtype != memory.shards.dtype or self.shares is not None:  # cast, or sent from where it will lie
            mine = [slab.whole(wholes)[slab.low : slab.high] for slab in slabs]
            for place, shard in zip(mine, shards, strict=True):
                place.copy_(shard)
            shards = mine
        return [start_gather([slab.whole(wholes) for slab in slabs], shards, self.groups.shard, self.shares)]

    def unshard(self) -> None:
        """Makes the module's parameters whole."""
        self.start_unshard()
        if not self._is_whole:
            self._wait()
            for memory in self._memories:
                memory.show()
            self._is_whole = True
        if not self._is_shown:
            for slot in self.slots:
                slot.whole.requires_grad_(slot.shard.requires_grad)
                slot.show(slot.whole)
            self._is_shown = True

    def hide(self) -> None:
        """Has the module show this rank's parts, unless the parameters are held; what is gathered stays."""
        if self._is_shown and not self.is_held:
            for slot in self.slots:
                slot.show(slot.shard)
            self._is_shown = False

    def reshard(self) -> None:
        """Drops the whole parameters, unless they are held; the module shows this rank's parts again."""
        if self.is_held:
            return
        self._wait()  # for what was gathered ahead and is not needed
        self.hide()
        self._is_whole = False
        for memory in self._memories:
            memory.drop()

    def _wait(self) -> None:
        for work in self._gathering:
            work.wait()
        self._gathering = []

    def gather_masters(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Every parameter whole, in the dtype of its shard, in memory of its own."""
        self._check_values()
        with torch.no_grad():
            for memory, slots in self._slots:
                wholes = torch.empty(memory.wholes.numel(), dtype=memory.shards.dtype, device=self.device)
                for work in self._start_gather(memory, wholes):
                    work.wait()
                for slot in slots:
                    yield slot, slot.view(slot.slab.whole(wholes)).clone(memory_format=torch.contiguous_format)

    def write_back(self) -> None:
        """Takes its part of what was changed in the whole parameters; the rest is not rounded to their dtype."""
        with torch.no_grad():
            for memory in self._memories:
                for slab in memory.slabs:
                    shard, mine = slab.shard(memory.shards), slab.whole(memory.wholes)[slab.low : slab.high]
                    shard.copy_(torch.where(mine == shard.to(mine.dtype), shard, mine.to(shard.dtype)))

    def reduce(self) -> None:
        """Starts to reduce the gradients that the whole parameters have, and takes them away from there.

        Those of all dtypes, if there are any: other ranks may have gradients of other parameters.
        """
        trained = [
            (memory, some)
            for memory, slots in self._slots
            if (some := [slot for slot in slots if slot.whole.requires_grad and slot.slab.numel])
        ]
        # What a rank sends must not depend on which parameters it used.
        adds_up, self._adds_up = self._adds_up, not self.requires_gradient_sync
        totals = any(memory.total is not None for memory in self._memories)
        if not totals and all(slot.whole.grad is None for _, slots in trained for slot in slots):
            return
        with torch.no_grad(), torch.profiler.record_function(f"reduce:{self.bucket.name or 'root'}"):
            for memory, slots in trained:
                if adds_up or self._adds_up:
                    add_up(memory, slots)
                if self.requires_gradient_sync:
                    self._reducing.append(Reduction(memory, slots, self.groups, self.shares))

    def finish_reduce(self) -> None:
        """Waits for the reductions and adds their results to the gradients of the shards."""
        with torch.no_grad():
            for reduction in self._reducing:
                reduction.finish(self._held)
        self._reducing = []

    def end_backward(self) -> None:
        """Finishes, and calls the hooks of the shards, once for each pass."""
        self.finish_reduce()
        held, self._held = self._held, {}
        with torch.no_grad():
            for shard, gradient in held.items():
                accumulate_with_hooks(shard, gradient)

    def forget_gradients(self) -> None:
        """Drops gradients that are not reduced yet, and the results of reductions that are on their way."""
        for reduction in self._reducing:
            reduction.wait()
        self._reducing, self._held, self._adds_up = [], {}, False
        for slot in self.slots:
            slot.whole.grad = None
        for memory in self._memories:
            memory.forget_gradients()


def _place(memory: Memory, slab: SlabRange, placement: Placement, seen: Seen) -> torch.Tensor:
    """Where the gradient of a parameter is to be reduced from."""
    return view_of(slab.whole(memory.gradients), placement, seen)
