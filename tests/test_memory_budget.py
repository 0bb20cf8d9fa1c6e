"""The memory budget: how it is written, what is admitted, and what the report says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.backends.recording import RecordingBackend
from graphkit.group.admission import Admission, Applicant
from graphkit.group.memory import bytes_text, out_of_memory, parse_bytes
from tests.properties.bounds import examples

BATCH = gk.Dim("batch", 16)
WIDTH = 256
SIZES = (1, 2, 4, 8, 16)

# -- amounts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("3KiB", 3072),
        ("7B", 7),
        ("1TiB", 1 << 40),
        ("0.5KiB", 512),
        (1, 1),
        (1 << 70, 1 << 70),
    ],
)
def test_amounts(value, expected):
    assert parse_bytes(value, "memory_budget") == expected
    assert gk.GraphGroup("cpu", memory_budget=value).memory_budget == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "memory_budget must be bytes as an int, or text as '2GiB', '512MiB' or '1.5GB', got '2'"),
        ("2gib", "got '2gib'; the units are B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"),
        ("2G", "got '2G'"),
        ("-1GiB", "got '-1GiB'"),
        ("1e3MiB", "got '1e3MiB'"),
        (" 1MiB", "got ' 1MiB'"),
        ("1MiB\n", r"got '1MiB\n'"),
        ("1,5GB", "got '1,5GB'"),
        ("٣GiB", "got '٣GiB'"),
        ("9" * 5000 + "B", "memory_budget must be bytes"),
        ("", "got ''"),
        ("0GiB", "memory_budget must be at least 1, got 0"),
        ("0.5B", "memory_budget must be at least 1, got 0"),
        (0, "memory_budget must be at least 1, got 0"),
        (-1, "memory_budget must be at least 1, got -1"),
        (True, "memory_budget must be an int, got True"),
        (1.5, "memory_budget must be an int, got 1.5"),
        ([1], "memory_budget must be an int, got [1]"),
    ],
)  # fmt: skip
def test_what_is_no_amount(value, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        gk.GraphGroup("cpu", memory_budget=value)
    group = gk.GraphGroup("cpu", memory_budget=5)
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        group.memory_budget = value
    assert group.memory_budget == 5


def test_amounts_for_readers():
    assert [bytes_text(n) for n in (0, 1023, 1024, 3 << 19, 5 << 30, 7 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB", "7168.0 GiB",
    ]  # fmt: skip


def test_a_pool_of_the_callers_is_refused():
    with pytest.raises(gk.SpecError, match="memory_budget= needs pools of its own"):
        gk.GraphGroup("cpu", memory_budget="1GiB", pool=object())
    group = gk.GraphGroup("cpu", pool=object())
    with pytest.raises(gk.SpecError, match="memory_budget= needs pools of its own"):
        group.memory_budget = "1GiB"


# -- choosing --------------------------------------------------------------------------------------


def applicants(*needs: int, **other: Any) -> list[Applicant[int]]:
    options = {"kept": 0, "worth": 1.0, "rank": 0, **other}
    return [Applicant(number, need, **options) for number, need in enumerate(needs)]


def items(chosen: list[Applicant[Any]]) -> list[Any]:
    return [applicant.item for applicant in chosen]


def test_the_small_ones_first():
    admission = Admission()
    assert items(admission.choose(applicants(8, 4, 2, 1), 5)) == [3, 2, 1]
    assert items(admission.choose(applicants(8, 4, 2, 1), 8)) == [3, 2, 1, 0]
    assert admission.choose(applicants(8, 4), 3) == []
    assert items(admission.choose(applicants(0, 0), 0)) == [0, 1]


def test_worth_a_byte_decides_and_then_the_mode():
    rare, often = applicants(1, 2, worth=1.0)[0], applicants(1, 2, worth=50.0)[1]
    assert items(Admission().choose([rare, often], 100)) == [1, 0]
    piecewise, full = Applicant("p", 4, 0, 1.0, 1), Applicant("f", 4, 0, 1.0, 0)
    assert items(Admission().choose([piecewise, full], 4)) == ["f", "p"]


def test_what_stays_in_the_pool_adds_up():
    chosen = Admission().choose(applicants(4, 4, 4, kept=2), 8)
    assert items(chosen) == [0, 1]
    assert Admission().expected(chosen) == 8


def test_what_captures_took_is_learned():
    admission = Admission()
    four = applicants(4, 4, 4, 4)
    assert len(admission.choose(four, 10)) == 4
    admission.learn(four[:2], pool=5, driver_first=3, driver=4)
    assert (admission.surplus, admission.driver_first, admission.driver_each) == (1, 3, 1.0)
    assert [admission.driver(n) for n in range(4)] == [0, 3, 4, 5]
    assert len(admission.choose(four, 10)) == 3
    assert admission.expected(four[:2]) == 9
    assert admission.expected([]) == 0
    # One graph doesn't tell what the driver needs once from what it needs for each.
    admission.learn(four[:1], pool=4, driver_first=6, driver=6)
    assert (admission.surplus, admission.driver_first, admission.driver_each) == (1, 6, 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(0, 3)), max_size=12),
    st.integers(0, 120),
    st.integers(0, 10),
    st.floats(0, 5),
)
@examples(200)
def test_choices_fit_and_nothing_that_fits_is_left_out(rows, room, surplus, driver):
    admission = Admission()
    admission.surplus, admission.driver_first, admission.driver_each = surplus, 2, driver
    everyone = [Applicant(i, n, k, float(w), 0) for i, (n, k, w) in enumerate(rows)]
    chosen = admission.choose(everyone, room)
    assert admission.expected(chosen) <= room
    assert [a.value for a in chosen] == sorted(a.value for a in chosen)
    for other in everyone:
        if other not in chosen:
            assert admission.expected([*chosen, other]) > room


def test_a_dispatcher_says_why_a_graph_is_missing():
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 4, 8))
    dispatcher = gk.Dispatcher(policy, captured=())
    (mode, four), (_, eight) = dispatcher.graphs
    dispatcher.note_missing(mode, four, gk.Reason.OVER_BUDGET)
    assert dispatcher.dispatch(batch=3).reason is gk.Reason.OVER_BUDGET
    assert dispatcher.dispatch(batch=5).reason is gk.Reason.NOT_CAPTURED
    dispatcher.mark_captured(mode, eight)
    assert dispatcher.dispatch(batch=3).bucket == eight
    dispatcher.mark_captured(mode, four)
    answer = dispatcher.dispatch(batch=3)
    dispatcher.mark_captured(mode, four)
    assert dispatcher.dispatch(batch=3) is answer  # nothing has changed
    dispatcher.clear_captured()
    dispatcher.note_missing(mode, eight, gk.Reason.OVER_BUDGET)
    assert dispatcher.dispatch(batch=3).reason is gk.Reason.NOT_CAPTURED
    dispatcher.mark_captured(mode, eight)
    dispatcher.forget(mode, eight)
    assert dispatcher.dispatch(batch=5).reason is gk.Reason.NOT_CAPTURED
    with pytest.raises(gk.SpecError, match="the reason can be OVER_BUDGET or NOT_CAPTURED, got"):
        dispatcher.note_missing(mode, four, gk.Reason.CALLER)
    with pytest.raises(gk.BucketError, match="is no graph of the policy"):
        dispatcher.note_missing(gk.PIECEWISE, four, gk.Reason.OVER_BUDGET)


def test_an_answer_taken_back_is_counted_as_what_it_became():
    dispatcher = gk.Dispatcher(gk.Policy.full(gk.Buckets.of(BATCH, 4, 8)))
    first, second = dispatcher.dispatch(batch=3), dispatcher.dispatch(batch=3)
    assert first is second
    instead = dispatcher.fall_back(first, gk.Reason.NOT_CAPTURED)
    assert (instead.mode, instead.bucket, instead.is_fallback) == (gk.EAGER, None, True)
    assert (dict(instead.sizes), dict(instead.padding)) == ({"batch": 3}, {"batch": 0})
    counts = {count.mode: (count.dispatches, count.rows["batch"]) for count in dispatcher.counts}
    assert counts == {gk.FULL: (1, 3), gk.EAGER: (1, 3)}
    dispatcher.fall_back(first, gk.Reason.NOT_CAPTURED)
    # One more than there were answers, as of a dispatch that ran twice.
    dispatcher.fall_back(first, gk.Reason.NOT_CAPTURED)
    assert {count.mode: count.dispatches for count in dispatcher.counts} == {gk.EAGER: 3}


# -- capturing -------------------------------------------------------------------------------------


def wide(x: torch.Tensor) -> torch.Tensor:
    """Takes 16 times its input's memory."""
    y = x.repeat(1, 8)
    return (y * 2).sum(1)


