"""Random compositions of small operations: a replay is eager, whatever history came before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkit.backends.recording import RecordingBackend
from tests.recording.harness import assert_same, capture

ROWS, COLUMNS = 4, 6
Tensor = torch.Tensor


def _write_row(x: Tensor, y: Tensor) -> Tensor:
    x[1] = y[2]
    return x


def _out(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y, out=torch.empty(0))


def _transposed_in_place(x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.t_()
    x.add_(1)
    return x.t_()


def _scatter(x: Tensor, y: Tensor) -> Tensor:
    return x.scatter(0, y.argsort(dim=0, stable=True), y)


def _strided(x: Tensor, y: Tensor) -> Tensor:
    return torch.as_strided(x.contiguous(), (ROWS, COLUMNS), (COLUMNS, 1)) * 2


def _into_second(x: Tensor, y: Tensor) -> Tensor:
    y.copy_(x)
    return x


# Every operation takes two (ROWS, COLUMNS) tensors, may write both, and returns one.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add in place": lambda x, y: x.add_(y),
    "scale in place": lambda x, y: x.mul_(0.5),
    "relu": lambda x, y: x.relu(),
    "clamp in place": lambda x, y: x.clamp_(-2, 2),
    "view": lambda x, y: x.reshape(-1).view(ROWS, COLUMNS),
    "reshape, perhaps a copy": lambda x, y: x.t().reshape(-1).view(ROWS, COLUMNS),
    "transposed twice": lambda x, y: x.t().contiguous().t(),
    "transposed in place": _transposed_in_place,
    "row written": _write_row,
    "written through a view": lambda x, y: x[:, ::2].add_(1).new_zeros(ROWS, COLUMNS) + x,
    "out": _out,
    "expanded": lambda x, y: x[:1].expand(ROWS, COLUMNS),
    "sorted": lambda x, y: x.sort(stable=True, dim=-1).values,
    "gathered": lambda x, y: x.gather(1, y.argsort(dim=1, stable=True)),
    "scattered": _scatter,
    "masked": lambda x, y: torch.where(x > y, x, 0.0),
    "filled": lambda x, y: x.masked_fill(y > 0, 3.0),
    "through another dtype": lambda x, y: x.bfloat16().float(),
    "strided": _strided,
    "rolled": lambda x, y: x.roll(1, 0),
    "split and joined": lambda x, y: torch.cat([y[2:], x[:2]]),
    "foreach": lambda x, y: torch._foreach_add([x, y], 1.0)[1],
    "second written": _into_second,
    "matrix product": lambda x, y: (x @ y.t()) @ y / 16,
}

steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 7), st.integers(0, 7)),
    min_size=1,
    max_size=10,
)
seeds = st.lists(st.integers(0, 1000), min_size=1, max_size=3)


def run(program: list[tuple[str, int, int]], inputs: list[Tensor]) -> list[Tensor]:
    values = list(inputs)
    for name, first, second in program:
        x, y = values[first % len(values)], values[second % len(values)]
        # What overlaps itself can't be written, in eager mode either.
        x, y = (t.clone() if 0 in t.stride() else t for t in (x, y))
        values.append(OPERATIONS[name](x, y))
    return values


def contents(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(3)]


@settings(max_examples=60, deadline=None)
@given(program=steps, history=seeds, mode=st.sampled_from(["no_grad", "inference_mode"]))
def test_a_replay_is_eager(
    program: list[tuple[str, int, int]], history: list[int], mode: str
) -> None:
    static = contents(0)
    before = [tensor.clone() for tensor in static]
    graph, results = capture(RecordingBackend(), lambda: run(program, static), mode=mode)
    assert_same(static, before)
    for seed in history:
        for tensor, value in zip(static, contents(seed), strict=True):
            tensor.copy_(value)
        with torch.no_grad():
            expected = run(program, contents(seed))
        graph.replay()
        assert_same(results, expected)


@settings(max_examples=30, deadline=None)
@given(
    program=steps,
    cuts=st.sets(st.integers(1, 9), max_size=3),
    history=seeds,
)
def test_segments_one_after_the_other_are_the_whole(
    program: list[tuple[str, int, int]], cuts: set[int], history: list[int]
) -> None:
    backend = RecordingBackend()
    static = contents(0)
    graphs = []
    values = list(static)
    with torch.no_grad():
        under_way = backend.begin_capture()
        try:
            for index, step in enumerate(program):
                if index in cuts:
                    graphs.append(under_way.split())
                    under_way.resume()
                values = run([step], values)
            graphs.append(under_way.end())
        finally:
            under_way.abort()
    for seed in history:
        for tensor, value in zip(static, contents(seed), strict=True):
            tensor.copy_(value)
        with torch.no_grad():
            expected = run(program, contents(seed))
        for graph in graphs:
            graph.replay()
        assert_same(values, expected)


@settings(max_examples=30, deadline=None)
@given(program=steps, seed=st.integers(1, 1000))
def test_two_recordings_agree(program: list[tuple[str, int, int]], seed: int) -> None:
    backend = RecordingBackend()
    static = contents(0)
    first, _ = capture(backend, lambda: run(program, static))
    for tensor, value in zip(static, contents(seed), strict=True):
        tensor.copy_(value)
    second, _ = capture(backend, lambda: run(program, static))
    assert first.difference(second) is None
