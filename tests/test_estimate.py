"""Estimates: exact where the declarations say it, measured on request, and None where nobody has looked."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

import graphkit as gk

BATCH, TOKENS = gk.Dim("batch", 16), gk.Dim("tokens", 64)
WIDTH = 256


def wide(x: torch.Tensor) -> torch.Tensor:
    """Takes 16 times its input's memory."""
    y = x.repeat(1, 8)
    return (y * 2).sum(1)


def group_of(device: str, *, outputs: Any = None, fn: Any = wide, **options: Any) -> Any:
    group = gk.GraphGroup(device, **options)
    group.buffers.declare(x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 1, 4, 16))
    return group, group.runner("r", fn, policy=policy, outputs=outputs)


DECLARED = gk.Output((BATCH,), torch.float32)


def test_static_memory_is_exact_and_takes_nothing(device):
    group, runner = group_of(device, outputs=DECLARED)
    # A second runner, of a larger dim and with outputs everywhere.
    buffers = group.buffers.declare(
        ids=gk.BufferSpec((TOKENS,), torch.int64, pad=0),
        hidden=gk.BufferSpec((TOKENS, 4), torch.float32, pad=0),
        mine=gk.BufferSpec(
            (TOKENS,), torch.int64, pad=0,
            adopt=torch.zeros(64, dtype=torch.int64, device=group.device),
        ),
    )  # fmt: skip
    group.runner(
        "s",
        lambda ids, hidden, mine: {
            "bound": hidden + 1,
            "host": ids + mine,
            "static": ids.float(),
            "pool": ids[:, None].expand(-1, 3) + 0,
        },
        policy=gk.Policy.full(gk.Buckets.of(TOKENS, 8, 48)),
        inputs={"hidden": gk.Resident("hidden")},
        outputs={
            "bound": buffers.hidden,
            "host": gk.Output((TOKENS,), torch.int64, to="host"),
            "static": gk.Output((TOKENS,), torch.float32),
            "pool": gk.Output((TOKENS, 3), torch.int64, to="pool"),
        },
    )
    before = group.estimate()
    assert not any(buffer.is_allocated for buffer in group.buffers if buffer.spec.adopt is None)
    assert before.buffers == 16 * WIDTH * 4 + 64 * 8 + 64 * 4 * 4
    assert [r.outputs for r in before.runners] == [16 * 4, 48 * 4]
    assert [r.kept for r in before.runners] == [0, (8 + 48) * 3 * 8]
    assert before.pool is before.driver is None
    assert before.total == before.static == before.buffers + before.staging + before.outputs
    # What a dict declares needn't be all.
    others = "outputs of runner 's' that are not declared"
    assert before.unknown == (others, "the graphs' pool", "the driver's memory")
    # And so it is.
    report = group.capture(progress=False)
    after = group.estimate()
    assert (after.buffers, after.staging, after.outputs, after.host) == (
        before.buffers, before.staging, before.outputs, before.host,
    )  # fmt: skip
    allocated = sum(
        b.tensor.untyped_storage().nbytes() for b in group.buffers if b.spec.adopt is None
    )
    assert before.buffers == allocated
    spans = sum(r.staging.span.untyped_storage().nbytes() for r in group.runners)
    assert before.staging == spans
    assert before.outputs == sum(r.results.nbytes for r in group.runners)
    pinned = [
        sum(tensor.nbytes for tensor in r.staging.ring.tensors) + r.results.host_nbytes
        for r in group.runners
    ]
    assert [r.host for r in before.runners] == pinned
    assert report.memory.static == before.static
    assert (after.pool, after.driver) == (report.memory.pool, report.memory.driver)
    assert after.unknown == ()
    assert after.total == report.memory.total
    assert runner.dispatch(batch=3).mode is gk.FULL


def test_what_is_not_declared_is_unknown_until_it_was_seen():
    group, _ = group_of("cpu")
    assert group.estimate().unknown[0] == "outputs of runner 'r'"
    assert group.estimate().outputs == 0
    measured = group.estimate(measure=True)
    assert measured.outputs == 16 * 4
    assert measured.unknown == ("the driver's memory",)
    assert group.estimate().unknown[0] == "outputs of runner 'r'"
    group.capture(progress=False)
    assert group.estimate().outputs == 16 * 4
    assert group.estimate().unknown == ()


def test_measured_is_what_the_capture_takes(device):
    """Before and after, for a function whose memory is known."""

    def fn(x):
        # 128 MiB for a full batch, on either device.
        y = x[:, :1].expand(-1, 1 << 20) + 1
        return (y * 2).sum(1)

    group, _ = group_of(device, outputs=DECLARED, fn=fn)
    measured = group.estimate(measure=True)
    assert group.state is gk.State.NEW
    assert group.buffers["x"].is_allocated
    assert 2 * 64 << 20 <= measured.pool <= (2 * 64 << 20) + (4 << 20)
    report = group.capture(progress=False)
    # In whole segments, and with what libraries keep there.
    assert 0.95 * measured.pool <= report.memory.pool <= measured.pool + (48 << 20)
    # It says the truth now, and runs nothing.
    again = group.estimate(measure=True)
    assert again.pool == report.memory.pool
    assert again.runners[0].work is None


