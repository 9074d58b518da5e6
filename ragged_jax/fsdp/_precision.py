"""Which dtype weights are gathered in, gradients reduced in, and units compute in."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ._check import is_array


@dataclass(frozen=True)
class MixedPrecision:
    """Full-precision shards, low-precision work: what PyTorch's FSDP calls a mixed precision policy.

    The shards, the gradients that the optimizer sees and its state keep the dtype of the parameters. Weights are
    cast *before* they are gathered, which halves the traffic, and gradients before they are reduced. Only real floats
    are cast: a complex number would lose its imaginary part.

    Reference: `MixedPrecisionPolicy` of FSDP2, Zhao et al., arXiv:2304.11277.

    Attributes:
      param_dtype: of gathered weights, and of the floats that a unit is called with; None casts neither.
      reduce_dtype: of gradients in the reduce-scatter; None for that of the gathered weights.
      output_dtype: of the floats that a unit returns; None leaves them.
      cast_inputs: whether a unit's inputs are cast.
      gather_dtype: "int8" or "float8_e4m3fn": weights travel in a byte each, with a float32 scale for every
        `gather_block` elements, and are `param_dtype` again when they arrive. Gradients pass straight through; the
        shards stay exact. For what it does to the weights see `quantisation_error`. As in ZeRO++, Wang et al.,
        arXiv:2306.10209.
      gather_block: elements for each scale.

    Example:
      >>> MixedPrecision("bfloat16", reduce_dtype="float32") == MixedPrecision(jnp.bfloat16, jnp.float32)
      True
    """

    param_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    output_dtype: DTypeLike | None = None
    cast_inputs: bool = True
    gather_dtype: DTypeLike | None = None
    gather_block: int = 256

    def __post_init__(self):
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if not jnp.issubdtype(value, jnp.floating):
                raise ValueError(f"{name} must be a floating dtype, got {value!r}")
            object.__setattr__(self, name, jnp.dtype(value).name)  # by name, so that equal ones are equal

        if self.gather_dtype is not None:
            object.__setattr__(self, "gather_dtype", jnp.dtype(self.gather_dtype).name)
            if self.gather_dtype not in ("int8", "float8_e4m3fn"):
                raise ValueError(f"gather_dtype must be int8 or float8_e4m3fn, got {self.gather_dtype!r}")
        if self.gather_block < 1:
            raise ValueError(f"gather_block must be at least 1, got {self.gather_block}")

    def gathered(self, shard: jax.Array) -> jax.Array:
        return cast_floats(shard, self.param_dtype)

    def reduced(self, grad: jax.Array) -> jax.Array:
        return cast_floats(grad, self.reduce_dtype)

    def summed(self, grad: jax.Array) -> jax.Array:
        """A sum of gradients that is about to be reduced, whatever dtype it was added up in."""
        return cast_floats(grad, self.reduce_dtype or self.param_dtype)

    def inputs(self, tree: Any) -> Any:
        return cast_floats(tree, self.param_dtype) if self.cast_inputs else tree

    def outputs(self, tree: Any) -> Any:
        return cast_floats(tree, self.output_dtype)


FULL = MixedPrecision()
PrecisionRule = MixedPrecision | Mapping[str, MixedPrecision] | None


def precision_for(name: str, rule: PrecisionRule) -> MixedPrecision:
    """What a rule says of the unit called `name`: of a mapping, the first pattern that matches. The root is ""."""
    if rule is None:
        return FULL
    if isinstance(rule, MixedPrecision):
        return rule
    if not isinstance(rule, Mapping):
        raise TypeError(f"precision={rule!r} is neither a MixedPrecision nor a mapping from unit patterns to these")
    return next((precision for pattern, precision in rule.items() if fnmatchcase(name, pattern)), FULL)


def cast_floats(tree: Any, dtype: DTypeLike | None) -> Any:
    """A tree with its real floats in another dtype; None leaves them."""

    def cast(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return tree if dtype is None else jax.tree.map(cast, tree)


def widened(x: jax.Array) -> jax.Array:
    """An array to calculate with: of less than 32 bits, in float32."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
