"""AdamW with moments in 8 bits: the codes and scales of `ragged_jax.optim.adamw8bit`, bit for bit."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.optim.optimizer import ParamsT

from ragged_jax.optim._blocks import DEFAULT, BlockChoice, check_choice, not_whole
from ragged_jax.optim._maps import CodeMap, MapName, code_map
from ragged_jax.optim._reference import LARGEST, power

from ._blocks import Quantised, Shape, blocks_of, cut_blocks
from ._codes import (
    Buffers,
    Scratch,
    decode,
    encode,
    flush_,
    inverse,
    magnify,
    magnify_,
    product_,
    scales_of,
    sqrt_,
)
from ._joined import Row, joined, zeros_beside
from ._sharded import ShardedOptimizer, StateTensor, by_step, flat

CHUNK_ON_CPU, CHUNK = 2**18, 2**26


class AdamW8bit(ShardedOptimizer):
    """AdamW whose moments are kept in 8 bits, block by block: 2.03 bytes a parameter instead of 8.

    Codes and scales have the bits of `ragged_jax.optim.adamw8bit` for the same gradients, for any number of ranks and
    for whole tensors: what is quantised, and in which blocks, is decided by a tensor's path and global shape.

    Args:
      params: parameters, named parameters or groups; of fully sharded modules, ordinary ones, or both.
      lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; each may differ by group.
      block: which elements share a scale: one block, or a mapping from patterns of paths to blocks, where None keeps
        a tensor's moments in float32 and what matches nothing has `elements(256)`. With rows and tiles, tensors of
        one dim keep their moments in float32. No rank boundary may cut a block.
      map: what the 256 codes stand for: dynamic, linear or fp8.
      min_numel: tensors with fewer elements, over all ranks, keep their moments in float32.
      clamp_second_moment: never rounds a second moment to zero unless its whole block is. False is the published
        rule, for exchange with other libraries.
      nesterov: looks one step ahead, as `torch.optim.NAdam` does.
      chunk: elements that are worked on together: temporaries are a few times as large. By default 2**18 on a CPU
        and 2**26 elsewhere.

    Raises:
      ValueError: a boundary between ranks cuts blocks; every such tensor is listed with the remedy.

    Reference: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

    Example:
      >>> model = torch.nn.Linear(64, 64)
      >>> optimizer = AdamW8bit(model.parameters(), lr=1e-2)
      >>> model(torch.ones(64)).sum().backward()
      >>> optimizer.step()
      >>> optimizer.state[model.weight]["mu_codes"].dtype, optimizer.state[model.weight]["mu_scales"].numel()
      (torch.uint8, 16)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: BlockChoice = DEFAULT,
        map: MapName = "dynamic",
        min_numel: int = 4096,
        clamp_second_moment: bool = True,
        nesterov: bool = False,
        chunk: int | Literal["auto"] = "auto",
    ):
        check_choice(block)
        code_map(map, signed=True)
        self._block, self._min_numel, self._chunk = block, min_numel, chunk
        self._blocks: dict[torch.Tensor, Quantised | None] = {}
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                "map": map, "clamp_second_moment": clamp_second_moment, "nesterov": nesterov,
            },
        )  # fmt: skip

    def _check(self, group: dict[str, Any]) -> None:
        locals_ = [self.local(p) for p in group["params"]]
        if faults := [f for local in locals_ for f in cut_blocks(local, self._block, self._min_numel)]:
            raise not_whole(faults)
        for p, local in zip(group["params"], locals_, strict=True):
            self._blocks[p] = blocks_of(local, self._block, self._min_numel)

    def _make_state(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        rules = Rules.of(group)
        quantised = [p for p in params if self._blocks[p]]
        exact = [p for p in params if not self._blocks[p]]
        for moment, zero in (("mu", rules.signed.zero), ("nu", max(rules.unsigned.zero, rules.at_least))):
            counts = [q.stop - q.first for p in quantised if (q := self._blocks[p])]
            codes = zeros_beside(quantised, [p.numel() for p in quantised], torch.uint8)
            scales = zeros_beside(quantised, counts, torch.float32)
            for p, code, scale in zip(quantised, codes, scales, strict=True):
                self.state[p] |= {f"{moment}_codes": code.fill_(zero), f"{moment}_scales": scale}
            for p, x in zip(exact, zeros_beside(exact, [p.numel() for p in exact], torch.float32), strict=True):
                self.state[p][moment] = x

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        rules, scratch = Rules.of(group), Scratch()
        for count, some in by_step((p, self.state[p]) for p in params).items():
            numbers = Numbers.of(group, count)
            rows: dict[Shape | None, list[Row]] = defaultdict(list)
            strided = {}
            for p in some:
                own = flat(p)
                if not p.is_contiguous():
                    strided[p] = own
                for shape, row in self._rows(p, own):
                    rows[shape].append(row)
            for shape, members in rows.items():
                for row in members if shape and shape.ids else joined(members):
                    for part in self._chunks(shape, row):
                        _step(rules, numbers, shape, part, scratch)
            for p, own in strided.items():
                p.copy_(own.view(p.shape))

    def _rows(self, p: torch.Tensor, own: torch.Tensor) -> Iterator[tuple[Shape | None, Row]]:
        state, grad, blocks = self.state[p], flat(p.grad), self._blocks[p]  # type: ignore
        if blocks is None:
            if p.numel():
                yield None, (own, grad, state["mu"], state["nu"])
            return
        for piece in blocks.pieces:
            at, which = slice(piece.start, piece.stop), slice(piece.first, piece.last)
            moments = [x for m in ("mu", "nu") for x in (state[f"{m}_codes"][at], state[f"{m}_scales"][which])]
            yield piece.shape, (own[at], grad[at], *moments)

    def _chunks(self, shape: Shape | None, row: Row) -> Iterable[Row]:
        """A row in parts of whole strips."""
        numel, by_default = row[0].numel(), CHUNK_ON_CPU if row[0].device.type == "cpu" else CHUNK
        chunk = by_default if isinstance(self._chunk, str) else self._chunk
        strip = 1 if shape is None else shape.strip_numel
        if numel <= chunk or (shape and shape.ids):
            return [row]
        strips = max(1, chunk // strip)
        return zip(*(x.split(strips * (x.numel() * strip // numel)) for x in row), strict=True)

    def _named(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> Iterable[StateTensor]:
        local, blocks = self.local(p), self._blocks[p]
        whole = (local.shape, local.start, local.stop, local.placement.axis_order)
        for moment in ("mu", "nu"):
            head = local.name, f"0/{moment}"
            if blocks is None:
                yield StateTensor(*head, "exact", *whole, None, state[moment])
                continue
            yield StateTensor(*head, "codes", *whole, blocks.block, state[f"{moment}_codes"])
            scales = (blocks.num_blocks,), blocks.first, blocks.stop, None
            yield StateTensor(*head, "scales", *scales, blocks.block, state[f"{moment}_scales"])


@dataclass(frozen=True)
class Rules:
    """Which codes."""

    signed: CodeMap
    unsigned: CodeMap
    at_least: int
    nesterov: bool

    @classmethod
    def of(cls, group: dict[str, Any]) -> "Rules":
        signed, unsigned = (code_map(group["map"], signed=signed) for signed in (True, False))
        return cls(signed, unsigned, int(group["clamp_second_moment"]), group["nesterov"])


@dataclass(frozen=True)
class Numbers:
    """The scalars of a step in float32: decay rates, complements, corrections for the start, the rest.

    On the CPU, wherever the parameters are: what a kernel is given as a number of Python is cast for each call.
    """

    b1: torch.Tensor
    b2: torch.Tensor
    c1: torch.Tensor
    c2: torch.Tensor
    eps: torch.Tensor
    correct1: torch.Tensor
    correct2: torch.Tensor
    ahead: torch.Tensor
    lr: torch.Tensor
    decay: torch.Tensor
    may_overflow: bool  # a finite gradient times `c1` may reach 2**125
    decays: bool
    decay_may_overflow: bool  # so may a parameter times `decay`

    @classmethod
    def of(cls, group: dict[str, Any], count: int) -> "Numbers":
        b1, b2 = group["betas"]

        def left(b: float, step: int) -> np.float32:
            return np.float32(1) / (np.float32(1) - power(b, step))

        numbers = (
            b1, b2, 1 - b1, 1 - b2, group["eps"], left(b1, count), left(b2, count), left(b1, count + 1),
            float(group["lr"]), group["weight_decay"],
        )  # fmt: skip
        made = (torch.tensor(np.float32(x)) for x in numbers)
        decay = group["weight_decay"]
        return cls(*made, may_overflow=1 - b1 > 0.125, decays=bool(decay), decay_may_overflow=decay > 0.125)


def _step(rules: Rules, n: Numbers, shape: Shape | None, row: Row, scratch: Scratch) -> None:
    """Updates parameters, codes and scales of one shape in place; without a shape, moments in float32."""
    if shape is None:
        p, g, m, v = row
        buffers = scratch(p)
        g = _finite(rules, g, buffers)
        _moments(n, g, m, v, buffers)
        v = buffers["v"].copy_(v)
        return _apply(n, p, _direction(rules, n, g, m, v, buffers), buffers)
    p, g, mc, ms, vc, vs = row
    p, mc, vc = shape.view(p), shape.view(mc), shape.view(vc)
    buffers = scratch(p)
    g = _finite(rules, shape.view(g), buffers)
    m, v = buffers["m"], buffers["v"]
    decode(mc, shape.spread(ms, g), rules.signed, m, buffers)
    decode(vc, shape.spread(vs, g), rules.unsigned, v, buffers)
    _moments(n, g, m, v, buffers)
    for x, magnitude, codes, scales, table, least in (
        (m, torch.abs(m, out=buffers["scaled"]), mc, ms, rules.signed, 0),
        (v, v, vc, vs, rules.unsigned, rules.at_least),
    ):
        scales.copy_(scales_of(shape.largest(magnitude)))
        encode(x, shape.spread(inverse(scales), x), table, least, codes, buffers)
    return _apply(n, p, _direction(rules, n, g, m, v, buffers), buffers)


def _finite(rules: Rules, g: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """In float32; what is not finite as NaN.

    What is not normal stays until a product with a number below 1, or with itself, or is flushed before any other.
    """
    if g.dtype == torch.float32:
        g = torch.add(g, g, alpha=0, out=buffers["g"])  # infinity times zero is NaN
    else:
        g = buffers["g"].copy_(g)
        g.add_(g, alpha=0)
    return flush_(g) if rules.nesterov else g


def _moments(n: Numbers, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, buffers: Buffers) -> None:
    part = flush_(torch.mul(g, n.c1, out=buffers["scaled"]))
    if n.may_overflow:
        part.clamp_(-float(LARGEST), float(LARGEST))
    flush_(product_(m, n.b1).add_(part))
    square = magnify(g, g, buffers["scaled"])  # what is not normal is flushed in the next product
    flush_(product_(v, n.b2).add_(flush_(square.mul_(n.c2))))


def _direction(
    rules: Rules, n: Numbers, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, buffers: Buffers
) -> torch.Tensor:
    """In memory of its own; `g` and `v` are scratch afterwards."""
    out = magnify(m, n.ahead if rules.nesterov else n.correct1, buffers["out"])
    if rules.nesterov:
        flush_(product_(out, n.b1).add_(product_(magnify_(g, n.correct1), n.c1)))
    return flush_(out.div_(sqrt_(magnify_(v, n.correct2), buffers).add_(n.eps)))


def _apply(n: Numbers, p: torch.Tensor, u: torch.Tensor, buffers: Buffers) -> None:
    """Moves parameters along a direction, which is scratch afterwards."""
    p32 = p if p.dtype == torch.float32 else buffers["p"].copy_(p)
    if n.decays:
        part = flush_(torch.mul(p32, n.decay, out=buffers["scaled"]))
        if n.decay_may_overflow:
            part.clamp_(-float(LARGEST), float(LARGEST))
        u.add_(part)
    p32.sub_(product_(u, n.lr))
    if p32 is not p:
        p.copy_(p32)