def group_of(device: Any, budget: Any, fn: Any = wide, **options: Any) -> Any:
    group = gk.GraphGroup(device, memory_budget=budget, **options)
    group.buffers.declare(x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, *SIZES))
    return group, group.runner("r", fn, policy=policy)


def captured(runner: gk.GraphRunner) -> list[int]:
    return sorted(bucket["batch"] for _, bucket in runner.dispatcher.captured)


def free_use(device: Any, **options: Any) -> Any:
    """What the group takes without a budget."""
    group, _ = group_of(device, None, **options)
    use = group.capture(progress=False).memory
    group.close()
    return use


def test_without_a_bound_the_truth_is_reported(device):
    group, _ = group_of(device, None)
    report = group.capture(progress=False)
    use = report.memory
    assert use.buffers == 16 * WIDTH * 4
    assert use.outputs == 16 * 4
    assert use.staging >= use.buffers
    assert use.pool >= 2 * 8 * use.buffers
    assert use.static == use.buffers + use.staging + use.outputs
    assert use.total == use.static + use.pool + use.driver
    assert report.memory_budget is None
    assert f"pools {bytes_text(use.pool)}, driver" in str(report)
    assert f"on the device in all {bytes_text(use.total)}\n" in str(report)
    group.release()
    assert group.report().memory.pool == group.report().memory.driver == 0


