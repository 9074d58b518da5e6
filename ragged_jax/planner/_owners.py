"""Owners for whole matrices: which device runs a matrix optimizer (Muon, Shampoo) on which matrix.

Each matrix is gathered once, to one device, which orthogonalises it alone: no collective inside
Newton-Schulz. That balances only if no matrix is much of the whole, so a matrix too large for a fair share is
marked: its multiplications are to be sharded over all devices.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..layout import Layout, Placement, Segment, tile_regions

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
      work: multiply-adds of a step where they are not those of one matrix: several that stay together, or
        something else than Newton-Schulz.
    """

    tensor: str
    index: int
    rows: int
    cols: int
    work: int | None = None

    def __post_init__(self):
        if self.index < 0 or self.rows < 1 or self.cols < 1:
            raise ValueError(f"{self.tensor}[{self.index}] is {self.rows} x {self.cols}: not a matrix")

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def cost(self) -> int:
        """Multiply-adds of one Newton-Schulz step: `s^2 (2 l + s)`, s and l the shorter and longer side."""
        if self.work is not None:
            return self.work
        s, l = sorted((self.rows, self.cols))  # noqa: E741
        return s * s * (2 * l + s)


def _members_lie_together(placement: Placement) -> bool:
    """Whether each matrix of a stack is contiguous in storage."""
    num_lead = len(placement.tensor.shape) - 2
    if placement.axis_order is not None and placement.axis_order[:num_lead] != tuple(range(num_lead)):
        return False
    return placement.storage == "row_major" or len(tile_regions(placement.tensor)) == 1


def matrices(
    layout: Layout, sizes: Mapping[str, tuple[int, int] | None] | Iterable[str] | None = None
) -> tuple[Matrix, ...]:
    """The matrices of a layout's tensors, sorted by tensor and index.

    Rows and columns are those of the tensor as it is stored, which may be transposed.

    Args:
      layout: whose tensors.
      sizes: names of tensors, or a mapping from names to the `(rows, cols)` of one matrix where these are not
        the last two dims (convolutions). By default every tensor with at least two dims.

    Raises:
      ValueError: a tensor has fewer than two dims, is not a stack of matrices of the given size, or is stored so
        that the matrices of its stack do not lie together.

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
        for placement in (p for slab in bucket.slabs for p in slab.placements):
            tensor = placement.tensor
            if (wanted is not None and tensor.name not in wanted) or not tensor.numel:
                continue
            size = (wanted or {}).get(tensor.name) or placement.stored_shape[-2:]
            if len(size) == 2 and min(size) > 0 and tensor.numel % (size[0] * size[1]) == 0:
                count = tensor.numel // (size[0] * size[1])
                if count > 1 and not _members_lie_together(placement):
                    faults.append(f"{tensor.name} is a stack whose members do not lie together as it is stored")
                found += [Matrix(tensor.name, index, *size) for index in range(count * bucket.num_copies)]
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

    def settled(self, may_shard: Callable[[Matrix], bool] = lambda _: False) -> "OwnerPlan":
        """The same plan, in which every matrix has an owner that `may_shard` is not true of.

        The largest goes first, to the device with the least work.
        """
        loads, owners = [0] * self.num_shards, list(self.owners)
        for matrix, owner in zip(self.matrices, owners, strict=True):
            if owner >= 0:
                loads[owner] += matrix.cost
        todo = [i for i, owner in enumerate(owners) if owner == SHARDED and not may_shard(self.matrices[i])]
        for i in sorted(todo, key=lambda i: (-self.matrices[i].cost, i)):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += self.matrices[i].cost
        return replace(self, owners=tuple(owners))

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
