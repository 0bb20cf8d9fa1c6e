"""What a break sees at a replay: this step's sizes, rows, prepared data, context and Python state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk
from tests.piecewise.harness import ROWS, WIDTH, declare, num_segments, rows, run, runner_of


def test_the_function_itself_runs_at_each_replay_with_its_python_state(device):
    factor = [1.0]
    calls = []

    @gk.eager_break
    def middle(h):
        calls.append(gk.current_run().phase)
        return h * factor[0]

    runner = runner_of(device, lambda x: middle(x + 1) - 1)
    calls.clear()
    for factor[0] in (2.0, 3.0):
        x = rows(device, 3)
        torch.testing.assert_close(run(runner, x), (x + 1) * factor[0] - 1)
    assert calls == [gk.Phase.REPLAY] * 2


@pytest.mark.parametrize("mode", ["real", "bucket", "mapping"])
def test_rows(device, mode):
    seen = []

    @gk.eager_break(rows={"h": ROWS} if mode == "mapping" else mode)
    def middle(weight, h, *, again):
        seen.append((tuple(weight.shape), h.shape[0], again.shape[0]))
        return h @ weight

    weight = torch.eye(WIDTH, device=device) * 2
    runner = runner_of(
        device,
        lambda x: middle(weight, x * 1, again=x * 1) + 1,
        4,
        8,
        outputs=gk.Output((ROWS, WIDTH), torch.float32),
    )
    for count in (1, 3, 4, 5, 8):
        seen.clear()
        x = rows(device, count, count)
        torch.testing.assert_close(run(runner, x), x * 2 + 1)
        padded = 4 if count <= 4 else 8
        h = padded if mode == "bucket" else count
        again = count if mode == "real" else padded
        assert seen == [((WIDTH, WIDTH), h, again)]


def test_a_mapping_names_axes(device):
    seen = []

    @gk.eager_break(rows={"h": {1: ROWS}})
    def middle(h):
        seen.append(tuple(h.shape))
        return h * 2

    runner = runner_of(device, lambda x: middle((x * 1).t().contiguous()).t() + 1, 8)
    seen.clear()
    x = rows(device, 5)
    torch.testing.assert_close(run(runner, x), x * 2 + 1)
    assert seen == [(WIDTH, 5)]


def test_buffers_are_cut_in_every_axis_and_batches_of_no_rows_work(device):
    reqs, pages = gk.Dim("reqs", 4), gk.Dim("pages", 8)
    group = gk.GraphGroup(device)
    group.buffers.declare(
        table=gk.BufferSpec((reqs, pages), torch.int32, pad=9),
        starts=gk.BufferSpec((reqs + 1,), torch.int32, pad=gk.repeat_last),
    )
    seen = []

    @gk.eager_break(rows="real")
    def middle(table, starts):
        seen.append(
            (tuple(table.shape), tuple(starts.shape), table.max().item() if table.numel() else 0)
        )
        return table.sum(1)

    runner = group.runner(
        "model",
        lambda table, starts: middle(table, starts) + 1,
        policy=gk.Policy.piecewise(gk.Buckets.grid({reqs: [2, 4], pages: [4, 8]})),
        outputs=gk.Output((reqs,), torch.int64),
    )
    group.capture()
    for r, p in ((1, 3), (2, 4), (3, 5), (4, 8), (0, 1)):
        table = np.arange(r * p, dtype=np.int32).reshape(r, p) % 8
        starts = np.zeros(r + 1, dtype=np.int32)
        made = runner.run(runner.dispatch(reqs=r, pages=p), table=table, starts=starts)
        assert made.tolist() == (table.sum(1) + 1).tolist()
        assert seen[-1][:2] == ((r, p), (r + 1,))
        assert seen[-1][2] < 8


def test_with_one_bucket_real_rows_have_to_be_said(device):
    middle = gk.eager_break(lambda h: h * 2, rows="real")
    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, lambda x: middle(x * 1), 4)
    message = str(caught.value)
    assert (
        "wants real rows, and argument 0: axis 0 of size 4 could be 4 or rows, and 1 bucket can't tell."
        in message
    )
    assert "Say it, as eager_break(rows={parameter: dim})" in message
    assert "outputs=" not in message


def test_current_run_gives_dispatch_prepared_context_and_state(device):
    def prepare(step):
        step.state["calls"] = step.state.get("calls", 0) + 1
        return {"plan": step.dispatch.sizes["rows"] * 10}

    seen = []

    @gk.eager_break
    def middle(h):
        step = gk.current_run()
        seen.append(
            (
                step.dispatch.sizes["rows"],
                step.prepared["plan"],
                step.context,
                step.host["x"].shape[0] if "x" in step.host else None,
                step.views["x"].shape[0],
            )
        )
        return h * step.prepared["plan"]

    def fn(x, plan):
        with pytest.raises(gk.StateError, match="in a runner's function"):
            gk.current_run()
        return middle(x + 1)

    runner = runner_of(device, fn, prepare=prepare)
    for count, context in ((3, "a"), (4, None), (2, ["b"])):
        seen.clear()
        x = rows(device, count)
        made = runner.run(runner.dispatch(rows=count), x=x.cpu().numpy(), context=context)
        torch.testing.assert_close(made, (x + 1) * count * 10)
        assert seen == [(count, count * 10, context, 4, 4)]
    with pytest.raises(gk.StateError, match="outside a run"):
        gk.current_run()


def test_eager_runs_and_piecewise_give_the_same_step(device):
    seen = []

    @gk.eager_break(rows="real")
    def middle(h):
        step = gk.current_run()
        seen.append((h.shape[0], step.dispatch.sizes["rows"], step.context, step.dispatch.mode))
        return h * 2

    runner = runner_of(device, lambda x: middle(x + 1))
    seen.clear()
    for count in (5, 12):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x, context=count), (x + 1) * 2)
    assert seen == [(5, 5, 5, gk.PIECEWISE), (12, 12, 12, gk.EAGER)]
    assert runner.eager_runs == 1


def test_a_break_in_a_full_graph_is_captured(device):
    calls = []

    @gk.eager_break
    def middle(h):
        calls.append(1)
        return h * 2

    runner = runner_of(device, lambda x: middle(x + 1) - 1, mode=gk.FULL)
    calls.clear()
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), (x + 1) * 2 - 1)
    assert calls == []


def test_full_and_piecewise_routes_over_one_function(device):
    calls = []

    @gk.eager_break
    def middle(h):
        calls.append(1)
        return h * 2

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0))
    policy = gk.Policy(
        [
            gk.Route(gk.PIECEWISE, gk.Buckets.of(ROWS, 3, 8)),
            gk.Route(gk.FULL, gk.Buckets.of(ROWS, 2)),
        ]
    )
    runner = group.runner("model", lambda x: middle(x + 1) - 1, policy=policy)
    group.capture()
    for count, expected in ((2, 0), (5, 1)):
        calls.clear()
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), (x + 1) * 2 - 1)
        assert len(calls) == expected


def test_outside_any_runner_a_break_is_the_plain_function(device):
    @gk.eager_break(rows="real")
    def middle(h, k=3):
        """Doc."""
        return h * k

    assert middle(2) == 6
    assert middle(2, k=4) == 8
    assert middle.__name__ == "middle"
    assert middle.__doc__ == "Doc."
    with pytest.raises(TypeError):
        middle()


def test_outputs_and_leases_are_those_of_full(device):
    middle = gk.eager_break(lambda h: h * 2, rows="real")
    runner = runner_of(device, lambda x: middle(x + 1) - 1, checked=True)
    first = run(runner, rows(device, 3))
    torch.testing.assert_close(first.clone(), (rows(device, 3) + 1) * 2 - 1)
    run(runner, rows(device, 3, 1))
    with pytest.raises(gk.StaleOutputError):
        first.sum()
    x = rows(device, 3)
    dispatch = runner.dispatch(rows=3)
    kept = runner.run(dispatch, x=x, clone=True)
    runner.run(dispatch, x=x + 1)
    torch.testing.assert_close(kept, (x + 1) * 2 - 1)


@pytest.mark.parametrize("to", ["static", "pool", "host"])
def test_every_destination_of_an_output(device, to):
    middle = gk.eager_break(lambda h: h * 2, rows="real")
    output = gk.Output((ROWS, WIDTH), torch.float32, to=to)
    runner = runner_of(device, lambda x: middle(x + 1) - 1, outputs=output)
    for count in (1, 3, 8):
        x = rows(device, count)
        made = run(runner, x)
        if device == "cuda":
            torch.cuda.synchronize()
        torch.testing.assert_close(made.cpu(), ((x + 1) * 2 - 1).cpu())


def test_wrap_takes_a_piecewise_policy_and_a_context(device):
    seen = []

    @gk.eager_break(rows="real")
    def middle(h):
        seen.append(gk.current_run().context)
        return h.cumsum(0)

    group = gk.GraphGroup(device)
    fast = group.wrap(
        lambda x: middle(x * 2),
        x=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0),
        policy=gk.Policy.piecewise(gk.Buckets.powers(ROWS)),
        name="fast",
    )
    group.capture()
    x = rows(device, 5)
    torch.testing.assert_close(fast(x, context="here"), (x * 2).cumsum(0))
    assert seen[-1] == "here"


def test_resident_buffers_and_recapture(device):
    middle = gk.eager_break(lambda h: h.cumsum(0), rows="real")
    group = gk.GraphGroup(device)
    runner = declare(group, lambda x: middle(x * 2), inputs={"x": gk.Resident("x")})
    group.capture()
    buffer = group.buffers["x"]
    for _ in range(2):
        for count in (8, 3, 5):
            x = rows(device, count)
            buffer.tensor.fill_(float("nan"))
            buffer.view({"rows": count}).copy_(x)
            torch.testing.assert_close(runner.run(runner.dispatch(rows=count)), (x * 2).cumsum(0))
        group.invalidate()
        group.capture()
    group.release()
    group.capture()
    buffer.view({"rows": 2}).copy_(rows(device, 2))
    torch.testing.assert_close(runner.run(runner.dispatch(rows=2)), (rows(device, 2) * 2).cumsum(0))
    assert num_segments(runner) == [2, 2, 2]


def test_random_numbers_differ_in_segments_and_in_breaks(device):
    @gk.eager_break
    def middle(h):
        return h + torch.rand_like(h)

    def fn(x):
        first = torch.rand_like(x)
        second = middle(x * 0)
        return {"first": first, "second": second * 1, "third": torch.rand_like(x)}

    runner = runner_of(device, fn, 1, 8)
    seen = set()
    for _ in range(3):
        for value in run(runner, rows(device, 8)).values():
            seen.add(round(float(value.sum()), 6))
    assert len(seen) == 9
