"""Capturing a group: one session that warms up and captures the graphs of all runners that are missing."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphkit.backends.base import ErrorMode
from graphkit.buffers import Buffers
from graphkit.capture.session import CaptureSession, Progress, forget_frames
from graphkit.collected import collected_warnings
from graphkit.dispatch.dispatcher import Reason
from graphkit.errors import MemoryBudgetError, SpecError, user_frame
from graphkit.group.budget import Worth, applicant_of, capture_within
from graphkit.group.generation import Generation
from graphkit.group.memory import MemoryUse, bytes_text, out_of_memory
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import Shared, State

logger = logging.getLogger("graphkit")


def raise_first(failures: Sequence[Exception]) -> None:
    """Raise the first of the failures, if there are any."""
    if not failures:
        return
    if len(failures) > 1:
        failures[0].add_note(f"graphkit: and {len(failures) - 1} more failures; report() has them")
    raise failures[0]


def capture_order(entry: BucketGraph) -> tuple[int, int]:
    """Sort key: PIECEWISE before FULL, the largest first, whose memory the smaller ones use again."""
    return (-entry.mode.rank, -math.prod(max(size, 1) for size in entry.bucket.sizes.values()))


class GroupCapture:
    """How the graphs of a group are captured: stream and pools, and what a failure does.

    Args:
        shared: of the group.
        runners: the group's, by name; the group adds to it.
        buffers: the group's; the group adds to it.
        on_error: "raise" or "skip".
        stream: to capture on; by default one is made at the first capture.
        pool: to capture into; by default pools are made as they are needed.
        capture_context: entered once in each session.
        error_mode: CUDA's.

    Attributes:
        budget: bytes that the group may take on the device; None for no bound.
        messages: what captures had to say.
        generations: what was captured together, the latest last.
    """

    def __init__(
        self,
        shared: Shared,
        runners: Mapping[str, GraphRunner],
        buffers: Sequence[Buffers],
        *,
        on_error: str,
        stream: Any,
        pool: Any,
        capture_context: Callable[[], AbstractContextManager[Any]] | None,
        error_mode: ErrorMode,
    ) -> None:
        self.budget: int | None = None
        self.messages: list[str] = []
        self._shared = shared
        self.backend = shared.backend
        self._runners = runners
        self._buffers = buffers
        self._on_error = on_error
        self._stream = stream
        self._pool = pool
        self._capture_context = capture_context
        self._error_mode = error_mode
        self.generations: list[Generation] = []

    # -- memory -----------------------------------------------------------------------------------

    def use(self) -> MemoryUse:
        """What the group takes: static memory by its declarations, and what captures have really taken."""
        return MemoryUse(
            buffers=sum(buffers.nbytes for buffers in self._buffers),
            staging=sum(max(r.staging.span_nbytes, 1) for r in self._runners.values()),
            outputs=sum(runner.results.nbytes_of("static") for runner in self._runners.values()),
            pool=sum(self.backend.pool_bytes(g.pool) for g in self.generations),
            driver=sum(generation.driver for generation in self.generations),
        )

    def refuse_given_pool(self, what: str) -> None:
        """Raise a `SpecError` if the pool is the caller's, and `what` needs pools that can be given back."""
        if self._pool is not None:
            raise SpecError(
                f"{what} needs pools of its own, which give their memory back; leave out pool="
            )

    def check_static(self) -> None:
        """Raise a `MemoryBudgetError` if what is taken whatever is captured is above the budget."""
        if self.budget is None:
            return
        use = self.use()
        if use.static > self.budget:
            raise MemoryBudgetError(
                f"static memory takes {bytes_text(use.static)} (buffers {bytes_text(use.buffers)}, staging "
                f"{bytes_text(use.staging)}, outputs {bytes_text(use.outputs)}), and memory_budget is "
                f"{bytes_text(self.budget)}, before any graph: raise it, lower the dims' maxima, or adopt= memory "
                f"that there is anyway",
                wanted=use.static,
                free=self.budget,
            )

    def measure(
        self, entries: Sequence[BucketGraph], *, keeps_buffers: bool = False
    ) -> dict[BucketGraph, int]:
        """Warm these up, and say what each has worked in, in bytes.

        Args:
            entries: of buckets that aren't captured.
            keeps_buffers: leave what buffers hold as it was.

        Raises:
            Exception: the first failure, if failures are to be raised; otherwise the bucket is left out.
        """
        failures: list[Exception] = []
        self.quiet(entries)
        session = self.session()
        session.measures = True
        measured: dict[BucketGraph, int] = {}
        try:
            with session:
                for entry in entries:
                    bar = Progress(0, "")
                    kept: AbstractContextManager[None] = contextlib.nullcontext()
                    if keeps_buffers:
                        kept = self.runner_of(entry).kept_buffers(entry.bucket.sizes)
                    with kept:
                        failure = self.attempt(entry, lambda e: e.warm_up(session), bar, failures)
                    if failure is None:
                        measured[entry] = session.peak.nbytes
                session.flush()
        finally:
            self._shared.last_stream = self.backend.stream_key()
        raise_first(failures)
        return measured

    def forget_memory(self) -> None:
        """All graphs are gone, and their memory goes too."""
        self.generations.clear()
        self._pool = None

    def forget_graphs(self) -> None:
        """All graphs are gone; a pool stays, for those that come next."""
        for generation in self.generations:
            generation.release()
        del self.generations[1:]

    # -- capture ----------------------------------------------------------------------------------

    def capture(
        self, missing: Sequence[BucketGraph], bar: Progress, worth: Worth | None = None
    ) -> None:
        """Warm up and capture, in this order.

        Args:
            worth: of a graph, where there is a budget.

        Raises:
            Exception: the first failure, at the end, if failures are to be raised.
        """
        failures: list[Exception] = []
        self.quiet(missing)
        for entry in missing:
            self.note_missing(entry, Reason.NOT_CAPTURED)
        if self.budget is not None:
            # The others' memory goes back to the device when the session flushes.
            self.generations = [g for g in self.generations if g.graphs]
        session = self.session()
        session.measures = self.budget is not None
        needs: dict[BucketGraph, int] = {}
        with self.settling(), session:
            warmed = []
            for entry in missing:
                if self.attempt(entry, lambda e: e.warm_up(session), bar, failures) is None:
                    warmed.append(entry)
                    needs[entry] = session.peak.nbytes
            warmed = self.settle_outputs(warmed, failures)
            self.check_static()
            session.flush()
            if self.budget is None:
                self.capture_all(session, warmed, bar, failures)
            else:
                applicants = [applicant_of(entry, needs[entry], worth) for entry in warmed]
                capture_within(self, session, self.budget, applicants, bar, failures)
        raise_first(failures)

    @contextlib.contextmanager
    def noting_warnings(self) -> Iterator[None]:
        """Keep what is warned of for the report, and warn of it at the end."""
        has_failed = True
        try:
            with collected_warnings() as caught:
                yield
            has_failed = False
        finally:
            self.messages.extend(
                str(w.message) for w in caught if w.category.__module__.startswith("graphkit")
            )
            # Where warnings are errors, one must not take the place of the failure.
            with contextlib.suppress(*([Warning] if has_failed else [])):
                for w in caught:
                    warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)

    def set_state(self, state: State) -> None:
        """Say what the group can do."""
        self._shared.state = state
        reason = {State.SUSPENDED: Reason.SUSPENDED, State.STALE: Reason.STALE}.get(state)
        for runner in self._runners.values():
            runner.dispatcher.set_reason(reason)

    def quiet(self, entries: Sequence[BucketGraph]) -> None:
        """Examples will be written to the runners' buffers, and their outputs."""
        for runner in dict.fromkeys(entry.runner for entry in entries):
            runner.end_leases(replay=True)
            self._runners[runner.name].drop_stage()

    def session(self) -> CaptureSession:
        """A session into the latest generation's pool; there is one afterwards."""
        runners = self._runners.values()
        generators = list(dict.fromkeys(g for r in runners for g in r.options.generators))
        if self._stream is None:
            self._stream = self.backend.new_stream()
        if not self.generations:
            self.generations.append(Generation(self.backend.pool_of(self._pool)))
        return CaptureSession(
            self.backend,
            stream=self._stream,
            pool=self.generations[-1].pool,
            capture_context=self._capture_context,
            error_mode=self._error_mode,
            generators=generators,
        )

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Afterwards, also where the session itself fails, say what the group can do: captured buckets serve."""
        try:
            yield
        finally:
            # The caller's stream is ordered after the session; a run on another one has to wait for it.
            self._shared.last_stream = self.backend.stream_key()
            for runner in self._runners.values():
                # A first run that mustn't wait finds no example in flight.
                runner.staging.settle()
            captured = any(runner.dispatcher.captured for runner in self._runners.values())
            self.set_state(State.CAPTURED if captured else State.NEW)

    def settle_outputs(
        self, warmed: Sequence[BucketGraph], failures: list[Exception]
    ) -> list[BucketGraph]:
        """Settle what each runner returns; the buckets of those where that can be done."""
        kept = list(warmed)
        for runner in self._runners.values():
            if all(entry.runner is not runner for entry in kept):
                continue
            try:
                runner.settle_outputs()
            except SpecError as error:
                for entry in kept:
                    if entry.runner is runner:
                        entry.failure = f"{type(error).__name__}: {error}"
                kept = [entry for entry in kept if entry.runner is not runner]
                if self._on_error == "raise":
                    failures.append(error)
                else:
                    self.messages.append(f"runner {runner.name!r} was skipped: {error}")
        return kept

    def capture_all(
        self,
        session: CaptureSession,
        entries: Sequence[BucketGraph],
        bar: Progress,
        failures: list[Exception],
    ) -> None:
        """Capture these into the session's pool, the latest generation's."""
        generation = self.generations[-1]
        with self._counting(generation):
            for entry in entries:
                error = self.attempt(entry, lambda e: e.capture(session), bar, failures)
                if error is None:
                    self.place(entry, generation)
                    self.mark_captured(entry)
                elif isinstance(error, MemoryError) and not generation.graphs:
                    # What it had got so far would stay in the pool; the smaller ones do with less.
                    self.renew(session, generation)

    @contextlib.contextmanager
    def _counting(self, generation: Generation) -> Iterator[None]:
        """Count what the driver takes in the block as the generation's share."""
        before = self.backend.memory_outside()
        try:
            yield
        finally:
            generation.driver += max(self.backend.memory_outside() - before, 0)

    def renew(self, session: CaptureSession, generation: Generation) -> None:
        """Drop the graphs of the generation, and give its memory back to the device."""
        self.backend.synchronize()
        generation.release()
        if self._pool is None:
            generation.pool = session.pool = self.backend.pool_of(None)
        self.backend.empty_cache()

    def place(self, entry: BucketGraph, generation: Generation) -> None:
        """A graph was captured into the generation's pool, whichever its last one was in."""
        for other in self.generations:
            other.discard(entry)
        generation.entries.append(entry)

    @property
    def runners(self) -> Sequence[GraphRunner]:
        """All runners of the group."""
        return tuple(self._runners.values())

    def runner_of(self, entry: BucketGraph) -> GraphRunner:
        """The runner of this bucket."""
        return self._runners[entry.runner.name]

    def mark_captured(self, entry: BucketGraph) -> None:
        """A graph is there: dispatch to it."""
        self._runners[entry.runner.name].mark_captured(entry)

    def note_missing(self, entry: BucketGraph, reason: Reason) -> None:
        """Say why a graph isn't there."""
        self._runners[entry.runner.name].dispatcher.note_missing(entry.mode, entry.bucket, reason)

    def attempt(
        self,
        entry: BucketGraph,
        work: Callable[[BucketGraph], None],
        bar: Progress,
        failures: list[Exception],
    ) -> Exception | None:
        """Do one bucket's work. A failure, which is returned, leaves the other buckets to go on."""
        try:
            work(entry)
        except Exception as error:
            entry.release()
            frame = user_frame(error) or (error.__cause__ and user_frame(error.__cause__))
            at = f" at {frame}" if frame else ""
            # The traceback's frames hold tensors, and so the failed bucket's memory.
            forget_frames(error)
            failure: Exception = error
            if isinstance(error, (torch.OutOfMemoryError, MemoryBudgetError)):
                failure = out_of_memory(error, entry.where, self.backend.memory_free())
            entry.failure = f"{type(failure).__name__}: {failure}{at}"
            if self._on_error == "raise":
                failure.add_note(f"graphkit: in {entry.where}{at}")
                failures.append(failure)
            else:
                logger.warning("%s was skipped: %s", entry.where, entry.failure)
            return failure
        except BaseException:
            # An interrupt: half a capture would be taken for a whole one.
            entry.release()
            raise
        finally:
            bar.step(f"{entry.runner.name} {entry.mode} {entry.bucket}")
        return None
