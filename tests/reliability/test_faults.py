"""Each kind of failure at each step of a capture: what was before is as before, and a later capture heals.

The first part injects three kinds (a user's exception, out of memory, an interrupt) at every step, in both modes; the
second has what a device refuses, where in a function it may stand, with what the error must say.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import graphkit as gk
from graphkit.capture.session import CaptureSession
from graphkit.outputs.results import Results
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.staging.staging import Staging
from tests.reliability.surroundings import changes, is_capturing, surroundings

BATCH = gk.Dim("batch", 8)
SIZES = (2, 4, 8)
BAD = 4
"""The bucket that fails."""


class Mine(Exception):
    """A user's."""


ERRORS: dict[str, Callable[[], BaseException]] = {
    "user": lambda: Mine("mine"),
    "memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB."),
    "interrupt": lambda: KeyboardInterrupt(),
}

WARMUP, CAPTURE = gk.Phase.WARMUP, gk.Phase.CAPTURE

# In the order in which a capture gets there.
IN_A_BUCKET: dict[str, gk.Phase] = {
    "example, warm-up": WARMUP,
    "prepare_host, warm-up": WARMUP,
    "prepare, warm-up": WARMUP,
    "body start, warm-up": WARMUP,
    "break, warm-up": WARMUP,
    "body end, warm-up": WARMUP,
    "example": CAPTURE,
    "prepare_host": CAPTURE,
    "prepare": CAPTURE,
    "begin": CAPTURE,
    "unpack": CAPTURE,
    "body start": CAPTURE,
    "body middle": CAPTURE,
    "split": CAPTURE,
    "break": CAPTURE,
    "resume": CAPTURE,
    "body end": CAPTURE,
    "output write": CAPTURE,
    "end": CAPTURE,
    "instantiation": CAPTURE,
    "reads": CAPTURE,
}
OF_THE_SESSION = ("context entered", "settle", "flush", "context left")
BREAKS_ONLY = ("break, warm-up", "split", "break", "resume")


class Bench:
    """Two runners of one group, of which "r" fails in one bucket where it is told to."""

    def __init__(self, device: str, mode: gk.Mode, *, prepare: bool, on_error: str) -> None:
        self.device = device
        self.where: str | None = None
        self.error: BaseException | None = None
        self.raised = 0
        # What is under way: set by `injections`.
        self.bucket = 0
        self.phase = WARMUP
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.state = torch.arange(4.0, device=device)
        self.group = gk.GraphGroup(device, on_error=on_error, capture_context=self.context)
        self.group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
        policy = gk.Policy([gk.Route(mode, gk.Buckets.of(BATCH, SIZES))])
        self.pause = gk.eager_break(self._break)
        self.runner = self.group.runner(
            "r",
            self.prepared if prepare else self.fn,
            policy=policy,
            example=self.example,
            prepare=self.prepare if prepare else None,
            prepare_host=lambda step: self.at("prepare_host"),
            reads=[self.reads],
            mutates=[self.state],
        )
        self.other = self.group.runner(
            "other",
            lambda x: x * 3,
            policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)),
        )

    # -- what the capture calls -------------------------------------------------------------------

    def arm(self, where: str | None, kind: str = "user") -> None:
        self.where, self.error = where, ERRORS[kind]()
        self.raised = 0

    def at(self, step: str) -> None:
        """A step is reached."""
        if self.where is None or self.error is None:
            return
        of_bucket = self.where in IN_A_BUCKET
        name = self.where.removesuffix(", warm-up")
        if name != step or (of_bucket and self.bucket != BAD):
            return
        if of_bucket and self.phase is not IN_A_BUCKET[self.where]:
            return
        self.raised += 1
        raise self.error

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.at("context entered")
        yield
        self.at("context left")

    def example(self, bucket: gk.Bucket) -> Mapping[str, Any]:
        self.at("example")
        return {}

    def prepare(self, step: gk.Step) -> Mapping[str, Any]:
        self.at("prepare")
        return {"two": 2}

    def reads(self) -> torch.Tensor:
        self.at("reads")
        return self.state

    def _break(self, y: torch.Tensor) -> torch.Tensor:
        self.at("break")
        return y + 0

    def fn(self, x: torch.Tensor) -> torch.Tensor:
        return self.prepared(x, 2)

    def prepared(self, x: torch.Tensor, two: int) -> torch.Tensor:
        y = x + 1
        self.state.add_(1)
        if len(x) == BAD:
            self.alive.append(weakref.ref(y))
        self.at("body start")
        y = y * two
        self.at("body middle")
        y = self.pause(y)
        z = y - two
        if len(x) == BAD:
            self.alive.append(weakref.ref(z))
        self.at("body end")
        return z

    # -- what must hold ---------------------------------------------------------------------------

    def assert_serves(self, *, complete: bool = False) -> None:
        """Every size gives the right values, by whatever way there is."""
        for size in (1, 2, 3, 4, 7, 8, 0):
            given = [float(value) for value in range(size)]
            for runner, factor in ((self.runner, 2), (self.other, 3)):
                dispatch = runner.dispatch(batch=size)
                assert not complete or dispatch.mode is not gk.EAGER
                out = runner.run(dispatch, x=given)
                assert out.tolist() == [factor * value for value in given]


