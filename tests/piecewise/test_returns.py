"""What a break returns: tensors of every kind, changed shapes and dtypes, Python values, `out=`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk
from tests.piecewise.harness import ROWS, WIDTH, declare, num_segments, rows, run, runner_of

SIZES = (1, 3, 4, 5, 8)


def check_equal(runner, device, reference, sizes=SIZES):
    for seed, count in enumerate(sizes):
        x = rows(device, count, seed)
        torch.testing.assert_close(run(runner, x), reference(x))


@pytest.mark.parametrize("sees", ["real", "bucket"])
def test_a_new_tensor_is_read_by_the_segments_after_it(device, sees):
    @gk.eager_break(rows=sees)
    def middle(h):
        return h.cumsum(0)

    runner = runner_of(device, lambda x: middle(x * 2) + 1)
    assert num_segments(runner) == [2, 2, 2]
    check_equal(runner, device, lambda x: (x * 2).cumsum(0) + 1)
    assert runner.eager_runs == 0


@pytest.mark.parametrize("sees", ["real", "bucket"])
def test_the_segments_after_it_see_the_strides_that_it_gave(device, sees):
    """Compiled code is made anew for other strides, and a capture is no place for that."""
    seen: dict[int, set[tuple[int, ...]]] = {}

    @gk.eager_break(rows=sees)
    def middle(h):
        return h.t().contiguous().t()

    def fn(x):
        h = middle(x * 2)
        seen.setdefault(len(h), set()).add(h.stride())
        return h + 1

    runner = runner_of(device, fn)
    assert (seen[8], seen[4]) == ({(1, 8)}, {(1, 4)})
    assert all(len(strides) == 1 for strides in seen.values())  # warm-up and capture alike
    check_equal(runner, device, lambda x: x * 2 + 1)


def test_rows_beyond_the_batch_are_zero_in_what_a_break_returned(device):
    @gk.eager_break(rows="real")
    def middle(h):
        return h + 5

    def fn(x):
        h = middle(x * 1)
        return {"h": h * 1, "total": h.sum(0)}

    runner = runner_of(device, fn)
    for count in (8, 3, 5, 2):  # what the wider batch left is not read by the narrower one
        x = rows(device, count, count)
        torch.testing.assert_close(run(runner, x)["total"], (x + 5).sum(0))


def test_several_tensors_in_any_nesting(device):
    @gk.eager_break(rows="real")
    def middle(h):
        return {"a": h + 1, "b": (h.sum(0), [h.t().contiguous(), None])}

    def body(x, call):
        made = call(x * 2)
        total, (turned, nothing) = made["b"]
        assert nothing is None
        return made["a"] * total + turned.t()

    runner = runner_of(device, lambda x: body(x, middle))
    check_equal(runner, device, lambda x: body(x, middle.fn))


def test_a_tensor_whose_rows_are_not_first_is_padded_in_its_axis(device):
    @gk.eager_break(rows="real")
    def middle(h):
        assert h.shape[1] == WIDTH
        return h.t() * 3

    runner = runner_of(device, lambda x: middle(x * 2).t() + 1)
    check_equal(runner, device, lambda x: x * 6 + 1)


def test_an_argument_whose_rows_are_not_first_is_cut_in_its_axis(device):
    seen = []

    @gk.eager_break(rows="real")
    def middle(h):
        seen.append(tuple(h.shape))
        return h * 3

    runner = runner_of(device, lambda x: middle((x * 2).t().contiguous()).t() + 1)
    seen.clear()
    check_equal(runner, device, lambda x: x * 6 + 1)
    assert seen == [(WIDTH, count) for count in SIZES]


@pytest.mark.parametrize("sees", ["real", "bucket"])
def test_an_argument_worked_on_in_place_passes_through(device, sees):
    addresses = set()

    @gk.eager_break(rows=sees)
    def middle(h):
        addresses.add(h.data_ptr())
        return h.mul_(3)

    runner = runner_of(device, lambda x: middle(x + 1) * 2)
    for count in SIZES:
        x = rows(device, count)
        addresses.clear()
        torch.testing.assert_close(run(runner, x), (x + 1) * 6)
        torch.testing.assert_close(run(runner, x), (x + 1) * 6)
        assert len(addresses) == 1


def test_declared_state_passes_through(device):
    state = torch.zeros(8, WIDTH, device=device)

    @gk.eager_break
    def middle(h):
        state[: h.shape[0]] = h
        return state

    runner = runner_of(device, lambda x: middle(x * 2)[: x.shape[0]] + 1, mutates=[state])
    check_equal(runner, device, lambda x: x * 2 + 1)
    state.fill_(0)
    run(runner, rows(device, 8))
    torch.testing.assert_close(state, rows(device, 8) * 2)


def test_memory_that_passed_through_must_stay_where_it_is(device):
    state = [torch.zeros(8, WIDTH, device=device)]

    @gk.eager_break
    def middle(h):
        kept = state[0]
        kept.copy_(h)
        return kept

    runner = runner_of(device, lambda x: middle(x * 2) + 1, 8, mutates=[state[0]])
    x = rows(device, 8)
    torch.testing.assert_close(run(runner, x), x * 2 + 1)
    moved, state[0] = state[0], torch.zeros(8, WIDTH, device=device)
    with pytest.raises(gk.BreakError) as caught:
        run(runner, x)
    message = str(caught.value)
    assert (
        "middle returned a tensor of shape (8, 4) and torch.float32 for the batch rows=8" in message
    )
    assert (
        "which is not the memory that it returned at the capture, or not as it lay there; later "
        "segments read that memory" in message
    )
    state[0] = moved
    torch.testing.assert_close(run(runner, x), x * 2 + 1)  # the runner is usable


def test_a_changed_shape_is_refused_with_both(device):
    shrink = [False]

    @gk.eager_break
    def middle(h):
        return h[:2] * 1 if shrink[0] else h * 1

    runner = runner_of(device, lambda x: middle(x * 2) + 1)
    x = rows(device, 3)
    shrink[0] = True
    with pytest.raises(
        gk.BreakError,
        match=r"middle returned shape \(2, 4\) for the batch rows=3, expected \(4, 4\)",
    ):
        run(runner, x)
    shrink[0] = False
    torch.testing.assert_close(run(runner, x), x * 2 + 1)


def test_real_rows_may_come_back_as_the_batch_or_as_the_bucket_and_not_otherwise(device):
    wanted = [None]

    @gk.eager_break(rows="real")
    def middle(h):
        out = torch.ones(wanted[0] or h.shape[0], WIDTH, device=h.device)
        out[: h.shape[0]] = h
        return out

    runner = runner_of(device, lambda x: middle(x * 2) + 1)
    x = rows(device, 3)
    for wanted[0] in (3, 4):
        torch.testing.assert_close(run(runner, x), x * 2 + 1)
    wanted[0] = 5
    with pytest.raises(
        gk.BreakError, match=r"shape \(5, 4\) for the batch rows=3, expected \(3, 4\) or \(4, 4\)"
    ):
        run(runner, x)


def test_a_changed_dtype_is_refused(device):
    double = [False]

    @gk.eager_break
    def middle(h):
        return h.double() if double[0] else h * 1

    runner = runner_of(device, lambda x: middle(x * 2) + 1)
    double[0] = True
    with pytest.raises(
        gk.BreakError,
        match="returned a tensor of shape .* and torch.float64 .* and torch.float32 at the capture",
    ):
        run(runner, rows(device, 3))


def test_a_tensor_in_place_of_a_value_and_the_reverse(device):
    value = [torch.ones(()), 1]

    @gk.eager_break
    def middle(h):
        return h * 1, value[0]

    def fn(x):
        h, v = middle(x * 2)
        return h + v

    runner = runner_of(device, fn)
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), x * 2 + 1)
    value[0] = 1
    with pytest.raises(
        gk.BreakError,
        match=r"returned 1 \(int\) for the batch rows=3, and torch.float32 at the capture",
    ):
        run(runner, x)


def test_another_structure_is_refused(device):
    pair = [True]

    @gk.eager_break
    def middle(h):
        return (h * 1, 3) if pair[0] else [h * 1, 3]

    runner = runner_of(device, lambda x: middle(x * 2)[0] + 1)
    pair[0] = False
    with pytest.raises(gk.BreakError, match="and another structure at the capture"):
        run(runner, rows(device, 3))


@pytest.mark.parametrize(
    "value", [3, 2.5, True, "relu", None, float("nan"), torch.float16], ids=str
)
def test_a_python_value_that_stays_is_fine(device, value):
    @gk.eager_break
    def middle(h):
        return h * 1, value

    def fn(x):
        h, kept = middle(x * 2)
        assert kept is value
        return h + 1

    runner = runner_of(device, fn)
    check_equal(runner, device, lambda x: x * 2 + 1)


@pytest.mark.parametrize(("before", "after"), [(3, 4), (1, True), (1, 1.0), ("a", "b"), (None, 0)])
def test_a_python_value_that_changes_is_refused(device, before, after):
    value = [before]

    @gk.eager_break
    def middle(h):
        return h * 1, value[0]

    runner = runner_of(device, lambda x: middle(x * 2)[0] + 1)
    value[0] = after
    with pytest.raises(gk.BreakError) as caught:
        run(runner, rows(device, 3))
    assert (
        f"middle returned {after!r}, and {before!r} at the capture, which the later segments have baked"
        in str(caught.value)
    )
    value[0] = before
    run(runner, rows(device, 3))


def test_a_value_that_changed_between_warm_up_and_capture_is_refused_there(device):
    calls = []

    @gk.eager_break
    def middle(h):
        calls.append(1)
        return len(calls)

    with pytest.raises(
        gk.BreakError, match=r"returned 2 \(int\) in the capture, and 1 \(int\) in the warm-up"
    ):
        runner_of(device, lambda x: x * middle(x), 4)


def test_a_shape_that_depends_on_data_is_refused_at_the_capture(device):
    counts = iter([3, 2, 4, 5])

    @gk.eager_break
    def middle(h):
        return h[: next(counts)] * 1

    with pytest.raises(
        gk.BreakError,
        match=r"returned a tensor of shape \(2, 4\) .* and a tensor of shape \(3, 4\) in the warm-up",
    ):
        runner_of(device, lambda x: x + middle(x * 2).sum(0), 8)


def test_an_object_can_t_be_returned(device):
    @gk.eager_break
    def middle(h):
        return h, object()

    with pytest.raises(gk.BreakError, match="can be returned|in the warm-up"):
        runner_of(device, lambda x: middle(x)[0] + 1, 4)


def test_a_set_can_t_be_returned(device):
    kept = {1, 2}

    @gk.eager_break
    def middle(h):
        return kept

    with pytest.raises(
        gk.BreakError,
        match=r"returned \{1, 2\} \(set\); tensors, None and plain Python values can be returned",
    ):
        runner_of(device, lambda x: (middle(x), x + 1)[1], 4)


@pytest.mark.parametrize("sees", ["real", "bucket"])
@pytest.mark.parametrize("mode", [gk.PIECEWISE, gk.FULL], ids=str)
def test_out_is_filled_by_the_break_itself(device, sees, mode):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(
        x=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0),
        filled=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=7),
    )
    seen = []

    @gk.eager_break(rows=sees, out=buffers.filled)
    def middle(h, out=None):
        seen.append((h.shape[0], out.shape[0]))
        return torch.mul(h, 3, out=out)

    def fn(x):
        h = middle(x * 2)
        return {"h": h + 1, "total": h.sum(0)}

    runner = group.runner(
        "model", fn, policy=gk.Policy([gk.Route(mode, gk.Buckets.of(ROWS, 1, 4, 8))])
    )
    group.capture()
    seen.clear()
    for count in (3, 8, 5, 2, 12):
        x = rows(device, count, count)
        made = run(runner, x)
        torch.testing.assert_close(made["h"], x * 6 + 1)
        dispatch = runner.dispatch(rows=count)
        if dispatch.mode is gk.PIECEWISE and sees == "real":
            pads = dispatch.padding["rows"] * 7  # what the buffer's own pad gives
            torch.testing.assert_close(made["total"], (x * 6).sum(0) + pads)
            assert seen[-1] == (count, count)
    if mode is gk.PIECEWISE:
        assert all(given == out for given, out in seen)


@pytest.mark.parametrize("sees", ["real", "bucket"])
def test_out_of_a_break_inside_a_break_is_as_wide_as_what_it_sees(device, sees):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(filled=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0))

    @gk.eager_break(rows=sees, out=buffers.filled)
    def inner(h, out=None):
        return torch.mul(h, 3, out=out)

    outer = gk.eager_break(lambda h: inner(h) + 1, rows=sees)
    runner = declare(group, lambda x: outer(x * 2) - 1)
    group.capture()
    for count in (3, 8, 5, 12):
        x = rows(device, count, count)
        torch.testing.assert_close(run(runner, x), x * 6)


def test_outside_any_runner_a_break_with_out_is_the_plain_function(device):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(filled=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0))

    @gk.eager_break(out=buffers.filled)
    def middle(h, out=None):
        return torch.mul(h, 3, out=out)

    x = rows(device, 3)
    torch.testing.assert_close(middle(x), x * 3)


@pytest.mark.parametrize("call", ["inference", "no_grad", "grad"])
@pytest.mark.parametrize("capture", ["inference", "grad"])
def test_ambient_gradient_modes_of_capture_and_run_may_differ(device, capture, call):
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}

    @gk.eager_break(rows="real")
    def middle(h):
        assert not torch.is_grad_enabled()
        h.add_(1)
        return h * 2

    weight = torch.nn.Parameter(torch.ones(WIDTH, device=device))
    with modes[capture]():
        runner = runner_of(device, lambda x: middle(x * weight) + 1)
    x = rows(device, 3)
    with modes[call]():
        made = run(runner, x)
        assert torch.is_grad_enabled() is (call == "grad")
    torch.testing.assert_close(made.clone(), (x + 1) * 2 + 1)


def test_a_cpu_tensor_comes_back_on_the_device(device):
    factor = [2.0]

    @gk.eager_break
    def middle(h):
        return torch.tensor(factor[0])

    runner = runner_of(device, lambda x: x * middle(x), 4)
    x = rows(device, 3)
    for factor[0] in (2.0, 3.0):
        torch.testing.assert_close(run(runner, x), x * factor[0])


def test_a_cpu_tensor_as_an_argument_stays_where_it_is(device):
    @gk.eager_break
    def middle(h, lengths):
        assert lengths.device.type == "cpu"
        return h * float(lengths.sum())

    runner = runner_of(device, lambda x: middle(x + 1, torch.ones(3)) - 1)
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), (x + 1) * 3 - 1)


def test_a_lazy_conjugate_and_a_transposed_argument(device):
    @gk.eager_break
    def middle(h, turned):
        return h.real.contiguous() + h.imag + turned.t()

    def fn(x):
        return middle((torch.complex(x, x * 2)).conj(), (x * 3).t())

    runner = runner_of(device, fn)
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), x - x * 2 + x * 3)


def test_containers_and_arrays_are_made_anew_for_each_call(device):
    @gk.eager_break
    def middle(h, seen, options, counts):
        seen.append(1.0)
        counts += 1
        return h * len(seen) * options.pop("factor") * float(counts[0])

    runner = runner_of(device, lambda x: middle(x * 1, [], {"factor": 2.0}, np.zeros(1)) + 0)
    for seed in range(3):
        x = rows(device, 3, seed)
        torch.testing.assert_close(run(runner, x), x * 2)


def test_two_results_in_one_memory_are_refused(device):
    @gk.eager_break
    def middle(h):
        new = h * 2
        return new, new[:1]

    with pytest.raises(gk.BreakError, match="two tensors in one new memory"):
        runner_of(device, lambda x: middle(x * 1)[0] + 1)
