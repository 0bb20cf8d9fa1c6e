"""Capture sessions: many graphs warmed up and captured together, with one preparation for all of them.

A session may be used over one's own functions, buffers, stream and pool; `GraphGroup.capture` is one too.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from graphkit.backends import backend_for, check_generators
from graphkit.backends.base import Backend, Capture, ErrorMode, Graph, Peak
from graphkit.capture.breaks import recording
from graphkit.errors import CaptureError, MemoryBudgetError, StateError, user_frame

if TYPE_CHECKING:
    from graphkit.capture.recorders import CaptureRecorder

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

    Used as a context manager. Entering it collects young garbage once, freezes the collector, makes the capture stream
    current (ordered after the caller's), turns gradients off and enters `capture_context`; leaving it, also
    by an exception, puts all of that and the random number generators back.

    Args:
        device: "cuda", "cpu" (the recording backend), a device, or a backend.
        stream: to capture on; by default a new one.
        pool: to capture into; by default a new one.
        capture_context: entered once, inside the stream (a communicator's, say).
        error_mode: CUDA's capture error mode.
        generators: generators besides the default one whose random numbers captured functions draw.

    Attributes:
        measures: whether warm-ups are measured.
        peak: what the last warm-up that was measured has allocated.

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
        self._generators = check_generators(generators)
        self._stack: contextlib.ExitStack | None = None
        self._collect: Callable[[], object] = gc.collect
        self._has_captured = False
        self.measures = False
        self.peak = Peak()

    def __enter__(self) -> CaptureSession:
        if self._stack is not None:
            raise StateError("this capture session is entered already")
        if self.backend.is_capturing():
            raise StateError(
                "the current stream is capturing; a session can't begin inside a capture"
            )
        with contextlib.ExitStack() as stack:
            self._collect = stack.enter_context(_quiet_collector())
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
        with contextlib.ExitStack() as stack:
            if as_capturing:
                stack.enter_context(self.backend.as_capturing())
            if self.measures:
                self.peak = stack.enter_context(self.backend.peak())
            return fn()

    def flush(self) -> None:
        """Give what the warm-ups left cached back to the device."""
        self._check_entered()
        self.backend.empty_cache()

    def make_room(self) -> None:
        """Collect all garbage, and give what is cached back: for another attempt after the memory ran out."""
        self._check_entered()
        self._collect()
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
        capture: Capture | None = None
        try:
            capture = self.backend.begin_capture(
                pool=self.pool, generators=self._generators, error_mode=self._error_mode
            )
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
            if capture is not None:
                capture.abort()
            refused = as_capture_error(error)
            if refused is None:
                raise
            forget_frames(error)
            raise refused from error
        return Captured(graph, result)

    def _check_entered(self) -> None:
        if self._stack is None:
            raise StateError("enter the session first: with CaptureSession(...) as session:")


_WAITS = (
    "the operation waits for the device, which a capture can't; compute it on the device, "
    "do it in prepare, or put it in an eager break"
)
_REGISTER = "a generator that isn't registered draws random numbers: name it in generators="

# What CUDA and torch say, most special first. A sign is a phrase of theirs that no user's exception would have.
_REFUSALS: tuple[tuple[str, str], ...] = (
    (
        "unless the CPU tensor is pinned",
        (
            "copies between pageable host memory and the device can't be captured: copy inputs before the run, into a "
            "buffer; and instead of reading a value on the host, compute it on the device, do it in prepare, or put it "
            "in an eager break"
        ),
    ),
    (
        "Cannot construct a new CUDAGeneratorImpl",
        "make generators before the capture, and register them with generators=",
    ),
    (
        "unjoined work",
        "a side stream wasn't joined: let the capture stream wait for it before the function returns",
    ),
    ("for a CUDA generator not in capture mode", _REGISTER),
    ("Offset increment outside graph capture", _REGISTER),
    (
        "during CUDA graph capture",
        "a generator is seeded or asked for its state, which a capture can't bake: do it before the run",
    ),
    (
        "event last recorded in a capturing stream",
        (
            "the host waits for or times an event of the capture, as autotuning does: let it tune in warm-up, for "
            "the bucket's shapes, or fix the configuration"
        ),
    ),
    (
        "dependency created on uncaptured work",
        (
            "the capture was made to wait for work of a stream outside it: order that work before the run, or "
            "fork the stream from the capture stream inside the function"
        ),
    ),
    (
        "would make the legacy stream depend",
        "work was put on the default stream: launch it on torch.cuda.current_stream()",
    ),
    (
        "merge of separate capture sequences",
        "two captures were made to wait for each other: capture one group at a time on a stream",
    ),
    (
        "the capture was not initiated in this stream",
        "the function left another stream current than it found: use with torch.cuda.stream(...)",
    ),
    (
        "from another thread",
        "the capture was ended by another thread than began it: capture in one thread",
    ),
    (
        "_STATUS_NOT_INITIALIZED",
        (
            "a library is initialized at its first use, which a capture can't have: call it in warm-up, on the same "
            "path (warmup_as_capturing=True if the function asks whether it is captured), or before the capture"
        ),
    ),
    (
        "_STATUS_ALLOC_FAILED",
        "a library found no memory for its workspace: free memory, or capture smaller buckets",
    ),
    ("stream is capturing", _WAITS),
    (
        "previous error during capture",
        (
            "an operation before this line, or of another thread, was refused and its error was swallowed; find it "
            "with graphkit.lint, or capture with capture_error_mode='thread_local' if another thread is at work"
        ),
    ),
    (
        "Capture must end on the same stream",
        "the function left another stream current than it found: use with torch.cuda.stream(...)",
    ),
)

# What is no torch.OutOfMemoryError, and means the same.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory")


def as_capture_error(error: BaseException) -> Exception | None:
    """The error to raise instead, if `error` is the device's refusal of a capture; None if it is the user's own.

    Args:
        error: with the traceback that it has where the capture's function was called, so that frames of the
            capture's caller are not taken for the function's.
    """
    if isinstance(error, CaptureError) or not isinstance(error, (RuntimeError, MemoryError)):
        return None
    text = str(error)
    frame = user_frame(error)
    at = f" at {frame}" if frame else ""
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in _OUT_OF_MEMORY):
        return MemoryBudgetError(
            f"the device ran out of memory in a capture{at}: {_first_line(error)}"
        )
    if type(error) not in _DEVICE_ERRORS:
        return None
    for sign, remedy in _REFUSALS:
        if sign in text:
            return CaptureError(
                f"the device refused a capture{at}: {_first_line(error)}. Remedy: {remedy}",
                operation=frame.source if frame else None,
                location=frame.location if frame else None,
            )
    return None


# A user's subclass of RuntimeError is the user's. torch has its own one from 2.8 on.
_DEVICE_ERRORS = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of an exception's frames, and of those that led to it: they hold the pool's tensors."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += [one.__cause__, one.__context__]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet_collector() -> Iterator[Callable[[], None]]:
    """Collect young garbage once, then keep the collector from running: it may free device memory in a capture.

    Yields:
        What collects all garbage, old garbage too. That takes longer than the capture of many small graphs, so it waits
        until memory is short.
    """
    gc.collect(1)
    was_enabled = gc.isenabled()
    # What others have frozen can't be told from what this would freeze, so theirs is left alone.
    freezes = gc.get_freeze_count() == 0
    gc.disable()
    if freezes:
        gc.freeze()

    def collect() -> None:
        if freezes:
            gc.unfreeze()
        gc.collect()
        if freezes:
            gc.freeze()

    try:
        yield collect
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
