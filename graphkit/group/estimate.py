"""Estimates: what a group will take, before anything of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs

from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Mode, Reason
from graphkit.group.memory import bytes_text
from graphkit.group.report import table
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.runner import GraphRunner

Graphs = Sequence[tuple[Mode, Bucket]]
"""Graphs of a runner by mode and bucket."""


@attrs.frozen(kw_only=True)
class RunnerEstimate:
    """What one runner will take, in bytes.

    Attributes:
        graphs: how many its policy has.
        staging: the span on the device that host inputs arrive in.
        outputs: static outputs on the device, as far as they are declared or were seen.
        declares: whether any are declared or inferred.
        host: pinned memory: the ring of staged inputs, and outputs that go to the host.
        work: what its largest bucket works in; None where that was not measured.
        kept: outputs that stay in the pool, of all buckets together.
        has_outputs: whether all outputs are known: a lone one is declared, or the function was seen to return
            no others.
    """

    name: str
    graphs: int
    staging: int
    outputs: int
    host: int
    work: int | None
    kept: int
    has_outputs: bool
    declares: bool = False


@attrs.frozen(kw_only=True)
class Estimate:
    """What a group will take, in bytes; `str` gives a table.

    Static memory is exact: it follows from the declarations. The rest depends on the functions, and is None where
    nobody has looked.

    Attributes:
        device: of the group.
        runners: each one's share.
        buffers: static buffers on the device, adopted memory aside.
        pool: what the graphs work in; the truth if all are captured, and what the largest of the other buckets were
            measured to need if not.
        driver: what the driver takes for graphs, known only when they are captured.
    """

    device: str
    runners: tuple[RunnerEstimate, ...]
    buffers: int
    pool: int | None
    driver: int | None

    @property
    def staging(self) -> int:
        """The spans on the device that host inputs arrive in."""
        return sum(runner.staging for runner in self.runners)

    @property
    def outputs(self) -> int:
        """Static outputs on the device."""
        return sum(runner.outputs for runner in self.runners)

    @property
    def host(self) -> int:
        """Pinned memory on the host."""
        return sum(runner.host for runner in self.runners)

    @property
    def static(self) -> int:
        """What is taken on the device whatever is captured."""
        return self.buffers + self.staging + self.outputs

    @property
    def total(self) -> int:
        """All that is known of the device's memory; what is unknown counts as nothing."""
        return self.static + (self.pool or 0) + (self.driver or 0)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What `total` leaves out, in words."""
        missing = [
            f"outputs of runner {r.name!r}{' that are not declared' if r.declares else ''}"
            for r in self.runners
            if not r.has_outputs
        ]
        if self.pool is None:
            missing.append("the graphs' pool")
        if self.driver is None:
            missing.append("the driver's memory")
        return tuple(missing)

    def __str__(self) -> str:
        rows = [("runner", "graphs", "staging", "outputs", "works in", "pinned")]
        rows += [
            (
                runner.name,
                str(runner.graphs),
                bytes_text(runner.staging),
                _outputs_text(runner),
                "?" if runner.work is None else bytes_text(runner.work),
                bytes_text(runner.host),
            )
            for runner in self.runners
        ]
        pool = "?" if self.pool is None else bytes_text(self.pool)
        driver = "?" if self.driver is None else bytes_text(self.driver)
        lines = [
            f"graph group on {self.device}: {bytes_text(self.total)} on the device, {bytes_text(self.host)} pinned",
            (
                f"buffers {bytes_text(self.buffers)}, staging {bytes_text(self.staging)}, outputs "
                f"{bytes_text(self.outputs)}, pool {pool}, driver {driver}"
            ),
            "",
            *(f"  {line}" for line in table(rows)),
        ]
        if self.unknown:
            lines.append(f"not counted: {', '.join(self.unknown)}")
        return "\n".join(lines)


def _outputs_text(runner: RunnerEstimate) -> str:
    known = bytes_text(runner.outputs)
    if runner.has_outputs:
        return known
    return f"{known} + ?" if runner.declares else "?"


def missing_graphs(runner: GraphRunner) -> Graphs:
    """Those that a capture would capture: they aren't there, and not for want of budget. Asking allocates nothing."""
    dispatcher, found = runner.dispatcher, []
    for mode, bucket in dispatcher.graphs:
        entry = runner.entry(mode, bucket)
        is_there = entry is not None and entry.is_captured
        if not is_there and dispatcher.missing_reason(mode, bucket) is not Reason.OVER_BUDGET:
            found.append((mode, bucket))
    return found


