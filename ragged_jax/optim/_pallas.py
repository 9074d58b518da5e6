"""The step of 8-bit Adam as one kernel: everything is read once and written once.

`_adam8bit_math` does the same in operations of JAX, of which compilers make several passes. There are two ways to
look a number up in a table: a GPU gathers from memory, a TPU only along 128 lanes. There a code is found by a binary
search whose 255 midpoints lie in two such rows, 127 of the first seven levels and 128 of the last.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ._formula import Finish, Numbers, Rules, direction, moments
from ._maps import CodeMap
from ._quantise import encode_with, magnitude, scale_of

LANES = 128
GPU_BLOCKS, TPU_BLOCKS = 4, 256  # that a program works on together


def can_run(view: tuple[int, int, int, int] | None) -> bool:
    """Whether the kernel is for such blocks: consecutive elements, a multiple of 128 and a power of two of them."""
    return view is not None and view[1] == view[2] == 1 and view[3] % LANES == 0 and view[3] & (view[3] - 1) == 0


def blocks_step(rules: Rules, n: Numbers, finish: Finish, along: Any, g: Any, mu: Any, nu: Any) -> tuple:
    """A step on arrays of blocks `[blocks, width]`, compiled for the platform that it is lowered for.

    Args:
      rules, n, finish: as in `step`.
      along: what `finish` takes beside the direction.
      g: the gradient; None where it is `along`.
      mu, nu: codes, and scales `[blocks]`.

    Returns:
      What `finish` gives, and the new codes and scales of each moment.
    """
    arrays = (along, *(() if g is None else (g,)), *mu, *nu)
    run = lambda body, interpret: partial(_call, body, interpret, rules, finish, g is not None)
    return lax.platform_dependent(
        n, *arrays, cpu=run("gpu", True), cuda=run("gpu", False), rocm=run("gpu", False), tpu=run("tpu", False)
    )


def _call(
    body: str, interpret: bool, rules: Rules, finish: Finish, has_grad: bool, n: Numbers, *arrays: Any
) -> tuple:
    """The kernel `body`, as a program of its platform or, with `interpret`, as operations of JAX."""
    num, width = arrays[0].shape
    size = int(np.gcd(num, GPU_BLOCKS)) if body == "gpu" else min(num, TPU_BLOCKS)
    tables = [np.asarray(t) for m in (rules.signed, rules.unsigned) for t in _TABLES[body](m)]
    matrix, vector = pl.BlockSpec((size, width), lambda i: (i, 0)), pl.BlockSpec((size,), lambda i: (i,))
    whole = lambda x: pl.BlockSpec(x.shape, lambda i: (0,) * x.ndim)
    options: dict[str, Any] = {}
    numbers = jnp.stack(n[:-1])
    if body == "gpu":
        from jax.experimental.pallas import triton

        options["compiler_params"] = triton.CompilerParams(num_warps=4, num_stages=1)
        of_numbers = whole(numbers)
    else:
        from jax.experimental.pallas import tpu

        of_numbers = pl.BlockSpec(memory_space=tpu.SMEM)
    specs = [matrix if x.ndim == 2 else vector for x in arrays]
    own = [x for i, x in enumerate(arrays) if not (has_grad and i == 1)]
    replaced = [i for i in range(len(arrays)) if not (has_grad and i == 1)]
    first = 1 + len(tables)
    return pl.pallas_call(
        partial(_kernel, body, rules, finish, has_grad),
        grid=(-(-num // size),),
        in_specs=[of_numbers, *map(whole, tables), *specs],
        out_specs=[matrix if x.ndim == 2 else vector for x in own],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own],
        input_output_aliases={first + i: o for o, i in enumerate(replaced)},
        interpret=interpret,
        **options,
    )(numbers, *tables, *arrays)


def _kernel(body: str, rules: Rules, finish: Finish, has_grad: bool, numbers: Any, *refs: Any) -> None:
    count = len(_TABLES[body](rules.signed))
    tables, refs = (refs[:count], refs[count : 2 * count]), refs[2 * count :]
    inputs, outputs = refs[: len(refs) - 5], refs[len(refs) - 5 :]
    n = Numbers(*(numbers[i] for i in range(len(Numbers._fields) - 1)), key=None)
    along, (mc, ms, vc, vs) = inputs[0][...], inputs[-4:]
    gf = inputs[int(has_grad)][...].astype(jnp.float32)
    look = _LOOKS[body]
    m, v = (
        look.values(t, codes[...].astype(jnp.int32)) * scales[...][:, None]
        for t, codes, scales in zip(tables, (mc, vc), (ms, vs), strict=True)
    )
    m, v = moments(n, gf, m, v)
    outputs[0][...] = finish(n, direction(n, rules, gf, m, v), along, None)
    for i, (x, t, own, least) in enumerate(
        ((m, tables[0], rules.signed, 0), (v, tables[1], rules.unsigned, rules.at_least))
    ):
        scale = scale_of(jnp.max(magnitude(x), axis=1))
        inverse = jnp.where(scale == 0, np.float32(0), 1 / scale)
        codes = look.codes(t, x * inverse[:, None], own)
        outputs[1 + 2 * i][...] = jnp.maximum(codes, least).astype(jnp.uint8)
        outputs[2 + 2 * i][...] = scale


class _Gathered:
    """Tables in memory."""

    @staticmethod
    def tables(own: CodeMap) -> list[np.ndarray]:
        return [own.values, own.cells]

    @staticmethod
    def values(tables: Any, codes: jax.Array) -> jax.Array:
        return tables[0][codes]

    @staticmethod
    def codes(tables: Any, y: jax.Array, own: CodeMap) -> jax.Array:
        return encode_with(lambda cell: tables[1][cell], y, own)


class _Lanes:
    """Tables as rows of 128 lanes."""

    @staticmethod
    def tables(own: CodeMap) -> list[np.ndarray]:
        tree = np.zeros(
            256, np.float32
        )  # the midpoints as a binary search meets them; node k has children 2k, 2k + 1
        for level in range(8):
            step = 256 >> level
            tree[1 << level : 2 << level] = own.midpoints[step // 2 - 1 :: step]
        return [own.values.reshape(2, LANES), tree.reshape(2, LANES)]

    @staticmethod
    def values(tables: Any, codes: jax.Array) -> jax.Array:
        low, high = (_along_lanes(tables[0][i, :], codes & 127) for i in range(2))
        return jnp.where(codes < LANES, low, high)

    @staticmethod
    def codes(tables: Any, y: jax.Array, own: CodeMap) -> jax.Array:
        node = jnp.ones(y.shape, jnp.int32)
        for level in range(8):
            middle = _along_lanes(tables[1][level // 7, :], node & 127)
            node = 2 * node + (y > middle).astype(jnp.int32)
        return node - 256


def _along_lanes(row: jax.Array, at: jax.Array) -> jax.Array:
    """`row[at]`, for a row of 128 and places of any width."""
    row = jnp.broadcast_to(row[None], (at.shape[0], LANES))
    parts = [
        jnp.take_along_axis(row, at[:, i : i + LANES], axis=1, mode="promise_in_bounds")
        for i in range(0, at.shape[1], LANES)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


_LOOKS: dict[str, Any] = {"gpu": _Gathered, "tpu": _Lanes}
_TABLES: dict[str, Callable[[CodeMap], list[np.ndarray]]] = {name: look.tables for name, look in _LOOKS.items()}
