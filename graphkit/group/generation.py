"""Generations: graphs that were captured into one pool, whose memory comes back with the last of them."""

from __future__ import annotations

from typing import Any

from graphkit.runner.bucket_graph import BucketGraph


class Generation:
    """Graphs of one pool.

    A device gives no memory of a pool back while a graph of it lives. So what is to be given back early, where a
    budget or a bound on the number of graphs asks for it, has a pool of its own.

    Attributes:
        pool: the backend's.
        entries: whose graphs were captured into it.
        driver: bytes that the driver took meanwhile.
        last_used: the latest moment at which one of them was known to have run or to have been captured.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.entries: list[BucketGraph] = []
        self.driver = 0
        self.last_used = 0
        self._replays = 0

    @property
    def graphs(self) -> list[BucketGraph]:
        """Those of the entries whose graphs live."""
        return [entry for entry in self.entries if entry.is_captured]

    def discard(self, entry: BucketGraph) -> None:
        """This entry's graph is gone, or in another pool."""
        if entry in self.entries:
            self.entries.remove(entry)

    def note_use(self, moment: int) -> None:
        """If a graph has run since this was last asked, that was now.

        A step has no time for clocks: it counts its replays, and the counts are looked at when one must go.
        """
        replays = sum(entry.replays for entry in self.entries)
        if replays != self._replays:
            self._replays = replays
            self.last_used = moment

    def note_capture(self, moment: int) -> None:
        """A graph was captured into it now, for a run that replays it once."""
        self.last_used = moment
        self._replays += 1

    def release(self) -> None:
        """Drop the graphs. The pool's memory is free once nobody holds the pool."""
        for entry in self.entries:
            entry.release()
        self.entries.clear()
        self.driver = 0
