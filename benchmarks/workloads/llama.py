"""A decode step of Llama-3.2-1B's shape over a paged cache, with random weights."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphkit as gk
from benchmarks.piecewise import rotate
from benchmarks.workloads.workload import Arrays, Workload

SCRATCH_SLOT = SCRATCH_PAGE = 0


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of the model and of its cache; `pages` are those of one request."""

    layers: int = 16
    width: int = 2048
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 8192
    vocab: int = 128_256
    page: int = 16
    pages: int = 33
    ladder: tuple[int, ...] = (1, 8, 64, 256)
    batches: tuple[int, ...] = (1, 8, 64, 250)
    compiled: int = 8

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def slots(self) -> int:
        """Tokens in the cache: the scratch page, and every request of the largest batch."""
        return (1 + self.ladder[-1] * self.pages) * self.page


TOY = Shape(
    layers=2, width=32, heads=4, kv_heads=2, hidden=64, vocab=64, page=4, pages=4,
    ladder=(1, 4), batches=(1, 3), compiled=1,
)  # fmt: skip


class Layer(nn.Module):
    """Attention over pages and a SwiGLU; the keys and values of its cache are buffers of the module."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape, **factory: Any) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.width, shape.head
        self.norm1, self.norm2 = (nn.RMSNorm(width, **factory) for _ in range(2))
        rows = (shape.heads + 2 * shape.kv_heads) * head
        self.qkv = nn.Linear(width, rows, bias=False, **factory)
        self.out = nn.Linear(width, width, bias=False, **factory)
        self.gate_up = nn.Linear(width, 2 * shape.hidden, bias=False, **factory)
        self.down = nn.Linear(shape.hidden, width, bias=False, **factory)
        for name in ("keys", "values"):
            cache = torch.zeros(shape.slots, shape.kv_heads, head, **factory)
            self.register_buffer(name, cache, persistent=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, seen: Tensor, mask: Tensor
    ) -> Tensor:
        shape, reqs = self.shape, x.shape[0]
        qkv = self.qkv(self.norm1(x)).view(reqs, -1, shape.head)
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.index_copy_(0, slots, k)
        self.values.index_copy_(0, slots, v)
        # Heads that share keys are queries of one head, so that nothing is copied for each.
        q = q.reshape(reqs, shape.kv_heads, -1, shape.head)
        k, v = (cache[seen].transpose(1, 2) for cache in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.reshape(reqs, shape.width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        after: Tensor = x + self.down(F.silu(gate) * up)
        return after


class Decoder(nn.Module):
    """From the newest token of each request to its successor, the most likely one."""

    frequencies: Tensor
    offsets: Tensor

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width, **factory)
        self.layers = nn.ModuleList(Layer(shape, **factory) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, **factory)
        half = shape.head // 2
        frequencies = 500_000.0 ** (-torch.arange(half, device=device) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("offsets", torch.arange(shape.page, device=device), persistent=False)
        self.requires_grad_(False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """[reqs] int64."""
        x = self.embedding(input_ids)
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        pages = block_table.to(torch.int64).unsqueeze(-1) * self.shape.page
        seen = (pages + self.offsets).flatten(1)
        places = torch.arange(seen.shape[1], device=x.device, dtype=torch.int32)
        hidden = places >= seq_lens[:, None]
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, float("-inf"))
        mask = mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, cos, sin, slot_mapping, seen, mask)
        return F.linear(self.norm(x), self.embedding.weight).argmax(-1)


class Requests:
    """A scheduler's books: each request owns pages, and its tokens grow by one a step."""

    def __init__(self, shape: Shape, batch: int) -> None:
        rng = np.random.default_rng(batch)
        self.shape = shape
        self.context = shape.page * shape.pages
        pages = 1 + rng.permutation(batch * shape.pages).astype(np.int32)
        self.tables = pages.reshape(batch, shape.pages)
        # Every request has room for as many steps as a page has tokens; then it begins anew.
        longest = self.context - shape.page
        self.lengths = rng.integers(longest - shape.page // 2, longest, batch) + 1

    def inputs(self, step: int) -> Arrays:
        """The metadata of a step; the requests change rows, as they do when others come and go."""
        shape, batch = self.shape, len(self.lengths)
        rows = (np.arange(batch) + step) % batch
        lengths = self.lengths[rows] + step % shape.page
        positions = lengths - 1
        table = self.tables[rows]
        page = table[np.arange(batch), positions // shape.page].astype(np.int64)
        return {
            "input_ids": (rows * 7919 + step) % shape.vocab,
            "positions": positions,
            "slot_mapping": page * shape.page + positions % shape.page,
            "seq_lens": lengths.astype(np.int32),
            "block_table": table,
        }


def specs(shape: Shape, reqs: gk.Dim) -> dict[str, gk.BufferSpec]:
    """The inputs of a step; padding points at the scratch page."""
    int32, int64 = torch.int32, torch.int64
    context, pages = shape.pages * shape.page, shape.slots // shape.page
    return {
        "input_ids": gk.BufferSpec((reqs,), int64, pad=0, valid=(0, shape.vocab)),
        "positions": gk.BufferSpec((reqs,), int64, pad=0, valid=(0, context)),
        "slot_mapping": gk.BufferSpec((reqs,), int64, pad=SCRATCH_SLOT, valid=(0, shape.slots)),
        "seq_lens": gk.BufferSpec((reqs,), int32, pad=1),
        "block_table": gk.BufferSpec(
            (reqs, shape.pages), int32, pad=SCRATCH_PAGE, valid=(0, pages)
        ),
    }


def workloads(device: str, *, small: bool) -> list[Workload]:
    """One for each batch, over one model."""
    shape = TOY if small else Shape()
    torch.manual_seed(0)
    model = Decoder(shape, device)
    scratch = [
        gk.Scratch(cache, rows=slice(0, shape.page))
        for layer in model.layers
        for cache in (layer.keys, layer.values)
    ]
    made = []
    for batch in shape.batches:
        bucket = min(size for size in shape.ladder if size >= batch)
        reqs = gk.Dim("reqs", bucket)
        padded = "" if bucket == batch else f" of {bucket}"
        made.append(
            Workload(
                name=f"llama, batch {batch}{padded}",
                model=model,
                device=device,
                batch=batch,
                reqs=reqs,
                specs=specs(shape, reqs),
                inputs=Requests(shape, batch).inputs,
                refilled=("slot_mapping", "seq_lens"),
                output=gk.Output((reqs,), torch.int64),
                mutates=scratch,
                number=4 if small else 75,
                rounds=2 if small else 5,
                is_compiled=batch == shape.compiled,
            )
        )
    return made
