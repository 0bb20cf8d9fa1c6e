"""Cases about memory: C4, a device that is too small for the largest bucket."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import graphkit as gk
from graphkit.backends.recording import RecordingBackend
from graphkit.backends.recording.capture import RecordingCapture

BATCH = gk.Dim("batch", 16)
SIZES = (2, 4, 8, 16)
ROW = 1 << 20
"""Elements that the function makes for each row of the batch: 4 MiB, on CUDA 64 MiB."""


class Ceiling(RecordingBackend):
    """A device with so many bytes for a capture."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("cpu")
        self.ceiling = nbytes

    def begin_capture(self, *, pool: Any = None, generators: Any = (), **_: Any) -> Any:
        return Capped(self.ceiling, generators=generators, pool=pool)


class Capped(RecordingCapture):
    def __init__(self, ceiling: int, **options: Any) -> None:
        self._ceiling = ceiling
        super().__init__(**options)

    def on_operation(self, *args: Any) -> Any:
        before = self._memories.nbytes
        result = super().on_operation(*args)
        if self._memories.nbytes > self._ceiling:
            wanted = (self._memories.nbytes - before) / (1 << 20)
            free = max(self._ceiling - before, 0) / (1 << 20)
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {wanted:.2f} MiB. GPU 0 has a total capacity of 1.00 GiB of "
                f"which {free:.2f} MiB is free."
            )
        return result


class Bench:
    """A group whose function needs `ROW` elements a row, on a device that has them for 8 rows and not for 16."""

    def __init__(self, device: str, on_error: str, *, in_warmup: bool = False) -> None:
        self.device = device
        self.in_warmup = in_warmup
        self.row = ROW if device == "cpu" else 16 * ROW
        self.is_small = False
        backend: Any = Ceiling(12 * self.row * 4) if device == "cpu" else device
        self.group = gk.GraphGroup(backend, on_error=on_error)
        self.group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
        self.runner = self.group.runner(
            "r",
            self.fn,
            policy=gk.Policy.full(gk.Buckets.of(BATCH, *SIZES)),
            outputs=gk.Output((BATCH,), torch.float32),
        )

    def fn(self, x: torch.Tensor) -> torch.Tensor:
        if self.device == "cpu" and self.in_warmup and x.shape[0] == 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        if self.device == "cuda" and not self.in_warmup and not is_capturing():
            return x * self.row
        return x[:, None].expand(-1, self.row).contiguous().sum(1)

    def capture(self) -> gk.Report:
        if self.device == "cpu":
            return self.group.capture(progress=False)
        # What other tests have cached is no memory of this one.
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        ceiling = torch.cuda.memory_reserved() + 12 * self.row * 4 + (64 << 20)
        torch.cuda.set_per_process_memory_fraction(ceiling / total)
        try:
            return self.group.capture(progress=False)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def assert_serves(self) -> None:
        for count, mode in ((3, gk.FULL), (8, gk.FULL), (9, gk.EAGER), (16, gk.EAGER)):
            dispatch = self.runner.dispatch(batch=count)
            assert dispatch.mode is mode
            assert mode is gk.FULL or dispatch.reason is gk.Reason.NOT_CAPTURED
            if self.device == "cpu" and self.in_warmup and mode is gk.EAGER and count == 16:
                continue
            out = self.runner.run(dispatch, x=torch.arange(float(count)))
            assert out.tolist() == pytest.approx([row * self.row for row in range(count)])


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a CPU build has no stream to ask, except in a recording
        return False


