"""The step: what `prepare`, `prepare_host` and eager breaks see of the run that they are part of."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import torch

from graphkit.dispatch.dispatcher import Dispatch
from graphkit.errors import StateError


class Phase(enum.Enum):
    """What a function is run for."""

    WARMUP = "warm-up"
    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


class Step:
    """One run, as `prepare_host(step)`, `prepare(step)` and `current_run()` give it.

    Attributes:
        dispatch: the answer that is run: mode, bucket, real sizes.
        phase: WARMUP, CAPTURE, REPLAY or EAGER.
        views: parameter -> tensor on the device, of the bucket's size (the batch's in EAGER).
        host: parameter -> NumPy array of the same size, of the inputs that the host fed in this run and that are
            small enough to be moved together (`graphkit.staging.staging.PACKED_LIMIT`); raw bits for bfloat16.
        context: what the caller gave to `run(context=)`.
        state: a dict that lives and dies with the bucket's graph; in EAGER a new one for each run.
        prepared: what `prepare` returned in this run; where it returned None, what it did at the capture.
    """

    __slots__ = ("context", "dispatch", "host", "phase", "prepared", "state", "views")

    def __init__(
        self,
        dispatch: Dispatch,
        phase: Phase,
        views: Mapping[str, torch.Tensor],
        host: Mapping[str, np.ndarray[Any, Any]],
        context: Any,
        state: dict[Any, Any],
    ) -> None:
        self.dispatch = dispatch
        self.phase = phase
        self.views = views
        self.host = host
        self.context = context
        self.state = state
        self.prepared: dict[str, Any] = {}


class _Body:
    """In place of a step while a runner's function runs: its breaks may have the step, its body may not."""

    __slots__ = ("sizes", "step")

    def __init__(self, step: Step | None, sizes: Mapping[str, int] | None) -> None:
        self.step = step
        self.sizes = sizes


_current: ContextVar[Step | _Body | None] = ContextVar("graphkit_current_step", default=None)


def current_run() -> Step:
    """The run under way, in `prepare` and in eager breaks.

    Raises:
        StateError: in the body of a runner's function, where the answer would be baked into the graph;
            or outside any run.
    """
    step = _current.get()
    if isinstance(step, _Body):
        raise StateError(
            "current_run() was called in a runner's function, whose values are baked into the graph: "
            "ask in prepare or in an eager break"
        )
    if step is None:
        raise StateError(
            "current_run() was called outside a run: no prepare or eager break is active"
        )
    return step


def live_step() -> Step | None:
    """The step that a break called from here may see; None outside runs, and in a FULL capture."""
    step = _current.get()
    return step.step if isinstance(step, _Body) else step


def body_sizes() -> Mapping[str, int] | None:
    """The sizes that a runner's function is called for, in its body; None outside."""
    step = _current.get()
    return step.sizes if isinstance(step, _Body) else None


def set_current(step: Step) -> Token[Any]:
    """Make `step` what `current_run` answers, until `reset_current`."""
    return _current.set(step)


def reset_current(token: Token[Any]) -> None:
    """Undo `set_current`."""
    _current.reset(token)


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Make `step` what `current_run` answers."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def in_body(step: Step | None, sizes: Mapping[str, int] | None = None) -> Iterator[None]:
    """A runner's function is being run: `current_run` raises in it, and answers `step` in its breaks.

    Args:
        sizes: that it is run for, where its breaks may not have the step.
    """
    token = _current.set(_Body(step, sizes))
    try:
        yield
    finally:
        _current.reset(token)