def injections(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps of the library's own reach the bench too."""

    def before(owner: Any, name: str, step: str) -> None:
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            bench.at(step)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, replaced)

    def during(name: str, phase: gk.Phase) -> None:
        original = getattr(BucketGraph, name)

        def replaced(entry: BucketGraph, session: CaptureSession) -> None:
            bench.bucket = entry.bucket["batch"] if entry.runner is bench.runner else 0
            bench.phase = phase
            original(entry, session)

        monkeypatch.setattr(BucketGraph, name, replaced)

    during("warm_up", WARMUP)
    during("capture", CAPTURE)
    if bench.device == "cuda":
        from graphkit.backends import cuda

        capture: Any = cuda.CudaCapture
        before(cuda, "_count_nodes", "instantiation")
    else:
        from graphkit.backends.recording import capture as recording

        capture = recording.RecordingCapture
        before(recording, "RecordedGraph", "instantiation")
    before(type(bench.group.backend), "begin_capture", "begin")
    before(capture, "split", "split")
    before(capture, "resume", "resume")
    before(capture, "end", "end")
    before(Results, "write", "output write")
    before(Results, "settle", "settle")
    before(CaptureSession, "flush", "flush")
    # The example is unpacked by the same function; only a capture's own call is meant.
    original = Staging.unpack

    def unpack(*args: Any) -> None:
        if is_capturing():
            bench.at("unpack")
        original(*args)

    monkeypatch.setattr(Staging, "unpack", unpack)


def cases() -> Iterator[Any]:
    for mode in (gk.FULL, gk.PIECEWISE):
        for step in (*IN_A_BUCKET, *OF_THE_SESSION):
            if step in BREAKS_ONLY and mode is gk.FULL:
                continue
            for kind in ERRORS:
                yield pytest.param(mode, step, kind, id=f"{mode}-{step}-{kind}")


@pytest.mark.parametrize(("mode", "step", "kind"), list(cases()))
def test_a_failure_at_a_step_of_the_capture(device, mode, step, kind, monkeypatch):
    bench = Bench(
        device, mode, prepare=step.startswith("prepare,") or step == "prepare", on_error="raise"
    )
    injections(bench, monkeypatch)
    bench.arm(step, kind)
    before = surroundings(device)
    # What a warm-up throws is torch's own; a capture's says what to do.
    expected = (Mine, KeyboardInterrupt, torch.OutOfMemoryError, gk.MemoryBudgetError)
    with pytest.raises(expected) as raised:
        bench.group.capture(progress=False)
    assert bench.raised
    assert not changes(before, surroundings(device))
    assert bench.state.tolist() == [0, 1, 2, 3]
    error = raised.value
    if kind != "memory":
        assert error is bench.error
    elif isinstance(error, gk.MemoryBudgetError):
        assert error.__cause__ is bench.error
        assert "Tried to allocate 9.00 GiB" in str(error)
    in_bucket = step in IN_A_BUCKET
    if in_bucket and kind != "interrupt":
        notes = "\n".join(error.__notes__)
        assert f"in runner 'r', {mode} bucket [batch={BAD}]" in notes
        assert f"at {__file__}:" in notes
        # The error is held, and holds no tensor of the bucket.
        assert not [ref for ref in bench.alive if ref() is not None]
        captured = {bucket["batch"] for _, bucket in bench.runner.dispatcher.captured}
        assert captured == set(SIZES) - {BAD}
        assert len(bench.other.dispatcher.captured) == len(SIZES)
    bench.arm(None)
    bench.assert_serves()
    after = surroundings(device)
    assert not changes(before, after)
    bench.group.capture(progress=False)
    assert not changes(before, surroundings(device))
    bench.assert_serves(complete=True)
    bench.group.close()


