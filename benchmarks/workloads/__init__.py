"""Whole models, by every way to run them: what a step costs, and what memory and time they take to make.

    python -m benchmarks.workloads [--quick] [--skip-compile] [--out benchmarks/results]

A decode of Llama-3.2-1B's shape over a paged cache at four batches, a diffusion loop of a fixed shape, and a small
control policy at batch 1. The six-input toy, where staging is all there is, is `benchmarks.staging`. Each step's
inputs are made anew by NumPy before the clock starts; the device is drained after each step, or after each loop of
the diffusion. The floor is one pinned copy of the same bytes and a replay of the bare graph.

On the CPU the models are toys, PyTorch's own ways need a GPU, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import save, show
from benchmarks.workloads import diffusion, llama, policy
from benchmarks.workloads.case import Case, in_short
from benchmarks.workloads.ways import FLOOR
from benchmarks.workloads.workload import Workload

COMPILE_WITHIN = 75.0
"""Seconds from the start after which no further torch.compile begins; the rest is measured all the same."""


def workloads(device: str, *, small: bool) -> list[Workload]:
    """All of them; the one that compiles longest is the last."""
    made = [
        *policy.workloads(device, small=small),
        *diffusion.workloads(device, small=small),
        *llama.workloads(device, small=small),
    ]
    return sorted(made, key=lambda each: each.is_compiled and each.reqs is not None)


def run(
    device: str = "cuda",
    quick: bool = False,
    *,
    skip_compile: bool = False,
    compile_within: float = COMPILE_WITHIN,
    told: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """All figures; on the CPU they mean nothing, and show only that it runs.

    Args:
        device: "cuda" or "cpu".
        quick: toy models, and few steps.
        skip_compile: leave torch.compile out.
        compile_within: see `COMPILE_WITHIN`.
        told: is given a line for each workload.
    """
    small = quick or device == "cpu"
    began = time.perf_counter()

    def may_compile() -> str:
        if skip_compile:
            return "left out of this run"
        late = time.perf_counter() - began > compile_within
        return f"not begun: {compile_within:g} s of the run were over" if late else ""

    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    with torch.no_grad():
        for workload in workloads(device, small=small):
            try:
                rows.append(measured(workload, may_compile))
            except Exception as error:
                # The other workloads' figures are worth having.
                traceback.print_exc()
                failed[workload.name] = in_short(error)
            told(f"{workload.name}: {time.perf_counter() - began:.1f} s")
    # As people look for them: by model, and by batch.
    rows.sort(key=lambda row: (row["model"], row["batch"] or 0))
    seconds = time.perf_counter() - began
    return {"small": small, "workloads": rows, "failed": failed, "seconds": seconds}


def measured(workload: Workload, may_compile: Callable[[], str]) -> dict[str, Any]:
    """One workload's row, with everything given back."""
    case = Case(workload, may_compile)
    try:
        return case.result()
    finally:
        case.close()


def table(result: dict[str, Any]) -> None:
    """The result for people."""
    if result["small"]:
        print("toy models: these figures mean nothing, and show only that everything runs")
    for row in result["workloads"]:
        floor = row["ways"][FLOOR]
        lines = []
        for name, way in row["ways"].items():
            memory = way.get("bytes") or {}
            lines.append(
                [
                    name,
                    way["host_us"],
                    way["host_us"] / floor["host_us"],
                    way["wall_us"],
                    way["wall_us"] / floor["wall_us"],
                    "-" if way["gpu_share"] is None else way["gpu_share"],
                    "-" if way.get("seconds") is None else way["seconds"],
                    *(
                        f"{memory.get(kind, 0) / 2**20:.1f}"
                        for kind in ("pool", "static", "driver")
                    ),
                    "-" if way["same"] is None else way["same"],
                    way.get("note", ""),
                ]
            )
        show(
            f"{row['name']}: GPU {row['gpu_us']:.1f} µs, inputs made in {row['inputs_us']:.1f} µs",
            [
                "a step", "host µs", "/ floor", "wall µs", "/ floor", "GPU busy", "made in s",
                "pool MiB", "static", "driver", "as eager", "",
            ],
            lines,
        )  # fmt: skip
        for name, reason in row["failures"].items():
            print(f"  {name}: {reason}")


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--quick", action="store_true", help="toy models, few steps")
    parser.add_argument("--skip-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--compile-within",
        type=float,
        default=COMPILE_WITHIN,
        metavar="SECONDS",
        help="begin no torch.compile later than this",
    )
    parser.add_argument("--out", type=Path, help="a folder for the result as JSON")
    options = parser.parse_args()
    result = run(
        options.device,
        options.quick,
        skip_compile=options.skip_compile,
        compile_within=options.compile_within,
        told=lambda line: print(line, flush=True),
    )
    table(result)
    if options.out is not None:
        print(f"\nwritten to {save('workloads', result, options.out)}")
    for name, reason in result["failed"].items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return len(result["failed"])
