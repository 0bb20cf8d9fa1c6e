"""Strategies for dims and for sizes of them."""

from __future__ import annotations

import keyword
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from graphkit.dims import RESERVED, Affine, Dim

names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda name: name not in RESERVED and not keyword.iskeyword(name)
)
"""Names that a dim, a buffer or a variant may have."""

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


def dims(maximum: int = 600) -> st.SearchStrategy[Dim]:
    """Dims of any name, up to this maximum."""
    return st.builds(Dim, names, st.integers(1, maximum))


@st.composite
def affines(draw: st.DrawFn, maximum: int = 600) -> Dim | Affine:
    """A dim or an expression of one, made by arithmetic."""
    dim = draw(dims(maximum))
    return dim * draw(st.integers(1, 8)) + draw(st.integers(0, 8))


@st.composite
def request_dims(draw: st.DrawFn, most_reqs: int = 40, most_tokens: int = 160) -> tuple[Dim, Dim]:
    """A dim `reqs` of requests, and a dim `tokens` of at least as many tokens."""
    reqs = Dim("reqs", draw(st.integers(1, most_reqs)))
    return reqs, Dim("tokens", draw(st.integers(reqs.maximum, max(most_tokens, reqs.maximum))))


def as_integer(value: int) -> st.SearchStrategy[Any]:
    """The int itself, or the NumPy integer of the same value."""
    kinds: list[Any] = [int, np.int64, np.int32]
    if value < 128:
        kinds += [np.int8, np.uint8]
    return st.sampled_from(kinds).map(lambda kind: kind(value))


def sizes(dim: Dim) -> st.SearchStrategy[list[int]]:
    """Sizes to make buckets of: unsorted, repeated."""
    return st.lists(st.integers(1, dim.maximum), min_size=1, max_size=8)


@st.composite
def sizes_of(draw: st.DrawFn, over: Sequence[Dim], least: int = 0) -> dict[str, int]:
    """A size for each dim, by its name."""
    return {dim.name: draw(st.integers(least, dim.maximum)) for dim in over}


def sizes_near(marks: Iterable[int], least: int, most: int) -> st.SearchStrategy[int]:
    """Sizes from `least` to `most`, half of them a mark or beside one.

    Both ends are marks too. Shrinks to the smallest size that fails, be it a mark or not.

    Args:
        marks: the buckets' sizes, say; what lies outside the range is ignored.
        least: the smallest size.
        most: the largest size, at least `least`.
    """
    near = {mark + by for mark in (*marks, least, most) for by in (-1, 0, 1)}
    edges = sorted(edge for edge in near if least <= edge <= most)
    count = most - least + 1
    repeats = -(-count // len(edges))
    # An edge has so many places more than another size, and all are in order, so that shrinking the place
    # shrinks the size.
    places = [edge - least + repeats * index for index, edge in enumerate(edges)]

    def size_at(place: int) -> int:
        index = bisect_right(places, place) - 1
        if place <= places[index] + repeats:
            return edges[index]
        return place - repeats * (index + 1) + least

    return st.integers(0, count + repeats * len(edges) - 1).map(size_at)
