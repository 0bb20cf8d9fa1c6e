"""Hypothesis strategies for dims, bucket sets, policies, batches, pads and buffers."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from graphkit.buckets import Buckets
from graphkit.buffers import BufferSpec
from graphkit.dims import RESERVED, Affine, Dim, affine, at_most, interleaved
from graphkit.dispatch import FULL, PIECEWISE, Dispatcher, Policy, Route
from graphkit.pads import by_producer, continue_, keep, relied, repeat_last

names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in RESERVED and not keyword.iskeyword(name)
)
"""Names that a dim may have."""


def dims(maximum: int = 600) -> st.SearchStrategy[Dim]:
    """Dims of any name, up to this maximum."""
    return st.builds(Dim, names, st.integers(1, maximum))


@st.composite
def affines(draw: st.DrawFn, maximum: int = 600) -> Dim | Affine:
    """A dim or an expression of one, made by arithmetic."""
    dim = draw(dims(maximum))
    return dim * draw(st.integers(1, 8)) + draw(st.integers(0, 8))


def as_integer(value: int) -> st.SearchStrategy[Any]:
    """The int itself, or the NumPy integer of the same value."""
    kinds: list[Any] = [int, np.int64, np.int32]
    if value < 128:
        kinds += [np.int8, np.uint8]
    return st.sampled_from(kinds).map(lambda kind: kind(value))


def sizes(dim: Dim) -> st.SearchStrategy[list[int]]:
    """Bucket sizes of a dim: unsorted, repeated."""
    return st.lists(st.integers(1, dim.maximum), min_size=1, max_size=8)


hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.integers(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from([np.float64(3.0), np.bool_(True), np.array([3]), np.array(3), object(), 3.0]),
)
"""What nobody should give as a size, and some that one may."""


@attrs.frozen
class Batch:
    """What one call of dispatch is given."""

    reqs: int
    tokens: int
    query_len: int | None
    max_query_len: int | None

    @property
    def named(self) -> dict[str, Any]:
        return {name: value for name, value in attrs.asdict(self).items() if value is not None}

    @property
    def sizes(self) -> dict[str, int]:
        return {"reqs": self.reqs, "tokens": self.tokens}


@st.composite
def request_dims(draw: st.DrawFn) -> tuple[Dim, Dim]:
    """A dim of requests and one of at least as many tokens."""
    reqs = Dim("reqs", draw(st.integers(1, 40)))
    return reqs, Dim("tokens", draw(st.integers(reqs.maximum, 160)))


@st.composite
def bucket_sets(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Buckets:
    """A set of any kind over requests and tokens."""
    kind = draw(st.sampled_from(["of", "powers", "ladder", "uniform", "varlen", "grid"]))
    others: Mapping[str, Any] = draw(
        st.sampled_from([{"reqs": at_most(tokens)}, {"reqs": reqs}, {"reqs": 1}, {}])
    )
    match kind:
        case "of":
            return Buckets.of(tokens, *draw(sizes(tokens)), **others)
        case "powers":
            return Buckets.powers(tokens, upto=draw(st.integers(1, tokens.maximum)), **others)
        case "ladder":
            return Buckets.ladder(tokens, align=draw(st.sampled_from([1, 4])), **others)
        case "uniform":
            query_len = draw(st.integers(1, min(5, tokens.maximum)))
            room = min(reqs.maximum, tokens.maximum // query_len)
            chosen = draw(st.lists(st.integers(1, room), min_size=1, max_size=6))
            return Buckets.uniform(reqs, tokens, query_len=query_len, sizes=chosen)
        case "varlen":
            longest = draw(st.integers(1, 6))
            return Buckets.varlen(reqs, tokens, max_query_len=longest, sizes=draw(sizes(reqs)))
        case _:
            return Buckets.grid({reqs: draw(sizes(reqs)), tokens: draw(sizes(tokens))})


@st.composite
def policies(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Policy:
    """Routes of both modes in any order, over sets of any kind."""
    modes = st.sampled_from([FULL, PIECEWISE])
    limits = st.sampled_from([None, None, None, 0, 4, 0.25])
    route = st.builds(Route, modes, bucket_sets(reqs, tokens), max_padding=limits)
    return Policy(draw(st.lists(route, min_size=1, max_size=4)))


@st.composite
def batches(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Batch:
    """A batch that these dims hold, of any kind that a call may state."""
    query_len = draw(st.none() | st.integers(1, min(6, tokens.maximum)))
    if query_len is not None:
        count = draw(st.integers(0, min(reqs.maximum, tokens.maximum // query_len)))
        longest = draw(st.none() | st.integers(query_len, query_len + 2))
        return Batch(count, count * query_len, query_len, longest)
    count = draw(st.integers(0, reqs.maximum))
    longest = draw(st.none() | st.integers(1, 8))
    rows = tokens.maximum if longest is None else min(tokens.maximum, count * longest)
    return Batch(count, draw(st.integers(0, rows)), None, longest)


@st.composite
def dispatchers(draw: st.DrawFn) -> Dispatcher:
    """A dispatcher over requests and tokens, of which some or all graphs are captured.

    Give the warning of unreachable buckets its leave: it is right for many of these policies.
    """
    reqs, tokens = draw(request_dims())
    dispatcher = Dispatcher(draw(policies(reqs, tokens)), [reqs, tokens])
    if draw(st.booleans()):
        for mode, bucket in dispatcher.graphs:
            if draw(st.booleans()):
                dispatcher.forget(mode, bucket)
    return dispatcher


# -- buffers ------------------------------------------------------------------------------------

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
    """A buffer of up to three axes over these dims, of any dtype and with any pads."""
    shape = tuple(draw(st.lists(extents(over), max_size=3)))
    dtype = draw(st.sampled_from(BUFFER_DTYPES))
    names = {affine(extent).dim.name for extent in shape if not isinstance(extent, int)}
    by_dim = {name: draw(pads(dtype)) for name in sorted(names)}
    layout: Any = draw(st.sampled_from(["strided", "packed"] if packed else ["strided"]))
    return BufferSpec(shape, dtype, pad=by_dim or None, layout=layout)


@st.composite
def sizes_of(draw: st.DrawFn, over: Sequence[Dim], least: int = 0) -> dict[str, int]:
    """A size for each dim."""
    return {dim.name: draw(st.integers(least, dim.maximum)) for dim in over}
