"""The pytest plugin: in suites that use it, and in those that don't."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphkit as gk
import graphkit_pytest
from graphkit.group.group import CHECKED_VARIABLE
from graphkit.testing import RunnerMachine
from graphkit_pytest import Exercise

ROOT = Path(gk.__file__).parent.parent
INSTALLED = bool(importlib.metadata.entry_points(group="pytest11", name="graphkit"))
"""Whether an entry point loads the plugin; a checkout that isn't installed has none."""

DEVICES = ["recording", "cuda"] if torch.cuda.is_available() else ["recording"]

SUITE = """
    import graphkit as gk
    import pytest
    import torch
    from graphkit.testing import RunnerMachine
    from hypothesis import settings

    ROWS = gk.Dim("rows", 8)
    GROUPS = []

    @pytest.fixture
    def runner(graph_group):
        graph_group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
        policy = gk.Policy.full(gk.Buckets.of(ROWS, 1, 4, 8))
        made = graph_group.runner("double", lambda x: x * 2, policy=policy)
        graph_group.capture(progress=False)
        return made

    def test_one(runner, graph_group, graph_device):
        assert graph_group.device.type == graph_device
        assert not graph_group.checked
        x = torch.ones(1, device=graph_device)
        assert runner.run(runner.dispatch(rows=1), x=x).tolist() == [2]

    def test_three_and_closed_early(runner, graph_group):
        runner.run(runner.dispatch(rows=3), x=[1., 2., 3.])
        graph_group.close()

    def test_fails(graph_group):
        GROUPS.append(graph_group)
        assert False

    @pytest.fixture(scope="module")
    def engine(graph_device, graph_exercise):
        group = gk.GraphGroup(graph_device)
        fast = group.wrap(
            lambda x: x + 1, name="plus", x=gk.BufferSpec((ROWS,), torch.float32, pad=0)
        )
        group.capture(progress=False)
        yield fast
        graph_exercise.note(group)
        group.close()

    def test_engine_of_ones_own(engine, graph_device):
        assert engine(x=torch.ones(2, device=graph_device)).tolist() == [2, 2]

    class Machine(RunnerMachine):
        def make_runner(self, group):
            group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
            policy = gk.Policy.full(gk.Buckets.of(ROWS, 2, 8))
            return group.runner("machine", lambda x: x * 1, policy=policy)

    def test_machine(graph_device, graph_exercise):
        few = settings(Machine.default_settings(), max_examples=3, database=None, derandomize=True)
        Machine.check(graph_device, settings=few, note=graph_exercise.note)

    @pytest.mark.parametrize("graph_device", ["cpu"], indirect=True)
    def test_chosen(graph_group):
        assert graph_group.device.type == "cpu"

    def test_closed():
        assert GROUPS and all(group.state is gk.State.CLOSED for group in GROUPS)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv(CHECKED_VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.plugins.extend([] if INSTALLED else [graphkit_pytest])
    pytester.makeini(
        "[pytest]\naddopts = --strict-markers --strict-config -p no:cacheprovider\nfilterwarnings = error\n"
    )
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """In a process of its own: modules of torch that a run in this one has imported can't be imported again."""
    plugin = [] if INSTALLED else ["-p", "graphkit_pytest"]
    command = [sys.executable, "-m", "pytest", *plugin, *arguments]
    return suite.run(*command, timeout=300)


def test_groups_on_every_backend_and_the_report(suite: pytest.Pytester) -> None:
    suite.makepyfile(SUITE)
    result = run(suite, "-v")
    result.assert_outcomes(passed=4 * len(DEVICES) + 2, failed=len(DEVICES))
    result.stdout.fnmatch_lines([f"*test_one*{name}* PASSED*" for name in DEVICES])
    result.stdout.fnmatch_lines(["*= graphkit: buckets exercised =*"])
    said = "\n".join(result.outlines)
    for name in DEVICES:
        assert f"{name}, runner double: 2 of 3 buckets; never FULL [rows=8]\n" in said
        assert f"{name}, runner plus: 1 of 4 buckets; never FULL [rows=1], FULL [rows=4]" in said
        assert f"{name}, runner machine: 2 of 2 buckets\n" in said