def test_the_small_buckets_are_captured_until_it_is_spent():
    use = free_use("cpu")
    budget = use.static + use.pool // 3
    group, runner = group_of("cpu", budget)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2, 4]
    assert report.memory.total <= budget
    dispatch = runner.dispatch(batch=16)
    assert dispatch.mode is gk.EAGER
    assert dispatch.reason is gk.Reason.OVER_BUDGET
    assert dispatch.is_fallback
    assert "doesn't fit the group's memory_budget" in str(dispatch)
    assert runner.dispatch(batch=3).mode is gk.FULL
    text = str(report)
    assert f"of a memory_budget of {bytes_text(budget)}" in text
    assert (
        f"not captured: FULL batch=8; FULL batch=16: it doesn't fit the memory_budget of "
        f"{bytes_text(budget)}"
    ) in text
    for size in (3, 16):
        x = torch.randn(size, WIDTH)
        out = runner.run(runner.dispatch(batch=size), x=x)
        assert torch.allclose(out, wide(x), rtol=1e-4, atol=1e-3)


def test_a_strict_runner_says_so():
    use = free_use("cpu")
    group = gk.GraphGroup("cpu", memory_budget=use.static + use.pool // 3)
    group.buffers.declare(x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, *SIZES))
    runner = group.runner("r", wide, policy=policy, strict=True)
    group.capture(progress=False)
    with pytest.raises(gk.DispatchError, match="OVER_BUDGET, the bucket of the better mode"):
        runner.dispatch(batch=16)


def test_raising_it_goes_on_with_the_missing_ones(device):
    group, runner = group_of(device, None)
    use = group.capture(progress=False).memory
    group.release()
    group.memory_budget = use.static + 1
    group.capture(progress=False)
    assert captured(runner) == []
    assert group.state is gk.State.NEW
    # On CUDA the smaller ones have a pool of their own by now.
    group.memory_budget = "1GiB"
    group.capture(progress=False)
    assert captured(runner) == list(SIZES)
    assert runner.dispatch(batch=16).reason is None
    assert not [row for row in group.report().runners[0].graphs if row.failure]
    x = torch.randn(9, WIDTH, device=group.device)
    out = runner.run(runner.dispatch(batch=9), x=x)
    assert torch.allclose(out, wide(x), rtol=1e-4, atol=1e-3)


