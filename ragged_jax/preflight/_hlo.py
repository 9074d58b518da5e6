"""What a compiled program does, read from its optimised HLO: collectives, data movement, memory.

Counts are per device and per run of the program: an instruction in a loop counts as often as the loop runs, and
of the branches of a conditional the most expensive one counts (for each count on its own). An asynchronous pair of
start and done counts once.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ..planner import plain, size

if TYPE_CHECKING:
    from rich.table import Table

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MOVES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "transpose", "pad", "reverse")
_FREE = {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "broadcast", "iota"}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^=]*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(pred|[a-z]+(\d+)\w*)\[([\d,<=]*)\](?:\{[^}]*\})?")
_NAME = re.compile(r"%?([\w.\-]+)$")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_GROUPS_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_GROUPS_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_GROUPS_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")


@dataclass(frozen=True)
class Collective:
    """One kind of collective in a program.

    Attributes:
      static: instructions in the text.
      executed: how often they run.
      nbytes: of the whole arrays, on all runs: a gather's result, otherwise the operand.
      wire_nbytes: what a device sends, on all runs, with ring algorithms.
    """

    static: int
    executed: int
    nbytes: int
    wire_nbytes: int


@dataclass(frozen=True)
class HloReport:
    """What a compiled program does on each device; `str` gives a table.

    Attributes:
      collectives: by kind (an HLO opcode such as `all-gather`).
      moved_nbytes: by opcode, bytes written by instructions that only move data, and by fusions of such (under the
        opcode that writes the result). A dynamic-update-slice works in place and writes its update alone.
      unknown_loops: loops whose trip count the compiler does not know; their bodies count once.
      argument_nbytes, output_nbytes, alias_nbytes, temp_nbytes: memory per device. Outputs that reuse donated
        arguments are in `alias_nbytes`. None when the report was made from text.
    """

    collectives: Mapping[str, Collective]
    moved_nbytes: Mapping[str, int]
    unknown_loops: int = 0
    argument_nbytes: int | None = None
    output_nbytes: int | None = None
    alias_nbytes: int | None = None
    temp_nbytes: int | None = None

    @property
    def num_executed(self) -> int:
        """Collectives executed, of all kinds."""
        return sum(c.executed for c in self.collectives.values())

    @property
    def wire_nbytes(self) -> int:
        return sum(c.wire_nbytes for c in self.collectives.values())

    @property
    def total_moved_nbytes(self) -> int:
        return sum(self.moved_nbytes.values())

    def table(self) -> "Table":
        """As a `rich` table: a line for each kind of collective, for what only moves data, and for memory."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("on each device")
        for heading in ("instructions", "runs", "bytes", "sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        for kind, c in self.collectives.items():
            table.add_row(kind, str(c.static), str(c.executed), size(c.nbytes), size(c.wire_nbytes))
        static, nbytes = (sum(getattr(c, what) for c in self.collectives.values()) for what in ("static", "nbytes"))
        table.add_row("all collectives", str(static), str(self.num_executed), size(nbytes), size(self.wire_nbytes))
        table.add_section()
        for opcode, moved in self.moved_nbytes.items():
            table.add_row(f"moved by {opcode}", "", "", size(moved))
        table.add_row("all that is only moved", "", "", size(self.total_moved_nbytes))
        table.add_section()
        for what, nbytes in self._memory:
            table.add_row(what, "", "", size(nbytes))
        if self.unknown_loops:
            table.add_section()
            table.add_row("loops of unknown length, counted once", str(self.unknown_loops))
        return table

    @property
    def _memory(self) -> tuple[tuple[str, int], ...]:
        memory = {
            "arguments": self.argument_nbytes,
            "outputs": self.output_nbytes,
            "of these in place of arguments": self.alias_nbytes,
            "temporary memory": self.temp_nbytes,
        }
        return tuple((what, nbytes) for what, nbytes in memory.items() if nbytes is not None)

    def __str__(self):
        return plain(self.table())

    def __repr__(self):
        parts = [f"{c.executed} {kind}" for kind, c in self.collectives.items()] or ["no collectives"]
        parts += [f"{size(self.wire_nbytes)} sent", f"{size(self.total_moved_nbytes)} moved"]
        parts += [f"{size(self.temp_nbytes)} temporary"] if self.temp_nbytes is not None else []
        return f"HloReport({', '.join(parts)})"


Report = TypeVar("Report")


def of_known_form(read: Callable[[Any], Report]) -> Callable[[Any], Report]:
    """Makes a reader refuse a module in which something is not there that it counts on."""

    @wraps(read)
    def checked(compiled: Any) -> Report:
        try:
            return read(compiled)
        except (LookupError, StopIteration, RuntimeError) as error:
            raise ValueError(f"the text is of no form of HLO that is known here: {error!r}") from error

    return checked


@of_known_form
def hlo_report(compiled: Any) -> HloReport:
    """Reads a compiled program.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for devices that are here or absent; or its text.

    Raises:
      TypeError: it is something else, such as a function.
      ValueError: the text is not that of an HLO module, or of a form that is not known here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x.T), x))
      >>> report = hlo_report(f.lower(jnp.ones((64, 64))).compile())
      >>> report.num_executed, report.argument_nbytes
      (0, 16384)
    """
    text = text_of(compiled)
    memory = {}
    if not isinstance(compiled, str) and (stats := compiled.memory_analysis()) is not None:
        memory = {f"{kind}_nbytes": getattr(stats, f"{kind}_size_in_bytes") for kind in _MEMORY}
    module = _parse(text)
    executed, static = _count(module)
    collectives = {
        kind: Collective(n, executed["run", kind], executed["nbytes", kind], executed["wire", kind])
        for kind in COLLECTIVES
        if (n := static["run", kind])
    }
    moved = {op: n for op in (*MOVES, "reshape") if (n := executed["moved", op])}
    return HloReport(collectives, moved, static["unknown", "while"], **memory)


_MEMORY = ("argument", "output", "alias", "temp")


def text_of(compiled: Any) -> str:
    """The optimised HLO of a compiled program, which may be given as its text.

    Raises:
      TypeError: it is something else.
    """
    if isinstance(compiled, str):
        return compiled
    if not hasattr(compiled, "memory_analysis"):
        remedy = (
            "call `.compile()` on it"
            if hasattr(compiled, "compile")
            else "write `jax.jit(f).lower(*args).compile()`, also with arguments that are `jax.ShapeDtypeStruct`"
        )
        raise TypeError(f"a report is of a compiled program or of its text, got {type(compiled).__name__}; {remedy}")
    return compiled.as_text()


@dataclass
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)

    @property
    def root(self) -> _Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def nbytes(self, name: str) -> int:
        """Of an operand."""
        return _nbytes(self.instructions[name].type)


