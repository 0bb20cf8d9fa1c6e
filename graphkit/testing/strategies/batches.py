"""Strategies for batches: what one call of `dispatch` is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs
from hypothesis import strategies as st

from graphkit.dims import Affine, AtMost, Dim, affine
from graphkit.dispatch.dispatcher import Dispatcher, RoundUp
from graphkit.testing.strategies.sizes import sizes_near


class HasDispatcher(Protocol):
    """A `GraphRunner`, or whatever else keeps a dispatcher."""

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher."""


@attrs.frozen(repr=False)
class Batch:
    """What one call of dispatch is given: ``runner.dispatch(**batch.named)``.

    Attributes:
        sizes: the real size by name of dim.
        query_len: tokens of every request, where that is stated.
        max_query_len: a bound on the tokens of each, where that is stated.
        variant: the values of the policy's variants.
    """

    sizes: Mapping[str, int]
    query_len: int | None = None
    max_query_len: int | None = None
    variant: Mapping[str, Any] | None = None

    @property
    def named(self) -> dict[str, Any]:
        """The keyword arguments of `dispatch`."""
        stated = {
            "query_len": self.query_len,
            "max_query_len": self.max_query_len,
            "variant": self.variant,
        }
        return {**self.sizes, **{name: v for name, v in stated.items() if v is not None}}

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={value!r}' for name, value in self.named.items())})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis would show every attribute, and in lines of their own.
        printer.text(repr(self))


