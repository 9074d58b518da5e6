"""Loss scaling: gradients too small for float16 are computed, and reduced, as multiples of themselves."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._precision import widened


def unscaled(grads: Any, scale: ArrayLike | None) -> Any:
    """Gradients of the loss itself, from those of the loss times `scale`; divided in float32 or wider."""

    def divide(g: jax.Array) -> jax.Array:
        wide = widened(g)
        return (wide / jnp.asarray(scale, wide.dtype)).astype(g.dtype)

    return grads if scale is None else jax.tree.map(divide, grads)


def all_finite(tree: Any) -> jax.Array:
    """Whether all elements of all arrays are finite: a boolean scalar, the same on all devices.

    Example:
      >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    found = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return jnp.stack(found).all() if found else jnp.array(True)


@partial(
    jax.tree_util.register_dataclass, data_fields=["value", "num_finite"], meta_fields=["period", "factor", "largest"]
)
@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and shrinks when they are not: a pytree of two scalars.

    Reference: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; as in `jmp` and torch's GradScaler.

    Attributes:
      value: the factor. `value_and_grad(..., loss_scale=)` takes it, or the whole.
      num_finite: steps since the last change.
      period: after so many finite steps the value grows.
      factor: by which it grows and shrinks.
      largest: it grows no further. With a loss in float16 it must stay below 65,504.

    Example:
      >>> scale = DynamicLossScale(jnp.float32(1024), period=1)
      >>> float(scale.adjust(True).value), float(scale.adjust(False).value)
      (2048.0, 512.0)
    """

    value: Any = field(default_factory=lambda: jnp.asarray(2.0**15, jnp.float32))
    num_finite: Any = field(default_factory=lambda: jnp.asarray(0, jnp.int32))
    period: int = 2000
    factor: float = 2.0
    largest: float = 2.0**24

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """The scale for the next step.

        Args:
          grads_finite: whether the gradients were, see `all_finite`. When they were not, skip the update
            (`optax.apply_if_finite` does).
        """
        finite = jnp.asarray(grads_finite)
        count = jnp.where(finite, self.num_finite + 1, 0)
        grow = count >= self.period
        larger = jnp.where(grow, jnp.minimum(self.value * self.factor, self.largest), self.value)
        value = jnp.where(finite, larger, jnp.maximum(self.value / self.factor, 1.0))
        return replace(self, value=value, num_finite=jnp.where(grow, 0, count).astype(jnp.int32))
