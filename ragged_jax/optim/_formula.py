"""The formulas of Adam in 8 bits: what a step does to each element."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._maps import MapName, code_map
from ._quantise import product


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
      kernel: what works on blocks of consecutive elements.
    """

    map: MapName
    at_least: int
    nesterov: bool
    chunk: int | None
    kernel: Literal["xla", "pallas"] = "xla"

    @property
    def signed(self):
        return code_map(self.map, signed=True)

    @property
    def unsigned(self):
        return code_map(self.map, signed=False)


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