@dataclass
class _Module:
    computations: dict[str, _Computation]
    entry: str


def _parse(text: str) -> _Module:
    computations: dict[str, _Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line)
        if header := _HEADER.match(line):
            current = computations[header[2]] = _Computation()
            entry = header[2] if header[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            try:
                parsed = _instruction(match[1], match[2], line.lstrip().startswith("ROOT "))
            except ValueError:
                raise ValueError(f"this is not an instruction of HLO: {line.strip()!r:.200}") from None
            current.instructions[match[1]] = parsed
    if not entry:
        raise ValueError("no entry computation: this is not the text of an HLO module")
    return _Module(computations, entry)


def _instruction(name: str, rest: str, is_root: bool) -> _Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    stop = _closing(rest, start)
    inner = rest[start + 1 : stop]
    # an operand is a name, in some dumps after its type; a constant's or a parameter's "operand" is a literal
    operands = [m[1] for part in _split(inner) if (m := _NAME.search(part))]
    return _Instruction(name, kind, rest[:start], operands, rest[stop + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced brackets in {text!r:.80}")


def _split(text: str) -> Iterator[str]:
    """Parts of a list, at the commas outside of brackets."""
    depth = start = 0
    for i, char in enumerate(text):
        depth += (char in "({[") - (char in ")}]")
        if char == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _nbytes(kind: str) -> int:
    """Bytes of a type, of all its elements for a tuple. Tokens and opaque values have none."""
    total = 0
    for _, bits, dims in _ARRAY.findall(kind):
        numel = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
        total += -(-numel * int(bits or 8) // 8)
    return total


def _elements(kind: str) -> list[str]:
    """The types in a tuple type; the type itself for an array."""
    return list(_split(kind[1:-1])) if kind.startswith("(") else [kind]


def _count(module: _Module) -> tuple[Counter, Counter]:
    """Counts by (what, kind): those of a run, and those of the text."""
    static: Counter = Counter()

    @cache
    def total(name: str, fused: bool) -> Counter:
        computation, counts = module.computations[name], Counter()
        for instruction in computation.instructions.values():
            own = _own(module, computation, instruction, fused)
            for key in own:
                static[key] += key[0] == "run"
            counts += own
            runs = trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
            static["unknown", "while"] += runs is None
            if own:  # a collective or a move has nothing more in it
                continue
            inside = fused or instruction.opcode == "fusion"
            called = [total(c, inside) for c in _called(instruction) if c in module.computations]
            if instruction.opcode == "conditional":
                branches: Counter = Counter()
                for branch in called:
                    branches |= branch
                called = [branches]
            for body in called:
                counts += _times(body, runs or 1)
            for condition in _CONDITION.findall(instruction.attributes):
                counts += _times(total(condition, inside), runs + 1 if runs else 1)
        return counts

    return total(module.entry, False), static


def trip_count(module: _Module, computation: _Computation, loop: _Instruction) -> int | None:
    """How often a loop runs: as the compiler says, or else (TPU) from a counter that rises by one to a constant."""
    if match := _TRIP_COUNT.search(loop.attributes):
        return int(match[1])
    condition = module.computations[_CONDITION.findall(loop.attributes)[0]]
    body = module.computations[_called(loop)[0]]
    test, start, new = condition.root, computation.instructions.get(loop.operands[0]), body.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes or start is None or start.opcode != "tuple":
        return None
    counter, end = (condition.instructions[name] for name in test.operands)
    index = re.search(r"\bindex=(\d+)", counter.attributes)
    if counter.opcode != "get-tuple-element" or index is None or end.opcode != "constant" or new.opcode != "tuple":
        return None
    first = _source(computation, start.operands[int(index[1])])
    step = body.instructions[new.operands[int(index[1])]]
    if first.opcode != "constant" or step.opcode != "add":
        return None
    ones = [_source(body, name) for name in step.operands]
    if not any(i.opcode == "constant" for i in ones):
        return None
    by = next(i for i in ones if i.opcode == "constant").operands[0]
    return max(0, int(end.operands[0]) - int(first.operands[0])) if by == "1" else None


def _source(computation: _Computation, name: str) -> _Instruction:
    """The instruction behind copies and bitcasts."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _times(counts: Counter, factor: int) -> Counter:
    return Counter({key: factor * n for key, n in counts.items()})


def _called(instruction: _Instruction) -> list[str]:
    """Computations that the instruction runs; without a loop's condition."""
    found = _CALLED.findall(instruction.attributes)
    for listed in _BRANCHES.findall(instruction.attributes):
        found += [m[1] for part in _split(listed) if (m := _NAME.search(part))]
    return found


def _own(module: _Module, computation: _Computation, instruction: _Instruction, fused: bool) -> Counter:
    """What an instruction does itself; empty for all but collectives and moves."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "fusion" and (called := _called(instruction)) and called[0].startswith("all-reduce-scatter"):
        # how a TPU writes a reduce-scatter: a sum over all, of which only a slice is made
        inner = module.computations[called[0]]
        (summed,) = (i for i in inner.instructions.values() if i.opcode == "all-reduce")
        counts = _own(module, inner, summed, fused)
        nbytes, wire = counts["nbytes", "all-reduce"], counts["wire", "all-reduce"] // 2
        kind = "reduce-scatter"
        return Counter({("run", kind): 1, ("nbytes", kind): nbytes, ("wire", kind): wire})
    if opcode in COLLECTIVES and _is_continuation(computation, instruction):
        return Counter()
    if opcode in COLLECTIVES:
        nbytes = sum(computation.nbytes(name) for name in instruction.operands)
        size = _group_size(instruction.attributes)
        if opcode == "all-gather":
            kind = instruction.type
            if instruction.opcode.endswith("-start"):  # of type (operands, results)
                kind = _elements(kind)[1]
            nbytes = _nbytes(kind)
            size = size or round(nbytes / max(1, sum(computation.nbytes(n) for n in instruction.operands)))
        share = (size - 1) / size if size and not opcode.startswith("collective") else 1.0
        wire = round(nbytes * share * (2 if opcode == "all-reduce" else 1))
        return Counter({("run", opcode): 1, ("nbytes", opcode): nbytes, ("wire", opcode): wire})
    if not fused and (move := _move(module, computation, instruction)):
        kind, nbytes = move
        return Counter({("moved", kind): nbytes})
    return Counter()


def _is_continuation(computation: _Computation, collective: _Instruction) -> bool:
    """Whether this is a later part of a collective that a TPU runs in the background of several products."""
    return "chain_id=" in collective.attributes and not any(
        '"AsyncCollectiveStart"' in i.attributes for i in computation.instructions.values()
    )


def _group_size(attributes: str) -> int:
    """Devices that take part in a collective, or 0 when the text does not say."""
    if listed := _GROUPS_LISTED.search(attributes):
        return len(listed[1].split(","))
    if mesh := _GROUPS_MESH.search(attributes):  # sizes of axes, and which of them take part
        sizes = dict(part.split("=") for part in mesh[1].split(","))
        return math.prod(int(sizes.get(axis.strip(), 1)) for axis in mesh[2].split(","))
    iota = _GROUPS_IOTA.search(attributes)
    return int(iota[1]) if iota else 0


def _move(module: _Module, computation: _Computation, instruction: _Instruction) -> tuple[str, int] | None:
    """The opcode and the bytes written, if the instruction only moves data."""
    if instruction.opcode == "copy-start":
        # from one memory space to another is a prefetch, which the compiler hides; within one it is a copy
        target, source = (re.findall(r"S\((\d+)\)", part) for part in _elements(instruction.type)[:2])
        return ("copy", _nbytes(_elements(instruction.type)[0])) if target == source else None
    # outside of fusions a free reshape is a bitcast by now; what is still a reshape changes the tiling of a TPU
    if instruction.opcode in (*MOVES, "reshape"):
        return instruction.opcode, _written(computation, instruction)
    if instruction.opcode != "fusion":
        return None
    body = module.computations[_called(instruction)[0]]
    opcodes = {i.opcode for i in body.instructions.values()}
    if not opcodes <= _FREE.union(MOVES) or not opcodes & set(MOVES):
        return None
    results = [body.root]
    if body.root.opcode == "tuple":
        results = [body.instructions[name] for name in body.root.operands]
    writers = [_writer(body, result) for result in results]
    return writers[0].opcode, sum(_written(body, w, r) for w, r in zip(writers, results, strict=True))


def _writer(body: _Computation, result: _Instruction) -> _Instruction:
    """The move behind a fusion's result, which may be reshaped after it; any move when there are several ways."""
    while result.opcode not in MOVES and result.opcode in ("bitcast", "reshape"):
        result = body.instructions[result.operands[0]]
    if result.opcode in MOVES:
        return result
    return next(i for i in reversed(body.instructions.values()) if i.opcode in MOVES)


def _written(body: _Computation, writer: _Instruction, result: _Instruction | None = None) -> int:
    if writer.opcode == "dynamic-update-slice":
        return body.nbytes(writer.operands[1])
    return _nbytes((result or writer).type)
