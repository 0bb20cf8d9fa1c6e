"""What the ports have in common with any engine: weights, a paged cache, batches, and a dense reference."""

from __future__ import annotations

import attrs
import numpy as np
import torch

HEADS, WIDTH, PAGE, CONTEXT, REQS = 2, 4, 4, 24, 10
SCRATCH = 0
"""The page that padding is written to and read from."""


class Weights:
    """Four square matrices."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        size = HEADS * WIDTH
        self.host = [torch.randn(size, size, generator=generator) / size**0.5 for _ in range(4)]
        self.query, self.key, self.value, self.out = (m.to(device) for m in self.host)

    def project(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values, (tokens, heads, width) each."""
        return [(hidden @ m).view(-1, HEADS, WIDTH) for m in (self.query, self.key, self.value)]


@attrs.frozen
class Batch:
    """One step's inputs, as an engine's scheduler makes them: NumPy arrays of the real sizes."""

    hidden: np.ndarray
    slots: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    query_start: np.ndarray
    query_len: int


class Cache:
    """A paged cache with random contents: (pages, 2, page, heads, width)."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.pages = 1 + REQS * CONTEXT // PAGE
        generator = torch.Generator().manual_seed(2)
        self.kv = torch.randn(self.pages, 2, PAGE, HEADS, WIDTH, generator=generator).to(device)

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put keys and values, (tokens, heads, width), at these slots."""
        self.kv[slots // PAGE, 0, slots % PAGE] = key
        self.kv[slots // PAGE, 1, slots % PAGE] = value

    def batch(self, count: int, query_len: int, seed: int) -> Batch:
        """A batch of `count` requests, each of random length, on pages of its own in random order."""
        random = np.random.default_rng(seed)
        lengths = random.integers(query_len, CONTEXT + 1, count)
        table = 1 + random.permutation(self.pages - 1)[: count * CONTEXT // PAGE]
        table = table.reshape(count, CONTEXT // PAGE)
        widest = -(-int(lengths.max(initial=1)) // PAGE)
        positions = (lengths[:, None] - query_len + np.arange(query_len)).ravel()
        owners = np.repeat(np.arange(count), query_len)
        return Batch(
            hidden=random.standard_normal((count * query_len, HEADS * WIDTH), np.float32),
            slots=table[owners, positions // PAGE] * PAGE + positions % PAGE,
            lengths=lengths,
            table=table[:, :widest],
            query_start=(np.arange(count + 1) * query_len).astype(np.int32),
            query_len=query_len,
        )

    def dense(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """The batch's result, request by request without pages; the cache itself isn't changed."""
        kv = self.kv.to("cpu")
        query, key, value, out = weights.host
        rows = []
        for index, length in enumerate(batch.lengths.tolist()):
            part = slice(index * batch.query_len, (index + 1) * batch.query_len)
            hidden = torch.from_numpy(batch.hidden[part])
            pages = kv[torch.from_numpy(batch.table[index])]
            keys, values = (pages[:, i].flatten(0, 1)[:length].clone() for i in (0, 1))
            keys[-batch.query_len :] = (hidden @ key).view(-1, HEADS, WIDTH)
            values[-batch.query_len :] = (hidden @ value).view(-1, HEADS, WIDTH)
            queries = (hidden @ query).view(-1, HEADS, WIDTH)
            for row in range(batch.query_len):
                seen = length - batch.query_len + row + 1
                scores = (keys[:seen] * queries[row]).sum(-1) / WIDTH**0.5
                mixed = (scores.softmax(0)[..., None] * values[:seen]).sum(0)
                rows.append(mixed.flatten() @ out)
        return torch.stack(rows) if rows else torch.empty(0, HEADS * WIDTH)
