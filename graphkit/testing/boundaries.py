"""Boundary batches: the sizes at which padding, dispatch and capture go wrong, as a list, without hypothesis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphkit.dims import Affine, AtMost, Dim
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import Dispatcher

Bounds = Mapping[str, Dim | Affine]


def boundary_batches(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Arguments of `dispatch`: for each bucket its own size, one less and one more, in all dims and in each; 1; 0; and
    the maximum. Those are of the bucket's kind, so that it may be chosen. The smallest come first.

    Where requests and tokens are tied, no batch has more requests than tokens, or tokens without a request.
    """
    bounds = _bounds(dispatcher)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, bucket in dispatcher.graphs:
        for sizes in _near(bucket, dispatcher.dims):
            sizes = _legal(sizes, bucket, dispatcher, bounds)
            named: dict[str, Any] = dict(sizes)
            if bucket.query_len is not None:
                named["query_len"] = bucket.query_len
            elif bucket.max_query_len is not None:
                named["max_query_len"] = bucket.max_query_len
            if bucket.variant:
                named["variant"] = dict(bucket.variant)
            key = tuple((k, tuple(v.items()) if k == "variant" else v) for k, v in named.items())
            found.setdefault(key, named)
    names = list(dispatcher.dims)
    return sorted(found.values(), key=lambda named: sum(named[name] for name in names))


def _bounds(dispatcher: Dispatcher) -> Bounds:
    """Requests -> what they are at most, by the policy's sets."""
    bounds: dict[str, Dim | Affine] = {}
    for route in dispatcher.policy.routes:
        if route.buckets.tied is not None:
            reqs, tokens = route.buckets.tied
            bounds.setdefault(reqs, dispatcher.dims[tokens])
        for name, size in route.buckets.others:
            if isinstance(size, AtMost):
                bounds.setdefault(name, size.dim)
    return bounds


def _near(bucket: Bucket, dims: Mapping[str, Dim]) -> Iterator[dict[str, int]]:
    own = dict(bucket.sizes)
    yield own
    for step in (-1, 1):
        yield {name: size + step for name, size in own.items()}
        if len(own) > 1:
            for name in own:
                yield {**own, name: own[name] + step}
    yield dict.fromkeys(own, 1)
    yield dict.fromkeys(own, 0)
    yield {name: dim.maximum for name, dim in dims.items()}


def _legal(
    sizes: Mapping[str, int], bucket: Bucket, dispatcher: Dispatcher, bounds: Bounds
) -> dict[str, int]:
    legal = {name: min(max(size, 0), dispatcher.dims[name].maximum) for name, size in sizes.items()}
    tied = [route.buckets.tied for route in dispatcher.policy.routes if route.buckets.tied]
    for reqs, tokens in tied:
        most = dispatcher.dims[tokens].maximum
        if bucket.query_len is not None:
            legal[reqs] = min(legal[reqs], most // bucket.query_len)
            legal[tokens] = legal[reqs] * bucket.query_len
        elif bucket.max_query_len is not None:
            legal[tokens] = min(legal[tokens], legal[reqs] * bucket.max_query_len)
    for reqs, bound in bounds.items():
        tokens = bound.name if isinstance(bound, Dim) else bound.dim.name
        legal[reqs] = min(legal[reqs], max(bound.size(legal), 0))
        if legal[reqs] == 0:
            legal[tokens] = 0
    return legal
