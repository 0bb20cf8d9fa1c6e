"""One runner with PIECEWISE buckets over one row dim, for tests of breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import graphkit as gk

WIDTH = 4
ROWS = gk.Dim("rows", 16)


def runner_of(
    device: str,
    fn: Callable[..., Any],
    *sizes: int,
    checked: bool = False,
    mode: gk.Mode = gk.PIECEWISE,
    **options: Any,
) -> gk.GraphRunner:
    """A captured runner of `fn(x)`, x [rows, 4], at the given buckets."""
    group = gk.GraphGroup(device, checked=checked)
    runner = declare(group, fn, *sizes, mode=mode, **options)
    group.capture()
    return runner


def declare(
    group: gk.GraphGroup,
    fn: Callable[..., Any],
    *sizes: int,
    mode: gk.Mode = gk.PIECEWISE,
    name: str = "model",
    **options: Any,
) -> gk.GraphRunner:
    group.buffers.declare(x=gk.BufferSpec((ROWS, WIDTH), torch.float32, pad=0))
    if len(sizes) == 1:  # one bucket can't tell rows from a fixed size
        options.setdefault("outputs", gk.Output((ROWS, WIDTH), torch.float32))
    policy = gk.Policy([gk.Route(mode, gk.Buckets.of(ROWS, *(sizes or (1, 4, 8))))])
    return group.runner(name, fn, policy=policy, **options)


def run(runner: gk.GraphRunner, x: torch.Tensor, context: Any = None) -> Any:
    return runner.run(runner.dispatch(rows=x.shape[0]), x=x, context=context)


def rows(device: str, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator).to(device)


def num_segments(runner: gk.GraphRunner) -> list[int]:
    """Segments in the graph of each captured bucket."""
    return [len(e._graphs[-1].segments) for e in runner.entries if e.is_captured]
