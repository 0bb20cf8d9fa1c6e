"""A port of attention in FlashInfer's manner: a wrapper for each bucket, planned before each launch."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk
from tests.acceptance.engine import CONTEXT, HEADS, PAGE, REQS, SCRATCH, WIDTH, Cache, Weights


class PagedAttention:
    """Stands in for a library's wrapper: one batch size, device buffers of its own, plan, then run."""

    def __init__(self, batch_size: int, device: str) -> None:
        self.batch_size = batch_size
        self.indptr = torch.zeros(batch_size + 1, dtype=torch.int64, device=device)
        self.indices = torch.zeros(batch_size * CONTEXT // PAGE, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.plans = 0

    def plan(self, indptr: Any, indices: Any, lengths: Any) -> None:
        """Take NumPy arrays: where each request's pages begin, the pages, and tokens in the cache."""
        for name, array in (("indptr", indptr[1:]), ("lengths", lengths)):
            if not isinstance(array, np.ndarray) or len(array) != self.batch_size:
                raise ValueError(f"{name} is not that of {self.batch_size} requests: {array!r}")
        self.indptr.copy_(torch.from_numpy(indptr))
        self.indices[: len(indices)].copy_(torch.from_numpy(indices))
        self.lengths.copy_(torch.from_numpy(lengths))
        self.plans += 1

    def run(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """Causal attention. q: (tokens, heads, width); kv: (pages, 2, page, heads, width)."""
        q = q.view(self.batch_size, -1, HEADS, WIDTH)
        column = torch.arange(CONTEXT, device=q.device)
        page = (self.indptr[:-1, None] + column // PAGE).clamp(max=len(self.indices) - 1)
        keys, values = kv[self.indices[page], :, column % PAGE].unbind(2)
        position = self.lengths[:, None] - q.shape[1] + torch.arange(q.shape[1], device=q.device)
        hidden = column > position[..., None]
        scores = torch.einsum("bqhw,bkhw->bhqk", q, keys) / WIDTH**0.5
        weights = scores.masked_fill(hidden[:, None], -1e9).softmax(-1)
        return torch.einsum("bhqk,bkhw->bqhw", weights, values).flatten(0, 1)


def port(
    group: gk.GraphGroup, weights: Weights, cache: Cache, q: int, log: list[PagedAttention]
) -> gk.GraphRunner:
    reqs, tokens = gk.Dim("reqs", REQS), gk.Dim("tokens", REQS * q)
    pages = gk.Dim("pages", CONTEXT // PAGE)
    group.buffers.declare(
        hidden=gk.BufferSpec((tokens, HEADS * WIDTH), torch.float32, pad=0),
        slots=gk.BufferSpec((tokens,), torch.int64, pad=SCRATCH * PAGE),
        lengths=gk.BufferSpec((reqs,), torch.int64, pad=q),
        table=gk.BufferSpec((reqs, pages), torch.int64, pad={reqs: SCRATCH, pages: SCRATCH}),
    )

    def prepare(step: gk.Step) -> dict[str, PagedAttention]:
        lengths, table = step.host["lengths"], step.host["table"]
        attention = step.state.setdefault("attention", None)
        if attention is None:
            attention = step.state["attention"] = PagedAttention(len(lengths), cache.device)
        counts = -(-lengths // PAGE)
        used = table[np.arange(table.shape[1]) < counts[:, None]]
        attention.plan(np.concatenate([[0], np.cumsum(counts)]), used, lengths)
        log.append(attention)
        return {"attention": attention}

    def forward(hidden, slots, attention):
        query, key, value = weights.project(hidden)
        cache.write(slots, key, value)
        return attention.run(query, cache.kv).flatten(1) @ weights.out

    return group.runner(
        "model",
        forward,
        policy=gk.Policy.full(gk.Buckets.uniform(reqs, tokens, query_len=q, sizes=(1, 2, 4, 8))),
        inputs={"lengths": gk.Fed("lengths"), "table": gk.Fed("table")},  # for prepare alone
        prepare=prepare,
        mutates=[gk.Scratch(cache.kv, rows=[SCRATCH])],
    )


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("q", [1, 4], ids=["decode", "verify"])
def test_right_at_every_batch_size(device, q, checked):
    weights, cache = Weights(device), Cache(device)
    log: list[PagedAttention] = []
    group = gk.GraphGroup(device, checked=checked)
    runner = port(group, weights, cache, q, log)
    group.capture()
    for round_, count in enumerate([*range(REQS + 1), *range(REQS, -1, -1)]):
        batch = cache.batch(count, q, seed=round_)
        expected = cache.dense(weights, batch)
        dispatch = runner.dispatch(reqs=count, query_len=q, pages=batch.table.shape[1])
        assert dispatch.mode is (gk.EAGER if count > 8 else gk.FULL)
        out = runner.run(
            dispatch,
            hidden=batch.hidden,
            slots=batch.slots,
            lengths=batch.lengths,
            table=batch.table,
        )
        torch.testing.assert_close(out.to("cpu"), expected, rtol=1e-4, atol=1e-4)
        assert log[-1].batch_size == (count if count > 8 else dispatch.bucket["reqs"])


def test_a_recapture_makes_new_wrappers_and_eager_plans_for_the_real_sizes(device):
    weights, cache = Weights(device), Cache(device)
    log: list[PagedAttention] = []
    group = gk.GraphGroup(device)
    runner = port(group, weights, cache, 1, log)

    def run(count: int) -> PagedAttention:
        batch = cache.batch(count, 1, seed=count)
        dispatch = runner.dispatch(reqs=count, query_len=1, pages=batch.table.shape[1])
        inputs = {name: getattr(batch, name) for name in ("hidden", "slots", "lengths", "table")}
        expected = cache.dense(weights, batch)
        torch.testing.assert_close(
            runner.run(dispatch, inputs).to("cpu"), expected, rtol=1e-4, atol=1e-4
        )
        return log[-1]

    assert run(3).batch_size == 3  # before the capture: EAGER, for the real sizes
    group.capture()
    first = run(3)
    plans = first.plans
    assert run(4) is first
    assert first.plans == plans + 1
    group.invalidate()
    assert run(3).batch_size == 3
    group.capture()
    second = run(3)
    assert second is not first
    assert second.batch_size == 4
    assert run(9) is not run(9)


def test_the_port_is_short():
    assert len(inspect.getsource(port).splitlines()) < 40
