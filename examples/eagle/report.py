"""What a run of the example has to say for itself: a table, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

import graphkit as gk

from .engine import StepRecord
from .scheduler import Request


@attrs.frozen(kw_only=True)
class Summary:
    """The figures of one run.

    Attributes:
        tokens: generated, in all requests together.
        steps: how many.
        accepted_length: tokens that a request gained in a step of verification, the bonus included;
            None without any.
        seconds: from the beginning to the last token.
        ttft: seconds to a request's first token, on average.
        tpot: seconds for each token after it, on average; None where no request has two.
    """

    tokens: int
    steps: int
    accepted_length: float | None
    seconds: float
    ttft: float
    tpot: float | None

    @property
    def tokens_per_second(self) -> float:
        """Over all requests."""
        return self.tokens / self.seconds


def summarize(records: Sequence[StepRecord], began: float) -> Summary:
    """The figures of a run.

    Args:
        records: its steps; at least one.
        began: when its requests arrived, on `time.perf_counter`'s clock.
    """
    times: dict[Request, list[tuple[float, int]]] = {}
    for record in records:
        for request, gained in record.gained.items():
            times.setdefault(request, []).append((record.ended, gained))
    tpots = [
        (seen[-1][0] - seen[0][0]) / sum(gained for _, gained in seen[1:])
        for seen in times.values()
        if len(seen) > 1
    ]
    lengths = [length for record in records for length in record.verified]
    return Summary(
        tokens=sum(sum(record.gained.values()) for record in records),
        steps=len(records),
        accepted_length=fmean(lengths) if lengths else None,
        seconds=records[-1].ended - began,
        ttft=fmean(seen[0][0] - began for seen in times.values()),
        tpot=fmean(tpots) if tpots else None,
    )


def figures_table(runs: Mapping[str, Summary]) -> str:
    """The figures of several runs, side by side."""
    rows: list[tuple[str, ...]] = [("", *runs)]
    summaries = list(runs.values())
    rows.append(("tokens", *(str(s.tokens) for s in summaries)))
    rows.append(("steps", *(str(s.steps) for s in summaries)))
    rows.append(
        (
            "accepted length",
            *("-" if s.accepted_length is None else f"{s.accepted_length:.2f}" for s in summaries),
        )
    )
    rows.append(("tokens per second", *(f"{s.tokens_per_second:.1f}" for s in summaries)))
    rows.append(("time to first token", *(_milliseconds(s.ttft) for s in summaries)))
    rows.append(("time per token", *(_milliseconds(s.tpot) for s in summaries)))
    return _aligned(rows)


def modes_table(report: gk.Report) -> str:
    """The share of each runner's steps by mode, and why they had no better one."""
    rows: list[tuple[str, ...]] = [("runner", "mode", "share of steps", "why not better")]
    for runner in report.runners:
        shares: dict[tuple[str, str], int] = {}
        for count in runner.counts:
            why = "" if count.reason is None else count.reason.name
            key = (str(count.mode), why)
            shares[key] = shares.get(key, 0) + count.dispatches
        total = sum(shares.values())
        for (mode, why), number in sorted(shares.items(), key=lambda item: -item[1]):
            rows.append((runner.name, mode, f"{number / total:.1%} ({number} of {total})", why))
    return _aligned(rows)


def plot(path: Path, records: Sequence[StepRecord]) -> None:
    """Draw accepted length and time of each step.

    Raises:
        ImportError: matplotlib isn't installed.
        OSError: the file can't be written.
        ValueError: its format isn't known.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = range(1, len(records) + 1)
    lengths = [(n, fmean(r.verified)) for n, r in zip(steps, records, strict=True) if r.verified]
    above.plot([n for n, _ in lengths], [mean for _, mean in lengths], ".-")
    above.set_ylabel("accepted length (tokens)")
    above.set_ylim(bottom=0)
    for uniform, label in ((True, "uniform"), (False, "with prompts")):
        chosen = [(n, r) for n, r in zip(steps, records, strict=True) if r.is_uniform == uniform]
        below.plot([n for n, _ in chosen], [1e3 * r.seconds for _, r in chosen], ".", label=label)
    below.set_ylabel("step time (ms)")
    below.set_xlabel("step")
    below.set_ylim(bottom=0)
    below.legend()
    figure.savefig(path)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f} ms"


def _aligned(rows: Sequence[Sequence[Any]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)
