"""Cases about prepared data and Python state: S1, S2, S5, S6, S7, S8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 16)


# -- S1: an auxiliary buffer -----------------------------------------------------------------------


class Auxiliary:
    """A buffer beside the group's, that prepare fills for the function."""

    def __init__(self, device: str, *, on_host: bool) -> None:
        self.memory = torch.zeros(BATCH.maximum, dtype=torch.int64, device=device)
        self.phases: list[gk.Phase] = []
        self.on_host = on_host

    def prepare(self, step: gk.Step) -> dict[str, torch.Tensor]:
        self.phases.append(step.phase)
        rows = step.views["x"].shape[0]
        assert rows == (step.dispatch.bucket or step.dispatch).sizes["batch"]
        if self.on_host:
            self.memory[:rows].copy_(torch.from_numpy(step.host["x"] * 10))
        else:
            self.memory[:rows].copy_(step.views["x"] * 10)
        return {"aux": self.memory[:rows]}


@pytest.mark.parametrize("on_host", [False, True], ids=["from views", "from host"])
@pytest.mark.parametrize("mode", [gk.FULL, gk.EAGER], ids=str)
def test_s1_prepare_runs_for_every_run_warm_up_and_capture(device, mode, on_host):
    """The second batch must not see what the first one's prepare made (vllm#38311)."""
    auxiliary = Auxiliary(device, on_host=on_host)
    # In checked mode a capture without a GPU is replayed once more, to compare it.
    group = gk.GraphGroup(device, checked=False)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=-1))
    runner = group.runner(
        "r",
        lambda x, aux: x + aux,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        prepare=auxiliary.prepare,
    )
    group.capture()
    captures = 2 * group.backend.recordings
    assert auxiliary.phases == 2 * [gk.Phase.WARMUP] + captures * [gk.Phase.CAPTURE]
    auxiliary.phases.clear()
    for batch in ([1, 2, 3], [4, 5, 6], [7], []):
        dispatch = runner.dispatch(
            batch=len(batch), eager="by request" if mode is gk.EAGER else None
        )
        assert dispatch.mode is mode
        assert runner.run(dispatch, x=batch).tolist() == [11 * value for value in batch]
    phase = gk.Phase.EAGER if mode is gk.EAGER else gk.Phase.REPLAY
    assert auxiliary.phases == 4 * [phase]


@pytest.mark.parametrize("mode", [gk.FULL, gk.EAGER], ids=str)
def test_s1_prepare_host_sees_padded_arrays_and_may_write_them(device, mode):
    """prepare_host runs once for each run too, before the inputs are moved (vllm#38311)."""
    seen: list[tuple[gk.Phase, list[int]]] = []

    def prepare_host(step):
        seen.append((step.phase, step.host["x"].tolist()))
        step.host["x"] += 100

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=-1))
    runner = group.runner(
        "r",
        lambda x: x * 2,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        prepare_host=prepare_host,
    )
    group.capture()
    seen.clear()
    eager = "by request" if mode is gk.EAGER else None
    for batch in ([1, 2, 3], [4, 5, 6]):
        out = runner.run(runner.dispatch(batch=3, eager=eager), x=batch)
        assert out.tolist() == [2 * (value + 100) for value in batch]
    tail = [] if eager else [-1]
    phase = gk.Phase.EAGER if eager else gk.Phase.REPLAY
    assert seen == [(phase, [1, 2, 3, *tail]), (phase, [4, 5, 6, *tail])]


def test_s1_context_reaches_prepare_and_current_run(device):
    """What only this run knows comes by context, and the body can't ask for it (vllm#38311)."""
    asked: list[Any] = []

    def prepare(step):
        assert gk.current_run() is step
        asked.append(step.context)

    def body(x):
        with pytest.raises(gk.StateError, match="baked into the graph: ask in prepare"):
            gk.current_run()
        return x + 1

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 4))
    runner = group.runner("r", body, policy=policy, prepare=prepare)
    group.capture()
    asked.clear()
    for context in ("first", None, {"third": 3}):
        runner.run(runner.dispatch(batch=3), x=[1, 2, 3], context=context)
    runner.run(runner.dispatch(batch=16), x=list(range(16)), context="eager")
    assert asked == ["first", None, {"third": 3}, "eager"]
    with pytest.raises(gk.StateError, match="outside a run"):
        gk.current_run()


