"""Ranking: the graphs of a policy, best first, and which of them a batch fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from graphkit.dims import Dim
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.decision import Reason
from graphkit.dispatch.policy import Mode, Policy, Route
from graphkit.dispatch.variants import RoundUp
from graphkit.errors import SpecError


@attrs.frozen(eq=False)
class Candidate:
    """A graph as the dispatcher sees it."""

    mode: Mode
    bucket: Bucket
    route: Route
    first: str | None
    order: tuple[Any, ...]
    rank: int

    def accepts_kind(self, query_len: int | None, longest: int | None) -> bool:
        """Whether it is for batches of this stated query length, or this longest query."""
        bucket = self.bucket
        if bucket.query_len is not None:
            return query_len == bucket.query_len
        if bucket.max_query_len is not None:
            return longest is not None and longest <= bucket.max_query_len
        return True

    def accepts_variant(self, variant: Mapping[str, Any]) -> bool:
        """Whether it may stand for these values of the variants."""
        variants = self.route.variants
        return variants is None or variants.accepts(self.bucket.variant, variant)

    def accepts_padding(self, sizes: Mapping[str, int]) -> bool:
        """Whether a batch that fits isn't padded too much."""
        first = self.first
        return first is None or self.route.accepts_padding(self.bucket.sizes[first], sizes[first])

    def refusal(
        self,
        sizes: Mapping[str, int],
        query_len: int | None,
        longest: int | None,
        variant: Mapping[str, Any],
    ) -> Reason | None:
        """Why this graph can't serve the batch, padding aside; None if it can."""
        if not self.accepts_kind(query_len, longest):
            uniform = self.bucket.query_len is not None
            return Reason.NOT_UNIFORM if uniform else Reason.QUERY_TOO_LONG
        if not self.accepts_variant(variant):
            return Reason.UNKNOWN_VARIANT
        if not self.bucket.fits(sizes):
            return Reason.ABOVE_MAX
        return None

    def dominates(self, other: Candidate) -> bool:
        """Whether this graph takes every batch that the other one takes."""
        mine, theirs = self.bucket, other.bucket
        if mine.query_len is not None:
            if mine.query_len != theirs.query_len:
                return False
        elif mine.max_query_len is not None and (
            theirs.max_query_len is None or theirs.max_query_len > mine.max_query_len
        ):
            return False
        if self.route.max_padding is not None and not (
            self.route.max_padding == other.route.max_padding
            and self.first == other.first
            and mine.sizes == theirs.sizes
        ):
            return False
        return self.accepts_variant(theirs.variant) and mine.fits(theirs.sizes)


@attrs.frozen(eq=False)
class Fitting:
    """The graphs that hold a batch of some sizes and kind, best first, and why others don't."""

    declared: tuple[Candidate, ...]
    captured: tuple[Candidate, ...]
    refused: frozenset[tuple[int, Reason]]
    """Rank of the mode, reason."""


def ranked(
    policy: Policy, dims: Mapping[str, Dim], resolved: list[tuple[Route, tuple[Bucket, ...]]]
) -> list[Candidate]:
    """All graphs, best first: the first that accepts a batch is the one to use."""
    everything = [bucket for _, buckets in resolved for bucket in buckets]
    varying = [name for name in dims if len({bucket.sizes[name] for bucket in everything}) > 1]
    first_dim = next(iter(dims), None)
    found = []
    for place, (route, buckets) in enumerate(resolved):
        first = route.buckets.dims[0].name if route.buckets.dims else None
        axes = route.variants.axes if route.variants else {}
        for bucket in buckets:
            if policy.cost is None:
                cost: float = math.prod(bucket.sizes[name] for name in varying)
            else:
                cost = _checked_cost(policy.cost(bucket), bucket)
            rows = bucket.sizes[first_dim] if first_dim is not None else 0
            ups = tuple(
                bucket.variant[name] for name, axis in axes.items() if isinstance(axis, RoundUp)
            )
            order = (route.mode.rank, cost, rows, ups, place)
            found.append(Candidate(route.mode, bucket, route, first, order, route.mode.rank))
    return sorted(found, key=lambda candidate: candidate.order)


def _checked_cost(cost: object, bucket: Bucket) -> float:
    if isinstance(cost, (int, float, np.integer, np.floating)) and not math.isnan(cost):
        return float(cost)
    raise SpecError(f"cost= must return a number, got {cost!r} for bucket {bucket}")


def unreachable(
    candidates: list[Candidate],
) -> dict[tuple[Mode, Bucket], Mode]:
    """The graphs that no batch gets while all of these, best first, are captured.

    Returns:
        for each, the mode of one that takes all that it takes.
    """
    front: list[Candidate] = []
    reached: set[tuple[Mode, Bucket]] = set()
    covers: dict[tuple[Mode, Bucket], Mode] = {}
    for candidate in candidates:
        graph = (candidate.mode, candidate.bucket)
        better = next((other for other in front if other.dominates(candidate)), None)
        if better is None:
            reached.add(graph)
            # Only what no other dominates is kept to compare with: a few, of a thousand buckets.
            front = [other for other in front if not candidate.dominates(other)]
            front.append(candidate)
        else:
            covers.setdefault(graph, better.mode)
    return {graph: mode for graph, mode in covers.items() if graph not in reached}
