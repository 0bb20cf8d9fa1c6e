"""What the runners of one group share besides buffers: the device, the lock, and where the last launch was."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

from graphkit.backends.base import Backend
from graphkit.capture.inspection import Inspection
from graphkit.errors import ConcurrentRunError, StateError


def busy(what: str) -> str:
    """The message where the lock is held."""
    return (
        f"{what}: a run or capture of the group is under way, in another thread or around this call; the graphs of "
        f"one group share memory and never run at the same time"
    )


class State(enum.Enum):
    """What a group can do."""

    NEW = "nothing is captured yet"
    CAPTURED = "graphs are there"
    SUSPENDED = "memory was released"
    STALE = "graphs were invalidated"
    CLOSED = "closed"


class _LentLock:
    """A lock that one thread can take, and another never gets."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = False) -> bool:
        """Take it, without waiting; False for another thread, and where it is taken."""
        return threading.get_ident() == self._thread and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


class Shared:
    """One for each group; its runners hold it.

    Attributes:
        backend: of the group's device.
        checked: whether each run verifies what is otherwise trusted.
        lock: held during each run and capture; never waited for.
        last_stream: the key of the stream of the last launch; None before the first.
        generation: how many replays have begun; leases on outputs in the pool are judged by it.
        state: of the group.
        inspection: of warm-ups and captures; None where the group isn't checked.
        capture_now: captures a bucket's graph during a run that needs it, and says whether it is there; None where
            graphs are captured ahead.
    """

    def __init__(self, backend: Backend, *, checked: bool) -> None:
        self.backend = backend
        self.checked = checked
        self.lock: threading.Lock | _LentLock = threading.Lock()
        self.last_stream: int | None = None
        self.generation = 0
        self.state = State.NEW
        self.inspection = Inspection() if checked else None
        self.capture_now: Callable[[Any], bool] | None = None

    def order_on_stream(self) -> None:
        """The current stream is another than that of the last launch: order it after that."""
        if self.last_stream is not None:
            self.backend.wait_for(self.last_stream)
        self.last_stream = self.backend.stream_key()

    @contextlib.contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Hold the lock.

        Raises:
            ConcurrentRunError: somebody else holds it, or this thread around this call.
        """
        if not self.lock.acquire(blocking=False):
            raise ConcurrentRunError(busy(what))
        try:
            yield
        finally:
            self.lock.release()

    @contextlib.contextmanager
    def lent(self, what: str) -> Iterator[None]:
        """Hold the lock for several runs of this thread, which take one that no other thread gets.

        Raises:
            ConcurrentRunError: somebody else holds it, or this thread around this call.
        """
        with self.exclusive(what), self.lending():
            yield

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """The same, where this thread holds the lock already."""
        own = self.lock
        self.lock = _LentLock()
        try:
            yield
        finally:
            self.lock = own

    def check_runnable(self, runner: str) -> None:
        """Raise a `StateError` unless runs are possible."""
        if self.state is State.CLOSED:
            raise StateError(f"runner {runner!r}: the group is closed; make a new GraphGroup")
        if self.state is State.SUSPENDED:
            raise StateError(
                f"runner {runner!r}: the group's memory is released; call capture() before running again"
            )
