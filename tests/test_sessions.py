"""Capture sessions over one's own functions, buffers, stream and pool; and progress."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

import graphkit as gk
from graphkit.capture.session import Progress


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen before a test, and nothing after it."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def stream_key(device: str) -> int:
    return torch.cuda.current_stream().cuda_stream if device == "cuda" else 0


def ambient(device: str) -> tuple[Any, ...]:
    return (
        stream_key(device),
        gc.isenabled(),
        gc.get_freeze_count(),
        torch.is_grad_enabled(),
        torch.rand(0).shape,
        torch.get_rng_state().tolist(),
        torch.cuda.get_rng_state().tolist() if device == "cuda" else None,
    )


def test_over_ones_own_function_buffers_stream_and_pool(device):
    static = torch.zeros(4, device=device)
    own_stream = torch.cuda.Stream() if device == "cuda" else None
    own_pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    seen: list[int] = []

    def fn() -> dict[str, torch.Tensor]:
        seen.append(stream_key(device))
        return {"twice": static * 2}

    with gk.CaptureSession(device, stream=own_stream, pool=own_pool) as session:
        session.warmup(fn)
        session.flush()
        captured = session.capture(fn)
    assert isinstance(captured, gk.Captured)
    assert session.stream is own_stream
    if device == "cuda":
        assert session.pool.handle == own_pool
        assert seen == [own_stream.cuda_stream] * 2
    for start in range(3):
        static.copy_(torch.arange(start, start + 4.0))
        captured.replay()
        expected = [2.0 * value for value in range(start, start + 4)]
        assert captured.result["twice"].tolist() == expected
    captured.graph.release()
    with pytest.raises(gk.StateError, match="this graph was released"):
        captured.graph.replay()


def test_several_graphs_share_the_pool_and_a_later_session_goes_on(device):
    static = torch.arange(8.0, device=device)
    outs = {size: torch.zeros(size, device=device) for size in (8, 4, 2)}
    graphs: dict[int, gk.Captured] = {}
    session = gk.CaptureSession(device)
    for sizes in ((8, 4), (2,)):
        with session:  # a session may be entered again
            for size in sizes:
                session.warmup(lambda size=size: outs[size].copy_((static[:size] + 1) * 2))
            for size in sizes:
                graphs[size] = session.capture(
                    lambda size=size: outs[size].copy_((static[:size] + 1) * 2)
                )
    for size, captured in graphs.items():
        outs[size].zero_()
        captured.replay()
        assert outs[size].tolist() == [2.0 * (value + 1) for value in range(size)]


def test_the_context_is_entered_once_inside_and_left_before_any_replay(device):
    events: list[str] = []

    @contextmanager
    def communicator() -> Iterator[None]:
        assert not torch.is_grad_enabled()
        events.append(f"enter {stream_key(device) == stream}")
        yield
        events.append("leave")

    static = torch.zeros(2, device=device)
    session = gk.CaptureSession(device, capture_context=communicator)
    stream = session.stream.cuda_stream if device == "cuda" else 0
    with session:
        session.warmup(lambda: static + 1)
        events.append("capture")
        first = session.capture(lambda: static + 1)
        second = session.capture(lambda: static + 2)
    assert events == ["enter True", "capture", "leave"]
    first.replay()
    second.replay()
    assert first.result.tolist() == [1, 1]
    assert second.result.tolist() == [2, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_groups_context_is_entered_once_for_all_buckets(device, fails):
    events: list[str] = []

    @contextmanager
    def communicator() -> Iterator[None]:
        events.append("enter")
        try:
            yield
        finally:
            events.append("leave")

    batch = gk.Dim("batch", 8)
    group = gk.GraphGroup(device, capture_context=communicator)
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))

    def fn(x):
        events.append("fn")
        if fails and len(x) == 4:
            raise LookupError("four")
        return x + 1

    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.powers(batch)))
    if fails:
        with pytest.raises(LookupError, match="four"):
            group.capture()
    else:
        group.capture()
    assert (events[0], events[-1]) == ("enter", "leave")
    assert (events.count("enter"), events.count("leave")) == (1, 1)
    events.clear()
    assert runner.run(runner.dispatch(batch=3), x=[1, 2, 3]).tolist() == [2, 3, 4]
    assert not events  # no replay runs it, nor the function


class Mine(Exception):
    pass


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("where", ["nowhere", "body", "warm-up", "capture", "context", "leaving"])
def test_everything_is_put_back(device, where, enabled):
    """gc, streams, gradients and random numbers, after exceptions too."""

    @contextmanager
    def context() -> Iterator[None]:
        if where == "context":
            raise Mine
        yield
        if where == "leaving":
            raise Mine

    def fn(at: str) -> torch.Tensor:
        drawn = (
            torch.rand(3, device=device) + torch.rand(3).sum().to(device)
            if at == "warm-up"
            else (torch.rand(3, device=device))
        )
        if where == at:
            raise Mine
        return drawn

    was_enabled = gc.isenabled()
    gc.enable() if enabled else gc.disable()
    gc.collect()  # from Python 3.12 on the first one freezes what is immortal
    try:
        before = ambient(device)
        with (
            pytest.raises(Mine) if where != "nowhere" else nullcontext(),
            gk.CaptureSession(device, capture_context=context) as session,
        ):
            assert not gc.isenabled()
            assert not torch.is_grad_enabled()
            session.warmup(lambda: fn("warm-up"))
            session.capture(lambda: fn("capture"))
            if where == "body":
                raise Mine
        assert ambient(device) == before
    finally:
        gc.enable() if was_enabled else gc.disable()
    # The session is usable after all that.
    where = "nowhere"
    with gk.CaptureSession(device) as session:
        session.warmup(lambda: fn("warm-up"))
        captured = session.capture(lambda: fn("capture"))
    captured.replay()
    first = captured.result.tolist()
    captured.replay()
    assert captured.result.tolist() != first


def test_a_refusal_is_an_error_of_the_librarys(device):
    static = torch.ones(2, device=device)
    with gk.CaptureSession(device) as session:
        session.warmup(lambda: static.sum().item())
        with pytest.raises(gk.CaptureError, match=r"test_sessions.py:\d+") as raised:
            session.capture(lambda: static.sum().item())
        assert raised.value.location.startswith(__file__)
        captured = session.capture(lambda: static + 1)  # the session goes on
    captured.replay()
    assert captured.result.tolist() == [2, 2]


def test_generators_are_registered(device):
    generator = torch.Generator(device=device).manual_seed(1)
    with gk.CaptureSession(device, generators=[generator]) as session:
        captured = session.capture(lambda: torch.rand(4, generator=generator, device=device))
    draws = []
    for _ in range(3):
        captured.replay()
        draws.append(tuple(captured.result.tolist()))
    assert len(set(draws)) == 3


def test_a_session_is_entered_before_it_is_used(device):
    session = gk.CaptureSession(device)
    for call in (session.warmup, session.capture, lambda fn: session.flush()):
        with pytest.raises(gk.StateError, match="enter the session first: with CaptureSession"):
            call(lambda: None)
    with session, pytest.raises(gk.StateError, match="is entered already"):
        session.__enter__()
    session.__exit__(None, None, None)  # leaving twice is harmless


def test_a_session_cannot_begin_inside_a_capture(device):
    gc.collect()  # from Python 3.12 on the first one freezes what is immortal
    frozen = gc.get_freeze_count()
    static = torch.ones(2, device=device)

    def fn() -> torch.Tensor:
        with pytest.raises(gk.StateError, match="can't begin inside a capture"):
            gk.CaptureSession(device).__enter__()
        return static + 1

    with gk.CaptureSession(device) as session:
        captured = session.capture(fn)
    captured.replay()
    assert captured.result.tolist() == [2, 2]
    assert gc.get_freeze_count() == frozen


# -- progress --------------------------------------------------------------------------------------


def test_log_lines_where_there_is_no_terminal(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with caplog.at_level(logging.INFO, logger="graphkit"):
        bar = Progress(8, "capture")
        for index in range(8):
            bar.step(f"bucket {index}")
        bar.close()
    assert caplog.messages == [
        "capture: 2 of 8 (bucket 1)",
        "capture: 4 of 8 (bucket 3)",
        "capture: 6 of 8 (bucket 5)",
        "capture: 8 of 8 (bucket 7)",
    ]


def test_log_lines_on_a_terminal_without_tqdm(caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with caplog.at_level(logging.INFO, logger="graphkit"):
        bar = Progress(1, "capture")
        bar.step("bucket")
        bar.close()
    assert caplog.messages == ["capture: 1 of 1 (bucket)"]


def test_a_bar_on_a_terminal_with_tqdm(caplog, monkeypatch):
    calls: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            calls.append(options["total"])

        def set_postfix_str(self, note: str, **_: Any) -> None:
            calls.append(note)

        def update(self) -> None:
            calls.append("update")

        def close(self) -> None:
            calls.append("close")

    module = ModuleType("tqdm")
    module.tqdm = Bar
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", module)
    with caplog.at_level(logging.INFO, logger="graphkit"):
        bar = Progress(1, "capture")
        bar.step("bucket")
        bar.close()
    assert calls == [1, "bucket", "update", "close"]
    assert not caplog.messages


@pytest.mark.parametrize("progress", [False, True])
def test_a_groups_capture_says_how_far_it_is(device, progress, caplog, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    batch = gk.Dim("batch", 4)
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))
    group.runner("r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.powers(batch)))
    with caplog.at_level(logging.INFO, logger="graphkit"):
        group.capture(progress=progress)
        group.capture(progress=progress)  # nothing is missing, so nothing is said
    if progress:
        assert caplog.messages[-1] == "graphkit capture: 6 of 6 (r FULL batch=1)"
        assert len(caplog.messages) == 6
    else:
        assert not caplog.messages


def test_a_session_collects_and_waits_as_often_for_many_buckets_as_for_few(monkeypatch):
    """Rule 13: nothing that takes long is done for each graph."""
    counts: list[tuple[int, int, int]] = []
    for number in (2, 8):
        group = gk.GraphGroup("cpu")
        dim = gk.Dim("batch", 16)
        group.buffers.declare(x=gk.BufferSpec((dim,), torch.float32, pad=0))
        policy = gk.Policy.full(gk.Buckets.of(dim, *range(1, number), 16))
        group.runner("r", lambda x: x + 1, policy=policy)
        seen = {"collect": 0, "synchronize": 0, "empty_cache": 0}

        def counting(name, call, seen=seen):
            def counted(*args, **kwargs):
                seen[name] += 1
                return call(*args, **kwargs)

            return counted

        with monkeypatch.context() as patch:
            patch.setattr(gc, "collect", counting("collect", gc.collect))
            for name in ("synchronize", "empty_cache"):
                patch.setattr(group.backend, name, counting(name, getattr(group.backend, name)))
            group.capture(progress=False)
        counts.append(tuple(seen.values()))
        assert seen["collect"] == 1
    assert counts[0] == counts[1]


def test_piecewise_graphs_are_captured_before_full_ones_and_the_largest_first(device):
    """Rule 12: the smaller ones use the memory of the larger."""
    log = []

    def prepare(step):
        if step.phase is gk.Phase.CAPTURE:
            log.append((step.dispatch.mode, step.dispatch.bucket["batch"]))
        return {}

    group = gk.GraphGroup(device)
    dim = gk.Dim("batch", 16)
    group.buffers.declare(x=gk.BufferSpec((dim,), torch.float32, pad=0))
    routes = [
        gk.Route(gk.FULL, gk.Buckets.of(dim, 2, 8)),
        gk.Route(gk.PIECEWISE, gk.Buckets.of(dim, 12, 16)),
    ]
    group.runner("r", lambda x: x + 1, policy=gk.Policy(routes), prepare=prepare)
    group.capture(progress=False)
    assert list(dict.fromkeys(log)) == [
        (gk.PIECEWISE, 16), (gk.PIECEWISE, 12), (gk.FULL, 8), (gk.FULL, 2),
    ]  # fmt: skip
    group.close()
