"""`GraphRunner.check` (rule 21, case N1): what it proves, what it names, and what it leaves behind."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit import FindingKind as Kind
from graphkit.testing import check_all

batch, length = gk.Dim("batch", 8), gk.Dim("length", 5)
F32 = torch.float32
X = gk.BufferSpec((batch, 3), F32, pad=0.0)
POLICY = gk.Policy.full(gk.Buckets.of(batch, 1, 4, 8))


def runner_of(
    fn: Any,
    device: str = "cpu",
    *,
    policy: gk.Policy = POLICY,
    checked: bool = False,
    specs: dict[str, gk.BufferSpec] | None = None,
    **options: Any,
) -> gk.GraphRunner:
    group = gk.GraphGroup(device, checked=checked)
    group.buffers.declare(**(specs or {"x": X}))
    runner = group.runner("r", fn, policy=policy, **options)
    group.capture()
    return runner


def rows(n: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).uniform(0.5, 1.5, (n, 3)).astype("f")


def kinds(report: gk.CheckReport) -> set[Kind]:
    return {finding.kind for finding in report.findings}


def named(report: gk.CheckReport, kind: Kind) -> list[str]:
    return [finding.what for finding in report.findings if finding.kind is kind]


# -- what passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3, 8])
def test_a_right_function_passes_at_every_size(device, checked, size):
    runner = runner_of(lambda x: x.relu() * 2, device, checked=checked)
    report = runner.check(runner.dispatch(batch=size), x=rows(size))
    assert report.passed
    assert report.findings == ()
    assert report.padded == gk.Comparison(agrees=True, largest=0.0)
    assert report.real is not None
    assert report.real.agrees
    assert (report.runner, report.mode, report.sizes) == ("r", gk.FULL, {"batch": size})


def test_padded_and_real_are_reported_apart(device):
    """Case N1 (vllm#55238): bit-equal at the padded size, close at the real one."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    spec = gk.BufferSpec((batch, 64), F32, pad=0.0)
    runner = runner_of(lambda x: x @ weight, device, specs={"x": spec}, reads=[weight])
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    report = runner.check(runner.dispatch(batch=3), x=x, rtol=1e-4, atol=1e-4)
    assert report.padded.agrees
    assert report.padded.largest == 0.0
    assert report.real is not None
    assert report.real.largest < 1e-4
    assert "against eager at the padded size: equal" in str(report)
    assert "[batch=4], batch [batch=3]: passed" in str(report)


def test_a_sum_over_rows_passes_where_its_pad_is_relied_on(device):
    mask = gk.BufferSpec((batch, 1), F32, pad=gk.relied(0.0))

    def fn(x, mask):
        return x - (x * mask).sum(0)

    runner = runner_of(fn, device, specs={"x": X, "mask": mask})
    inputs = {"x": rows(3), "mask": np.ones((3, 1), "f")}
    assert runner.check(runner.dispatch(batch=3), inputs).findings == ()


def test_a_scatter_into_a_scratch_row_passes(device):
    cache = torch.zeros(10, 3, device=device)

    def fn(idx, x):
        cache[idx] = x
        return cache.index_select(0, idx) + 1

    idx = gk.BufferSpec((batch,), torch.int64, pad=9, valid=(0, 10))
    runner = runner_of(
        fn, device, specs={"x": X, "idx": idx}, mutates=[gk.Scratch(cache, rows=[9])]
    )
    before = cache.clone()
    assert runner.check(runner.dispatch(batch=3), x=rows(3), idx=[0, 4, 8]).findings == ()
    assert torch.equal(cache, before)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("checked", [False, True])
def test_resident_buffers_are_compared_and_put_back(device, given, checked):
    def fn(state, x):
        state += x
        return state * 2

    runner = runner_of(
        fn,
        device,
        checked=checked,
        specs={"x": X, "state": X},
        inputs={"state": gk.Resident("state")},
        outputs=gk.Output((batch, 3), F32),
    )
    state = runner.binding.resident["state"].tensor
    state.copy_(torch.from_numpy(rows(8, seed=5)))
    before = state.clone()
    resident = {"state": rows(3, seed=1)} if given else None
    report = runner.check(runner.dispatch(batch=3), x=rows(3), resident=resident)
    assert report.findings == ()
    assert torch.equal(state, before)


def test_by_producer_padding_is_what_the_producer_owes(device):
    spec = gk.BufferSpec((batch, 3), F32, pad=gk.by_producer(0.0))
    runner = runner_of(
        lambda x: x - x.sum(0),
        device,
        checked=True,
        specs={"x": spec},
        inputs={"x": gk.Resident("x")},
    )
    assert runner.check(runner.dispatch(batch=3), resident={"x": rows(3)}).findings == ()


@pytest.mark.parametrize("layout", ["strided", "packed"])
@pytest.mark.parametrize("role", [gk.Fed("x"), gk.Resident("x")])
def test_two_dims_are_padded_each_in_its_way(device, layout, role):
    """Case P6: a row's tail must be masked, a padded row must not be."""
    pad = {batch: True, length: gk.relied(False)}
    specs = {
        "x": gk.BufferSpec((batch, length, 2), F32, pad=0.0, layout=layout),
        "mask": gk.BufferSpec((batch, length), torch.bool, pad=pad, layout=layout),
    }

    def fn(x, mask):
        weights = torch.where(mask[:, :, None], x, float("-inf")).softmax(dim=1)
        return (weights * x).sum(1)

    runner = runner_of(
        fn,
        device,
        policy=gk.Policy.full(gk.Buckets.grid({batch: [4, 8], length: [3, 5]})),
        specs=specs,
        inputs={"x": role},
        outputs=gk.Output((batch, 2), F32),
    )
    x = np.random.default_rng(0).uniform(0.5, 1.5, (3, 2, 2)).astype("f")
    mask = np.array([[True, False], [True, True], [True, True]])
    given = {"x": x} if isinstance(role, gk.Fed) else {}
    report = runner.check(
        runner.dispatch(batch=3, length=2),
        {"mask": mask, **given},
        resident={} if given else {"x": x},
    )
    assert report.findings == ()


@gk.eager_break(rows="real")
def attend(x):
    return x - x.sum(0)


@gk.eager_break
def scale(x):
    return x * (gk.current_run().context or 1.0)


def test_piecewise_graphs_are_compared_with_breaks_run_as_they_run_them(device):
    """A break that sees real rows only may sum over them."""
    runner = runner_of(
        lambda x: attend(x * 2) + 1,
        device,
        policy=gk.Policy.piecewise(gk.Buckets.of(batch, 1, 4, 8)),
        outputs=gk.Output((batch, 3), F32),
    )
    report = runner.check(runner.dispatch(batch=3), x=rows(3), rtol=1e-5, atol=1e-5)
    assert report.mode is gk.PIECEWISE
    assert report.findings == ()


def test_after_a_break_padded_rows_are_zero_in_both(device):
    runner = runner_of(
        lambda x: attend(x * 2).sum(0),
        device,
        policy=gk.Policy.piecewise(gk.Buckets.of(batch, 1, 4, 8)),
        outputs=gk.Output((3,), F32),
    )
    report = runner.check(runner.dispatch(batch=3), x=rows(3), rtol=1e-5, atol=1e-5)
    assert report.findings == ()


@gk.eager_break(rows="real")
def double_in_place(x):
    return x.mul_(2)


def test_after_a_break_in_place_the_rest_is_read_as_it_was(device):
    """Later segments read all of the memory, of which the break has changed the batch's rows."""
    runner = runner_of(
        lambda x: double_in_place(x + 1).sum(0),
        device,
        policy=gk.Policy.piecewise(gk.Buckets.of(batch, 1, 4, 8)),
        outputs=gk.Output((3,), F32),
    )
    report = runner.check(runner.dispatch(batch=3), x=rows(3), raise_on_failure=False)
    assert report.padded.agrees
    # Which is why a sum over them is wrong.
    assert named(report, Kind.REAL) == ["the output"]


def test_breaks_get_the_context_of_the_batch(device):
    runner = runner_of(
        lambda x: scale(x + 1) - 1, device, policy=gk.Policy.piecewise(gk.Buckets.of(batch, 1, 4))
    )
    dispatch = runner.dispatch(batch=3)
    assert runner.check(dispatch, x=rows(3), context=3.0).findings == ()
    assert runner.check(dispatch, x=rows(3)).findings == ()


def test_breaks_that_fill_a_buffer_are_compared_too(device):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(x=X, out=X)

    @gk.eager_break(rows="real", out=buffers.out)
    def double(x, out):
        torch.mul(x, 2, out=out)

    runner = group.runner(
        "r",
        lambda x: double(x + 1) - 1,
        policy=gk.Policy.piecewise(gk.Buckets.of(batch, 1, 4, 8)),
        outputs=gk.Output((batch, 3), F32),
    )
    group.capture()
    assert runner.check(runner.dispatch(batch=3), x=rows(3)).findings == ()
    assert runner.check(runner.dispatch(batch=4), x=rows(4)).findings == ()


def test_prepare_and_context_are_the_batchs_in_every_run(device):
    seen: list[gk.Phase] = []

    def prepare(step):
        seen.append(step.phase)
        table = step.state.setdefault("table", torch.zeros(1, device=device))
        table.fill_(1.0 if step.context is None else step.context)
        return {"factor": table}

    runner = runner_of(
        lambda x, factor: x * factor, device, prepare=prepare, outputs=gk.Output((batch, 3), F32)
    )
    del seen[:]
    report = runner.check(runner.dispatch(batch=3), x=rows(3), context=3.0)
    assert report.findings == ()
    assert set(seen) == {gk.Phase.WARMUP, gk.Phase.REPLAY, gk.Phase.EAGER}


@pytest.mark.parametrize("to", ["static", "pool", "host"])
def test_outputs_are_compared_wherever_they_go(device, to):
    outputs = {"a.0": gk.Output((batch, 3), F32, to=to), "b": gk.Output((3,), F32)}
    relied = gk.BufferSpec((batch, 3), F32, pad=gk.relied(0.0))
    runner = runner_of(
        lambda x: {"a": [x * 2], "b": x.sum(0)}, device, specs={"x": relied}, outputs=outputs
    )
    report = runner.check(runner.dispatch(batch=3), x=rows(3), rtol=1e-5, atol=1e-5)
    assert report.findings == ()


@pytest.mark.parametrize("private", [False, True])
def test_random_numbers_are_compared_from_one_state_and_said(device, private):
    generator = torch.Generator(device).manual_seed(3)

    def fn(x):
        return x * torch.rand(x.shape, device=x.device, generator=generator if private else None)

    runner = runner_of(
        fn, device, generators=[generator] if private else [], outputs=gk.Output((batch, 3), F32)
    )
    before = generator.get_state()
    report = runner.check(runner.dispatch(batch=3), x=rows(3))
    assert report.passed
    assert report.real is None
    assert "not judged" in str(report)
    assert kinds(report) == {Kind.RANDOM}
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("how", ["list", "read-only", "reversed", "tensor", "transposed"])
def test_inputs_come_as_run_takes_them(device, how):
    x = rows(3)
    given = {
        "list": x.tolist(),
        "read-only": np.broadcast_to(x[0], (3, 3)),
        "reversed": x[::-1],
        "tensor": torch.from_numpy(x).to(device),
        "transposed": torch.from_numpy(x).t(),
    }[how]
    runner = runner_of(lambda x: x * 2, device)
    assert runner.check(runner.dispatch(batch=3), {"x": given}).findings == ()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.complex64]
)
def test_every_dtype_is_compared(device, dtype):
    spec = gk.BufferSpec((batch, 3), dtype, pad=0)
    runner = runner_of(
        lambda x: x.clone(), device, specs={"x": spec}, outputs=gk.Output((batch, 3), dtype)
    )
    assert runner.check(runner.dispatch(batch=3), x=torch.ones(3, 3).to(dtype)).findings == ()