@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("step", IN_A_BUCKET)
def test_a_failure_that_is_skipped_is_reported(device, mode, step, monkeypatch):
    if step in BREAKS_ONLY and mode is gk.FULL:
        pytest.skip("a FULL capture doesn't split")
    bench = Bench(
        device, mode, prepare=step.startswith("prepare,") or step == "prepare", on_error="skip"
    )
    injections(bench, monkeypatch)
    bench.arm(step)
    before = surroundings(device)
    report = str(bench.group.capture(progress=False))
    assert not changes(before, surroundings(device))
    assert f"Mine: mine at {__file__}:" in report
    assert not [ref for ref in bench.alive if ref() is not None]
    dispatch = bench.runner.dispatch(batch=BAD)
    assert dispatch.bucket["batch"] == 8
    bench.arm(None)
    bench.assert_serves(complete=True)
    bench.group.capture(progress=False)
    assert bench.runner.dispatch(batch=BAD).bucket["batch"] == BAD
    bench.assert_serves(complete=True)


# -- what a device refuses -------------------------------------------------------------------------


def _lazily() -> Callable[[torch.Tensor], None]:
    """A library that is made ready with a sync, at its first use in a capture."""

    def use(x: torch.Tensor) -> None:
        if is_capturing():
            x.sum().item()

    return use


def _huge(x: torch.Tensor) -> None:
    if is_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device=x.device)


def _caught(x: torch.Tensor) -> None:
    # A library that goes on as well as it can: the capture is spoilt all the same.
    with contextlib.suppress(Exception):
        x.sum().item()


def _unregistered(x: torch.Tensor) -> None:
    torch.rand(2, device=x.device, generator=torch_generator(x.device.type))


def torch_generator(device: str) -> torch.Generator:
    """One that lives as long as the process, since making one in a capture is another failure."""
    if device not in GENERATORS:
        GENERATORS[device] = torch.Generator(device=device)
    return GENERATORS[device]


GENERATORS: dict[str, torch.Generator] = {}

# A copy to the host is refused for its memory, or for the wait.
DEVICE = "compute it on the device|Keep the value in a tensor|pageable"
REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), DEVICE),
    "float": (lambda x: float(x.sum()), DEVICE),
    "if": (lambda x: 1 if x.sum() > 0 else 0, DEVICE),
    "tolist": (lambda x: x.tolist(), DEVICE),
    "cpu": (lambda x: x.cpu(), DEVICE),
    "numpy": (lambda x: x.cpu().numpy(), DEVICE),
    "nonzero": (lambda x: x.nonzero(), DEVICE),
    "masked_select": (lambda x: x.masked_select(x > 0), DEVICE),
    "mask": (lambda x: x[x > 0], DEVICE),
    "unique": (lambda x: x.unique(), DEVICE),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), DEVICE),
    "equal": (lambda x: torch.equal(x, x + 1), DEVICE),
    "lazy initialisation": (_lazily(), DEVICE),
    "unregistered generator": (_unregistered, "generators="),
    "memory": (_huge, "memory"),
}
ON_CUDA: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "synchronize": (lambda x: torch.cuda.synchronize(), "waits for the device"),
    "caught": (_caught, "Remedy"),
    "pageable to device": (lambda x: torch.ones(3).to(x.device), "pageable"),
    "tensor of Python's data": (
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        "pageable|waits for the device",
    ),
    "new generator": (
        lambda x: torch.rand(2, generator=torch.Generator(device="cuda"), device="cuda"),
        "generators",
    ),
    "event queried": (lambda x: _timed(), "autotuning"),
    "side stream": (lambda x: _on_a_side_stream(x), "side stream"),
}


