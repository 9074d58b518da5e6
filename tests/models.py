"""A small language model of awkward sizes, with every kind of leaf, and helpers that the contracts share."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import ragged_jax as rj
from ragged_jax.fsdp import Unit, units_of

VOCAB, WIDTH, LAYERS = 1601, 48, 2
ANYWHERE = rj.elements(1)


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.mix = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, 100, rngs=rngs)
        self.down = nnx.Linear(100, width, rngs=rngs)
        self.shift = nnx.Param(jnp.zeros((5,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.mix(self.norm(x)), 3, axis=-1)
        x = x + self.out(jax.nn.dot_product_attention(*(y[:, :, None] for y in (q, k, v)), is_causal=True)[:, :, 0])
        return x + self.down(nnx.gelu(self.up(x))) * (1 + self.shift[...].sum())


class OddModel(nnx.Module):
    """Vocabulary 1601, width 48, a bias of 5, a scalar, a zero-size and an integer leaf, a tied embedding."""

    def __init__(self, *, rngs: nnx.Rngs, scan: bool = False):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.scan = scan
        if scan:
            make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Block(WIDTH, rngs=rngs)))
            self.blocks = make(rngs)
        else:
            self.blocks = nnx.List([Block(WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.temperature = nnx.Param(jnp.array(4.0))
        self.nothing = nnx.Param(jnp.zeros((0, 4)))
        self.num_calls = nnx.Variable(jnp.array(0, jnp.int32))
        self.head = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head.embedding = self.embed.embedding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.num_calls[...] += 1
        x = self.embed(tokens)
        if self.scan:
            x = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head.attend(x * self.temperature[...])


def loss_fn(model, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches(steps: int, size: int = 840) -> np.ndarray:
    """Batches that divide over any of 1 to 8 devices."""
    return np.random.default_rng(1).integers(0, VOCAB, (steps, size, 5))


def make_mesh(num_devices: int, axis_type: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), ("fsdp",), axis_types=(axis_type,), devices=jax.devices()[:num_devices])


def make_sharded(num_devices: int, block=ANYWHERE, scan: bool = False, axis_type=AxisType.Explicit, **kwargs):
    model = OddModel(rngs=nnx.Rngs(0), scan=scan)
    return rj.fully_shard(
        model,
        make_mesh(num_devices, axis_type),
        axis="fsdp",
        units=Block,
        block=block,
        stacked=Block if scan else None,
        **kwargs,
    )


def train(model: nnx.Module, grad_fn, data: np.ndarray) -> list[float]:
    """AdamW over the batches, in place; the losses."""
    mesh = getattr(jax.tree.leaves(nnx.state(model, nnx.Param))[0].sharding, "mesh", None)

    @nnx.jit
    def step(model, optimizer, tokens):
        loss, grads = grad_fn(model, tokens)
        optimizer.update(model, grads)
        return loss

    with nullcontext() if mesh is None else jax.set_mesh(mesh):  # otherwise the second step compiles again
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3, eps=1e-4), wrt=nnx.Param)
        return [float(step(model, optimizer, tokens)) for tokens in data]


train_sharded = partial(train, grad_fn=rj.value_and_grad(loss_fn))
train_whole = partial(train, grad_fn=nnx.value_and_grad(loss_fn))


def flat(state: nnx.State) -> dict[str, np.ndarray]:
    """A state as arrays by path."""
    return {"/".join(map(str, path)): np.asarray(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(state)}


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray], rtol: float = 2e-5) -> None:
    """Each tensor to `rtol` of its largest element."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name].shape == expected.shape, name
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(got[name], expected, rtol=rtol, atol=rtol * scale, err_msg=name)


def poison_padding(unit: Unit, slabs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The slabs with NaN wherever no tensor lies."""
    poisoned = {}
    for slab in unit.bucket.slabs:
        array = np.array(slabs[slab.name])
        used = np.zeros(slab.shard_numel * unit.num_shards, bool)
        for placement in slab.placements:
            used[placement.offset : placement.stop] = True
        if jnp.issubdtype(array.dtype, jnp.floating) and not used.all():  # then it is not cut along other dims, too
            array.reshape(-1, used.size)[:, ~used] = np.nan
        poisoned[slab.name] = jax.device_put(array, unit.sharding(slab))
    return poisoned


def device_nbytes(tree) -> dict[int, int]:
    """Bytes that each device really holds of a tree of arrays."""
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


__all__ = [name for name in globals() if not name.startswith("_")] + ["units_of"]
