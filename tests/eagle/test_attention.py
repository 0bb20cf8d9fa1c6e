"""The three attentions agree with one another and with a loop over single queries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples.eagle.attention import (
    SCRATCH_PAGE,
    DenseAttention,
    PagedCache,
    UniformAttention,
    VarlenAttention,
    page_slots,
)

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def one_query(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The definition: one query, head by head, over the keys that it may see."""
    out = torch.empty_like(q)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        weights = (keys[:, kv_head] @ q[head] / HEAD_DIM**0.5).softmax(0)
        out[head] = weights @ values[:, kv_head]
    return out


class Batch:
    """Requests with a random past in a paged cache, and random queries for this step."""

    def __init__(self, lengths: list[int], queries: list[int], page_size: int, device: str) -> None:
        rng = torch.Generator().manual_seed(7)
        pages = [-(-length // page_size) for length in lengths]
        self.cache = PagedCache(
            1, 1 + sum(pages), page_size, KV_HEADS, HEAD_DIM, torch.float32, device
        )
        shuffled = (1 + torch.randperm(sum(pages), generator=rng)).split(pages)
        # One page more than anyone needs, so that every request's table ends in scratch.
        self.block_table = torch.full((len(lengths), max(pages) + 1), SCRATCH_PAGE)
        self.block_table = self.block_table.to(torch.int32)
        for row, own in zip(self.block_table, shuffled, strict=True):
            row[: len(own)] = own
        slots = page_slots(self.block_table, page_size)
        self.histories = [
            torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=rng) for length in lengths
        ]
        for row, history, count in zip(slots, self.histories, queries, strict=True):
            past = history.shape[1] - count
            self.cache.write(0, row[:past].to(device), *history[:, :past].to(device))
        new = [history[:, -count:] for history, count in zip(self.histories, queries, strict=True)]
        self.k, self.v = torch.cat(new, dim=1).to(device)
        self.q = torch.randn(sum(queries), HEADS, HEAD_DIM, generator=rng).to(device)
        self.slots = torch.cat(
            [row[n - c : n] for row, n, c in zip(slots, lengths, queries, strict=True)]
        ).to(device)
        self.block_table = self.block_table.to(device)
        self.query_start = [sum(queries[:i]) for i in range(len(queries) + 1)]
        self.lengths, self.queries = lengths, queries
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def uniform(self) -> UniformAttention:
        return UniformAttention(self.cache, self.block_table, self.seq_lens, self.queries[0])

    def varlen(self) -> VarlenAttention:
        return VarlenAttention(self.cache, self.query_start, self.lengths, self.block_table)

    def expected(self) -> Tensor:
        rows, queries = [], iter(self.q.cpu())
        for history, length, count in zip(self.histories, self.lengths, self.queries, strict=True):
            for position in range(length - count, length):
                rows.append(one_query(next(queries), *history[:, : position + 1]))
        return torch.stack(rows).to(self.q.device)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("query_len", [1, 4])
def test_uniform_and_varlen_equal_the_definition(device: str, query_len: int) -> None:
    batch = Batch([4, 7, 16, 33], [query_len] * 4, page_size=8, device=device)
    uniform = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    varlen = batch.varlen()(0, batch.q, batch.k, batch.v, batch.slots)
    close(uniform, batch.expected())
    close(varlen, batch.expected())


def test_varlen_equals_the_definition_for_mixed_lengths(device: str) -> None:
    batch = Batch([5, 9, 12, 1], [5, 1, 7, 1], page_size=4, device=device)
    got = batch.varlen()(0, batch.q, batch.k, batch.v, batch.slots)
    close(got, batch.expected())


def test_dense_equals_the_definition(device: str) -> None:
    batch = Batch([6, 6, 6], [6, 6, 6], page_size=4, device=device)
    got = DenseAttention(3)(0, batch.q, batch.k, batch.v, batch.slots)
    close(got, batch.expected())


@settings(max_examples=40, deadline=None)
@given(
    query_len=st.integers(1, 5),
    more=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    page_size=st.integers(1, 9),
)
def test_uniform_equals_varlen(query_len: int, more: list[int], page_size: int) -> None:
    lengths = [query_len + extra for extra in more]
    batch = Batch(lengths, [query_len] * len(lengths), page_size, "cpu")
    uniform = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    varlen = batch.varlen()(0, batch.q, batch.k, batch.v, batch.slots)
    close(uniform, varlen)


def test_a_query_sees_nothing_after_itself_and_nothing_of_others(device: str) -> None:
    batch = Batch([5, 9], [2, 2], page_size=4, device=device)
    before = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    first = page_slots(batch.block_table, 4)[0, :5]
    others = torch.ones(batch.cache.slots, dtype=torch.bool)
    others[first.cpu()] = False
    batch.cache.keys[0, others.to(device)] = 1e4
    batch.cache.values[0, others.to(device)] = -1e4
    again = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    close(again[:2], before[:2])
    assert not torch.allclose(again[2:], before[2:])
    batch.v[1] += 1e4  # the newest token: its own query sees it, the one before doesn't
    later = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    close(later[:1], before[:1])
    assert not torch.allclose(later[1:2], before[1:2])


def test_padded_requests_are_finite_and_write_to_scratch_only(device: str) -> None:
    query_len, pads = 3, 2
    batch = Batch([4, 7], [query_len] * 2, page_size=4, device=device)
    alone = batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)
    kept = batch.cache.keys.clone(), batch.cache.values.clone()

    def padded(x: Tensor, value: float) -> Tensor:
        return torch.cat((x, x.new_full((pads * query_len, *x.shape[1:]), value)))

    seq_lens = torch.cat((batch.seq_lens, batch.seq_lens.new_ones(pads)))
    table = torch.cat(
        (batch.block_table, batch.block_table.new_full((pads, batch.block_table.shape[1]), 0))
    )
    attention = UniformAttention(batch.cache, table, seq_lens, query_len)
    slots = padded(batch.slots, SCRATCH_PAGE)
    out = attention(0, padded(batch.q, 50.0), padded(batch.k, 50.0), padded(batch.v, 50.0), slots)

    assert out.isfinite().all()
    close(out[: 2 * query_len], alone)
    page_size = batch.cache.page_size
    assert batch.cache.keys[0, 0].eq(50.0).all()
    assert torch.equal(batch.cache.keys[:, page_size:], kept[0][:, page_size:])
    assert torch.equal(batch.cache.values[:, page_size:], kept[1][:, page_size:])


