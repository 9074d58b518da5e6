"""When collectives run: which matrix products a compiled program's schedule puts between their start and their end.

The text of optimised HLO is in the order of the schedule. A collective with a start and a done runs in the background
of what stands between the two; one that has neither stops the device. What stands there is a schedule, not a time: a
short product hides little of a long gather.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..planner import plain, size
from ._hlo import (
    COLLECTIVES,
    _called,
    _Computation,
    _Instruction,
    _Module,
    _move,
    _own,
    _parse,
    of_known_form,
    text_of,
    trip_count,
)

if TYPE_CHECKING:
    from rich.table import Table

_SCOPE = re.compile(r"(?:unshard|reduce):((?:(?!unshard:|reduce:)[^)\"\s])*)(\)?)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_GEMM = re.compile(r"__cublas|__cudnn\$(?!norm)|__triton_gemm|__triton_nested_gemm|\$matmul|\$gemm")


@dataclass(frozen=True)
class ScheduledCollective:
    """A collective where the schedule has it.

    Attributes:
      kind: an HLO opcode, such as `all-gather`.
      unit: the bucket it belongs to, by the names of `ragged_jax`'s scopes; empty for others, several with
        commas where the compiler combined them.
      computation: the part of the program it is in.
      in_loop: whether that is the body of a loop.
      backward: whether it is part of the backward pass.
      executed: how often it runs.
      nbytes: of the whole arrays, once: a gather's result, otherwise the operand.
      num_arrays: how many arrays the compiler combined in it.
      num_matmuls: products scheduled between its start and its done; 0 when it has neither.
      num_matmuls_in_computation: all products of that part of the program.
    """

    kind: str
    unit: str
    computation: str
    in_loop: bool
    backward: bool
    executed: int
    nbytes: int
    num_arrays: int
    num_matmuls: int
    num_matmuls_in_computation: int

    @property
    def exposed(self) -> bool:
        """Whether no product runs beside it."""
        return self.num_matmuls == 0


@dataclass(frozen=True)
class Move:
    """An instruction (or a fusion) that does nothing but move data.

    Attributes:
      opcode: `copy`, `transpose`, `slice` and so on.
      unit: the bucket it belongs to, or empty.
      shape: dims of what it writes; of the first array of several.
      executed: how often it runs.
      nbytes: written, on all runs.
    """

    opcode: str
    unit: str
    shape: tuple[int, ...]
    executed: int
    nbytes: int


@dataclass(frozen=True)
class OverlapReport:
    """What a program's collectives are hidden behind; `str` gives a table.

    Attributes:
      collectives: in the order of the schedule.
      moves: instructions that only move data.
    """

    collectives: tuple[ScheduledCollective, ...]
    moves: tuple[Move, ...]

    @property
    def exposed_in_loops(self) -> tuple[ScheduledCollective, ...]:
        """Collectives in loops beside which no product runs."""
        return tuple(c for c in self.collectives if c.in_loop and c.exposed)

    @property
    def unit_moved_nbytes(self) -> int:
        """Bytes moved while buckets are gathered and reduced: what a layout that is not free to read costs."""
        return sum(move.nbytes for move in self.moves if move.unit)

    def table(self) -> "Table":
        """As a `rich` table, a line for each collective."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("collective", "unit", "pass", "runs", "MiB", "arrays", "products beside it"):
            table.add_column(heading, justify="left" if heading in ("collective", "unit", "pass") else "right")
        for c in self.collectives:
            beside = f"{c.num_matmuls} of {c.num_matmuls_in_computation}" + (" EXPOSED" if c.exposed else "")
            where = ("backward" if c.backward else "forward") + (" loop" if c.in_loop else "")
            mib = f"{c.nbytes / 2**20:.2f}"
            table.add_row(c.kind, c.unit or "-", where, str(c.executed), mib, str(c.num_arrays), beside)
        return table

    def __str__(self):
        return plain(self.table())

    def __repr__(self):
        num, exposed, moved = len(self.collectives), len(self.exposed_in_loops), size(self.unit_moved_nbytes)
        return f"OverlapReport({num} collectives, {exposed} exposed in loops, {moved} moved for units)"


@of_known_form
def overlap_report(compiled: Any) -> OverlapReport:
    """Reads a compiled program's schedule.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for devices that are here or absent; or its text.

    Raises:
      TypeError: it is something else, such as a function.
      ValueError: the text is not that of an HLO module, or not of a scheduled one, or of a form that is not known
        here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> report = overlap_report(jax.jit(lambda x: x @ x).lower(jnp.ones((64, 64))).compile())
      >>> report.collectives, report.exposed_in_loops
      ((), ())
    """
    text = text_of(compiled)
    module = _parse(text)
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("the HLO module is not scheduled: give the text of a compiled program, not of a lowered one")
    collectives: list[ScheduledCollective] = []
    moves: list[Move] = []
    for name, times, in_loop in _runs(module, module.entry, 1, False):
        collectives += _collectives(module, name, times, in_loop)
        moves += _moves(module, module.computations[name], times)
    return OverlapReport(tuple(collectives), tuple(moves))


def _runs(module: _Module, name: str, times: int, in_loop: bool) -> Iterator[tuple[str, int, bool]]:
    """The computations that are scheduled on their own, how often they run, and whether in a loop."""
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        if instruction.opcode == "while":
            count = trip_count(module, computation, instruction) or 1
            yield from _runs(module, _called(instruction)[0], times * count, True)
        elif instruction.opcode in ("call", "conditional"):
            for called in _called(instruction):
                if called in module.computations:
                    yield from _runs(module, called, times, in_loop)
    yield name, times, in_loop


