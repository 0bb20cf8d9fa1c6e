"""Training: its schedule, that it learns, and that it is repeatable."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from examples.eagle import corpus, train, weights
from examples.eagle.model import Config, TinyLM


def test_lengths_grow_to_the_models_maximum() -> None:
    lengths = [train.length_at(i / 100) for i in range(100)]
    assert lengths == sorted(lengths)
    assert set(lengths) == {128, 256, 512}
    assert lengths[-1] == Config().max_length
    assert all(train.TOKENS_PER_STEP % length == 0 for length in lengths)


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [train.learning_rate_at(step, 1_000) for step in range(1_000)]
    peak = rates.index(max(rates))
    assert peak in (train.WARMUP_STEPS - 1, train.WARMUP_STEPS)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(train.PEAK_LEARNING_RATE)
    assert rates[-1] == pytest.approx(0.01 * train.PEAK_LEARNING_RATE, rel=0.01)


def test_an_untrained_model_guesses_almost_uniformly() -> None:
    model = TinyLM(Config())
    model.initialize(torch.Generator().manual_seed(0))
    bits = train.bits_per_byte(model, corpus.heldout_text()[:2_048])
    assert bits == pytest.approx(8.0, abs=0.6)


def test_bits_per_byte_is_the_mean_over_all_pieces() -> None:
    model = TinyLM(Config())
    model.initialize(torch.Generator().manual_seed(0))
    text = corpus.heldout_text()[: 19 * 64 + 10]
    data = torch.tensor(list(text))[: 19 * 64].view(19, 64)
    with torch.no_grad():
        each = [train.next_byte_loss(model, piece[None]).item() for piece in data]
    assert train.bits_per_byte(model, text, 64) == pytest.approx(sum(each) / 19 / math.log(2))


def test_it_learns_and_is_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_STEP", 512)
    monkeypatch.setattr(train, "WARMUP_STEPS", 2)
    monkeypatch.setattr(corpus, "heldout_text", lambda: corpus.train_text()[:2_048])
    for name in ("one", "two"):
        train.train(tmp_path / name, steps=12, save_every=6)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    training = weights.read_metadata(tmp_path / "one")["training"]
    assert training["steps"] == 12
    assert training["heldout_bits_per_byte"] < 6.5


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(train, "train", lambda path, steps: asked.append((path, steps)))
    out = tmp_path / "x.safetensors"
    monkeypatch.setattr("sys.argv", ["train", "--out", str(out), "--steps", "7"])
    train.main()
    assert asked == [(out, 7)]
