"""Capture sessions: many graphs warmed up and captured together, with one preparation for all of them.

A session may be used over one's own functions, buffers, stream and pool; `GraphGroup.capture` is one too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from graphkit.backends import backend_for
from graphkit.backends.base import Backend, ErrorMode, Graph
from graphkit.breaks import recording
from graphkit.errors import CaptureError, MemoryBudgetError, StateError, user_frame

if TYPE_CHECKING:
    from graphkit.recorders import CaptureRecorder

logger = logging.getLogger("graphkit")

T = TypeVar("T")


class Captured:
    """A function's graph, and what the function returned while it was captured.

    Attributes:
        graph: the backend's graph.
        result: the returned value; its tensors are overwritten by each replay.
    """

    __slots__ = ("graph", "replay", "result")

    def __init__(self, graph: Graph, result: Any) -> None:
        self.graph = graph
        self.result = result
        self.replay = graph.replay


class CaptureSession:
    """Warm up and capture functions on one stream, into one pool.

    Used as a context manager. Entering it collects garbage once, freezes the collector, makes the capture stream
    current (ordered after the caller's), turns gradients off and enters `capture_context`; leaving it, also
    by an exception, puts all of that and the random number generators back.

    Args:
        device: "cuda", "cpu" (the recording backend), a device, or a backend.
        stream: to capture on; by default a new one.
        pool: to capture into; by default a new one.
        capture_context: entered once, inside the stream (a communicator's, say).
        error_mode: CUDA's capture error mode.
        generators: generators besides the default one whose random numbers captured functions draw.

    Raises:
        StateError: the current stream is capturing already.
    """

    def __init__(
        self,
        device: str | torch.device | Backend,
        *,
        stream: Any = None,
        pool: Any = None,
        capture_context: Callable[[], AbstractContextManager[Any]] | None = None,
        error_mode: ErrorMode = "thread_local",
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self.backend = backend_for(device)
        self.stream = self.backend.new_stream() if stream is None else stream
        self.pool = self.backend.pool_of(pool)
        self._capture_context = capture_context
        self._error_mode = error_mode
        self._generators = tuple(generators)
        self._stack: contextlib.ExitStack | None = None
        self._has_captured = False

    def __enter__(self) -> CaptureSession:
        if self._stack is not None:
            raise StateError("this capture session is entered already")
        if self.backend.is_capturing():
            raise StateError(
                "the current stream is capturing; a session can't begin inside a capture"
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet_collector())
            stack.enter_context(torch.no_grad())
            stack.enter_context(_autocast_uncached())
            state = self.backend.rng_state(self._generators)
            stack.callback(self.backend.restore_rng_state, state)
            stack.enter_context(self.backend.on_stream(self.stream))
            stack.callback(self.backend.drop_workspaces)
            if self._capture_context is not None:
                stack.enter_context(self._capture_context())
            self._stack = stack.pop_all()
            self._has_captured = False
        return self

    def __exit__(self, *exception: Any) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(*exception)

    def warmup(self, fn: Callable[[], T], *, as_capturing: bool = False) -> T:
        """Run `fn` eagerly on the capture stream, so that what is done once is done before a capture.

        Args:
            fn: called without arguments.
            as_capturing: answer True to code that asks whether the stream is capturing.
        """
        self._check_entered()
        if as_capturing:
            with self.backend.as_capturing():
                return fn()
        return fn()

    def flush(self) -> None:
        """Give what the warm-ups left cached back to the device."""
        self._check_entered()
        self.backend.empty_cache()

    def capture(self, fn: Callable[[], T], *, breaks: CaptureRecorder | None = None) -> Captured:
        """Capture one call of `fn`.

        Args:
            breaks: who splits the capture at eager breaks; without one, breaks are captured.

        Raises:
            CaptureError: the device refuses an operation of `fn`; operation, file and line are named.
            MemoryBudgetError: the device's memory is too small.
            Exception: whatever else `fn` raises, as it is.
        """
        self._check_entered()
        if not self._has_captured:
            # So that the captures make their own, in the pool, which lives as long as their graphs.
            self.backend.drop_workspaces()
            self._has_captured = True
        capture = self.backend.begin_capture(
            pool=self.pool, generators=self._generators, error_mode=self._error_mode
        )
        try:
            if breaks is not None:
                breaks.begin(capture)
            with recording(breaks):
                result = fn()
            if breaks is not None:
                breaks.check_complete()
            graph: Graph = capture.end()
            if breaks is not None:
                graph = breaks.finish(graph)
        except BaseException as error:
            capture.abort()
            refused = as_capture_error(error)
            if refused is None:
                raise
            raise refused from error
        return Captured(graph, result)

    def _check_entered(self) -> None:
        if self._stack is None:
            raise StateError("enter the session first: with CaptureSession(...) as session:")


_REFUSALS: tuple[tuple[str, str], ...] = (
    (
        "unless the CPU tensor is pinned",
        "copies between pageable host memory and the device can't be captured: copy before the run, into a buffer",
    ),
    (
        "Cannot construct a new CUDAGeneratorImpl",
        "make generators before the capture, and register them with generators=",
    ),
    (
        "unjoined work",
        "a side stream wasn't joined: let the capture stream wait for it before the function returns",
    ),
    (
        "for a CUDA generator not in capture mode",
        "a generator that isn't registered draws random numbers: name it in generators=",
    ),
    (
        "Offset increment outside graph capture",
        "a generator that isn't registered draws random numbers: name it in generators=",
    ),
    (
        "stream is capturing",
        (
            "the operation waits for the device, which a capture can't; compute it on the device, "
            "do it in prepare, or put it in an eager break"
        ),
    ),
    (
        "during capture",
        "an operation that can't be captured was called; do it in prepare, or put it in an eager break",
    ),
)


def as_capture_error(error: BaseException) -> Exception | None:
    """The error to raise instead, if `error` is the device's refusal of a capture; None if it is the user's own."""
    if isinstance(error, CaptureError):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        return MemoryBudgetError(f"the device ran out of memory in a capture: {_first_line(error)}")
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    for sign, remedy in _REFUSALS:
        if sign in text:
            frame = user_frame(error)
            operation = frame.source if frame else None
            at = f" at {frame}" if frame else ""
            return CaptureError(
                f"the device refused a capture{at}: {_first_line(error)}. Remedy: {remedy}",
                operation=operation,
                location=frame.location if frame else None,
            )
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Collect garbage once, then keep the collector from running: it may free device memory in a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    # What others have frozen can't be told from what this would freeze, so theirs is left alone.
    freezes = gc.get_freeze_count() == 0
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _autocast_uncached() -> Iterator[None]:
    """Let autocast cast weights in each graph: a cast that it kept would be read there in place of the weight."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


class Progress:
    """One bar for a session: tqdm's on a terminal, a log line now and then elsewhere."""

    def __init__(self, total: int, what: str) -> None:
        self._total = total
        self._what = what
        self._done = 0
        self._bar: Any = None
        if total and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=what, leave=False)

    def step(self, note: str) -> None:
        """One more is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update()
        elif self._total and (
            self._done == self._total or self._done % max(self._total // 4, 1) == 0
        ):
            logger.info("%s: %d of %d (%s)", self._what, self._done, self._total, note)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