def test_varlen_gives_zeros_for_padding_and_skips_requests_without_tokens() -> None:
    batch = Batch([5, 3], [2, 3], page_size=4, device="cpu")
    expected = batch.expected()
    q = torch.cat((batch.q, torch.ones(3, HEADS, HEAD_DIM)))
    k, v = (torch.cat((x, torch.ones(3, KV_HEADS, HEAD_DIM))) for x in (batch.k, batch.v))
    slots = torch.cat((batch.slots, torch.zeros(3, dtype=torch.int64)))
    table = torch.cat((batch.block_table, torch.zeros_like(batch.block_table[:1])))
    out = VarlenAttention(batch.cache, [0, 2, 5, 5], [5, 3, 1], table)(0, q, k, v, slots)
    close(out[:5], expected)
    assert out[5:].eq(0).all()


def test_an_empty_batch_is_an_ordinary_one(device: str) -> None:
    batch = Batch([5], [2], page_size=4, device=device)
    table, seq_lens = batch.block_table[:0], batch.seq_lens[:0]
    for attention in (
        UniformAttention(batch.cache, table, seq_lens, 2),
        VarlenAttention(batch.cache, [0], [], table),
    ):
        out = attention(0, batch.q[:0], batch.k[:0], batch.v[:0], batch.slots[:0])
        assert out.shape == (0, HEADS, HEAD_DIM)


def test_varlen_refuses_more_queries_than_tokens() -> None:
    batch = Batch([5], [5], page_size=4, device="cpu")
    attention = VarlenAttention(batch.cache, [0, 5], [4], batch.block_table)
    with pytest.raises(
        ValueError, match=r"request 0 has 5 queries and seq_lens=4: seq_lens counts"
    ):
        attention(0, batch.q, batch.k, batch.v, batch.slots)


def test_pages_to_slots() -> None:
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    assert page_slots(table, 3).tolist() == [[6, 7, 8, 0, 1, 2], [3, 4, 5, 9, 10, 11]]


def test_the_cache_needs_a_page_beside_scratch() -> None:
    cache = PagedCache(2, 3, 4, KV_HEADS, HEAD_DIM, torch.float32, "cpu")
    assert (cache.slots, cache.tokens_available) == (12, 8)
    with pytest.raises(ValueError, match="pages=1: page 0 is scratch, so at least 2 are needed"):
        PagedCache(2, 1, 4, KV_HEADS, HEAD_DIM, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, 4])
def test_a_cuda_graph_captures_uniform_attention(query_len: int) -> None:
    batch = Batch([9, 12, 30], [query_len] * 3, page_size=8, device="cuda")

    def step() -> Tensor:
        return batch.uniform()(0, batch.q, batch.k, batch.v, batch.slots)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    other = Batch([11, 4, 25], [query_len] * 3, page_size=8, device="cuda")
    width = batch.block_table.shape[1]
    batch.block_table.zero_()[:, : other.block_table.shape[1]] = other.block_table[:, :width]
    batch.cache.keys[:, : other.cache.slots] = other.cache.keys
    batch.cache.values[:, : other.cache.slots] = other.cache.values
    for name in ("seq_lens", "q", "k", "v", "slots"):
        getattr(batch, name).copy_(getattr(other, name))
    graph.replay()
    close(out, other.expected())
