"""The static memory that the target and the draft share: dims, buffers and paged caches.

A CUDA graph reads and writes fixed addresses. So everything that a step moves lies in buffers that
are declared once, from the largest batch there can be, and each runner's graphs use the first rows
of them. Sharing is by name: what the target writes into ``hidden``, the draft reads there.
"""

from __future__ import annotations

import attrs
import torch
from attrs.validators import ge, gt
from torch import nn

import graphkit as gk

from .attention import SCRATCH_PAGE, PagedCache
from .model import Config

SCRATCH_SEAT = 0
"""The seat that padding uses; no request ever sits there."""


@attrs.frozen(kw_only=True)
class Limits:
    """The largest batch, and the longest request.

    Args:
        max_reqs: requests in one step.
        max_tokens: tokens in one step.
        max_length: tokens of one request, prompt and continuation.
        k: tokens that the draft proposes; 0 for plain decoding.
        page_size: tokens in a page of the caches.
        mixed_tokens: sizes of the PIECEWISE buckets; those below ``max_tokens`` count, and it does.

    Raises:
        ValueError: a value is out of range, or the largest batch can't hold every request.
    """

    max_reqs: int = attrs.field(default=32, validator=gt(0))
    max_tokens: int = attrs.field(default=1024, validator=gt(0))
    max_length: int = attrs.field(default=512, validator=gt(1))
    k: int = attrs.field(default=3, validator=ge(0))
    page_size: int = attrs.field(default=16, validator=gt(0))
    mixed_tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512)

    def __attrs_post_init__(self) -> None:
        needed = max(self.max_reqs * (self.k + 1), self.max_length)
        if self.max_tokens < needed:
            raise ValueError(
                f"max_tokens={self.max_tokens} is too small: {self.max_reqs} requests of "
                f"{self.k + 1} tokens, or one prompt of up to {self.max_length}, need {needed}"
            )

    @property
    def pages_per_request(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_length // self.page_size)

    @property
    def pages(self) -> int:
        """Pages for every request at its longest, and the scratch page."""
        return 1 + self.max_reqs * self.pages_per_request

    @property
    def query_len(self) -> int:
        """Rows of a request in a uniform step: its newest token, and the drafts to verify."""
        return self.k + 1


class Memory:
    """Owns the graph group, its buffers, and the caches.

    Args:
        config: the target's sizes.
        limits: the largest batch.
        seen_width: what the draft reads of the target for each token; by default its last hidden
            state.
        device: "cuda", or "cpu" for the recording backend.
        dtype: of activations and caches.
        checked: see `graphkit.GraphGroup`.

    Attributes:
        limits: what everything here is sized by.
        group: the graphkit group that all runners belong to: one pool, one set of buffers.
        reqs, tokens: the two sizes that change from step to step.
        target_cache, draft_cache: keys and values; a page number means the same page in both.
        buffers: by name, the declared static buffers.
    """

    def __init__(
        self,
        config: Config,
        limits: Limits,
        *,
        seen_width: int | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        checked: bool | None = None,
    ) -> None:
        self.limits = limits
        seen_width = seen_width or config.width
        self.group = gk.GraphGroup(device, checked=checked)
        self.reqs = reqs = gk.Dim("reqs", limits.max_reqs)
        self.tokens = tokens = gk.Dim("tokens", limits.max_tokens)
        self.target_cache, self.draft_cache = (
            PagedCache(
                layers,
                limits.pages,
                limits.page_size,
                config.kv_heads,
                config.head_dim,
                dtype,
                self.group.device,
            )
            for layers in (config.layers, 1)
        )
        k, seats = limits.k, limits.max_reqs + 1
        scratch_slot = SCRATCH_PAGE * limits.page_size
        # A pad is what a row holds between the batch and the bucket. Where a row is an index, it has
        # to point at scratch: a padded request must never write where a real one reads.
        self.buffers = self.group.buffers.declare(
            # Written by the host, for the target; the draft reads the same memory.
            # The last row's successor is read from the row after it: a rejected draft's, which nothing uses.
            input_ids=gk.BufferSpec((tokens,), torch.int64, pad=gk.relied(0)),
            positions=gk.BufferSpec((tokens,), torch.int64, pad=0, valid=(0, limits.max_length)),
            slot_mapping=gk.BufferSpec(
                (tokens,), torch.int64, pad=scratch_slot, valid=(0, self.target_cache.slots)
            ),
            seq_lens=gk.BufferSpec((reqs,), torch.int32, pad=1),
            block_table=gk.BufferSpec(
                (reqs, limits.pages_per_request),
                torch.int32,
                pad=SCRATCH_PAGE,
                valid=(0, limits.pages),
            ),
            # The row of each request's newest token, the first whose successor is asked for.
            first_row=gk.BufferSpec((reqs,), torch.int64, pad=0, valid=(0, limits.max_tokens)),
            # How many drafts follow it. A padded request has -1, and is known by it.
            num_drafts=gk.BufferSpec((reqs,), torch.int64, pad=gk.relied(-1)),
            # Where a request keeps what has to outlive a step, whatever its row in the next one.
            seats=gk.BufferSpec((reqs,), torch.int64, pad=SCRATCH_SEAT, valid=(0, seats)),
            # Written by the target, read by the draft.
            hidden=gk.BufferSpec((tokens, seen_width), dtype, pad=0),
            draft_ids=gk.BufferSpec((tokens,), torch.int64, pad=0, valid=(0, config.vocab)),
            accepted=gk.BufferSpec((reqs,), torch.int64, pad=0, valid=(0, k + 1)),
            sampled=gk.BufferSpec((reqs, k + 1), torch.int64, pad=-1),
            # Written by the draft's prefill, read by its decode.
            first_draft=gk.BufferSpec((reqs,), torch.int64, pad=0, valid=(0, config.vocab)),
            draft_state=gk.BufferSpec((reqs, config.width), dtype, pad=0),
            draft_positions=gk.BufferSpec((reqs,), torch.int64, pad=0),
            # Written by the draft.
            draft_tokens=gk.BufferSpec((reqs, max(k, 1)), torch.int64, pad=0),
            # What each draft was drawn from, by seat: the next step's verification reads it.
            draft_probs=gk.BufferSpec((seats, max(k, 1), config.vocab), torch.float32),
        )

    def scratch(self, cache: PagedCache) -> list[gk.Scratch]:
        """The part of a cache that warm-up and capture write: the scratch page."""
        rows = slice(0, cache.page_size)
        return [gk.Scratch(x.transpose(0, 1), rows=rows) for x in (cache.keys, cache.values)]

    def reads(self, cache: PagedCache, *modules: nn.Module) -> list[object]:
        """What graphs read and graphkit doesn't own: watched, so that moved memory is noticed."""
        return [*modules, lambda: (cache.keys, cache.values)]
