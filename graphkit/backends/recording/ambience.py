"""What the process answers, and how it behaves, while a recording is under way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.cuda.graphs

# torch.cuda.is_current_stream_capturing() looks this name up on every call, so that code which
# imported the function long ago is answered too.
_ATTRIBUTE = "_cuda_isCurrentStreamCapturing"
_LOCK = threading.Lock()


class Recording(Protocol):
    """The part of a capture that this module needs."""

    @property
    def recording(self) -> bool:
        """Whether operations are being logged now: begun, and not paused."""


class _Answers:
    """Stands in for torch's capture query, for all recordings under way in the process.

    The state lives in the object that is installed, and goes with it: nothing of it stays in the
    process after the last recording.
    """

    def __init__(self, original: Callable[[], bool]) -> None:
        self.original = original
        self.captures: dict[int, list[Recording]] = {}
        self.stance: AbstractContextManager[Any] | None = None

    def __call__(self) -> bool:
        if self.on_this_thread():
            return True
        # A CPU build has no such query; nothing but a recording can be capturing there.
        return torch.cuda.is_available() and bool(self.original())

    def on_this_thread(self) -> bool:
        captures = self.captures.get(threading.get_ident())
        return captures is not None and any(capture.recording for capture in captures)


def _installed() -> _Answers | None:
    answers = getattr(torch.cuda.graphs, _ATTRIBUTE, None)
    return answers if isinstance(answers, _Answers) else None


def is_recording() -> bool:
    """Whether a recording logs what this thread does."""
    answers = _installed()
    return answers is not None and answers.on_this_thread()


def enter(capture: Recording) -> None:
    """Answer for `capture`, begun on this thread, from now on."""
    with _LOCK:
        answers = _installed()
        if answers is None:
            answers = _Answers(getattr(torch.cuda.graphs, _ATTRIBUTE))
            # One call under a dispatch mode makes Dynamo skip a compiled function for good.
            # Importing Dynamo costs seconds, and while nobody has, nothing is compiled.
            if "torch._dynamo" in sys.modules:
                stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
                stance.__enter__()
                answers.stance = stance
            setattr(torch.cuda.graphs, _ATTRIBUTE, answers)
        answers.captures.setdefault(threading.get_ident(), []).append(capture)


def leave(capture: Recording) -> None:
    """Stop answering for `capture`; after the last one, the process is as it was."""
    with _LOCK:
        answers = _installed()
        if answers is None:
            return
        captures = answers.captures.get(threading.get_ident(), [])
        if capture in captures:
            captures.remove(capture)
        if not captures:
            answers.captures.pop(threading.get_ident(), None)
        if not answers.captures:
            setattr(torch.cuda.graphs, _ATTRIBUTE, answers.original)
            if answers.stance is not None:
                answers.stance.__exit__(None, None, None)
