"""`lint`: it finds what a capture refuses, all of it, with its line and what to do, and leaves nothing changed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import graphkit as gk
from tests.recording.harness import assert_same
from tests.recording.programs import PROGRAMS, Program
from tests.reliability.surroundings import changes, is_capturing, surroundings


def programs(*kinds: str) -> list[Any]:
    return [
        pytest.param(program, id=program.name)
        for program in PROGRAMS
        if program.kind in kinds and "no_grad" in program.modes
    ]


@pytest.mark.parametrize("program", programs("refused"))
def test_what_a_capture_refuses_is_found(device: str, program: Program) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [tensor.to(device) for tensor in program.inputs(generator)]
    found = gk.lint(program.body, [inputs])
    assert found
    assert all(refusal.location.startswith(program.body.__code__.co_filename) for refusal in found)


@pytest.mark.parametrize("program", programs("ok", "random"))
def test_what_can_be_captured_is_clean_and_nothing_changes(device: str, program: Program) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [tensor.to(device) for tensor in program.inputs(generator)]
    copies = [tensor.clone() for tensor in inputs]
    before = surroundings(device)
    assert gk.lint(program.body, [inputs]) == ()
    assert_same(inputs, copies)
    assert not changes(before, surroundings(device))


def engine(x: torch.Tensor, n: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(1)
    for _ in range(3):
        x = x * x.sum().item()
    rows = x.nonzero()
    if n.sum() > 0:
        x = x + torch.tensor([1.0, 2.0, 3.0], device=x.device)
    x = x + torch.rand(3, device=x.device)
    return x[n > 1], rows, n.tolist()  # type: ignore[return-value]


def test_it_goes_on_after_the_first_and_names_line_reason_and_remedy(device: str) -> None:
    x, n = torch.ones(3, device=device), torch.arange(3, device=device)
    state = torch.zeros(2, device=device)
    before = surroundings(device)
    found = gk.lint(engine, {"x": x, "n": n, "state": state})
    assert not changes(before, surroundings(device))
    assert state.tolist() == [0, 0]
    first = engine.__code__.co_firstlineno
    assert [(r.operation, int(r.location.rpartition(":")[2]) - first, r.count) for r in found] == [
        ("torch.Tensor.item", 3, 3),
        ("torch.Tensor.nonzero", 4, 1),
        ("torch.Tensor.__bool__", 5, 1),
        ("torch.tensor", 6, 1),
        ("torch.Tensor.__getitem__", 8, 1),
        ("torch.Tensor.tolist", 8, 1),
    ]
    assert str(found[0]) == (
        f"{__file__}:{first + 3} in engine: x = x * x.sum().item()\n"
        "  torch.Tensor.item can't be captured (3 times): it reads a value back from the device, which a capture "
        "can't wait for. Keep the value in a tensor, compute it in prepare and pass it in, or do this in an eager break"
    )
    assert "Compute both sides and choose with torch.where" in found[2].remedy
    assert "Give the result a fixed size" in found[1].remedy
    assert found[2].source == "if n.sum() > 0:"
    assert found[2].function == "engine"


def test_a_capture_names_the_first_of_them() -> None:
    x, n = torch.ones(3), torch.arange(3)
    first = gk.lint(engine, (x, n, torch.zeros(2)))[0]
    rows = gk.Dim("rows", 3)
    group = gk.GraphGroup("cpu")
    fn = lambda x: (engine(x, n, x.clone()), x)[1]  # noqa: E731
    policy = gk.Policy.full(gk.Buckets.of(rows, 3))
    out = gk.Output((rows,), torch.float32)
    group.wrap(fn, policy=policy, outputs=out, x=gk.BufferSpec((rows,), torch.float32, pad=1))
    with pytest.raises(gk.CaptureError) as raised:
        group.capture(progress=False)
    assert raised.value.location == first.location
    assert raised.value.operation == first.operation


def test_eager_breaks_may_do_it_in_a_piecewise_graph() -> None:
    pause = gk.eager_break(lambda t: t * t.sum().item())

    def fn(x: torch.Tensor) -> torch.Tensor:
        return pause(x + 1) + 1

    x = torch.ones(3)
    assert gk.lint(fn, x, mode=gk.PIECEWISE) == ()
    assert [r.operation for r in gk.lint(fn, x)] == ["torch.Tensor.item"]
    after = lambda x: fn(x).nonzero()  # noqa: E731
    assert [r.operation for r in gk.lint(after, x, mode=gk.PIECEWISE)] == ["torch.Tensor.nonzero"]


def test_a_generator_has_to_be_registered(device: str) -> None:
    own = torch.Generator(device=device).manual_seed(3)
    state = own.get_state().tolist()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, generator=own, device=device)

    x = torch.ones(3, device=device)
    assert "Name it in generators=" in gk.lint(fn, x)[0].remedy
    own.manual_seed(3)
    assert gk.lint(fn, x, generators=[own]) == ()
    assert own.get_state().tolist() == state


def test_code_that_asks_for_a_capture_takes_its_path() -> None:
    def fn(x: torch.Tensor) -> Any:
        return x.sum().item() if is_capturing() else x

    assert len(gk.lint(fn, torch.ones(3))) == 1


def test_a_module_and_no_inputs() -> None:
    assert gk.lint(torch.nn.Linear(3, 2), torch.ones(1, 3)) == ()
    assert gk.lint(lambda: torch.ones(3).sum().item())[0].operation == "torch.Tensor.item"


def test_an_exception_arrives_as_itself_with_what_was_found() -> None:
    def fn(x: torch.Tensor) -> None:
        math.sqrt(x.sum().item() - 4)

    before = surroundings("cpu")
    with pytest.raises(ValueError, match="math|nonnegative") as raised:
        gk.lint(fn, torch.ones(3))
    assert "torch.Tensor.item can't be captured" in raised.value.__notes__[0]
    assert not changes(before, surroundings("cpu"))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((3, ()), {}, gk.SpecError, "takes a function or module, got 3"),
        ((len, 3), {}, gk.SpecError, "takes a mapping of names, a sequence or one tensor, got int"),
        ((len, {3: 4}), {}, gk.InputError, "got the name 3"),
        ((len, ()), {"mode": gk.EAGER}, gk.SpecError, "mode=FULL or mode=PIECEWISE"),
        ((len, ()), {"generators": [3]}, gk.SpecError, "takes torch.Generators, got 3"),
    ],
)
def test_what_it_does_not_take(arguments: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        gk.lint(*arguments, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: x + torch.ones(3).to(x.device), 1),
        (lambda x: x + torch.ones(3, device="cpu").cuda(), 1),
        (lambda x: x.to("cpu"), 1),
        (lambda x: x.copy_(torch.ones(3)), 1),
        (lambda x: x.copy_(PINNED[0], non_blocking=True), 0),
        (lambda x: PINNED[0].copy_(x, non_blocking=True), 0),
        (lambda x: x * 2 + torch.zeros(3, device=x.device), 0),
    ],
)
def test_copies_of_pageable_memory_are_found_where_there_is_a_device(fn: Any, count: int) -> None:
    PINNED[:] = [torch.ones(3, pin_memory=True)]
    assert len(gk.lint(fn, torch.ones(3, device="cuda"))) == count


PINNED: list[torch.Tensor] = []
