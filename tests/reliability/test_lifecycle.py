"""The end of things: groups that are dropped, closed in any order, or alive when the interpreter ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import graphkit as gk

ROWS = gk.Dim("rows", 64)
ROOT = Path(__file__).parents[2]


def declared(
    device: str, mode: gk.Mode = gk.FULL, **options: Any
) -> tuple[gk.GraphGroup, gk.GraphRunner]:
    group = gk.GraphGroup(device, **options)
    buffers = group.buffers.declare(
        x=gk.BufferSpec((ROWS, 1024), torch.float32, pad=0),
        hidden=gk.BufferSpec((ROWS, 1024), torch.float32, pad=0),
    )
    pause = gk.eager_break(lambda y: y + 1)
    runner = group.runner(
        "r",
        lambda x: {"hidden": pause(x * 2), "sum": x.sum(1)},
        policy=gk.Policy([gk.Route(mode, gk.Buckets.of(ROWS, 8, 64))]),
        outputs={"hidden": buffers.hidden, "sum": gk.Output((ROWS,), torch.float32)},
    )
    return group, runner


def used(
    device: str, mode: gk.Mode = gk.FULL, **options: Any
) -> tuple[gk.GraphGroup, gk.GraphRunner]:
    group, runner = declared(device, mode, **options)
    group.capture(progress=False)
    out = runner.run(runner.dispatch(rows=3), x=torch.ones(3, 1024))
    assert out["sum"].tolist() == [1024.0] * 3
    return group, runner


def held(device: str) -> int:
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("how", ["dropped", "closed", "released"])
def test_a_group_that_goes_frees_everything(
    device: str, mode: gk.Mode, checked: bool, how: str
) -> None:
    used(device)[0].close()  # what a first capture makes for the process stays
    before = held(device)
    group, runner = used(device, mode, checked=checked)
    buffer = group.buffers["x"]
    storages = [weakref.ref(buffer.tensor), weakref.ref(group.buffers["hidden"].tensor)]
    output = runner.run(runner.dispatch(rows=2), x=torch.ones(2, 1024), clone=True)["sum"]
    if how == "closed":
        group.close()
    elif how == "released":
        group.release()
    things = [weakref.ref(group), weakref.ref(runner)]
    if how == "dropped":
        del group, runner, buffer
    gc.collect()
    assert not [ref for ref in storages if ref() is not None]
    if how == "dropped":
        assert not [ref for ref in things if ref() is not None]
    # The clone is the caller's.
    assert output.tolist() == [1024.0] * 2
    del output
    assert held(device) <= before


@pytest.mark.parametrize("order", ["group first", "runner first"])
def test_what_was_given_out_outlives_the_group(device: str, order: str) -> None:
    group, runner = used(device)
    out = runner.run(runner.dispatch(rows=2), x=torch.ones(2, 1024))["sum"]
    graph_of = weakref.ref(group)
    if order == "group first":
        del group
        gc.collect()
        assert (
            runner.run(runner.dispatch(rows=2), x=torch.ones(2, 1024))["sum"].tolist()
            == [1024.0] * 2
        )
        del runner
    else:
        del runner
        gc.collect()
        del group
    gc.collect()
    assert graph_of() is None
    # Memory under a lease is kept by the lease.
    assert out.tolist() == [1024.0] * 2


@pytest.mark.parametrize("checked", [False, True])
def test_many_groups_come_and_go(device: str, checked: bool) -> None:
    used(device)[0].close()
    before = held(device)
    for number in range(8):
        group, _ = used(device, checked=checked)
        if number % 2:
            group.close()
        del group
    assert held(device) <= before


def test_every_call_after_the_end_says_so(device: str) -> None:
    group, runner = used(device)
    dispatch = runner.dispatch(rows=2)
    group.close()
    group.close()
    calls = [
        lambda: group.capture(progress=False),
        group.invalidate,
        group.release,
        lambda: runner.run(dispatch, x=torch.ones(2, 1024)),
        lambda: group.runner("s", lambda x: x, policy=gk.Policy.full(gk.Buckets.of(ROWS, 8))),
        lambda: group.wrap(lambda y: y, y=gk.BufferSpec((ROWS,), torch.float32, pad=0)),
    ]
    for call in calls:
        with pytest.raises(gk.StateError, match="closed"):
            call()
    assert "CLOSED" in str(group.report())
    assert "CLOSED" in repr(group)


def test_released_memory_comes_back_with_a_capture(device: str) -> None:
    group, runner = used(device)
    for _ in range(3):
        group.release()
        assert group.state is gk.State.SUSPENDED
        group.capture(progress=False)
        out = runner.run(runner.dispatch(rows=3), x=torch.ones(3, 1024))
        assert out["hidden"].sum().item() == 3 * 1024 * 3
    group.close()


# Each is a program, and torch takes its time to be imported: what can happen together does. A daemon thread that still
# computes is not among them: torch itself ends the process then.
ENDINGS = {
    "alive in many places": (
        "import atexit\n"
        "sys.modules['keeper'] = group\n"
        "cycle = [group, runner]; cycle.append(cycle)\n"
        "out = runner.run(dispatch, x=x)\n"
        "atexit.register(lambda: runner.run(dispatch, x=x))"
    ),
    "half-way through things": (
        "import atexit\n"
        "stage = runner.stage(dispatch); stage.__enter__()\n"
        "session = gk.CaptureSession(device); session.__enter__()\n"
        "atexit.register(group.close)"
    ),
    "by an exception": "raise SystemExit(0)",
}
PROGRAM = """
import sys
import torch
import graphkit as gk
device = {device!r}
rows = gk.Dim("rows", 8)
group = gk.GraphGroup(device, checked={checked})
group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
runner = group.runner(
    "r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.of(rows, 8)),
    outputs=gk.Output((rows,), torch.float32),
)
group.capture(progress=False)
x, dispatch = [1.0, 2.0], runner.dispatch(rows=2)
assert runner.run(dispatch, x=x).tolist() == [2, 3]
{ending}
print("done")
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_may_end_at_any_time(device: str, ending: str) -> None:
    """Without a message, and with the status that the program gave."""
    code = PROGRAM.format(
        device=device, checked=ending != "by an exception", ending=ENDINGS[ending]
    )
    done = subprocess.run(
        [sys.executable, *(["-W", "error"] if device == "cpu" else []), "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in ("Traceback", "Error", "terminate", "Exception ignored"):
        assert word not in done.stderr, done.stderr
    assert done.stdout.strip() == ("" if ending == "by an exception" else "done")


NCCL = """
import os
import torch
import torch.distributed as dist
import graphkit as gk
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r}, RANK="0", WORLD_SIZE="1")
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
rows = gk.Dim("rows", 8)
group = gk.GraphGroup("cuda")
group.buffers.declare(x=gk.BufferSpec((rows,), torch.float32, pad=0))
def fn(x):
    y = x + 1
    dist.all_reduce(y)
    return y * 2
runner = group.runner(
    "r", fn, policy=gk.Policy.full(gk.Buckets.of(rows, 4, 8)),
    outputs=gk.Output((rows,), torch.float32),
)
group.capture(progress=False)
assert runner.run(runner.dispatch(rows=2), x=[1.0, 2.0]).tolist() == [4, 6]
torch.cuda.synchronize()
{order}
print("done")
"""
ORDERS = {
    "group, then communicator": "group.close(); dist.destroy_process_group()",
    "released, then communicator": "group.release(); dist.destroy_process_group(); group.close()",
    "dropped, then communicator": (
        "import gc; del group, runner; gc.collect(); dist.destroy_process_group()"
    ),
    "invalidated, then communicator": (
        "group.invalidate(); dist.destroy_process_group(); group.close()"
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_communicator_ends_after_the_graphs_that_use_it(order: str) -> None:
    """NCCL waits for the graphs that its collectives are in: each way to drop them has to let it go."""
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", NCCL.format(port=port, order=ORDERS[order])],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