def test_a_function_that_takes_no_empty_batch_is_not_blamed(device):
    def fn(x):
        return x / x.abs().max()

    relied = gk.BufferSpec((batch, 3), F32, pad=gk.relied(0.0))
    runner = runner_of(fn, device, specs={"x": relied}, outputs=gk.Output((batch, 3), F32))
    report = runner.check(runner.dispatch(batch=0), x=rows(0))
    assert report.passed
    assert report.real is None
    assert named(report, Kind.SKIPPED) == ["the real size"]


# -- what fails, and what it names -----------------------------------------------------------------


def test_the_buffer_whose_padding_reaches_real_rows_is_named(device):
    """Case P2 (vllm#40047)."""

    def fn(x, n):
        y = x / n[:, None]
        return y / y.abs().amax()

    specs = {"x": X, "n": gk.BufferSpec((batch,), F32, pad=0.0)}
    runner = runner_of(fn, device, specs=specs, outputs=gk.Output((batch, 3), F32))
    dispatch = runner.dispatch(batch=3)
    inputs = {"x": rows(3), "n": np.ones(3, "f")}
    with pytest.raises(gk.CheckError, match=r"(?s)REAL: the output.*PADS: .*buffer 'n'") as raised:
        runner.check(dispatch, inputs)
    report = raised.value.report
    assert isinstance(report, gk.CheckReport)
    assert str(raised.value) == str(report)
    assert "buffer 'n'" in named(report, Kind.PADS)
    finding = report.failures[0]
    assert finding.rows == (0, 1, 2)
    assert report.padded.agrees
    # With the right pad only x is left, whose padding the maximum is taken over.
    specs = {"x": X, "n": gk.BufferSpec((batch,), F32, pad=1.0)}
    runner = runner_of(fn, device, specs=specs, outputs=gk.Output((batch, 3), F32))
    report = runner.check(runner.dispatch(batch=3), inputs, raise_on_failure=False)
    assert named(report, Kind.PADS) == ["buffer 'x'"]
    assert "say pad=gk.relied(0.0)" in str(report)


