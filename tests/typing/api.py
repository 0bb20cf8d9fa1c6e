"""Typed usage of the public surface; `mypy --strict` runs over it, and nothing runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_type

import torch

import graphkit as gk
from graphkit.testing import check_all

reqs, tokens = gk.Dim("reqs", 256), gk.Dim("tokens", 2048)
assert_type(reqs, gk.Dim)
assert_type(reqs + 1, gk.Dim | gk.Affine)
assert_type(4 * reqs, gk.Dim | gk.Affine)
assert_type(gk.interleaved(reqs, 2), gk.Affine)

group = gk.GraphGroup("cuda", checked=True, on_error="skip")
assert_type(group.device, torch.device)
assert_type(group.state, gk.State)

ids = gk.BufferSpec((tokens,), torch.int64, pad=0, valid=(0, 32_000))
starts = gk.BufferSpec((reqs + 1,), torch.int32, pad=gk.repeat_last)
table = gk.BufferSpec((reqs, 512), torch.int32, pad={reqs: 1}, layout="packed")
buffers = group.buffers.declare(ids=ids, starts=starts, table=table)
assert_type(group.buffers["ids"], gk.Buffer)
assert_type(group.buffers["ids"].tensor, torch.Tensor)

policy = gk.Policy(
    [
        gk.Route(gk.FULL, gk.Buckets.uniform(reqs, tokens, query_len=4), max_padding=0.25),
        gk.Route(gk.PIECEWISE, gk.Buckets.ladder(tokens, upto=512, reqs=gk.at_most(tokens))),
    ],
    cost=lambda bucket: float(bucket["tokens"]),
)


def forward(ids: torch.Tensor, starts: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return ids + starts[0] + count


def prepare(step: gk.Step) -> Mapping[str, Any] | None:
    assert_type(step.phase, gk.Phase)
    assert_type(step.dispatch, gk.Dispatch)
    assert_type(gk.current_run(), gk.Step)
    return None


state = torch.zeros(8)
runner = group.runner(
    "target",
    forward,
    policy=policy,
    inputs={"count": gk.Count(reqs), "starts": gk.Resident("starts")},
    prepare=prepare,
    outputs={"": gk.Output((tokens,), torch.int64, to="host")},
    reads=[torch.nn.Linear(2, 2), lambda: state],
    mutates=[state, gk.Scratch(state, rows=slice(0, 1))],
    supports=gk.Support.UNIFORM,
)
assert_type(runner, gk.GraphRunner)
assert_type(group.capture(order=lambda mode, bucket: bucket["tokens"]), gk.Report)

dispatch = runner.dispatch(reqs=3, tokens=12, query_len=4)
assert_type(dispatch, gk.Dispatch)
assert_type(dispatch.mode, gk.Mode)
assert_type(dispatch.bucket, gk.Bucket | None)
assert_type(dispatch.sizes, Mapping[str, int])
assert_type(dispatch.reason, gk.Reason | None)

with runner.stage(dispatch) as stage:
    assert_type(stage, gk.Stage)
    stage.host["ids"][...] = 0

result: torch.Tensor = runner.run(dispatch, {"ids": [1] * 12}, context=object(), clone=True)

report = runner.check(dispatch, {"ids": [1] * 12}, rtol=1e-4, raise_on_failure=False)
assert_type(report, gk.CheckReport)
assert_type(report.real, gk.Comparison | None)
assert_type([finding.kind for finding in report.failures], list[gk.FindingKind])
assert_type(
    check_all(runner, batches=[{"reqs": 1}], inputs=lambda d: {"ids": [0] * d.sizes["tokens"]}),
    tuple[gk.CheckReport, ...],
)

fast = group.wrap(forward, ids=ids)
assert_type(fast, gk.Wrapped)
assert_type(fast.runner, gk.GraphRunner)

dispatcher = gk.Dispatcher(policy, [reqs, tokens])
assert_type(dispatcher.dispatch(reqs=1, tokens=1), gk.Dispatch)

assert_type(gk.lint(lambda: state + 1), tuple[gk.Refusal, ...])

with gk.CaptureSession("cpu") as session:
    session.warmup(lambda: state + 1)
    captured = session.capture(lambda: state + 1)
assert_type(captured, gk.Captured)
captured.replay()


@gk.eager_break
def attention(q: torch.Tensor) -> torch.Tensor:
    return q * 2


attended: torch.Tensor = attention(state)

try:
    runner.run(dispatch)
except gk.CaptureError as error:
    assert_type(error.operation, str | None)