def _timed() -> float:
    # As an autotuner does, which measures what it is about to choose.
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _on_a_side_stream(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add(1)


def refused_cases() -> Iterator[Any]:
    for name, (operation, words) in REFUSED.items():
        yield pytest.param("cpu", operation, words, id=f"cpu-{name}")
    for name, (operation, words) in {**REFUSED, **ON_CUDA}.items():
        yield pytest.param("cuda", operation, words, id=f"cuda-{name}", marks=pytest.mark.gpu)


PLACES = ("start", "middle", "end")
# An unjoined stream is found where the capture ends, and what a swallowed refusal has spoilt at the next operation,
# which may be the library's.
FOUND_LATER = (ON_CUDA["side stream"][0], ON_CUDA["caught"][0])


@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("device", "operation", "words"), list(refused_cases()))
def test_what_a_capture_refuses_anywhere_in_the_function(device, operation, words, place, mode):
    is_bad = True
    torch_generator(device)
    alive: list[weakref.ref[torch.Tensor]] = []
    pause = gk.eager_break(lambda y: y + 0)

    def at(here: str, x: torch.Tensor) -> None:
        if is_bad and here == place and len(x) == BAD and is_capturing():
            alive.append(weakref.ref(x))
            operation(x)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        at("start", y)
        z = pause(y) * 2
        at("middle", z)
        out = pause(z) - 2
        at("end", out)
        return out

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    policy = gk.Policy([gk.Route(mode, gk.Buckets.of(BATCH, SIZES))])
    runner = group.runner("r", fn, policy=policy)
    before = surroundings(device)
    with pytest.raises((gk.CaptureError, gk.MemoryBudgetError), match=f"(?s){words}") as raised:
        group.capture(progress=False)
    assert not changes(before, surroundings(device))
    error = raised.value
    assert not [ref for ref in alive if ref() is not None]
    assert f"in runner 'r', {mode} bucket [batch={BAD}]" in error.__notes__[0]
    if isinstance(error, gk.CaptureError) and operation not in FOUND_LATER:
        assert str(error.location).startswith(f"{__file__}:")
        assert error.operation
        assert error.location in str(error)
    assert {b["batch"] for _, b in runner.dispatcher.captured} == set(SIZES) - {BAD}
    is_bad = False
    for size in (1, 3, 4, 8):
        out = runner.run(runner.dispatch(batch=size), x=[1.0] * size)
        assert out.tolist() == [2.0] * size
    group.capture(progress=False)
    assert runner.dispatch(batch=BAD).bucket["batch"] == BAD
    assert runner.run(runner.dispatch(batch=3), x=[1.0] * 3).tolist() == [2.0] * 3
    assert torch.rand(2, device=device).isfinite().all()


@pytest.mark.parametrize("step", ["example", "prepare", "prepare_host"])
@pytest.mark.parametrize("name", ["item", "nonzero", "cpu", "unique", "lazy initialisation"])
def test_what_a_capture_refuses_is_fine_before_it(device, step, name):
    """prepare and its kin run outside the capture, and are where its remedies send people."""
    operation = REFUSED[name][0]
    seen: list[str] = []

    def before(step_or_bucket: Any) -> Mapping[str, Any] | None:
        operation(torch.ones(3, device=device))
        seen.append(step)
        return {} if step == "example" else None

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, SIZES))
    runner = group.runner("r", lambda x: x * 2, policy=policy, **{step: before})
    group.capture(progress=False)
    assert len(seen) == len(SIZES) * (1 + group.backend.recordings)
    assert runner.run(runner.dispatch(batch=3), x=[1.0] * 3).tolist() == [2.0] * 3


# -- other threads ---------------------------------------------------------------------------------


