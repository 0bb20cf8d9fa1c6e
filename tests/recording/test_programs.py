"""Each program of the table: its graph does what eager does, or is refused, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphkit.errors import CaptureError
from tests.recording.harness import MODES, assert_same, capture, tensors
from tests.recording.programs import PROGRAMS, Program


@contextmanager
def elsewhere() -> Iterator[None]:
    """Everything that is ambient differs from the capture."""
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        stack.enter_context(torch.device("meta"))
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float64)
        yield


AMBIENT: list[Callable[[], AbstractContextManager[Any]]] = [
    nullcontext,
    torch.no_grad,
    torch.inference_mode,
    elsewhere,
]


def cases(*kinds: str) -> list[Any]:
    return [
        pytest.param(program, mode, id=f"{program.name}-{mode}")
        for program in PROGRAMS
        if program.kind in kinds
        for mode in program.modes
    ]


def made(program: Program, generator: torch.Generator, device: str) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in program.inputs(generator)]


def warm_up(backend: Any, program: Program, inputs: list[torch.Tensor], mode: str) -> None:
    """What CUDA does once (workspaces, handles) can't be done in a capture."""
    if backend.device.type == "cuda":
        with backend.on_stream(backend.new_stream()), MODES[mode]():
            program.body([tensor.clone() for tensor in inputs])
        backend.synchronize()


def test_the_table_is_large_and_its_names_differ() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS) >= 60
    assert sum(program.kind == "refused" for program in PROGRAMS) >= 30


@pytest.mark.parametrize(("program", "mode"), cases("ok"))
def test_a_replay_does_what_eager_does(
    backend: Any, device: str, program: Program, mode: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    static = made(program, generator, device)
    warm_up(backend, program, static, mode)
    before = [tensor.clone() for tensor in static]
    graph, result = capture(backend, lambda: program.body(static), mode=mode)
    assert_same(static, before)
    addresses = [tensor.data_ptr() for tensor in tensors(result)]
    assert graph.num_nodes != 0
    for ambient in AMBIENT:
        with torch.inference_mode():
            for tensor, value in zip(static, made(program, generator, device), strict=True):
                tensor.copy_(value)
        copies = [tensor.clone() for tensor in static]
        with MODES[mode]():
            expected = program.body(copies)
        with ambient():
            graph.replay()
        backend.synchronize()
        assert_same([*tensors(result), *static], [*tensors(expected), *copies])
    assert [tensor.data_ptr() for tensor in tensors(result)] == addresses


@pytest.mark.parametrize(("program", "mode"), cases("random"))
def test_a_replay_draws_anew(backend: Any, device: str, program: Program, mode: str) -> None:
    static = made(program, torch.Generator().manual_seed(0), device)
    warm_up(backend, program, static, mode)
    graph, result = capture(backend, lambda: program.body(static), mode=mode)

    def replay(seed: int | None = None) -> list[torch.Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        backend.synchronize()
        return [tensor.clone() for tensor in tensors(result)]

    first, second, third, again = replay(7), replay(), replay(8), replay(7)
    assert_same(again, first)
    for one, other, another in zip(first, second, third, strict=True):
        assert not torch.equal(one, other)
        assert not torch.equal(one, another)


@pytest.mark.parametrize(("program", "mode"), cases("refused"))
def test_what_a_capture_refuses(backend: Any, device: str, program: Program, mode: str) -> None:
    static = made(program, torch.Generator().manual_seed(0), device)
    before = [tensor.clone() for tensor in static]
    state = torch.random.get_rng_state()
    with pytest.raises(CaptureError if backend.name == "recording" else Exception) as caught:
        capture(backend, lambda: program.body(static), mode=mode)
    if backend.name == "recording":
        assert caught.value.operation
        assert "programs.py:" in caught.value.location
        assert caught.value.location in str(caught.value)
    assert not backend.is_capturing()
    assert_same(static, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    # Eager still works, and so does another capture.
    with MODES[mode]():
        program.body([tensor.clone() for tensor in static])
    x = torch.ones(3, device=device)
    graph, y = capture(backend, lambda: x * 2, mode=mode)
    graph.replay()
    backend.synchronize()
    assert y.tolist() == [2, 2, 2]
