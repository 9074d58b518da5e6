"""The model of `gpt.py` in plain PyTorch: the same layers under the same names."""

import torch
from torch import nn
from torch.nn import functional

VOCAB = 256


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `x` [batch, time, heads, features] (Su et al., arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    angles = torch.outer(places, 1e4 ** -torch.linspace(0, 1, half, dtype=x.dtype, device=x.device))[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, width: int, head_width: int):
        super().__init__()
        self.head_width = head_width
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        x = x + self.mix(self.attend(self.attention_norm(x)))
        return x + self.down(functional.relu(self.up(self.mlp_norm(x))).square())

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, -1, self.head_width).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (_rotate(q), _rotate(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, depth: int, width: int, head_width: int):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList([Block(width, head_width) for _ in range(depth)])
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Bytes [batch, time] to logits [batch, time, 256]."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