def test_another_thread_that_computes_during_the_capture_disturbs_nothing(device):
    """With the default error mode, only the capturing thread's own calls count."""
    results: list[list[float]] = []

    def compute() -> None:
        x = torch.ones(1000, device=device)
        for _ in range(40):
            x = x + torch.zeros(1000, device=device)
        results.append([x.sum().item(), float(len(x[x > 0]))])

    def fn(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
        return x * 2

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    before = surroundings(device)
    group.capture(progress=False)
    assert not changes(before, surroundings(device))
    assert results == [[1000.0, 1000.0]] * len(results)
    assert len(results) == len(SIZES) * group.backend.recordings
    nodes = {row.nodes for row in group.report().runners[0].graphs}
    assert max(nodes) < 30  # none of the thread's, which are more
    assert runner.run(runner.dispatch(batch=3), x=[1.0] * 3).tolist() == [2.0] * 3


@pytest.mark.gpu
def test_another_threads_unsafe_call_in_the_global_error_mode_is_a_capture_error():
    is_bad = True

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if is_bad and len(x) == BAD and is_capturing():
            thread = threading.Thread(target=_unsafe)
            thread.start()
            thread.join()
        return y

    def _unsafe() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()

    group = gk.GraphGroup("cuda", capture_error_mode="global")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    before = surroundings("cuda")
    with pytest.raises(gk.CaptureError, match="Remedy"):
        group.capture(progress=False)
    assert not changes(before, surroundings("cuda"))
    is_bad = False
    group.capture(progress=False)
    assert runner.dispatch(batch=BAD).bucket["batch"] == BAD
    assert runner.run(runner.dispatch(batch=3), x=[1.0] * 3).tolist() == [2.0] * 3


# -- garbage, and nothing at all -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("explicit", [False, True], ids=["threshold", "gc.collect()"])
def test_garbage_of_device_objects_in_a_capture(device, explicit, mode):
    """Cycles that hold tensors, and on CUDA events and streams, are collected in the body or after it."""

    def cycle(x: torch.Tensor) -> None:
        held: list[Any] = [x + 1]
        if device == "cuda":
            held += [torch.cuda.Event(), torch.cuda.Stream()]
        held.append(held)

    def fn(x: torch.Tensor) -> torch.Tensor:
        cycle(x)
        if explicit:
            gc.collect()
        return x * 2

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    policy = gk.Policy([gk.Route(mode, gk.Buckets.of(BATCH, SIZES))])
    runner = group.runner("r", fn, policy=policy)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(10):
            cycle(torch.ones(2, device=device))
        before = surroundings(device)
        group.capture(progress=False)
        assert not changes(before, surroundings(device))
    finally:
        gc.set_threshold(*thresholds)
    for size in (1, 3, 8):
        out = runner.run(runner.dispatch(batch=size), x=[1.0] * size)
        assert out.tolist() == [2.0] * size


@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
def test_a_capture_in_which_nothing_is_launched_is_reported_and_harmless(device, mode):
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((3,), torch.float32))
    runner = group.runner(
        "r",
        lambda x: None,
        policy=gk.Policy([gk.Route(mode, gk.Buckets.fixed())]),
        inputs={"x": gk.Resident("x")},
    )
    before = surroundings(device)
    with pytest.warns(gk.CaptureWarning, match="the graph is empty") as seen:
        group.capture(progress=False)
    assert len(seen) == 1
    assert not changes(before, surroundings(device))
    assert runner.run(runner.dispatch()) is None
    assert "the graph is empty" in str(group.report())


def test_the_first_of_several_failures_is_raised_and_the_others_are_counted(device):
    def fn(x: torch.Tensor) -> torch.Tensor:
        if len(x) != 2 and is_capturing():
            raise Mine(f"bucket {len(x)}")
        return x * 2

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    runner = group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    with pytest.raises(Mine, match="bucket 8") as raised:
        group.capture(progress=False)
    notes = raised.value.__notes__
    assert "FULL bucket [batch=8]" in notes[0]
    assert notes[1] == "graphkit: and 1 more failures; report() has them"
    assert "Mine: bucket 4" in str(group.report())
    assert runner.dispatch(batch=2).mode is gk.FULL


