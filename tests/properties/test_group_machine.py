"""A group's whole life, in any order, against a model in plain Python."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import graphkit as gk
from tests.properties.bounds import examples

ROWS = gk.Dim("rows", 9)
TOP = 6
"""The largest bucket: larger batches run EAGER."""

rows = st.integers(0, ROWS.maximum)
values = st.integers(-5, 5)


def bucket_of(size: int) -> int | None:
    """The least bucket that a batch fits in."""
    return next((bucket for bucket in (2, TOP) if bucket >= size), None)


class GroupMachine(RuleBasedStateMachine):
    """Producer and consumer share the buffer `hidden`; a third runner feeds it; a fourth sums it."""

    device: ClassVar[str] = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.group = gk.GraphGroup(self.device, checked=True)
        self.buffers = self.group.buffers.declare(
            x=gk.BufferSpec((ROWS, 2), torch.int64, pad=0),
            bias=gk.BufferSpec((), torch.int64),
            hidden=gk.BufferSpec((ROWS, 2), torch.int64, pad=gk.relied(0)),
        )
        policy = gk.Policy.full(gk.Buckets.of(ROWS, 2, TOP))
        self.produce = self.group.runner(
            "produce",
            lambda x, bias: x * 2 + bias,
            policy=policy,
            outputs=self.buffers.hidden,
        )
        self.consume = self.group.runner(
            "consume",
            lambda hidden, count: {"rows": hidden + 1, "sum": hidden.sum(0), "count": count + 0},
            policy=policy,
            inputs={"hidden": gk.Resident("hidden"), "count": gk.Count(ROWS)},
            outputs={
                "rows": gk.Output((ROWS, 2), torch.int64),
                "sum": gk.Output((2,), torch.int64),
                "count": gk.Output((), torch.int32),
            },
        )
        self.feed = self.group.runner(
            "feed",
            lambda hidden: hidden.flip(1),
            policy=policy,
            outputs=gk.Output((ROWS, 2), torch.int64),
        )
        self.state = gk.State.NEW
        # What `hidden` holds, row by row; None where nothing is known.
        self.hidden: list[list[int] | None] = [None] * ROWS.maximum
        self.leased: list[tuple[torch.Tensor, Any]] = []
        self.kept: gk.Dispatch | None = None
        self.everything: set[Any] = set()

    # -- lifecycle --------------------------------------------------------------------------------

    @precondition(lambda self: self.state is not gk.State.CLOSED)
    @rule()
    def capture(self) -> None:
        report = self.group.capture(progress=False)
        if self.state is not gk.State.CAPTURED:
            # Examples were written to the buffers.
            self.hidden = [None] * ROWS.maximum
            self.end_leases()
        self.state = gk.State.CAPTURED
        assert report.state == "CAPTURED"
        assert all(row.captured for runner in report.runners for row in runner.graphs)

    @precondition(lambda self: self.state is not gk.State.CLOSED)
    @rule()
    def invalidate(self) -> None:
        self.group.invalidate()
        if self.state is gk.State.CAPTURED:
            self.state = gk.State.STALE

    @precondition(lambda self: self.state is not gk.State.CLOSED)
    @rule()
    def release(self) -> None:
        self.group.release()
        self.state = gk.State.SUSPENDED
        self.hidden = [None] * ROWS.maximum
        self.leased.clear()

    @rule()
    @precondition(lambda self: len(self.everything) > 6)
    def close(self) -> None:
        self.group.close()
        self.group.close()
        self.state = gk.State.CLOSED
        self.leased.clear()

    # -- runs -------------------------------------------------------------------------------------

    def dispatch(self, runner: gk.GraphRunner, size: int) -> gk.Dispatch:
        dispatch = runner.dispatch(rows=size)
        bucket = bucket_of(size)
        if self.state is gk.State.CAPTURED and bucket is not None:
            assert dispatch.mode is gk.FULL
            assert dispatch.bucket["rows"] == bucket
            assert dispatch.reason is None
        else:
            assert dispatch.mode is gk.EAGER
            if bucket is not None and self.state is not gk.State.CLOSED:
                assert dispatch.reason is {
                    gk.State.NEW: gk.Reason.NOT_CAPTURED,
                    gk.State.SUSPENDED: gk.Reason.SUSPENDED,
                    gk.State.STALE: gk.Reason.STALE,
                    gk.State.CAPTURED: None,
                }.get(self.state)
        self.kept = dispatch if runner is self.feed else self.kept
        return dispatch

    def run(self, runner: gk.GraphRunner, size: int, **given: Any) -> Any:
        dispatch = self.dispatch(runner, size)
        if self.state in (gk.State.SUSPENDED, gk.State.CLOSED):
            words = "closed" if self.state is gk.State.CLOSED else "released"
            with pytest.raises(gk.StateError, match=words):
                runner.run(dispatch, given)
            return None
        self.everything.add((runner.name, size))
        return runner.run(dispatch, given)

    def padded(self, size: int) -> int:
        """Rows of `hidden` that a run of this size covers."""
        bucket = bucket_of(size) if self.state is gk.State.CAPTURED else None
        return size if bucket is None else bucket

    def matrix(self, size: int, seed: int) -> list[list[int]]:
        return [[seed + row, seed * row - 1] for row in range(size)]

    def end_leases(self) -> None:
        """Whatever was given out is stale."""
        for output, _ in self.leased:
            with pytest.raises(gk.StaleOutputError, match="its output was read after"):
                output.tolist()
        self.leased.clear()

    @rule(size=rows, seed=values, bias=values, as_list=st.booleans())
    def run_producer(self, size: int, seed: int, bias: int, as_list: bool) -> None:
        x = self.matrix(size, seed)
        given = x if as_list and size else torch.tensor(x, dtype=torch.int64).reshape(size, 2)
        out = self.run(self.produce, size, x=given, bias=bias)
        if out is None:
            return
        expected = [[2 * a + bias, 2 * b + bias] for a, b in x]
        assert out.tolist() == expected
        assert out.data_ptr() == self.buffers.hidden.tensor.data_ptr() or not size
        padding = [[bias, bias] for _ in range(self.padded(size) - size)]
        self.hidden[: self.padded(size)] = [*expected, *padding]
        self.end_leases()
        self.leased = [(out, expected)]

    @rule(size=rows, seed=values)
    def run_feeder(self, size: int, seed: int) -> None:
        x = self.matrix(size, seed)
        given = torch.tensor(x, dtype=torch.int64).reshape(size, 2).to(self.device)
        out = self.run(self.feed, size, hidden=given)
        if out is None:
            return
        assert out.tolist() == [[b, a] for a, b in x]
        zeros = [[0, 0] for _ in range(self.padded(size) - size)]
        self.hidden[: self.padded(size)] = [*x, *zeros]
        self.end_leases()

    @rule(size=rows)
    def run_consumer(self, size: int) -> None:
        out = self.run(self.consume, size)
        if out is None:
            return
        known = self.hidden[:size]
        zeros: list[list[int] | None] = [[0, 0]] * (self.padded(size) - size)
        self.hidden[size : self.padded(size)] = zeros
        self.end_leases()
        assert out["count"].item() == size
        if None in known:
            return
        assert out["rows"].tolist() == [[a + 1, b + 1] for a, b in known]
        assert out["sum"].tolist() == [sum(row[0] for row in known), sum(row[1] for row in known)]

    @precondition(lambda self: self.kept is not None)
    @rule()
    def run_an_old_dispatch(self) -> None:
        dispatch = self.kept
        x = torch.zeros(dispatch.sizes["rows"], 2, dtype=torch.int64)
        there = self.state is gk.State.CAPTURED or (
            dispatch.mode is gk.EAGER and self.state in (gk.State.NEW, gk.State.STALE)
        )
        if not there:
            with pytest.raises(gk.StateError):
                self.feed.run(dispatch, hidden=x)
            return
        assert self.feed.run(dispatch, hidden=x).tolist() == x.tolist()
        size = x.shape[0]
        covered = size if dispatch.bucket is None else dispatch.bucket["rows"]
        self.hidden[:covered] = [[0, 0]] * covered
        self.end_leases()

    @precondition(lambda self: self.state in (gk.State.NEW, gk.State.CAPTURED, gk.State.STALE))
    @rule(size=st.integers(1, ROWS.maximum))
    def give_what_does_not_fit(self, size: int) -> None:
        dispatch = self.produce.dispatch(rows=size)
        with pytest.raises(gk.InputError, match="got shape"):
            self.produce.run(dispatch, x=torch.zeros(size + 1, 2, dtype=torch.int64), bias=1)
        with pytest.raises(gk.InputError, match="missing"):
            self.produce.run(dispatch, x=torch.zeros(size, 2, dtype=torch.int64))
        with pytest.raises(gk.InputError, match="above"):
            self.produce.dispatch(rows=ROWS.maximum + 1)

    @invariant()
    def hidden_is_as_known(self) -> None:
        if self.state in (gk.State.SUSPENDED, gk.State.CLOSED):
            return
        if not self.buffers.hidden.is_allocated:
            return
        found = self.buffers.hidden.tensor.tolist()
        for row, expected in zip(found, self.hidden, strict=True):
            assert expected is None or row == expected
        for output, expected in self.leased:
            assert output.tolist() == expected

    @invariant()
    def states_agree(self) -> None:
        assert self.group.state is self.state
        assert self.group.report().state == self.state.name

    def teardown(self) -> None:
        self.group.close()
        with pytest.raises(gk.StateError, match="the group is closed"):
            self.group.capture()


@pytest.fixture
def machine(device: str) -> type[GroupMachine]:
    return type("Machine", (GroupMachine,), {"device": device})


def test_a_group_behaves_as_its_model(machine: type[GroupMachine]) -> None:
    run_state_machine_as_test(machine, settings=examples(25, steps=20, shrinks=False))
