"""The awkward small language model in Flax Linen: layers in a list or scanned, tied, scalars and empty leaves."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from models import LAYERS, VOCAB, WIDTH


class LinenBlock(nn.Module):
    dtype: Any = jnp.float32
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        def dense(width: int) -> nn.Dense:
            return nn.Dense(width, param_dtype=self.dtype)

        h = nn.Dropout(self.dropout, deterministic=not train)(nn.LayerNorm(param_dtype=self.dtype)(x))
        shift = self.param("shift", nn.initializers.zeros, (5,), self.dtype)
        return x + dense(WIDTH)(nn.gelu(dense(100)(h))) * (1 + shift.sum())


class Layer(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return LinenBlock(self.dtype, name="block")(x), None


class LinenModel(nn.Module):
    """Its embedding is used by two methods; made in `setup`."""

    scan: bool = False
    remat: bool = False
    dtype: Any = jnp.float32

    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH, param_dtype=self.dtype)
        layer = nn.remat(Layer) if self.remat else Layer
        if self.scan:
            over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
            self.blocks = nn.scan(layer, **over)(self.dtype)
        else:
            self.blocks = [layer(self.dtype) for _ in range(LAYERS)]
        self.temperature = self.param("temperature", nn.initializers.constant(4.0), (), self.dtype)
        self.nothing = self.param("nothing", nn.initializers.zeros, (0, 4), self.dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in [self.blocks] if self.scan else self.blocks:
            x, _ = block(x, None)
        return self.embed.attend(x * self.temperature)
