"""RunnerMachine: right runners pass, wrong ones are found, and what it says is the least that fails."""

from __future__ import annotations

import gc
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

import graphkit as gk
from graphkit.testing import RunnerMachine, strategies

ROWS = gk.Dim("rows", 7)
REQS, TOKENS = gk.Dim("reqs", 4), gk.Dim("tokens", 16)
SLOTS = 24
FULL = gk.Policy.full(gk.Buckets.of(ROWS, 2, 5))


def examples(count: int, *, shrinks: bool = False) -> settings:
    """The same each time, and quick."""
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    return settings(
        RunnerMachine.default_settings(),
        max_examples=count,
        stateful_step_count=12,
        derandomize=True,
        database=None,
        phases=phases,
    )


@pytest.fixture(autouse=True, scope="module")
def _young_garbage_only() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Plain(RunnerMachine):
    def make_runner(self, group: gk.GraphGroup) -> gk.GraphRunner:
        group.buffers.declare(x=gk.BufferSpec((ROWS, 3), torch.float32, pad=0))
        return group.runner("plain", lambda x: x * 2 + 1, policy=FULL)


class Decode(RunnerMachine):
    """Row boundaries, a cache with a scratch row, a resident buffer written in place, two modes."""

    def make_runner(self, group: gk.GraphGroup) -> gk.GraphRunner:
        cache = torch.zeros(SLOTS, 2, device=group.device)
        group.buffers.declare(
            starts=gk.BufferSpec((REQS + 1,), torch.int32, pad=gk.repeat_last),
            slots=gk.BufferSpec((TOKENS,), torch.int64, pad=0, valid=(0, SLOTS)),
            x=gk.BufferSpec((TOKENS, 2), torch.float32, pad=0),
            hidden=gk.BufferSpec((TOKENS, 2), torch.float32, pad=gk.by_producer(0)),
        )

        def decode(
            starts: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, hidden: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            cache[slots] = x
            hidden += x
            last = (starts[1:] - 1).clamp(min=0).long()
            return {"last": hidden[last], "cached": cache[slots] * 2}

        return group.runner(
            "decode",
            decode,
            policy=gk.Policy.full_and_piecewise(
                gk.Buckets.uniform(REQS, TOKENS, query_len=3, sizes=[1, 4]),
                gk.Buckets.of(TOKENS, 4, 12, reqs=gk.at_most(TOKENS)),
            ),
            inputs={"hidden": gk.Resident("hidden")},
            outputs={
                "last": gk.Output((REQS, 2), torch.float32),
                "cached": gk.Output((TOKENS, 2), torch.float32),
            },
            mutates=[cache],
            strict=False,
        )


class Strict(RunnerMachine):
    """A sum over rows that relies on its pad, and nothing but graphs."""

    def make_runner(self, group: gk.GraphGroup) -> gk.GraphRunner:
        group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float64, pad=gk.relied(0)))
        return group.runner(
            "strict",
            lambda x: x.sum(0, keepdim=True),
            policy=FULL,
            outputs=gk.Output((1,), torch.float64),
            strict=True,
        )


class Varied(RunnerMachine):
    """Variants, and inputs that can't be drawn one by one."""

    extreme = True
    nan = True

    def make_runner(self, group: gk.GraphGroup) -> gk.GraphRunner:
        group.buffers.declare(
            x=gk.BufferSpec((ROWS,), torch.float32, pad=0),
            pairs=gk.BufferSpec((ROWS, 2), torch.int64, pad=0),
        )
        route = gk.Route(
            gk.FULL, gk.Buckets.of(ROWS, 2, 5), variants=gk.Variants(sign=(False, True))
        )
        return group.runner(
            "varied",
            lambda x, pairs, sign: (-x if sign else x) / (pairs[:, 1] - pairs[:, 0]),
            policy=gk.Policy([route]),
            outputs=gk.Output((ROWS,), torch.float32),
            # A bucket's example holds its pads, which would be divided by.
            example=None,
        )

    def inputs(self, dispatch: gk.Dispatch) -> Mapping[str, Any]:
        first = st.integers(0, 5)
        ends = st.tuples(first, first.map(lambda value: value + 6)).map(list)
        count = dispatch.sizes["rows"]
        rows = st.lists(ends, min_size=count, max_size=count)
        return {"pairs": rows.map(lambda pairs: np.array(pairs, np.int64).reshape(count, 2))}


