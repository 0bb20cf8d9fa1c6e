"""The checks of `graphkit.testing`, one by one: what each finds, what it takes, and what it leaves behind."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit import testing
from graphkit.backends.recording import RecordingBackend
from graphkit.testing.boundaries import boundary_batches
from graphkit.testing.contents import contents_for

from . import planted
from .planted import POLICY, ROWS, X0, X, batch, captured

CHECKS = [
    testing.check_all,
    testing.check_dispatch,
    testing.check_every_bucket,
    testing.check_history_independence,
    testing.check_matches_eager,
    testing.check_no_allocation,
    testing.check_one_run_at_a_time,
    testing.check_outputs_survive,
    testing.check_padding_independence,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "make",
    [
        planted.elementwise,
        planted.everything_in_checked_mode,
        planted.a_resident_buffer_changed_in_place,
        planted.state_that_is_declared,
        planted.random_numbers,
        planted.breaks_that_see_real_rows,
        planted.a_wrapped_module,
        planted.two_runners_that_share_a_buffer,
    ],
    ids=lambda make: make.__name__,
)
def test_each_check_passes_what_is_right(device, make, check):
    target, given = planted.Planted(make).target(device)
    check(target, **given)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_leaves_everything_as_it_was(device, check):
    state = torch.full((3,), 4.0, device=device)

    def fn(x, held):
        state.add_(x.sum(0))
        held.add_(x)
        return x + state

    runner = captured(
        device,
        fn,
        {"x": X0, "held": X},
        inputs={"held": gk.Resident("held")},
        outputs=ROWS,
        mutates=[state],
    )
    held = runner.binding.resident["held"].tensor
    held.fill_(3.0)
    rng = torch.get_rng_state()
    check(runner, rtol=1e-4)
    assert state.tolist() == [4.0] * 3
    assert bool((held == 3.0).all())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [entry.replays for entry in runner.entries] == [0, 0, 0]
    assert runner.shared.checked is False


def test_matches_eager_finds_what_is_baked_and_nothing_else(device):
    wrong = planted.s4_an_attribute_that_was_set_after_the_capture(device)
    with pytest.raises(gk.CheckError, match=r"the smallest that fails, number 2\):\nrunner 'r'"):
        testing.check_matches_eager(wrong)
    # Padding reaches real rows, and changes nothing with the pad that it has.
    leaks = planted.a_suffix_sum_that_padding_happens_not_to_change(device)
    reports = testing.check_matches_eager(leaks, rtol=1e-5)
    assert any(not report.passed for report in reports)
    with pytest.raises(gk.CheckError, match="PADS: the output"):
        testing.check_padding_independence(leaks)


def test_padding_independence_names_the_smallest_batch(device):
    leaks = planted.a_suffix_sum_that_padding_happens_not_to_change(device)
    with pytest.raises(gk.CheckError, match=r"^runner 'r', dispatch\(batch=2\) \(the smallest"):
        testing.check_padding_independence(leaks)


def test_history_independence_finds_what_an_order_changes(device):
    """State that nobody declared, so that nobody puts it back."""
    memory = torch.zeros(3, device=device)

    def fn(x):
        memory.mul_(0.5).add_(x.sum(0))
        return x + memory

    with warnings.catch_warnings():
        # That it isn't declared is said where warm-ups are watched.
        warnings.simplefilter("ignore", gk.CaptureWarning)
        runner = captured(device, fn, {"x": X0}, outputs=ROWS)
    message = r"dispatch\(batch=\d\): the output depends on what ran before: after runner 'r'"
    with pytest.raises(gk.CheckError, match=message):
        testing.check_history_independence(runner)


def test_every_bucket_is_asked_for_as_a_batch_of_its_own(device):
    runner = planted.full_and_piecewise_side_by_side(device)
    reports = testing.check_every_bucket(runner)
    graphs = {(report.mode, report.bucket) for report in reports}
    assert graphs == set(runner.dispatcher.graphs)
    assert all(report.sizes == report.bucket.sizes for report in reports)


def test_a_bucket_that_nobody_captured_is_named(device):
    group = gk.GraphGroup(device)
    group.buffers.declare(x=X)
    runner = group.runner("r", lambda x: x * 2, policy=POLICY, outputs=ROWS)
    message = r"runner 'r': none of its 3 graphs is captured; call capture\(\) on the group first"
    for check in CHECKS:
        with pytest.raises(gk.CheckError, match=message):
            check(runner)
    # A group is captured by the check.
    testing.check_all(group)
    assert group.state is gk.State.CAPTURED
    entry = runner.entries[0]
    entry.release()
    runner.dispatcher.forget(entry.mode, entry.bucket)
    with pytest.raises(gk.CheckError, match=r"FULL bucket \[batch=1\] isn't captured"):
        testing.check_every_bucket(runner)


@pytest.mark.parametrize("target", [None, 3, "runner", gk.GraphRunner])
def test_other_targets_are_refused(target: Any):
    with pytest.raises(
        gk.CheckError, match="a check takes a runner, a wrapped function or a group"
    ):
        testing.check_all(target)
    with pytest.raises(gk.CheckError, match="the group has no runner to check"):
        testing.check_all(captured_nothing())


def captured_nothing() -> gk.GraphGroup:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=X)
    return group


def test_batches_inputs_and_context_are_the_callers(device):
    seen: list[Any] = []

    def prepare(step):
        seen.append((step.phase, step.context))

    runner = captured(device, lambda x: x * 2, prepare=prepare, outputs=ROWS)
    del seen[:]
    reports = testing.check_all(
        runner,
        batches=[{"batch": 3}, {"batch": 7}],
        inputs=lambda dispatch: {"x": np.ones((dispatch.sizes["batch"], 3), "f")},
        context=lambda dispatch: dispatch.sizes["batch"],
    )
    assert [report.sizes["batch"] for report in reports] == [3, 7]
    replays = {context for phase, context in seen if phase is gk.Phase.REPLAY}
    # None is the context of the batch that fills the bucket.
    assert replays == {3, 7, None}


def test_resident_rows_are_the_callers_or_made_up(device):
    runner = planted.an_output_in_its_own_input(device)
    testing.check_all(runner, resident=lambda d: {"state": np.ones((d.sizes["batch"], 3), "f")})
    with pytest.raises(gk.InputError, match="resident 'state': got") as raised:
        testing.check_matches_eager(runner, resident=lambda d: {"state": np.ones((20, 3), "f")})
    assert "in the check of runner 'r', dispatch(batch=0)" in raised.value.__notes__[0]


def test_batches_without_a_graph_are_passed_over_and_strict_runners_too(device):
    policy = gk.Policy.full(gk.Buckets.of(batch, 1, 4))
    for strict in (False, True):
        runner = captured(device, lambda x: x * 2, policy=policy, outputs=ROWS, strict=strict)
        assert {report.sizes["batch"] for report in testing.check_all(runner)} == {0, 1, 2, 3, 4}
        with pytest.raises(gk.CheckError, match="runner 'r': none of the batches has a graph"):
            testing.check_matches_eager(runner, batches=[{"batch": 9}])


@pytest.mark.filterwarnings("ignore::graphkit.UnreachableBucketWarning")
def test_dispatch_is_judged_by_the_policys_own_cost(device):
    policy = gk.Policy(
        [gk.Route(gk.FULL, gk.Buckets.of(batch, 1, 4, 9))], cost=lambda b: -b["batch"]
    )
    runner = captured(device, lambda x: x * 2, policy=policy, outputs=ROWS)
    testing.check_dispatch(runner)
    assert runner.dispatch(batch=1).bucket["batch"] == 9


def test_dispatch_checks_variants_lengths_and_padding(device):
    testing.check_dispatch(planted.variants_that_are_baked(device))
    reqs, tokens = gk.Dim("reqs", 4), gk.Dim("tokens", 16)
    policy = gk.Policy(
        [
            gk.Route(gk.FULL, gk.Buckets.varlen(reqs, tokens, max_query_len=4), max_padding=2),
            gk.Route(gk.PIECEWISE, gk.Buckets.of(tokens, 3, 16, reqs=gk.at_most(tokens))),
        ]
    )
    specs = {
        "x": gk.BufferSpec((tokens, 3), torch.float32, pad=0.0),
        "y": gk.BufferSpec((reqs, 3), torch.float32, pad=0.0),
    }
    runner = captured(
        device,
        lambda x, y: (x * 2, y + 1),
        specs,
        policy=policy,
        outputs={
            "0": gk.Output((tokens, 3), torch.float32),
            "1": gk.Output((reqs, 3), torch.float32),
        },
    )
    testing.check_all(runner)


def test_a_dispatch_that_raises_is_said(monkeypatch):
    runner = planted.elementwise("cpu")

    def fails(**named):
        raise KeyError("lost")

    monkeypatch.setattr(runner, "dispatch", fails)
    with pytest.raises(gk.CheckError, match=r"dispatch\(batch=0\) raised KeyError: 'lost'"):
        testing.check_dispatch(runner)


@pytest.mark.gpu
def test_a_run_that_allocates_is_found():
    runner = captured(
        "cuda",
        lambda x, offset: x - offset,
        {"x": X0},
        prepare=lambda step: {"offset": step.views["x"].sum(0)},
        outputs=ROWS,
    )
    with pytest.raises(gk.CheckError, match=r"a run allocated \d+ bytes on cuda.*step.state"):
        testing.check_no_allocation(runner)


def test_outputs_that_move_are_found(monkeypatch):
    runner = planted.elementwise("cpu")
    right, kept = gk.GraphRunner._result, []

    def elsewhere(self, *args: Any) -> Any:
        kept.append(right(self, *args).clone())
        return kept[-1]

    monkeypatch.setattr(gk.GraphRunner, "_result", elsewhere)
    with pytest.raises(gk.CheckError, match="the output lies elsewhere after the next run"):
        testing.check_no_allocation(runner, batches=[{"batch": 3}])


# -- what is made up -------------------------------------------------------------------------------


def test_boundaries_of_one_dim():
    dispatcher = gk.Dispatcher(gk.Policy.full(gk.Buckets.of(batch, 4, 7)), [batch])
    sizes = [named["batch"] for named in boundary_batches(dispatcher)]
    assert sizes == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_boundaries_keep_what_requests_and_tokens_owe_each_other():
    reqs, tokens = gk.Dim("reqs", 6), gk.Dim("tokens", 20)
    policy = gk.Policy(
        [
            gk.Route(gk.FULL, gk.Buckets.uniform(reqs, tokens, query_len=3)),
            gk.Route(gk.FULL, gk.Buckets.varlen(reqs, tokens, max_query_len=2)),
            gk.Route(gk.PIECEWISE, gk.Buckets.of(tokens, 8, 20, reqs=gk.at_most(tokens))),
        ]
    )
    batches = boundary_batches(gk.Dispatcher(policy, [reqs, tokens]))
    totals = [named["reqs"] + named["tokens"] for named in batches]
    assert totals == sorted(totals)
    kinds = set()
    for named in batches:
        assert 0 <= named["reqs"] <= named["tokens"] <= 20
        assert named["reqs"] or not named["tokens"]
        kinds.add((named.get("query_len"), named.get("max_query_len")))
        if "query_len" in named:
            assert named["tokens"] == 3 * named["reqs"]
        if "max_query_len" in named:
            assert named["tokens"] <= 2 * named["reqs"]
    assert kinds == {(3, None), (None, 2), (None, None)}
    assert {"reqs": 0, "tokens": 0} in batches


def test_contents_are_legal_and_the_same_each_time(device):
    specs = {
        "x": X,
        "slot": gk.BufferSpec((batch,), torch.int32, pad=3, valid=(0, 12)),
        "few": gk.BufferSpec((batch,), torch.int64, pad=0, valid=(0, 3)),
        "start": gk.BufferSpec((batch + 1,), torch.int64, pad=gk.repeat_last),
        "plain": gk.BufferSpec((batch,), torch.int64, pad=1),
        "mask": gk.BufferSpec((batch, 4), torch.bool, pad=False),
        "half": gk.BufferSpec((batch,), torch.bfloat16, pad=0),
        "held": X,
    }

    def fn(x, slot, few, start, plain, mask, half, held):
        return x * 1

    runner = captured(device, fn, specs, inputs={"held": gk.Resident("held")}, outputs=ROWS)
    dispatch = runner.dispatch(batch=9)
    fed, resident = contents_for(runner, dispatch)
    again, _ = contents_for(runner, dispatch)
    assert set(fed) == set(specs) - {"held"}
    assert set(resident) == {"held"}
    assert np.array_equal(fed["x"], again["x"])
    other, _ = contents_for(runner, dispatch, variation=1)
    assert not np.array_equal(fed["x"], other["x"])
    assert (other["x"] < 0).any()
    # Each once, and never the pad.
    assert len(set(fed["slot"].tolist())) == 9
    assert 3 not in fed["slot"]
    assert set(fed["few"].tolist()) == {1, 2}
    assert fed["start"].tolist() == list(range(10))
    assert set(fed["plain"].tolist()) == {1}
    assert fed["mask"][:, 0].all()
    assert fed["half"].dtype is torch.bfloat16
    runner.run(dispatch, fed)


def test_what_an_example_gives_is_taken(device):
    def example(bucket):
        return {"x": np.full((bucket["batch"], 3), 7.0, "f")}

    runner = captured(device, lambda x: x * 2, example=example, outputs=ROWS)
    fed, _ = contents_for(runner, runner.dispatch(batch=3))
    assert fed["x"].tolist() == [[7.0] * 3] * 3
    # It is asked for buckets, and none is empty.
    fed, _ = contents_for(runner, runner.dispatch(batch=0))
    assert fed["x"].shape == (0, 3)


# -- without hypothesis ----------------------------------------------------------------------------


def test_the_checks_need_no_hypothesis():
    code = """
