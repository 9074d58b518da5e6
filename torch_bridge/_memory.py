"""The memory of a bucket on one rank: for each dtype one allocation of shards, of whole slabs, and of gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from ragged_jax.layout import Bucket, Placement, Slab

from ._dtypes import torch_dtype
from ._torch_private import set_version

_DROPPED = 10**9  # a version that no tensor has
ALIGN_NBYTES = 64  # of a slab's start: what dlpack and vector units ask for


@dataclass(frozen=True)
class SlabRange:
    """Where a slab lies in the buffers of its dtype. All numbers are in elements.

    Attributes:
      slab: its layout.
      low, high: this rank's part of the slab.
      numel: of the whole slab.
      start, shard_start: where it starts in the buffer of whole slabs, and its part in that of shards.
    """

    slab: Slab
    low: int
    high: int
    numel: int
    start: int
    shard_start: int

    def whole(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.start + self.numel]

    def shard(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.shard_start : self.shard_start + self.high - self.low]

    def local(self, placement: Placement) -> tuple[int, int]:
        """Which elements of a tensor, in stored order, lie on this rank."""
        numel = placement.tensor.numel
        low, high = (min(max(end - placement.offset, 0), numel) for end in (self.low, self.high))
        return low, high

    def piece(self, buffer: torch.Tensor, placement: Placement) -> torch.Tensor:
        """This rank's part of a tensor in a buffer of shards."""
        low, high = self.local(placement)
        start = placement.offset + low - self.low if low < high else 0
        return self.shard(buffer)[start : start + high - low]


class Memory:
    """The slabs of one dtype of a bucket.

    Attributes:
      slabs: where each lies.
      shards: the buffer of this rank's parts, zero where no tensor lies.
      wholes: the buffer of gathered slabs, in the dtype of the computation. Its memory comes and goes; it has none
        at first.
      view: the same, for parameters to be views of. Its version counter is its own, as a gather must not look like a
        change in place. But while the slabs are dropped it has another version, so that autograd refuses to read
        what it saved of them.
      gradient_dtype, reduce_dtype: in which whole gradients are sent, and summed.
      total: of whole gradients of passes without a reduction, where autograd would add them up in a narrower dtype.
    """

    def __init__(
        self,
        slabs: list[SlabRange],
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
    ):
        self.slabs, self.gradient_dtype, self.reduce_dtype = slabs, gradient_dtype, reduce_dtype
        self._gradients: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        last = slabs[-1]
        self.shards = torch.zeros(last.shard_start + last.high - last.low, dtype=dtype, device=device)
        self.wholes = torch.empty(last.start + last.numel, dtype=compute_dtype, device=device)
        self.view = self.wholes.data
        self._version: int | None = None  # while they are dropped, the one to go back to

    def take(self) -> None:
        """Gives the whole slabs memory, of unknown contents."""
        self._resize(self.wholes.numel())

    def show(self) -> None:
        """Lets views be read: the contents are gathered."""
        if self._version is not None:
            set_version(self.view, self._version)
            self._version = None

    def drop(self) -> None:
        """Takes the memory away. Views of it stay, and are valid again when they are shown after the next gather."""
        self._resize(0)
        if self._version is None:
            self._version = self.view._version
            set_version(self.view, self._version + _DROPPED)

    @property
    def gradients(self) -> torch.Tensor:
        """The buffer that whole gradients are to be reduced from; taken when first asked for, of unknown contents."""
        if self._gradients is None:
            self._gradients = torch.empty(self.wholes.numel(), dtype=self.gradient_dtype, device=self.wholes.device)
        return self._gradients

    def has_gradient(self, grad: torch.Tensor) -> bool:
        """Whether a gradient lies in that buffer."""
        mine = self._gradients
        return mine is not None and grad.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()

    def drop_gradients(self) -> None:
        """Leaves that buffer to whoever else holds it."""
        self._gradients = None

    def forget_gradients(self) -> None:
        """That, and the total."""
        self._gradients = self.total = None

    def take_total(self) -> torch.Tensor:
        """The total, of zeros when first asked for."""
        if self.total is None:
            self.total = torch.zeros(self.wholes.numel(), dtype=self.reduce_dtype, device=self.wholes.device)
        return self.total

    def _resize(self, numel: int) -> None:
        storage, nbytes = self.wholes.untyped_storage(), numel * self.wholes.element_size()
        if storage.size() != nbytes:
            storage.resize_(nbytes)


def allocate(
    bucket: Bucket,
    shares: tuple[int, ...],
    rank: int,
    device: torch.device,
    compute_dtype: Callable[[torch.dtype], torch.dtype],
    reduce_dtype: torch.dtype | None,
    adds_parts: bool,
) -> list[Memory]:
    """The memory of a bucket.

    Args:
      bucket: its layout.
      shares: parts of each slab that every rank holds.
      rank: this one.
      device: where.
      compute_dtype: from the dtype of a slab, that in which it is gathered.
      reduce_dtype: in which gradients are summed, or None for that of the computation.
      adds_parts: whether they may be sent as they are and summed in a wider one.
    """
    ends = (0, *accumulate(shares))
    by_dtype: dict[torch.dtype, list[SlabRange]] = {}
    for slab in bucket.slabs:
        dtype = torch_dtype(slab.dtype)
        found = by_dtype.setdefault(dtype, [])
        low, high = ends[rank] * slab.shard_numel, ends[rank + 1] * slab.shard_numel
        start = shard_start = 0
        if found:
            last, step = found[-1], max(1, ALIGN_NBYTES // dtype.itemsize)
            start = -(-(last.start + last.numel) // step) * step
            shard_start = -(-(last.shard_start + last.high - last.low) // step) * step
        found.append(SlabRange(slab, low, high, ends[-1] * slab.shard_numel, start, shard_start))
    memories = []
    for dtype, slabs in by_dtype.items():
        compute = compute_dtype(dtype)
        reduce = reduce_dtype if reduce_dtype and compute.is_floating_point else compute
        sent = compute if adds_parts and compute.itemsize <= reduce.itemsize else reduce
        memories.append(Memory(slabs, dtype, compute, sent, reduce, device))
    return memories


def materialize_buffers(module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Gives memory to the buffers that a module has on `meta`. Returns them by path; they have no values yet."""
    missing = {}
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                child._buffers[name] = made = torch.empty_like(buffer, device=device)
                missing["/".join(filter(None, (path.replace(".", "/"), name)))] = made
    return missing
