"""How ragged tensors come from other placements and go to them: each way with the collective that it needs."""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._collectives import start_gather, start_reduce
from ._geometry import Geometry


def row_numels(shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Elements on each rank under `Shard(0)`: like `torch.chunk`, and empty where rows run out."""
    rows = shape[0]
    step = -(-rows // num_ranks) if rows else 0
    width = 1
    for size in shape[1:]:
        width *= size
    return tuple(max(0, min(step, rows - k * step)) * width for k in range(num_ranks))


def exchange(
    local: torch.Tensor, held: tuple[int, ...], wanted: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    """From ranges of these lengths on each rank to ranges of those: one all-to-all, nothing packed or unpacked."""
    rank = dist.get_rank(group)
    sources, targets = ((0, *accumulate(numels)) for numels in (held, wanted))

    def common(k: int, j: int) -> int:
        """Elements that rank k holds and rank j wants."""
        return max(0, min(sources[k + 1], targets[j + 1]) - max(sources[k], targets[j]))

    ranks, size = range(len(held)), local.element_size()
    out = torch.empty(wanted[rank], dtype=local.dtype, device=local.device)
    dist.all_to_all_single(
        out.view(torch.uint8),
        local.contiguous().view(torch.uint8),
        [common(k, rank) * size for k in ranks],
        [common(rank, k) * size for k in ranks],
        group=group,
    )
    return out


def gather(local: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The slice of which this rank holds a part, in the tensor's shape. No rank sends or receives padding."""
    whole = torch.empty(sum(geometry.numels), dtype=local.dtype, device=local.device)
    if whole.numel():
        group = geometry.mesh.get_group(geometry.mesh_dim)
        views = [whole.view(torch.uint8)], [local.contiguous().view(torch.uint8)]
        start_gather(*views, group, _shares(geometry)).wait()
    return geometry.from_stored(whole)


def reduce(part: torch.Tensor, geometry: Geometry, reduce_op: str) -> torch.Tensor:
    """This rank's elements of the sum or mean of the ranks' slices: what a reduce-scatter moves, no more."""
    group, (low, high) = geometry.mesh.get_group(geometry.mesh_dim), geometry.range
    stored = geometry.to_stored(part)
    shard = stored.new_empty(high - low)
    if stored.numel():
        start_reduce([shard], [stored], group, _shares(geometry)).wait()
    return shard.div_(dist.get_world_size(group)) if reduce_op == "avg" else shard


def _shares(geometry: Geometry) -> tuple[int, ...] | None:
    units = geometry.placement.local_units
    return None if len(set(units)) == 1 else units


def to_other(local: torch.Tensor, geometry: Geometry, placements: tuple[Placement, ...]) -> torch.Tensor | DTensor:
    """This rank's elements under other placements: 1-D for ragged ones over the same mesh dim, else a DTensor."""
    mesh, dim = geometry.mesh, geometry.mesh_dim
    others = [p for i, p in enumerate(placements) if i != dim] == [
        p for i, p in enumerate(geometry.placements) if i != dim
    ]
    target, shape = placements[dim], geometry.shape
    if others and type(target) is type(geometry.placement):
        wanted = Geometry(shape, geometry.order, mesh, placements).numels
        return exchange(local, geometry.numels, wanted, mesh.get_group(dim))
    if others and target == Shard(0) and geometry.is_row_major and not geometry.placement.splits:
        flat = exchange(local, geometry.numels, row_numels(shape, mesh.size(dim)), mesh.get_group(dim))
        row = 1
        for size in shape[1:]:
            row *= size
        local = flat.view(flat.numel() // row if row else _rows(shape, mesh, dim), *shape[1:])
        return _dtensor(local, mesh, placements, shape, geometry.strides)
    whole = tuple(Replicate() if i == dim else p for i, p in enumerate(geometry.placements))
    gathered = _dtensor(gather(local, geometry), mesh, whole, shape, geometry.strides)
    if any(isinstance(p, type(geometry.placement)) for p in placements):
        return from_dtensor(gathered, Geometry(shape, geometry.order, mesh, placements))
    return gathered.redistribute(placements=placements)


def _rows(shape: tuple[int, ...], mesh: DeviceMesh, dim: int) -> int:
    return row_numels(shape[:1], mesh.size(dim))[mesh.get_local_rank(dim)]


def _dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> DTensor:
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=strides)


def from_dtensor(x: DTensor, wanted: Geometry) -> torch.Tensor:
    """This rank's elements of an ordinary DTensor under ragged placements."""
    mesh, dim = wanted.mesh, wanted.mesh_dim
    held = x.placements[dim]
    # The other mesh dims first, save sums over replicas: those are cheaper once the tensor is sharded.
    sums = _is_sum(held)
    before = list(wanted.placements)
    before[dim] = held if sums or _is_rows(x, wanted) else Replicate()
    late = [i for i, p in enumerate(x.placements) if sums and i != dim and _is_sum(p) and _is_whole(before[i])]
    for i in late:
        before[i] = x.placements[i]
    if x.placements != tuple(before):
        x = x.redistribute(placements=before)
    local, group = x.to_local().detach(), mesh.get_group(dim)
    if sums:
        assert isinstance(held, Partial)
        local = reduce(local, wanted, held.reduce_op)
        for i in late:
            kind = x.placements[i]
            assert isinstance(kind, Partial)
            dist.all_reduce(local, group=mesh.get_group(i))
            if kind.reduce_op == "avg":
                local.div_(mesh.size(i))
        return local
    if not isinstance(before[dim], Replicate):
        return exchange(local.reshape(-1), row_numels(wanted.shape, mesh.size(dim)), wanted.numels, group)
    return wanted.to_stored(local)[slice(*wanted.range)].clone()


def _is_rows(x: DTensor, wanted: Geometry) -> bool:
    """Whether every rank holds rows that lie as in the wanted tensor, so that one all-to-all is enough."""
    return x.placements[wanted.mesh_dim] == Shard(0) and wanted.is_row_major and not wanted.placement.splits


def _is_sum(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")


def _is_whole(placement: Placement) -> bool:
    return isinstance(placement, Replicate)