def test_only_the_largest_of_each_mode_is_run(device):
    seen: list[tuple[int, int]] = []

    def fn(x, ids):
        seen.append((x.shape[0], ids.shape[0]))
        return x + ids.sum()

    group = gk.GraphGroup(device)
    group.buffers.declare(
        x=gk.BufferSpec((BATCH, 1), torch.float32, pad=0),
        ids=gk.BufferSpec((TOKENS,), torch.float32, pad=0),
    )
    group.runner(
        "r",
        fn,
        policy=gk.Policy(
            [
                gk.Route(gk.FULL, gk.Buckets.uniform(BATCH, TOKENS, query_len=2, upto=8)),
                gk.Route(gk.PIECEWISE, gk.Buckets.of(TOKENS, 8, 64, batch=gk.at_most(TOKENS))),
            ]
        ),
        outputs=gk.Output((BATCH, 1), torch.float32),
    )
    estimate = group.estimate(measure=True)
    assert sorted(seen) == [(8, 16), (16, 64)]
    assert estimate.pool is not None
    assert estimate.runners[0].graphs == len(group.runners[0].dispatcher.graphs)


def test_several_runners_share_the_pool(device):
    group, _ = group_of(device, outputs=DECLARED)
    one = group.estimate(measure=True)
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 16))
    group.runner("s", lambda x: x.sum(1), policy=policy, outputs=DECLARED)
    assert group.estimate().pool is None
    both = group.estimate(measure=True)
    assert both.runners[0].work > both.runners[1].work > 0
    assert both.pool == max(r.work for r in both.runners)
    assert both.pool <= 2 * one.pool


def test_outputs_that_stay_in_the_pool_add_up():
    output = gk.Output((BATCH, WIDTH), torch.float32, to="pool")
    group, _ = group_of("cpu", fn=lambda x: x * 2, outputs=output)
    estimate = group.estimate(measure=True)
    row = WIDTH * 4
    assert estimate.runners[0].work == 16 * row
    assert estimate.runners[0].kept == (1 + 4 + 16) * row
    assert estimate.pool == (16 + 1 + 4 + 16) * row


def test_a_function_that_fails_there(device):
    def fn(x):
        raise KeyError("no cache yet")

    group, _ = group_of(device, fn=fn)
    with pytest.raises(KeyError, match="no cache yet") as raised:
        group.estimate(measure=True)
    assert any("in runner 'r', FULL bucket [batch=16]" in note for note in raised.value.__notes__)
    assert group.state is gk.State.NEW
    group, _ = group_of(device, fn=fn, on_error="skip")
    estimate = group.estimate(measure=True)
    assert estimate.pool is None
    assert estimate.runners[0].work is None


