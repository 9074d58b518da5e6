"""Assigns matrices to owners: balanced work first, then as little movement as that allows."""

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise

from ..layout import Layout
from ._owners import SHARDED, Matrix, OwnerPlan


def assign_owners(
    matrices: Iterable[Matrix],
    num_shards: int,
    *,
    layout: Layout | None = None,
    steps: int = 5,
    tolerance: float = 0.05,
) -> OwnerPlan:
    """Gives each matrix to one device so that no device has more than its share of Newton-Schulz work.

    Longest processing time first, ties by elements owned. What would lift a device more than `tolerance`
    above the mean is sharded over all devices instead. Among matrices of one size, which are all the same to
    the balance, each then goes where most of it already lies. The result depends on neither the order of
    `matrices` nor the machine.

    Reference: Graham, "Bounds on multiprocessing timing anomalies", 1969; owners for Muon as in torchtitan's
    flex_shard.

    Args:
      matrices: in any order.
      num_shards: devices.
      layout: where the matrices lie now, to move as little as balance allows.
      steps: Newton-Schulz steps; scales the loads.
      tolerance: how far above the mean a device's load may be, as a fraction.

    Raises:
      ValueError: a matrix is named twice, the number of devices is below 1 or not the layout's.

    Example:
      >>> assign_owners([Matrix("q", i, 64, 64) for i in range(8)] + [Matrix("up", 0, 512, 512)], 4)
      OwnerPlan(9 matrices on 4 devices, 1 sharded, max/mean 1.000)
    """
    ordered = tuple(sorted(matrices))
    if num_shards < 1 or (layout is not None and layout.num_shards != num_shards):
        raise ValueError(f"num_shards is {num_shards}" + (f", the layout has {layout.num_shards}" if layout else ""))
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    ids = [(m.tensor, m.index) for m in ordered]
    repeated = [f"{tensor}[{index}]" for (tensor, index), after in pairwise(ids) if (tensor, index) == after]
    if repeated:
        raise ValueError(f"matrices are named twice: {', '.join(repeated)}")
    by_size = sorted(ordered, key=lambda m: (-m.cost, -m.numel, m.rows, m.cols, m.tensor, m.index))
    classes = [list(group) for _, group in groupby(by_size, key=lambda m: (m.cost, m.rows, m.cols))]
    homes = _homes(ordered, layout) if layout else {}
    owner_of: dict[Matrix, int] = {}
    for members, quota in zip(classes, _quotas(classes, num_shards, tolerance), strict=True):
        owner_of.update(_settle(members, quota, homes))
    return OwnerPlan(num_shards, steps, ordered, tuple(owner_of[m] for m in ordered))


def _quotas(classes: list[list[Matrix]], num_shards: int, tolerance: float) -> list[Counter[int]]:
    """For each class of equal matrices, how many go to each device or are sharded.

    Sharding a matrix raises every device's load, which may push others over the limit. So the work to be
    sharded is assumed first, nothing at the start, and raised to what came out until it suffices.
    """
    total = sum(len(members) * members[0].cost for members in classes)
    limit = total + int(total * tolerance)
    assumed = 0
    while True:
        # Loads are multiplied by the number of devices to stay exact integers.
        heap = [(0, 0, device) for device in range(num_shards)]
        sharded, quotas = 0, []
        for members in classes:
            cost, numel, quota = members[0].cost, members[0].numel, Counter()
            for done in range(len(members)):
                load, owned, device = heap[0]
                if load + num_shards * cost + assumed > limit:
                    quota[SHARDED] = len(members) - done
                    sharded += cost * quota[SHARDED]
                    break
                heapq.heapreplace(heap, (load + num_shards * cost, owned + numel, device))
                quota[device] += 1
            quotas.append(quota)
        if sharded <= assumed or num_shards == 1:
            return quotas
        assumed = sharded


def _settle(
    members: list[Matrix], quota: Counter[int], homes: Mapping[Matrix, list[tuple[int, int]]]
) -> Iterable[tuple[Matrix, int]]:
    """Matrices of one class to devices by quota: the largest shares already in place first, then by name."""
    left, owner_of = +quota, {}
    claims = sorted((-share, m, device) for m in members for share, device in homes.get(m, ()))
    for _, matrix, device in claims:
        if matrix not in owner_of and left[device] > 0:
            owner_of[matrix] = device
            left[device] -= 1
    # A sharded matrix stays where it lies: any matrix does, so the last by name.
    free = [device for device in sorted(left, key=lambda d: (d == SHARDED, d)) for _ in range(left[device])]
    owner_of.update(zip((m for m in members if m not in owner_of), free, strict=True))
    return owner_of.items()


def _homes(matrices: Iterable[Matrix], layout: Layout) -> dict[Matrix, list[tuple[int, int]]]:
    """For each matrix up to three `(elements, device)`, among them the device that holds most of it."""
    homes: dict[Matrix, list[tuple[int, int]]] = defaultdict(list)
    for matrix in matrices:
        _, slab, placement = layout.locate(matrix.tensor)
        size, ends = slab.shard_numel, layout._ends
        start = placement.offset + matrix.index * matrix.numel % placement.tensor.numel
        stop = start + matrix.numel
        first, last = (bisect_right(ends, at // size) - 1 for at in (start, stop - 1))
        for k in sorted({first, min(first + 1, last), last}):
            homes[matrix].append((min(stop, ends[k + 1] * size) - max(start, ends[k] * size), k))
    return homes