def test_an_index_pad_that_hits_a_real_row_is_found(device):
    """Case P1 (vllm#43810)."""
    cache = torch.zeros(10, 3, device=device)

    def fn(idx, x):
        cache[idx] = x
        return x + 1

    idx = gk.BufferSpec((batch,), torch.int64, pad=8)
    runner = runner_of(
        fn, device, specs={"x": X, "idx": idx}, mutates=[gk.Scratch(cache, rows=[9])]
    )
    cache.fill_(5.0)
    report = runner.check(
        runner.dispatch(batch=3), x=rows(3), idx=[0, 4, 7], raise_on_failure=False
    )
    assert named(report, Kind.REAL) == ["mutates[0]"]
    assert report.failures[0].rows == (8,)
    assert "Padding has written there: pad what says where" in str(report)


def test_a_scratch_row_that_nobody_declared_is_told_how_to_be(device):
    cache = torch.ones(10, 3, device=device)

    def fn(idx, x):
        cache[idx] = x
        return x + 1

    idx = gk.BufferSpec((batch,), torch.int64, pad=9, valid=(0, 10))
    runner = runner_of(fn, device, specs={"x": X, "idx": idx}, mutates=[cache])
    report = runner.check(
        runner.dispatch(batch=3), x=rows(3), idx=[0, 4, 7], raise_on_failure=False
    )
    assert "mutates=[gk.Scratch(tensor, rows=[9])]" in str(report)


