"""An exchange as a program for devices: from the parts of some arrays that they hold to their part of another one.

Arrays and devices may be any. Each device takes part as itself, with its own part of each array, whatever mesh and
sharding these parts belong to; a device that has none brings zeros of the same shape. So an array on 4 devices and
one on 8 are the two ends of one program on 8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ..fsdp._runs import Message, Runs, granule_of, in_units, places, profile_of
from ..layout import Segment, itemsize
from ..planner import Exchange, exchange

AXIS = "device"
MAX_PADDING = 0.05
_MAX_UNIT_NBYTES = 1 << 13
_MAX_WINDOW_NBYTES = 1 << 19
_LEAST_NBYTES = 1 << 16  # smaller limits would make many tiny messages
_MAX_MESSAGES = 8  # of a phase: each costs every window a look

Segments = tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True)
class Phase:
    """Some rounds, and then the copies into place of what they brought.

    Attributes:
      messages: the rounds.
      put: for each unit of the target, which unit it is of the arrays (in the first phase) and of what was received,
        one after the other.
    """

    messages: tuple[Message, ...]
    put: Runs


@dataclass(frozen=True)
class Program:
    """How an array is made of others.

    Attributes:
      mesh: the devices.
      sources: the shapes of their parts of the arrays.
      target: the shape of their parts of the new one.
      dtype: of all of them.
      granule: elements of a unit.
      window: elements that are copied at a time.
      phases: what happens.
      exchange: the schedule that it follows.
    """

    mesh: Mesh
    sources: tuple[tuple[int, ...], ...]
    target: tuple[int, ...]
    dtype: str
    granule: int
    window: int
    phases: tuple[Phase, ...]
    exchange: Exchange = field(compare=False)


@lru_cache(maxsize=1024)  # parameters and moments lie alike, and so do layers
def plan_program(
    mesh: Mesh,
    sources: tuple[tuple[int, ...], ...],
    target: tuple[int, ...],
    dtype: str,
    held: Segments,
    wanted: Segments,
    limit_nbytes: int,
    replicas: tuple[int, ...],
) -> Program:
    """Plans a program.

    Args:
      mesh, sources, target, dtype: of the program.
      held: for each device, what it holds; offsets count through all sources.
      wanted: for each device, what its part of the target is to hold.
      limit_nbytes: of memory that the program may take beside its arrays, on each device.
      replicas: for each device, which copy of the sources it has.
    """
    sizes = [math.prod(shape) for shape in sources]
    granule = _divisor(granule_of(held, wanted, [*sizes, math.prod(target)]), _MAX_UNIT_NBYTES // itemsize(dtype))
    limit = max(limit_nbytes, _LEAST_NBYTES)
    made = exchange(
        in_units(held, granule),
        in_units(wanted, granule),
        profile_of(mesh),
        dtype=dtype,
        num_copies=granule,
        max_padding=MAX_PADDING,
        max_message_nbytes=limit // 8,
        replicas=replicas,
    )
    num, pool, size = len(mesh.devices.flat), sum(sizes) // granule, math.prod(target) // granule
    room = limit // 2 // (granule * itemsize(dtype))
    phases: list[Phase] = []
    messages: list[Message] = []
    puts = [(m.receiver, m.target_offset, m.source_offset, m.numel) for m in made.local]
    start = received = pool

    def close() -> None:
        nonlocal start, received, messages, puts
        phases.append(Phase(tuple(messages), Runs.of(size, received, num, puts)))
        start, received, messages, puts = 0, 0, [], []

    for r in made.rounds:
        is_whole, takes = r.kind == "all_to_all", []
        length = r.numel * (num if is_whole else 1)
        if messages and (received + length - start > room or len(messages) == _MAX_MESSAGES):
            close()
        for t in r.transfers:
            sent, got = (t.receiver * r.numel, t.sender * r.numel) if is_whole else (0, 0)
            for p in t.parts:
                takes.append((t.sender, sent + p.offset, p.source_offset, p.numel))
                puts.append((t.receiver, p.target_offset, received + got + p.offset, p.numel))
        messages.append(Message(r.kind, r.numel, () if is_whole else r.pairs, Runs.of(length, pool, num, takes)))
        received += length
    close()
    window = min(limit // 16, _MAX_WINDOW_NBYTES) // itemsize(dtype)
    return Program(mesh, sources, target, dtype, granule, window, tuple(phases), made)


def _divisor(number: int, limit: int) -> int:
    """The largest divisor up to a limit, or one not much smaller."""
    for parts in range(max(1, -(-number // max(1, limit))), min(number, 1 << 16) + 1):
        if number % parts == 0:
            return number // parts
    return 1


@lru_cache(maxsize=1024)
def compiled(program: Program) -> Any:
    """The jitted program: int32 zeros and arrays whose dim 0 is cut over all devices, in and out."""
    spec = PartitionSpec(AXIS)
    body = partial(_run, program)
    specs = tuple(spec for _ in (None, *program.sources))
    return jax.jit(jax.shard_map(body, mesh=program.mesh, in_specs=specs, out_specs=spec))


def _run(program: Program, zeros: jax.Array, *arrays: jax.Array) -> jax.Array:
    zero = zeros[0]  # which the compiler cannot know: it keeps it from making all messages at once
    pools = [_bits(x).reshape(-1, program.granule) for x in arrays]
    size = math.prod(program.target) // program.granule
    out = _zeros(size, pools[0], zero)
    for at, phase in enumerate(program.phases):
        received = []
        for m in phase.messages:
            message = _filled(program, m.take, pools, _zeros(m.take.size, out, zero), zero)
            if m.kind == "permute":
                message = lax.ppermute(message, AXIS, m.pairs)
            else:
                message = lax.all_to_all(message, AXIS, 0, 0, tiled=True)
            received.append(message)
            zero = _behind(message, zero)
        pools_now = [*(pools if at == 0 else []), *received]
        out = _filled(program, phase.put, pools_now, out, zero)
        zero = _behind(out, zero)
    return _values(out.reshape(program.target), program.dtype)


def _behind(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same zero, known only when `x` is there."""
    return zero & x[0, 0].real.astype(jnp.int32)


