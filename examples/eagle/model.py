"""A byte-level decoder language model of 1.3 million parameters, shaped like its big cousins.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, and an output head tied to the
embedding. The forward is written for a serving runner: it takes a flat batch of tokens, from any
number of requests, and leaves the question who sees whom to an attention object (see `attention`).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention


def _is_size(config: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    # A bool is an int to isinstance, and no size.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{attribute.name}={value!r} is no size: use an int, 1 or more")
    if value < 1:
        raise ValueError(f"{attribute.name}={value} is no size: use 1 or more")


@attrs.frozen(kw_only=True)
class Config:
    """The model's sizes, ints.

    Raises:
        TypeError: a size is no int.
        ValueError: a size is below 1, or the heads don't fit together.
    """

    vocab: int = attrs.field(default=256, validator=_is_size)
    width: int = attrs.field(default=192, validator=_is_size)
    layers: int = attrs.field(default=4, validator=_is_size)
    heads: int = attrs.field(default=6, validator=_is_size)
    kv_heads: int = attrs.field(default=2, validator=_is_size)
    head_dim: int = attrs.field(default=32, validator=_is_size)
    hidden: int = attrs.field(default=384, validator=_is_size)
    max_length: int = attrs.field(default=512, validator=_is_size)

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} can't share kv_heads={self.kv_heads} evenly: "
                "use a multiple of kv_heads"
            )


class RMSNorm(nn.Module):
    """Scale every row to a root mean square of 1, then by a learned gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-5)


def rotary_table(max_length: int, head_dim: int) -> Tensor:
    """Cosines and sines of every position: [max_length, 2, head_dim / 2] fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    positions = torch.arange(max_length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, 10_000.0**-exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Turn each pair of channels of ``x`` [tokens, heads, head_dim] by its token's angles."""
    cos, sin = cos_sin.unsqueeze(1).unbind(2)
    left, right = x.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(x.dtype)


class DecoderLayer(nn.Module):
    """One attention and one SwiGLU, each added to the residual stream."""

    def __init__(self, config: Config, index: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.splits = [
            n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)
        ]
        self.attention_norm = RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, sum(self.splits), bias=False)
        self.attention_out = nn.Linear(self.splits[0], config.width, bias=False)
        self.mlp_norm = RMSNorm(config.width)
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos_sin: Tensor, slots: Tensor, attention: Attention) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).split(self.splits, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        seen = attention(self.index, q, k, v, slots).flatten(1)
        x = x + self.dropout(self.attention_out(seen))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.dropout(self.down(F.silu(gate) * up))
        return out


class TinyLM(nn.Module):
    """The language model.

    Args:
        config: its sizes.
        dropout: share of each layer's output that training drops; inference drops nothing.
    """

    rotary: Tensor

    def __init__(self, config: Config, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dropout) for i in range(config.layers))
        self.dropout = nn.Dropout(dropout)
        self.norm = RMSNorm(config.width)
        table = rotary_table(config.max_length, config.head_dim)
        self.register_buffer("rotary", table, persistent=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, attention: Attention
    ) -> Tensor:
        """The last hidden state of every token.

        Args:
            input_ids: [tokens] int64, bytes.
            positions: [tokens] int64, below ``config.max_length``.
            slot_mapping: [tokens] int64, where in the cache each token's keys and values go.
            attention: who sees whom; see `attention`.

        Returns:
            [tokens, width], normalized: what `logits` takes.
        """
        x: Tensor = self.dropout(self.embedding(input_ids))
        cos_sin = self.rotary[positions]
        for layer in self.layers:
            x = layer(x, cos_sin, slot_mapping, attention)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next byte: [tokens, width] to [tokens, vocab] fp32."""
        return F.linear(hidden, self.embedding.weight).float()

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draw fresh weights, small so that the residual stream starts out near the embedding."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            scale = 0.02
            if name.endswith(("attention_out.weight", "down.weight")):
                scale /= (2 * self.config.layers) ** 0.5
            parameter.normal_(0.0, scale, generator=generator)
