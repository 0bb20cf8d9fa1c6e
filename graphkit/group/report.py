"""Reports: what was captured, what ran, how much was padding, and what fell back and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from graphkit.dispatch.dispatcher import Mode, Tally
from graphkit.group.memory import MemoryUse, bytes_text


@attrs.frozen
class GraphRow:
    """One graph of a runner."""

    mode: Mode
    bucket: str
    captured: bool
    replays: int
    nodes: int
    failure: str | None


@attrs.frozen
class RunnerReport:
    """One runner: its graphs, its dispatches, and its eager runs."""

    name: str
    graphs: tuple[GraphRow, ...]
    counts: tuple[Tally, ...]
    eager_runs: int
    output_bytes: int

    @property
    def never_replayed(self) -> tuple[GraphRow, ...]:
        """Graphs that were captured and never ran."""
        return tuple(row for row in self.graphs if row.captured and not row.replays)


@attrs.frozen
class Report:
    """A group at one moment; `str` gives the tables.

    Attributes:
        state: of the group.
        buffer_bytes: static buffers at their maxima, adopted memory aside.
        host_bytes: pinned host memory.
        reserved_bytes: what the device's allocator holds in all; 0 on the CPU.
        messages: what captures had to say.
        memory: what the group takes on the device.
        memory_budget: what it may take, in bytes; None for no bound.
        max_graphs: how many graphs may live at a time, where they are captured at first use; None elsewhere.
        evictions: how many graphs were given up for others there.
    """

    state: str
    device: str
    runners: tuple[RunnerReport, ...]
    buffer_bytes: int
    host_bytes: int
    reserved_bytes: int
    capture_seconds: float
    messages: tuple[str, ...] = ()
    memory: MemoryUse | None = None
    memory_budget: int | None = None
    max_graphs: int | None = None
    evictions: int = 0

    def __str__(self) -> str:
        outputs = sum(runner.output_bytes for runner in self.runners)
        lines = [
            f"graph group on {self.device}: {self.state}, captured in {self.capture_seconds:.2f} s",
            (
                f"buffers {bytes_text(self.buffer_bytes)}, outputs {bytes_text(outputs)}, "
                f"pinned {bytes_text(self.host_bytes)}"
            ),
        ]
        if self.memory is not None:
            lines.append(
                f"staging {bytes_text(self.memory.staging)}, pools {bytes_text(self.memory.pool)}, "
                f"driver {bytes_text(self.memory.driver)}, on the device in all {bytes_text(self.memory.total)}"
            )
        if self.memory_budget is not None:
            lines[-1] += f" of a memory_budget of {bytes_text(self.memory_budget)}"
        if self.max_graphs is not None:
            lines.append(
                f"captured at first use, at most {self.max_graphs} graphs at a time; {self.evictions} were given up "
                "for others"
            )
        for runner in self.runners:
            lines.append("")
            lines.extend(_runner_lines(runner))
        lines.extend(f"note: {message}" for message in self.messages)
        return "\n".join(lines)


def _runner_lines(runner: RunnerReport) -> list[str]:
    captured = sum(row.captured for row in runner.graphs)
    lines = [f"runner {runner.name}: {captured} of {len(runner.graphs)} graphs captured"]
    rows = [("mode", "bucket", "dispatches", "rows in all", "padding", "why not better")]
    for count in sorted(runner.counts, key=_by_mode_and_size):
        rows.append(
            (
                str(count.mode),
                str(count.bucket) if count.bucket is not None else "-",
                str(count.dispatches),
                _main_rows(count),
                _share(count),
                count.reason.name if count.reason is not None else "",
            )
        )
    if len(rows) > 1:
        lines.extend(f"  {line}" for line in table(rows))
    unused = runner.never_replayed
    # Right after a capture nothing has run, and that is no news.
    if unused and runner.counts:
        shown = "; ".join(f"{row.mode} {row.bucket}" for row in unused[:3])
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        lines.append(f"  captured and never replayed: {shown}{more}")
    for row in runner.graphs:
        if row.captured and row.nodes == 0:
            lines.append(f"  empty graph: {row.mode} {row.bucket}")
    failures: dict[str, list[str]] = {}
    for row in runner.graphs:
        if row.failure:
            failures.setdefault(row.failure, []).append(f"{row.mode} {row.bucket}")
    for failure, buckets in failures.items():
        more = f" and {len(buckets) - 3} more" if len(buckets) > 3 else ""
        lines.append(f"  not captured: {'; '.join(buckets[:3])}{more}: {failure}")
    return lines


def _by_mode_and_size(count: Tally) -> tuple[Any, ...]:
    sizes = tuple(count.bucket.sizes.values()) if count.bucket is not None else ()
    return (count.mode.rank, sizes, count.reason.name if count.reason is not None else "")


def _main_rows(count: Tally) -> str:
    return (
        " ".join(
            f"{name}={rows}"
            for name, rows in count.rows.items()
            if count.bucket is None or count.padding[name] or rows
        )
        or "-"
    )


def _share(count: Tally) -> str:
    parts = []
    for name, padding in count.padding.items():
        total = padding + count.rows[name]
        if padding and total:
            parts.append(f"{name} {padding / total:.0%}")
    return ", ".join(parts) or "none"


def table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Rows of text in aligned columns, the first row being the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for index, row in enumerate(rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if index == 0:
            yield "  ".join("-" * width for width in widths)