import sys
sys.modules["hypothesis"] = None
import torch, graphkit as gk
from graphkit.testing import check_all
batch = gk.Dim("batch", 4)
group = gk.GraphGroup("cpu")
group.wrap(lambda x: x * 2, name="double", x=gk.BufferSpec((batch, 3), torch.float32, pad=0),
           outputs=gk.Output((batch, 3), torch.float32))
print(len(check_all(group)))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=120, cwd=Path(gk.__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "5"


def test_unknown_options_are_refused_and_batches_may_be_any_iterable() -> None:
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 8)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
    group.runner("r", lambda x: x * 2, policy=gk.Policy.full(gk.Buckets.powers(rows)))
    group.capture(progress=False)
    for check in (testing.check_all, testing.check_dispatch, testing.check_outputs_survive):
        with pytest.raises(
            gk.SpecError, match="checks have no option 'input'; they take batches, "
        ):
            check(group, input=lambda dispatch: {})
    reports = testing.check_all(group, batches=({"rows": count} for count in (1, 3)))
    assert [report.sizes["rows"] for report in reports] == [1, 3]
    group.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batches": {"rows": 3}}, "takes a sequence of mappings, one for each batch, got {'rows': 3}"),
        ({"batches": 3}, "takes a sequence of mappings, one for each batch, got 3"),
        ({"batches": "rows"}, "as {'reqs': 3}; got 'r'"),
        ({"batches": [3]}, "as {'reqs': 3}; got 3"),
        ({"inputs": {"x": 3}}, "inputs= takes a function of the dispatch, got dict"),
        ({"resident": 3}, "resident= takes a function of the dispatch, got int"),
        ({"context": "c"}, "context= takes a function of the dispatch, got str"),
        ({"atoll": 3}, "checks have no option 'atoll'; they take batches, inputs, resident, "),
    ],
)  # fmt: skip
def test_options_of_another_kind_are_refused(options: Any, words: str) -> None:
    runner = captured("cpu", lambda x: x * 2)
    for check in CHECKS:
        with pytest.raises(gk.SpecError, match=re.escape(words)):
            check(runner, **options)
        check(runner, **dict.fromkeys(("batches", "inputs", "resident", "context")))


