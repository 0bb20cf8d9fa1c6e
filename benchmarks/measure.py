"""Measuring: host time with the device drained, wall time, GPU time, and where results are kept."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_us(
    step: Callable[[int], object],
    *,
    number: int = 400,
    warmup: int = 40,
    before: Callable[[int], object] | None = None,
) -> tuple[float, float]:
    """Median microseconds of a step on the host, and from its beginning until the device is idle.

    The device is drained between steps, as a decode loop that reads its tokens sees it. What `before` does for
    a step isn't timed.
    """
    host, wall = [], []
    for index in range(warmup + number):
        if before is not None:
            before(index)
        synchronize()
        begin = time.perf_counter_ns()
        step(index)
        returned = time.perf_counter_ns()
        synchronize()
        done = time.perf_counter_ns()
        if index >= warmup:
            host.append((returned - begin) / 1e3)
            wall.append((done - begin) / 1e3)
    return statistics.median(host), statistics.median(wall)


def interleaved_us(
    steps: Mapping[str, Callable[[int], object]],
    *,
    number: int = 400,
    rounds: int = 15,
    before: Callable[[int], object] | None = None,
) -> dict[str, dict[str, float]]:
    """`step_us` of several ways, taken in turns so that a drift of the machine meets them all.

    Returns:
        By name: the medians over all rounds of host and wall microseconds.
    """
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            each = max(number // rounds, 3)
            seen[name].append(step_us(step, number=each, warmup=10, before=before))
    return {
        name: {
            "host_us": statistics.median(host for host, _ in pairs),
            "wall_us": statistics.median(wall for _, wall in pairs),
        }
        for name, pairs in seen.items()
    }


def back_to_back_us(call: Callable[[], object], number: int) -> float:
    """Microseconds of one of many calls without a wait between; the median of five rounds."""
    call()
    times = []
    for _ in range(5):
        synchronize()
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(number):
                call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / number)
        else:
            began = time.perf_counter()
            for _ in range(number):
                call()
            times.append((time.perf_counter() - began) * 1e6 / number)
    return statistics.median(times)


def environment() -> dict[str, Any]:
    """What a figure can't be read without."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["driver"] = _output(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
    return found


def _commit() -> str:
    recorded = Path(".commit")
    if recorded.is_file():
        return recorded.read_text().strip()
    return _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown"


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def save(name: str, result: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write one result, with the environment, as ``<directory>/<name>.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **result}, indent=2) + "\n")
    return path


def show(title: str, heading: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    texts = [[_text(cell) for cell in row] for row in (heading, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heading))]
    print(f"\n{title}")
    for row in texts:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
