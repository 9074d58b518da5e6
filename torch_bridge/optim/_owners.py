"""Brings every matrix of a sharded module to one rank, and back: one all-to-all each way."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from ragged_jax.layout import Buffer
from ragged_jax.optim._forms import Form
from ragged_jax.planner import SHARDED, Exchange, assign_owners, hardware, owner_exchange

from .._collectives import Work
from .._runtime import Runtime

Buffers = Mapping[Buffer, torch.Tensor]


class Owned(NamedTuple):
    """A matrix, or several that stay together, that this rank works on.

    Attributes:
      tensor: its name.
      form: how its stored elements are matrices.
      buffer: which buffer of what this rank owns.
      start: where it starts there.
    """

    tensor: str
    form: Form
    buffer: Buffer
    start: int

    def of(self, buffers: Buffers) -> torch.Tensor:
        """Its stored elements."""
        return buffers[self.buffer][self.start : self.start + self.form.numel]


class Owners:
    """Who works on which matrix of a sharded module, and the exchange that brings it there.

    Work is balanced over the ranks by the multiplications of Newton-Schulz; each matrix is sent once.

    Args:
      runtime: of the module.
      forms: by name, those of the tensors to bring to owners.

    Attributes:
      plan: the owners.
      too_large: tensors with a matrix that is more than a fair share of the work. JAX shards its products; here the
        ranks wait for its owner.
      owned: what this rank works on.
    """

    def __init__(self, runtime: Runtime, forms: Mapping[str, Form]):
        unit, layout = runtime.units[0], runtime.layout
        self._groups, self._device = unit.groups, unit.device
        rank = dist.get_rank(self._groups.shard)
        items = {
            form.matrix(name, index): form
            for name, form in forms.items()
            for index in range(layout.locate(name).placement.tensor.numel // form.numel)
        }
        fair = assign_owners(items, layout.num_shards, layout=layout)
        large = {m.tensor for m, owner in zip(fair.matrices, fair.owners, strict=True) if owner == SHARDED}
        self.plan, self.too_large = fair.settled(), sorted(large)
        profile = hardware("cpu" if self._device.type == "cpu" else "h100")
        there = owner_exchange(layout, self.plan, profile, uneven=True, dtype="float32")
        self._there = [_Moves(x, rank, layout.num_shards) for x in there]
        self._back = [_Moves(x.reversed(), rank, layout.num_shards) for x in there]
        by_place = {(m.tensor, m.index * m.numel): form for m, form in items.items()}
        segments = self.plan.segments()[rank]
        self.owned = [Owned(s.tensor, by_place[s.tensor, s.start], s.buffer, s.offset) for s in segments]
        self._numels: dict[Buffer, int] = {}
        for s in segments:
            self._numels[s.buffer] = max(self._numels.get(s.buffer, 0), s.offset + s.stop - s.start)

    def start(self, shards: Buffers) -> "Sending":
        """Starts to send this rank's parts of the matrices to their owners, from buffers `(bucket, slab)`."""
        own = {b: torch.empty(numel, device=self._device) for b, numel in self._numels.items()}
        return Sending(self._there, shards, own, self._groups.shard)

    def send_back(self, own: Buffers, shards: Buffers) -> None:
        """Writes what owners have made into the buffers that the matrices came from."""
        Sending(self._back, own, shards, self._groups.shard).wait()


class Sending:
    """An exchange on its way."""

    def __init__(self, moves: "Iterable[_Moves]", sources: Buffers, targets: Buffers, group: dist.ProcessGroup):
        self.targets = targets
        self._running: list[tuple[_Moves, torch.Tensor, Work | None]] = [
            (m, *m.start(sources, targets, group)) for m in moves
        ]

    def wait(self) -> Buffers:
        """The buffers that things were sent to."""
        for moves, received, work in self._running:
            if work is not None:
                work.wait()
            moves.put(received, self.targets)
        self._running = []
        return self.targets


class _Moves:
    """What one rank does in an exchange of one uneven all-to-all."""

    def __init__(self, made: Exchange, rank: int, num_shards: int):
        self._local = [m for m in made.local if m.sender == rank]
        assert len(made.rounds) <= 1
        self._communicates = bool(made.rounds)
        transfers = [t for r in made.rounds for t in r.transfers]
        self._send = [p for t in transfers if t.sender == rank for p in t.parts]
        self._receive = [p for t in transfers if t.receiver == rank for p in t.parts]
        zeros = (0,) * num_shards
        self._sent, self._received = made.rounds[0].splits(rank, num_shards) if made.rounds else (zeros, zeros)

    def start(self, sources: Buffers, targets: Buffers, group: dist.ProcessGroup) -> tuple[torch.Tensor, Work | None]:
        for m in self._local:
            target = targets[m.target][m.target_offset : m.target_offset + m.numel]
            target.copy_(sources[m.source][m.source_offset : m.source_offset + m.numel])
        like = next(iter([*sources.values(), *targets.values()]), torch.empty(0))
        received = like.new_empty(sum(self._received))
        if not self._communicates:
            return received, None
        parts = [sources[p.source][p.source_offset : p.source_offset + p.numel] for p in self._send]
        message = torch.cat(parts) if parts else like.new_empty(0)
        work = dist.all_to_all_single(
            received, message, list(self._received), list(self._sent), group=group, async_op=True
        )
        return received, work

    def put(self, received: torch.Tensor, targets: Buffers) -> None:
        start = 0
        for p in self._receive:
            targets[p.target][p.target_offset : p.target_offset + p.numel].copy_(received[start : start + p.numel])
            start += p.numel