def test_checked_is_for_every_group_of_the_run(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import graphkit as gk

        def test_checked(graph_group):
            assert graph_group.checked
            assert gk.GraphGroup("cpu").checked
            assert not gk.GraphGroup("cpu", checked=False).checked
        """
    )
    run(suite, "--graphkit-checked").assert_outcomes(passed=len(DEVICES))


@pytest.mark.parametrize("before", [None, "0"])
def test_checked_ends_with_the_run(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    if before is not None:
        monkeypatch.setenv(CHECKED_VARIABLE, before)
    for arguments, during in ((["--graphkit-checked"], "1"), ([], before)):
        config = suite.parseconfig(*arguments)
        graphkit_pytest.pytest_configure(config)
        assert os.environ.get(graphkit_pytest.CHECKED_VARIABLE) == during
        graphkit_pytest.pytest_unconfigure(config)
        assert os.environ.get(CHECKED_VARIABLE) == before


def test_who_does_not_use_it_sees_nothing_and_imports_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        """
        import sys

        def test_unloaded():
            assert "graphkit_pytest" in sys.modules
            assert not {"torch", "graphkit", "numpy"} & set(sys.modules)
        """
    )
    result = run(suite, "--graphkit-checked")
    result.assert_outcomes(passed=1)
    assert "graphkit:" not in "\n".join(result.outlines)


@pytest.mark.skipif(not INSTALLED, reason="no entry point loads it: graphkit isn't installed here")
def test_it_can_be_left_out(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_one(graph_group): pass")
    result = run(suite, "-p", "no:graphkit")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'graph_group' not found*"])
    assert run(suite, "-p", "no:graphkit", "--graphkit-checked").ret == pytest.ExitCode.USAGE_ERROR


# -- workers ------------------------------------------------------------------------------------


def test_workers_send_what_they_counted(suite: pytest.Pytester) -> None:
    """As xdist does it: what a worker put in `workeroutput` reaches the process that reports."""
    worker = suite.parseconfig()
    reporter = suite.parseconfig()
    output: dict[str, Any] = {}
    graphkit_pytest.pytest_configure(worker)
    graphkit_pytest.pytest_configure(reporter)
    exercise = worker.stash[graphkit_pytest._exercise]
    exercise.add(
        [
            ("cuda", "decode", "step", "FULL [rows=2]", 3),
            ("cuda", "decode", "step", "FULL [rows=4]", 0),
        ]
    )
    worker.workeroutput = output  # type: ignore[attr-defined]
    session: Any = SimpleNamespace(config=worker)
    graphkit_pytest.pytest_sessionfinish(session)
    for _ in range(2):
        node = SimpleNamespace(workeroutput=output, config=reporter)
        graphkit_pytest.pytest_testnodedown(node, None)
    # One that crashed has nothing to say.
    graphkit_pytest.pytest_testnodedown(SimpleNamespace(config=reporter), "crashed")
    merged = reporter.stash[graphkit_pytest._exercise]
    assert merged.rows()[0] == ("cuda", "decode", "step", "FULL [rows=2]", 6)
    assert merged.lines() == ["cuda, runner decode: 1 of 2 buckets; never FULL [rows=4]"]


def test_under_xdist_the_report_is_the_same(suite: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist isn't installed")
    suite.makepyfile(SUITE)
    said = run(suite, "-n", "2", "-k", "one or three").stdout.str()
    assert "recording, runner double: 2 of 3 buckets; never FULL [rows=8]\n" in said


# -- what is counted ----------------------------------------------------------------------------


def test_a_bucket_counts_once_it_is_run_and_also_after_its_graph_is_gone() -> None:
    rows = gk.Dim("rows", 8)
    exercise = Exercise()
    with gk.GraphGroup("cpu") as group:
        group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
        runner = group.runner(
            "r", lambda x: x * 1, policy=gk.Policy.full(gk.Buckets.of(rows, 2, 4, 8))
        )
        group.capture(progress=False)
        runner.run(runner.dispatch(rows=2), x=[1.0, 2.0])
        group.release()
        group.capture(progress=False)
        runner.run(runner.dispatch(rows=7), x=[0.0] * 7)
    exercise.note(group)
    (line,) = exercise.lines()
    assert line == "recording, runner r: 2 of 3 buckets; never FULL [rows=4]"
    assert [row[4] for row in exercise.rows()] == [1, 0, 1]


def test_runners_of_one_name_are_told_apart_by_what_they_run() -> None:
    exercise = Exercise()
    exercise.add(
        [
            ("recording", "r", "one", "FULL [rows=2]", 1),
            ("recording", "r", "two", "FULL [rows=2]", 0),
        ]
    )
    exercise.add([("recording", "r", "two", f"FULL [rows={size}]", 0) for size in range(3, 13)])
    assert exercise.lines() == [
        "recording, runner r (one): 1 of 1 buckets",
        "recording, runner r (two): 0 of 11 buckets; never "
        + ", ".join(f"FULL [rows={size}]" for size in range(2, 10))
        + " and 3 more",
    ]


# -- without hypothesis -------------------------------------------------------------------------


STATEMENTS = {
    "from graphkit.testing import strategies": "strategies",
    "from graphkit.testing import RunnerMachine": "RunnerMachine",
    "import graphkit.testing.strategies.batches": "strategies",
    "import graphkit.testing.machine": "RunnerMachine",
    "import graphkit.testing as testing; testing.strategies": "strategies",
}


def test_without_hypothesis_it_says_what_to_install() -> None:
    tries = "".join(
        f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)\n"
        for statement in STATEMENTS
    )
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import graphkit, graphkit.testing\n"
        "print([name for name in sys.modules if name.startswith('hypothesis.')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + tries],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
    )  # fmt: skip
    loaded, *said = done.stdout.splitlines()
    assert loaded == "[]"
    for line, (statement, what) in zip(said, STATEMENTS.items(), strict=True):
        assert line.startswith(f"graphkit.testing.{what} needs hypothesis"), statement
        assert "`pip install graphkit-cuda[test]`" in line


def test_nothing_of_graphkit_imports_testing() -> None:
    package = Path(gk.__file__).parent
    files = [path for path in package.rglob("*.py") if "testing" not in path.parts]
    imports = re.compile(r"^\s*(from|import) graphkit\.testing", re.MULTILINE)
    assert not [path for path in files if imports.search(path.read_text(encoding="utf-8"))]


def test_what_testing_has_is_what_it_says() -> None:
    import graphkit.testing as testing

    assert sorted(testing.__all__) == list(testing.__all__)
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    assert testing.RunnerMachine is RunnerMachine
    with pytest.raises(
        AttributeError, match=r"module 'graphkit.testing' has no attribute 'nothing'"
    ):
        _ = testing.nothing
