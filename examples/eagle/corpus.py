"""The text that the models learn: the language reference that ships with CPython.

`pydoc_data.topics` is what ``help("assert")`` prints. It is on every machine that has CPython, is
about 460 kB of English and code, and is fixed for a CPython version. The shipped weights were
trained on CPython 3.11.7's.

Some topics are held out entirely: neither the target nor a draft head has seen them. They were
chosen among those that no other topic repeats (many do: "compound" holds all of "try" and "with").
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

END = 0
"""The byte between topics; the text itself has none."""

HELDOUT_TOPICS = (
    "assert",
    "calls",
    "del",
    "import",
    "lambda",
    "nonlocal",
    "objects",
    "raise",
    "slicings",
    "subscriptions",
    "truth",
)


def _topics() -> Mapping[str, str]:
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the example learns from: "
            "use a full CPython installation"
        ) from error
    topics: Mapping[str, str] = module.topics
    return topics


def train_text() -> bytes:
    """All topics but the held-out ones, in alphabetical order, with `END` after each."""
    topics = _topics()
    kept = [topics[name] for name in sorted(topics) if name not in HELDOUT_TOPICS]
    return b"".join(text.encode() + bytes([END]) for text in kept)


def heldout_text() -> bytes:
    """The held-out topics, with `END` after each."""
    topics = _topics()
    kept = [topics[name] for name in HELDOUT_TOPICS if name in topics]
    return b"".join(text.encode() + bytes([END]) for text in kept)


def heldout_prompts(count: int, length: int) -> list[bytes]:
    """Pieces of the held-out text, spread evenly over it, each from the start of a word.

    Args:
        count: how many.
        length: bytes of each.

    Raises:
        ValueError: ``count`` or ``length`` isn't positive, or the text hasn't that many starts.
    """
    text = heldout_text()
    if count < 1 or length < 1:
        raise ValueError(f"count={count}, length={length}: both must be at least 1")
    starts = [
        start
        for start in range(len(text) - length + 1)
        if text[start] > 32
        and (start == 0 or text[start - 1] in b" \n\0")
        and END not in text[start : start + length]
    ]
    if count > len(starts):
        raise ValueError(
            f"the held-out text has {len(starts)} places where a prompt of {length} bytes can "
            f"start, and {count} were asked for: use fewer or shorter prompts"
        )
    chosen = (starts[i * len(starts) // count] for i in range(count))
    return [text[start : start + length] for start in chosen]
