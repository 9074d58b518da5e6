"""Exchanges: data that every device holds in one way and is to hold in another, as rounds of collectives.

An `Exchange` is pure data that any backend can run. For each round a device copies pieces of its buffers into
a message, takes part in one collective, and copies pieces of what it received into its target buffers:

- `permute`: `lax.ppermute` of `[numel]`, pairs as in `Round.pairs`; a torch `batch_isend_irecv`;
- `all_to_all`: a tiled `lax.all_to_all` of `[num_shards, numel]`, or `all_to_all_single`;
- `uneven_all_to_all`: `all_to_all_single` with the sizes of `Round.splits`; `lax.ragged_all_to_all` on GPU and
  TPU (XLA:CPU has none).

Sizes and offsets are in elements; with `num_copies` every buffer and message has a leading dim of that size.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..layout import Buffer, Move, Segment, itemsize, overlap
from ._exchange_rounds import plan_steps, split_steps, static_bound
from ._hardware import HardwareProfile
from ._traffic import Kind, Step, most_numel, steps_cost


class Part(NamedTuple):
    """A run of elements in a message: from `source` on the sender to `target` on the receiver.

    Attributes:
      source, source_offset: where it lies on the sender.
      target, target_offset: where it goes on the receiver.
      numel: how many elements.
      offset: where it lies in the message.
    """

    source: Buffer
    source_offset: int
    target: Buffer
    target_offset: int
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message of a round: its true elements, in parts that follow each other without gaps."""

    sender: int
    receiver: int
    numel: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One collective.

    Attributes:
      kind: which.
      numel: the size of every message, padding included (for an uneven all-to-all, of the largest).
      transfers: sorted by sender and receiver.
    """

    kind: Kind
    numel: int
    transfers: tuple[Transfer, ...]

    def __post_init__(self):
        if any(not 0 < t.numel <= self.numel for t in self.transfers):
            raise ValueError(f"a message is empty or longer than {self.numel} elements")
        if self.kind == "permute":
            for ends in zip(*self.pairs, strict=True):
                if len(set(ends)) != len(ends):
                    raise ValueError(f"a permute with two messages at one device: {self.pairs}")

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """`(sender, receiver)` of every message."""
        return tuple((t.sender, t.receiver) for t in self.transfers)

    def splits(self, device: int, num_shards: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements that a device sends to each device, and that it receives from each."""
        sent, received = [0] * num_shards, [0] * num_shards
        for t in self.transfers:
            if t.sender == device:
                sent[t.receiver] = t.numel
            if t.receiver == device:
                received[t.sender] = t.numel
        return tuple(sent), tuple(received)

    @property
    def _step(self) -> Step:
        return Step(self.kind, self.numel, {(t.sender, t.receiver): t.numel for t in self.transfers})