@pytest.mark.filterwarnings("ignore::graphkit.CaptureWarning")
def test_undeclared_state_is_found_and_put_back(device):
    """Case P4 (vllm#36939)."""
    state = torch.zeros((), device=device)

    def fn(x):
        state.add_(1.0)
        return x * 2

    runner = runner_of(fn, device)
    before = state.clone()
    report = runner.check(runner.dispatch(batch=3), x=rows(3), raise_on_failure=False)
    assert kinds(report) == {Kind.UNDECLARED}
    assert "test_check.py" in report.failures[0].message
    assert torch.equal(state, before)


def test_what_is_baked_is_found(device):
    """Case P5: a Python number that changes from run to run."""
    number = [1.0]

    def fn(x):
        return x * number[0]

    runner = runner_of(fn, device, outputs=gk.Output((batch, 3), F32))
    assert runner.check(runner.dispatch(batch=3), x=rows(3)).passed
    number[0] = 2.0
    report = runner.check(runner.dispatch(batch=3), x=rows(3), raise_on_failure=False)
    assert named(report, Kind.PADDED) == ["the output"]
    assert named(report, Kind.REAL) == ["the output"]
    assert not report.padded.agrees
    assert "Something is baked into the graph" in str(report)
    assert re.search(r"at the padded size: different, by up to [\d.]+ in the output", str(report))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: {"a": x * 2, **({"b": x + 1} if x.shape[0] != 3 else {})},
        lambda x: {"a": x * 2, **({"c": x + 1} if x.shape[0] == 3 else {"b": x - 1})},
        lambda x: {"a": x * 2, "b": x.sum() if x.shape[0] == 3 else x - 1},
        lambda x: {"a": x * 2, "b": x.double() if x.shape[0] == 3 else x - 1},
    ],
)
def test_a_function_that_returns_something_else_at_the_real_size(device, fn):
    outputs = {"a": gk.Output((batch, 3), F32), "b": gk.Output((batch, 3), F32)}
    runner = runner_of(fn, device, outputs=outputs)
    report = runner.check(runner.dispatch(batch=3), x=rows(3), raise_on_failure=False)
    assert "output 'b'" in named(report, Kind.REAL)
    assert "output 'a'" not in named(report, Kind.REAL)
    assert report.real is not None
    assert not report.real.agrees