@pytest.mark.parametrize("words", ["failed during capture", "the stream isn't capturing", "mine"])
@pytest.mark.parametrize("kind", [RuntimeError, type("Theirs", (RuntimeError,), {})])
def test_a_users_runtime_error_is_not_taken_for_the_devices(device, kind, words):
    error = kind(words)

    def fn(x: torch.Tensor) -> torch.Tensor:
        if len(x) == BAD and is_capturing():
            raise error
        return x * 2

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    with pytest.raises(kind) as raised:
        group.capture(progress=False)
    assert raised.value is error


@pytest.mark.parametrize("chained", [False, True], ids=["in a handler", "from"])
def test_an_exception_that_led_to_another_holds_no_memory_either(device, chained):
    alive: list[weakref.ref[torch.Tensor]] = []

    def inner(x: torch.Tensor) -> None:
        y = x + 1
        alive.append(weakref.ref(y))
        raise KeyError("first")

    def fn(x: torch.Tensor) -> torch.Tensor:
        try:
            inner(x)
        except KeyError as error:
            if chained:
                raise Mine("second") from error
            raise Mine("second")  # noqa: B904
        return x

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    with pytest.raises(Mine) as raised:
        group.capture(progress=False)
    assert isinstance(raised.value.__context__, KeyError)
    assert len(alive) == len(SIZES)
    assert not [ref for ref in alive if ref() is not None]


# What CUDA and torch say, word for word, and what a user is told to do about it.
SAYINGS = {
    "CUDA error: operation not permitted when stream is capturing": "waits for the device",
    "CUDA error: operation failed due to a previous error during capture": "its error was swallowed",
    "CUDA error: capturing stream has unjoined work": "a side stream wasn't joined",
    "CUDA error: operation not permitted on an event last recorded in a capturing stream": "autotuning",
    "CUDA error: dependency created on uncaptured work in another stream": "before the run",
    "CUDA error: operation would make the legacy stream depend on a capturing blocking stream": "current_stream()",
    "CUDA error: operation would result in a merge of separate capture sequences": "one group at a time",
    "CUDA error: the capture was not initiated in this stream": "with torch.cuda.stream",
    "CUDA error: attempt to terminate a thread-local capture sequence from another thread": "in one thread",
    "Capture must end on the same stream it began on.": "with torch.cuda.stream",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "in warm-up",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "free memory",
    "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.": "before the run",
    "Offset increment outside graph capture encountered unexpectedly.": "generators=",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.": (
        "copy inputs before the run"
    ),
}


@pytest.mark.parametrize("saying", SAYINGS)
def test_each_saying_of_the_devices_has_its_remedy(saying):
    """Without a device: the sentences are CUDA's own, and the right remedy is found for each."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        if is_capturing():
            raise RuntimeError(f"{saying}\nCompile with TORCH_USE_CUDA_DSA")
        return x * 2

    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.of(BATCH, SIZES)))
    with pytest.raises(gk.CaptureError) as raised:
        group.capture(progress=False)
    text = str(raised.value)
    line = fn.__code__.co_firstlineno + 2
    assert text.startswith(f"the device refused a capture at {__file__}:{line} in fn: raise ")
    assert f": {saying}. Remedy: " in text
    assert SAYINGS[saying] in text.partition(". Remedy: ")[2]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [gk.FULL, gk.PIECEWISE], ids=str)
@pytest.mark.parametrize("kind", ["refused", "user", "memory"])
def test_captures_that_fail_again_and_again_take_no_more_memory(kind, mode):
    pause = gk.eager_break(lambda y: y + 0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        big = pause(x.new_ones(len(x), 1 << 20) * 2)  # 32 MiB in the largest bucket
        if len(x) == 8 and is_capturing():
            if kind == "refused":
                big.sum().item()
            if kind == "memory":
                torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise Mine
        return x + big[:, 0]

    group = gk.GraphGroup("cuda")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    policy = gk.Policy([gk.Route(mode, gk.Buckets.of(BATCH, SIZES))])
    runner = group.runner("r", fn, policy=policy)
    taken = []
    for _ in range(6):
        with pytest.raises((Mine, gk.CaptureError, gk.MemoryBudgetError)):
            group.capture(progress=False)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert taken[-1] <= taken[1]
    assert runner.run(runner.dispatch(batch=3), x=[1.0] * 3).tolist() == [3.0] * 3
    group.close()
