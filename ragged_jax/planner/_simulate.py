"""Predicts what a step schedule costs: time, communication that nothing hides, peak memory.

Compute time from FLOPs, collectives by the alpha-beta model. Good for choosing between schedules; a promise of
a step time it is not, for kernels and networks have their own minds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..layout import Layout, itemsize
from ._hardware import HardwareProfile
from ._steps import Action, StepSchedule, least_kept, step_schedule


@dataclass(frozen=True, slots=True)
class BucketCost:
    """What one bucket costs in a step. Times in seconds.

    Attributes:
      name: the bucket's, with the layer's number for stacked layers.
      forward, backward: computing; what is computed again in backward included.
      unshard, reduce: the collectives.
      unshard_nbytes: the gathered bucket.
      grad_nbytes: its unsharded gradients, from backward until they are reduced.
      kept_nbytes: activations from forward until backward.
      workspace_nbytes: activations while it computes.
    """

    name: str
    forward: float
    backward: float
    unshard: float
    reduce: float
    unshard_nbytes: int
    grad_nbytes: int
    kept_nbytes: int = 0
    workspace_nbytes: int = 0

    def __post_init__(self):
        numbers = (
            self.forward,
            self.backward,
            self.unshard,
            self.reduce,
            self.unshard_nbytes,
            self.grad_nbytes,
        )
        if min(*numbers, self.kept_nbytes, self.workspace_nbytes) < 0:
            raise ValueError(f"costs of bucket {self.name!r} must not be negative: {self}")

    def seconds(self, action: Action) -> float:
        """The time of one action."""
        return getattr(self, action)


def bucket_costs(
    layout: Layout,
    profile: HardwareProfile,
    *,
    tokens: int,
    recompute: bool = True,
    active: Mapping[str, float] | None = None,
    efficiency: float = 0.5,
    reduce_dtype: str | None = None,
    kept_nbytes: int = 0,
    workspace_nbytes: int = 0,
) -> tuple[BucketCost, ...]:
    """The costs of a layout's buckets, in forward order, every layer of a stack on its own.

    A forward pass takes 2 FLOPs for each parameter and token, a backward pass twice that. All-gather and
    reduce-scatter over n shards take one latency and `(n - 1) / n` of the bucket on every link.

    Args:
      layout: whose buckets.
      profile: the machine.
      tokens: on each device.
      recompute: whether backward computes forward again (activation checkpointing of each bucket).
      active: for buckets of which a token uses a part only (experts, an embedding), the part.
      efficiency: of the device's matrix rate, what computing reaches.
      reduce_dtype: of the gradients while they are reduced, where it is not the parameters'.
      kept_nbytes, workspace_nbytes: activations of each bucket, as in `BucketCost`.

    Raises:
      ValueError: `efficiency` is not in (0, 1], or a bucket in `active` does not exist.

    Example:
      >>> from ragged_jax.layout import TensorSpec
      >>> from ragged_jax.planner import Group, hardware, plan
      >>> layout = plan([Group("mlp", (TensorSpec("w", (4096, 4096), "bfloat16"),), stack=2)], 8).layout
      >>> for cost in bucket_costs(layout, hardware("h100"), tokens=8192):
      ...     print(f"{cost.name}: forward {cost.forward:.2e} s, unshard {cost.unshard:.2e} s")
      mlp[0]: forward 5.56e-04 s, unshard 8.02e-05 s
      mlp[1]: forward 5.56e-04 s, unshard 8.02e-05 s
    """
    active = active or {}
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be above 0 and at most 1, got {efficiency}")
    if unknown := sorted(active.keys() - {bucket.name for bucket in layout.buckets}):
        raise ValueError(f"no such buckets: {unknown}")
    costs = []
    for bucket in layout.buckets:
        shard_nbytes = sum(slab.shard_nbytes for slab in bucket.slabs)
        wide = sum(slab.shard_numel * itemsize(reduce_dtype or slab.dtype) for slab in bucket.slabs)
        flops = 2 * tokens * sum(t.numel for t in bucket.tensors) * active.get(bucket.name, 1)
        forward = flops / (profile.flops * efficiency)
        for layer in range(bucket.num_copies):
            costs.append(
                BucketCost(
                    name=bucket.name if bucket.stack is None else f"{bucket.name}[{layer}]",
                    forward=forward,
                    backward=forward * (3 if recompute else 2),
                    unshard=_collective(shard_nbytes, layout.num_shards, profile),
                    reduce=_collective(wide, layout.num_shards, profile),
                    unshard_nbytes=layout.num_shards * shard_nbytes,
                    grad_nbytes=layout.num_shards * wide,
                    kept_nbytes=kept_nbytes,
                    workspace_nbytes=workspace_nbytes,
                )
            )
    return tuple(costs)


def _collective(shard_nbytes: int, num_shards: int, profile: HardwareProfile) -> float:
    if num_shards == 1 or not shard_nbytes:
        return 0.0
    return profile.latency + (num_shards - 1) * shard_nbytes / profile.link_bandwidth


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a schedule is predicted to cost.

    Attributes:
      schedule: the schedule.
      seconds: from the first gather to the last reduction.
      compute_seconds: of computing.
      communication_seconds: of collectives.
      bound_seconds: no schedule with these operations takes less.
      peak_nbytes: the most memory in use at a time.
      spans: for each operation of the schedule its start and end.
    """

    schedule: StepSchedule
    seconds: float
    compute_seconds: float
    communication_seconds: float
    bound_seconds: float
    peak_nbytes: int
    spans: tuple[tuple[float, float], ...]

    @property
    def exposed_seconds(self) -> float:
        """Time in which the device waits for the network."""
        return max(0.0, self.seconds - self.compute_seconds)

    def __repr__(self):
        return (
            f"StepReport({self.schedule}: {self.seconds:.3e} s, {self.exposed_seconds:.3e} s of it waiting, "
            f"peak {self.peak_nbytes} bytes)"
        )