def test_padding_that_is_kept_and_read_is_found_twice(device):
    kept = gk.BufferSpec((batch, 3), F32, pad=gk.keep)
    runner = runner_of(lambda x: x - x.sum(0), device, specs={"x": kept})
    report = runner.check(runner.dispatch(batch=3), x=rows(3), raise_on_failure=False)
    assert {Kind.PADS, Kind.HISTORY} <= kinds(report)
    assert named(report, Kind.PADS) == ["buffer 'x'"]


def test_a_buffer_is_not_blamed_for_what_another_one_does(device):
    """An index that only leads to a table, beside padding that reaches the row before it."""
    table = torch.arange(12.0, device=device)

    def fn(x, idx):
        return x.flip(0).cumsum(0).flip(0) + table[idx][:, None]

    idx = gk.BufferSpec((batch,), torch.int64, pad=0, valid=(0, 12))
    runner = runner_of(
        fn, device, specs={"x": X, "idx": idx}, reads=[table], outputs=gk.Output((batch, 3), F32)
    )
    report = runner.check(
        runner.dispatch(batch=3), x=rows(3), idx=[5, 6, 7], rtol=1e-5, raise_on_failure=False
    )
    assert named(report, Kind.PADS) == ["buffer 'x'"]


def test_indices_are_tried_at_the_ends_of_their_range_where_that_is_safe():
    idx = gk.BufferSpec((batch,), torch.int64, pad=0, valid=(0, 12))
    runner = runner_of(
        lambda x, idx: x + (idx == 11).any(),
        specs={"x": X, "idx": idx},
        outputs=gk.Output((batch, 3), F32),
    )
    report = runner.check(
        runner.dispatch(batch=3), x=rows(3), idx=[5, 6, 7], raise_on_failure=False
    )
    assert named(report, Kind.PADS) == ["buffer 'idx'"]
    assert "with 11 there it changes" in str(report)


