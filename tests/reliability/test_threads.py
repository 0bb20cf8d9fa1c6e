"""Threads: one group serves one of them at a time, and says so; groups of their own don't disturb each other."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphkit as gk
from graphkit.collected import collected_warnings
from tests.reliability.surroundings import changes, surroundings

ROWS = gk.Dim("rows", 16)
MODES = [gk.FULL, gk.PIECEWISE]


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own, all at once; the first exception of any is raised here."""
    barrier = threading.Barrier(len(works))
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        barrier.wait(30)
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def own_stream(device: str) -> Any:
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_runner_of_many_threads_raises_and_corrupts_nothing(device: str, mode: gk.Mode) -> None:
    """Whoever holds the lock is right; who doesn't is told. Nobody gets anybody else's rows."""
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.int64, pad=0))
    pause = gk.eager_break(lambda y: y + 1)
    runner = group.runner(
        "r",
        lambda x: pause(x * 3) - 1,
        policy=gk.Policy([gk.Route(mode, gk.Buckets.powers(ROWS))]),
        outputs=gk.Output((ROWS,), torch.int64),
    )
    group.capture(progress=False)
    served, refused = [0], [0]
    count = threading.Lock()

    def serve(seed: int) -> Callable[[], None]:
        def work() -> None:
            with own_stream(device):
                for step in range(150):
                    size = (seed * 7 + step) % ROWS.maximum + 1
                    rows = [seed * 1000 + step + row for row in range(size)]
                    eager = "so" if step % 10 == 0 else None
                    dispatch = runner.dispatch(rows=size, eager=eager)
                    try:
                        # A clone: the views are the next run's, whoever runs it.
                        out = runner.run(dispatch, x=rows, clone=True)
                    except gk.ConcurrentRunError:
                        with count:
                            refused[0] += 1
                        continue
                    assert out.tolist() == [3 * row for row in rows]
                    with count:
                        served[0] += 1

        return work

    together(*(serve(seed) for seed in range(4)))
    assert served[0] + refused[0] == 600
    assert served[0] > 0
    row = group.report().runners[0]
    assert sum(graph.replays for graph in row.graphs) + row.eager_runs == served[0]
    out = runner.run(runner.dispatch(rows=3), x=[1, 2, 3])
    assert out.tolist() == [3, 6, 9]


def test_a_run_that_is_under_way_refuses_every_other_call(device: str) -> None:
    """Held in prepare, the group can't be run, captured, invalidated, released or closed by another thread."""
    entered, go_on = threading.Event(), threading.Event()

    def prepare(step: gk.Step) -> None:
        if step.context == "hold":
            entered.set()
            assert go_on.wait(30)

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.int64, pad=0))
    runner = group.runner(
        "r",
        lambda x: x + 1,
        policy=gk.Policy.full(gk.Buckets.of(ROWS, 4)),
        prepare=prepare,
        outputs=gk.Output((ROWS,), torch.int64),
    )
    group.capture(progress=False)
    dispatch = runner.dispatch(rows=2)
    found: list[list[int]] = []

    def hold() -> None:
        found.append(runner.run(dispatch, x=[1, 2], context="hold", clone=True).tolist())

    def meddle() -> None:
        assert entered.wait(30)
        try:
            calls: list[Callable[[], Any]] = [
                lambda: runner.run(dispatch, x=[7, 7]),
                lambda: group.capture(progress=False),
                group.invalidate,
                group.release,
                group.close,
                lambda: runner.stage(dispatch).__enter__(),
            ]
            for call in calls:
                with pytest.raises(gk.ConcurrentRunError, match="under way"):
                    call()
            assert runner.dispatch(rows=3).mode is gk.FULL
            assert "r" in str(group.report())
        finally:
            go_on.set()

    together(hold, meddle)
    assert found == [[2, 3]]
    assert group.state is gk.State.CAPTURED
    assert runner.run(dispatch, x=[5, 6]).tolist() == [6, 7]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_groups_of_different_threads_capture_and_run(
    device: str, mode: gk.Mode, checked: bool
) -> None:
    """At the same time, captures included: each is right, and each reports its own."""
    results: dict[int, list[list[int]]] = {}
    # What a first capture makes once in the process isn't this test's subject.
    group = gk.GraphGroup(device)
    group.wrap(lambda x: x + 1, x=gk.BufferSpec((ROWS,), torch.int64, pad=0))
    group.capture(progress=False)

    def serve(factor: int) -> Callable[[], None]:
        def work() -> None:
            with own_stream(device):
                group = gk.GraphGroup(device, checked=checked)
                group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.int64, pad=0))
                pause = gk.eager_break(lambda y: y + 1)
                runner = group.runner(
                    "r",
                    lambda x: pause(x * factor) - 1,
                    policy=gk.Policy([gk.Route(mode, gk.Buckets.of(ROWS, 2, 8))]),
                    outputs=gk.Output((ROWS,), torch.int64),
                )
                for _ in range(3):
                    group.capture(progress=False)
                    for size in (1, 2, 5, 8, 16):
                        out = runner.run(runner.dispatch(rows=size), x=list(range(size)))
                        results.setdefault(factor, []).append(out.tolist())
                    group.invalidate()
                group.close()

        return work

    before, showing = surroundings(device), warnings.showwarning
    together(*(serve(factor) for factor in (2, 3, 5)))
    assert not changes(before, surroundings(device))
    assert warnings.showwarning is showing
    for factor in (2, 3, 5):
        expected = [[factor * row for row in range(size)] for size in (1, 2, 5, 8, 16)]
        assert results[factor] == expected * 3