def largest_graphs(graphs: Graphs) -> Graphs:
    """Of each mode, the graph whose bucket has most rows."""
    largest: dict[Mode, tuple[int, Bucket]] = {}
    for mode, bucket in graphs:
        rows = math.prod(max(size, 1) for size in bucket.sizes.values())
        known = largest.get(mode)
        if known is None or known[0] < rows:
            largest[mode] = rows, bucket
    return [(mode, bucket) for mode, (_, bucket) in largest.items()]


def estimate_of(
    missing: Mapping[GraphRunner, Graphs],
    *,
    device: str,
    buffers: int,
    measured: Mapping[BucketGraph, int],
    pool: int,
    driver: int | None,
    pools: int,
) -> Estimate:
    """Put an estimate together; nothing is allocated.

    Args:
        missing: each runner's graphs that aren't captured.
        measured: bytes that a bucket was seen to work in.
        pool: what those that are captured have taken.
        driver: the truth; None if not all are captured.
        pools: that the graphs will be in.
    """
    shares = tuple(_runner_estimate(runner, measured) for runner in missing)
    needed = [
        runner.entry(mode, bucket)
        for runner, graphs in missing.items()
        for mode, bucket in largest_graphs(graphs)
    ]
    works = [measured[entry] for entry in needed if entry is not None and entry in measured]
    whole: int | None = None
    if len(works) == len(needed):
        # Graphs that never run at the same time work in the same memory, as those do that are captured already.
        kept, added = 0, 0
        for runner, graphs in missing.items():
            mine = sum(runner.results.pool_nbytes(bucket.sizes) for _, bucket in graphs)
            every = (bucket.sizes for _, bucket in runner.dispatcher.graphs)
            kept += sum(map(runner.results.pool_nbytes, every)) - mine
            added += mine
        whole = max(pool, pools * max(works, default=0) + kept) + added
    return Estimate(device=device, runners=shares, buffers=buffers, pool=whole, driver=driver)


def _runner_estimate(runner: GraphRunner, measured: Mapping[BucketGraph, int]) -> RunnerEstimate:
    mine = [entry for entry in measured if entry.runner is runner]
    results = runner.results
    seen: dict[str, int] = {}
    for entry in mine:
        for path, sample in entry.samples.items():
            if path not in results.outputs:
                seen[path] = max(seen.get(path, 0), sample.nbytes)
    graphs = runner.dispatcher.graphs
    buckets = [bucket.sizes for _, bucket in graphs]
    entries = [runner.entry(mode, bucket) for mode, bucket in graphs]
    paths = [entry.samples.keys() for entry in entries if entry is not None and entry.samples]
    # A lone output is all that a function returns.
    has_outputs = "" in results.outputs or not buckets or bool(mine)
    has_outputs = has_outputs or (bool(paths) and all(p <= results.outputs.keys() for p in paths))
    return RunnerEstimate(
        name=runner.name,
        graphs=len(buckets),
        staging=max(runner.staging.span_nbytes, 1),
        outputs=results.nbytes_of("static") + sum(seen.values()),
        host=runner.staging.host_nbytes + results.nbytes_of("host") * results.depth,
        work=max((measured[entry] for entry in mine), default=None if buckets else 0),
        kept=sum(results.pool_nbytes(sizes) for sizes in buckets),
        has_outputs=has_outputs,
        declares=bool(results.outputs),
    )
