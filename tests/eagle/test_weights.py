"""The shipped weights load, are small, and have learned English."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from examples.eagle import corpus, train, weights
from examples.eagle.attention import PagedCache, UniformAttention, VarlenAttention
from examples.eagle.draft import load_draft
from examples.eagle.model import Config, TinyLM

SMALL = Config(width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, max_length=32)


@pytest.fixture(scope="module")
def target() -> TinyLM:
    return weights.load_target()


def test_the_file_is_small_and_says_where_it_came_from() -> None:
    assert weights.TARGET.stat().st_size <= 4_000_000
    training = weights.read_metadata(weights.TARGET)["training"]
    assert training["steps"] == train.STEPS
    assert training["seed"] == train.SEED
    assert training["text"] == "pydoc_data.topics of CPython 3.11.7"


def test_the_target_is_loaded_as_fp32_for_inference(target: TinyLM) -> None:
    assert target.config == Config()
    assert {p.dtype for p in target.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in target.parameters())
    assert not target.training


def test_another_dtype_leaves_the_rotary_table_alone() -> None:
    model = weights.load_target(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary.dtype == torch.float32


def test_the_target_is_where_it_was_asked_to_be(device: str) -> None:
    model = weights.load_target(device=device)
    assert {p.device.type for p in model.parameters()} == {device}
    assert model.rotary.device.type == device


def test_it_predicts_text_that_it_has_not_seen(target: TinyLM) -> None:
    bits = train.bits_per_byte(target, corpus.heldout_text()[:16_384])
    assert bits < 1.9  # a uniform guess needs 8, and byte frequencies alone 4.6


def generate(model: TinyLM, prompt: bytes, count: int) -> bytes:
    """Greedy decoding of one request, a byte a step."""
    c, page_size = model.config, 16
    pages = c.max_length // page_size
    cache = PagedCache(c.layers, pages + 1, page_size, c.kv_heads, c.head_dim, torch.float32, "cpu")
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    positions = torch.arange(len(prompt))
    attention = VarlenAttention(cache, [0, len(prompt)], [len(prompt)], table)
    hidden = model(torch.tensor(list(prompt)), positions, page_size + positions, attention)
    written = [int(model.logits(hidden[-1:]).argmax())]
    while len(written) < count:
        position = torch.tensor([len(prompt) + len(written) - 1])
        seq_lens = (position + 1).to(torch.int32)
        attention_step = UniformAttention(cache, table, seq_lens, 1)
        hidden = model(torch.tensor(written[-1:]), position, page_size + position, attention_step)
        written.append(int(model.logits(hidden).argmax()))
    return bytes(written)


def test_it_writes_english_words(target: TinyLM) -> None:
    text = corpus.train_text() + corpus.heldout_text()
    known = {word.lower() for word in re.findall(rb"[A-Za-z]{2,}", text)}
    written = [generate(target, p, 120) for p in corpus.heldout_prompts(6, 64)]
    # The first and the last word may be parts of one.
    words = [w.lower() for t in written for w in re.findall(rb"[A-Za-z]{2,}", t)[1:-1]]
    assert len(words) > 40
    assert sum(w in known for w in words) / len(words) > 0.9, written
    assert len(set(words)) > 25, written


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "small.safetensors"
    model = TinyLM(SMALL)
    model.initialize(torch.Generator().manual_seed(1))
    weights.save(path, model, {"config": weights.describe(SMALL), "note": ["a", 1]})
    assert list(path.parent.iterdir()) == [path]
    assert weights.read_metadata(path)["note"] == ["a", 1]
    loaded = weights.load_target(path)
    assert loaded.config == SMALL
    for name, parameter in model.named_parameters():
        assert loaded.get_parameter(name).dtype == torch.float32
        assert torch.equal(loaded.get_parameter(name), parameter.half().float()), name


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError) as caught:
        weights.load_target(tmp_path / "none.safetensors")
    assert str(caught.value) == (
        f"no weights at {tmp_path / 'none.safetensors'}: train them, see examples/eagle/train.py"
    )
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("keep", [0, 4, 5_000])
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(weights.TARGET.read_bytes()[:keep])
    with pytest.raises(weights.WeightsError, match=r"^.* is no readable weights file .*: restore"):
        weights.load_target(path)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights.save(path, TinyLM(SMALL), {})
    with pytest.raises(weights.WeightsError, match="doesn't say what sizes its model has"):
        weights.load_target(path)


def test_a_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError) as caught:
        weights.load_target(tmp_path)
    assert str(caught.value) == f"{tmp_path} is a directory: name the weights file in it"


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(Config)])
@pytest.mark.parametrize("size", [1.5, 1.0, True, "8", None, 0, -1, [8]])
def test_a_config_takes_sizes_only(tmp_path: Path, name: str, size: Any) -> None:
    error = ValueError if type(size) is int else TypeError
    with pytest.raises(error, match=f"^{re.escape(f'{name}={size!r} is no size: use ')}"):
        Config(**{name: size})
    path = tmp_path / "x.safetensors"
    weights.save(path, TinyLM(SMALL), {"config": {**weights.describe(SMALL), name: size}})
    with pytest.raises(weights.WeightsError) as caught:
        weights.load_target(path)
    assert str(caught.value) == f"{path} doesn't say what sizes its model has: restore it"


@pytest.mark.parametrize(
    "changed", [{"target": {"width": 1.5}}, {"target_layers": [1.0]}, {"target_layers": [True]}]
)
def test_a_drafts_sizes_are_checked_too(
    tmp_path: Path, target: TinyLM, changed: dict[str, Any]
) -> None:
    path = tmp_path / "x.safetensors"
    stored = {"target": weights.describe(Config()), "target_layers": [], **changed}
    weights.save(path, TinyLM(SMALL), {"draft_config": stored})
    with pytest.raises(weights.WeightsError) as caught:
        load_draft(target, path)
    assert str(caught.value) == f"{path} doesn't say what sizes its draft head has: restore it"


def test_another_models_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights.save(path, TinyLM(SMALL), {"config": weights.describe(Config())})
    with pytest.raises(
        weights.WeightsError, match=r"another model's weights \(differing: embedding"
    ):
        weights.load_target(path)
