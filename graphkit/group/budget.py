"""Capturing within a budget: the graphs that are worth most a byte, until it is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphkit.capture.session import CaptureSession, Progress
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Mode, Reason
from graphkit.errors import SpecError
from graphkit.group.admission import Admission, Applicant
from graphkit.group.generation import Generation
from graphkit.group.memory import bytes_text
from graphkit.runner.bucket_graph import BucketGraph

if TYPE_CHECKING:
    from graphkit.group.capture import GroupCapture

Worth = Callable[[Mode, Bucket], float]
"""How much a graph is worth, against the others."""


def applicant_of(entry: BucketGraph, need: int, worth: Worth | None) -> Applicant[BucketGraph]:
    """What one graph asks for."""
    value = 1.0 if worth is None else worth(entry.mode, entry.bucket)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise SpecError(
            f"worth= must return a number of at least 0, got {value!r} for {entry.where}"
        )
    kept = entry.runner.results.pool_nbytes(entry.bucket.sizes)
    return Applicant(entry, need, kept, float(value), entry.mode.rank)


def capture_within(
    capture: GroupCapture,
    session: CaptureSession,
    budget: int,
    applicants: Sequence[Applicant[BucketGraph]],
    bar: Progress,
    failures: list[Exception],
) -> None:
    """Capture those that are admitted. If the truth is above the budget, begin again with fewer.

    A pool gives nothing back while one of its graphs lives, and what is captured first, the largest, is what is
    worth least; so a pass that runs over is given up as a whole.
    """
    backend = capture.backend
    capture.generations = [g for g in capture.generations if g.graphs]
    use = capture.use()
    room = budget - use.static - use.pool - use.driver
    admission: Admission = Admission()
    chosen = admission.choose(applicants, room)
    started = backend.memory_outside()
    shown: set[BucketGraph] = set()
    failed: set[BucketGraph] = set()
    while chosen:
        generation = Generation(backend.pool_of(None))
        session.pool = generation.pool
        capture.generations.append(generation)
        taken = {applicant.item: applicant for applicant in chosen}
        fits, pool, reserved, first = True, 0, -1, 0
        begun = backend.memory_outside()
        try:
            # In the order of the capture, which is not that of their value.
            for entry in [a.item for a in applicants if a.item in taken]:
                progress = Progress(0, "") if entry in shown else bar
                error = capture.attempt(entry, lambda e: e.capture(session), progress, failures)
                shown.add(entry)
                if error is not None:
                    failed.add(entry)
                    continue
                capture.place(entry, generation)
                before, reserved = reserved, backend.memory_reserved()
                # To look at a pool costs milliseconds. An allocator that grows keeps count of it.
                if reserved != before or not reserved:
                    pool = backend.pool_bytes(generation.pool)
                # What the driver has kept of an earlier pass it uses again.
                outside, graphs = backend.memory_outside(), len(generation.entries)
                kept = min(outside - started, admission.driver(graphs))
                generation.driver = max(outside - begun, kept, 0)
                first = generation.driver if graphs == 1 else first
                fits = pool + generation.driver <= room
                if not fits:
                    captured = [taken[e] for e in generation.entries]
                    admission.learn(
                        captured, pool=pool, driver_first=first, driver=generation.driver
                    )
                    capture.renew(session, generation)
                    break
        finally:
            for entry in generation.graphs:
                capture.mark_captured(entry)
        if fits:
            break
        capture.generations.remove(generation)
        left = [a for a in chosen if a.item not in failed]
        # At least the one that is worth least goes, so that this comes to an end.
        chosen = admission.choose(left[:-1], room)
    admitted = {applicant.item for applicant in chosen}
    for entry in (applicant.item for applicant in applicants):
        if entry not in admitted and entry not in failed:
            entry.failure = f"it doesn't fit the memory_budget of {bytes_text(budget)}"
            capture.note_missing(entry, Reason.OVER_BUDGET)
        if entry not in shown:
            bar.step(f"{entry.runner.name} {entry.mode} {entry.bucket}")
    if not capture.generations:
        # The next session has a pool to begin with.
        capture.generations.append(Generation(backend.pool_of(None)))
