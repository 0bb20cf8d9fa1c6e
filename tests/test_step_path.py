"""The per-step path stays lean: what a step calls is counted, since a count is the same on every machine."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

REQS, PAGES = gk.Dim("reqs", 64), gk.Dim("pages", 8)


def calls_of(step: Callable[[], object]) -> Counter[str]:
    """The Python and C functions that a step calls, by name."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            found[argument.__qualname__] += 1

    for _ in range(16):  # what is made once, for each slot of the ring, is made now
        step()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    found.pop(step.__qualname__, None)
    found.pop("setprofile", None)
    return found


@pytest.fixture
def group() -> gk.GraphGroup:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(
        input_ids=gk.BufferSpec((REQS,), torch.int64, pad=0),
        positions=gk.BufferSpec((REQS,), torch.int64, pad=0),
        query_start=gk.BufferSpec((REQS + 1,), torch.int32, pad=gk.repeat_last),
        block_table=gk.BufferSpec((REQS, PAGES), torch.int32, pad={REQS: 0, PAGES: gk.keep}),
    )
    return group


def model(input_ids, positions, query_start, block_table):
    return input_ids + positions + query_start[1:] + block_table.sum(1)


def captured(group: gk.GraphGroup, **options: Any) -> gk.GraphRunner:
    runner = group.runner("r", model, policy=gk.Policy.full(gk.Buckets.of(REQS, 1, 64)), **options)
    group.capture(progress=False)
    for entry in runner.entries:
        entry.launch = lambda: None  # a replay is the device's, and no part of the path
    return runner


def test_a_step_of_arrays(group):
    runner = captured(group)
    inputs = {
        "input_ids": np.arange(50),
        "positions": np.arange(50),
        "query_start": np.arange(51, dtype=np.int32),
        "block_table": np.zeros((50, 8), np.int32),
    }
    calls = calls_of(lambda: runner.run(runner.dispatch(reqs=50), inputs))
    # dispatch, run, write, move; the ring's acquire and commit; the copy, the lock and the lookups.
    assert calls.total() <= 20, calls
    assert not [name for name in calls if "__init__" in name or "__attrs" in name], calls


def test_a_step_of_resident_inputs(group):
    names = ("input_ids", "positions", "query_start", "block_table")
    runner = captured(group, inputs={name: gk.Resident(name) for name in names})
    calls = calls_of(lambda: runner.run(runner.dispatch(reqs=50)))
    assert calls.total() <= 13, calls
    assert "copy_" not in calls  # the size is last time's


def test_a_step_makes_as_many_calls_with_a_thousand_buckets_as_with_ten():
    def calls(number: int) -> int:
        group = gk.GraphGroup("cpu")
        rows = gk.Dim("rows", 1000)
        group.buffers.declare(x=gk.BufferSpec((rows,), torch.int64, pad=0))
        sizes = range(1, 1001, 1000 // number)
        runner = group.runner(
            "r",
            lambda x: x + 1,
            policy=gk.Policy.full(gk.Buckets.of(rows, *sizes)),
            outputs=gk.Output((rows,), torch.int64),
        )
        group.capture(progress=False)
        for entry in runner.entries:
            entry.launch = lambda: None
        x = np.arange(500)
        found = calls_of(lambda: runner.run(runner.dispatch(rows=500), x=x)).total()
        group.close()
        return int(found)

    assert calls(10) == calls(200)


@pytest.mark.parametrize(("kind", "most"), [("tensors", 32), ("lists", 145)])
def test_a_step_of_other_inputs(group, kind, most):
    runner = captured(group)
    arrays = {
        "input_ids": np.arange(50),
        "positions": np.arange(50),
        "query_start": np.arange(51, dtype=np.int32),
        "block_table": np.zeros((50, 8), np.int32),
    }
    inputs = {
        name: torch.from_numpy(array) if kind == "tensors" else array.tolist()
        for name, array in arrays.items()
    }
    calls = calls_of(lambda: runner.run(runner.dispatch(reqs=50), inputs))
    assert calls.total() <= most, calls


@pytest.mark.parametrize("way", ["prepare", "piecewise"])
def test_a_step_with_prepare_and_with_breaks(group, way):
    pause = gk.eager_break(lambda y: y)
    if way == "prepare":
        runner = captured(group, prepare=lambda step: None)
    else:
        runner = group.runner(
            "r",
            lambda **inputs: pause(model(**inputs)) + 1,
            policy=gk.Policy.piecewise(gk.Buckets.of(REQS, 1, 64)),
            inputs={name: gk.Fed(name) for name in ("input_ids", "positions", "query_start", "block_table")},
            outputs=gk.Output((REQS,), torch.int64),
        )  # fmt: skip
        group.capture(progress=False)
    inputs = {
        "input_ids": np.arange(50),
        "positions": np.arange(50),
        "query_start": np.arange(51, dtype=np.int32),
        "block_table": np.zeros((50, 8), np.int32),
    }
    dispatch = runner.dispatch(reqs=50)
    runner.run(dispatch, inputs)
    for entry in runner.entries:
        entry.unpack = lambda: None
    plan = runner._plans[dispatch]
    plan.launch = lambda: None
    calls = calls_of(lambda: runner.run(runner.dispatch(reqs=50), inputs))
    assert calls.total() <= 46, calls


def test_a_step_keeps_no_memory(group):
    runner = captured(group)
    inputs = {
        "input_ids": np.arange(50),
        "positions": np.arange(50),
        "query_start": np.arange(51, dtype=np.int32),
        "block_table": np.zeros((50, 8), np.int32),
    }

    def steps(number: int) -> None:
        for _ in range(number):
            runner.run(runner.dispatch(reqs=50), inputs)

    steps(50)
    tracemalloc.start()
    try:
        steps(50)
        before = tracemalloc.get_traced_memory()[0]
        steps(1000)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 2048