def _zeros(num_units: int, like: jax.Array, zero: jax.Array) -> jax.Array:
    return jnp.broadcast_to(zero.astype(like.dtype), (num_units, *like.shape[1:]))


def _filled(program: Program, runs: Runs, pools: Sequence[jax.Array], out: jax.Array, zero: jax.Array) -> jax.Array:
    """`out` with units of the pools, which follow each other, wherever the runs have some; a window at a time."""

    def copy(out: jax.Array, start: Any, size: int) -> jax.Array:
        index = places(runs, AXIS, start, size) + zero
        rows, base = lax.dynamic_slice_in_dim(out, start, size), 0
        for pool in pools:
            if not len(pool):
                continue
            at, base = index - base, base + len(pool)
            inside = (at >= 0) & (at < len(pool))
            units = jnp.take(pool, jnp.clip(at, 0, len(pool) - 1), axis=0, mode="clip")
            rows = jnp.where(inside[:, None], units, rows)
        # Reads before the write: otherwise the compiler copies the whole array.
        return lax.dynamic_update_slice_in_dim(out, lax.optimization_barrier(rows), start, 0)

    window = max(1, program.window // program.granule)
    whole = runs.size // window
    if whole > 1:
        out = lax.fori_loop(0, whole, lambda i, out: copy(out, i * window, window), out)
    elif whole:
        out = copy(out, 0, window)
    return copy(out, whole * window, runs.size - whole * window) if runs.size % window else out


def _bits(x: jax.Array) -> jax.Array:
    """Narrow floats as integers: XLA's CPU backend would widen them, and with them quiet NaNs."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return x


def _values(x: jax.Array, dtype: str) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


@lru_cache(maxsize=64)
def mesh_of(devices: tuple[Any, ...]) -> Mesh:
    """All the devices in one row."""
    return Mesh(np.array(devices), (AXIS,))
