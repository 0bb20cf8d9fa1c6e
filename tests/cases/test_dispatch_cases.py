"""Cases about dispatch that need graphs: D7 and D8. The others are in tests/test_dispatch.py."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a CPU build has no stream to ask, except in a recording
        return False


class Failing:
    """A function that fails for 16 rows: in its warm-up, or not before its capture."""

    def __init__(self, *, in_capture: bool) -> None:
        self.in_capture = in_capture
        self.mended = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        capturing = is_capturing()
        if len(x) == 16 and not self.mended and capturing is self.in_capture:
            raise LookupError("no kernel for 16 rows")
        return x * 2


@pytest.mark.parametrize("in_capture", [False, True], ids=["in warm-up", "in capture"])
def test_d7_a_bucket_whose_capture_failed_falls_back_with_its_reason(device, in_capture):
    """1 to 16 declared, the capture of 16 failed: a batch of 12 is NOT_CAPTURED (vllm#7999)."""
    batch = gk.Dim("batch", 16)
    group = gk.GraphGroup(device, on_error="skip")
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.int64, pad=0))
    fn = Failing(in_capture=in_capture)
    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.powers(batch)))
    report = group.capture()
    text = "FULL batch=16: LookupError: no kernel for 16 rows"
    assert f"not captured: {text}" in str(report)
    assert "4 of 5 graphs captured" in str(report)
    failed = [row for row in report.runners[0].graphs if not row.captured]
    assert [row.bucket for row in failed] == ["batch=16"]

    dispatch = runner.dispatch(batch=12)
    assert (dispatch.mode, dispatch.reason) == (gk.EAGER, gk.Reason.NOT_CAPTURED)
    assert dispatch.is_fallback
    assert runner.run(dispatch, x=list(range(12))).tolist() == list(range(0, 24, 2))
    small = runner.dispatch(batch=7)
    assert (small.mode, small.bucket["batch"]) == (gk.FULL, 8)
    assert runner.run(small, x=list(range(7))).tolist() == list(range(0, 14, 2))
    assert group.report().runners[0].eager_runs == 1

    fn.mended = True
    group.capture()
    again = runner.dispatch(batch=12)
    assert (again.mode, again.reason, again.padding) == (gk.FULL, None, {"batch": 4})
    assert runner.run(again, x=list(range(12))).tolist() == list(range(0, 24, 2))


def test_d7_strict_refuses_the_batch_whose_capture_failed(device):
    """A strict runner says so instead of falling back (vllm#7999)."""
    batch = gk.Dim("batch", 16)
    group = gk.GraphGroup(device, on_error="skip")
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.int64, pad=0))
    fn = Failing(in_capture=True)
    policy = gk.Policy.full(gk.Buckets.powers(batch))
    runner = group.runner("target", fn, policy=policy, strict=True)
    group.capture()
    with pytest.raises(gk.DispatchError, match="runner 'target': strict.*batch=12: NOT_CAPTURED"):
        runner.dispatch(batch=12)
    assert runner.dispatch(batch=8).mode is gk.FULL


def test_d8_counters_of_runs_above_the_ladder(device):
    """3, 9 and 4096 of 8192, a ladder up to 512: bucket, padding and ABOVE_MAX (vllm#52728)."""
    tokens = gk.Dim("tokens", 8192)
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((tokens,), torch.int64, pad=0))
    policy = gk.Policy.full(gk.Buckets.ladder(tokens, upto=512))
    runner = group.runner("r", lambda x: x + 1, policy=policy)
    strict = group.runner("strict", lambda x: x + 1, policy=policy, strict=True)
    group.capture()
    for size in (3, 9, 4096, 9, 8192, 512):
        x = torch.arange(size)
        out = runner.run(runner.dispatch(tokens=size), x=x)
        assert torch.equal(out.to("cpu"), x + 1)
    report = group.report().runners[0]
    assert {
        (str(c.bucket), c.reason): (c.dispatches, c.rows["tokens"], c.padding["tokens"])
        for c in report.counts
    } == {
        ("tokens=4", None): (1, 3, 1),
        ("tokens=16", None): (2, 18, 14),
        ("tokens=512", None): (1, 512, 0),
        ("None", gk.Reason.ABOVE_MAX): (2, 4096 + 8192, 0),
    }
    assert report.eager_runs == 2
    assert sum(row.replays for row in report.graphs) == 4
    with pytest.raises(gk.DispatchError, match="tokens=4096: ABOVE_MAX, the batch is above every"):
        strict.dispatch(tokens=4096)
    assert strict.run(strict.dispatch(tokens=3), x=[1, 2, 3]).tolist() == [2, 3, 4]
    with pytest.raises(gk.InputError, match="tokens=8193 is above the maximum 8192"):
        runner.dispatch(tokens=8193)


def test_d8_an_unused_bucket_is_reported(device):
    """A captured bucket that was never replayed is named in the report (rule 17)."""
    tokens = gk.Dim("tokens", 4)
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((tokens,), torch.int64, pad=0))
    runner = group.runner("r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.powers(tokens)))
    group.capture()
    runner.run(runner.dispatch(tokens=3), x=[1, 2, 3])
    text = str(group.report())
    assert "captured and never replayed: FULL tokens=1; FULL tokens=2\n" in text + "\n"