@pytest.mark.parametrize("machine", [Plain, Decode, Strict, Varied])
def test_right_runners_pass(machine: type[RunnerMachine], device: str) -> None:
    machine.check(device, settings=examples(6))


# -- wrong runners ------------------------------------------------------------------------------


def machine_of(make: Callable[[gk.GraphGroup], gk.GraphRunner], **attributes: Any) -> Any:
    """A machine of a runner that is made like this."""

    def make_runner(self: RunnerMachine, group: gk.GraphGroup) -> gk.GraphRunner:
        return make(group)

    return type("Wrong", (RunnerMachine,), {"make_runner": make_runner, **attributes})


def pad_reaches_the_result(group: gk.GraphGroup) -> gk.GraphRunner:
    group.buffers.declare(x=gk.BufferSpec((ROWS, 3), torch.float32, pad=1))
    return group.runner("sums", lambda x: x + x.sum(0), policy=FULL)


def size_is_baked(group: gk.GraphGroup) -> gk.GraphRunner:
    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
    return group.runner("sizes", lambda x: x + len(x), policy=FULL)


def state_is_padded(group: gk.GraphGroup) -> gk.GraphRunner:
    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=1))
    total = torch.zeros(1, device=group.device)

    def add(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum())
        return x * 1

    return group.runner("adds", add, policy=FULL, mutates=[total])


def resident_is_rolled(group: gk.GraphGroup) -> gk.GraphRunner:
    group.buffers.declare(state=gk.BufferSpec((ROWS, 3), torch.float32, pad=0))

    def roll(state: torch.Tensor) -> torch.Tensor:
        state.copy_(state.roll(1, 0))
        return torch.zeros_like(state)

    return group.runner("rolls", roll, policy=FULL, inputs={"state": gk.Resident("state")})


