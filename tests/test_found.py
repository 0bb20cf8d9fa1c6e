"""Wrong answers that were found by trying to break the library: each test shows one, with the right value."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

batch = gk.Dim("batch", 8)


def rows(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> gk.BufferSpec:
    """A buffer of `batch` rows, padded with 0."""
    return gk.BufferSpec((batch, *shape), dtype, pad=0, **options)


def policy(mode: gk.Mode = gk.FULL) -> gk.Policy:
    """Buckets of 2, 4 and 8 rows."""
    return gk.Policy([gk.Route(mode, gk.Buckets.of(batch, 2, 4, 8))])


def captured(
    fn: Callable[..., Any], *, mode: gk.Mode = gk.FULL, checked: bool = True, **options: Any
) -> gk.GraphRunner:
    """A captured runner of `fn` with one buffer, `x`."""
    group = gk.GraphGroup("cpu", checked=checked)
    group.buffers.declare(x=rows())
    runner = group.runner("r", fn, policy=policy(mode), **options)
    group.capture()
    return runner


def ones(count: int, value: float = 1.0) -> list[float]:
    return [value] * count


@pytest.mark.parametrize("eager", [None, "on purpose"])
@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE])
def test_outputs_bound_to_each_other_s_buffers_are_swapped(
    mode: gk.Mode, eager: str | None
) -> None:
    group = gk.GraphGroup("cpu")
    buf = group.buffers.declare(x=rows(), y=rows())
    outputs = {"x": buf.x, "y": buf.y}
    runner = group.runner("r", lambda x, y: {"x": y, "y": x}, policy=policy(mode), outputs=outputs)
    group.capture()
    out = runner.run(runner.dispatch(batch=3, eager=eager), x=ones(3, 1.0), y=ones(3, 2.0))
    assert out["x"].tolist() == ones(3, 2.0)
    assert out["y"].tolist() == ones(3, 1.0)


@pytest.mark.parametrize("eager", [None, "on purpose"])
@pytest.mark.parametrize("to", ["static", "pool", "host"])
def test_an_output_in_a_buffer_that_another_output_overwrites_has_the_old_values(
    to: Any, eager: str | None
) -> None:
    group = gk.GraphGroup("cpu")
    buf = group.buffers.declare(x=rows())
    outputs = {"new": buf.x, "old": gk.Output((batch,), torch.float32, to=to)}
    runner = group.runner("r", lambda x: {"new": x + 1, "old": x}, policy=policy(), outputs=outputs)
    group.capture()
    out = runner.run(runner.dispatch(batch=3, eager=eager), x=ones(3))
    assert out["new"].tolist() == ones(3, 2.0)
    assert out["old"].tolist() == ones(3, 1.0)


@pytest.mark.parametrize(
    "result", [lambda x: {"a": {"b": x}, "a.b": x + 1}, lambda x: {1: x, "1": x + 1}]
)
def test_outputs_of_one_name_are_refused(result: Callable[..., Any]) -> None:
    with pytest.raises(gk.CaptureError, match="two outputs that are both named"):
        captured(result)


def test_a_run_inside_a_stage_block_is_refused() -> None:
    runner = captured(lambda x: x + 1)
    dispatch = runner.dispatch(batch=3)
    with runner.stage(dispatch) as staged:
        staged.host["x"][:] = 5
        with pytest.raises(gk.StateError, match="block of it is open"):
            runner.run(dispatch, x=ones(3))
        with pytest.raises(gk.StateError, match="block of it is open"), runner.stage(dispatch):
            pass
    assert runner.run(dispatch).tolist() == ones(3, 6.0)


def test_a_stage_block_left_by_an_exception_stages_nothing() -> None:
    runner = captured(lambda x: x + 1)
    dispatch = runner.dispatch(batch=3)

    def leave() -> None:
        with runner.stage(dispatch) as staged:
            staged.host["x"][:] = 5
            raise KeyError("mine")

    with pytest.raises(KeyError):
        leave()
    assert runner.run(dispatch, x=ones(3)).tolist() == ones(3, 2.0)
    with pytest.raises(gk.InputError, match="'x' is missing"):
        runner.run(dispatch)


def test_a_capture_forgets_what_was_staged_in_the_memory_that_its_examples_use() -> None:
    is_broken = True

    def fn(x: torch.Tensor) -> torch.Tensor:
        if is_broken and x.shape[0] == 8:
            raise KeyError("mine")
        return x + 1

    group = gk.GraphGroup("cpu", on_error="skip")
    group.buffers.declare(x=rows())
    runner = group.runner("r", fn, policy=policy())
    group.capture()
    dispatch = runner.dispatch(batch=2)
    with runner.stage(dispatch) as staged:
        staged.host["x"][:] = 5
    is_broken = False
    group.capture()
    with pytest.raises(gk.InputError, match="'x' is missing"):
        runner.run(dispatch)


def test_a_weight_changed_in_place_reaches_a_graph_captured_under_autocast() -> None:
    model = torch.nn.Linear(5, 20, bias=False)
    group = gk.GraphGroup("cpu")
    wrapped = group.wrap(model, input=rows(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 5))
        group.capture()
        assert torch.is_autocast_cache_enabled()
        with torch.no_grad():
            model.weight.fill_(1.0)
        assert torch.equal(wrapped(input=torch.ones(3, 5)), torch.full((3, 20), 5.0).bfloat16())


@pytest.mark.parametrize("row", [-1, 2, np.int64(2), [2], slice(-1, None), torch.tensor([2])])
def test_scratch_restores_the_row_that_it_names(row: Any) -> None:
    state = torch.zeros(3)

    def fn(x: torch.Tensor) -> torch.Tensor:
        state[-1:].add_(1)
        return x + 1

    captured(fn, mutates=[gk.Scratch(state, rows=row)])
    assert state.tolist() == [0.0, 0.0, 0.0]


def test_a_dispatch_of_another_runner_s_that_is_too_large_is_refused() -> None:
    runner = captured(lambda x: x + 1)
    other = gk.Dispatcher(gk.Policy([]), [gk.Dim("batch", 100)])
    with pytest.raises(gk.InputError, match="batch=50 is above the maximum 8"):
        runner.run(other.dispatch(batch=50), x=ones(50))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float16, 1e6),
        (torch.float32, 1e39),
        (torch.float8_e4m3fn, 1e4),
        (torch.float16, [1e6]),
    ],
)
def test_a_float_out_of_range_isn_t_rounded_to_infinity(dtype: torch.dtype, value: Any) -> None:
    group = gk.GraphGroup("cpu")
    shape = (1,) if isinstance(value, list) else ()
    wrapped = group.wrap(lambda x: x.clone(), x=gk.BufferSpec(shape, dtype))
    group.capture()
    with pytest.raises(gk.InputError, match=r"out of the range of torch\.float"):
        wrapped(x=value)


def test_infinity_nan_and_the_largest_float_are_taken_as_they_are() -> None:
    runner = captured(lambda x: x + 0)
    largest = 3.4028235e38
    out = runner.run(runner.dispatch(batch=3), x=[float("inf"), float("nan"), largest])
    assert out[0].item() == float("inf")
    assert out[1].isnan()
    assert out[2].item() == torch.finfo(torch.float32).max


def test_a_list_of_tensors_that_numpy_refuses_is_an_input_error() -> None:
    runner = captured(lambda x: x + 1)
    with pytest.raises(gk.InputError, match="requires grad"):
        runner.run(runner.dispatch(batch=1), x=[torch.ones((), requires_grad=True)])


def test_a_sparse_input_is_refused_for_its_layout() -> None:
    runner = captured(lambda x: x + 1)
    with pytest.raises(gk.InputError, match=r"layout torch\.sparse_coo"):
        runner.run(runner.dispatch(batch=2), x=torch.ones(2).to_sparse())


def test_a_higher_order_operator_is_refused_as_a_capture() -> None:
    def fn(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(gk.CaptureError, match="higher-order operators"):
        captured(fn)


def test_a_stale_output_in_a_list_given_by_keyword_raises() -> None:
    runner = captured(lambda x: x + 1)
    dispatch = runner.dispatch(batch=2)
    stale = runner.run(dispatch, x=ones(2))
    runner.run(dispatch, x=ones(2))
    with pytest.raises(gk.StaleOutputError):
        torch.cat(tensors=[stale])


@pytest.mark.parametrize("checked", [False, True])
def test_an_output_can_be_copied_and_pickled(checked: bool) -> None:
    runner = captured(lambda x: x + 1, checked=checked)
    dispatch = runner.dispatch(batch=2)
    out = runner.run(dispatch, x=ones(2))
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    unpickled = pickle.loads(pickle.dumps(out))  # noqa: S301
    copies = [copy.deepcopy(out), unpickled, torch.load(file)]
    runner.run(dispatch, x=ones(2, 50.0))
    for kept in copies:
        assert type(kept) is torch.Tensor
        assert kept.tolist() == ones(2, 2.0)


def test_a_stale_output_can_t_be_pickled() -> None:
    runner = captured(lambda x: x + 1)
    dispatch = runner.dispatch(batch=2)
    stale = runner.run(dispatch, x=ones(2))
    runner.run(dispatch, x=ones(2))
    with pytest.raises(gk.StaleOutputError):
        pickle.dumps(stale)


def test_an_eager_output_in_an_input_s_buffer_is_stale_after_the_next_run() -> None:
    runner = captured(lambda x: {"view": x[:], "new": x + 1})
    dispatch = runner.dispatch(batch=3, eager="on purpose")
    out = runner.run(dispatch, x=ones(3))
    assert out["view"].tolist() == ones(3)
    runner.run(dispatch, x=ones(3, 2.0))
    with pytest.raises(gk.StaleOutputError, match="buffer 'x'"):
        out["view"].tolist()
    assert out["new"].tolist() == ones(3, 2.0)


@pytest.mark.parametrize("eager", [None, "on purpose"])
def test_a_break_that_fills_a_buffer_ends_leases_on_it(eager: str | None) -> None:
    group = gk.GraphGroup("cpu", checked=True)
    buf = group.buffers.declare(x=rows(), z=rows(), filled=rows())

    @gk.eager_break(out=buf.filled)
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    first = group.runner("first", lambda z: z + 1, policy=policy(), outputs=buf.filled)
    second = group.runner("second", lambda x: fill(x) + 1, policy=policy(gk.PIECEWISE))
    group.capture()
    out = first.run(first.dispatch(batch=3), z=ones(3))
    second.run(second.dispatch(batch=3, eager=eager), x=ones(3, 50.0))
    with pytest.raises(gk.StaleOutputError):
        out.tolist()


def test_a_break_may_not_return_the_same_memory_laid_out_otherwise() -> None:
    is_transposed = False

    @gk.eager_break
    def turn(x: torch.Tensor) -> torch.Tensor:
        return x.t() if is_transposed else x

    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=rows(4))
    outputs = gk.Output((batch, 4), torch.float32)
    buckets = gk.Policy([gk.Route(gk.PIECEWISE, gk.Buckets.of(batch, 4, 8))])
    runner = group.runner("r", lambda x: turn(x * 1) * 1, policy=buckets, outputs=outputs)
    group.capture()
    x = torch.arange(16.0).view(4, 4)
    assert torch.equal(runner.run(runner.dispatch(batch=4), x=x), x)
    is_transposed = True
    with pytest.raises(gk.BreakError, match="not as it lay there"):
        runner.run(runner.dispatch(batch=4), x=x)


def test_memory_adopted_from_inference_mode_is_written_outside_it() -> None:
    with torch.inference_mode():
        memory = torch.zeros(8)
    group = gk.GraphGroup("cpu")
    buf = group.buffers.declare(x=rows(adopt=memory))
    runner = group.runner("r", lambda x: x + 1, policy=policy())
    group.capture()
    for eager in (None, "on purpose"):
        out = runner.run(runner.dispatch(batch=3, eager=eager), x=ones(3, 4.0))
        assert out.tolist() == ones(3, 5.0)
    assert buf.x.tensor.data_ptr() == memory.data_ptr()


def test_graphs_serve_where_the_capture_context_fails_as_it_is_left() -> None:
    @contextlib.contextmanager
    def failing() -> Iterator[None]:
        yield
        raise KeyError("mine")

    group = gk.GraphGroup("cpu", capture_context=failing)
    group.buffers.declare(x=rows())
    runner = group.runner("r", lambda x: x + 1, policy=policy())
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            group.capture()
        assert group.state is gk.State.CAPTURED
        dispatch = runner.dispatch(batch=3)
        assert dispatch.mode is gk.FULL
        assert runner.run(dispatch, x=ones(3)).tolist() == ones(3, 2.0)
        group.release()


def test_rows_beside_those_of_the_batch_are_not_inferred() -> None:
    """Their place can't be seen in a shape: the batch's own rows may be the prefix, or not."""
    end = torch.tensor([7.0, 8.0, 9.0])
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 8)
    group.wrap(lambda x: torch.cat([x, end]), x=gk.BufferSpec((rows,), torch.float32, pad=0))
    with pytest.raises(
        gk.SpecError, match="looks like \\(rows \\+ 3,\\), whose rows .* comes first"
    ):
        group.capture()


def test_a_piecewise_graph_bakes_what_prepare_returns_and_says_so() -> None:
    group = gk.GraphGroup("cpu", checked=True)
    rows = gk.Dim("rows", 8)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
    pause = gk.eager_break(lambda x: x * 1)
    runner = group.runner(
        "r",
        lambda x, scale: pause(x * scale),
        policy=gk.Policy.piecewise(gk.Buckets.of(rows, 1, 4, 8)),
        prepare=lambda step: {"scale": step.context or 1},
    )
    group.capture()
    runner.run(runner.dispatch(rows=2), x=[1.0, 2.0])
    with pytest.raises(gk.StateError, match="prepare returned scale=5 .* and 1 is baked"):
        runner.run(runner.dispatch(rows=2), x=[1.0, 2.0], context=5)


def test_a_conjugate_is_not_the_memory_that_it_lies_in() -> None:
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 4)
    buffers = group.buffers.declare(z=gk.BufferSpec((rows,), torch.complex64, pad=0))
    runner = group.runner(
        "r", lambda z: z.conj(), policy=gk.Policy.full(gk.Buckets.powers(rows)), outputs=buffers.z
    )
    group.capture()
    out = runner.run(runner.dispatch(rows=1), z=torch.tensor([1 + 2j]))
    assert out.tolist() == [1 - 2j]


def test_an_interrupted_capture_is_made_again() -> None:
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 8)
    calls: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return x + 1

    wrapped = group.wrap(
        fn,
        x=gk.BufferSpec((rows,), torch.float32, pad=0),
        policy=gk.Policy.full(gk.Buckets.of(rows, 4, 8)),
    )
    with pytest.raises(KeyboardInterrupt):
        group.capture()
    group.capture()
    assert wrapped.runner.dispatch(rows=6).mode is gk.FULL


@pytest.mark.parametrize("pad", [gk.continue_(1), gk.repeat_last])
def test_pads_that_may_leave_the_valid_range_are_refused(pad: Any) -> None:
    with pytest.raises(gk.SpecError, match="valid="):
        gk.BufferSpec((gk.Dim("rows", 4),), torch.int64, pad=pad, valid=(2, 12))


def test_a_wrapped_module_is_watched() -> None:
    model = torch.nn.Linear(2, 2)
    group = gk.GraphGroup("cpu", checked=True)
    rows = gk.Dim("rows", 4)
    fast = group.wrap(model, input=gk.BufferSpec((rows, 2), torch.float32, pad=0))
    group.capture()
    fast(input=torch.ones(3, 2))
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(gk.StaleGraphError, match="weight was"):
        fast(input=torch.ones(3, 2))


@pytest.mark.parametrize("which", [0, 1])
def test_two_watched_modules_may_have_parameters_of_one_name(which: int) -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    group = gk.GraphGroup("cpu", checked=True)
    rows = gk.Dim("rows", 4)
    fast = group.wrap(
        lambda x: models[1](models[0](x)),
        x=gk.BufferSpec((rows, 2), torch.float32, pad=0),
        reads=models,
    )
    group.capture()
    fast(x=torch.ones(3, 2))
    models[which].weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(gk.StaleGraphError, match="weight"):
        fast(x=torch.ones(3, 2))


def test_views_of_a_buffer_are_bounded() -> None:
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 5000)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.uint8, pad=0))
    buffer = group.buffers["x"]
    for size in range(5000):
        buffer.view({"rows": size})
    assert len(buffer._views) <= 4096


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_a_producer_that_does_not_pad_is_told_in_checked_mode(device: str, value: float) -> None:
    group = gk.GraphGroup(device, checked=True)
    rows = gk.Dim("rows", 4)
    buffers = group.buffers.declare(
        h=gk.BufferSpec((rows, 2), torch.float32, pad=gk.by_producer(value))
    )
    runner = group.runner(
        "consumer",
        lambda h: h * 2,
        policy=gk.Policy.full(gk.Buckets.of(rows, 1, 4)),
        inputs={"h": gk.Resident(buffers.h)},
    )
    group.capture()
    dispatch = runner.dispatch(rows=3)
    buffers.h.tensor.fill_(1.0)
    with pytest.raises(gk.StateError, match=r"'h' should hold by_producer\(.*\) beyond row 3"):
        runner.run(dispatch)
    buffers.h.tensor[3:] = value
    assert runner.run(dispatch).tolist() == [[2.0, 2.0]] * 3


# -- declarations that used to be taken, and failed late or not at all -------------------------------


@pytest.mark.parametrize("dtype", [torch.quint8, torch.int4, torch.uint1, torch.bits8], ids=str)
def test_a_dtype_that_cannot_be_filled_is_refused_where_it_is_declared(dtype: torch.dtype) -> None:
    for declare in (
        lambda: gk.BufferSpec((batch,), dtype, pad=0),
        lambda: gk.Output((batch,), dtype),
    ):
        with pytest.raises(gk.SpecError, match=r"is quantized or packed.*torch\.uint8"):
            declare()


@pytest.mark.parametrize("together", [False, True])
def test_memory_is_adopted_by_one_buffer(together: bool) -> None:
    memory = torch.zeros(16)
    group = gk.GraphGroup("cpu")
    a = gk.BufferSpec((batch,), torch.float32, pad=0, adopt=memory[:8])
    b = gk.BufferSpec((batch,), torch.float32, pad=1, adopt=memory[4:12])
    apart = gk.BufferSpec((batch,), torch.float32, pad=1, adopt=memory[8:])
    if not together:
        group.buffers.declare(a=a)
    with pytest.raises(gk.SpecError, match=r"buffers 'a' and 'b' adopt the same memory"):
        group.buffers.declare(a=a, b=b) if together else group.buffers.declare(b=b)
    assert "b" not in group.buffers
    group.buffers.declare(a=a, apart=apart)


def test_an_output_is_bound_to_a_buffer_of_the_own_group() -> None:
    other = gk.GraphGroup("cpu").buffers.declare(h=gk.BufferSpec((batch,), torch.float32, pad=0)).h
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))
    with pytest.raises(gk.SpecError, match=r"outputs= names buffer 'h' of another group"):
        group.runner("r", lambda x: x + 1, policy=policy(gk.FULL), outputs=other)
    assert group.runners == ()


def test_what_prepare_returns_beyond_the_parameters_is_named() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))
    group.runner(
        "r", lambda x: x + 1, policy=policy(gk.FULL), prepare=lambda step: {"typo": torch.ones(1)}
    )
    with pytest.raises(gk.SpecError, match=r"prepare returned 'typo', which the function doesn't"):
        group.capture()


def test_a_masked_array_is_refused() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))
    runner = group.runner("r", lambda x: x + 1, policy=policy(gk.FULL))
    group.capture()
    masked = np.ma.masked_array(np.ones(3, np.float32), [True, False, False])
    with pytest.raises(gk.InputError, match="a masked array, whose mask would be lost"):
        runner.run(runner.dispatch(batch=3), x=masked)


def test_a_break_s_own_buffer_is_padded_by_each_of_its_dims(device: str) -> None:
    width = gk.Dim("width", 4)
    group = gk.GraphGroup(device)
    buf = group.buffers.declare(
        x=gk.BufferSpec((batch, width), torch.float32, pad={batch: 0, width: 0}),
        filled=gk.BufferSpec((batch, width), torch.float32, pad={batch: gk.repeat_last, width: 9}),
    )

    @gk.eager_break(rows="real", out=buf.filled)
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    runner = group.runner(
        "r",
        lambda x: fill(x) + 1,
        policy=gk.Policy.piecewise(gk.Buckets.grid({batch: (2, 8), width: (1, 4)})),
        outputs=gk.Output((batch, width), torch.float32),
    )
    group.capture(progress=False)
    x = torch.arange(6.0).view(3, 2)
    out = runner.run(runner.dispatch(batch=3, width=2), x=x)
    assert out.tolist() == (x * 2 + 1).tolist()
    rows = [[0.0, 2.0, 9.0, 9.0], [4.0, 6.0, 9.0, 9.0], [8.0, 10.0, 9.0, 9.0]]
    assert buf.filled.tensor.tolist() == rows + [rows[-1]] * 5


def test_a_wrapped_function_takes_ragged_rows_in_any_order() -> None:
    reqs, pages = gk.Dim("reqs", 4), gk.Dim("pages", 4)
    group = gk.GraphGroup("cpu")
    table = gk.BufferSpec((reqs, pages), torch.int64, pad=0)
    wrapped = group.wrap(lambda table: table.sum(1), table=table)
    group.capture(progress=False)
    batches: list[list[Any]] = [
        [[2, 3], [1]], [[1], [2, 3]], [[], [2, 3]], [[2], (1, 5, 3), []], [[1, 2, 3], [4, 5, 6]],
        [np.array([1]), np.array([2, 3])], [torch.tensor([1]), [2, 3]], [[], torch.tensor([2, 3])],
    ]  # fmt: skip
    for rows in batches:
        assert wrapped(table=rows).tolist() == [sum(int(x) for x in row) for row in rows]
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(gk.InputError, match="input 'table' contains itself, or is nested too deep"):
        wrapped(table=endless)
    with pytest.raises(gk.InputError, match=r"has shape \(1, 2, 2\), expected 2 axes"):
        wrapped(table=[[[1], [2, 3]]])


def test_memory_that_changes_its_size_in_a_recording_is_put_back() -> None:
    state, workspace, shrunk = torch.zeros(4), torch.empty(0), torch.ones(4)
    filled = torch.full((2,), 7.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.add_(1)
        shrunk.add_(1)
        shrunk.untyped_storage().resize_(0)
        filled.resize_(3, 4)
        torch.mul(x, 2, out=filled)
        torch.mul(x, 2, out=workspace)
        return workspace + 0

    assert gk.lint(fn, (torch.ones(3, 4),)) == ()
    assert state.tolist() == [0.0] * 4
    assert shrunk.tolist() == [1.0] * 4
    # Their elements are still there to be read and written: they have grown, as after any call.
    assert workspace.shape == filled.shape == (3, 4)
    held = [tensor.untyped_storage().nbytes() for tensor in (workspace, filled)]
    assert held == [12 * 4, 12 * 4]
    assert filled.flatten()[:2].tolist() == [7.0] * 2
    assert torch.mul(torch.ones(3, 4), 2, out=workspace).tolist() == [[2.0] * 4] * 3
