"""The two collectives of a bucket: one coalesced call for all its slabs, whatever their shares."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

# The names of 2.13; before, they were all_gather_into_tensor and reduce_scatter_tensor.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
        no padding.
    """
    if shares is None:
        with _coalescing_manager(group, async_ops=True) as work:
            for whole, shard in zip(wholes, shards, strict=True):
                _gather(whole, shard, group=group)
        return work
    works = []
    for whole, shard in zip(wholes, shards, strict=True):
        parts = _parts(whole, shares)
        parts[dist.get_rank(group)].copy_(shard)
        works += [dist.broadcast(part, group=group, group_src=k, async_op=True) for k, part in enumerate(parts)]
    return _All(works)


def start_reduce(
    shards: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    shares: tuple[int, ...] | None,
) -> Work:
    """Starts to sum the slabs over the ranks, each rank keeping its own part. `wholes` is scratch afterwards."""
    if shares is None:
        with _coalescing_manager(group, async_ops=True) as work:
            for whole, shard in zip(wholes, shards, strict=True):
                _scatter(shard, whole, group=group)
        return work
    return _All([_UnevenReduce(shard, whole, group, shares) for whole, shard in zip(wholes, shards, strict=True)])


class _UnevenReduce:
    def __init__(self, shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, shares: tuple[int, ...]):
        self._shard, self._mine = shard, _parts(whole, shares)[dist.get_rank(group)]
        parts = enumerate(_parts(whole, shares))
        self._work = _All([dist.reduce(part, group=group, group_dst=k, async_op=True) for k, part in parts])

    def wait(self) -> None:
        self._work.wait()
        self._shard.copy_(self._mine)


def _parts(whole: torch.Tensor, shares: tuple[int, ...]) -> list[torch.Tensor]:
    size = whole.numel() // sum(shares)
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + share * size)
    return [whole[low:high] for low, high in pairwise(ends)]