@pytest.fixture(params=[False, True], ids=["in the capture", "in the warm-up"])
def in_warmup(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield bool(request.param)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def test_c4_raise_names_bucket_and_bytes(device, in_warmup):
    """Memory capped so that the largest bucket can't be captured: an error with figures (vllm#19186)."""
    bench = Bench(device, "raise", in_warmup=in_warmup)
    with pytest.raises(gk.MemoryBudgetError) as raised:
        bench.capture()
    error = raised.value
    assert str(error).startswith(
        "runner 'r', FULL bucket [batch=16]: the device's memory is too small ("
    )
    assert re.search(r"\d (MiB|GiB) were wanted", str(error))
    assert "Lower the top of the ladder" in str(error)
    assert error.wanted is not None
    assert error.wanted >= 4 * bench.row
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    if device == "cuda" or not in_warmup:
        assert re.search(r"(B|MiB|GiB) were free on the device\)", str(error))
        assert error.free is not None
    assert any("in runner 'r', FULL bucket [batch=16] at " in note for note in error.__notes__)
    # The others went on, and serve.
    assert {bucket["batch"] for _, bucket in bench.runner.dispatcher.captured} == {2, 4, 8}
    bench.assert_serves()


def test_c4_skip_captures_the_smaller_ones(device, in_warmup):
    """The smaller ones are captured, the report says so, the failed one's memory is back (vllm#19186)."""
    bench = Bench(device, "skip", in_warmup=in_warmup)
    before = bench.group.backend.memory_reserved()
    report = bench.capture()
    assert {bucket["batch"] for _, bucket in bench.runner.dispatcher.captured} == {2, 4, 8}
    text = str(report)
    assert "runner r: 3 of 4 graphs captured" in text
    assert "not captured: FULL batch=16: MemoryBudgetError: runner 'r', FULL bucket" in text
    # What the graph of 8 needs, which those of 2 and 4 use too; of 16, not even what it had got.
    assert report.memory.pool <= 9 * bench.row * 4 + (8 << 20)
    if device == "cuda":
        assert report.reserved_bytes - before <= report.memory.pool + (32 << 20)
    bench.assert_serves()


def test_c4_with_more_memory_the_missing_one_is_captured(device):
    """Another capture goes on with what failed (rule 14)."""
    bench = Bench(device, "skip")
    bench.capture()
    if device == "cpu":
        bench.group.backend.ceiling *= 2
    report = bench.group.capture(progress=False)
    assert [row.captured for row in report.runners[0].graphs] == [True] * 4
    assert not [row for row in report.runners[0].graphs if row.failure]
    dispatch = bench.runner.dispatch(batch=13)
    assert dispatch.mode is gk.FULL
    out = bench.runner.run(dispatch, x=torch.ones(13))
    assert out.tolist() == pytest.approx([bench.row] * 13)


def test_c4_a_budget_keeps_it_from_failing(device):
    """With a budget below the device's memory nothing fails: what doesn't fit falls back (vllm#19186)."""
    bench = Bench(device, "raise", in_warmup=device == "cuda")
    # On CUDA the driver takes its share.
    bench.group.memory_budget = 10 * bench.row * 4 + (64 << 20 if device == "cuda" else 0)
    if device == "cpu":
        bench.group.backend.ceiling *= 2
    report = bench.group.capture(progress=False)
    assert {bucket["batch"] for _, bucket in bench.runner.dispatcher.captured} == {2, 4, 8}
    assert report.memory.total <= bench.group.memory_budget
    assert bench.runner.dispatch(batch=16).reason is gk.Reason.OVER_BUDGET


def test_c4_the_memory_of_the_first_failure_goes_back_to_the_device():
    """A pool gives nothing back while a graph of it lives: the smaller ones get another (vllm#19186)."""

    class Counting(Ceiling):
        pools: list[Any]
        emptied = 0

        def begin_capture(self, *, pool: Any = None, **options: Any) -> Any:
            self.pools = [*getattr(self, "pools", []), pool]
            return super().begin_capture(pool=pool, **options)

        def empty_cache(self) -> None:
            self.emptied += 1

    bench = Bench("cpu", "skip")
    bench.group.backend.__class__ = Counting
    bench.capture()
    backend = bench.group.backend
    assert backend.emptied == 2  # between warm-up and capture, and after the failure
    failed, *others = backend.pools
    assert len(others) == 2 * 3
    assert {id(pool) for pool in others} == {id(others[0])}
    assert failed is not others[0]
