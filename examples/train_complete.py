"""A whole program: it trains a small language model on its own source, stops, and goes on with other devices.

JAX_NUM_CPU_DEVICES=4 python examples/train_complete.py 40
JAX_NUM_CPU_DEVICES=3 python examples/train_complete.py 80   # from step 40 on, with 3 devices
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ragged_jax as rj

WIDTH, HEADS, DEPTH, LENGTH = 64, 4, 2, 64
BATCH, MICROBATCHES = 48, 2  # each of 1, 2, 3, 4, 6, 8, 12 or 24 devices gets so many parts of the batch


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], HEADS, -1)
        mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=-1), is_causal=True)
        x = x + self.mix(mixed.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, 256, kernel_init=nnx.initializers.zeros, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: GPT, batch: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[:, :-1]), batch[:, 1:]).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = rj.value_and_grad(loss_fn, num_microbatches=MICROBATCHES)(model, batch)
    optimizer.update(model, grads)
    return loss


def batch_of(step: int, mesh: Mesh) -> jax.Array:
    """The same on any number of devices, split over them."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    starts = np.random.default_rng(step).integers(0, len(text) - LENGTH, (BATCH, 1))
    batch = text[starts + np.arange(LENGTH + 1)].astype(np.int32)
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("fsdp")))


def main(num_steps: int, folder: str | Path = "run", num_devices: int | None = None) -> list[float]:
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices)
    with jax.set_mesh(mesh), rj.Checkpointer(folder, keep=2) as checkpointer:
        model = rj.fully_shard(
            lambda: GPT(nnx.Rngs(0)),  # given as a function, it is born as shards
            mesh,
            axis="fsdp",
            units=Block,
            block=rj.elements(256),  # the blocks of 8-bit AdamW, which no device boundary may cut
            label={"blocks/*/kernel": "matrix"},  # so that what Muon takes shares no memory with the rest
        )
        adamw = rj.optim.adamw8bit(3e-3)
        optimizers = rj.optim.muon(0.02, adamw=adamw, route={"positions": "adamw"})
        optimizer = nnx.Optimizer(model, optax.chain(rj.optim.clip_by_global_norm(1.0), optimizers), wrt=nnx.Param)
        print(rj.describe(model), rj.optim.routing(model, route={"positions": "adamw"}), sep="\n")

        first, losses = max(checkpointer.steps(), default=0), []
        if first:  # of any number of devices
            state = checkpointer.restore({"model": model, "optimizer": optimizer})
            model, optimizer = state["model"], state["optimizer"]
        for step in range(first, num_steps):
            losses.append(float(train_step(model, optimizer, batch_of(step, mesh))))
            if (step + 1) % 10 == 0 or step + 1 == num_steps:
                print(f"step {step + 1} on {mesh.size} devices: loss {losses[-1]:.4f}")
                checkpointer.save(step + 1, {"model": model, "optimizer": optimizer})  # written in the background
    return losses


if __name__ == "__main__":
    main(int(sys.argv[1]))
