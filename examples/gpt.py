"""A small GPT on bytes, in plain Flax NNX: it knows nothing of devices or of sharding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB = 256  # a token is a byte


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the defaults make 9.7 million parameters.

    Attributes:
      depth: number of blocks.
      width: features of the residual stream, divisible by `head_width`.
      head_width: features of one attention head.
    """

    depth: int = 3
    width: int = 512
    head_width: int = 64


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, *, scale: float = 1.0) -> nnx.Linear:
    """A matrix whose outputs start with variance `scale` when its inputs have variance 1."""
    init = nnx.initializers.variance_scaling(scale, "fan_in", "normal") if scale else nnx.initializers.zeros
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `x` [batch, time, heads, features] (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), 1e4 ** -jnp.linspace(0, 1, half))[None, :, None]
    a, b = x[..., :half], x[..., half:]
    rotated = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
    return jnp.concatenate(rotated, -1).astype(x.dtype)


class Block(nnx.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width = config.width
        self.head_width = config.head_width
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = _linear(width, 3 * width, rngs)
        self.mix = _linear(width, width, rngs, scale=0)  # a block starts as the identity
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = _linear(width, 4 * width, rngs)
        self.down = _linear(4 * width, width, rngs, scale=0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        x = x + self.mix(self.attend(self.attention_norm(x)))
        return x + self.down(jnp.square(jax.nn.relu(self.up(self.mlp_norm(x)))))

    def attend(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        heads = self.qkv(x).reshape(batch, time, 3, -1, self.head_width)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        return jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True).reshape(batch, time, width)


class GPT(nnx.Module):
    """Predicts each byte from those before it."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, config.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = _linear(config.width, VOCAB, rngs, scale=0)  # the untrained model says: 8 bits per byte

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Bytes [batch, time] to logits [batch, time, 256]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
