"""What every rank does with Hugging Face directories: cases of `state_cases.py`."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checks import raises, reads
from safetensors.torch import save_file
from torch import nn

import torch_bridge as tb
from ragged_jax.layout import NameMapError, rows
from torch_bridge._fully_shard import runtime_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(31, 6), nn.Linear(6, 9), nn.BatchNorm1d(9)
        self.head = nn.Linear(6, 31, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def by_any_names(folder: Path) -> None:
    """Tied, with buffers, and with the layout's own names and order of dims; faults by name."""
    torch.manual_seed(5)
    model, path = Tied(), folder / "tied.safetensors"
    want = model.state_dict()
    written = {name: x for name, x in want.items() if name != "embed.weight"} | {"scratch": torch.zeros(2)}
    if dist.get_rank() == 0:
        save_file(written, path)
        save_file({"tail": torch.ones(1), **written, "up.bias": torch.ones(8)}, folder / "wrong.safetensors")
    dist.barrier()
    for names, block in ((None, rows(2)), (tb.flax_names(Tied()), rows(1))):
        torch.manual_seed(6)
        again = tb.fully_shard(Tied(), names=names, block=block)
        assert tb.load_huggingface(path, again, names) is again
        got = tb.full_state_dict(again)
        assert all(torch.equal(got[name], x) for name, x in want.items())
        assert again.scratch.tolist() == [1, 1]
    with torch.device("meta"):
        again = tb.fully_shard(Tied(), names=tb.flax_names(Tied()), block=rows(1))
    ignored = ("up/*", "up.*", "norm/running_*", "norm.running_*")
    tb.load_huggingface(path, again, replace(tb.flax_names(Tied()), ignored=ignored))
    missing = set().union(*(unit.missing for unit in runtime_of(again).units))
    assert missing == {"up/kernel", "up/bias"}, missing
    assert runtime_of(again).missing_buffers == {"norm/running_mean", "norm/running_var", "scratch"}
    model = tb.fully_shard(model)
    for fault in ("tail: extra", "up/bias: shape (8,) from up.bias, wanted (9,)"):
        with raises(fault, NameMapError):
            tb.load_huggingface(folder / "wrong.safetensors", model)
    with raises("saved as float32, wanted as bfloat16", ValueError):
        tb.load_huggingface(path, tb.fully_shard(Tied().bfloat16()))


def a_real_model(folder: Path) -> None:
    """all-MiniLM-L6-v2 computes what transformers does in one process, and each rank reads its own part."""
    from minilm_torch import embed, load
    from sentences import EXAMPLES, FOLDER, encode
    from transformers import BertModel

    torch.manual_seed(0)
    with reads() as sizes:
        model = load(FOLDER)
    numel = sum(p.numel() for p in BertModel(model.config).parameters())
    mine = 4 * sum(p.numel() for p in model.parameters())
    assert sum(sizes) == mine, (sum(sizes), mine)
    assert mine < 1.01 * 4 * numel / dist.get_world_size(), (mine, numel)
    tokens, mask = encode(EXAMPLES + ["We shard it."], dist.get_world_size())
    got = embed(model, tokens, mask)
    with torch.no_grad():
        bert = BertModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
        want = bert(torch.from_numpy(tokens), torch.from_numpy(mask)).last_hidden_state.numpy()
    mean = (want * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    np.testing.assert_allclose(got, mean / np.linalg.norm(mean, axis=-1, keepdims=True), atol=1e-5, rtol=0)
    if dist.get_rank() == 0:
        np.save(folder / "vectors.npy", got[: len(EXAMPLES)])
