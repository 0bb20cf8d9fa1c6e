"""Attention over a paged key-value cache, three ways.

The model hands its queries, keys and values to an attention object, and doesn't know which:

- `DenseAttention`: whole sequences, no cache. For training, and as the reference in tests.
- `UniformAttention`: every request brings the same number of queries. Static shapes, and nothing
  read back to the host, so that a CUDA graph can capture it.
- `VarlenAttention`: every request at its own length, in a loop on the host. For prefill and mixed
  batches; runs eagerly.

All three are plain PyTorch, and agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

SCRATCH_PAGE = 0
"""The page that padding writes to; no request ever owns it."""


class Attention(Protocol):
    """What the model calls once a layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Store ``k`` and ``v`` at ``slots``, then let ``q`` look at what its request has stored.

        Args:
            layer: the index of the layer.
            q: [tokens, heads, head_dim].
            k: [tokens, kv_heads, head_dim].
            v: [tokens, kv_heads, head_dim].
            slots: [tokens] int64, where in the cache each token lives.

        Returns:
            [tokens, heads, head_dim].
        """


class PagedCache:
    """Keys and values of all requests, in pages of ``page_size`` tokens.

    A slot is ``page * page_size + offset``. Page 0 is scratch: padding writes there, so that it can
    never touch a request's memory.

    Attributes:
        keys: [layers, pages * page_size, kv_heads, head_dim], indexed by slot.
        values: of the same shape.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if pages < 2:
            raise ValueError(f"pages={pages}: page 0 is scratch, so at least 2 are needed")
        shape = (layers, pages * page_size, kv_heads, head_dim)
        self.pages = pages
        self.page_size = page_size
        # Zeros rather than empty: a masked key has weight 0, and 0 * NaN would still be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        """How many tokens fit, scratch included."""
        return self.pages * self.page_size

    @property
    def tokens_available(self) -> int:
        """How many tokens fit, scratch excluded."""
        return (self.pages - 1) * self.page_size

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store ``k`` and ``v`` ([tokens, kv_heads, head_dim]) at ``slots`` ([tokens] int64)."""
        self.keys[layer].index_copy_(0, slots, k)
        self.values[layer].index_copy_(0, slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots`` (any shape), each ``slots.shape + [kv_heads, head_dim]``."""
        return self.keys[layer][slots], self.values[layer][slots]


def page_slots(block_table: Tensor, page_size: int) -> Tensor:
    """The slots of the pages in a block table: [..., pages] to [..., pages * page_size] int64."""
    offsets = torch.arange(page_size, dtype=torch.int64, device=block_table.device)
    return (block_table.to(torch.int64).unsqueeze(-1) * page_size + offsets).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention, written out.

    Args:
        q: [reqs, queries, heads, head_dim].
        k: [reqs, keys, kv_heads, head_dim]; each of its heads serves ``heads // kv_heads`` query
            heads.
        v: like ``k``.
        visible: [reqs, queries, keys] bool; every query must see at least one key.

    Returns:
        [reqs, queries, heads, head_dim].
    """
    reqs, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    # Heads that share keys become more queries of one head: no copy of the keys for each.
    rows = q.view(reqs, queries, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(reqs, kv_heads, group * queries, head_dim)
    scores = (rows @ k.permute(0, 2, 3, 1)).float() * head_dim**-0.5
    scores = scores.view(reqs, kv_heads, group, queries, keys)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.softmax(-1).to(v.dtype).flatten(2, 3)
    out: Tensor = weights @ v.permute(0, 2, 1, 3)
    out = out.view(reqs, kv_heads, group, queries, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(reqs, queries, heads, head_dim)


class DenseAttention:
    """Causal attention within ``batch`` whole sequences of equal length; slots are ignored."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """See `Attention`; tokens are ``batch`` sequences, one after the other."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q, k, v = (x.view(self.batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(0, 1)


class UniformAttention:
    """Attention where every request has ``query_len`` queries, its newest tokens.

    Query ``i`` of a request sits at position ``seq_lens - query_len + i`` and sees the keys up to
    there. All pages of the block table are read, whatever the lengths: the shapes depend on nothing
    but the batch's shape, which is what a CUDA graph needs.

    Args:
        cache: the cache of all layers.
        block_table: [reqs, pages] int32, the pages of each request in order.
        seq_lens: [reqs] int32, tokens of each request, this step's queries included. For a padded
            request it may be smaller than ``query_len``: the result is finite and meaningless.
        query_len: queries of each request.
    """

    def __init__(
        self, cache: PagedCache, block_table: Tensor, seq_lens: Tensor, query_len: int
    ) -> None:
        self.cache = cache
        self.query_len = query_len
        self.key_slots = page_slots(block_table, cache.page_size)
        device = block_table.device
        key_positions = torch.arange(self.key_slots.shape[1], dtype=torch.int32, device=device)
        steps = torch.arange(query_len, dtype=torch.int32, device=device)
        # A query before position 0 exists in padding only; seeing key 0 keeps its softmax finite.
        query_positions = (seq_lens[:, None] - query_len + steps).clamp(min=0)
        self.visible = key_positions <= query_positions[:, :, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """See `Attention`; tokens are ``reqs * query_len``, request by request."""
        self.cache.write(layer, slots, k, v)
        keys, values = self.cache.read(layer, self.key_slots)
        by_request = q.view(len(self.key_slots), self.query_len, *q.shape[1:])
        return attend(by_request, keys, values, self.visible).flatten(0, 1)


class VarlenAttention:
    """Attention where every request has its own number of queries, in a loop on the host.

    Args:
        cache: the cache of all layers.
        query_start: reqs + 1 host integers; request ``r`` owns the tokens from ``query_start[r]``
            up to ``query_start[r + 1]``. A request without tokens is skipped; tokens after the
            last request's are padding, and get zeros.
        seq_lens: reqs host integers, tokens of each request, this step's queries included.
        block_table: [reqs, pages] int32, the pages of each request in order.

    Raises:
        ValueError: in a call, where a request has more queries than tokens.
    """

    def __init__(
        self,
        cache: PagedCache,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
    ) -> None:
        self.cache = cache
        self.query_start = [int(start) for start in query_start]
        self.seq_lens = [int(length) for length in seq_lens]
        self.key_slots = page_slots(block_table, cache.page_size)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """See `Attention`; tokens are the requests' queries, one request after the other."""
        self.cache.write(layer, slots, k, v)
        out = torch.zeros_like(q)
        spans = zip(self.query_start, self.query_start[1:], self.seq_lens, strict=False)
        for request, (start, end, length) in enumerate(spans):
            if start == end:
                continue
            if length < end - start:
                raise ValueError(
                    f"request {request} has {end - start} queries and seq_lens={length}: "
                    "seq_lens counts this step's queries too"
                )
            keys, values = self.cache.read(layer, self.key_slots[request, :length])
            positions = torch.arange(length, dtype=torch.int32, device=q.device)
            visible = positions <= positions[length - (end - start) :, None]
            out[start:end] = attend(q[None, start:end], keys[None], values[None], visible[None])[0]
        return out
