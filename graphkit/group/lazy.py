"""Lazy capture: graphs at their first use, a bounded number of them, the least recently used given up together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from graphkit.capture.session import CaptureSession, Progress
from graphkit.dims import as_size
from graphkit.dispatch.dispatcher import PIECEWISE
from graphkit.errors import SpecError, StateError
from graphkit.group.capture import GroupCapture, raise_first
from graphkit.group.generation import Generation
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import Shared

GENERATIONS = 4
"""Into how many pools the graphs go: each shares memory within, and is given back as a whole."""


MAX_GRAPHS = 64
"""How many graphs a lazy group holds, unless it is told otherwise."""


def lazy_capture(
    capture: GroupCapture, shared: Shared, lazy: object, max_graphs: object
) -> LazyCapture | None:
    """What captures the graphs of a group at their first use, if the group is asked to.

    Raises:
        SpecError: an option is wrong.
    """
    if not isinstance(lazy, bool):
        raise SpecError(
            f"lazy must be True or False, got {lazy!r}; max_graphs= bounds the number of graphs"
        )
    if not lazy:
        if max_graphs is not None:
            raise SpecError(
                "max_graphs= bounds what is captured at first use; give lazy=True with it"
            )
        return None
    capture.refuse_given_pool("lazy=True")
    bound = MAX_GRAPHS if max_graphs is None else max_graphs
    bound = as_size(bound, "max_graphs", minimum=1, error=SpecError)
    made = LazyCapture(capture, shared, bound)
    shared.capture_now = made
    return made


class LazyCapture:
    """Captures graphs one by one, when a run needs them.

    Args:
        capture: of the group.
        shared: of the group.
        max_graphs: how many may live at a time.

    Attributes:
        seconds: spent in captures at first use.
        captures: how many there were.
        evictions: how many graphs were given up for others.
    """

    def __init__(self, capture: GroupCapture, shared: Shared, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self.seconds = 0.0
        self.captures = 0
        self.evictions = 0
        self._capture = capture
        self._shared = shared
        self._size = -(-max_graphs // GENERATIONS)
        self._moment = 0

    def pools(self, missing: Mapping[GraphRunner, Sequence[object]]) -> int:
        """In how many pools the graphs will be, with these."""
        captured = sum(len(generation.graphs) for generation in self._capture.generations)
        graphs = captured + sum(map(len, missing.values()))
        return -(-min(graphs, self.max_graphs) // self._size) or 1

    def to_warm_up(self) -> list[BucketGraph]:
        """What has to be seen before anything is captured, as one bucket can't tell what others do.

        All buckets of a runner whose outputs are to be inferred; and the PIECEWISE ones, whose breaks' tensors are.
        """
        return [
            runner.entry_of(mode, bucket)
            for runner in self._capture.runners
            for mode, bucket in runner.dispatcher.graphs
            if not runner.dispatcher.is_captured(mode, bucket)
            and (not runner.options.outputs or mode is PIECEWISE)
        ]

    def arm(self, entries: Sequence[BucketGraph], bar: Progress) -> None:
        """Warm these up, capture none, and let all graphs be dispatched to.

        Raises:
            Exception: the first failure, at the end, if failures are to be raised. What failed is not dispatched to.
        """
        capture = self._capture
        failures: list[Exception] = []
        with capture.settling():
            ready = list(entries)
            if entries:
                capture.quiet(entries)
                session = capture.session()
                with session:
                    ready = [
                        entry
                        for entry in entries
                        if capture.attempt(entry, lambda e: e.warm_up(session), bar, failures)
                        is None
                    ]
                    ready = capture.settle_outputs(ready, failures)
                    session.flush()
            refused = set(entries) - set(ready)
            for runner in capture.runners:
                for mode, bucket in runner.dispatcher.graphs:
                    if runner.entry(mode, bucket) not in refused:
                        runner.dispatcher.mark_captured(mode, bucket)
        raise_first(failures)

    def __call__(self, entry: BucketGraph) -> bool:
        """Capture one graph during a run, which holds the group's lock; whether it is there now.

        What buffers hold is as it was: somebody may have written them for this run. If it fails, the bucket isn't
        dispatched to until the group's next `capture`.

        Raises:
            StateError: the current stream is capturing.
            Exception: the failure, if failures are to be raised.
        """
        capture, backend = self._capture, self._capture.backend
        if backend.is_capturing():
            raise StateError(
                f"{entry.where} is captured at its first use, and can't be while the current stream is capturing: run "
                "such a batch once before"
            )
        if backend.stream_key() != self._shared.last_stream:
            self._shared.order_on_stream()
        runner = capture.runner_of(entry)
        failures: list[Exception] = []
        failure: Exception | None = None
        began = time.perf_counter()
        generation = self._make_room()
        bar = Progress(0, "")
        session = capture.session()
        try:
            with (
                capture.noting_warnings(),
                runner.kept_buffers(entry.bucket.sizes),
                session,
            ):
                failure = capture.attempt(entry, lambda e: e.warm_up(session), bar, failures)
                if failure is None and any(p not in runner.results.outputs for p in entry.samples):
                    # Some are declared and others aren't, which one bucket can't tell the shapes of.
                    self._warm_up_others(entry, session)
                if failure is None and not capture.settle_outputs([entry], failures):
                    failure = StateError("its outputs can't be settled")
                if failure is None:
                    # In a capture the allocator can't take back what it has cached.
                    session.flush()
                    capture.capture_all(session, [entry], bar, failures)
        finally:
            self._shared.last_stream = backend.stream_key()
            self.seconds += time.perf_counter() - began
        if entry.is_captured:
            generation.note_capture(self._moment)
            self.captures += 1
            return True
        runner.drop_graph(entry, entry.failure or "it was not captured")
        raise_first(failures)
        return False

    def _warm_up_others(self, entry: BucketGraph, session: CaptureSession) -> None:
        """See what the runner's other buckets return; a failure is said when the bucket itself is used."""
        runner = self._capture.runner_of(entry)
        # Their examples fill more of the buffers than this bucket has.
        largest = {name: dim.maximum for name, dim in runner.dispatcher.dims.items()}
        with runner.kept_buffers(largest):
            for other in runner.entries:
                if not other.samples:
                    self._capture.attempt(other, lambda e: e.warm_up(session), Progress(0, ""), [])

    def _make_room(self) -> Generation:
        """Give up generations until one more graph may live; the generation that it goes to, the latest."""
        capture = self._capture
        self._moment += 1
        for generation in capture.generations:
            generation.note_use(self._moment)
        has_dropped = False
        while sum(len(g.graphs) for g in capture.generations) >= self.max_graphs:
            oldest = min((g for g in capture.generations if g.graphs), key=lambda g: g.last_used)
            self._evict(oldest)
            has_dropped = True
        if has_dropped:
            capture.backend.empty_cache()
        latest = capture.generations[-1] if capture.generations else None
        if latest is None or len(latest.graphs) >= self._size:
            latest = Generation(capture.backend.pool_of(None))
            capture.generations.append(latest)
        return latest

    def _evict(self, generation: Generation) -> None:
        capture = self._capture
        # A replay may be under way.
        capture.backend.synchronize(self._shared.last_stream)
        owners: dict[GraphRunner, None] = dict.fromkeys(
            capture.runner_of(entry) for entry in generation.entries
        )
        self.evictions += len(generation.graphs)
        generation.release()
        for runner in owners:
            runner.drop_plans()
        capture.generations.remove(generation)
