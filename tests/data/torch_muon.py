"""Writes `torch_muon.npz`: updates of `torch.optim.Muon`, which `test_optim_muon.py` compares with.

    python tests/data/torch_muon.py    (torch 2.13.0)

Its Newton-Schulz is in bfloat16, which hides everything smaller than about 0.01. So that the rule itself can be
compared, the first set of updates is made with it in float32.
"""

import sys
from pathlib import Path

import numpy as np
import torch

SHAPES = {"wide": (12, 20), "tall": (20, 12), "square": (16, 16)}


def run(adjust: str, nesterov: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {k: torch.nn.Parameter(torch.zeros(s)) for k, s in SHAPES.items()}
    tx = torch.optim.Muon(list(params.values()), lr=1.0, weight_decay=0.0, nesterov=nesterov, adjust_lr_fn=adjust)
    out = {}
    for step in range(3):
        for k, p in params.items():
            grad = rng.normal(size=SHAPES[k]).astype(np.float32)
            out[f"grad/{k}/{step}"], p.grad = grad, torch.from_numpy(grad)
        before = {k: p.detach().clone() for k, p in params.items()}
        tx.step()
        out |= {f"update/{k}/{step}": (p.detach() - before[k]).numpy() for k, p in params.items()}
    return out


def main() -> None:
    found = {f"bfloat16/original/True/{k}": v for k, v in run("original", True).items()}
    torch.Tensor.bfloat16 = lambda x: x.clone()  # type: ignore
    for adjust in ("original", "match_rms_adamw"):
        for nesterov in (True, False):
            found |= {f"float32/{adjust}/{nesterov}/{k}": v for k, v in run(adjust, nesterov).items()}
    # The gradients are the same in every run.
    found = {(k.partition("/grad/")[2] and "grad/" + k.partition("/grad/")[2]) or k: v for k, v in found.items()}
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **found)
    print(torch.__version__, len(found), "arrays", file=sys.stderr)


if __name__ == "__main__":
    main()
