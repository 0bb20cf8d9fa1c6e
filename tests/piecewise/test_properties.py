"""A model with K breaks equals eager for drawn lengths per request, at every bucket; pad rows never reach a break."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphkit as gk

WIDTH = 8
TOKENS = gk.Dim("tokens", 40)
BUCKETS = (1, 2, 3, 5, 8, 16, 24, 32)
POISON = 1000.0


def attend(h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Causal within each request: variable length, and decided on the host."""
    made, start = [], 0
    for length in lengths:
        part = h[start : start + length]
        scores = part @ part.t() / WIDTH**0.5
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        made.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ part)
        start += length
    return torch.cat([h[:0], *made])


class Model:
    """K breaks, each of another kind, around dense parts."""

    def __init__(self, device: str, depth: int) -> None:
        generator = torch.Generator().manual_seed(depth)
        made = torch.randn(depth + 1, WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weights = made.to(device)
        self.depth = depth
        self.poisoned = 0
        self.seen: list[int] = []
        self.attention = gk.eager_break(self._attention, rows="real")
        self.in_place = gk.eager_break(self._in_place, rows="real")

    def _lengths(self, h: torch.Tensor) -> list[int]:
        lengths = gk.current_run().context
        return [h.shape[0]] if lengths is None else list(lengths)

    def _attention(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        self._look(h)
        return attend(h, self._lengths(h)) * (1 + layer)

    def _in_place(self, h: torch.Tensor) -> torch.Tensor:
        self._look(h)
        return h.mul_(0.5)

    def _look(self, h: torch.Tensor) -> None:
        if gk.current_run().phase is gk.Phase.REPLAY:
            self.seen.append(h.shape[0])
            self.poisoned += int((h.abs() > POISON / 4).any())

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._body(x, self.attention, self.in_place)

    def eager(self, x: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
        return self._body(x, lambda h, layer: attend(h, lengths) * (1 + layer), lambda h: h * 0.5)

    def _body(
        self,
        x: torch.Tensor,
        attention: Callable[..., torch.Tensor],
        in_place: Callable[..., torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        h = x
        for layer in range(self.depth):
            mixed = torch.tanh(h @ self.weights[layer])
            h = h + (attention(mixed, layer) if layer % 2 == 0 else in_place(mixed))
        return {"hidden": h, "out": torch.tanh(h @ self.weights[-1])}


def captured(device: str, depth: int) -> tuple[Model, gk.GraphRunner]:
    model = Model(device, depth)
    group = gk.GraphGroup(device)
    # The pad is poison: a break that saw a pad row, or a dense part that mixed rows, would show it.
    group.buffers.declare(x=gk.BufferSpec((TOKENS, WIDTH), torch.float32, pad=POISON))
    runner = group.runner(
        "model", model, policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, *BUCKETS))
    )
    group.capture()
    return model, runner


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def models(request):
    return {depth: captured(request.param, depth) for depth in (1, 4)}


def check(model: Model, runner: gk.GraphRunner, lengths: list[int], seed: int) -> None:
    count = sum(lengths)
    x = np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)
    dispatch = runner.dispatch(tokens=count)
    model.seen.clear()
    made = runner.run(dispatch, x=x, context=lengths)
    expected = model.eager(torch.from_numpy(x).to(made["out"].device), lengths)
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5)
    assert model.poisoned == 0
    assert dispatch.mode is (gk.PIECEWISE if count <= BUCKETS[-1] else gk.EAGER)
    if dispatch.mode is gk.PIECEWISE:
        assert model.seen == [count] * model.depth


LENGTHS = st.lists(st.integers(0, 9), max_size=6).filter(lambda lengths: sum(lengths) <= 40)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=LENGTHS, depth=st.sampled_from([1, 4]), seed=st.integers(0, 1000))
def test_drawn_lengths_equal_eager(models, lengths, depth, seed):
    check(*models[depth], lengths, seed)


def test_every_bucket_full_and_with_one_pad_row(models):
    for model, runner in models.values():
        for size in BUCKETS:
            for count in {size, size - 1, max(size - 2, 0)}:
                check(model, runner, [count // 2, count - count // 2], size)
        assert all(entry.replays for entry in runner.entries)