def test_two_buffers_that_leak_only_together_are_named_together(device):
    specs = {"x": X, "on": gk.BufferSpec((batch, 1), F32, pad=0.0)}
    runner = runner_of(
        lambda x, on: x - (x * on).sum(0), device, specs=specs, outputs=gk.Output((batch, 3), F32)
    )
    inputs = {"x": rows(3), "on": np.ones((3, 1), "f")}
    report = runner.check(runner.dispatch(batch=3), inputs, raise_on_failure=False)
    assert named(report, Kind.PADS) == ["buffers 'x' and 'on'"]


def test_an_in_place_change_is_compared(device):
    number = [1.0]

    def fn(state):
        state.mul_(number[0])
        return state.sum() * 0

    runner = runner_of(
        fn, device, specs={"state": X}, inputs={"state": gk.Resident("state")},
        outputs=gk.Output((), F32),
    )  # fmt: skip
    number[0] = 2.0
    report = runner.check(
        runner.dispatch(batch=3), resident={"state": rows(3)}, raise_on_failure=False
    )
    assert named(report, Kind.PADDED) == ["buffer 'state'"]


def test_a_history_that_cant_be_made_is_said(device):
    def prepare(step):
        if step.phase is gk.Phase.REPLAY and step.context is None:
            raise ValueError("a replay needs its batch")

    runner = runner_of(lambda x: x + 1, device, prepare=prepare)
    report = runner.check(runner.dispatch(batch=3), x=rows(3), context="the batch")
    assert report.passed
    assert named(report, Kind.SKIPPED) == ["history"]
    assert "ValueError: a replay needs its batch" in str(report)


# -- what it leaves behind, and what it refuses ----------------------------------------------------


def test_memory_generators_and_counts_are_as_before(device):
    state = torch.full((3,), 7.0, device=device)

    def fn(x):
        state.add_(x.sum(0))
        return x + torch.rand((), device=x.device)

    relied = gk.BufferSpec((batch, 3), F32, pad=gk.relied(0.0))
    runner = runner_of(fn, device, specs={"x": relied}, mutates=[state])
    dispatch = runner.dispatch(batch=3)
    runner.run(dispatch, x=rows(3))
    x = runner.binding.fed["x"].tensor
    rng = runner.backend.rng_state([])
    before = (state.clone(), x.clone())
    counts = [(e.bucket, e.replays) for e in runner.entries], runner.eager_runs
    runner.check(dispatch, x=rows(3, seed=9), rtol=1e-4)
    assert torch.equal(state, before[0])
    assert torch.equal(x, before[1])
    assert ([(e.bucket, e.replays) for e in runner.entries], runner.eager_runs) == counts
    leaves = torch.utils._pytree.tree_leaves
    for mine, theirs in zip(leaves(rng), leaves(runner.backend.rng_state([])), strict=True):
        assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)


def test_an_exception_of_the_functions_arrives_and_memory_is_put_back():
    fails = [False]
    state = torch.zeros(3)

    def fn(x):
        state.add_(1.0)
        if fails[0]:
            raise ZeroDivisionError("mine")
        return x * 2

    runner = runner_of(fn, mutates=[state])
    fails[0] = True
    with pytest.raises(ZeroDivisionError, match="mine"):
        runner.check(runner.dispatch(batch=3), x=rows(3))
    assert state.tolist() == [0.0, 0.0, 0.0]
    fails[0] = False
    assert runner.check(runner.dispatch(batch=3), x=rows(3)).passed


