"""Two recordings of one function agree, unless Python did something else the second time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphkit.backends.recording import RecordingBackend
from tests.recording.harness import capture
from tests.recording.programs import PROGRAMS, Program


def twice(body: Callable[[torch.Tensor], Any]) -> str | None:
    """The difference of two recordings of `body`, with different contents of its input."""
    backend = RecordingBackend()
    x = torch.ones(4)
    first, kept = capture(backend, lambda: body(x))
    x.fill_(-2)
    second, _ = capture(backend, lambda: body(x))
    del kept
    message: str | None = first.difference(second)
    assert first.difference(first) is None
    return message


@pytest.mark.parametrize(
    ("program", "mode"),
    [
        pytest.param(program, mode, id=f"{program.name}-{mode}")
        for program in PROGRAMS
        if program.kind != "refused"
        for mode in program.modes
    ],
)
def test_programs_agree_with_themselves(program: Program, mode: str) -> None:
    backend = RecordingBackend()
    generator = torch.Generator().manual_seed(1)
    static = program.inputs(generator)
    first, _ = capture(backend, lambda: program.body(static), mode=mode)
    for tensor, value in zip(static, program.inputs(generator), strict=True):
        tensor.copy_(value)
    second, _ = capture(backend, lambda: program.body(static), mode=mode)
    assert first.difference(second) is None


class Kept:
    """Python state that changes what the function does."""

    def __init__(self) -> None:
        self.calls = 0
        self.tensor: torch.Tensor | None = None
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)

    def count(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x * self.calls

    def alternate(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x + 1 if self.calls % 2 else x - 1

    def grow(self, x: torch.Tensor) -> Any:
        self.calls += 1
        for _ in range(self.calls):
            x = x + 1
        return x

    def draw(self, x: torch.Tensor) -> Any:
        return x * self.random.random()

    def draw_numpy(self, x: torch.Tensor) -> Any:
        return x + torch.from_numpy(self.numpy.random(4, dtype=np.float32))

    def keep(self, x: torch.Tensor) -> Any:
        y = x * 2 if self.tensor is None else self.tensor + x
        self.tensor = y
        return y

    def cache(self, x: torch.Tensor) -> Any:
        if self.tensor is None:
            self.tensor = torch.arange(4.0)
        return x + self.tensor

    def bake(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x + torch.tensor([1.0, 2.0, 3.0, self.calls])

    def assign(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = x.clone()
        y[0] = self.calls
        return y

    def offset(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x[self.calls :][:2] * 2

    def stride(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = torch.empty(4, 4) if self.calls == 1 else torch.empty(4, 4).t()
        return y.copy_(x)

    def keyword(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return torch.add(x, x, alpha=self.calls + 1)

    def dtype(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return torch.zeros(4, dtype=torch.int32 if self.calls == 1 else torch.int64) + x


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("count", ["operation 0", "aten::mul.Tensor", "argument 1 was 1, then 2", "in count"]),
        ("alternate", ["aten::add.Tensor", "against aten::sub.Tensor", "return x + 1 if"]),
        ("grow", ["has 1 operations and another has 2", "aten::add.Tensor", "in grow"]),
        ("draw", ["argument 1 was 0.84", "in draw"]),
        ("draw_numpy", ["argument 0 was float32[4] in memory at 0x", "in draw_numpy"]),
        ("keep", ["aten::mul.Tensor", "against aten::add.Tensor"]),
        ("cache", ["aten::arange", "against aten::add.Tensor"]),
        ("bake", ["aten::lift_fresh", "the constant that Python made there has other values"]),
        ("assign", ["the constant that Python made there has other values", "in assign"]),
        ("offset", ["aten::slice.Tensor", "argument 2 was 1, then 2"]),
        ("stride", ["in stride"]),
        ("keyword", ["alpha was 2, then 3"]),
        ("dtype", ["dtype was torch.int32, then torch.int64"]),
    ],
)
def test_python_state_is_found(method: str, parts: list[str]) -> None:
    message = twice(getattr(Kept(), method))
    assert message is not None
    for part in (*parts, "A graph would repeat what the first one did for ever"):
        assert part in message


def test_a_tensor_kept_from_an_earlier_recording_is_found() -> None:
    kept: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> Any:
        kept.append(x * 2)
        return kept[0] + 1

    message = twice(body)
    assert message is not None
    assert "argument 0 was float32[4] in result 0, then float32[4] in memory at 0x" in message


def test_a_branch_on_values_read_through_memory_is_found() -> None:
    shared = np.ones(4, dtype=np.float32)
    x = torch.from_numpy(shared)
    backend = RecordingBackend()

    def body() -> Any:
        return x * 2 if shared[0] > 0 else x * 3

    first, _ = capture(backend, body)
    x.fill_(-1)
    second, _ = capture(backend, body)
    message = first.difference(second)
    assert message is not None
    assert "argument 1 was 2, then 3" in message


def test_nan_and_signs_of_zero() -> None:
    values = iter([float("nan"), float("nan"), 0.0, -0.0, 1, 1.0])

    def body(x: torch.Tensor) -> Any:
        return torch.ops.aten.mul.Scalar(x, next(values))

    assert twice(body) is None
    message = twice(body)
    assert message is not None
    assert "argument 1 was 0.0, then -0.0" in message
    assert "argument 1 was 1, then 1.0" in str(twice(body))


def test_tensors_from_breaks_agree_wherever_they_lie() -> None:
    backend = RecordingBackend()
    x = torch.ones(4)
    extra: list[torch.Tensor] = []

    def record() -> Any:
        under_way = backend.begin_capture()
        y = x + 1
        first = under_way.split()
        extra.extend(torch.rand(3) for _ in range(len(extra) + 1))  # a break may differ each time
        moved = y.clone() * 2
        listed = torch.tensor([1.0, 2.0, 3.0, 4.0])
        under_way.resume()
        z = moved + listed
        return first, under_way.end(), z

    with torch.no_grad():
        one, other = record(), record()
    assert one[0].difference(other[0]) is None
    assert one[1].difference(other[1]) is None
    # In which tensors of breaks an operation works, and in which order, is compared.
    x = torch.ones(4)
    order = iter([False, True])

    def swapped() -> Any:
        under_way = backend.begin_capture()
        under_way.split()
        a, b = x + 1, x + 2
        under_way.resume()
        return (a * 1, b * 1, a + b if next(order) else b + a), under_way.end()

    with torch.no_grad():
        (kept, first), (_, second) = swapped(), swapped()
    assert len(kept) == 3
    message = first.difference(second)
    assert message is not None
    assert "in tensor 1 of those made in eager breaks, then float32[4] in tensor 0" in message


def test_draws_from_a_registered_generator_agree() -> None:
    backend = RecordingBackend()
    own, another = torch.Generator(), torch.Generator()
    drawn = iter([own, own, another])
    graphs = [
        capture(backend, lambda: torch.rand(2, generator=next(drawn)), generators=[own, another])[0]
        for _ in range(3)
    ]
    assert graphs[0].difference(graphs[1]) is None
    assert "generator was" in graphs[0].difference(graphs[2])


def test_results_that_lie_otherwise_are_found() -> None:
    kept = torch.zeros(4)
    calls: list[int] = []

    def last(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2 if len(calls) == 1 else kept.copy_(x)

    library = torch.library.Library("graphkit_results", "DEF")
    library.define("last(Tensor x) -> Tensor")
    library.impl("last", last, "CPU")

    def body(x: torch.Tensor) -> Any:
        kept.add_(0)
        return torch.ops.graphkit_results.last(x)

    message = twice(body)
    library._destroy()
    assert message is not None
    assert "graphkit_results::last" in message
    assert "the result was float32[4] in result" in message


def test_arguments_that_only_one_call_has() -> None:
    times = iter([1, 2])

    def body(x: torch.Tensor) -> Any:
        return x.sum(0) if next(times) == 1 else torch.ops.aten.sum.dim_IntList(x, [0], True)

    message = twice(body)
    assert message is not None
    assert "argument 2 was None, then True" in message
