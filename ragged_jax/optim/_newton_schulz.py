"""Newton-Schulz on a matrix that is whole, and on one whose rows lie on many devices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ._muon_reference import Scale, scale_factor

Rows = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class NewtonSchulz:
    """Orthogonalises matrices and scales the result by their shape.

    Attributes:
      rows: `(a, b, c)` of each step.
      dtype: of the products; norms are taken in float32 in any case.
      precision: of the products, as in `jax.lax.dot`.
      scale: see `scale_factor`.
    """

    rows: Rows
    dtype: str = "float32"
    precision: str | None = None
    scale: Scale = "spectral"

    def __call__(self, x: jax.Array) -> jax.Array:
        """Of `[..., fan_in, fan_out]`, in float32."""
        fan_in, fan_out = x.shape[-2:]
        x = normalised(x).astype(self.dtype)
        x = x.mT if fan_in > fan_out else x

        def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            gram = self._dot(x, x.mT).astype(self.dtype)
            inner = self._plus(row[1], gram, row[2] * self._dot(gram, gram))
            return self._plus(row[0], x, self._dot(inner, x)), None

        x, _ = lax.scan(step, x, jnp.array(self.rows, jnp.float32))
        x = x.mT if fan_in > fan_out else x
        return x.astype(jnp.float32) * scale_factor(self.scale, fan_in, fan_out)

    def sharded(self, x: jax.Array, axis: str, fan: tuple[int, int]) -> jax.Array:
        """Of matrices `[batch, rows, short]` of which each device has some rows, `short` being the shorter side.

        The products that make the small square matrices are sharded too: a device makes its rows of them, and
        they are gathered. Two collectives a step, of `short ** 2` elements a matrix.
        """
        num, short = lax.axis_size(axis), x.shape[-1]
        own = -(-short // num)
        first = lax.axis_index(axis) * own
        x = normalised(x, axis).astype(self.dtype)

        def step(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            gram = lax.psum(self._dot(x.mT, x), axis).astype(self.dtype)
            padded = jnp.pad(gram, ((0, 0), (0, own * num - short), (0, 0)))
            mine = lax.dynamic_slice_in_dim(padded, first, own, axis=1)
            mine = self._plus(row[1], mine, row[2] * self._dot(mine, gram))
            whole = lax.all_gather(mine, axis, axis=1, tiled=True)[:, :short]
            return self._plus(row[0], x, self._dot(x, whole)), None

        x, _ = lax.scan(step, x, jnp.array(self.rows, jnp.float32))
        return x.astype(jnp.float32) * scale_factor(self.scale, *fan)

    def _dot(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=self.precision, preferred_element_type=jnp.float32)

    def _plus(self, factor: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        """`factor * x + y` with one rounding at the end."""
        return (factor * x.astype(jnp.float32) + y).astype(self.dtype)


def normalised(x: jax.Array, axis: str | None = None) -> jax.Array:
    """Matrices of Frobenius norm 1, in float32; those of zeros stay so.

    The largest element is divided out first, so that no square over- or underflows: what comes out does not
    depend on the scale of what came in.

    Args:
      x: of shape [..., rows, cols].
      axis: the mesh axis over which the rows are spread.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    largest = largest if axis is None else lax.pmax(largest, axis)
    # The inverse of a very large number is not normal either.
    shrink = jnp.where(largest > 2.0**64, 2.0**-64, 1.0)
    x, largest = x * shrink, largest * shrink
    # What is not normal is flushed to zero by some backends, and cannot be divided by.
    is_zero = largest < jnp.finfo(jnp.float32).tiny
    x = jnp.where(is_zero, 0, x / jnp.where(is_zero, 1, largest))
    squares = jnp.sum(x * x, axis=(-2, -1), keepdims=True)
    squares = squares if axis is None else lax.psum(squares, axis)
    return x * lax.rsqrt(jnp.where(is_zero, 1, squares))