def test_leases_end_in_checked_mode(device):
    runner = runner_of(lambda x: x * 2, device, checked=True)
    dispatch = runner.dispatch(batch=3)
    out = runner.run(dispatch, x=rows(3))
    runner.check(dispatch, x=rows(3))
    with pytest.raises(gk.StaleOutputError):
        out.sum()


def test_there_is_nothing_to_check_without_a_graph():
    runner = runner_of(lambda x: x * 2)
    with pytest.raises(gk.StateError, match=r"EAGER for batch=3.*has no graph.*nothing to check"):
        runner.check(runner.dispatch(batch=3, eager="so"), x=rows(3))


def test_wrong_inputs_are_refused_as_by_run():
    runner = runner_of(lambda x, y: x + y, specs={"x": X, "y": X}, inputs={"y": gk.Resident("y")})
    dispatch = runner.dispatch(batch=3)
    with pytest.raises(gk.InputError, match="input 'x': got shape"):
        runner.check(dispatch, x=rows(2))
    with pytest.raises(gk.InputError, match="'z' is unknown"):
        runner.check(dispatch, x=rows(3), z=1)
    with pytest.raises(gk.InputError, match=r"resident 'x': it is no resident input; those are: y"):
        runner.check(dispatch, x=rows(3), resident={"x": rows(3)})
    with pytest.raises(
        gk.InputError, match=r"resident 'y': got \(2, 3\) of torch.float32, expected"
    ):
        runner.check(dispatch, x=rows(3), resident={"y": rows(2)})


def test_a_check_is_one_run_at_a_time():
    """Nobody runs between the runs of a check, nor inside one: neither another thread nor its own."""
    outcomes: list[str] = []
    phases: set[gk.Phase] = set()
    runner: gk.GraphRunner | None = None

    def meddle() -> None:
        try:
            runner.run(runner.dispatch(batch=1), x=rows(1))
            outcomes.append("ran")
        except gk.ConcurrentRunError:
            outcomes.append("refused")

    def prepare(step):
        if runner is not None:
            phases.add(step.phase)
            thread = threading.Thread(target=meddle)
            thread.start()
            thread.join()
            meddle()

    runner = runner_of(lambda x: x * 2, prepare=prepare)
    checked = runner
    assert checked.check(checked.dispatch(batch=3), x=rows(3)).passed
    assert phases == {gk.Phase.WARMUP, gk.Phase.REPLAY, gk.Phase.EAGER}
    assert set(outcomes) == {"refused"}
    # And afterwards anybody may run again.
    runner = None
    checked.run(checked.dispatch(batch=1), x=rows(1))


def test_no_other_thread_runs_between_the_runs_of_a_check():
    outcomes: list[bool] = []
    runner = runner_of(lambda x: x * 2)
    shared = runner.shared

    def try_it() -> None:
        outcomes.append(shared.lock.acquire(False))

    with shared.lent("the check"):
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        assert shared.lock.acquire(False)
        assert not shared.lock.acquire(False)
        shared.lock.release()
    assert outcomes == [False]
    assert shared.lock.acquire(False)
    shared.lock.release()


def test_a_check_while_something_runs_is_refused():
    runner: gk.GraphRunner | None = None
    found: list[str] = []

    def prepare_host(step):
        if runner is not None:
            with pytest.raises(gk.ConcurrentRunError, match="check of runner 'r'") as raised:
                runner.check(runner.dispatch(batch=1), x=rows(1))
            found.append(str(raised.value))

    runner = runner_of(lambda x: x * 2, prepare_host=prepare_host)
    runner.run(runner.dispatch(batch=1), x=rows(1))
    assert found


