"""A port of attention in FlashAttention's manner: views of static buffers, and constants."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import graphkit as gk
from tests.acceptance.engine import CONTEXT, HEADS, PAGE, REQS, SCRATCH, WIDTH, Cache, Weights


def varlen_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    *,
    query_start: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    max_query_len: int,
    max_length: int,
) -> torch.Tensor:
    """Causal attention over requests of any query length; metadata are tensors and two Python bounds.

    Rows beyond the last request's are not to be read.
    """
    device, reqs = q.device, len(lengths)
    token = torch.arange(len(q), device=device)
    owner = torch.searchsorted(query_start[1:].long(), token, right=True).clamp(max=reqs - 1)
    first, last = query_start[:-1].long()[owner], query_start[1:].long()[owner]
    place = (token - first).clamp(max=max_query_len - 1)
    position = (lengths[owner] - (last - first) + place).clamp(min=0)
    column = torch.arange(max_length, device=device)
    keys, values = kv[table[:, column // PAGE], :, column % PAGE].unbind(2)
    scores = torch.einsum("thw,tkhw->thk", q, keys[owner]) / WIDTH**0.5
    hidden = (column > position[:, None])[:, None]
    weights = scores.masked_fill(hidden, -1e9).softmax(-1)
    return torch.einsum("thk,tkhw->thw", weights, values[owner])


def port(group: gk.GraphGroup, weights: Weights, cache: Cache, lens: list[int]) -> gk.GraphRunner:
    reqs, tokens = gk.Dim("reqs", REQS), gk.Dim("tokens", REQS * max(lens))
    pages = gk.Dim("pages", CONTEXT // PAGE)
    group.buffers.declare(
        hidden=gk.BufferSpec((tokens, HEADS * WIDTH), torch.float32, pad=0),
        slots=gk.BufferSpec((tokens,), torch.int64, pad=SCRATCH * PAGE),
        query_start=gk.BufferSpec((reqs + 1,), torch.int32, pad=gk.repeat_last),
        lengths=gk.BufferSpec((reqs,), torch.int64, pad=1),
        table=gk.BufferSpec((reqs, pages), torch.int64, pad={reqs: SCRATCH, pages: SCRATCH}),
    )

    def prepare(step: gk.Step) -> dict[str, Any]:
        views = step.views
        constants = {
            "max_query_len": step.dispatch.max_query_len,
            "max_length": views["table"].shape[1] * PAGE,
        }
        names = ("query_start", "lengths", "table")
        return {"metadata": {name: views[name] for name in names} | constants}

    def forward(hidden, slots, metadata):
        query, key, value = weights.project(hidden)
        cache.write(slots, key, value)
        return varlen_attention(query, cache.kv, **metadata).flatten(1) @ weights.out

    routes = [gk.Buckets.uniform(reqs, tokens, query_len=q, sizes=(1, 2, 4, 8)) for q in lens]
    return group.runner(
        "model",
        forward,
        policy=gk.Policy([gk.Route(gk.FULL, buckets) for buckets in routes]),
        inputs={name: gk.Fed(name) for name in ("query_start", "lengths", "table")},
        prepare=prepare,
        outputs=gk.Output((tokens, HEADS * WIDTH), torch.float32),
        mutates=[gk.Scratch(cache.kv, rows=[SCRATCH])],
    )


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("lens", [[1], [4], [1, 4]], ids=["decode", "verify", "both"])
def test_right_at_every_batch_size(device, lens, checked):
    weights, cache = Weights(device), Cache(device)
    group = gk.GraphGroup(device, checked=checked)
    runner = port(group, weights, cache, lens)
    group.capture()
    for round_, count in enumerate([*range(REQS + 1), *range(REQS, -1, -1)]):
        q = lens[round_ % len(lens)]
        batch = cache.batch(count, q, seed=round_)
        expected = cache.dense(weights, batch)
        dispatch = runner.dispatch(
            reqs=count, tokens=count * q, query_len=q, pages=batch.table.shape[1]
        )
        assert dispatch.mode is (gk.EAGER if count > 8 else gk.FULL)
        out = runner.run(
            dispatch,
            hidden=batch.hidden,
            slots=batch.slots,
            query_start=batch.query_start,
            lengths=batch.lengths,
            table=batch.table,
        )
        torch.testing.assert_close(out.to("cpu"), expected, rtol=1e-4, atol=1e-4)


def test_the_port_is_short():
    assert len(inspect.getsource(port).splitlines()) < 40
