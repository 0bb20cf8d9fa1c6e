"""Host time of one dispatch by the number of buckets, for known batches and new ones.

    python -m benchmarks.dispatch [--out results]

Needs no device. Medians over repeats of a loop, the loop's own cost taken off.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import save
from graphkit.dims import Dim, at_most
from graphkit.dispatch.buckets import Buckets
from graphkit.dispatch.dispatcher import FULL, PIECEWISE, Dispatcher, Policy, Route

BUDGET_NS = 1000
"""A dispatch of a known batch, whatever the number of buckets."""
COUNTS = (10, 100, 1000)


def dispatcher_of(count: int) -> Dispatcher:
    """A target model's runner of this many buckets: half uniform decode, half variable length."""
    reqs = Dim("reqs", 4 * count)
    tokens = Dim("tokens", 16 * count)
    pages = Dim("pages", 512)
    half = count // 2
    policy = Policy(
        [
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=4, sizes=range(1, half + 1))),
            Route(PIECEWISE, Buckets.of(tokens, range(8, 8 * half + 1, 8), reqs=at_most(tokens))),
        ]
    )
    return Dispatcher(policy, [reqs, tokens, pages])


def median_ns(call: Callable[[Any], Any], *, number: int = 20_000, repeats: int = 15) -> float:
    """Median nanoseconds of ``call(iterator)``, which runs its body once for each item."""

    def seconds(body: Callable[[Any], Any]) -> float:
        iterator = itertools.repeat(None, number)
        start = time.perf_counter()
        body(iterator)
        return time.perf_counter() - start

    def nothing(iterator: Any) -> None:
        for _ in iterator:
            pass

    timed = statistics.median(seconds(call) for _ in range(repeats))
    empty = statistics.median(seconds(nothing) for _ in range(repeats))
    return (timed - empty) / number * 1e9


def known_ns(dispatcher: Dispatcher) -> float:
    """A batch that was seen before."""
    dispatch = dispatcher.dispatch

    def call(iterator: Any) -> None:
        for _ in iterator:
            dispatch(reqs=3, tokens=12, query_len=4)

    return median_ns(call)


def numpy_ns(dispatcher: Dispatcher) -> float:
    """The same with NumPy integers."""
    dispatch, three, twelve = dispatcher.dispatch, np.int64(3), np.int64(12)

    def call(iterator: Any) -> None:
        for _ in iterator:
            dispatch(reqs=three, tokens=twelve, query_len=4)

    return median_ns(call, number=4_000)


def new_ns(dispatcher: Dispatcher) -> float:
    """A batch of sizes never seen before, between bucket sizes that were."""

    def batches() -> Iterator[tuple[int, int]]:
        tokens = dispatcher.dims["tokens"].maximum
        for reqs in range(dispatcher.dims["reqs"].maximum):
            for rows in range(reqs, tokens):
                yield reqs, rows

    dispatch = dispatcher.dispatch
    given = list(itertools.islice(batches(), 300))
    times = []
    for reqs, rows in given:
        start = time.perf_counter_ns()
        dispatch(reqs=reqs, tokens=rows)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times)


def run() -> dict[str, Any]:
    """Medians in nanoseconds, by number of buckets, and whether the budget is kept."""
    rows = []
    for count in COUNTS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            start = time.perf_counter()
            dispatcher = dispatcher_of(count)
            made = time.perf_counter() - start
        rows.append(
            {
                "buckets": len(dispatcher.graphs),
                "known_ns": known_ns(dispatcher),
                "numpy_ns": numpy_ns(dispatcher),
                "new_ns": new_ns(dispatcher),
                "make_ms": made * 1e3,
            }
        )
    return {
        "name": "dispatch",
        "budget_ns": BUDGET_NS,
        "rows": rows,
        "kept": all(row["known_ns"] <= BUDGET_NS for row in rows),
    }


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = ["buckets   known ns   NumPy ns   new ns   made in ms"]
    lines += [
        f"{row['buckets']:7d} {row['known_ns']:10.0f} {row['numpy_ns']:10.0f}"
        f" {row['new_ns']:8.0f} {row['make_ms']:12.1f}"
        for row in result["rows"]
    ]
    verdict = "kept" if result["kept"] else "missed"
    lines.append(f"budget: {result['budget_ns']} ns for a known batch: {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="taken for the others' sake")
    parser.add_argument("--out", type=Path, help="directory to write the result to")
    options = parser.parse_args()
    result = run()
    print(table(result))
    if options.out is not None:
        save("dispatch", {"dispatch": result}, options.out)


if __name__ == "__main__":
    main()
