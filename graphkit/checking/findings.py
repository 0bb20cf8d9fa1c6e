"""Findings: what a check of one bucket saw, and its report."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs

from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.policy import Mode
from graphkit.outputs.inference import sizes_text


class FindingKind(enum.Enum):
    """What a finding is about. The value says it in words."""

    PADDED = "the graph computes something else than the function does on the same buffers"
    REAL = "the graph's result isn't that of the function on the batch alone"
    PADS = "real rows depend on what a buffer holds beyond the batch"
    HISTORY = "the result depends on what ran before"
    UNDECLARED = "the function writes memory that isn't declared"
    RANDOM = "the function draws random numbers, which a check can compare only in part"
    NONDETERMINISTIC = "two eager calls on the same contents differ"
    SKIPPED = "a part of the check was left out"

    @property
    def is_failure(self) -> bool:
        """Whether a finding of this kind fails the check; others are said, and fail nothing."""
        return self in _FAILURES

    def __repr__(self) -> str:
        return f"FindingKind.{self.name}"


_FAILURES = frozenset(
    {
        FindingKind.PADDED,
        FindingKind.REAL,
        FindingKind.PADS,
        FindingKind.HISTORY,
        FindingKind.UNDECLARED,
    }
)


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a check found.

    Attributes:
        kind: see `FindingKind`.
        what: whose fault it is, or where it shows: ``buffer 'n'``, ``output 'logits'``, ``mutates[0]``.
        rows: the rows that differ, along the first axis of what differs.
        message: all of it in a sentence, with what to do.
    """

    kind: FindingKind
    what: str
    rows: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.message}"


@attrs.frozen(kw_only=True)
class Comparison:
    """How a graph's results compare with those of an eager call.

    Attributes:
        agrees: bit-equal at the padded size; close, as the tolerances say, at the real size.
        largest: the largest difference of any two elements, within tolerance or not.
        worst: what it is seen in; empty where nothing differs at all.
    """

    agrees: bool
    largest: float
    worst: str = ""

    def __str__(self) -> str:
        if self.largest == 0.0 and self.agrees:
            return "equal"
        return (
            f"{'close' if self.agrees else 'different'}, by up to {self.largest:g} in {self.worst}"
        )


@attrs.frozen(kw_only=True)
class CheckReport:
    """What `GraphRunner.check` found of one bucket, for one batch; `str` gives it in lines.

    Attributes:
        runner: its name.
        mode: of the graph.
        bucket: the padded shape.
        sizes: the batch's.
        padded: the graph against the function on the same padded buffers, bit by bit.
        real: the graph against the function on the batch alone, within tolerances; None where that
            can't be judged, as a RANDOM finding says.
        findings: failures, and what else is worth knowing.
    """

    runner: str
    mode: Mode
    bucket: Bucket
    sizes: Mapping[str, int]
    padded: Comparison
    real: Comparison | None
    findings: tuple[Finding, ...]

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that fail the check."""
        return tuple(finding for finding in self.findings if finding.kind.is_failure)

    @property
    def passed(self) -> bool:
        """Whether there is no failure."""
        return not self.failures

    def __str__(self) -> str:
        lines = [
            (
                f"runner {self.runner!r}, {self.mode} bucket [{self.bucket}], batch [{sizes_text(self.sizes)}]: "
                f"{'passed' if self.passed else 'failed'}"
            ),
            f"  against eager at the padded size: {self.padded}",
            f"  against eager at the real size: {self.real or 'not judged'}",
        ]
        lines.extend(f"  {finding}" for finding in (*self.failures, *self._notes))
        return "\n".join(lines)

    @property
    def _notes(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.kind.is_failure)
