"""What two recordings of one function are compared by."""

from __future__ import annotations

import linecache
import math
from typing import Any

import attrs
import torch

from graphkit.errors import UserFrame


@attrs.frozen
class Memory:
    """Which memory a tensor lies in, in terms that two recordings share."""

    kind: str
    """"outside": it existed before the capture. "made": a captured operation made it.
    "constant": Python's values, wrapped. "break": an eager break made it."""
    number: int
    """The address of outside memory; of the others, which one, counted from 0."""

    def __str__(self) -> str:
        match self.kind:
            case "outside":
                return f"memory at 0x{self.number:x}"
            case "break":
                return f"tensor {self.number} of those made in eager breaks"
        return f"result {self.number}"


@attrs.frozen
class TensorUse:
    """A tensor as an argument or a result of one operation."""

    memory: Memory
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} in {self.memory}"


@attrs.frozen
class Call:
    """One operation of a recording."""

    operation: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    results: Any
    constant: torch.Tensor | None
    """The bytes of a constant that Python made here, or None."""
    code: tuple[str, int, str]
    """File, line and function in the user's code."""

    @property
    def frame(self) -> UserFrame:
        """Where in the user's code the operation was called."""
        return frame_at(*self.code)


def frame_at(filename: str, line: int, function: str) -> UserFrame:
    """The frame of a line of code; its source is read only now, since most are never shown."""
    source = linecache.getline(filename, line).strip()
    return UserFrame(location=f"{filename}:{line}", function=function, source=source)


def same(first: Any, second: Any) -> bool:
    """Whether two recorded values are one; NaN is NaN, and 1, 1.0 and True are three values."""
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(v, second[k]) for k, v in first.items())
    if isinstance(first, float):
        return (first == second and math.copysign(1, first) == math.copysign(1, second)) or (
            math.isnan(first) and math.isnan(second)
        )
    if isinstance(first, torch.Generator):
        # The dispatcher wraps a generator anew on each call.
        return bool(first._cdata == second._cdata)  # type: ignore[attr-defined]
    return bool(first == second)


def difference(first: list[Call], second: list[Call]) -> str | None:
    """The first operation in which two recordings differ, in words; None if none does."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        what = _difference(one, other)
        if what is not None:
            return f"operation {index} of two recordings differs: {what}. {_ADVICE}"
    if len(first) != len(second):
        longer = max(first, second, key=len)
        extra = longer[min(len(first), len(second))]
        return (
            f"one recording has {len(first)} operations and another has {len(second)}; the first "
            f"that only one of them has is {extra.operation} at {extra.frame}. {_ADVICE}"
        )
    return None


_ADVICE = (
    "A graph would repeat what the first one did for ever. What changes from call to call (a "
    "Python counter, a branch, a list, a random number, a tensor kept from an earlier call) has to "
    "come from a buffer, from prepare or from a variant"
)


def _difference(one: Call, other: Call) -> str | None:
    if one.operation != other.operation:
        return f"{one.operation} at {one.frame}, against {other.operation} at {other.frame}"
    where = f"{one.operation} at {one.frame}"
    pairs = [(f"argument {i}", a, b) for i, (a, b) in _paired(one.arguments, other.arguments)]
    first, second = dict(one.keywords), dict(other.keywords)
    pairs += [(k, first.get(k), second.get(k)) for k in sorted(first.keys() | second.keys())]
    pairs.append(("the result", one.results, other.results))
    for name, a, b in pairs:
        if not same(a, b):
            return f"{where}: {name} was {_show(a)}, then {_show(b)}"
    if not _same_bytes(one.constant, other.constant):
        return f"{where}: the constant that Python made there has other values"
    return None


def _paired(first: tuple[Any, ...], second: tuple[Any, ...]) -> list[tuple[int, tuple[Any, Any]]]:
    length = max(len(first), len(second))
    padded = [(*x, *[None] * (length - len(x))) for x in (first, second)]
    return list(enumerate(zip(*padded, strict=True)))


def _same_bytes(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show, value))}]"
    return str(value) if isinstance(value, TensorUse) else repr(value)