def test_without_memory_for_it():
    def fn(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    group, _ = group_of("cpu", fn=fn)
    with pytest.raises(gk.MemoryBudgetError, match=r"batch=16\]: the device's memory is too small"):
        group.estimate(measure=True)


def test_states(device):
    group, runner = group_of(device, outputs=DECLARED)
    group.capture(progress=False)
    pool = group.estimate().pool
    assert pool > 0
    group.invalidate()
    assert group.estimate().pool is None
    assert group.estimate(measure=True).pool > 0
    assert group.state is gk.State.STALE
    group.release()
    assert group.estimate().pool is None
    with pytest.raises(gk.StateError, match="the group's memory is released, and measuring would"):
        group.estimate(measure=True)
    assert not group.buffers["x"].is_allocated
    group.capture(progress=False)
    x = torch.ones(3, WIDTH)
    assert runner.run(runner.dispatch(batch=3), x=x).tolist() == [2.0 * 8 * WIDTH] * 3
    group.close()
    with pytest.raises(gk.StateError, match="the group is closed"):
        group.estimate()


def test_a_measurement_leaves_declared_state(device):
    state = torch.zeros(2, device=device)

    def fn(x):
        state.add_(1)
        return x.sum(1)

    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    runner = group.runner(
        "r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, 16)), mutates=[state], outputs=DECLARED
    )
    group.estimate(measure=True)
    assert state.tolist() == [0, 0]
    assert runner.run(runner.dispatch(batch=2), x=torch.ones(2, WIDTH)).tolist() == [256.0] * 2


def test_one_at_a_time():
    group, _ = group_of("cpu")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with group._shared.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(gk.ConcurrentRunError, match="estimate: a run or capture"):
            group.estimate(measure=True)
        assert group.estimate().pool is None
    finally:
        done.set()
        thread.join()


def test_a_group_without_graphs():
    group = gk.GraphGroup("cpu")
    assert group.estimate().total == 0
    assert group.estimate().unknown == ("the driver's memory",)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    group.runner("eager", lambda x: x, policy=gk.Policy([]))
    estimate = group.estimate(measure=True)
    assert estimate.pool == 0
    assert estimate.runners[0].graphs == 0
    assert estimate.buffers == 64


def test_the_text():
    group, _ = group_of("cpu")
    text = str(group.estimate())
    assert re.match(r"graph group on cpu: 32\.\d KiB on the device, 128\.\d KiB pinned\n", text)
    assert "buffers 16.0 KiB, staging 16.0 KiB, outputs 0 B, pool ?, driver ?" in text
    assert re.search(r"runner +graphs +staging +outputs +works in +pinned", text)
    assert re.search(r"  r +3 +16\.0 KiB +\? +\? +128\.\d KiB", text)
    assert text.endswith(
        "not counted: outputs of runner 'r', the graphs' pool, the driver's memory"
    )
    assert "not counted: the driver's memory" in str(group.estimate(measure=True))
    group.capture(progress=False)
    assert "not counted" not in str(group.estimate())


def test_what_is_not_captured_is_unknown_in_a_group_that_has_captured_other_graphs():
    rows = gk.Dim("rows", 8)
    for lazy in (False, True):
        group = gk.GraphGroup("cpu", lazy=lazy)
        group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
        options = {
            "policy": gk.Policy.full(gk.Buckets.powers(rows)),
            "outputs": gk.Output((rows,), torch.float32),
        }
        group.runner("first", lambda x: x + 1, **options)
        group.capture(progress=False)
        group.runner("second", lambda x: x * 2 + x * 3, **options)
        estimate = group.estimate()
        assert estimate.pool is None
        assert estimate.driver is None
        assert group.estimate(measure=True).pool > 0
        group.close()


def part(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": x * 2, "b": torch.cat([x] * 10, 1)}


@pytest.mark.parametrize("lazy", [False, True])
def test_outputs_that_are_declared_in_part(device, lazy):
    declared = {"a": gk.Output((BATCH, WIDTH), torch.float32)}
    group, runner = group_of(device, fn=part, outputs=declared, lazy=lazy)
    estimate = group.estimate()
    row = WIDTH * 4
    assert estimate.outputs == 16 * row
    assert estimate.unknown[0] == "outputs of runner 'r' that are not declared"
    assert "16.0 KiB + ?" in str(estimate)
    measured = group.estimate(measure=True)
    assert measured.outputs == 16 * row * 11
    assert measured.unknown == ("the driver's memory",)
    group.capture(progress=False)
    runner.run(runner.dispatch(batch=1), x=torch.ones(1, WIDTH))
    assert group.estimate().outputs == 16 * row * 11
    assert group.estimate().runners[0].has_outputs


def test_what_is_missing_is_measured_in_a_group_that_runs(device):
    group, runner = group_of(device, outputs=DECLARED)
    cache = group.buffers.declare(cache=gk.BufferSpec((4, 4), torch.float32, pad=0)).cache
    group.capture(progress=False)
    cache.tensor.fill_(7)
    before = group.estimate()
    seen: list[int] = []

    def fn(x, cache):
        seen.append(x.shape[0])
        return x.repeat(1, 64).sum(1) + cache.sum()

    group.runner(
        "late",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 4, 16)),
        inputs={"cache": gk.Resident("cache")},
        outputs=DECLARED,
    )
    assert group.estimate().unknown == ("the graphs' pool", "the driver's memory")
    estimate = group.estimate(measure=True)
    assert seen == [16]
    assert estimate.runners[0].work is None
    assert estimate.pool >= max(before.pool, 16 * WIDTH * 4 * 64)
    assert estimate.driver is None
    assert cache.tensor.eq(7).all()
    x = torch.ones(3, WIDTH)
    assert runner.run(runner.dispatch(batch=3), x=x).tolist() == [2.0 * 8 * WIDTH] * 3


def test_a_lazy_group_has_as_many_pools_as_its_graphs_need():
    one, _ = group_of("cpu", outputs=DECLARED)
    work = one.estimate(measure=True).pool
    for bound, pools in ((64, 1), (2, 2), (1, 1)):
        group, _ = group_of("cpu", outputs=DECLARED, lazy=True, max_graphs=bound)
        group.capture(progress=False)
        assert group.estimate().pool is None
        assert group.estimate(measure=True).pool == pools * work


def test_what_a_budget_has_no_room_for_is_not_missing():
    group, runner = group_of("cpu", outputs=DECLARED, memory_budget="200KB")
    report = group.capture(progress=False)
    assert runner.dispatch(batch=16).reason is gk.Reason.OVER_BUDGET
    estimate = group.estimate(measure=True)
    assert (estimate.pool, estimate.driver) == (report.memory.pool, report.memory.driver)
    assert estimate.unknown == ()