def test_in_two_steps():
    use = free_use("cpu")
    group, runner = group_of("cpu", use.static + use.pool // 3)
    group.capture(progress=False)
    kept = {entry: entry.launch for entry in runner.entries if entry.is_captured}
    group.capture(progress=False)
    assert captured(runner) == [1, 2, 4]
    # The next one's pool is another, and what there is already counts.
    group.memory_budget = use.static + int(0.6 * use.pool)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2, 4]
    assert report.memory.total <= group.memory_budget
    group.memory_budget = use.total * 2
    group.capture(progress=False)
    assert captured(runner) == list(SIZES)
    assert all(entry.launch is launch for entry, launch in kept.items())
    group.memory_budget = None
    assert group.memory_budget is None


def test_lowering_it_gives_nothing_back_until_a_release():
    use = free_use("cpu")
    group, runner = group_of("cpu", use.total * 2)
    group.capture(progress=False)
    group.memory_budget = use.static + use.pool // 3
    group.capture(progress=False)
    assert captured(runner) == list(SIZES)
    group.release()
    group.capture(progress=False)
    assert captured(runner) == [1, 2, 4]


def test_worth_is_the_callers_to_say():
    use = free_use("cpu")
    group, runner = group_of("cpu", use.static + use.pool // 3)
    group.capture(progress=False, worth=lambda mode, bucket: 100.0 if bucket["batch"] == 4 else 0)
    # Whatever needs no more than that one is free.
    assert captured(runner) == [1, 2, 4]
    group, runner = group_of("cpu", use.total * 2)
    for bad in (None, "many", True, -1, float("nan")):
        with pytest.raises(gk.SpecError, match="worth= must return a number of at least 0, got"):
            group.capture(progress=False, worth=lambda mode, bucket, bad=bad: bad)


def test_static_memory_alone_is_too_much():
    group, runner = group_of("cpu", 1000, on_error="skip")
    with pytest.raises(gk.MemoryBudgetError) as raised:
        group.capture(progress=False)
    assert re.search(
        r"static memory takes 32\.\d KiB \(buffers 16\.0 KiB, staging 16\.\d KiB, outputs 0 B\), and memory_budget "
        r"is 1000 B, before any graph: raise it, lower the dims' maxima, or adopt= memory that there is anyway",
        str(raised.value),
    )
    assert raised.value.free == 1000
    assert not group.buffers["x"].is_allocated
    group.memory_budget = "1GiB"
    group.capture(progress=False)
    assert captured(runner) == list(SIZES)


def test_outputs_that_were_inferred_count_too():
    use = free_use("cpu")
    group, runner = group_of("cpu", use.static - 1)
    with pytest.raises(gk.MemoryBudgetError, match="outputs 64 B"):
        group.capture(progress=False)
    assert group.state is gk.State.NEW
    assert captured(runner) == []
    assert runner.run(runner.dispatch(batch=1), x=torch.ones(1, WIDTH)).tolist() == [4096.0]


class Costly(RecordingBackend):
    """A driver that takes memory for each graph, and a pool that takes more than its graphs need."""

    def __init__(self, each: int, surplus: int = 0) -> None:
        super().__init__("cpu")
        self.each, self.surplus, self.taken, self.begun = each, surplus, 0, 0

    def begin_capture(self, **options: Any) -> Any:
        self.taken += self.each
        self.begun += 1
        return super().begin_capture(**options)

    def memory_outside(self) -> int:
        return self.taken

    def pool_bytes(self, pool: Any) -> int:
        held = super().pool_bytes(pool)
        return held + self.surplus if held else 0


def test_what_the_driver_takes_counts():
    use = free_use("cpu")
    # Each bucket is recorded twice.
    backend = Costly(each=500_000)
    budget = use.static + use.pool + 2_500_000
    group, runner = group_of(backend, budget)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2]
    assert report.memory.driver == 2_000_000
    assert report.memory.total <= budget
    assert runner.dispatch(batch=4).reason is gk.Reason.OVER_BUDGET
    # A pass that ran over with three graphs, and the one that fits.
    assert backend.begun == 2 * (3 + 2)