@dataclass(frozen=True)
class Exchange:
    """What the devices do to hold their data in another way.

    Attributes:
      name: what is moved, for people.
      dtype: of all buffers.
      num_shards: devices.
      num_copies: the leading dim of every buffer and message; 1 means there is none.
      local: copies within a device; no traffic.
      rounds: the collectives, in order.
    """

    name: str
    dtype: str
    num_shards: int
    num_copies: int
    local: tuple[Move, ...]
    rounds: tuple[Round, ...]

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements of one copy that each pair of devices moves, without padding."""
        total: dict[tuple[int, int], int] = defaultdict(int)
        for r in self.rounds:
            for t in r.transfers:
                total[t.sender, t.receiver] += t.numel
        return dict(sorted(total.items()))

    @property
    def bound_nbytes(self) -> int:
        """The most that a device must send or must receive: no exchange moves less."""
        return self._nbytes(most_numel(self.traffic))

    @property
    def sent_nbytes(self) -> int:
        """The most that a device sends in these rounds, padding included."""
        return self._nbytes(round(steps_cost([r._step for r in self.rounds], self.num_shards, 0)))

    @property
    def message_nbytes(self) -> int:
        """Memory for the messages of one round, sent and received together."""
        sizes = [0]
        for r in self.rounds:
            if r.kind == "uneven_all_to_all":
                sizes.append(2 * most_numel(r._step.amounts))
            else:
                sizes.append(2 * r.numel * (1 if r.kind == "permute" else self.num_shards))
        return self._nbytes(max(sizes))

    def seconds(self, profile: HardwareProfile) -> float:
        """Time by the alpha-beta model, rounds one after the other."""
        cost = steps_cost([r._step for r in self.rounds], self.num_shards, self._latency(profile))
        return cost * self._nbytes(1) / profile.link_bandwidth

    def bound_seconds(self, profile: HardwareProfile) -> float:
        """One latency and the bytes that no exchange can save: what no collective whatsoever could beat."""
        if not self.rounds:
            return 0.0
        return profile.latency + self.bound_nbytes / profile.link_bandwidth

    def static_bound_seconds(self, profile: HardwareProfile) -> float:
        """What no schedule of permutes and padded all-to-alls could beat (an uneven all-to-all can)."""
        cost = static_bound(self.traffic, self.num_shards, self._latency(profile))
        return cost * self._nbytes(1) / profile.link_bandwidth

    def _nbytes(self, numel: int) -> int:
        return numel * self.num_copies * itemsize(self.dtype)

    def _latency(self, profile: HardwareProfile) -> float:
        return profile.latency * profile.link_bandwidth / self._nbytes(1)

    def reversed(self) -> "Exchange":
        """The exchange that undoes this one, in the same number of rounds of the same sizes."""

        def back(part: Part) -> Part:
            return Part(part.target, part.target_offset, part.source, part.source_offset, part.numel, part.offset)

        def turn(t: Transfer) -> Transfer:
            return Transfer(t.receiver, t.sender, t.numel, tuple(map(back, t.parts)))

        def ends(t: Transfer) -> tuple[int, int]:
            return t.sender, t.receiver

        rounds = [replace(r, transfers=tuple(sorted(map(turn, r.transfers), key=ends))) for r in self.rounds]
        moves = [
            Move(m.receiver, m.sender, m.target, m.target_offset, m.source, m.source_offset, m.numel)
            for m in self.local
        ]
        return replace(self, local=tuple(sorted(moves)), rounds=tuple(rounds))

    def __repr__(self):
        kinds = ", ".join(f"{r.kind}[{r.numel}]" for r in self.rounds[:4]) + ", ..." * (len(self.rounds) > 4)
        return f"Exchange({self.name!r}, {self.dtype}, {self.num_shards} devices: {kinds or 'no traffic'})"


def exchange(
    held: Sequence[Iterable[Segment]],
    wanted: Sequence[Iterable[Segment]],
    profile: HardwareProfile,
    *,
    dtype: str,
    name: str = "",
    num_copies: int = 1,
    uneven: bool = False,
    max_padding: float | None = None,
    max_message_nbytes: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Exchange:
    """Plans the rounds that give every device the segments it wants. Deterministic.

    Args:
      held: for each device, what it holds.
      wanted: for each device, what it is to hold.
      profile: latency and bandwidth, which decide between few rounds and little padding.
      dtype: of all buffers.
      name: for people.
      num_copies: the same exchange for so many layers at once, as a leading dim of every buffer.
      uneven: whether the backend has an all-to-all with sizes of its own for every pair. One round then does
        it, at the bound.
      max_padding: how many more bytes than the bound a device may send, as a fraction, even where that takes
        more time. A target: many small messages on many devices may miss it.
      max_message_nbytes: memory for one round's outgoing messages; larger rounds are cut into several.
      replicas: for each device, to which copy of the data it belongs where there are several (see `overlap`).

    Raises:
      ValueError: elements are wanted that nobody holds, or a size is not positive.

    Example:
      >>> from ragged_jax.planner import hardware
      >>> a, b = ("a", ""), ("b", "")
      >>> held = [[Segment("x", 0, 6, a, 0)], [Segment("x", 6, 12, a, 0)]]
      >>> wanted = [[Segment("x", 0, 8, b, 0)], [Segment("x", 8, 12, b, 0)]]
      >>> plan = exchange(held, wanted, hardware("h100"), dtype="float32")
      >>> plan, plan.bound_nbytes, plan.rounds[0].pairs
      (Exchange('', float32, 2 devices: permute[2]), 8, ((1, 0),))
    """
    if num_copies < 1 or (max_message_nbytes is not None and max_message_nbytes < 1):
        raise ValueError(f"num_copies {num_copies} and max_message_nbytes {max_message_nbytes} must be positive")
    num_shards = max(len(held), len(wanted))
    moves = overlap(held, wanted, replicas)
    messages: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        messages[move.sender, move.receiver].append(move)
    traffic = {p: sum(m.numel for m in sent) for p, sent in messages.items() if p[0] != p[1]}
    element_nbytes = num_copies * itemsize(dtype)
    if uneven:
        steps = [Step("uneven_all_to_all", max(traffic.values()), traffic)] if traffic else []
    else:
        latency = profile.latency * profile.link_bandwidth / element_nbytes
        steps = plan_steps(traffic, num_shards, latency)
        if max_padding is not None:  # the less a round costs, the less is padded to save rounds
            limit = (1 + max_padding) * most_numel(traffic)
            while latency > 0 and steps_cost(steps, num_shards, 0) > limit:
                latency = latency / 4 if latency > 1 / 4 else 0
                steps = plan_steps(traffic, num_shards, latency)
    if max_message_nbytes is not None:
        steps = split_steps(steps, num_shards, max_message_nbytes // element_nbytes)
    return Exchange(
        name=name,
        dtype=dtype,
        num_shards=num_shards,
        num_copies=num_copies,
        local=tuple(m for m in moves if m.sender == m.receiver),
        rounds=tuple(_rounds(steps, messages)),
    )


def _rounds(steps: list[Step], messages: dict[tuple[int, int], list[Move]]) -> Iterator[Round]:
    """Cuts what each pair has to move into the amounts that the steps take, in order."""
    done: dict[tuple[int, int], tuple[int, int]] = dict.fromkeys(
        messages, (0, 0)
    )  # which move is next, and how much of it is gone
    for step in steps:
        transfers = []
        for pair, numel in sorted(step.amounts.items()):
            parts, filled = [], 0
            at, gone = done[pair]
            while filled < numel:
                move = messages[pair][at]
                take = min(move.numel - gone, numel - filled)
                source, target = move.source_offset + gone, move.target_offset + gone
                parts.append(Part(move.source, source, move.target, target, take, filled))
                filled, gone = filled + take, gone + take
                if gone == move.numel:
                    at, gone = at + 1, 0
            done[pair] = at, gone
            transfers.append(Transfer(*pair, numel, tuple(parts)))
        yield Round(step.kind, step.numel, tuple(transfers))