def simulate(schedule: StepSchedule, costs: Sequence[BucketCost], resident_nbytes: int = 0) -> StepReport:
    """Runs a schedule on paper.

    Args:
      schedule: of as many buckets as there are costs.
      costs: in forward order.
      resident_nbytes: memory in use all the time: shards of parameters, gradients and optimizer state.

    Raises:
      ValueError: the numbers of buckets differ.

    Example:
      >>> costs = [BucketCost(f"layer{i}", 2.0, 4.0, 1.0, 1.0, 10, 10) for i in range(4)]
      >>> for distance in (0, 1):
      ...     report = simulate(step_schedule(4, distance=distance), costs)
      ...     print(distance, report.seconds, report.exposed_seconds, report.peak_nbytes)
      0 32.0 8.0 30
      1 26.0 2.0 30
    """
    if len(costs) != schedule.num_buckets:
        raise ValueError(f"{len(costs)} costs for a schedule of {schedule.num_buckets} buckets")
    ends = {True: 0.0, False: 0.0}  # of the compute stream and of the network
    busy = {True: 0.0, False: 0.0}
    spans: list[tuple[float, float]] = []
    for op in schedule.ops:
        start = max([ends[op.computes], *(spans[other][1] for other in op.after)])
        seconds = costs[op.bucket].seconds(op.action)
        ends[op.computes] = start + seconds
        busy[op.computes] += seconds
        spans.append((start, start + seconds))
    first = costs[0].unshard if costs else 0.0
    last = costs[0].reduce if costs else 0.0
    return StepReport(
        schedule=schedule,
        seconds=max(ends.values()),
        compute_seconds=busy[True],
        communication_seconds=busy[False],
        bound_seconds=max(first + busy[True] + last, busy[False]),
        peak_nbytes=resident_nbytes + _peak(schedule, costs, spans),
        spans=tuple(spans),
    )


def _peak(schedule: StepSchedule, costs: Sequence[BucketCost], spans: Sequence[tuple[float, float]]) -> int:
    """The most bytes that gathered buckets, gradients and activations take at a time.

    Where memory is freed at the moment at which other memory is needed, it is freed first, except for what an
    operation of no length needs.
    """
    last_use: dict[int, int] = {}  # of each bucket's gathered copy, seen from behind
    changes: list[tuple[float, int, int]] = []

    def hold(start: float, end: float, nbytes: int) -> None:
        changes.append((start, 2 if end == start else 1, nbytes))
        changes.append((end, 3 if end == start else 0, -nbytes))

    ended: dict[tuple[Action, int], float] = {}
    for at in reversed(range(len(schedule.ops))):
        op, (start, end) = schedule.ops[at], spans[at]
        cost = costs[op.bucket]
        ended[op.action, op.bucket] = end
        if op.computes:
            last_use.setdefault(op.bucket, at)
            hold(start, end, cost.workspace_nbytes)
        if op.action == "unshard":
            hold(start, spans[last_use.pop(op.bucket)][1], cost.unshard_nbytes)
        elif op.action == "backward":
            hold(start, ended["reduce", op.bucket], cost.grad_nbytes)
        elif op.action == "forward":
            hold(start, ended["backward", op.bucket], cost.kept_nbytes)
    return max(accumulate((nbytes for _, _, nbytes in sorted(changes)), initial=0))


def choose_step_schedule(
    costs: Sequence[BucketCost],
    memory_nbytes: int,
    *,
    resident_nbytes: int = 0,
    max_distance: int = 3,
    tolerance: float = 0.001,
) -> StepReport:
    """The fastest schedule that fits into memory; of those about as fast, the one with the smallest peak.

    Args:
      costs: of the buckets, in forward order.
      memory_nbytes: what the device has.
      resident_nbytes: of that, in use all the time.
      max_distance: the largest prefetch distance to try; the limit is tried up to one more.
      tolerance: schedules slower by up to this fraction count as equally fast.

    Raises:
      ValueError: no schedule fits; the message says how much is missing.

    Example:
      >>> costs = [BucketCost(f"layer{i}", 2.0, 4.0, 1.0, 1.0, 10, 10) for i in range(4)]
      >>> choose_step_schedule(costs, 35).schedule
      StepSchedule(4 buckets, distance=1, limit=2, num_kept=1)
    """
    n = len(costs)
    kept = {0, n, *(min(n, 1 << power) for power in range(n.bit_length()))}
    reports = [
        simulate(step_schedule(n, distance=distance, limit=limit, num_kept=num_kept), costs, resident_nbytes)
        for distance in range(max_distance + 1)
        for limit in range(distance + 1, max_distance + 2)
        for num_kept in sorted(kept | {min(n, least_kept(distance))})
        if num_kept >= min(n, least_kept(distance))
    ]
    fitting = [report for report in reports if report.peak_nbytes <= memory_nbytes]
    if not fitting:
        least = min(report.peak_nbytes for report in reports)
        raise ValueError(
            f"no schedule fits: the smallest peak is {least} bytes ({resident_nbytes} of them all the time), "
            f"the memory {memory_nbytes}; use more shards, smaller buckets or fewer tokens"
        )
    fastest = min(report.seconds for report in fitting)
    about = [report for report in fitting if report.seconds <= fastest * (1 + tolerance)]
    return min(about, key=lambda r: (r.peak_nbytes, r.schedule.distance, r.schedule.limit, r.schedule.num_kept))