def test_what_the_driver_needs_once_is_not_taken_for_each_graph():
    """The first pass runs over at its first graph, in which the driver has taken much."""
    use = free_use("cpu")
    once = 1_000_000

    class Once(Costly):
        def begin_capture(self, **options: Any) -> Any:
            self.each = 1000 if self.begun else once
            return super().begin_capture(**options)

    backend = Once(each=0, surplus=1)
    group, runner = group_of(backend, use.static + use.pool + once)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2, 4, 8]
    assert backend.begun == 2 * (1 + 4)
    assert once <= report.memory.driver <= once + 3 * 2 * 1000
    assert report.memory.total <= group.memory_budget


@pytest.mark.parametrize("gives_back", [False, True])
def test_what_the_driver_keeps_of_a_pass_that_was_given_up(gives_back):
    """It uses that again, so that the second pass takes no more; it is counted all the same."""
    use = free_use("cpu")

    class Reusing(Costly):
        used = 0

        def begin_capture(self, **options: Any) -> Any:
            self.used += self.each
            self.taken = max(self.taken, self.used)
            self.begun += 1
            return RecordingBackend.begin_capture(self, **options)

        def empty_cache(self) -> None:  # what was given up, is now
            self.used = 0
            self.taken = 0 if gives_back else self.taken

    group, runner = group_of(Reusing(each=500_000), use.static + use.pool + 2_500_000)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2]
    assert report.memory.driver == 2_000_000


