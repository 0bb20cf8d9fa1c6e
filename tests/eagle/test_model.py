"""The model equals a plain dense one, however its requests are cut into steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.eagle.attention import DenseAttention, PagedCache, UniformAttention, VarlenAttention
from examples.eagle.model import Config, RMSNorm, TinyLM

SMALL = Config(width=48, layers=3, heads=6, kv_heads=2, head_dim=8, hidden=64, max_length=64)


def small_model(device: str = "cpu") -> TinyLM:
    model = TinyLM(SMALL)
    model.initialize(torch.Generator().manual_seed(3))
    with torch.no_grad():  # of a size at which attention matters, unlike fresh weights
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model.requires_grad_(False).to(device)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def reference_logits(model: TinyLM, ids: Tensor) -> Tensor:
    """[tokens] to [tokens, vocab], with complex rotations and a full attention matrix."""
    c, tokens = model.config, len(ids)
    weights = {name: p.double() for name, p in model.named_parameters()}
    rates = 10_000.0 ** -(torch.arange(c.head_dim // 2, dtype=torch.float64) * 2 / c.head_dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    turns = torch.polar(torch.ones_like(angles), angles)[:, None].to(ids.device)

    def turned(x: Tensor) -> Tensor:
        z = torch.complex(*x.chunk(2, dim=-1)) * turns
        return torch.cat((z.real, z.imag), dim=-1)

    future = torch.ones(tokens, tokens, dtype=torch.bool, device=ids.device).triu(1)
    x = weights["embedding.weight"][ids]
    for i in range(c.layers):
        w = {n.removeprefix(f"layers.{i}."): p for n, p in weights.items() if f"layers.{i}." in n}
        qkv = norm(x, w["attention_norm.gain"]) @ w["qkv.weight"].T
        heads = qkv.view(tokens, c.heads + 2 * c.kv_heads, c.head_dim)
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        q, k = turned(q), turned(k)
        out = []
        for head in range(c.heads):
            kv_head = head * c.kv_heads // c.heads
            scores = q[:, head] @ k[:, kv_head].T / c.head_dim**0.5
            out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, kv_head])
        x = x + torch.cat(out, dim=-1) @ w["attention_out.weight"].T
        gate, up = (norm(x, w["mlp_norm.gain"]) @ w["gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (gate * gate.sigmoid() * up) @ w["down.weight"].T
    return norm(x, weights["norm.gain"]) @ weights["embedding.weight"].T


def some_bytes(count: int, device: str) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(5)).to(device)


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=2e-4)


def test_dense_forward_equals_the_reference(device: str) -> None:
    model, ids = small_model(device), some_bytes(2 * 20, device)
    positions = torch.arange(20, device=device).repeat(2)
    logits = model.logits(model(ids, positions, positions, DenseAttention(2)))
    assert logits.shape == (40, 256)
    assert logits.dtype == torch.float32
    close(logits[:20], reference_logits(model, ids[:20]))
    close(logits[20:], reference_logits(model, ids[20:]))


def test_prefill_decode_and_verify_steps_equal_the_reference(device: str) -> None:
    model = small_model(device)
    texts = [some_bytes(25, device), some_bytes(25, device).flip(0)]
    expected = [reference_logits(model, ids) for ids in texts]
    cache = PagedCache(SMALL.layers, 20, 4, SMALL.kv_heads, SMALL.head_dim, torch.float32, device)
    table = torch.tensor([[3, 1, 5, 9, 2, 8, 14], [4, 12, 6, 10, 7, 11, 13]], dtype=torch.int32)
    table = table.to(device)
    done = [0, 0]

    def step(counts: list[int], uniform: bool) -> None:
        spans = [range(d, d + n) for d, n in zip(done, counts, strict=True)]
        ids = torch.cat([t[s.start : s.stop] for t, s in zip(texts, spans, strict=True)])
        positions = torch.tensor([p for span in spans for p in span], device=device)
        slots = torch.cat(
            [
                row[positions // 4] * 4 + positions % 4
                for row, positions in zip(
                    table.to(torch.int64),
                    [torch.arange(s.start, s.stop, device=device) for s in spans],
                    strict=True,
                )
            ]
        )
        lengths = [span.stop for span in spans]
        if uniform:
            seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
            attention = UniformAttention(cache, table, seq_lens, counts[0])
        else:
            attention = VarlenAttention(cache, [0, counts[0], sum(counts)], lengths, table)
        logits = model.logits(model(ids, positions, slots, attention)).split(counts)
        for got, want, span in zip(logits, expected, spans, strict=True):
            close(got, want[span.start : span.stop])
        done[:] = lengths

    step([7, 5], uniform=False)  # prefill
    step([1, 1], uniform=True)  # decode
    step([6, 1], uniform=False)  # chunked prefill beside a decode
    step([4, 4], uniform=True)  # verify
    step([1, 1], uniform=True)


def test_lower_precision_stays_near(device: str) -> None:
    model, ids = small_model(device), some_bytes(12, device)
    positions = torch.arange(12, device=device)
    want = model.logits(model(ids, positions, positions, DenseAttention(1)))
    model.to(torch.bfloat16)
    got = model.logits(model(ids, positions, positions, DenseAttention(1)))
    assert got.dtype == torch.float32
    assert F.cosine_similarity(got, want).min() > 0.99


def test_gradients_reach_every_parameter() -> None:
    model, ids = small_model().requires_grad_(True), some_bytes(12, "cpu")
    positions = torch.arange(12)
    logits = model.logits(model(ids, positions, positions, DenseAttention(1)))
    torch.autograd.backward(F.cross_entropy(logits[:-1], ids[1:]))
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_the_norm_has_a_gain() -> None:
    layer = RMSNorm(4)
    with torch.no_grad():
        layer.gain.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[3.0, -3.0, 3.0, -3.0]])
    torch.testing.assert_close(layer(x), torch.tensor([[1.0, -2.0, 3.0, -4.0]]))


def test_config_refuses_heads_that_dont_share_evenly() -> None:
    with pytest.raises(ValueError, match="heads=5 can't share kv_heads=2 evenly: use a multiple"):
        Config(heads=5)
    with pytest.raises(ValueError, match="width"):
        Config(width=0)
