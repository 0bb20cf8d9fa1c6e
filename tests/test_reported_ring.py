"""The ring whose slots the device gives back by writing a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.backends.recording import RecordingBackend
from graphkit.staging import reported_ring
from graphkit.staging.reported_ring import ReportedRing
from graphkit.staging.unpack import Unpacker

BATCH = gk.Dim("batch", 8)


class Device:
    """Reads slots in order, when it is told to."""

    def __init__(self, depth: int, **options: Any) -> None:
        self.ring = ReportedRing(RecordingBackend(), 16, depth, drain=self.drain, **options)
        self.queued: list[tuple[int, int]] = []
        self.drained = 0

    def write(self, preferred: int) -> int:
        slot = self.ring.acquire(preferred)
        assert self.ring.acquire(preferred) == slot, "it stays the next one until it is committed"
        assert slot not in [other for other, _ in self.queued], "in flight"
        self.queued.append((slot, self.ring.number))
        self.ring.commit()
        return slot

    def read(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.queued))):
            self.ring.cell[0] = self.queued.pop(0)[1]

    def drain(self) -> None:
        self.drained += 1
        self.read(len(self.queued))


@given(
    depth=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60),
)
def test_no_slot_is_given_that_is_in_flight(depth: int, steps: list[tuple[int, int]]) -> None:
    device = Device(depth)
    for preferred, read in steps:
        if len(device.queued) == depth:
            device.read()
        device.write(preferred % depth)
        device.read(read)


def test_a_drained_device_gets_the_preferred_slot_each_time() -> None:
    device = Device(4)
    for _ in range(10):
        assert device.write(2) == 2
        device.read()


def test_without_waiting_the_slots_go_round() -> None:
    device = Device(4)
    assert [device.write(1) for _ in range(4)] == [1, 2, 3, 0]


def test_a_full_ring_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(2)
    device.write(0)
    device.write(0)
    monkeypatch.setattr(reported_ring.time, "sleep", lambda seconds: device.read())
    assert device.ring.acquire(1) in (0, 1)
    assert device.drained == 0


def test_a_launch_that_failed_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported_ring, "_PATIENCE", 0.001)
    device = Device(2)
    device.write(0)
    device.write(0)
    device.queued.clear()  # nobody will read them
    assert device.write(1) == 1
    assert device.drained == 1
    assert device.write(1) == 0


def test_a_full_ring_raises_where_asked() -> None:
    device = Device(2, full="raise")
    device.write(0)
    device.write(0)
    with pytest.raises(gk.StateError, match="the ring of 2 slots is full"):
        device.ring.acquire(0)
    device.read()
    assert device.write(0) == 0


def test_a_capture_may_wait() -> None:
    device = Device(1, full="raise")
    device.write(0)
    device.ring.wait()
    assert device.drained == 1
    assert device.write(0) == 0


@pytest.mark.parametrize("start", [0x7FFFFFFE, 0x40000000 - 1])
def test_numbers_begin_anew(start: int) -> None:
    device = Device(3)
    device.ring.number = start
    device.ring.cell[0] = start - 1
    device.ring._written = [start - 1] * 3
    for step in range(20):
        device.write(step % 3)
        if step % 3 == 2:
            device.read(3)
    assert device.drained == 0


# -- in a runner, with a node that reports by a torch operation ---------------------------------------


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording backend's unpacking node reports too."""
    unpack = Unpacker.unpack

    def and_report(self: Unpacker, layout: Any, header: torch.Tensor) -> None:
        unpack(self, layout, header)
        if self.report is not None:
            address, place = self.report()
            cell = next(ring.cell for ring in made if ring.cell.data_ptr() == address)
            cell.copy_(header[place : place + 1])

    made: list[ReportedRing] = []
    init = ReportedRing.__init__

    def noted(self: ReportedRing, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(ReportedRing, "__init__", noted)
    monkeypatch.setattr(Unpacker, "can_report", True)
    monkeypatch.setattr(Unpacker, "unpack", and_report)


@pytest.mark.usefixtures("reporting")
@pytest.mark.parametrize("depth", [1, 2, 3, 8])
@pytest.mark.parametrize("checked", [False, True])
def test_steps_of_any_size_and_mode_get_their_own_values(depth: int, checked: bool) -> None:
    group = gk.GraphGroup("cpu", checked=checked)
    group.buffers.declare(
        x=gk.BufferSpec((BATCH,), torch.int64, pad=-1),
        y=gk.BufferSpec((BATCH + 1,), torch.int32, pad=gk.repeat_last),
    )
    runner = group.runner(
        "r",
        lambda x, y: x + y[1:] + y[:-1],
        policy=gk.Policy(
            [
                gk.Route(gk.FULL, gk.Buckets.of(BATCH, 2, 4)),
                gk.Route(gk.PIECEWISE, gk.Buckets.of(BATCH, 6)),
            ]
        ),
        outputs=gk.Output((BATCH,), torch.int64),
        ring_depth=depth,
    )
    group.capture(progress=False)
    ring = runner.staging.ring
    assert isinstance(ring, ReportedRing)
    rng = np.random.default_rng(0)
    for step in range(60):
        rows = int(rng.integers(0, 9))
        x, y = rng.integers(0, 99, rows), rng.integers(0, 99, rows + 1).astype(np.int32)
        dispatch = runner.dispatch(batch=rows)
        if step % 5 == 4:
            with runner.stage(dispatch) as stage:
                stage.host["x"][:] = x
            out = runner.run(dispatch, y=y, clone=True)
        else:
            out = runner.run(dispatch, x=x, y=y, clone=True)
        assert out.tolist() == (x + y[1:] + y[:-1]).tolist()
        assert int(ring.cell[0]) == ring.number - 1
    group.close()


@pytest.mark.usefixtures("reporting")
def test_a_refused_batch_leaves_the_ring_as_it_was() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=-1))
    runner = group.runner("r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.of(BATCH, 4, 8)))
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    number = runner.staging.ring.number
    for _ in range(20):
        with pytest.raises(gk.InputError):
            runner.run(dispatch, x=np.zeros(4, np.int64))
    assert runner.staging.ring.number == number
    assert runner.run(dispatch, x=[1, 2, 3]).tolist() == [2, 3, 4]
    group.release()
    group.capture(progress=False)
    assert runner.run(runner.dispatch(batch=3), x=[1, 2, 3]).tolist() == [2, 3, 4]
    group.close()
