"""Strategies for bucket sets, policies and dispatchers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from graphkit.dims import Dim, at_most
from graphkit.dispatch.buckets import Buckets
from graphkit.dispatch.dispatcher import FULL, PIECEWISE, Dispatcher, Policy, Route
from graphkit.testing.strategies.sizes import request_dims, sizes

_DENSE = 24
"""The most buckets of a dense set: each costs a graph, or a row of the dispatcher's tables."""


@st.composite
def bucket_sets(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Buckets:
    """A set of any kind over requests and tokens, hostile ones among them.

    Hostile are a single bucket, every size there is, and the smallest with the largest and nothing between.
    """
    makers = ["of", "powers", "ladder", "uniform", "varlen", "grid", "single", "dense", "sparse"]
    others: Mapping[str, Any] = draw(
        st.sampled_from([{"reqs": at_most(tokens)}, {"reqs": reqs}, {"reqs": 1}, {}])
    )
    match draw(st.sampled_from(makers)):
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
        case "single":
            return Buckets.of(tokens, draw(st.integers(1, tokens.maximum)), **others)
        case "dense":
            return Buckets.of(tokens, range(1, min(tokens.maximum, _DENSE) + 1), **others)
        case "sparse":
            return Buckets.of(tokens, 1, tokens.maximum, **others)
        case _:
            return Buckets.grid({reqs: draw(sizes(reqs)), tokens: draw(sizes(tokens))})


@st.composite
def _interleaved(draw: st.DrawFn, tokens: Dim) -> list[Route]:
    """Two ladders of two modes, whose buckets stand between one another's."""
    ladder = sorted({*draw(sizes(tokens)), tokens.maximum})
    modes = draw(st.permutations([FULL, PIECEWISE]))
    return [
        Route(mode, Buckets.of(tokens, *ladder[start::2]))
        for start, mode in enumerate(modes)
        if ladder[start::2]
    ]


@st.composite
def policies(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Policy:
    """Routes of both modes in any order, over sets of any kind; or two ladders, interleaved."""
    if draw(st.integers(0, 7)) == 7:
        return Policy(draw(_interleaved(tokens)))
    modes = st.sampled_from([FULL, PIECEWISE])
    limits = st.sampled_from([None, None, None, 0, 4, 0.25])
    route = st.builds(Route, modes, bucket_sets(reqs, tokens), max_padding=limits)
    return Policy(draw(st.lists(route, min_size=1, max_size=4)))


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