def _collectives(module: _Module, name: str, times: int, in_loop: bool) -> Iterator[ScheduledCollective]:
    computation = module.computations[name]
    before = [0]  # products above each instruction
    position, ends, chains = {}, {}, {}
    taken = {name for i in computation.instructions.values() for name in i.operands}
    for at, instruction in enumerate(computation.instructions.values()):
        position[instruction.name] = at
        before.append(before[-1] + _num_matmuls(module, computation, instruction))
        if instruction.opcode.endswith("-done"):
            ends[_start_of(computation, instruction).name] = at
        elif (part := _part(module, instruction)) and part[1]:
            chains[part[1]] = at  # the last fusion of a chain is its done
    for instruction in computation.instructions.values():
        found = _collective(module, computation, instruction)
        if found is None:
            continue
        kind, nbytes, num_arrays, inner, chain = found
        start = position[instruction.name]
        if chain:
            end = chains[chain]
        elif instruction.opcode.endswith("-start"):
            goes_on = instruction.name in taken  # without a done, into the next iteration; if anybody waits for it
            end = ends.get(instruction.name, len(position) if goes_on else start)
        else:
            end = start
        beside = before[end] - before[start + 1] if end > start else 0
        op_name = _op_name(instruction) or _op_name(inner)
        where = (name, in_loop, "transpose(" in op_name)
        yield ScheduledCollective(kind, _unit(op_name), *where, times, nbytes, num_arrays, beside, before[-1])


def _start_of(computation: _Computation, done: _Instruction) -> _Instruction:
    """What a done waits for; between the two there may be updates."""
    instruction = computation.instructions[done.operands[0]]
    while instruction.opcode.endswith("-update"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _collective(
    module: _Module, computation: _Computation, instruction: _Instruction
) -> tuple[str, int, int, _Instruction, str] | None:
    """Kind, bytes, arrays, the collective itself, and its chain, when the instruction starts one."""
    inner, chain = instruction, ""
    if instruction.opcode in ("async-start", "call-start"):
        bodies = [module.computations[c] for c in _called(instruction) if c in module.computations]
        inside = [(body, i) for body in bodies for i in body.instructions.values() if i.opcode in COLLECTIVES]
        if not inside:
            return None
        computation, inner = inside[0]
    elif part := _part(module, instruction):
        computation, chain, inner = part
    counts: Counter = _own(module, computation, inner, False)
    kinds = [kind for what, kind in counts if what == "run"]
    if not kinds:
        return None
    return kinds[0], counts["nbytes", kinds[0]], len(inner.operands), inner, chain


def _part(module: _Module, fusion: _Instruction) -> tuple[_Computation, str, _Instruction] | None:
    """A fusion's computation, the chain of the collective in it, and that collective."""
    if fusion.opcode != "fusion":
        return None
    body = module.computations[_called(fusion)[0]]
    for i in body.instructions.values():
        if i.opcode in COLLECTIVES and (chain := _CHAIN.search(i.attributes)):
            return body, chain[1], i
    return None


def _num_matmuls(module: _Module, computation: _Computation, instruction: _Instruction) -> int:
    """Products that an instruction runs; a fusion counts as one."""
    if instruction.opcode in ("dot", "convolution"):
        return 1
    if instruction.opcode == "custom-call":
        return bool(_GEMM.search(instruction.attributes))
    if instruction.opcode == "fusion":
        return bool(_GEMM.search(instruction.attributes)) or _has_matmul(module)(_called(instruction)[0])
    if instruction.opcode in ("while", "call", "conditional", "async-start", "call-start"):
        called = [module.computations[c] for c in _called(instruction) if c in module.computations]
        inside = [sum(_num_matmuls(module, body, i) for i in body.instructions.values()) for body in called]
        runs = trip_count(module, computation, instruction) or 1 if instruction.opcode == "while" else 1
        return runs * (max(inside, default=0) if instruction.opcode == "conditional" else sum(inside))
    return 0


def _has_matmul(module: _Module) -> Any:
    @cache
    def has(name: str) -> bool:
        instructions = module.computations[name].instructions.values()
        if any(i.opcode in ("dot", "convolution") for i in instructions):
            return True
        return any(has(c) for i in instructions if i.opcode == "fusion" for c in _called(i))

    return has


def _moves(module: _Module, computation: _Computation, times: int) -> Iterator[Move]:
    for instruction in computation.instructions.values():
        if move := _move(module, computation, instruction):
            dims = re.search(r"\[([\d,]*)\]", instruction.type)
            shape = tuple(int(d) for d in dims[1].split(",") if d) if dims else ()
            yield Move(move[0], _unit(_op_name(instruction)), shape, times, times * move[1])


def _op_name(instruction: _Instruction) -> str:
    match = _OP_NAME.search(instruction.attributes)
    return match[1] if match else ""


def _unit(op_name: str) -> str:
    """The buckets in whose scope an operation was made. The last part of a scope's path is the operation."""
    names: dict[str, None] = {}  # in order, once: a reduction is made in the scope of the gather it belongs to
    for path, closed in _SCOPE.findall(op_name):
        scope, called, _ = path.partition("/jit(")
        name, _, last = scope.rstrip(":/").rpartition("/")
        inner = called or path.endswith("/")  # the operation is that of a function or of a scope further in
        whole = not name or inner or (closed and last not in ("all_gather", "reduce_scatter"))
        names[f"{name}/{last}" if whole and name else name or last] = None
    return ",".join(names)
