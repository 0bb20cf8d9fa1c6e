"""graphkit's pytest plugin: groups on every backend that is there, and which buckets the tests have exercised.

It stands beside the package, and imports neither graphkit nor torch before a test asks for a fixture: pytest loads
it at start-up wherever graphkit is installed, also for suites that have nothing to do with it, and before coverage is
measured. `-p no:graphkit` leaves it out.

Fixtures:
    graph_device: "cpu" (the recording backend), and "cuda" where there is a device; the test runs once for each.
    graph_group: a `GraphGroup` on that device, closed and noted after the test.
    graph_exercise: of the session; `graph_exercise.note(group)` adds a group that the test made itself.

Options:
    --graphkit-checked: groups are checked unless they say otherwise, as by GRAPHKIT_CHECKED=1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graphkit import GraphGroup

CHECKED_VARIABLE = "GRAPHKIT_CHECKED"
_SENT = "graphkit"
_SHOWN = 8
"""Buckets that the report names for each runner."""

Row = tuple[str, str, str, str, int]
"""Backend, runner, what tells runners of one name apart, mode and bucket, and how often it was run."""


class Exercise:
    """How often each bucket was dispatched to or replayed, over all groups that were noted.

    Runners are one where backend, name and function are the same, whichever group they are of: a suite makes them anew
    for each test.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str, str, str], int] = {}

    def note(self, group: GraphGroup) -> None:
        """Add what a group has run so far. Once for each group: at the end of its life, closed or not."""
        for runner in group.runners:
            function = getattr(runner.fn, "__qualname__", type(runner.fn).__qualname__)
            dispatched = {(c.mode, c.bucket): c.dispatches for c in runner.dispatcher.counts}
            for mode, bucket in runner.dispatcher.graphs:
                entry = runner.entry(mode, bucket)
                # Graphs that were dropped took their count along; dispatches are counted for good.
                runs = max(entry.replays if entry else 0, dispatched.get((mode, bucket), 0))
                graph = f"{mode} [{bucket}]"
                self.add([(group.backend.name, runner.name, function, graph, runs)])

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of another process's `rows`."""
        for backend, runner, function, graph, runs in rows:
            key = (backend, runner, function, graph)
            self._runs[key] = self._runs.get(key, 0) + runs

    def rows(self) -> list[Row]:
        """Plain data, to be sent to another process."""
        return [(*key, runs) for key, runs in self._runs.items()]

    def lines(self) -> list[str]:
        """A line for each runner: how many of its buckets were exercised, and which never."""
        runners: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
        for (backend, runner, function, graph), runs in self._runs.items():
            runners.setdefault((backend, runner, function), []).append((graph, runs))
        names = [(backend, runner) for backend, runner, _ in runners]
        lines = []
        for (backend, runner, function), graphs in runners.items():
            # Two runners of one name are told apart by what they run.
            name = runner if names.count((backend, runner)) == 1 else f"{runner} ({function})"
            never = [graph for graph, runs in graphs if not runs]
            line = f"{backend}, runner {name}: {len(graphs) - len(never)} of {len(graphs)} buckets"
            if never:
                more = f" and {len(never) - _SHOWN} more" if len(never) > _SHOWN else ""
                line += f"; never {', '.join(never[:_SHOWN])}{more}"
            lines.append(line)
        return lines


_exercise = pytest.StashKey[Exercise]()
_environment = pytest.StashKey[str | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.getgroup("graphkit").addoption(
        "--graphkit-checked",
        action="store_true",
        help="make graph groups checked unless they say otherwise: each run verifies what is otherwise trusted",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count, and set what groups look at when they are made."""
    config.stash[_exercise] = Exercise()
    if config.getoption("graphkit_checked"):
        config.stash[_environment] = os.environ.get(CHECKED_VARIABLE)
        os.environ[CHECKED_VARIABLE] = "1"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave the environment as it was."""
    if _environment in config.stash:
        before = config.stash[_environment]
        if before is None:
            os.environ.pop(CHECKED_VARIABLE, None)
        else:
            os.environ[CHECKED_VARIABLE] = before


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for a device once on each that is there."""
    if "graph_device" not in metafunc.fixturenames:
        return
    marks = metafunc.definition.iter_markers("parametrize")
    if any("graph_device" in _names(mark) for mark in marks):
        return
    import torch

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    ids = ["recording", "cuda"][: len(devices)]
    metafunc.parametrize("graph_device", devices, ids=ids, indirect=True, scope="session")


def _names(mark: pytest.Mark) -> list[str]:
    """The arguments that a parametrize mark gives."""
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


@pytest.fixture(scope="session")
def graph_device(request: pytest.FixtureRequest) -> str:
    """Each device that graphs can be captured on here: "cpu" (the recording backend) and "cuda"."""
    return str(request.param)


@pytest.fixture
def graph_group(graph_device: str, graph_exercise: Exercise) -> Iterator[GraphGroup]:
    """A `GraphGroup` on each backend that is there; closed after the test."""
    from graphkit import GraphGroup

    group = GraphGroup(graph_device)
    try:
        yield group
    finally:
        graph_exercise.note(group)
        group.close()


@pytest.fixture(scope="session")
def graph_exercise(request: pytest.FixtureRequest) -> Exercise:
    """What the report at the end is made of: ``graph_exercise.note(group)`` adds a group of your own."""
    return request.config.stash[_exercise]


# -- the report ---------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of xdist: send what was counted to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        # What travels there are plain values.
        rows = session.config.stash[_exercise].rows()
        output[_SENT] = [list(row) for row in rows]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Of xdist: a worker is done."""
    rows = getattr(node, "workeroutput", {}).get(_SENT, [])
    node.config.stash[_exercise].add(rows)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which buckets were exercised, where a test had any."""
    lines = config.stash[_exercise].lines()
    if lines:
        terminalreporter.section("graphkit: buckets exercised")
        for line in lines:
            terminalreporter.line(line)
