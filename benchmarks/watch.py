"""What it costs to look whether watched memory has moved: once for each bucket, and at each replay in checked mode.

    python -m benchmarks.watch [--out results]

Needs no device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import save, show
from graphkit.capture.watch import check_fingerprints, fingerprints

COUNTS = (10, 300, 1000)
"""Parameters; a model of 32 layers has about 300."""


def look_us(count: int, *, number: int = 200) -> float:
    """Median microseconds of one look at a module of so many parameters."""
    parameters = [torch.nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(count)]
    reads = (torch.nn.ParameterList(parameters),)
    known = fingerprints(reads)
    times = []
    for _ in range(number):
        begin = time.perf_counter_ns()
        check_fingerprints(reads, known, "here")
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1e3


def run() -> dict[str, Any]:
    """Microseconds by number of parameters."""
    return {"rows": [{"parameters": count, "look_us": look_us(count)} for count in COUNTS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="taken for the others' sake")
    parser.add_argument("--out", type=Path, help="directory to write the result to")
    options = parser.parse_args()
    result = run()
    rows = [(row["parameters"], row["look_us"]) for row in result["rows"]]
    show("a look at watched memory", ("parameters", "µs"), rows)
    if options.out is not None:
        save("watch", {"watch": result}, options.out)


if __name__ == "__main__":
    main()