@st.composite
def batches(draw: st.DrawFn, reqs: Dim, tokens: Dim) -> Batch:
    """A batch that these dims hold, of any kind that a call may state."""
    query_len = draw(st.none() | st.integers(1, min(6, tokens.maximum)))
    if query_len is not None:
        count = draw(sizes_near((), 0, min(reqs.maximum, tokens.maximum // query_len)))
        longest = draw(st.none() | st.integers(query_len, query_len + 2))
        return Batch({reqs.name: count, tokens.name: count * query_len}, query_len, longest)
    count = draw(sizes_near((), 0, reqs.maximum))
    longest = draw(st.none() | st.integers(1, 8))
    rows = tokens.maximum if longest is None else min(tokens.maximum, count * longest)
    return Batch(
        {reqs.name: count, tokens.name: draw(sizes_near((), 0, rows))}, max_query_len=longest
    )


def batches_of(
    source: HasDispatcher | Dispatcher, *, where: Callable[[Batch], bool] | None = None
) -> st.SearchStrategy[Batch]:
    """Batches that a runner takes, whether a bucket holds them or they run EAGER.

    Half of the sizes are boundaries: 0, 1, a bucket's size, one below, one above, the maximum. A batch is of every
    kind that a route is for, and of kinds that none is for. Where requests and tokens are tied (by a uniform or
    varlen set, or by `at_most`), no batch has more requests than tokens, or tokens and no request.

    Args:
        source: a runner or a dispatcher; nothing needs to be captured.
        where: keeps the batches for which it is true.
    """
    dispatcher = source if isinstance(source, Dispatcher) else source.dispatcher
    made = _batches_of(dispatcher)
    return made if where is None else made.filter(where)


@st.composite
def batches_above(draw: st.DrawFn, source: HasDispatcher | Dispatcher) -> Batch:
    """Batches that `dispatch` refuses by an `InputError`: one size is above the maximum of its dim.

    Args:
        draw: hypothesis's.
        source: a runner or a dispatcher with at least one dim.
    """
    dispatcher = source if isinstance(source, Dispatcher) else source.dispatcher
    batch = draw(_batches_of(dispatcher))
    dim = draw(st.sampled_from(list(dispatcher.dims.values())))
    size = dim.maximum + draw(sizes_near((1,), 1, 2 * dim.maximum))
    # What it states of queries no longer holds, and would be another mistake.
    return Batch({**batch.sizes, dim.name: size}, variant=batch.variant)


def ties_of(dispatcher: Dispatcher) -> dict[str, Dim | Affine]:
    """Which dims another bounds: name -> what it is at most, by the policy's sets. Requests -> tokens, mostly."""
    found: dict[str, Dim | Affine] = {}
    for route in dispatcher.policy.routes:
        if route.buckets.tied is not None:
            reqs, tokens = route.buckets.tied
            found.setdefault(reqs, dispatcher.dims[tokens])
        for name, size in route.buckets.others:
            if isinstance(size, AtMost):
                found.setdefault(name, size.dim)
    return found


@st.composite
def _batches_of(draw: st.DrawFn, dispatcher: Dispatcher) -> Batch:
    tied = [route.buckets.tied for route in dispatcher.policy.routes if route.buckets.tied]
    # One route's requests may be another's tokens; then no query length holds for both.
    query_len, longest = draw(_kinds(dispatcher)) if len(set(tied)) == 1 else (None, None)
    sizes = draw(_sizes(dispatcher, tied[0] if tied else None, query_len, longest))
    return Batch(sizes, query_len, longest, draw(_variants(dispatcher)))


def _kinds(dispatcher: Dispatcher) -> st.SearchStrategy[tuple[int | None, int | None]]:
    """What a call states of its queries: their length, or a bound on it."""
    kinds: dict[tuple[int | None, int | None], None] = {(None, None): None}
    for route in dispatcher.policy.routes:
        if route.buckets.query_len is not None:
            kinds[route.buckets.query_len, None] = None
        elif route.buckets.max_query_len is not None:
            kinds[None, route.buckets.max_query_len] = None
    room = max(dispatcher.dims[tokens].maximum for _, tokens in _tied(dispatcher))
    for query_len, longest in list(kinds):
        # What is one too long for the route, or too short for a uniform one.
        if query_len is not None:
            others = [other for other in (query_len + 1, query_len - 1) if 1 <= other <= room]
            kinds.update(dict.fromkeys((other, None) for other in others))
        elif longest is not None:
            kinds.update(dict.fromkeys([(None, longest + 1), (None, 1), (1, None)]))
    return st.sampled_from(list(kinds))


def _tied(dispatcher: Dispatcher) -> list[tuple[str, str]]:
    return [route.buckets.tied for route in dispatcher.policy.routes if route.buckets.tied]


@st.composite
def _sizes(
    draw: st.DrawFn,
    dispatcher: Dispatcher,
    tied: tuple[str, str] | None,
    query_len: int | None,
    longest: int | None,
) -> dict[str, int]:
    ties = ties_of(dispatcher)
    sizes: dict[str, int] = {}
    # Requests first: what they leave room for is the tokens' range.
    order = sorted(dispatcher.dims.values(), key=lambda dim: dim.name not in ties)
    for dim in order:
        least, most = 0, dim.maximum
        bound = ties.get(dim.name)
        if bound is not None:
            room = sizes if affine(bound).dim.name in sizes else None
            most = min(most, bound.maximum if room is None else bound.size(room))
        for name, other in ties.items():
            form = affine(other)
            if form.dim == dim and name in sizes and sizes[name]:
                least = max(least, 1, -(-(sizes[name] - form.offset) // form.factor))
            elif form.dim == dim and name in sizes:
                most = 0
        if tied is not None and dim.name == tied[0] and query_len is not None:
            most = min(most, dispatcher.dims[tied[1]].maximum // query_len)
        if tied is not None and dim.name == tied[1] and tied[0] in sizes:
            if query_len is not None:
                sizes[dim.name] = sizes[tied[0]] * query_len
                continue
            if longest is not None:
                most = min(most, sizes[tied[0]] * longest)
        marks = {bucket.sizes[dim.name] for _, bucket in dispatcher.graphs}
        sizes[dim.name] = draw(sizes_near(marks, min(least, most), most))
    return {name: sizes[name] for name in dispatcher.dims}


@st.composite
def _variants(draw: st.DrawFn, dispatcher: Dispatcher) -> dict[str, Any] | None:
    # By type too: True is not 1.
    axes: dict[str, dict[tuple[type, Any], Any]] = {}
    for route in dispatcher.policy.routes:
        for name, axis in route.variants.axes.items() if route.variants is not None else ():
            # Numbers are rounded up, so that those between are asked for too.
            values = range(axis.values[-1] + 1) if isinstance(axis, RoundUp) else axis
            axes.setdefault(name, {}).update({(type(value), value): value for value in values})
    if not axes:
        return None
    return {name: draw(st.sampled_from(list(values.values()))) for name, values in axes.items()}
