"""The text and its held-out part."""

from __future__ import annotations

import pytest

from examples.eagle import corpus


def test_the_held_out_part_is_unseen() -> None:
    train, heldout = corpus.train_text(), corpus.heldout_text()
    assert len(train) > 300_000
    assert 0.03 < len(heldout) / len(train) < 0.15
    lines = {line.strip() for line in heldout.splitlines() if len(line.strip()) >= 40}
    seen = {line for line in lines if line in train}
    assert len(seen) < 0.03 * len(lines), sorted(seen)


def test_topics_end_with_the_byte_that_text_never_has() -> None:
    heldout = corpus.heldout_text()
    assert heldout.count(corpus.END) == len(corpus.HELDOUT_TOPICS)
    assert heldout[-1] == corpus.END
    assert b'The "assert" statement' in heldout


@pytest.mark.parametrize(("count", "length"), [(1, 1), (64, 48), (256, 100)])
def test_prompts_come_from_the_held_out_part(count: int, length: int) -> None:
    prompts = corpus.heldout_prompts(count, length)
    assert len(set(prompts)) == count if length > 1 else len(prompts) == count
    heldout = corpus.heldout_text()
    for prompt in prompts:
        assert len(prompt) == length
        assert prompt in heldout
        assert corpus.END not in prompt
        assert not prompt[:1].isspace()


def test_prompts_are_the_same_every_time() -> None:
    assert corpus.heldout_prompts(20, 40) == corpus.heldout_prompts(20, 40)


def test_impossible_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="count=0, length=4: both must be at least 1"):
        corpus.heldout_prompts(0, 4)
    with pytest.raises(
        ValueError, match=r"places where a prompt of 50 bytes can start, and 100000"
    ):
        corpus.heldout_prompts(100_000, 50)


def test_a_python_without_the_text_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match=r"no pydoc_data\.topics, .*: use a full CPython"):
        corpus.train_text()