def test_reports_are_values():
    runner = runner_of(lambda x: x * 2)
    report = runner.check(runner.dispatch(batch=3), x=rows(3))
    with pytest.raises(AttributeError):
        report.runner = "other"
    assert report.bucket["batch"] == 4
    assert repr(Kind.PADS) == "FindingKind.PADS"
    assert [kind.name for kind in Kind if not kind.is_failure] == [
        "RANDOM",
        "NONDETERMINISTIC",
        "SKIPPED",
    ]


def cached(device: str, scratch: Any, *, adopts: bool = True) -> gk.GraphRunner:
    """Writes a cache in a resident buffer of fixed shape, whose row 15 is for padding."""
    cache = torch.zeros(16, 3, device=device)
    group = gk.GraphGroup(device)
    spec = gk.BufferSpec((16, 3), F32, adopt=cache if adopts else None)
    slots = gk.BufferSpec((batch,), torch.int64, pad=15, valid=(0, 16))
    buffers = group.buffers.declare(x=X, slots=slots, cache=spec)

    def fn(x, slots, cache):
        cache[slots] = x
        return cache[slots] * 2

    memory = cache if adopts else buffers.cache.tensor
    runner = group.runner(
        "w",
        fn,
        policy=gk.Policy.full(gk.Buckets.powers(batch)),
        inputs={"cache": gk.Resident("cache")},
        mutates=scratch(memory),
    )
    group.capture(progress=False)
    return runner


@pytest.mark.parametrize("adopts", [True, False])
@pytest.mark.parametrize("scratch", [15, [15], slice(15, 16)])
def test_a_scratch_row_in_a_resident_buffer_is_left_out(device, adopts, scratch):
    runner = cached(device, lambda memory: [gk.Scratch(memory, rows=scratch)], adopts=adopts)
    before = runner.binding.resident["cache"].tensor.clone()
    inputs = {"x": rows(3), "slots": [0, 4, 8]}
    assert runner.check(runner.dispatch(batch=3), inputs).findings == ()
    assert torch.equal(runner.binding.resident["cache"].tensor, before)
    check_all(runner, inputs=inputs_of)


def inputs_of(dispatch: gk.Dispatch) -> dict[str, Any]:
    count = dispatch.sizes["batch"]
    return {"x": rows(count), "slots": np.arange(count)}


def test_a_scratch_row_is_left_out_of_any_view(device):
    """Rows of a part of the cache, as a layer's part of a larger one is."""
    runner = cached(device, lambda memory: [gk.Scratch(memory[4:], rows=11)])
    assert runner.check(runner.dispatch(batch=3), inputs_of(runner.dispatch(batch=3))).passed
    runner = cached(device, lambda memory: [gk.Scratch(memory[:, :2], rows=15)])
    report = runner.check(
        runner.dispatch(batch=3), inputs_of(runner.dispatch(batch=3)), raise_on_failure=False
    )
    # The third column is not said to be scratch.
    assert "buffer 'cache'" in named(report, Kind.REAL)


def test_only_scratch_rows_are_left_out(device):
    runner = cached(device, lambda memory: [gk.Scratch(memory, rows=14)])
    report = runner.check(
        runner.dispatch(batch=3), inputs_of(runner.dispatch(batch=3)), raise_on_failure=False
    )
    assert "buffer 'cache'" in named(report, Kind.REAL)
    assert "pad what says where to write with a scratch row" in str(report)
    assert "gk.Scratch(group" not in str(report)


def test_a_scratch_row_in_a_buffer_that_nobody_declared_is_told_how_to_be(device):
    runner = cached(device, lambda memory: [])
    report = runner.check(
        runner.dispatch(batch=3), inputs_of(runner.dispatch(batch=3)), raise_on_failure=False
    )
    assert named(report, Kind.REAL) == ["buffer 'cache'"]
    advice = "mutates=[gk.Scratch(group.buffers['cache'].tensor, rows=["
    found = [f.message for f in report.failures]
    assert all(f"{advice}15])]" in message for message in found), found
