"""Lazy capture: graphs at their first use, a bounded number of them, given up by generations."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.backends.recording import RecordingBackend
from tests.properties.bounds import examples

BATCH = gk.Dim("batch", 16)
X = gk.BufferSpec((BATCH, 2), torch.float32, pad=0)
OUT = gk.Output((BATCH, 2), torch.float32)
SIZES = (1, 2, 4, 8, 16)


def group_of(device: Any, **options: Any) -> gk.GraphGroup:
    group = gk.GraphGroup(device, **{"lazy": True, **options})
    group.buffers.declare(x=X)
    return group


def runner_of(group: gk.GraphGroup, name: str = "r", **options: Any) -> gk.GraphRunner:
    given = {"policy": gk.Policy.full(gk.Buckets.of(BATCH, *SIZES)), "outputs": OUT, **options}
    return group.runner(name, given.pop("fn", lambda x: x * 2), **given)


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.arange(float(2 * count)).reshape(count, 2) + seed


def run(runner: gk.GraphRunner, count: int, seed: int = 0) -> list[Any]:
    x = values(count, seed)
    out = runner.run(runner.dispatch(batch=count), x=x)
    assert out.tolist() == (x * 2).tolist()
    return [entry.bucket["batch"] for entry in runner.entries if entry.is_captured]


# -- declaring -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_graphs": 0}, "max_graphs must be at least 1, got 0"),
        (
            {"lazy": 64},
            "lazy must be True or False, got 64; max_graphs= bounds the number of graphs",
        ),
        ({"max_graphs": True}, "max_graphs must be an int, got True"),
        ({"max_graphs": 2.5}, "max_graphs must be an int, got 2.5"),
        (
            {"lazy": False, "max_graphs": 3},
            "max_graphs= bounds what is captured at first use; give",
        ),
        (
            {"pool": object()},
            "lazy=True needs pools of its own, which give their memory back; leave",
        ),
        ({"memory_budget": "1GiB"}, "memory_budget= is for graphs that are captured ahead; with"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        group_of("cpu", **options)


def test_a_budget_can_not_be_set_later():
    group = group_of("cpu")
    with pytest.raises(gk.SpecError, match="memory_budget= is for graphs that are captured ahead"):
        group.memory_budget = 5
    group.memory_budget = None


# -- first use -------------------------------------------------------------------------------------


def test_a_graph_is_captured_when_a_run_needs_it(device):
    group = group_of(device)
    calls: list[int] = []

    def fn(x):
        calls.append(x.shape[0])
        return x * 2

    runner = runner_of(group, fn=fn)
    assert runner.dispatch(batch=3).reason is gk.Reason.NOT_CAPTURED
    report = group.capture(progress=False)
    assert not calls  # what is declared needs no warm-up
    assert group.state is gk.State.CAPTURED
    assert "runner r: 0 of 5 graphs captured" in str(report)
    assert "captured at first use, at most 64 graphs at a time; 0 were given up" in str(report)
    dispatch = runner.dispatch(batch=3)
    assert (dispatch.mode, dispatch.bucket["batch"], dispatch.reason) == (gk.FULL, 4, None)
    assert run(runner, 3) == [4]
    assert set(calls) == {4}
    count = len(calls)
    for size in (1, 2, 3, 4):
        run(runner, size, seed=size)
    assert run(runner, 0) == [1, 2, 4]
    assert calls.count(4) == count
    replays = {row.bucket: row.replays for row in group.report().runners[0].graphs}
    assert replays == {"batch=1": 2, "batch=2": 1, "batch=4": 3, "batch=8": 0, "batch=16": 0}
    assert group.report().capture_seconds > 0
    assert runner.eager_runs == 0


def test_before_the_capture_runs_are_eager(device):
    """An engine's profile pass must not capture: the caches aren't there yet."""
    group = group_of(device)
    runner = runner_of(group)
    assert run(runner, 3) == []
    assert runner.eager_runs == 1


def test_outputs_are_inferred_from_all_buckets(device):
    group = group_of(device)
    calls: list[int] = []

    def fn(x):
        calls.append(x.shape[0])
        return x * 2

    runner = runner_of(group, fn=fn, outputs=None)
    group.capture(progress=False)
    assert sorted(calls) == list(SIZES)
    assert not [entry for entry in runner.entries if entry.is_captured]
    assert run(runner, 3) == [4]
    assert run(runner, 16) == [4, 16]
    # Another capture has nothing left to see.
    before = len(calls)
    group.capture(progress=False)
    assert len(calls) == before


def test_the_step_after_it_is_as_ever(device):
    group = group_of(device)
    runner = runner_of(group)
    group.capture(progress=False)
    run(runner, 3)
    plan = runner._plans[runner.dispatch(batch=3)]
    run(runner, 3)
    assert runner._plans[runner.dispatch(batch=3)] is plan


def test_prepare_and_its_state(device):
    phases: list[str] = []

    def prepare(step: gk.Step) -> dict[str, torch.Tensor]:
        phases.append(step.phase.name)
        return {"twice": step.state.setdefault("twice", torch.full((), 2.0, device=device))}

    group = group_of(device)
    runner = runner_of(group, fn=lambda x, twice: x * twice, prepare=prepare)
    group.capture(progress=False)
    run(runner, 3)
    captures = group.backend.recordings
    assert phases == ["WARMUP", *["CAPTURE"] * captures, "REPLAY"]


def test_piecewise_graphs_too(device):
    seen: list[int] = []

    @gk.eager_break(rows="real")
    def count(y):
        seen.append(y.shape[0])
        return y

    def fn(x):
        return count(x + 1) * 2 - 2

    group = group_of(device)
    policy = gk.Policy([gk.Route(gk.PIECEWISE, gk.Buckets.of(BATCH, *SIZES))])
    runner = runner_of(group, fn=fn, policy=policy)
    group.capture(progress=False)
    assert sorted(seen) == list(SIZES)  # their breaks' tensors are inferred
    for size in (3, 5, 3):
        run(runner, size)
        assert seen[-1] == size


def test_stage_captures_and_the_run_replays(device):
    group = group_of(device)
    runner = runner_of(group)
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    with runner.stage(dispatch) as stage:
        stage.host["x"][:] = 7
    assert [entry.bucket["batch"] for entry in runner.entries if entry.is_captured] == [4]
    assert runner.run(dispatch).tolist() == [[14, 14]] * 3
    with runner.stage(dispatch) as stage:
        with pytest.raises(gk.StateError, match=r"a stage\(\) block of it is open"):
            runner.run(runner.dispatch(batch=16), x=values(16))
        stage.host["x"][:] = 8
    assert runner.run(dispatch).tolist() == [[16, 16]] * 3


def test_checked_mode(device):
    group = group_of(device, checked=True)
    runner = runner_of(group)
    group.capture(progress=False)
    first = runner.run(runner.dispatch(batch=3), x=values(3))
    second = runner.run(runner.dispatch(batch=5), x=values(5))
    assert second.tolist() == (values(5) * 2).tolist()
    with pytest.raises(gk.StaleOutputError):
        first.tolist()


def test_a_wrapped_function(device):
    group = gk.GraphGroup(device, lazy=True)
    fast = group.wrap(lambda x: x + 1, x=X)
    group.capture(progress=False)
    for size in range(17):
        assert fast(values(size)).tolist() == (values(size) + 1).tolist()


# -- what a capture in the middle must leave alone -------------------------------------------------


def test_what_others_wrote_is_still_there(device):
    """A capture writes examples to the buffers that a producer has filled for this very run."""
    group = group_of(device)
    hidden = group.buffers.declare(hidden=gk.BufferSpec((BATCH, 2), torch.float32, pad=0)).hidden
    producer = runner_of(group, "producer", outputs=hidden)
    consumer = runner_of(
        group, "consumer", fn=lambda hidden: hidden + 1, inputs={"hidden": gk.Resident("hidden")}
    )
    group.capture(progress=False)
    for size in (3, 5, 3, 16, 1):
        x = values(size, seed=size)
        producer.run(producer.dispatch(batch=size), x=x)
        out = consumer.run(consumer.dispatch(batch=size))
        assert out.tolist() == (x * 2 + 1).tolist()
    assert [row.captured for row in group.report().runners[1].graphs] == [True, False] + [True] * 3


def test_earlier_results_of_the_same_runner_are_kept_until_its_replay(device):
    group = group_of(device)
    runner = runner_of(group)
    other = runner_of(group, "other", fn=lambda x: x * 3)
    group.capture(progress=False)
    out = runner.run(runner.dispatch(batch=16), x=values(16))
    other.run(other.dispatch(batch=3), x=values(3))
    assert out.tolist() == (values(16) * 2).tolist()


def test_declared_state_and_random_numbers(device):
    state = torch.zeros(1, device=device)

    def fn(x):
        state.add_(1)
        return x * 2 + torch.rand((), device=device) * 0

    group = group_of(device)
    runner = runner_of(group, fn=fn, mutates=[state])
    group.capture(progress=False)
    torch.manual_seed(1)
    before = torch.rand(1, device=device)
    torch.manual_seed(1)
    run(runner, 3)
    assert state.tolist() == [1]
    torch.manual_seed(1)
    assert torch.rand(1, device=device).tolist() == before.tolist()


def test_adopted_state_that_is_a_buffer(device):
    """A cache that is a buffer, and in `mutates` too."""
    cache = torch.zeros(64, 2, device=device)
    group = group_of(device)
    group.buffers.declare(cache=gk.BufferSpec((64, 2), torch.float32, adopt=cache))

    def fn(x, cache):
        cache[1:2] += x.sum(0)
        return x * 2

    runner = runner_of(
        group, fn=fn, inputs={"cache": gk.Resident("cache")}, mutates=[gk.Scratch(cache, rows=[1])]
    )
    group.capture(progress=False)
    run(runner, 2)
    assert cache[1].tolist() == values(2).sum(0).tolist()
    assert not cache[2:].any()


# -- the bound -------------------------------------------------------------------------------------


def test_the_least_recently_used_go_together(device):
    group = group_of(device, max_graphs=4)
    runner = runner_of(group, policy=gk.Policy.full(gk.Buckets.of(BATCH, *range(1, 17))))
    group.capture(progress=False)
    for size in (1, 2, 3, 4):
        assert run(runner, size) == list(range(1, size + 1))
    run(runner, 1)  # so that 2 is the oldest
    assert run(runner, 5) == [1, 3, 4, 5]
    run(runner, 3)
    assert run(runner, 6) == [1, 3, 5, 6]
    assert group.report().evictions == 2
    assert "at most 4 graphs at a time; 2 were given up for others" in str(group.report())
    # And back again.
    assert run(runner, 2, seed=3) == [2, 3, 5, 6]
    dispatch = runner.dispatch(batch=2)
    assert dispatch.mode is gk.FULL
    assert dispatch.reason is None


def test_whole_generations(device):
    group = group_of(device, max_graphs=8)
    runner = runner_of(group, policy=gk.Policy.full(gk.Buckets.of(BATCH, *range(1, 17))))
    group.capture(progress=False)
    for size in range(1, 9):
        run(runner, size)
    run(runner, 2)  # keeps 1 too, of the same generation
    assert run(runner, 9) == [1, 2, 5, 6, 7, 8, 9]
    assert len(group._capture.generations) == 4
    assert len({id(g.pool) for g in group._capture.generations}) == 4
    assert run(runner, 10) == [1, 2, 5, 6, 7, 8, 9, 10]
    assert run(runner, 11) == [1, 2, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 64])
def test_never_more_than_the_bound(device, bound):
    group = group_of(device, max_graphs=bound)
    runners = [runner_of(group, name) for name in ("a", "b")]
    group.capture(progress=False)
    order = [1, 16, 2, 8, 4, 1, 3, 16, 5, 9, 2, 1]
    for step, size in enumerate(order * 2):
        run(runners[step % 2], size, seed=step)
        live = sum(entry.is_captured for runner in runners for entry in runner.entries)
        assert live <= bound
        assert live == sum(len(g.graphs) for g in group._capture.generations)


def test_a_graph_that_was_dropped_alone_is_in_one_generation_afterwards(device):
    group = group_of(device, max_graphs=8)
    runner = runner_of(group)
    group.capture(progress=False)
    for size in (1, 2, 4):
        run(runner, size)
    entry = runner.entries[0]
    runner.drop_graph(entry, "on purpose")
    assert "not captured: FULL batch=1: on purpose" in str(group.report())
    group.capture(progress=False)
    assert run(runner, 1) == [1, 2, 4]
    assert [len(g.graphs) for g in group._capture.generations] == [1, 2]
    assert [entry in g.entries for g in group._capture.generations] == [False, True]


def test_an_old_dispatch_of_a_graph_that_went(device):
    group = group_of(device, max_graphs=1)
    runner = runner_of(group)
    group.capture(progress=False)
    old = runner.dispatch(batch=3)
    run(runner, 3)
    run(runner, 16)
    assert runner.run(old, x=values(3)).tolist() == (values(3) * 2).tolist()


def test_inputs_staged_for_a_graph_that_went(device):
    group = group_of(device, max_graphs=1)
    runner, other = runner_of(group), runner_of(group, "other")
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    with runner.stage(dispatch) as stage:
        stage.host["x"][:] = 7
    run(other, 3)
    with pytest.raises(
        gk.StateError, match=r"was given up for others after the inputs were staged"
    ):
        runner.run(dispatch)
    with runner.stage(dispatch) as stage:
        stage.host["x"][:] = 8
    assert runner.run(dispatch).tolist() == [[16, 16]] * 3


@pytest.mark.gpu
def test_memory_comes_back_with_a_generation():
    """Each bucket works in 64 MiB; at most four at a time."""
    group = gk.GraphGroup("cuda", lazy=True, max_graphs=4)
    group.buffers.declare(x=X)
    runner = runner_of(
        group,
        fn=lambda x: x + (x[:1, :1].expand(4096, 4096) + 1).sum() * 0,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, *range(1, 17))),
        outputs=OUT,
    )
    group.capture(progress=False)
    reserved = []
    for size in [*range(1, 17), *range(1, 17)]:
        runner.run(runner.dispatch(batch=size), x=values(size))
        torch.cuda.synchronize()
        reserved.append(group.report().memory.pool)
    assert max(reserved) <= 4 * (72 << 20)
    assert reserved[-1] <= reserved[4] + (16 << 20)


steps = st.one_of(
    st.tuples(st.just("produce"), st.integers(0, 16)),
    st.tuples(st.just("consume"), st.integers(0, 16)),
    st.tuples(st.sampled_from(["invalidate", "release", "fail", "mend"]), st.just(0)),
)


@given(st.lists(steps, min_size=5, max_size=25), st.integers(1, 5))
@examples(60)
def test_any_order_of_runs(order, bound):
    """Against plain Python: producer and consumer share a buffer, and graphs come, go and fail in between."""
    group = group_of("cpu", max_graphs=bound, on_error="skip")
    hidden = group.buffers.declare(hidden=gk.BufferSpec((BATCH, 2), torch.float32, pad=0)).hidden
    producer = runner_of(group, "producer", outputs=hidden)
    fn = Failing()
    fn.error = None
    consumer = runner_of(group, "consumer", fn=fn, inputs={"x": gk.Resident("hidden")})
    group.capture(progress=False)
    known: list[Any] = []
    for number, (what, size) in enumerate(order):
        if what == "fail":
            fn.error = KeyError("mine")
        elif what == "mend":
            fn.error = None
            group.capture(progress=False)
        elif what in ("invalidate", "release"):
            getattr(group, what)()
            known = []
            group.capture(progress=False)
        elif what == "produce":
            x = values(size, seed=number)
            producer.run(producer.dispatch(batch=size), x=x)
            known = (x * 2).tolist()
        else:
            # What is beyond the batch is padded, and so no longer known.
            known = known[:size]
            if fn.error is None or len(known) != 4:
                out = consumer.run(consumer.dispatch(batch=len(known)))
                assert out.tolist() == [[2 * a, 2 * b] for a, b in known]
        assert sum(len(g.graphs) for g in group._capture.generations) <= bound
    group.close()


# -- failures --------------------------------------------------------------------------------------


class Failing:
    """Fails for batches of 4 rows, until told otherwise."""

    def __init__(self) -> None:
        self.error: Exception | None = KeyError("mine")

    def __call__(self, x):
        if self.error is not None and x.shape[0] == 4:
            raise self.error
        return x * 2


def test_a_failure_falls_back_and_is_counted(device):
    fn = Failing()
    group = group_of(device, on_error="skip")
    runner = runner_of(group, fn=fn)
    group.capture(progress=False)
    # The batch itself is of 3 rows, which the function can do.
    x = values(3)
    assert runner.run(runner.dispatch(batch=3), x=x).tolist() == (x * 2).tolist()
    assert runner.eager_runs == 1
    counts = {(c.mode, c.reason): c.dispatches for c in runner.dispatcher.counts}
    assert counts == {(gk.EAGER, gk.Reason.NOT_CAPTURED): 1}
    assert "not captured: FULL batch=4: KeyError: 'mine'" in str(group.report())
    # The next one takes the next bucket.
    dispatch = runner.dispatch(batch=3)
    assert dispatch.bucket["batch"] == 8
    assert run(runner, 3) == [8]
    # Another capture lets it be tried again.
    fn.error = None
    group.capture(progress=False)
    assert run(runner, 3) == [4, 8]
    assert "not captured" not in str(group.report())


def test_a_failure_while_inputs_are_staged(device):
    group = group_of(device, on_error="skip")
    runner = runner_of(group, fn=Failing())
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    for value in (7, 8):
        with runner.stage(dispatch) as stage:
            assert stage.host["x"].shape == (3, 2)
            stage.host["x"][:] = value
        assert runner.run(dispatch).tolist() == [[2 * value] * 2] * 3
    assert runner.eager_runs == 2


def test_a_failure_is_raised_where_it_is_to_be(device):
    fn = Failing()
    group = group_of(device)
    runner = runner_of(group, fn=fn)
    group.capture(progress=False)
    with pytest.raises(KeyError, match="mine") as raised:
        runner.run(runner.dispatch(batch=3), x=values(3))
    assert raised.value is fn.error
    assert any("in runner 'r', FULL bucket [batch=4]" in note for note in raised.value.__notes__)
    assert run(runner, 3) == [8]
    assert run(runner, 1) == [1, 8]


def test_strict_runners_raise(device):
    group = group_of(device, on_error="skip")
    runner = runner_of(group, fn=Failing(), strict=True)
    group.capture(progress=False)
    with pytest.raises(
        gk.DispatchError, match=r"'r': strict, and the batch would fall back: EAGER"
    ):
        runner.run(runner.dispatch(batch=3), x=values(3))
    assert run(runner, 3) == [8]


def test_out_of_memory(device):
    fn = Failing()
    fn.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    group = group_of(device)
    runner = runner_of(group, fn=fn)
    group.capture(progress=False)
    with pytest.raises(gk.MemoryBudgetError, match=r"batch=4\]: the device's memory is too small"):
        runner.run(runner.dispatch(batch=3), x=values(3))
    assert run(runner, 3) == [8]


def test_an_undeclared_output_is_told_from_all_buckets(device):
    group = group_of(device, on_error="skip")
    runner = runner_of(
        group, fn=lambda x: {"y": x * 2, "z": x[:1] + 0}, outputs={"y": OUT}
    )  # fmt: skip
    group.capture(progress=False)
    out = runner.run(runner.dispatch(batch=3), x=values(3))
    assert out["y"].tolist() == (values(3) * 2).tolist()
    assert out["z"].tolist() == values(3)[:1].tolist()
    assert runner.eager_runs == 0


def test_a_warm_up_that_fails_is_not_dispatched_to(device):
    fn = Failing()
    group = group_of(device)
    runner = runner_of(group, fn=fn, outputs=None)
    with pytest.raises(KeyError, match="mine"):
        group.capture(progress=False)
    assert group.state is gk.State.CAPTURED
    assert runner.dispatch(batch=3).bucket["batch"] == 8
    assert run(runner, 3) == [8]
    fn.error = None
    group.capture(progress=False)
    assert run(runner, 3) == [4, 8]


def test_buffers_are_as_before_after_a_failure(device):
    group = group_of(device, on_error="skip")
    group.buffers.declare(kept=gk.BufferSpec((BATCH, 2), torch.float32, pad=0))
    fn = Failing()
    runner = runner_of(
        group,
        fn=lambda kept: fn(kept.add_(0)),
        inputs={"kept": gk.Resident("kept")},
    )
    group.capture(progress=False)
    group.buffers["kept"].tensor.copy_(values(16))
    out = runner.run(runner.dispatch(batch=3))
    assert out.tolist() == (values(3) * 2).tolist()
    assert group.buffers["kept"].tensor.tolist() == values(16).tolist()


def test_an_interrupt_leaves_it_to_the_next_run():
    class Interrupted(RecordingBackend):
        is_interrupted = True

        def begin_capture(self, **options: Any) -> Any:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return super().begin_capture(**options)

    backend = Interrupted("cpu")
    group = group_of(backend)
    runner = runner_of(group)
    group.capture(progress=False)
    with pytest.raises(KeyboardInterrupt):
        runner.run(runner.dispatch(batch=3), x=values(3))
    backend.is_interrupted = False
    assert run(runner, 3) == [4]


def test_not_inside_somebodys_capture(device):
    group = group_of(device)
    runner = runner_of(group)
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    x = values(3).to(device)
    with (
        gk.CaptureSession(device) as session,
        pytest.raises(gk.StateError, match="captured at its first use, and can't be while"),
    ):
        session.capture(lambda: runner.run(dispatch, x=x))
    assert run(runner, 3) == [4]


def test_warnings_are_kept_for_the_report():
    state = torch.zeros(1)

    def fn(x):
        state.add_(1)
        return x * 2

    group = group_of("cpu")
    runner = runner_of(group, fn=fn)
    group.capture(progress=False)
    with pytest.warns(gk.CaptureWarning, match="memory from outside that isn't declared"):
        run(runner, 3)
    assert any("isn't declared" in message for message in group.report().messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(runner, 3)


# -- life ------------------------------------------------------------------------------------------


def test_states(device):
    group = group_of(device)
    factor = torch.full((), 2.0, device=device)
    runner = runner_of(group, fn=lambda x: x * factor, reads=[factor])
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    run(runner, 3)
    group.invalidate()
    assert group.state is gk.State.STALE
    assert runner.dispatch(batch=3).reason is gk.Reason.STALE
    with pytest.raises(gk.StateError, match="dispatched to a graph that isn't there now"):
        runner.run(dispatch, x=values(3))
    assert run(runner, 3) == []
    group.capture(progress=False)
    assert run(runner, 3) == [4]
    group.release()
    assert group.state is gk.State.SUSPENDED
    with pytest.raises(gk.StateError, match="released"):
        runner.run(dispatch, x=values(3))
    assert group.report().memory.pool == 0
    group.capture(progress=False)
    assert run(runner, 16) == [16]
    group.close()
    with pytest.raises(gk.StateError, match="closed"):
        runner.run(dispatch, x=values(3))


def test_watched_memory_that_moves(device):
    module = torch.nn.Linear(2, 2, bias=False, device=device)
    group = group_of(device)
    runner = runner_of(group, fn=lambda x: module(x), reads=[module])
    group.capture(progress=False)
    runner.run(runner.dispatch(batch=3), x=values(3))
    group.check_addresses()
    module.weight = torch.nn.Parameter(torch.ones(2, 2, device=device))
    with pytest.raises(gk.StaleGraphError, match="weight"):
        group.check_addresses()
    group.invalidate()
    group.capture(progress=False)
    out = runner.run(runner.dispatch(batch=3), x=torch.ones(3, 2))
    assert out.tolist() == [[2, 2]] * 3


@pytest.mark.gpu
def test_from_another_stream():
    """The capture waits for the group's last launch, whichever stream that was on."""
    group = group_of("cuda")
    hidden = group.buffers.declare(hidden=gk.BufferSpec((BATCH, 2), torch.float32, pad=0)).hidden
    producer = runner_of(
        group,
        "producer",
        fn=lambda x: (torch.cuda._sleep(20_000_000), x * 2)[1],
        outputs=hidden,
    )
    consumer = runner_of(
        group, "consumer", fn=lambda hidden: hidden + 1, inputs={"hidden": gk.Resident("hidden")}
    )
    group.capture(progress=False)
    side = torch.cuda.Stream()
    for size in (3, 9):
        x = values(size, seed=size)
        producer.run(producer.dispatch(batch=size), x=x)
        with torch.cuda.stream(side):
            out = consumer.run(consumer.dispatch(batch=size), clone=True).cpu()
        assert out.tolist() == (x * 2 + 1).tolist()


