"""What a group's report says of each runner."""

from __future__ import annotations

from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Mode
from graphkit.group.report import GraphRow, RunnerReport
from graphkit.runner.runner import GraphRunner


def runner_report(runner: GraphRunner) -> RunnerReport:
    """A runner's graphs, dispatches and eager runs; nothing is allocated."""
    return RunnerReport(
        name=runner.name,
        graphs=tuple(_graph_row(runner, mode, bucket) for mode, bucket in runner.dispatcher.graphs),
        counts=runner.dispatcher.counts,
        eager_runs=runner.eager_runs,
        output_bytes=runner.results.nbytes,
    )


def _graph_row(runner: GraphRunner, mode: Mode, bucket: Bucket) -> GraphRow:
    entry = runner.entry(mode, bucket)
    if entry is None:
        return GraphRow(mode, str(bucket), captured=False, replays=0, nodes=0, failure=None)
    return GraphRow(
        mode, str(bucket), entry.is_captured, entry.replays, entry.num_nodes, entry.failure
    )
