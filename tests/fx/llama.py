"""A model shaped like Llama, written as people write it: nothing in it knows of graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, KV_HEADS, DEPTH = 48, 32, 4, 2, 2
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = HEAD // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.split(half, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, HEAD)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.squeeze(0).transpose(0, 1).reshape(x.shape[0], WIDTH))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), positions)
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, scale: float = 1.0
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, positions)
        return {"hidden": x, "logits": self.head(self.norm(x)) * scale}


def llama(device: str, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama().to(device).eval()
