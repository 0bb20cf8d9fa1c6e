"""A hundred small functions of rows: whole numbers in, whole numbers out, so that every backend gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Each result is brought back into a small range, since the runs of a machine feed each other.
UNARY: dict[str, Unary] = {
    "itself": lambda t: t % 31,
    "abs": lambda t: t.abs() % 31,
    "flip": lambda t: t.flip(1) % 31,
    "cumsum": lambda t: (t % 31).cumsum(1),
    "sort": lambda t: (t % 31).sort(1).values,
    "roll": lambda t: torch.roll(t % 31, 1, 1),
    "clamp": lambda t: t.clamp(-5, 5),
    "sum": lambda t: (t % 31).sum(1, keepdim=True).expand(-1, 2) + 1,
    "in place": lambda t: (t % 31).add_(3).mul_(2),
    "float": lambda t: (t % 31).to(torch.float64).mul(0.5).floor().to(torch.int64),
}
BINARY: dict[str, Binary] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": lambda x, y: (x % 31) * (y % 31),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x - 1, y * 2),
    "columns": lambda x, y: torch.stack([x[:, 0], y.expand_as(x)[:, 1]], 1),
    "gather": lambda x, y: torch.gather(x, 1, y.expand_as(x) % 2),
    "lerp": lambda x, y: x + 3 * (y - x),
    "xor": torch.bitwise_xor,
}
NAMES = [(unary, binary) for unary in UNARY for binary in BINARY]


def compose(number: int) -> tuple[Binary, Unary]:
    """Two stages of function number `number` of the hundred; its argument is rows and rows, or rows and one row."""
    unary, binary = NAMES[number]
    return BINARY[binary], UNARY[unary]
