"""Exceptions in breaks and between them, at the capture and at a replay; side streams."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk
from tests.piecewise.harness import WIDTH, declare, num_segments, rows, run, runner_of


class Boom(Exception):
    """The user's own."""


def failing_at(phase):
    """A break that raises in one phase while told to."""
    broken = [True]

    @gk.eager_break(rows="real")
    def middle(h):
        if broken[0] and gk.current_run().phase is phase:
            raise Boom("no luck")
        return h.cumsum(0)

    return middle, broken


@pytest.mark.parametrize("phase", [gk.Phase.WARMUP, gk.Phase.CAPTURE], ids=str)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_exception_in_a_break_leaves_no_half_sequence(device, phase, policy):
    middle, broken = failing_at(phase)
    group = gk.GraphGroup(device, on_error=policy)
    runner = declare(group, lambda x: middle(x * 2) + 1, 1, 4)
    random = torch.get_rng_state()
    if policy == "raise":
        with pytest.raises(Boom, match="no luck") as caught:
            group.capture()
        assert any(
            "runner 'model', PIECEWISE bucket [rows=" in note for note in caught.value.__notes__
        )
    else:
        group.capture()
        assert "Boom: no luck" in str(group.report())
    assert num_segments(runner) == []
    assert torch.equal(random, torch.get_rng_state())
    assert torch.is_grad_enabled()
    x = rows(device, 3)
    dispatch = runner.dispatch(rows=3)
    assert (dispatch.mode, dispatch.reason) == (gk.EAGER, gk.Reason.NOT_CAPTURED)
    torch.testing.assert_close(runner.run(dispatch, x=x), (x * 2).cumsum(0) + 1)
    broken[0] = False
    group.capture()
    assert num_segments(runner) == [2, 2]
    torch.testing.assert_close(run(runner, x), (x * 2).cumsum(0) + 1)
    assert runner.eager_runs == 1


def test_an_exception_in_one_bucket_leaves_the_others(device):
    @gk.eager_break
    def middle(h):
        if h.shape[0] == 4 and gk.current_run().phase is gk.Phase.CAPTURE:
            raise Boom("no luck")
        return h * 2

    group = gk.GraphGroup(device, on_error="skip")
    runner = declare(group, lambda x: middle(x + 1))
    group.capture()
    assert [str(e.bucket) for e in runner.entries if e.is_captured] == ["rows=1", "rows=8"]
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), (x + 1) * 2)


def test_an_exception_at_a_replay_leaves_the_runner_usable(device):
    middle, broken = failing_at(gk.Phase.REPLAY)
    runner = runner_of(device, lambda x: middle(x * 2) + 1)
    x = rows(device, 3)
    for _ in range(2):
        broken[0] = True
        with pytest.raises(Boom) as caught:
            run(runner, x)
        assert (
            "in break failing_at.<locals>.middle of runner 'model', PIECEWISE bucket [rows=4], batch rows=3"
            in "".join(caught.value.__notes__)
        )
        with pytest.raises(gk.StateError, match="outside a run"):
            gk.current_run()
        broken[0] = False
        torch.testing.assert_close(run(runner, x), (x * 2).cumsum(0) + 1)
    assert torch.is_grad_enabled()


def test_an_exception_that_the_function_swallows_at_the_capture_is_refused(device):
    middle, _ = failing_at(gk.Phase.CAPTURE)

    def fn(x):
        try:
            return middle(x * 2)
        except Boom:
            return x + 1

    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, fn)
    message = str(caught.value)
    assert (
        "raised Boom: no luck, and the function caught it and went on; a replay has no such way out. Catch "
        "it inside the break" in message
    )
    assert not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing()


def test_a_second_break_after_a_swallowed_exception_is_refused_too(device):
    middle, _ = failing_at(gk.Phase.CAPTURE)
    other = gk.eager_break(lambda h: h * 3)

    def fn(x):
        try:
            x = middle(x * 2)
        except Boom:
            x = x + 1
        return other(x)

    with pytest.raises(
        gk.CaptureError, match="the function caught it and went on|none in the warm-up"
    ):
        runner_of(device, fn)


def test_what_a_segment_can_t_hold_is_refused_with_the_line(device):
    middle = gk.eager_break(lambda h: h * 2)
    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, lambda x: middle(x + 1) * float((x.sum() > 0).item()))
    assert "test_failures.py" in str(caught.value)


def test_what_a_segment_can_t_hold_is_fine_in_a_break(device):
    @gk.eager_break(rows="real")
    def middle(h):
        assert not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing()
        positive = h[h > 0]
        return h * float(positive.numel() > 0) + len(h.tolist())

    runner = runner_of(device, lambda x: middle(x * 1) - 1)
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), x + count - 1)


def test_a_break_is_not_captured_and_what_is_around_it_is(device):
    answers = []
    group = gk.GraphGroup(device)

    def ask(where):
        answers.append((where, group.backend.is_capturing()))

    @gk.eager_break
    def middle(h):
        ask("break")
        return h * 2

    def fn(x):
        ask("before")
        h = middle(x + 1)
        ask("after")
        return h + 1

    declare(group, fn, 4)
    group.capture()
    assert answers[:3] == [("before", False), ("break", False), ("after", False)]  # warm-up
    captures = len(answers) // 3 - 1
    assert captures >= 1
    assert answers[3:] == [("before", True), ("break", False), ("after", True)] * captures


