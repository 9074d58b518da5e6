"""Owners for whole matrices: which device runs a matrix optimizer (Muon, Shampoo) on which matrix.

Each matrix is gathered once, to one device, which orthogonalises it alone: no collective inside
Newton-Schulz. That balances only if no matrix is much of the whole, so a matrix too large for a fair share is
marked: its multiplications are to be sharded over all devices.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise

from ..layout import Layout, Segment

SHARDED = -1
"""The owner of a matrix whose multiplications are sharded over all devices."""


@dataclass(frozen=True, slots=True, order=True)
class Matrix:
    """A matrix of a tensor.

    A tensor `[..., rows, cols]` is a stack of matrices that lie one after the other in its row-major order,
    and so are the layers of a stacked bucket, ahead of the tensor's own leading dims.

    Attributes:
      tensor: the tensor's name.
      index: which matrix of the stack.
      rows, cols: its size. A convolution kernel counts as `(height * width * in, out)`.
    """

    tensor: str
    index: int
    rows: int
    cols: int

    def __post_init__(self):
        if self.index < 0 or self.rows < 1 or self.cols < 1:
            raise ValueError(f"{self.tensor}[{self.index}] is {self.rows} x {self.cols}: not a matrix")

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Multiply-adds of one Newton-Schulz step: `s^2 (2 l + s)`, s and l the shorter and longer side."""
        s, l = sorted((self.rows, self.cols))  # noqa: E741
        return s * s * (2 * l + s)


def matrices(
    layout: Layout, sizes: Mapping[str, tuple[int, int] | None] | Iterable[str] | None = None
) -> tuple[Matrix, ...]:
    """The matrices of a layout's tensors, sorted by tensor and index.

    Args:
      layout: whose tensors.
      sizes: names of tensors, or a mapping from names to the `(rows, cols)` of one matrix where these are not
        the last two dims (convolutions). By default every tensor with at least two dims.

    Raises:
      ValueError: a tensor has fewer than two dims, or is not a stack of matrices of the given size.

    Example:
      >>> from ragged_jax.layout import TensorSpec
      >>> from ragged_jax.planner import Group, plan
      >>> up = TensorSpec("experts/up", (3, 8, 32))
      >>> [(m.index, m.rows, m.cols) for m in matrices(plan([Group("moe", (up,))], 2).layout)]
      [(0, 8, 32), (1, 8, 32), (2, 8, 32)]
    """
    wanted = sizes if isinstance(sizes, Mapping) or sizes is None else dict.fromkeys(sizes)
    found, faults = [], []
    for bucket in layout.buckets:
        for tensor in bucket.tensors:
            if (wanted is not None and tensor.name not in wanted) or not tensor.numel:
                continue
            size = (wanted or {}).get(tensor.name) or tensor.shape[-2:]
            if len(size) == 2 and min(size) > 0 and tensor.numel % (size[0] * size[1]) == 0:
                count = bucket.num_copies * tensor.numel // (size[0] * size[1])
                found += [Matrix(tensor.name, index, *size) for index in range(count)]
            elif wanted is not None:
                faults.append(f"{tensor.name} of shape {tensor.shape} is not a stack of {size or 'matrices'}")
    if faults:
        raise ValueError("; ".join(faults))
    return tuple(sorted(found))


@dataclass(frozen=True)
class OwnerPlan:
    """Which device works on which matrix.

    Attributes:
      num_shards: devices.
      steps: Newton-Schulz steps.
      matrices: sorted by tensor and index.
      owners: for each matrix its device, or `SHARDED`.
    """

    num_shards: int
    steps: int
    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]

    def __post_init__(self):
        if len(self.matrices) != len(self.owners):
            raise ValueError(f"{len(self.matrices)} matrices have {len(self.owners)} owners")
        if any(not SHARDED <= owner < self.num_shards for owner in self.owners):
            raise ValueError(f"owners must be devices below {self.num_shards} or SHARDED")

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """For each matrix its place among those of the same size on its owner; sharded ones count apart."""
        taken: Counter = Counter()
        slots = []
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            key = owner, matrix.rows, matrix.cols
            slots.append(taken[key])
            taken[key] += 1
        return tuple(slots)

    @cached_property
    def num_slots(self) -> dict[tuple[int, int], int]:
        """For each size `(rows, cols)`, the most matrices of that size that a device owns."""
        counts = Counter((m.rows, m.cols, o) for m, o in zip(self.matrices, self.owners, strict=True) if o >= 0)
        most: dict[tuple[int, int], int] = {}
        for (rows, cols, _), count in sorted(counts.items()):
            most[rows, cols] = max(count, most.get((rows, cols), 0))
        return most

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Multiply-adds of each device, its part of the sharded matrices included."""
        loads = [0] * self.num_shards
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if owner >= 0:
                loads[owner] += matrix.cost
        return tuple(self.steps * (load + self._sharded_cost / self.num_shards) for load in loads)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements that each device owns."""
        numels = [0] * self.num_shards
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            if owner >= 0:
                numels[owner] += matrix.numel
        return tuple(numels)

    @cached_property
    def _sharded_cost(self) -> int:
        return sum(m.cost for m, owner in zip(self.matrices, self.owners, strict=True) if owner < 0)

    @property
    def _mean(self) -> float:
        return self.steps * sum(m.cost for m in self.matrices) / self.num_shards

    @property
    def imbalance(self) -> float:
        """The largest load over the mean: 1 is perfect."""
        return max(self.loads) / self._mean if self.matrices else 1.0

    @property
    def bound(self) -> float:
        """No assignment that shards the same matrices could have a smaller `imbalance`.

        The mean; the largest matrix on top of the sharded work; and, with more matrices than devices, two of
        the `num_shards + 1` largest meet on one device.
        """
        if not self.matrices:
            return 1.0
        costs = sorted((m.cost for m, o in zip(self.matrices, self.owners, strict=True) if o >= 0), reverse=True)
        n, most = self.num_shards, max(costs, default=0)
        if len(costs) > n:
            most = max(most, costs[n - 1] + costs[n])
        return max(1.0, self.steps * (most + self._sharded_cost / n) / self._mean)

    @property
    def sharded_fraction(self) -> float:
        """The part of all multiply-adds that is in sharded matrices."""
        return self.steps * self._sharded_cost / (self._mean * self.num_shards) if self.matrices else 0.0

    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """For each device, the matrices it owns as segments of buffers `("owned", "ROWSxCOLS")` by slot."""
        held: list[list[Segment]] = [[] for _ in range(self.num_shards)]
        for matrix, owner, slot in zip(self.matrices, self.owners, self.slots, strict=True):
            if owner >= 0:
                numel, buffer = matrix.numel, ("owned", f"{matrix.rows}x{matrix.cols}")
                start = matrix.index * numel
                held[owner].append(Segment(matrix.tensor, start, start + numel, buffer, slot * numel))
        return tuple(map(tuple, held))

    def __repr__(self):
        num_sharded = self.owners.count(SHARDED)
        return (
            f"OwnerPlan({len(self.matrices)} matrices on {self.num_shards} devices, {num_sharded} sharded, "
            f"max/mean {self.imbalance:.3f})"
        )


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
    classes = [list(group) for _, group in groupby(by_size, key=lambda m: (m.rows, m.cols))]
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
        size = slab.shard_numel
        start = placement.offset + matrix.index * matrix.numel % placement.tensor.numel
        stop = start + matrix.numel
        first, last = start // size, (stop - 1) // size
        for k in sorted({first, min(first + 1, last), last}):
            homes[matrix].append((min(stop, (k + 1) * size) - max(start, k * size), k))
    return homes
