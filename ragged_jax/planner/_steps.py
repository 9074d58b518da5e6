"""Step schedules: in which order a training step gathers, computes and reduces its buckets, as data.

Two streams run side by side, each in the order of the list: one computes, one is the network. An operation
starts when the one before it on its stream and those it waits for have ended. That is how FSDP runs on a GPU
(streams and events), and what XLA's latency-hiding scheduler makes of a program with the same dependences.
"""

from dataclasses import dataclass
from typing import Literal

Action = Literal["unshard", "forward", "backward", "reduce"]
COMPUTE: frozenset[Action] = frozenset({"forward", "backward"})


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a step.

    Attributes:
      action: `unshard` gathers a bucket, `reduce` reduces and shards its gradients.
      bucket: its number, in the order of the forward pass.
      after: indices of operations in the schedule that must have ended before.
    """

    action: Action
    bucket: int
    after: tuple[int, ...]

    @property
    def computes(self) -> bool:
        """Whether it runs on the compute stream rather than on the network."""
        return self.action in COMPUTE


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """A forward and a backward pass over all buckets.

    Attributes:
      num_buckets: how many.
      distance: how many buckets ahead of the computation are gathered. 0: only when needed.
      limit: at most so many buckets lie gathered at a time, those kept not counted, and at most so many
        gradients wait for their reduction (the rate limiter).
      num_kept: so many of the last buckets stay gathered between forward and backward; the others are dropped
        and gathered again.
      ops: in the order in which they are issued. An operation waits for earlier ones only.
    """

    num_buckets: int
    distance: int
    limit: int
    num_kept: int
    ops: tuple[Op, ...]

    def __post_init__(self):
        for at, op in enumerate(self.ops):
            if any(not 0 <= other < at for other in op.after):
                raise ValueError(f"operation {at} ({op.action} {op.bucket}) waits for a later one: {op.after}")

    def order(self, action: Action) -> tuple[int, ...]:
        """The buckets in the order in which they take part in an action."""
        return tuple(op.bucket for op in self.ops if op.action == action)

    def __repr__(self):
        return (
            f"StepSchedule({self.num_buckets} buckets, distance={self.distance}, limit={self.limit}, "
            f"num_kept={self.num_kept})"
        )


def least_kept(distance: int) -> int:
    """How many of the last buckets are gathered for backward before forward is done with them."""
    return (distance + 1) // 2


def step_schedule(num_buckets: int, *, distance: int = 1, limit: int = 2, num_kept: int = 1) -> StepSchedule:
    """The schedule of a step with a given prefetch distance.

    Buckets compute in order, then in reverse. While a position computes, the network gathers for the position
    `distance` later; gradients are reduced as soon as they are there.

    Reference: Zhao et al., "PyTorch FSDP", arXiv:2304.11277, sections 3.3 and 3.4 (prefetching, rate limiter).

    Args:
      num_buckets: buckets in the order of the forward pass.
      distance: positions to gather ahead; smaller than `limit`.
      limit: gathered buckets, and unreduced gradients, that may exist at a time.
      num_kept: last buckets that stay gathered; the very last is needed again at once.

    Raises:
      ValueError: a number is out of its range.

    Example:
      >>> schedule = step_schedule(3, distance=1, num_kept=1)
      >>> schedule.order("unshard"), schedule.order("reduce")
      ((0, 1, 2, 1, 0), (2, 1, 0))
    """
    if num_buckets < 0 or not 0 <= num_kept <= num_buckets:
        raise ValueError(f"num_kept must be between 0 and the number of buckets {num_buckets}, got {num_kept}")
    if not 0 <= distance < limit:
        raise ValueError(f"distance must be at least 0 and below the limit {limit}, got {distance}")
    if num_kept < min(num_buckets, least_kept(distance)):
        raise ValueError(
            f"with distance {distance} the last {least_kept(distance)} buckets are needed again before they "
            f"are dropped: keep as many, not {num_kept}"
        )
    ops = _ops(num_buckets, distance, limit, num_kept)
    return StepSchedule(num_buckets, distance, limit, num_kept, tuple(ops))


def _ops(num_buckets: int, distance: int, limit: int, num_kept: int) -> list[Op]:
    forward: list[tuple[Action, int]] = [("forward", b) for b in range(num_buckets)]
    positions = [*forward, *(("backward", b) for _, b in reversed(forward))]
    ops: list[Op] = []
    computed: list[int] = []  # for each position, the index of its computation
    gathered: dict[int, int] = {}  # for each bucket, the index of its last gather
    reduced: list[int] = []  # indices of the reductions

    def issue(action: Action, bucket: int, *after: int) -> int:
        ops.append(Op(action, bucket, after))
        return len(ops) - 1

    def gather(position: int) -> None:
        if position < len(positions):
            action, bucket = positions[position]
            if action == "forward" or bucket < num_buckets - num_kept:
                before = position - distance - 1  # the positions after it may be running or waiting
                gathered[bucket] = issue("unshard", bucket, *computed[before : before + 1] if before >= 0 else ())

    for position in range(distance):
        gather(position)
    for position, (action, bucket) in enumerate(positions):
        if distance or position == 0:
            gather(position + distance)
        over_limit = reduced[-limit:][:1] if action == "backward" and len(reduced) >= limit else ()
        computed.append(issue(action, bucket, gathered[bucket], *over_limit))
        if not distance:
            gather(position + 1)  # the next computation waits for it, and not for the reduction
        if action == "backward":
            reduced.append(issue("reduce", bucket, computed[-1]))
    return ops