def test_outputs_that_are_declared_in_part_are_inferred_from_all_buckets():
    group = gk.GraphGroup("cpu", lazy=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 2), torch.float32, pad=0))
    runner = group.runner(
        "r",
        lambda x: {"a": x * 2, "b": x.sum(1)},
        policy=gk.Policy.full(gk.Buckets.powers(BATCH)),
        outputs={"a": gk.Output((BATCH, 2), torch.float32)},
    )
    group.capture(progress=False)
    for size in (4, 1, 3):
        out = runner.run(runner.dispatch(batch=size), x=torch.ones(size, 2))
        assert out["b"].tolist() == [2.0] * size
    group.close()


def test_other_buckets_that_are_seen_at_a_first_use_leave_what_was_written(device):
    """Their examples fill whole buffers; and one that fails is said where it is used."""
    group = group_of(device)
    held = group.buffers.declare(held=gk.BufferSpec((BATCH, 2), torch.float32, pad=gk.keep)).held

    def fn(x, held):
        if x.shape[0] == 8:
            raise KeyError("mine")
        return {"y": x + held, "z": x.sum(1)}

    runner = runner_of(
        group, fn=fn, inputs={"held": gk.Resident("held")}, outputs={"y": OUT}
    )  # fmt: skip
    group.capture(progress=False)
    held.tensor.copy_(values(16))
    out = runner.run(runner.dispatch(batch=2), x=values(2), clone=True)
    assert out["y"].tolist() == (values(2) * 2).tolist()
    assert out["z"].tolist() == values(2).sum(1).tolist()
    assert held.tensor.tolist() == values(16).tolist()
    with pytest.raises(KeyError, match="mine"):
        runner.run(runner.dispatch(batch=7), x=values(7))
