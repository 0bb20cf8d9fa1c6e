"""Strategies for pads and buffer declarations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from graphkit.buffers import BufferSpec
from graphkit.dims import Dim, affine, interleaved
from graphkit.pads import by_producer, continue_, keep, relied, repeat_last

BUFFER_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint16,
    torch.uint32,
    torch.float8_e4m3fn,
)
"""One of each kind: with and without a NumPy counterpart, with and without arithmetic in torch."""


def small_values(dtype: torch.dtype) -> st.SearchStrategy[bool | int | float]:
    """Values that the dtype and a float64 both hold exactly, and float8's sums of a few too."""
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_floating_point:
        return st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, -2.0, 4.0])
    least = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32) else -3
    return st.integers(least, 7)


@st.composite
def pads(draw: st.DrawFn, dtype: torch.dtype) -> Any:
    """A pad of any kind that the dtype can hold."""
    value = draw(small_values(dtype))
    kinds = [value, relied(value), repeat_last, keep, by_producer(value)]
    countable = dtype not in (torch.bool, torch.bfloat16, torch.float8_e4m3fn)
    if countable:
        kinds.append(continue_(draw(small_values(dtype))))
    return draw(st.sampled_from(kinds))


def extents(over: Sequence[Dim]) -> st.SearchStrategy[Any]:
    """An axis: fixed, a dim, or an expression of one whose real rows are a prefix."""
    fixed = st.integers(1, 3)
    varying = [st.just(form) for dim in over for form in (dim, dim, dim + 1, interleaved(dim, 2))]
    return st.one_of(fixed, *varying)


@st.composite
def buffer_specs(draw: st.DrawFn, over: Sequence[Dim], *, packed: bool = True) -> BufferSpec:
    """A buffer of up to three axes over these dims, of any dtype and with any pads.

    Args:
        draw: hypothesis's.
        over: the dims.
        packed: whether it may be packed, that is for one runner alone.
    """
    shape = tuple(draw(st.lists(extents(over), max_size=3)))
    dtype = draw(st.sampled_from(BUFFER_DTYPES))
    varying = {affine(extent).dim.name for extent in shape if not isinstance(extent, int)}
    by_dim = {name: draw(pads(dtype)) for name in sorted(varying)}
    layout: Any = draw(st.sampled_from(["strided", "packed"] if packed else ["strided"]))
    return BufferSpec(shape, dtype, pad=by_dim or None, layout=layout)
