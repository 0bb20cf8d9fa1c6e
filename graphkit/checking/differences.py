"""Differences: whether two tensors hold the same, bit by bit or within a tolerance, and where they don't."""

from __future__ import annotations

import math
import sys
from typing import Any

import attrs
import torch

from graphkit.errors import InputError

SHOWN_ROWS = 6

_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}


def _at_least_0(instance: object, attribute: Any, value: Any) -> None:
    # NaN is not at least 0 either, and an int may be more than a float holds.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_float = is_number and (0 <= value <= sys.float_info.max or value == math.inf)
    if value is not None and not is_float:
        raise InputError(f"{attribute.name} must be a number of at least 0, or None, got {value!r}")


@attrs.frozen(kw_only=True)
class Tolerance:
    """How far apart values of different computations may lie: ``atol + rtol * |expected|``.

    Args:
        rtol: relative; None for what `torch.testing.assert_close` takes for the dtype.
        atol: absolute; None likewise.

    Raises:
        InputError: one is no number of at least 0.
    """

    rtol: float | None = attrs.field(default=None, validator=_at_least_0)
    atol: float | None = attrs.field(default=None, validator=_at_least_0)

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """``(rtol, atol)`` for values of this dtype; integers and bools are exact unless said otherwise."""
        rtol, atol = _TOLERANCES.get(dtype, (0.0, 0.0))
        if dtype.is_floating_point and dtype.itemsize == 1:
            rtol = float(torch.finfo(dtype).eps)
        return (
            rtol if self.rtol is None else self.rtol,
            atol if self.atol is None else self.atol,
        )


@attrs.frozen(kw_only=True)
class Difference:
    """Where two tensors of one shape differ.

    Attributes:
        rows: indices along the first axis, ascending; none for a 0-d tensor.
        elements: how many differ.
        largest: the largest difference of two finite elements; infinite where only one is finite.
    """

    rows: tuple[int, ...]
    elements: int
    largest: float

    def __str__(self) -> str:
        return f"{rows_text(self.rows)}by up to {self.largest:g}"


def rows_text(rows: tuple[int, ...]) -> str:
    """Row numbers in words, with a space after them; nothing for none."""
    if not rows:
        return ""
    shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
    more = f" and {len(rows) - SHOWN_ROWS} more" if len(rows) > SHOWN_ROWS else ""
    return f"in row{'s' if len(rows) > 1 else ''} {shown}{more} "


def bit_difference(left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    """Where the bits of two tensors of one shape and dtype differ; any NaN equals any other.

    Returns:
        None where they are the same.
    """
    left, right = _resolved(left), _resolved(right)
    if left.numel() == 0:
        return None
    differs = (_bits(left) != _bits(right)).any(dim=-1).view(left.shape)
    return _where(differs, left, right)


def difference(
    found: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance
) -> Difference | None:
    """Where two tensors of one shape and dtype are further apart than `tolerance` allows; NaN equals NaN.

    Returns:
        None where all elements are close.
    """
    found, expected = _resolved(found), _resolved(expected)
    if found.numel() == 0:
        return None
    differs = (_bits(found) != _bits(expected)).any(dim=-1).view(found.shape)
    rtol, atol = tolerance.of(found.dtype)
    left, right = _wide(found), _wide(expected)
    if not (found.is_floating_point() or found.is_complex()):
        # Any multiple of nothing is nothing.
        allowed = atol + (rtol * right.abs()).nan_to_num(nan=0.0, posinf=math.inf)
        return _where(differs & _is_beyond(_distances(found, expected), allowed), found, expected)
    # Infinities of one sign are equal already; against anything else they are far.
    close = (left - right).abs() <= atol + rtol * right.abs()
    close &= left.isfinite() & right.isfinite()
    return _where(differs & ~close & (left != right), found, expected)


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference of two elements; infinite where only one of the two is finite, and 0 for none."""
    left, right = _resolved(left), _resolved(right)
    if left.numel() == 0:
        return 0.0
    if left.dtype is right.dtype and not (left.is_floating_point() or left.is_complex()):
        return float(int(_distances(left, right).max()) - _LEAST)
    left, right = _wide(left), _wide(right)
    same = (left == right) | (left.isnan() & right.isnan())
    distance = (left - right).abs().masked_fill(same, 0.0)
    largest = float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())
    return largest


def _where(differs: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> Difference | None:
    if left.is_floating_point() or left.is_complex():
        differs = differs & ~(_wide(left).isnan() & _wide(right).isnan())
    elements = int(differs.sum())
    if not elements:
        return None
    rows: tuple[int, ...] = ()
    if differs.ndim:
        by_row = differs.reshape(differs.shape[0], -1).any(dim=1)
        rows = tuple(by_row.nonzero().flatten().tolist())
    return Difference(rows=rows, elements=elements, largest=largest_difference(left, right))


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:
        # A lone element counts as contiguous whatever its stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(tensor.numel(), tensor.element_size())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -- integers: above 2**53 two of them may be one float -------------------------------------------

_LEAST = torch.iinfo(torch.int64).min


def _distances(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How far apart integers are, all 64 bits of it: int64, less 2**63."""
    left, right = _ordered(left), _ordered(right)
    # What doesn't fit wraps, and is right as an unsigned number.
    return (torch.maximum(left, right) - torch.minimum(left, right)) ^ _LEAST


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """As int64, in the same order."""
    if tensor.dtype is torch.uint64:
        return tensor.view(torch.int64) ^ _LEAST
    return tensor.to(torch.int64)


def _is_beyond(distances: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Where distances, as `_distances` has them, are more than a float64."""
    below = 2.0**63 - 1024  # the float64 before 2**63
    small = allowed.clamp(0, below).to(torch.int64) ^ _LEAST
    large = (allowed - 2.0**63).clamp(0, below).to(torch.int64)
    limits = torch.where(allowed < 2.0**63, small, large)
    return (distances > limits) & ~(allowed >= 2.0**64)
