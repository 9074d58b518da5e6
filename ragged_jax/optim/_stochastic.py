"""Stochastic rounding of bfloat16 parameters, with bits that are the same on any mesh."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ..fsdp import Leaf, Leaves, leaves_of
from ._places import key_of, places_of
from ._reference import LARGEST


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 to bfloat16, up or down with probabilities that make the mean exact.

    Args:
      x: float32, any shape. What is not finite stays so; numbers that bfloat16 has stay what they are.
      bits: uint32 that broadcast against it, uniformly random in their upper half.

    Reference: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bits = jax.random.bits(jax.random.key(0), (100_000,))
      >>> f"{float(stochastic_round(jnp.full(100_000, 1.001), bits).mean(dtype=jnp.float32)):.4f}"
      '1.0010'
    """
    raised = lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    cut = lax.bitcast_convert_type(raised & np.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


class StochasticRoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
      count: of the steps; int32 scalar.
      leaves: what the parameters' arrays are.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    leaves: Leaves


def stochastic_rounding(seed: Any = 0) -> optax.GradientTransformation:
    """Rounds what becomes of bfloat16 parameters up or down at random, so that small updates are not lost.

    The last transform of a chain. Updates of bfloat16 parameters become float32, such that adding them gives the
    rounded parameters; all others pass through. Which way an element is rounded depends on the seed, the step, the
    tensor's name and the element's place in it, and on nothing else: not on the mesh, the layout or the grouping.
    Layers in a stack are one tensor, and so are rounded otherwise than layers in a list.
    (A parameter that one step brings closer to zero by a factor of 2**16 is off by up to 2**-24 of what it was.)

    Args:
      seed: any integer; also a traced one.

    Raises:
      NotImplementedError: in `init`, tensors that other mesh axes split; all of them named.

    Reference: Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.ones(1000, jnp.bfloat16)
      >>> tx = optax.chain(optax.sgd(1e-3), stochastic_rounding())
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> bool((params - 1e-3 == params).all()), len(set(optax.apply_updates(params, updates).tolist()))
      (True, 2)
    """

    def init(params: Any) -> Any:
        leaves = leaves_of(params)
        for leaf in leaves:
            places_of(leaf)
        return StochasticRoundingState(jnp.zeros([], jnp.int32), leaves)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        if params is None:
            raise ValueError("stochastic rounding needs the parameters: call update(grads, state, params)")
        flat, treedef = jax.tree.flatten(updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        bits = element_bits(state.leaves, key_of(seed, count))
        out = [_rounded(u, p, b) for u, p, b in zip(flat, jax.tree.leaves(params), bits, strict=True)]
        return jax.tree.unflatten(treedef, out), StochasticRoundingState(count, state.leaves)

    return optax.GradientTransformation(init, update)


def _rounded(u: Any, p: Any, bits: Any) -> Any:
    if p.dtype != jnp.bfloat16:
        return u
    p32 = p.astype(jnp.float32)
    # The clamp keeps a product behind the update from being contracted with this sum: another program, other bits.
    raw = p32 + lax.clamp(-LARGEST, u.astype(jnp.float32), LARGEST)
    return stochastic_round(raw, bits).astype(jnp.float32) - p32


def element_bits(leaves: Leaves, key: jax.Array) -> list[Any]:
    """Of each bfloat16 leaf, random bits of its elements, uint32, in its shape and sharding; None of others."""
    return [_bits(leaf, key) if leaf.dtype == "bfloat16" else None for leaf in leaves]


def _bits(leaf: Leaf, key: jax.Array) -> jax.Array:
    places = places_of(leaf)
    if leaf.of is None:
        at = jnp.zeros(leaf.shape, jnp.uint32)
        for d in range(len(leaf.shape)):  # no reshape: the array may be sharded
            step = np.uint32(math.prod(leaf.shape[d + 1 :]) % 2**32)
            at = at + lax.broadcasted_iota(jnp.uint32, leaf.shape, d) * step
        return places.bits(key, 0)(0, at)
    unit, slab = leaf.of.unit, leaf.of.slab
    lead, whole = int(unit.stacked), unit.shape(slab)
    local = (*whole[:lead], whole[lead] // unit.num_shards, *whole[lead + 1 :])

    def body(key: jax.Array) -> jax.Array:
        draw, width = places.bits(key, lax.axis_index(unit.axis)), max(1, slab.width)
        rows = jnp.arange(math.prod(local) // width, dtype=jnp.uint32)[:, None] * np.uint32(width)
        return draw(rows, jnp.arange(width, dtype=jnp.uint32)).reshape(local)

    if unit.axis in jax.sharding.get_abstract_mesh().manual_axes:
        return body(key)
    spec = unit.spec(slab)
    run = jax.shard_map(body, mesh=unit.mesh, in_specs=PartitionSpec(), out_specs=spec, axis_names=set(unit.axes))
    return jax.jit(run)(key)