def test_what_a_pool_takes_beyond_its_graphs_needs_counts():
    use = free_use("cpu")
    backend = Costly(each=0, surplus=use.pool // 4)
    budget = use.static + use.pool + 8
    group, runner = group_of(backend, budget)
    report = group.capture(progress=False)
    assert captured(runner) == [1, 2, 4, 8]
    assert report.memory.total <= budget


def test_a_failure_is_one_and_no_more():
    """A bucket that fails isn't tried again where a pass is given up, and isn't over the budget."""
    use = free_use("cpu")
    tried: list[int] = []

    def fn(x):
        if torch.cuda.is_current_stream_capturing() and x.shape[0] == 8:
            tried.append(8)
            raise KeyError("mine")
        return wide(x)

    backend = Costly(each=500_000)
    group, runner = group_of(
        backend, use.static + use.pool + 2_500_000, asking(fn), on_error="skip"
    )
    group.capture(progress=False)
    assert captured(runner) == [1, 2]
    assert tried == [8]
    assert runner.dispatch(batch=8).reason is gk.Reason.NOT_CAPTURED
    assert runner.dispatch(batch=16).reason is gk.Reason.OVER_BUDGET


def asking(fn: Any) -> Any:
    """The function, where only a recording can say whether it is captured."""

    def asks(x):
        try:
            return fn(x)
        except RuntimeError:  # a CPU build, outside a recording
            return wide(x)

    return asks


def test_an_interrupt_leaves_what_was_captured_serving():
    use = free_use("cpu")

    class Interrupted(Costly):
        def begin_capture(self, **options: Any) -> Any:
            if self.begun == 4:
                raise KeyboardInterrupt
            return super().begin_capture(**options)

    group, runner = group_of(Interrupted(each=0), use.total * 2)
    with pytest.raises(KeyboardInterrupt):
        group.capture(progress=False)
    assert captured(runner) == [8, 16]
    assert group.state is gk.State.CAPTURED
    x = torch.ones(7, WIDTH)
    assert runner.run(runner.dispatch(batch=7), x=x).tolist() == [4096.0] * 7


@given(st.integers(0, 300_000), st.integers(0, 40_000), st.integers(0, 60_000), st.booleans())
@examples(25)
def test_no_budget_is_ever_exceeded(extra, each, surplus, in_two):
    """Whatever the driver and the pool take beyond what warm-ups say."""
    group, runner = group_of(Costly(each=each, surplus=surplus), 1 << 40)
    group.memory_budget = group.estimate().static + 64 + extra
    for _ in range(1 + in_two):
        report = group.capture(progress=False)
        assert report.memory.total <= group.memory_budget
        there = captured(runner)
        for size in range(1, 17):
            bucket = next((b for b in SIZES if b >= size), None)
            dispatch = runner.dispatch(batch=size)
            if bucket in there:
                assert dispatch.bucket["batch"] == bucket
            else:
                assert dispatch.reason is gk.Reason.OVER_BUDGET
        group.memory_budget += extra
    group.close()


def test_both_modes_share_the_budget():
    use = free_use("cpu")
    group = gk.GraphGroup("cpu", memory_budget=use.static + use.pool // 3 + 64)
    group.buffers.declare(x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    buckets = gk.Buckets.of(BATCH, *SIZES)
    with pytest.warns(gk.UnreachableBucketWarning):
        runner = group.runner(
            "r",
            wide,
            policy=gk.Policy([gk.Route(gk.FULL, buckets), gk.Route(gk.PIECEWISE, buckets)]),
        )
    report = group.capture(progress=False)
    assert captured(runner) == [1, 1, 2, 2, 4, 4]
    assert report.memory.total <= group.memory_budget


# -- what a pool holds -----------------------------------------------------------------------------


def test_a_pool_holds_what_its_largest_capture_made(backend):
    with gk.CaptureSession(backend) as session:
        x = torch.ones(1 << 20, device=backend.device)
        graphs = []
        for factor in (4, 2, 1):
            session.warmup(lambda factor=factor: x.repeat(factor).sum())
            graphs.append(session.capture(lambda factor=factor: x.repeat(factor).sum()).graph)
        held = backend.pool_bytes(session.pool)
        largest = 4 * (4 << 20)
        assert largest <= held <= 2 * largest
        assert backend.pool_bytes(backend.pool_of(None)) == 0
    for graph in graphs:
        graph.release()
    if backend.name == "recording":
        assert backend.pool_bytes(session.pool) == 0
        assert backend.pool_bytes(object()) == 0


def test_warm_ups_are_measured(backend):
    with gk.CaptureSession(backend) as session:
        x = torch.ones(1 << 20, device=backend.device)
        session.warmup(lambda: x.repeat(4).sum())
        assert session.peak.nbytes == 0
        session.measures = True
        session.warmup(lambda: x.repeat(4).sum())
        assert 4 * (4 << 20) <= session.peak.nbytes <= 5 * (4 << 20)
        session.warmup(lambda: x.add_(1))
        assert session.peak.nbytes == 0


def test_measuring_ends_with_an_exception(backend):
    peaks = []

    def fail() -> None:
        with backend.peak() as peak:
            peaks.append(peak)
            torch.ones(1 << 20, device=backend.device)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert peaks[0].nbytes >= 4 << 20
    torch.ones(1 << 20, device=backend.device)
    assert peaks[0].nbytes < 8 << 20


# -- out of memory ---------------------------------------------------------------------------------

TORCHS = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.50 MiB is "
    "free. Process 1 has 139.79 GiB memory in use. 2.00 GiB allowed; Of the allocated memory 1.00 GiB is allocated by "
    "PyTorch\nmore"
)


def test_torchs_figures_are_named():
    cause = torch.OutOfMemoryError(TORCHS)
    error = out_of_memory(cause, "runner 'r', FULL bucket [batch=8]", 7)
    assert (error.wanted, error.free) == (20 << 30, 3 << 19)
    assert str(error).startswith(
        "runner 'r', FULL bucket [batch=8]: the device's memory is too small (20.0 GiB were wanted, 1.5 MiB were free "
        "on the device). Lower the top of the ladder, "
    )
    assert str(error).endswith(TORCHS.splitlines()[0])
    assert error.__cause__ is cause


@pytest.mark.parametrize(
    ("text", "free", "expected"),
    [
        ("", None, "the device's memory is too small. Lower"),
        ("whatever", 2048, "the device's memory is too small (2.0 KiB were free on the device). Lower"),
        ("Tried to allocate 512 bytes.", None, "the device's memory is too small (512 B were wanted). Lower"),
    ],
)  # fmt: skip
def test_figures_that_are_unknown_are_left_out(text, free, expected):
    assert expected in str(out_of_memory(torch.OutOfMemoryError(text), "r", free))