# -- S2: metadata overwritten between building and using -------------------------------------------


@pytest.mark.parametrize("order", [None, lambda mode, bucket: bucket["batch"]])
def test_s2_inputs_are_made_right_before_each_warm_up_and_capture(device, order):
    """Metadata of bucket 16 is a view of what building bucket 1 overwrites (vllm#48261)."""
    metadata = torch.zeros(16, dtype=torch.int64, device=device)
    log: list[tuple[str, int]] = []
    found: list[list[int]] = []

    def prepare(step):
        rows = step.views["x"].shape[0]
        log.append(("prepare", rows))
        metadata[:rows].fill_(rows)
        if step.phase is gk.Phase.WARMUP:
            found.append(step.views["x"].tolist())  # the example batch, never leftovers
        return {"meta": metadata[:rows]}

    def fn(x, meta):
        log.append(("fn", len(x)))
        return x + meta

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    runner = group.runner(
        "r",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 1, 4, 16)),
        prepare=prepare,
        example=lambda bucket: {"x": [bucket["batch"]] * bucket["batch"]},
    )
    group.capture(order=order)
    assert all(
        first == ("prepare", rows) and second == ("fn", rows)
        for first, second in zip(log[::2], log[1::2], strict=True)
        for rows in (first[1],)
    )
    assert sorted(found) == [[1], [4] * 4, [16] * 16]
    for rows, bucket in ((16, 16), (1, 1), (3, 4), (9, 16)):
        out = runner.run(runner.dispatch(batch=rows), x=[0] * rows)
        assert out.tolist() == [bucket] * rows


def test_s2_a_resident_buffer_holds_its_example_in_warm_up_and_capture(device):
    """Never what a run has left there (rule 6)."""
    seen: list[tuple[gk.Phase, list[int]]] = []

    def prepare(step):
        seen.append((step.phase, step.views["state"].tolist()))
        return {}

    group = gk.GraphGroup(device)
    state = group.buffers.declare(state=gk.BufferSpec((BATCH,), torch.int64, pad=0)).state
    runner = group.runner(
        "r",
        lambda state: state + 1,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        inputs={"state": gk.Resident("state")},
        prepare=prepare,
        example=lambda bucket: {"state": [7] * bucket["batch"]},
    )
    for _ in range(2):
        state.tensor.fill_(99)
        group.capture()
        phases = {phase for phase, _ in seen}
        assert phases == {gk.Phase.WARMUP, gk.Phase.CAPTURE}
        assert all(set(values) == {7} for _, values in seen)
        seen.clear()
        state.tensor.fill_(3)
        assert runner.run(runner.dispatch(batch=3)).tolist() == [4, 4, 4]
        seen.clear()
        group.invalidate()


# -- S5: tensors of the caller's -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["numpy", "cpu tensor", "device tensor"])
def test_s5_inputs_are_copied_so_that_the_caller_may_replace_them(device, how):
    """A tensor the caller owned at capture was replaced by another (vllm#53915)."""
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    runner = group.runner("r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.powers(BATCH)))
    kept = torch.zeros(3, dtype=torch.int64, device=device)
    group.capture()
    runner.run(runner.dispatch(batch=3), x=kept)
    for start in range(3):
        new: Any = torch.arange(start, start + 3)
        new = {"numpy": new.numpy(), "cpu tensor": new, "device tensor": new.to(device)}[how]
        out = runner.run(runner.dispatch(batch=3), x=new)
        assert out.tolist() == [start + 1, start + 2, start + 3]
        assert new.tolist() == list(range(start, start + 3))
    assert kept.tolist() == [0, 0, 0]


class Engine:
    """Somebody who owns a cache, and may replace it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cache = torch.ones(4, device=device)

    def replace(self) -> None:
        old = self.cache
        self.cache = torch.full((4,), 5.0, device=self.device)
        assert self.cache.data_ptr() != old.data_ptr()


WATCHES: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "callable": (lambda e: lambda: e.cache, r"reads\[0\]\(\)\[0\]"),
    "nested": (lambda e: lambda: {"kv": [e.cache]}, r"reads\[0\]\(\)\[0\]"),
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("checked", [False, True])
def test_s5_a_watched_tensor_that_moved_raises_with_its_name(device, watch, checked):
    """A cache replaced by one at another address: the graph reads the old one (vllm#53915)."""
    engine = Engine(device)
    make, name = WATCHES[watch]
    group = gk.GraphGroup(device, checked=checked)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 4))
    reads = [make(engine)]
    runner = group.runner("r", lambda x: x + engine.cache.sum(), policy=policy, reads=reads)
    group.capture()
    assert runner.run(runner.dispatch(batch=1), x=[1.0]).tolist() == [5.0]
    group.check_addresses()
    engine.replace()
    message = rf"{name} was 0x.* at the capture and is 0x.* now.*invalidate\(\) and capture\(\)"
    with pytest.raises(gk.StaleGraphError, match=rf"runner 'r'.*: {message}"):
        group.check_addresses()
    # Bucket 4 has not run yet, and is checked in either mode.
    with pytest.raises(gk.StaleGraphError, match=rf"FULL bucket \[batch=4\]: {message}"):
        runner.run(runner.dispatch(batch=3), x=[1.0, 2.0, 3.0])
    if checked:
        with pytest.raises(gk.StaleGraphError, match=message):
            runner.run(runner.dispatch(batch=1), x=[1.0])
    group.invalidate()
    stale = runner.dispatch(batch=1)
    assert (stale.mode, stale.reason) == (gk.EAGER, gk.Reason.STALE)
    assert runner.run(stale, x=[1.0]).tolist() == [21.0]
    group.capture()
    assert runner.run(runner.dispatch(batch=3), x=[1.0, 2.0, 3.0]).tolist() == [21.0, 22.0, 23.0]


