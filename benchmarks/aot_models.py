"""The models of `benchmarks/aot.py`: transformers as plain pytrees of abstract arrays, never allocated.

Layers are stacked on a leading dim and scanned, or lie in a list. `apply_layer` is how a layer's function is applied
to its weights: gathered by `ragged_jax`, or as they are for the compiler to gather.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Config:
    """Sizes of a transformer.

    Attributes:
      name: of the model.
      layers, width, ff, vocab: numbers of layers, and sizes of a token, of the hidden layer and of the vocabulary.
      heads, kv_heads, head_dim: of the attention.
      seq: tokens of a sequence; each device has `batch` of them.
      experts, chosen: of a mixture of experts, and how many a token goes to; 0 for a dense model.
      patch: pixels of an image patch; 0 for a language model. Its classes are `vocab`.
      scan: whether layers are stacked.
      gated: a gated hidden layer without biases (Llama), else a plain one with biases (GPT-2, ViT).
    """

    name: str
    layers: int
    width: int
    ff: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int = 2048
    batch: int = 1
    experts: int = 0
    chosen: int = 0
    patch: int = 0
    scan: bool = True
    gated: bool = True


LLAMA = Config("llama-8b", 32, 4096, 14336, 128256, 32, 8, 128)
GPT_OSS = Config("gpt-oss-20b", 24, 2880, 2880, 201088, 64, 8, 64, experts=32, chosen=4)
VIT = Config("vit-h", 32, 1280, 5120, 1000, 16, 16, 80, seq=256, batch=8, patch=14, gated=False)
ODD = Config("odd", 24, 2880, 11520, 50257, 24, 24, 120, gated=False)  # a GPT-2 of width 2880

Tree = dict[str, Any]


def abstract_params(c: Config) -> Tree:
    """The model's float32 parameters as shapes."""

    def make(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def layer(*lead: int) -> Tree:
        d, heads = c.width, c.heads * c.head_dim
        tree = {
            "norm1": make(*lead, d),
            "q": make(*lead, d, heads),
            "k": make(*lead, d, c.kv_heads * c.head_dim),
            "v": make(*lead, d, c.kv_heads * c.head_dim),
            "o": make(*lead, heads, d),
            "norm2": make(*lead, d),
        }
        if c.experts:
            tree["router"] = make(*lead, d, c.experts)
            lead = (*lead, c.experts)
        tree["up"], tree["down"] = make(*lead, d, c.ff), make(*lead, c.ff, d)
        if c.gated:
            tree["gate"] = make(*lead, d, c.ff)
        else:
            tree |= {"up_bias": make(*lead, c.ff), "down_bias": make(*lead, d)}
        return tree

    embedding = make(3 * c.patch**2, c.width) if c.patch else make(c.vocab, c.width)
    layers = layer(c.layers) if c.scan else [layer() for _ in range(c.layers)]
    return {
        "embed": {"table": embedding},
        "layers": layers,
        "head": {"norm": make(c.width), "out": make(c.width, c.vocab)},
    }


def batch_of(c: Config, num_devices: int) -> tuple[tuple[tuple[int, ...], str], tuple[tuple[int, ...], str]]:
    """Shape and dtype of the inputs and of the targets."""
    n = num_devices * c.batch
    if c.patch:
        return ((n, c.seq, 3 * c.patch**2), "bfloat16"), ((n,), "int32")
    return ((n, c.seq), "int32"), ((n, c.seq), "int32")


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def attention(c: Config, w: Tree, x: jax.Array) -> jax.Array:
    q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, c.head_dim) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=not c.patch)
    return y.reshape(*x.shape[:2], -1) @ w["o"]


def dense(c: Config, w: Tree, x: jax.Array) -> jax.Array:
    if c.gated:
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    return jax.nn.gelu(x @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]


def mixture(c: Config, w: Tree, x: jax.Array) -> jax.Array:
    """Each sequence's tokens to the experts they chose, as far as there is room, by one-hot products (GShard)."""
    room = 2 * c.seq * c.chosen // c.experts
    weights, chosen = lax.top_k(jax.nn.softmax((x @ w["router"]).astype(jnp.float32)), c.chosen)
    hot = jax.nn.one_hot(chosen, c.experts, dtype=jnp.float32)  # [batch, token, choice, expert]
    flat = hot.reshape(x.shape[0], -1, c.experts)
    place = (jnp.cumsum(flat, 1) - flat).reshape(hot.shape)
    slot = jax.nn.one_hot((place * hot).sum(-1), room, dtype=x.dtype)  # [batch, token, choice, slot]
    send = jnp.einsum("btke,btks->btes", hot.astype(x.dtype), slot)
    back = jnp.einsum("btke,btks,btk->btes", hot.astype(x.dtype), slot, weights.astype(x.dtype))
    y = jnp.einsum("btes,btd->ebsd", send, x)
    y = jax.nn.silu(jnp.einsum("ebsd,edf->ebsf", y, w["gate"])) * jnp.einsum("ebsd,edf->ebsf", y, w["up"])
    return jnp.einsum("btes,ebsd->btd", back, jnp.einsum("ebsf,efd->ebsd", y, w["down"]))


def loss(
    c: Config, params: Tree, inputs: jax.Array, targets: jax.Array, *, unit: Callable, layer: Callable, pin: Callable
):
    """Mean cross-entropy.

    Args:
      c: the sizes.
      params: the weights, in the form that `unit` and `layer` take.
      inputs, targets: token numbers, or image patches and classes.
      unit: makes, of a function of a subtree's weights and activations, one of the subtree as `params` holds it.
      layer: the same for a layer, which is to keep nothing for backward but its input.
      pin: applied to activations.
    """
    bf16 = jnp.bfloat16

    def cast(w):
        return jax.tree.map(lambda a: a.astype(bf16), w)

    def embed(w, x):
        return x @ cast(w)["table"] if c.patch else jnp.take(cast(w)["table"], x, axis=0)

    def block(w, x):
        w = cast(w)
        x = x + attention(c, w, norm(x, w["norm1"]))
        return pin(x + (mixture if c.experts else dense)(c, w, norm(x, w["norm2"])))

    def head(w, x):
        w = cast(w)
        x = norm(x, w["norm"])
        logits = pin(((x.mean(1) if c.patch else x) @ w["out"]).astype(jnp.float32))
        # Compared, not looked up: the gradient of a lookup is a scatter, which TPU compilers do on a flat copy.
        at = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
        hit = jnp.where(at, logits, 0).sum(-1)
        return (jax.nn.logsumexp(logits, -1) - hit).mean()

    x = pin(unit(embed)(params["embed"], inputs))
    if c.scan:
        x, _ = lax.scan(lambda x, w: (layer(block)(w, x), None), x, params["layers"])
    else:
        for w in params["layers"]:
            x = layer(block)(w, x)
    return unit(head)(params["head"], x)