def test_a_capture_that_fails_in_one_thread_leaves_the_others(device: str) -> None:
    class Mine(Exception):
        pass

    def work(fails: bool) -> Callable[[], None]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            if fails and len(x) == 2:
                raise Mine
            return x + 1

        def run() -> None:
            with own_stream(device):
                for _ in range(5):
                    group = gk.GraphGroup(device)
                    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.int64, pad=0))
                    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(ROWS, 2, 8)))
                    with pytest.raises(Mine) if fails else contextlib.nullcontext():
                        group.capture(progress=False)
                    out = runner.run(runner.dispatch(rows=3), x=[1, 2, 3])
                    assert out.tolist() == [2, 3, 4]
                    group.close()

        return run

    together(work(True), work(False), work(True))


def test_pretending_to_capture_in_two_threads_is_taken_back(backend: Any) -> None:
    """Whichever ends first: each thread has its own answer, and nobody has one afterwards."""
    before = torch.cuda.graphs._cuda_isCurrentStreamCapturing
    inside, leave = threading.Event(), threading.Event()
    answers: list[bool] = []

    def other() -> None:
        with backend.as_capturing():
            answers.append(torch.cuda.is_current_stream_capturing())
            inside.set()
            assert leave.wait(30)
            answers.append(torch.cuda.is_current_stream_capturing())

    thread = threading.Thread(target=other)
    with backend.as_capturing():
        thread.start()
        assert inside.wait(30)
        answers.append(torch.cuda.is_current_stream_capturing())
    leave.set()
    thread.join(30)
    assert answers == [True, True, True]
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is before


def test_warnings_are_kept_by_thread_and_filters_put_back() -> None:
    """A thread that collects has its own list; one that doesn't gives its warnings as ever."""
    filters, showing = list(warnings.filters), warnings.showwarning
    found: dict[str, list[str]] = {}

    def collect(name: str) -> Callable[[], None]:
        def work() -> None:
            for _ in range(50):
                with collected_warnings() as outer, collected_warnings() as inner:
                    warnings.warn(name, UserWarning, stacklevel=1)
                found.setdefault(name, []).extend(str(w.message) for w in inner)
                assert not outer

        return work

    together(collect("a"), collect("b"), collect("c"))
    assert found == {name: [name] * 50 for name in "abc"}
    assert warnings.filters == filters
    assert warnings.showwarning is showing
    with pytest.raises(KeyError), collected_warnings():
        raise KeyError
    assert warnings.showwarning is showing
