"""Name maps that are ready for use."""

from ._names import NameMap

_MATRIX = "in out -> out in"  # Flax kernels are (in, out), torch weights (out, in)


def _dense(source: str, target: str) -> tuple[tuple[str, ...], ...]:
    return (f"{source}/kernel", f"{target}.weight", _MATRIX), (f"{source}/bias", f"{target}.bias")


def _norm(source: str, target: str) -> tuple[tuple[str, ...], ...]:
    return (f"{source}/scale", f"{target}.weight"), (f"{source}/bias", f"{target}.bias")


NAME_MAPS: dict[str, NameMap] = {
    "gpt": NameMap(
        (
            ("embed/embedding", "embed.weight"),
            ("blocks/{i}/{norm}/scale", "blocks.{i}.{norm}.weight"),
            ("blocks/{i}/{matrix}/kernel", "blocks.{i}.{matrix}.weight", _MATRIX),
            ("norm/scale", "norm.weight"),
            ("head/kernel", "head.weight", _MATRIX),
        ),
        choices={"norm": ("attention_norm", "mlp_norm"), "matrix": ("qkv", "mix", "up", "down")},
    ),
    "bert": NameMap(
        (
            ("embeddings/{table}/embedding", "embeddings.{table}_embeddings.weight"),
            *_norm("embeddings/norm", "embeddings.LayerNorm"),
            *_dense("layers/{i}/attention/{part}", "encoder.layer.{i}.attention.self.{part}"),
            *_dense("layers/{i}/attention/out", "encoder.layer.{i}.attention.output.dense"),
            *_norm("layers/{i}/attention_norm", "encoder.layer.{i}.attention.output.LayerNorm"),
            *_dense("layers/{i}/up", "encoder.layer.{i}.intermediate.dense"),
            *_dense("layers/{i}/down", "encoder.layer.{i}.output.dense"),
            *_norm("layers/{i}/mlp_norm", "encoder.layer.{i}.output.LayerNorm"),
            *_dense("pooler", "pooler.dense"),
        ),
        choices={"table": ("word", "position", "token_type"), "part": ("query", "key", "value")},
        ignored=("*.position_ids",),
        optional=("pooler/*", "pooler.*"),
    ),
}
"""By name, from the names in `examples/` to those of torch: `gpt` for `examples/gpt.py`, `bert` for
`examples/minilm.py` and the `BertModel` of Hugging Face's transformers."""
