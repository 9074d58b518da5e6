"""One step of 8-bit Adam on the arrays of one device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._blocks import Grid
from ._maps import MapName, code_map
from ._places import Bits
from ._quantise import decode, encode, magnitude, product, scale_of


class Numbers(NamedTuple):
    """Scalars of a step: decay rates, their complements, corrections for the start, and the rest, in float32.

    `key` is uint32: what random bits depend on.
    """

    b1: Any
    b2: Any
    c1: Any
    c2: Any
    eps: Any
    correct1: Any
    correct2: Any
    ahead: Any
    rate: Any
    key: Any


@dataclass(frozen=True)
class Rules:
    """What is static about a step.

    Attributes:
      map: which code map.
      at_least: the smallest code of a second moment.
      nesterov: whether to look ahead.
      chunk: elements that are worked on together; None for all.
    """

    map: MapName
    at_least: int
    nesterov: bool
    chunk: int | None

    @property
    def signed(self):
        return code_map(self.map, signed=True)

    @property
    def unsigned(self):
        return code_map(self.map, signed=False)


class Stored(NamedTuple):
    """A moment of one array: codes in its shape, a scale for each block, float32 for what is not quantised."""

    codes: Any
    scales: Any
    exact: Any


LANES = 16  # of the widest vector registers

Finish = Callable[[Numbers, jax.Array, Any, Any], jax.Array]
"""From the direction (float32), what goes along with it (gradient or parameter) and random bits, or None for those,
to what the step returns."""


def power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """`base ** exponent` by repeated squaring: the same bits in every program, compiled or folded."""
    result, square = jnp.float32(1), jnp.asarray(base, jnp.float32)
    for bit in range(31):
        result = jnp.where((exponent >> bit) & 1, result * square, result)
        square = square * square
    return result


def moments(n: Numbers, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    g = jnp.where(jnp.isfinite(g), g, np.float32(np.nan))
    return product(n.b1, m) + product(n.c1, g), product(n.b2, v) + product(n.c2, product(g, g))


def direction(n: Numbers, rules: Rules, g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
    if rules.nesterov:
        first = product(n.b1, product(m, n.ahead)) + product(n.c1, product(g, n.correct1))
    else:
        first = product(m, n.correct1)
    return first / (jnp.sqrt(product(v, n.correct2)) + n.eps)


def step(
    grid: Grid,
    rules: Rules,
    n: Numbers,
    index: Any,
    g: jax.Array,
    mu: Stored,
    nu: Stored,
    along: Any,
    finish: Finish,
    draw: Bits | None = None,
) -> tuple[jax.Array, Stored, Stored]:
    """What `finish` makes of the step's direction, and the next moments.

    Args:
      grid: the blocks of the array.
      rules, n: of the optimizer.
      index: which of the devices this is.
      g: gradient, the device's part of the array.
      mu, nu: its moments.
      along: what `finish` takes beside the direction, in the shape of `g`.
      finish: see there.
      draw: random bits for it.
    """
    if not g.size:
        return jnp.zeros_like(along), mu, nu
    if not grid.parts:
        valid = _inside(grid, index, g) if grid.padded else None
        m, v = moments(n, g.astype(jnp.float32), mu.exact, nu.exact)
        bits = draw(jnp.arange(g.size, dtype=jnp.uint32), 0).reshape(g.shape) if draw else None
        out = finish(n, direction(n, rules, g.astype(jnp.float32), m, v), along, bits)
        if valid is not None:
            m, v, out = (jnp.where(valid, x, jnp.zeros_like(x)) for x in (m, v, out))
        return out, mu._replace(exact=m), nu._replace(exact=v)
    if grid.view is not None:
        return _uniform(grid.view, rules, n, g, mu, nu, along, finish, draw)
    return _ragged(grid, rules, n, index, g, mu, nu, along, finish, draw)


def _uniform(view: tuple, rules: Rules, n: Numbers, g, mu: Stored, nu: Stored, along, finish: Finish, draw):
    """Where a reshape makes the blocks: a chunk of whole blocks at a time, in one pass."""
    strips, height, across, width = view
    strips *= g.size // (strips * height * across * width)  # of all layers

    # No dims of size 1: they make the compiler copy arrays into another layout, and vectorise worse.
    flat_blocks = height == across == 1

    def blocks(x):
        return x.reshape(-1, width) if flat_blocks else x.reshape(-1, height, across, width)

    def spread(s):
        return s[:, None] if flat_blocks else s.reshape(-1, 1, across, 1)

    def one(given, held):
        (target, mc, ms, vc, vs), (grads, strip) = held, given
        gf, along = blocks(target if grads is None else grads).astype(jnp.float32), blocks(target)
        bits = None if strip is None else blocks(draw(strip[:, None] * np.uint32(numel), on))

        def now(g, mc, ms, vc, vs):
            m = decode(blocks(mc), spread(ms), rules.signed)
            v = decode(blocks(vc), spread(vs), rules.unsigned)
            return moments(n, g, m, v)

        m, v = now(gf, mc, ms, vc, vs)
        # Unchunked, the moments are made twice: in memory they would cost more than to make them.
        most = (m, v) if rules.chunk else now(*lax.optimization_barrier((gf, mc, ms, vc, vs)))
        new_ms, new_vs = (scale_of(_largest(x)) for x in most)
        out = finish(n, direction(n, rules, gf, m, v), along, bits)
        new_mc = encode(m, spread(new_ms), rules.signed)
        new_vc = encode(v, spread(new_vs), rules.unsigned, rules.at_least)
        new = (out, new_mc, new_ms, new_vc, new_vs)
        return tuple(x.reshape(like.shape) for x, like in zip(new, held, strict=True))

    def flat(x):
        return x.reshape(strips, -1)

    def scales(s):
        return s.reshape(strips) if across == 1 else s.reshape(strips, across)

    held = (flat(along), flat(mu.codes), scales(mu.scales), flat(nu.codes), scales(nu.scales))
    numel = height * across * width
    on = jnp.arange(numel, dtype=jnp.uint32)
    given = (None if along is g else flat(g), jnp.arange(strips, dtype=jnp.uint32) if draw else None)
    size = rules.chunk and max(1, rules.chunk // numel)
    out, mc, ms, vc, vs = in_place(one, given, held, size)
    return (
        out.reshape(g.shape),
        mu._replace(codes=mc.reshape(g.shape), scales=ms.reshape(mu.scales.shape)),
        nu._replace(codes=vc.reshape(g.shape), scales=vs.reshape(nu.scales.shape)),
    )


def _largest(x: jax.Array) -> jax.Array:
    """[blocks, width] or [strips, height, blocks, width] to the largest magnitude of each block.

    In two stages, of which the first leaves a vector register's worth: a CPU reduces a last dim element by element.
    """
    *outer, width = x.shape
    bits = magnitude(x)
    if width % LANES or width == LANES:
        return jnp.max(bits, axis=-1 if len(outer) == 1 else (1, 3))
    bits = bits.reshape(*outer, width // LANES, LANES)
    return jnp.max(lax.optimization_barrier(jnp.max(bits, axis=1 if len(outer) == 1 else (1, 3))), axis=-1)


def _ragged(grid: Grid, rules: Rules, n: Numbers, index, g, mu: Stored, nu: Stored, along, finish, draw):
    """Where blocks begin anywhere: first the largest of every block, and then, in a second pass, the codes."""
    shape, unit = g.shape, grid.unit
    layers = g.size // grid.room
    ids, none = _block_of_unit(grid, index, layers), layers * grid.num_blocks
    units = lambda x: x.reshape(-1, unit)
    old = [jnp.append(s.scales.reshape(-1), np.float32(0)) for s in (mu, nu)]
    inputs = (units(g), units(mu.codes), units(nu.codes), ids)
    size = rules.chunk and max(1, rules.chunk // unit)

    def now(g, mc, vc, ids):
        gf = g.astype(jnp.float32)
        scales = [s.at[ids].get(mode="promise_in_bounds")[:, None] for s in old]
        return gf, *moments(n, gf, decode(mc, scales[0], rules.signed), decode(vc, scales[1], rules.unsigned))

    def largest(*inputs):
        _, m, v = now(*inputs)
        return magnitude(m).max(1), magnitude(v).max(1)

    new = []
    for most in chunked(largest, inputs, size):
        blocks = jnp.zeros_like(most, shape=none + 1).at[ids].max(most, mode="promise_in_bounds")
        new.append(scale_of(blocks.at[none].set(0)))

    on = jnp.arange(unit, dtype=jnp.uint32)

    def finished(g, mc, vc, ids, along, at):
        gf, m, v = now(g, mc, vc, ids)
        valid = (ids < none)[:, None]
        bits = draw(at[:, None] * np.uint32(unit), on) if draw else None
        out = finish(n, direction(n, rules, gf, m, v), along, bits)
        m, v = (jnp.where(valid, x, np.float32(0)) for x in (m, v))
        ms, vs = (s.at[ids].get(mode="promise_in_bounds")[:, None] for s in new)
        codes = encode(m, ms, rules.signed), encode(v, vs, rules.unsigned, rules.at_least)
        return jnp.where(valid, out, jnp.zeros_like(out)), *codes

    out, mc, vc = chunked(finished, (*inputs, units(along), jnp.arange(ids.size, dtype=jnp.uint32)), size)
    m_exact, v_exact = mu.exact, nu.exact
    if grid.exact:
        at = _exact_places(grid, index)
        pick = lambda x: x.reshape(layers, -1).at[:, at].get(mode="fill", fill_value=0)
        gf, held = pick(g).astype(jnp.float32), (layers, grid.num_exact)
        m, v = moments(n, gf, m_exact.reshape(held), v_exact.reshape(held))
        layer = jnp.arange(layers, dtype=jnp.uint32)[:, None] * np.uint32(grid.room)
        bits = draw(layer + jnp.minimum(at, grid.room - 1).astype(jnp.uint32), 0) if draw else None
        some = finish(n, direction(n, rules, gf, m, v), pick(along), bits)
        out = out.reshape(layers, -1).at[:, at].set(some, mode="drop")
        m_exact, v_exact = m.reshape(m_exact.shape), v.reshape(v_exact.shape)
    return (
        out.reshape(shape),
        Stored(mc.reshape(shape), new[0][:-1].reshape(mu.scales.shape), m_exact),
        Stored(vc.reshape(shape), new[1][:-1].reshape(nu.scales.shape), v_exact),
    )


def _block_of_unit(grid: Grid, index: Any, layers: int) -> jax.Array:
    """int32 [layers * units]: the block of every unit, counted over all layers; one past the last for none."""
    runs = jnp.asarray(grid.runs)[index]
    at = jnp.arange(grid.room // grid.unit, dtype=jnp.int32) * grid.unit
    ids = jnp.full_like(at, -1)
    for p, part in enumerate(grid.parts):
        start, length, first = runs[p, 0], runs[p, 1], runs[p, 2]
        inside = (at >= start) & (at < start + length)
        ids = jnp.where(inside, first + part.block_of(jnp.maximum(at - start, 0)), ids)
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None]
    return jnp.where(ids < 0, layers * grid.num_blocks, layer * grid.num_blocks + ids).reshape(-1)


def _exact_places(grid: Grid, index: Any) -> jax.Array:
    """int32 [num_exact]: where in a device's elements those lie that stay in float32; past the end for none."""
    runs = jnp.asarray(grid.exact_runs)[index]
    e = jnp.arange(grid.num_exact, dtype=jnp.int32)
    at = jnp.full_like(e, grid.room)
    for p in range(len(grid.exact)):
        start, length, first = runs[p, 0], runs[p, 1], runs[p, 2]
        at = jnp.where((e >= first) & (e < first + length), start + e - first, at)
    return at