def test_large_integers_that_padding_reaches_are_found(device) -> None:
    rows = gk.Dim("rows", 4)
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.int64, pad=1))
    runner = group.runner(
        "hash",
        lambda x: (x << 60) + x.sum(),
        policy=gk.Policy.full(gk.Buckets.powers(rows)),
        outputs=gk.Output((rows,), torch.int64),
    )
    group.capture(progress=False)
    x = torch.tensor([5, 6, 7])
    report = runner.check(runner.dispatch(rows=3), x=x, raise_on_failure=False)
    assert "differs in rows 0, 1, 2 by up to 1." in str(report)
    with pytest.raises(gk.CheckError, match="PADS: the output depends on what buffer 'x'"):
        testing.check_padding_independence(
            runner, inputs=lambda d: {"x": torch.arange(d.sizes["rows"]) + 5}
        )


def runs(runner: gk.GraphRunner, dispatch: gk.Dispatch, count: int) -> None:
    for _ in range(count):
        runner.run(dispatch, x=[1.0, 2.0, 3.0])


class SlowFence:
    """A fence of a device that is done only where the host waits for it."""

    def __init__(self) -> None:
        self.passed = True

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_checks_wait_where_runs_must_not(monkeypatch, check, depth: int) -> None:
    monkeypatch.setattr(RecordingBackend, "new_fence", lambda self: SlowFence())
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 4)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
    options: dict[str, Any] = {
        "policy": gk.Policy.full(gk.Buckets.powers(rows)),
        "outputs": gk.Output((rows,), torch.float32, to="host"),
        "ring_depth": depth,
        "ring_full": "raise",
    }
    runner = group.runner("r", lambda x: x * 2, **options)
    group.runner("other", lambda x: x + 2, **options)
    group.capture(progress=False)
    check(group)
    # Others' runs still don't wait.
    dispatch = runner.dispatch(rows=3)
    with pytest.raises(gk.StateError, match=f"the ring of {depth} slots is full"):
        runs(runner, dispatch, depth + 1)


def test_checked_mode_compares_where_runs_must_not_wait(monkeypatch) -> None:
    monkeypatch.setattr(RecordingBackend, "new_fence", lambda self: SlowFence())
    runner = captured("cpu", lambda x: x * 2, checked=True, ring_depth=1, ring_full="raise")
    dispatch = runner.dispatch(batch=3)
    runner.staging.settle()
    x = torch.ones(3, 3)
    assert runner.run(dispatch, x=x).tolist() == (x * 2).tolist()
