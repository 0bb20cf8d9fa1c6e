"""Choice: whether dispatch gives each batch the best graph, judged by going through all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import EAGER, Dispatch, Mode, Route
from graphkit.errors import CheckError, DispatchError
from graphkit.runner.runner import GraphRunner
from graphkit.testing.boundaries import boundary_batches
from graphkit.testing.cases import Given


@attrs.frozen
class Graph:
    """A captured graph that takes a batch."""

    mode: Mode
    bucket: Bucket | None
    cost: float

    def is_as_good_as(self, other: Graph) -> bool:
        """Whether the two are of one mode and cost the same."""
        return self.mode is other.mode and math.isclose(self.cost, other.cost)

    def __str__(self) -> str:
        return str(self.mode) if self.bucket is None else f"{self.mode} {self.bucket}"


def best_graph_is_chosen(runner: GraphRunner, given: Given) -> None:
    """Each batch gets the best mode that takes it, in the cheapest captured bucket that holds it.

    Raises:
        CheckError: one doesn't.
    """
    cost = _cost(runner)
    batches = given.get("batches")
    for named in boundary_batches(runner.dispatcher) if batches is None else batches:
        shown = ", ".join(f"{name}={value!r}" for name, value in named.items())
        where = f"runner {runner.name!r}, dispatch({shown})"
        try:
            dispatch = runner.dispatch(**named)
        except DispatchError:
            # Strict: no captured graph of the best mode takes it.
            continue
        except Exception as error:
            raise CheckError(f"{where} raised {type(error).__name__}: {error}") from error
        bucket = dispatch.bucket
        if bucket is not None and not bucket.fits(dispatch.sizes):
            raise CheckError(f"{where} gave {dispatch}, which doesn't hold it")
        if "eager" in named:
            continue
        chosen = Graph(dispatch.mode, bucket, 0.0 if bucket is None else cost(bucket))
        best = _best(runner, dispatch, named.get("variant") or {}, cost)
        if not chosen.is_as_good_as(best):
            raise CheckError(
                f"{where} gave {dispatch}; the best captured graph that takes it is {best}"
            )


def _cost(runner: GraphRunner) -> Callable[[Bucket], float]:
    own = runner.policy.cost
    if own is not None:
        return own
    buckets = [bucket for _, bucket in runner.dispatcher.graphs]
    dims = runner.dispatcher.dims
    varying = [name for name in dims if len({bucket.sizes[name] for bucket in buckets}) > 1]
    return lambda bucket: math.prod(bucket.sizes[name] for name in varying)


def _best(
    runner: GraphRunner,
    dispatch: Dispatch,
    variant: Mapping[str, Any],
    cost: Callable[[Bucket], float],
) -> Graph:
    dispatcher = runner.dispatcher
    found = [
        Graph(route.mode, bucket, float(cost(bucket)))
        for route in runner.policy.routes
        for bucket in route.resolve(dispatcher.dims)
        if dispatcher.is_captured(route.mode, bucket) and _takes(route, bucket, dispatch, variant)
    ]
    found.sort(key=lambda graph: (graph.mode.rank, graph.cost))
    return found[0] if found else Graph(EAGER, None, 0.0)


def _takes(route: Route, bucket: Bucket, dispatch: Dispatch, variant: Mapping[str, Any]) -> bool:
    sizes = dispatch.sizes
    if any(size > bucket.sizes[name] for name, size in sizes.items()):
        return False
    if bucket.query_len is not None:
        if dispatch.query_len != bucket.query_len:
            return False
    elif bucket.max_query_len is not None:
        longest = dispatch.query_len or dispatch.max_query_len
        if longest is None or longest > bucket.max_query_len:
            return False
    if route.buckets.dims:
        first = route.buckets.dims[0].name
        if not route.accepts_padding(bucket.sizes[first], sizes[first]):
            return False
    return route.variants is None or route.variants.accepts(bucket.variant, variant)
