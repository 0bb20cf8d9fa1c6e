"""What the runners of one group share besides buffers: the device, the lock, and where the last launch was."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator

from graphkit.backends.base import Backend
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


class Shared:
    """One for each group; its runners hold it.

    Attributes:
        backend: of the group's device.
        checked: whether each run verifies what is otherwise trusted.
        lock: held during each run and capture; never waited for.
        last_stream: the key of the stream of the last launch; None before the first.
        generation: how many replays have begun; leases on outputs in the pool are judged by it.
        state: of the group.
    """

    def __init__(self, backend: Backend, *, checked: bool) -> None:
        self.backend = backend
        self.checked = checked
        self.lock = threading.Lock()
        self.last_stream: int | None = None
        self.generation = 0
        self.state = State.NEW

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

    def check_runnable(self, runner: str) -> None:
        """Raise a `StateError` unless runs are possible."""
        if self.state is State.CLOSED:
            raise StateError(f"runner {runner!r}: the group is closed; make a new GraphGroup")
        if self.state is State.SUSPENDED:
            raise StateError(
                f"runner {runner!r}: the group's memory is released; call capture() before running again"
            )
