"""The model of the benchmark, and the two usual ways to train it fully sharded without `ragged_jax`.

`named_sharding` is what the Flax and MaxText guides do: every array is split along its largest dim that the
devices divide, the batch along dim 0, activations are constrained to that, and the compiler does the rest.
`per_parameter` is the hand-written form: `shard_map`, and one all-gather per parameter where it is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "fsdp"


@dataclass(frozen=True)
class Config:
    """Sizes of the transformer. `scan`: layers stacked on a leading dim, not in a Python list."""

    layers: int = 8
    width: int = 256
    ff: int = 1024
    heads: int = 8
    vocab: int = 4096
    seq: int = 128
    scan: bool = True
    dtype: Any = jnp.float32


class Block(nnx.Module):
    """A pre-norm transformer block."""

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.heads = c.heads
        self.norm1 = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.qkv = nnx.Linear(c.width, 3 * c.width, dtype=c.dtype, rngs=rngs)
        self.out = nnx.Linear(c.width, c.width, dtype=c.dtype, rngs=rngs)
        self.norm2 = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.up = nnx.Linear(c.width, c.ff, dtype=c.dtype, rngs=rngs)
        self.down = nnx.Linear(c.ff, c.width, dtype=c.dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = self.qkv(self.norm1(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """A decoder; tokens in, next-token logits out."""

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.config = c
        self.embed = nnx.Embed(c.vocab, c.width, dtype=c.dtype, rngs=rngs)
        self.position = nnx.Param(jax.random.normal(rngs.params(), (c.seq, c.width)) * 0.02)
        if c.scan:
            self.blocks = nnx.vmap(lambda rngs: Block(c, rngs=rngs))(rngs.split(c.layers))
        else:
            self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.layers)])
        self.norm = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocab, use_bias=False, dtype=c.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, layer: Callable, constrain: Callable) -> jax.Array:
        """`layer(block, x)` runs one block; `constrain` is applied to activations."""
        x = constrain(self.embed(tokens) + self.position[...].astype(self.config.dtype)[None])

        def step(block, x):
            return constrain(layer(block, x))

        if self.config.scan:
            x = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                x = step(block, x)
        return constrain(self.head(self.norm(x)))


def call(block: Block, x: jax.Array) -> jax.Array:
    return block(x)


def loss_fn(model: GPT, tokens: jax.Array, layer: Callable = call, constrain: Callable = lambda x: x) -> jax.Array:
    """Mean cross-entropy of tokens[:, 1:] given what comes before."""
    logits = model(tokens[:, :-1], layer, constrain).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def largest_divisible_dim(shape: tuple[int, ...], num_devices: int, stacked: bool) -> PartitionSpec:
    """The usual rule. An array none of whose dims divide is replicated."""
    dims = [d for d in range(int(stacked), len(shape)) if shape[d] and shape[d] % num_devices == 0]
    if not dims:
        return PartitionSpec()
    dim = max(dims, key=lambda d: shape[d])
    return PartitionSpec(*(None,) * dim, AXIS)


def specs_of(state: Any, num_devices: int, scan: bool) -> Any:
    """The partition spec of every array of a model's parameters."""

    def spec(path, x):
        return largest_divisible_dim(x.shape, num_devices, scan and path[0].key == "blocks")

    return jax.tree_util.tree_map_with_path(spec, state)


def shard_by_largest_dim(model: GPT, mesh: Mesh) -> GPT:
    """Spreads the parameters over the mesh by the usual rule, in place."""
    state = nnx.state(model, nnx.Param)
    specs = specs_of(state, mesh.size, model.config.scan)
    nnx.update(model, jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), state, specs))
    return model


def named_sharding(mesh: Mesh, remat: Callable | None = None) -> Callable:
    """Loss and gradient under jit with `NamedSharding`.

    The weights need no checkpointing here: what autodiff keeps is their shards.

    Args:
      mesh: the devices.
      remat: a `jax.checkpoint` policy for each layer, or None to keep all activations.
    """

    def constrain(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(AXIS)))

    layer = call if remat is None else nnx.remat(call, policy=remat, prevent_cse=False)

    def value_and_grad(model, tokens):
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens, layer, constrain)
        specs = specs_of(grads, mesh.size, model.config.scan)
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        return loss, jax.tree.map(lax.with_sharding_constraint, grads, shardings)

    return value_and_grad


def per_parameter(mesh: Mesh, remat: Callable) -> Callable:
    """Loss and gradient by hand: every parameter gathered in its natural shape where it is used.

    Args:
      mesh: the devices.
      remat: a `jax.checkpoint` policy for each layer; it must not keep the gathered weights.
    """

    def gather(x, spec):
        return lax.all_gather(x, AXIS, axis=len(spec) - 1, tiled=True) if spec else x

    def value_and_grad(model, tokens):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        specs = specs_of(params, mesh.size, model.config.scan)
        block_specs = specs["blocks"]
        if model.config.scan:  # of one layer
            block_specs = jax.tree.map(lambda s: PartitionSpec(*s[1:]), block_specs)

        def layer(block, x):
            graphdef, state = nnx.split(block)
            mine = block_specs if model.config.scan else next(iter(block_specs.values()))

            def run(state, x):
                return nnx.merge(graphdef, jax.tree.map(gather, state, mine))(x)

            return jax.checkpoint(run, policy=remat, prevent_cse=not model.config.scan)(state, x)

        def local(params, tokens):
            def local_loss(params):
                root = {k: v if k == "blocks" else jax.tree.map(gather, v, specs[k]) for k, v in params.items()}
                return loss_fn(nnx.merge(graphdef, nnx.State(root), rest), tokens, layer)

            loss, grads = jax.value_and_grad(local_loss)(params)
            return lax.pmean(loss, AXIS), jax.tree.map(lambda g: g / mesh.size, grads)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(specs, PartitionSpec(AXIS)), out_specs=(PartitionSpec(), specs)
        )(params, tokens)

    return value_and_grad
