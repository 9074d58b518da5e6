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
    cast *before* they are gathered, which halves the traffic, and gradients before they are reduced. Integers are
    never cast.

    Reference: `MixedPrecisionPolicy` of FSDP2, Zhao et al., arXiv:2304.11277.

    Attributes:
      param_dtype: of gathered weights, and of the floats that a unit is called with; None casts neither.
      reduce_dtype: of gradients in the reduce-scatter; None for that of the gathered weights.
      output_dtype: of the floats that a unit returns; None leaves them.
      cast_inputs: whether a unit's inputs are cast.

    Example:
      >>> MixedPrecision("bfloat16", reduce_dtype="float32")
      MixedPrecision(param_dtype='bfloat16', reduce_dtype='float32', output_dtype=None, cast_inputs=True)
    """

    param_dtype: DTypeLike | None = None
    reduce_dtype: DTypeLike | None = None
    output_dtype: DTypeLike | None = None
    cast_inputs: bool = True

    def __post_init__(self):
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if not jnp.issubdtype(value, jnp.floating):
                raise ValueError(f"{name} must be a floating dtype, got {value!r}")
            object.__setattr__(self, name, jnp.dtype(value).name)  # by name, so that equal ones are equal

    def gathered(self, shard: jax.Array) -> jax.Array:
        return shard if self.param_dtype is None else shard.astype(self.param_dtype)

    def reduced(self, grad: jax.Array) -> jax.Array:
        return grad if self.reduce_dtype is None else grad.astype(self.reduce_dtype)

    def summed(self, grad: jax.Array) -> jax.Array:
        """A sum of gradients that is about to be reduced, whatever dtype it was added up in."""
        dtype = self.reduce_dtype or self.param_dtype
        return grad if dtype is None else grad.astype(dtype)

    def inputs(self, tree: Any) -> Any:
        return _cast(tree, self.param_dtype) if self.cast_inputs else tree

    def outputs(self, tree: Any) -> Any:
        return _cast(tree, self.output_dtype)


FULL = MixedPrecision()
PrecisionRule = MixedPrecision | Mapping[str, MixedPrecision] | None


def precision_for(name: str, rule: PrecisionRule) -> MixedPrecision:
    """What a rule says of the unit called `name`: of a mapping, the first pattern that matches. The root is ""."""
    if rule is None:
        return FULL
    if isinstance(rule, MixedPrecision):
        return rule
    return next((precision for pattern, precision in rule.items() if fnmatchcase(name, pattern)), FULL)


def _cast(tree: Any, dtype: DTypeLike | None) -> Any:
    def cast(x: Any) -> Any:
        return x.astype(dtype) if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    return tree if dtype is None else jax.tree.map(cast, tree)