def test_a_run_of_the_group_inside_a_break_is_refused(device):
    runners = []

    @gk.eager_break
    def middle(h):
        if runners and gk.current_run().phase is gk.Phase.REPLAY:
            run(runners[0], h * 1)
        return h * 2

    runner = runner_of(device, lambda x: middle(x + 1))
    runners.append(runner)
    with pytest.raises(gk.ConcurrentRunError):
        run(runner, rows(device, 4))
    runners.clear()
    run(runner, rows(device, 4))


def test_a_run_of_another_group_inside_a_break(device):
    inner_break = gk.eager_break(lambda h: h + (gk.current_run().context or 0), rows="real")
    inner = runner_of(device, lambda x: inner_break(x * 2))

    @gk.eager_break(rows="real")
    def middle(h):
        before = gk.current_run()
        if before.phase is not gk.Phase.REPLAY:
            return h * 2 + 10
        made = run(inner, h, context=10).clone()
        assert gk.current_run() is before
        return made

    runner = runner_of(device, lambda x: middle(x + 1) - 1)
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), (x + 1) * 2 + 10 - 1)


# -- side streams -----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_side_stream_that_is_joined_before_the_break():
    middle = gk.eager_break(lambda h: h.cumsum(0), rows="real")
    side = torch.cuda.Stream()

    def fn(x):
        main = torch.cuda.current_stream()
        h = x * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other = h + 1
        main.wait_stream(side)
        return middle(h + other) - 1

    runner = runner_of("cuda", fn)
    for count in (1, 3, 8):
        x = rows("cuda", count)
        torch.testing.assert_close(run(runner, x), (x * 4 + 1).cumsum(0) - 1)


@pytest.mark.gpu
def test_a_side_stream_that_is_not_joined_is_an_error_that_names_the_break():
    middle = gk.eager_break(lambda h: h.cumsum(0))
    side = torch.cuda.Stream()
    joins = [False]

    def fn(x):
        main = torch.cuda.current_stream()
        h = x * 2
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other = h + 1
        if joins[0]:
            main.wait_stream(side)
        h = middle(h)
        if not joins[0]:
            main.wait_stream(side)
        return h + other

    group = gk.GraphGroup("cuda")
    runner = declare(group, fn, 4)
    with pytest.raises(gk.BreakError) as caught:
        group.capture()
    message = str(caught.value)
    assert "the segment before break" in message
    assert "Join it before the break, as by current_stream().wait_stream(side)" in message
    assert f"{side.cuda_stream:#x}" in message
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    joins[0] = True
    group.capture()
    x = rows("cuda", 3)
    expected = (x * 2).cumsum(0) + x * 2 + 1
    torch.testing.assert_close(run(runner, x), expected)


@pytest.mark.gpu
def test_memory_that_a_later_segment_reads_is_not_carved_up_by_another_capture():
    middle = gk.eager_break(lambda h: h * 1, rows="real")
    group = gk.GraphGroup("cuda")

    def fn(x):
        kept = [x * (i + 1) for i in range(4)]
        for i in range(4):
            kept.append(middle(kept[-1] + kept[i]))
        return sum(kept)

    def reference(x):
        kept = [x * (i + 1) for i in range(4)]
        for i in range(4):
            kept.append(kept[-1] + kept[i])
        return sum(kept)

    first = declare(group, fn, 1, 2, 4, 8, name="first")
    second = declare(
        group, lambda x: middle(x.repeat(1, 64) * 3)[:, :WIDTH] + 1, 1, 2, 4, 8, name="second"
    )
    group.capture()
    for count in (8, 1, 5, 2, 3, 4, 7):
        x = rows("cuda", count, count)
        torch.testing.assert_close(run(first, x), reference(x))
        torch.testing.assert_close(run(second, x), x * 3 + 1)
        torch.testing.assert_close(run(first, x), reference(x))


@pytest.mark.gpu
def test_buckets_share_the_memory_of_the_largest():
    middle = gk.eager_break(lambda h: h * 1)
    width = 1 << 18

    def memory(*sizes):
        dim = gk.Dim("rows", 16)
        group = gk.GraphGroup("cuda")
        group.buffers.declare(x=gk.BufferSpec((dim, 4), torch.float32, pad=0))

        def fn(x):
            h = x.repeat(1, width // 4)
            for _ in range(4):
                h = middle(h * 2)
            return h.sum(1)

        group.runner(
            "model",
            fn,
            policy=gk.Policy.piecewise(gk.Buckets.of(dim, *sizes)),
            outputs=gk.Output((dim,), torch.float32),
        )
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        group.capture()
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved() - before
        group.close()
        return used

    memory(16)
    assert memory(2, 4, 6, 8, 12, 16) <= 1.1 * memory(16)
