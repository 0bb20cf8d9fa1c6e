"""Random numbers: what a run draws depends on the seed alone, in every mode, from any generator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphkit as gk

ROWS = gk.Dim("rows", 8)
KINDS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "rand": lambda x, g: torch.rand(x.shape, generator=g, device=x.device),
    "randn": lambda x, g: torch.randn(x.shape, generator=g, device=x.device),
    "randint": lambda x, g: torch.randint(0, 1000, x.shape, generator=g, device=x.device).float(),
    "uniform_": lambda x, g: torch.empty_like(x).uniform_(generator=g),
    "exponential_": lambda x, g: torch.empty_like(x).exponential_(generator=g),
    "bernoulli_": lambda x, g: torch.empty_like(x).bernoulli_(0.5, generator=g),
    "normal_": lambda x, g: torch.empty_like(x).normal_(generator=g),
}


def serving(
    device: str, mode: gk.Mode, kind: str, generators: list[torch.Generator | None]
) -> tuple[gk.GraphGroup, Callable[[int], list[float]]]:
    """A captured group, and a function that runs a batch of a size and gives what it drew."""
    draw = KINDS[kind]
    pause = gk.eager_break(lambda y: y + 0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        for generator in generators:
            x = pause(x * 0) + draw(x, generator)
        return x

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((ROWS,), torch.float32, pad=0))
    captured = gk.FULL if mode is gk.EAGER else mode
    runner = group.runner(
        "r",
        fn,
        policy=gk.Policy([gk.Route(captured, gk.Buckets.of(ROWS, 4, 8))]),
        outputs=gk.Output((ROWS,), torch.float32),
        generators=[generator for generator in generators if generator is not None],
    )
    group.capture(progress=False)

    def run(size: int) -> list[float]:
        dispatch = runner.dispatch(rows=size, eager="so" if mode is gk.EAGER else None)
        assert dispatch.mode is mode
        found: list[float] = runner.run(dispatch, x=[1.0] * size).tolist()
        return found

    return group, run


MODES = [gk.FULL, gk.PIECEWISE, gk.EAGER]


def seeded(generators: list[torch.Generator | None], seed: int) -> None:
    torch.manual_seed(seed)
    for number, generator in enumerate(generators):
        if generator is not None:
            generator.manual_seed(seed + number)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["default", "private", "two"])
def test_a_seed_gives_the_same_runs_again(
    device: str, mode: gk.Mode, kind: str, which: str
) -> None:
    made = [torch.Generator(device=device) for _ in range(2)]
    generators: list[torch.Generator | None] = {
        "default": [None],
        "private": [made[0]],
        "two": [made[0], None],
    }[which]
    _, run = serving(device, mode, kind, generators)
    sizes = [3, 8, 4, 1, 8]
    seeded(generators, 11)
    first = [run(size) for size in sizes]
    seeded(generators, 11)
    assert [run(size) for size in sizes] == first
    seeded(generators, 12)
    assert [run(size) for size in sizes] != first
    # No run repeats an earlier one.
    seeded(generators, 11)
    rows = [tuple(run(8)) for _ in range(6)]
    assert all(a != b for a, b in itertools.combinations(rows, 2))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_captures_and_recaptures_take_nothing_from_the_sequence(device: str, mode: gk.Mode) -> None:
    """The caller's next number is the same whether a capture came between or not, and so are the runs'."""
    own = torch.Generator(device=device)
    group, run = serving(device, mode, "rand", [own, None])
    seeded([own], 5)
    expected = [run(8), run(8), torch.rand(3, device=device).tolist()]
    seeded([own], 5)
    first = run(8)
    group.invalidate()
    group.capture(progress=False)
    assert [first, run(8), torch.rand(3, device=device).tolist()] == expected


def test_graphs_and_the_caller_draw_from_one_sequence(device: str) -> None:
    """A run in between moves the caller's sequence on, as eager code would."""
    _, run = serving(device, gk.FULL, "rand", [None])
    torch.manual_seed(3)
    alone = torch.rand(4, device=device).tolist()
    torch.manual_seed(3)
    drawn = run(4)
    after = torch.rand(4, device=device).tolist()
    assert after not in (alone, drawn)
    torch.manual_seed(3)
    assert run(4) == drawn
    assert torch.rand(4, device=device).tolist() == after


def test_a_saved_state_brings_a_run_back(device: str) -> None:
    own = torch.Generator(device=device).manual_seed(2)
    _, run = serving(device, gk.FULL, "rand", [own])
    run(8)
    state = own.get_state()
    expected = [run(8), run(3)]
    own.set_state(state)
    assert [run(8), run(3)] == expected


def test_dropout_in_a_module_is_drawn_anew(device: str) -> None:
    module = torch.nn.Dropout(0.5).to(device)
    group = gk.GraphGroup(device)
    fast = group.wrap(module, input=gk.BufferSpec((ROWS, 64), torch.float32, pad=0))
    group.capture(progress=False)
    ones = torch.ones(8, 64, device=device)
    torch.manual_seed(1)
    first = [fast(input=ones).tolist() for _ in range(3)]
    assert first[0] != first[1] != first[2]
    torch.manual_seed(1)
    assert [fast(input=ones).tolist() for _ in range(3)] == first
