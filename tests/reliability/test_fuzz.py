"""Whatever is given to a constructor or function: one of the library's errors, TypeError or ValueError, and soon.

Every argument of every call is replaced by every hostile value of `hostile.py`, and then several at once. Warnings are
none of this test's business.
"""

from __future__ import annotations

import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # what torch imports at first use would count as the library's time
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphkit as gk
from tests.reliability import hostile

ALLOWED = (gk.GraphkitError, TypeError, ValueError)
SECONDS = 2.0
"""No call may take longer; a machine that is busy with other tests is allowed for."""


class Late(BaseException):
    """A call took too long."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Interrupt what never ends."""

    def ring(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def complaint(fn: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with how a call ended; None if nothing is."""
    began = time.perf_counter()
    try:
        with deadline(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fn(**arguments)
    except ALLOWED as error:
        if isinstance(error, gk.GraphkitError) and not str(error).strip():
            return f"a {type(error).__name__} without a word"
    except Late:
        return f"took longer than {time.perf_counter() - began:.1f} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def complaints(
    fn: Callable[..., Any],
    good: dict[str, Any],
    fresh: Callable[[], Callable[..., Any]] | None = None,
) -> list[str]:
    """Each argument with each hostile value.

    Args:
        fresh: makes the function anew for each call, where one call would change what the next may do.
    """
    found = []
    for argument in good:
        for name, value in hostile.values().items():
            wrong = complaint(fresh() if fresh else fn, {**good, argument: value})
            if wrong is not None:
                found.append(f"{argument}={name}: {wrong}")
    return found


@pytest.mark.parametrize("name", hostile.calls())
def test_each_argument_of_each_call(name: str) -> None:
    fn, good = hostile.calls()[name]
    fn(**good)
    assert complaints(fn, good) == []


@pytest.mark.parametrize("name", ["declare", "runner", "wrap"])
def test_each_argument_of_each_declaration(name: str) -> None:
    def fresh() -> Callable[..., Any]:
        engine.group = gk.GraphGroup("cpu")
        engine.group.buffers.declare(x=gk.BufferSpec((engine.rows, 2), torch.float32, pad=0))
        return engine.declares()[name][0]

    engine = hostile.Engine()
    serving = engine.group
    _, good = engine.declares()[name]
    fresh()(**good)
    assert complaints(print, good, fresh) == []
    engine.group = serving
    engine.assert_serves()


@pytest.mark.parametrize("name", hostile.Engine().runs())
def test_each_argument_of_each_run(name: str) -> None:
    engine = hostile.Engine()
    fn, good = engine.runs()[name]
    fn(**good)
    assert complaints(fn, good) == []
    # Nothing of all that has changed what the runner does.
    engine.assert_serves()


def test_each_argument_of_a_capture() -> None:
    engine = hostile.Engine()

    def fresh() -> Callable[..., Any]:
        engine.group.invalidate()
        return engine.group.capture

    _, good = engine.declares()["capture"]
    values = {"order": lambda mode, bucket: -bucket["rows"], **good}
    assert complaints(print, values, fresh) == []
    engine.group.capture(progress=False)
    engine.assert_serves()


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.sampled_from(sorted(hostile.calls())), st.integers(0, 2**32))
def test_several_arguments_at_once(name: str, seed: int) -> None:
    draw = random.Random(seed)
    fn, good = hostile.calls()[name]
    for _ in range(10):
        values = hostile.values()
        bad = {argument: values[draw.choice(sorted(values))] for argument in good}
        kept = {argument: value for argument, value in good.items() if draw.random() < 0.5}
        wrong = complaint(fn, {**bad, **kept})
        assert wrong is None, f"{name}({', '.join(sorted(bad.keys() - kept.keys()))}): {wrong}"


CYCLES = [hostile.cyclic_list, hostile.cyclic_dict]


@pytest.mark.parametrize("make", CYCLES)
@pytest.mark.parametrize("where", ["returned", "prepared", "example", "context", "reads", "input"])
def test_what_contains_itself(make: Callable[[], Any], where: str) -> None:
    cycle = make()
    rows = gk.Dim("rows", 4)
    group = gk.GraphGroup("cpu", checked=True)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
    options: dict[str, Any] = {
        "returned": {},
        "prepared": {"prepare": lambda step: {"more": cycle}},
        "example": {"example": lambda bucket: {"x": cycle}},
        "reads": {"reads": [lambda: cycle]},
    }.get(where, {})
    fn: Callable[..., Any] = (lambda x, more: x + 1) if where == "prepared" else (lambda x: x + 1)
    if where == "returned":
        fn = lambda x: cycle  # noqa: E731
    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(rows, 2)), **options)

    def use() -> None:
        group.capture(progress=False)
        given = cycle if where == "input" else [1.0]
        runner.run(runner.dispatch(rows=1), {"x": given}, context=cycle)

    assert complaint(use, {}) is None
    group.close()
