"""The two collectives of a bucket, whatever the shares of its slabs.

Of even shares one coalesced call gathers or reduces all slabs; of uneven ones there is no such call. On a CPU it is
slow: gloo gathers into memory of its own and copies from there, and reduces by a clone, an all-reduce of the whole
and a copy. Broadcasts write where slabs lie, and an all-to-all sends half of what that all-reduce does.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

# The names of 2.13; before, they were all_gather_into_tensor and reduce_scatter_tensor.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# On a CPU: with more ranks a ring is better than a tree from each, and with fewer bytes one call better than several.
_FEW_RANKS, _MANY_BYTES = 8, 2**16


class Work(Protocol):
    """A collective that was started."""

    def wait(self) -> object: ...


class _All:
    def __init__(self, works: Sequence[Work | None]):
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_gather(
    wholes: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    shares: tuple[int, ...] | None,
) -> Work:
    """Starts to gather every shard into the whole slab that it is a part of.

    Args:
      wholes: the slabs, 1-D, of one dtype.
      shards: this rank's part of each.
      group: the ranks that share them.
      shares: parts of a slab that each rank holds, where that is not one each. Ranks then send what they have and
        no padding. A shard may lie in its place already.
    """
    size = dist.get_world_size(group)
    broadcasts = _is_on_cpu(wholes[0].device) and size <= _FEW_RANKS and sum(x.nbytes for x in wholes) >= _MANY_BYTES
    if shares is None and not broadcasts:
        with _coalescing_manager(group, async_ops=True) as work:
            for whole, shard in zip(wholes, shards, strict=True):
                _gather(whole, shard, group=group)
        return work
    works = []
    for whole, shard in zip(wholes, shards, strict=True):
        parts = whole.split(_numels(whole, shares or (1,) * size))
        _put(shard, parts[dist.get_rank(group)])
        works += [dist.broadcast(part, group=group, group_src=k, async_op=True) for k, part in enumerate(parts)]
    return _All(works)


def _put(shard: torch.Tensor, place: torch.Tensor) -> None:
    """A rank's own part in its place, if it is not there."""
    if place.data_ptr() != shard.data_ptr():
        place.copy_(shard)


def start_reduce(
    shards: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    shares: tuple[int, ...] | None,
) -> Work:
    """Starts to sum the slabs over the ranks, each rank keeping its own part.

    Where `adds_parts`, the shards may have a wider dtype, in which the sum is taken.
    """
    if not adds_parts(wholes[0].device, shares):
        with _coalescing_manager(group, async_ops=True) as work:
            for whole, shard in zip(wholes, shards, strict=True):
                _scatter(shard, whole, group=group)
        return work
    return _All([_SumOfParts(shard, whole, group, shares) for whole, shard in zip(wholes, shards, strict=True)])


def adds_parts(device: torch.device, shares: tuple[int, ...] | None) -> bool:
    """Whether a reduction sends parts, for each rank to add up what it is sent."""
    return shares is not None or _is_on_cpu(device)


class _SumOfParts:
    """Every rank is sent its part of what the others have, and adds it up, in the order of ranks."""

    def __init__(
        self, shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, shares: tuple[int, ...] | None
    ):
        size = dist.get_world_size(group)
        self._shard, self._parts = shard, whole.new_empty(size, shard.numel())
        splits = None if shares is None else ([shard.numel()] * size, _numels(whole, shares))
        received = self._parts.view(-1)
        self._work = dist.all_to_all_single(received, whole, *(splits or ()), group=group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._parts.dtype == self._shard.dtype:
            torch.sum(self._parts, 0, dtype=self._shard.dtype, out=self._shard)
            return
        self._shard.copy_(self._parts[0])
        for part in self._parts[1:]:  # a sum in another dtype would cast all of them first
            self._shard.add_(part)


def _is_on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _numels(whole: torch.Tensor, shares: tuple[int, ...]) -> list[int]:
    size = whole.numel() // sum(shares)
    return [share * size for share in shares]
