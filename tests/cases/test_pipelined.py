"""Several steps in flight: results on the host, and a ring that blocks or raises."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 8)
WIDTH = gk.Dim("width", 4)


def pipelined(device: str, *, depth: int = 8, mode: Any = gk.FULL, **options: Any) -> Any:
    """A runner whose token ids and score go to the host, and whose state stays on the device."""
    group = gk.GraphGroup(device, **options)
    group.buffers.declare(
        x=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad={BATCH: 0, WIDTH: 0}),
    )

    @gk.eager_break
    def middle(y: torch.Tensor) -> torch.Tensor:
        return y * 1

    def fn(x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = middle(x * 2) if mode is gk.PIECEWISE else x * 2
        return {"whole": y, "rows": y.sum(dim=1).to(torch.int64), "kept": y + 1}

    runner = group.runner(
        "r",
        fn,
        policy=gk.Policy([gk.Route(mode, gk.Buckets.grid({BATCH: (2, 8), WIDTH: (1, 4)}))]),
        outputs={
            "whole": gk.Output((BATCH, WIDTH), torch.float32, to="host"),
            "rows": gk.Output((BATCH,), torch.int64, to="host"),
            "kept": gk.Output((BATCH, WIDTH), torch.float32),
        },
        ring_depth=depth,
    )
    group.capture(progress=False)
    return group, runner


def values(step: int, rows: int, columns: int) -> np.ndarray[Any, Any]:
    return (np.arange(rows * columns, dtype=np.float32) + 100 * step).reshape(rows, columns)


def delay(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(5_000_000)


@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_results_of_steps_in_flight_stay_apart(device: str, depth: int, mode: Any) -> None:
    """Each of the last `ring_depth` steps' results is read after all of them were launched."""
    group, runner = pipelined(device, depth=depth, mode=mode)
    waiting: list[tuple[Any, np.ndarray[Any, Any]]] = []
    for step in range(3 * depth + 2):
        rows, columns = 1 + step * 3 % 8, 1 + step % 4
        x = values(step, rows, columns)
        delay(device)
        out = runner.run(runner.dispatch(batch=rows, width=columns), x=x)
        waiting.append((out, x))
        if len(waiting) == depth:
            group.backend.synchronize()
            for seen, given in waiting:
                assert seen["whole"].tolist() == (given * 2).tolist()
                assert seen["rows"].tolist() == (given * 2).sum(axis=1).astype(int).tolist()
                assert seen["whole"].device.type == "cpu"
            waiting.clear()
    group.close()


def test_the_next_step_is_launched_before_this_one_is_read(device: str) -> None:
    """A serving loop that is always one step ahead of the device."""
    group, runner = pipelined(device, depth=2)
    ahead: Any = None
    for step in range(12):
        x = values(step, 3, 4)
        delay(device)
        out = runner.run(runner.dispatch(batch=3, width=4), x=x)
        done = torch.cuda.Event() if device == "cuda" else None
        if done is not None:
            done.record()
        if ahead is not None:
            earlier, given, event = ahead
            if event is not None:
                event.synchronize()
            assert earlier["whole"].tolist() == (given * 2).tolist()
        ahead = (out, x, done)
    group.close()


def test_a_lease_on_the_host_lasts_for_the_steps_in_flight(device: str) -> None:
    group, runner = pipelined(device, depth=3, checked=True)
    first = runner.run(runner.dispatch(batch=2, width=4), x=values(0, 2, 4))
    for step in (1, 2):
        runner.run(runner.dispatch(batch=8, width=4), x=values(step, 8, 4))
    group.backend.synchronize()
    assert first["whole"].tolist() == (values(0, 2, 4) * 2).tolist()
    runner.run(runner.dispatch(batch=1, width=1), x=values(3, 1, 1))
    with pytest.raises(gk.StaleOutputError, match="output 'whole' was read after its lease"):
        first["whole"].tolist()
    with pytest.raises(gk.StaleOutputError, match="output 'kept'"):
        first["kept"].tolist()
    group.close()


def test_an_eager_run_between_takes_no_slot(device: str) -> None:
    group, runner = pipelined(device, depth=2)
    first = runner.run(runner.dispatch(batch=2, width=4), x=values(0, 2, 4))
    for step in range(4):
        eager = runner.dispatch(batch=3, width=2, eager="tested")
        out = runner.run(eager, x=values(step, 3, 2))
        assert out["whole"].tolist() == (values(step, 3, 2) * 2).tolist()
    group.backend.synchronize()
    assert first["whole"].tolist() == (values(0, 2, 4) * 2).tolist()
    group.close()


def test_memory_on_the_host_is_told(device: str) -> None:
    group, _ = pipelined(device, depth=4)
    report = group.report()
    assert report.host_bytes >= 4 * (8 * 4 * 4 + 8 * 8)
    assert report.runners[0].output_bytes == 8 * 4 * 4
    group.close()


# -- a ring that is too small ----------------------------------------------------------------------


def test_ring_full_is_checked() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2))
    for wrong in ("wait", None, True):
        with pytest.raises(gk.SpecError, match="ring_full must be 'block' or 'raise'"):
            group.runner("r", lambda x: x + 1, policy=policy, ring_full=wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_full_ring_raises_where_asked_and_stages_nothing(depth: int) -> None:
    group = gk.GraphGroup("cuda")
    x = group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0)).x
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 8))
    runner = group.runner("r", lambda x: x + x, policy=policy, ring_depth=depth, ring_full="raise")
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    outs: list[torch.Tensor] = []
    torch.cuda._sleep(400_000_000)  # about 0.2 s, in which nothing is read
    full = rf"the ring of {depth} slots is full.*ring_depth="
    with pytest.raises(gk.StateError, match=full):  # noqa: PT012
        for step in range(2 * depth + 2):
            outs.append(runner.run(dispatch, x=np.full(3, step), clone=True))
    assert depth // 2 <= len(outs) <= depth
    torch.cuda.synchronize()
    assert [out.tolist() for out in outs] == [[2 * step] * 3 for step in range(len(outs))]
    assert x.tensor[:3].tolist() == [len(outs) - 1] * 3
    out = runner.run(dispatch, x=np.full(3, 70))
    assert out.tolist() == [140] * 3
    group.close()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_threads_that_take_turns_never_share_a_slot(depth: int) -> None:
    """Runs of several threads, each on its own stream, with the copies delayed (vllm#54269)."""
    group = gk.GraphGroup("cuda")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    runner = group.runner(
        "r", lambda x: x + x, policy=gk.Policy.full(gk.Buckets.of(BATCH, 8)), ring_depth=depth,
        outputs=gk.Output((BATCH,), torch.int64),
    )  # fmt: skip
    group.capture(progress=False)
    turn = threading.Lock()
    wrong: list[Any] = []

    def serve(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                value = 1000 * number + step
                with turn:
                    torch.cuda._sleep(200_000)
                    out = runner.run(runner.dispatch(batch=5), x=np.full(5, value), clone=True)
                if out.tolist() != [2 * value] * 5:
                    wrong.append((value, out.tolist()))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    group.close()