WRONG = {
    pad_reaches_the_result: r"runner 'sums', Batch\(rows=\d\) in FULL \[rows=\d\]: its output differs "
    r"from eager in rows? 0[ ,0-9]* of \d\. ",
    size_is_baked: r"runner 'sizes', Batch\(rows=\d\) in FULL .*: its output differs from eager in row",
    state_is_padded: r"runner 'adds', .* in FULL .*: state mutates\[0\] differs from eager in row 0 of 1",
    resident_is_rolled: r"runner 'rolls', .*: resident buffer 'state' differs from eager in rows? ",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_wrong_runners_are_found(
    make: Callable[[gk.GraphGroup], gk.GraphRunner], device: str
) -> None:
    with pytest.raises(gk.CheckError, match=WRONG[make]):
        machine_of(make).check(device, settings=examples(10))


def test_the_least_that_fails_is_shown() -> None:
    with pytest.raises(gk.CheckError, match=r"Batch\(rows=1\) in FULL \[rows=2\]") as caught:
        machine_of(pad_reaches_the_result).check(settings=examples(10, shrinks=True))
    steps = "\n".join(caught.value.__notes__)
    assert steps.count("state.") == 3  # begin, run, teardown
    assert "(batch): Batch(rows=1)" in steps


def test_a_batch_above_a_maximum_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Plain()
    fine = machine.runner.dispatch(rows=7)
    monkeypatch.setattr(machine.runner, "dispatch", lambda **sizes: fine)
    data: Any = type("Data", (), {"draw": lambda *args, **kw: strategies.Batch({"rows": 8})})()
    with pytest.raises(gk.CheckError, match=r"'plain': Batch\(rows=8\) is above a maximum and was"):
        machine.refuse_what_is_too_large(data)
    machine.teardown()


# -- what a subclass may say --------------------------------------------------------------------


def test_a_subclass_chooses_batches_tolerance_group_and_settings() -> None:
    seen: list[Any] = []

    class Chosen(Plain):
        checked = False

        def make_group(self, device: str) -> gk.GraphGroup:
            seen.append(device)
            return super().make_group(device)

        def accepts(self, batch: strategies.Batch) -> bool:
            return batch.sizes["rows"] in (2, 3)

        def compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
            assert not self.group.checked
            seen.append((what, len(found)))
            super().compare(what, found, expected)

    Chosen.check(settings=examples(4))
    assert set(seen) == {"cpu", ("its output", 2), ("its output", 3)}

    class Tolerant(Plain):
        rtol, atol = 0.0, 0.5

    machine = Tolerant()
    machine.compare("it", torch.ones(2), torch.full((2,), 1.4))
    with pytest.raises(AssertionError, match="not close"):
        machine.compare("it", torch.ones(2), torch.full((2,), 1.6))
    machine.teardown()


def test_it_is_a_test_case_too() -> None:
    case: Any = Plain.TestCase
    case.settings = examples(2)
    result = unittest.TestResult()
    case("runTest").run(result)
    assert result.wasSuccessful()
    assert result.testsRun == 1


def test_what_is_missing_or_shared_is_named() -> None:
    with pytest.raises(NotImplementedError, match="RunnerMachine must define make_runner"):
        RunnerMachine()
    cache = torch.zeros(3)

    def shares(group: gk.GraphGroup) -> gk.GraphRunner:
        group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
        return group.runner("r", lambda x: x * 1, policy=FULL, mutates=[cache])

    with pytest.raises(
        gk.SpecError, match=r"two runners that change the same state of shape \(3,\)"
    ):
        machine_of(shares)()
    only: list[gk.GraphRunner] = []

    def keeps(group: gk.GraphGroup) -> gk.GraphRunner:
        only.extend([shares(group)] if not only else [])
        return only[0]

    with pytest.raises(gk.SpecError, match="make_runner gave the same runner twice"):
        machine_of(keeps)()


def test_scratch_rows_are_nobodys() -> None:
    cache = torch.zeros(4, 2)

    def make(group: gk.GraphGroup) -> gk.GraphRunner:
        group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
        group.buffers.declare(i=gk.BufferSpec((ROWS,), torch.int64, pad=-1, valid=(-1, 3)))
        state = gk.Scratch(cache.clone(), rows=[0])
        return group.runner("r", lambda x, i: x * 1, policy=FULL, mutates=[state, cache.clone()])

    machine = machine_of(make)()
    assert [len(tensor) for tensor in machine.state_of(machine.runner)] == [2, 3]
    machine.teardown()


class Cached(RunnerMachine):
    """A cache in a resident buffer of fixed shape, whose row 0 is for padding."""

    scratch: Any = (0,)

    def make_runner(self, group: gk.GraphGroup) -> gk.GraphRunner:
        cache = torch.zeros(SLOTS, 2, device=group.device)
        group.buffers.declare(
            slots=gk.BufferSpec((ROWS,), torch.int64, pad=0, valid=(0, SLOTS)),
            x=gk.BufferSpec((ROWS, 2), torch.float32, pad=7),
            cache=gk.BufferSpec((SLOTS, 2), torch.float32, adopt=cache),
        )

        def write(slots: torch.Tensor, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache[slots] = x
            return x * 2

        mutates = [gk.Scratch(cache, rows=list(self.scratch))] if self.scratch else []
        return group.runner(
            "write",
            write,
            policy=FULL,
            outputs=gk.Output((ROWS, 2), torch.float32),
            inputs={"cache": gk.Resident("cache")},
            mutates=mutates,
        )

    def inputs(self, dispatch: gk.Dispatch) -> Mapping[str, Any]:
        return {"slots": np.arange(1, dispatch.sizes["rows"] + 1)}


def test_scratch_rows_of_a_resident_buffer_are_nobodys(device: str) -> None:
    Cached.check(device, settings=examples(4))
    wrong = type("Wrong", (Cached,), {"scratch": ()})
    with pytest.raises(
        gk.CheckError, match="resident buffer 'cache' differs from eager in row 0 of"
    ) as caught:
        wrong.check(device, settings=examples(4))
    advice = "mutates=[gk.Scratch(group.buffers['cache'].tensor, rows=[...])]"
    assert advice in str(caught.value)
