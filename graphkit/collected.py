"""Warnings kept for later, in one thread, while other threads may be doing the same."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()


class _Collector:
    """Stands in for `warnings.showwarning`, for all threads that collect.

    Filters are the process's: two `warnings.catch_warnings` that overlap in two threads would put back each other's.
    The state lives in the object that is installed, and goes with it.
    """

    def __init__(self) -> None:
        self.show = warnings.showwarning
        self.lists: dict[int, list[list[warnings.WarningMessage]]] = {}
        self.filters = warnings.catch_warnings()

    def __call__(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        mine = self.lists.get(threading.get_ident())
        if mine:
            kept = warnings.WarningMessage(message, category, filename, lineno, file, line)
            mine[-1].append(kept)
        else:
            self.show(message, category, filename, lineno, file, line)


@contextmanager
def collected_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Keep every warning of this thread, whatever the filters say, instead of giving it."""
    caught: list[warnings.WarningMessage] = []
    thread = threading.get_ident()
    with _LOCK:
        collector = warnings.showwarning
        if not isinstance(collector, _Collector):
            collector = _Collector()
            collector.filters.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = collector
        collector.lists.setdefault(thread, []).append(caught)
    try:
        yield caught
    finally:
        with _LOCK:
            mine = collector.lists[thread]
            mine.pop()
            if not mine:
                del collector.lists[thread]
            if not collector.lists:
                collector.filters.__exit__(None, None, None)