# -- S6: parameters replaced -----------------------------------------------------------------------


def model(device: str) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval()
    return made.requires_grad_(False).to(device)


REPLACED = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]


@pytest.mark.parametrize("name", REPLACED)
def test_s6_a_replaced_parameter_is_named(device, name):
    """A graph goes on with the old weights (sglang#27140, vllm#48941)."""
    net = model(device)
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0))
    runner = group.runner(
        "r", lambda x: net(x), policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)), reads=[net]
    )
    group.capture()
    x = torch.arange(12.0).reshape(3, 4)
    before = runner.run(runner.dispatch(batch=3), x=x, clone=True)
    owner, attribute = net.get_submodule(name[0]), name[2:]
    old = getattr(owner, attribute)
    new = old * 2 + 1
    is_parameter = isinstance(old, torch.nn.Parameter)
    setattr(owner, attribute, torch.nn.Parameter(new, requires_grad=False) if is_parameter else new)
    with pytest.raises(gk.StaleGraphError, match=rf"runner 'r'.*: {name} was 0x"):
        group.check_addresses()
    # Bucket 2 hasn't run yet, and looks for itself.
    with pytest.raises(gk.StaleGraphError, match=rf"FULL bucket \[batch=2\]: {name} was 0x"):
        runner.run(runner.dispatch(batch=2), x=x[:2])
    group.invalidate()
    group.capture()
    after = runner.run(runner.dispatch(batch=3), x=x)
    torch.testing.assert_close(after, net(x.to(device)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(after, before)


def test_s6_weights_copied_in_place_are_no_move(device):
    """Copying into the old parameter is the remedy that needs no capture (vllm#48941)."""
    net = model(device)
    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 4))
    runner = group.runner("r", lambda x: net(x), policy=policy, reads=[net])
    group.capture()
    net[0].weight.copy_(torch.eye(4) * 3)
    x = torch.arange(12.0).reshape(3, 4)
    torch.testing.assert_close(
        runner.run(runner.dispatch(batch=3), x=x, clone=True), net(x.to(device))
    )


# -- S7: a sleeping server -------------------------------------------------------------------------


def test_s7_a_released_group_refuses_to_run_until_it_is_captured_again(device):
    """The cache was freed and made again while the server slept (vllm#55013)."""
    engine = Engine(device)
    group = gk.GraphGroup(device)
    buf = group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    runner = group.runner(
        "r",
        lambda x: x + engine.cache.sum(),
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        reads=[lambda: engine.cache],
    )
    group.capture()
    graphed = runner.dispatch(batch=3)
    assert runner.run(graphed, x=[1.0, 2.0, 3.0]).tolist() == [5.0, 6.0, 7.0]
    group.release()
    assert group.state is gk.State.SUSPENDED
    assert not buf.x.is_allocated
    engine.replace()
    suspended = runner.dispatch(batch=3)
    assert (suspended.mode, suspended.reason) == (gk.EAGER, gk.Reason.SUSPENDED)
    for dispatch in (suspended, graphed):
        with pytest.raises(gk.StateError, match=r"runner 'r': .*released; call capture\(\)"):
            runner.run(dispatch, x=[1.0, 2.0, 3.0])
    assert not buf.x.is_allocated
    group.capture()
    again = runner.dispatch(batch=3)
    assert again.mode is gk.FULL
    assert runner.run(again, x=[1.0, 2.0, 3.0]).tolist() == [21.0, 22.0, 23.0]