def _inside(grid: Grid, index: Any, g: jax.Array) -> jax.Array:
    """bool, of the shape of `g`: whether a tensor lies there."""
    runs = jnp.asarray(grid.exact_runs)[index]
    at = jnp.arange(grid.room, dtype=jnp.int32)
    valid = jnp.zeros_like(at, dtype=bool)
    for p in range(len(grid.exact)):
        valid = valid | ((at >= runs[p, 0]) & (at < runs[p, 0] + runs[p, 1]))
    return jnp.broadcast_to(valid, (g.size // grid.room, grid.room)).reshape(g.shape)


def in_place(function: Callable, given: tuple, held: tuple, size: int | None) -> tuple[jax.Array, ...]:
    """`function` of arrays with a common dim 0, `size` of it at a time; what it gives replaces each chunk of `held`.

    `given` may hold None.
    The barriers keep reads before the writes of the same chunk; otherwise the compiler copies whole arrays.
    """
    length = held[0].shape[0]
    if size is None or length <= size:
        return function(given, held)
    size = next((d for d in range(size, size // 4, -1) if length % d == 0), size)

    def replace(held, start, size):
        take = lambda x: lax.dynamic_slice_in_dim(x, start, size)
        old = lax.optimization_barrier(tuple(take(x) for x in held))
        new = lax.optimization_barrier(function(jax.tree.map(take, given), old))
        return tuple(lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(held, new, strict=True))

    whole = length // size
    held = lax.fori_loop(0, whole, lambda i, held: replace(held, i * size, size), held)
    return replace(held, whole * size, length - whole * size) if length % size else held


def chunked(function: Callable, inputs: tuple[jax.Array, ...], size: int | None) -> tuple[jax.Array, ...]:
    """`function` of arrays with a common dim 0, `size` of it at a time, so that temporaries stay small."""
    length = inputs[0].shape[0]
    if size is None or length <= size:
        return function(*inputs)
    whole = length // size
    divisor = next((d for d in range(size, size // 2, -1) if length % d == 0), None)
    if divisor:
        size, whole = divisor, length // divisor
    body = lambda _, xs: (None, function(*xs))
    split = [x[: whole * size].reshape(whole, size, *x.shape[1:]) for x in inputs]
    out = lax.scan(body, None, tuple(split))[1]
    out = [x.reshape(whole * size, *x.shape[2:]) for x in out]
    if whole * size < length:
        rest = function(*(x[whole * size :] for x in inputs))
        out = [jnp.concatenate([x, y]) for x, y in zip(out, rest, strict=True)]
    return tuple(out)