# -- S8: a wrapper of each bucket ------------------------------------------------------------------


class Wrapper:
    """Plans for one batch size from host arrays, as FlashInfer's wrappers do."""

    def __init__(self, rows: int, device: str) -> None:
        self.rows = rows
        self.plans = 0
        self.factors = torch.zeros(rows, dtype=torch.int64, device=device)

    def plan(self, factors: np.ndarray[Any, Any]) -> None:
        if len(factors) != self.rows:
            raise ValueError(f"planned for {self.rows} rows, got {len(factors)}")
        self.plans += 1
        self.factors.copy_(torch.from_numpy(factors + 1))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors


def test_s8_a_wrapper_lives_with_the_graph_of_its_bucket(device):
    """Kept in step.state: one a bucket, planned before each launch, new at a recapture (CASES S8)."""
    made: list[Wrapper] = []
    used: list[Wrapper] = []

    def prepare(step):
        if "wrapper" not in step.state:
            step.state["wrapper"] = Wrapper(step.views["x"].shape[0], device)
            made.append(step.state["wrapper"])
        wrapper = step.state["wrapper"]
        wrapper.plan(step.host["factor"])
        used.append(wrapper)
        return {"attention": wrapper}

    group = gk.GraphGroup(device, checked=True)
    spec = gk.BufferSpec((BATCH,), torch.int64, pad=0)
    group.buffers.declare(x=spec, factor=spec)
    runner = group.runner(
        "r",
        lambda x, attention: attention.run(x),
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 8)),
        inputs={"factor": gk.Fed("factor")},
        prepare=prepare,
    )

    def run(rows: int) -> Wrapper:
        x = np.arange(rows)
        out = runner.run(runner.dispatch(batch=rows), x=x, factor=x)
        assert out.tolist() == (x * (x + 1)).tolist()
        return used[-1]

    group.capture()
    first = {rows: run(rows) for rows in (2, 5, 0, 8, 1)}
    assert [first[rows].rows for rows in (0, 1, 2, 5, 8)] == [2, 2, 2, 8, 8]
    assert first[5] is first[8]
    assert first[1] is first[2] is first[0]
    group.invalidate()
    group.capture()
    assert run(5) is not first[5]
    assert run(1) is not first[1]
    captured = len(made)
    # Above every bucket: planned for the real sizes, anew in each run.
    eager = [run(11), run(11), run(13)]
    assert [wrapper.rows for wrapper in eager] == [11, 11, 13]
    assert [wrapper.plans for wrapper in eager] == [1, 1, 1]
    assert len(made) == captured + 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        ({"max": 4}, {"max": 5}),
        ({"max": 4}, {"most": 4}),
        ([1, 2], [1, 2, 3]),
        (np.arange(3), np.arange(1, 4)),
    ],
    ids=str,
)
def test_s1_what_prepare_returns_at_a_replay_is_compared_in_checked_mode(device, first, second):
    """What prepare made at the capture is baked, in whatever nesting (rule 5)."""
    returned = [first]
    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))

    def prepare(step):
        return {"meta": {"views": [step.views["x"]], "value": returned[0]}}

    runner = group.runner(
        "r",
        lambda x, meta: meta["views"][0] + 1,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        prepare=prepare,
    )
    group.capture()
    for value in (first, type(first)(first) if not isinstance(first, np.ndarray) else first.copy()):
        returned[0] = value
        assert runner.run(runner.dispatch(batch=3), x=[1, 2, 3]).tolist() == [2, 3, 4]
    returned[0] = second
    with pytest.raises(
        gk.StateError, match=r"bucket \[batch=4\]: prepare returned meta=.* is baked"
    ):
        runner.run(runner.dispatch(batch=3), x=[1, 2, 3])
    runner.run(runner.dispatch(batch=9), x=list(range(9)))  # EAGER bakes nothing
