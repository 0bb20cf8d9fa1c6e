"""A soak: many replays over random buckets. Memory stays flat, and the results right.

    python -m benchmarks.soak [--device cuda] [--replays 1000000] [--out benchmarks/results]

Two runners of one group share a buffer: `fill` is fed by the host, and `use` reads on the device what it left. Every
1,000th replay is compared with the same computation in NumPy, row by row, padding included. Memory is read all along:
torch's, the driver's, and the process's own. The process's is allowed a little, since Python's allocator takes and
gives in large pieces.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graphkit as gk
from benchmarks.measure import save, show

ROWS = gk.Dim("rows", 100)
TOP = 64
"""The largest bucket; what is larger runs EAGER."""
CHECK_EVERY = 1_000
FED_EVERY = 16
"""One step of so many is fed by the host; the others replay on what the device holds."""
HOST_SLACK = 16 << 20
"""Bytes by which the process may grow between a tenth of the way and the end."""


class Soak:
    """The group, and what its buffers should hold."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.group = gk.GraphGroup(device, checked=False)
        self.buffers = self.group.buffers.declare(
            x=gk.BufferSpec((ROWS, 2), torch.int64, pad=5),
            hidden=gk.BufferSpec((ROWS, 2), torch.int64, pad=-1),
        )
        policy = gk.Policy.full(gk.Buckets.powers(ROWS, upto=TOP))
        self.fill = self.group.runner(
            "fill", lambda x: x * 2 + 1, policy=policy, outputs=self.buffers.hidden
        )
        self.use = self.group.runner(
            "use",
            lambda hidden, rows: hidden * 3 + rows,
            policy=policy,
            inputs={"hidden": gk.Resident("hidden"), "rows": gk.Count(ROWS)},
            outputs=gk.Output((ROWS, 2), torch.int64),
        )
        self.group.capture(progress=False)
        self._random = np.random.default_rng(seed)
        self._hidden = np.zeros((ROWS.maximum, 2), np.int64)
        # One step in a hundred is above every bucket, and eager.
        sizes = self._random.integers(0, TOP + 1, 4096)
        sizes[::100] = ROWS.maximum
        self.sizes: list[int] = sizes.tolist()
        self._fills = [self.fill.dispatch(rows=size) for size in self.sizes]
        self._uses = [self.use.dispatch(rows=size) for size in self.sizes]
        self._inputs = [self._random.integers(-99, 99, (size, 2)) for size in self.sizes]
        self.checks = 0
        self.wrong: list[int] = []
        self._filled(0)

    def _padded(self, size: int) -> int:
        return size if size > TOP else next(b for b in (1, 2, 4, 8, 16, 32, 64) if b >= size)

    def _filled(self, index: int) -> None:
        size, x = self.sizes[index], self._inputs[index]
        self.fill.run(self._fills[index], x=x)
        self._hidden[:size] = x * 2 + 1
        # The function runs on the padded rows too, and its output's buffer takes them all.
        self._hidden[size : self._padded(size)] = 5 * 2 + 1

    def step(self, number: int) -> None:
        """One replay; of `fill` now and then, else of `use`."""
        index = number % 4096
        if number % FED_EVERY == 0:
            self._filled(index)
            return
        size = self.sizes[index]
        out = self.use.run(self._uses[index])
        self._hidden[size : self._padded(size)] = -1
        if number % CHECK_EVERY == 1:
            self.checks += 1
            if not np.array_equal(out.cpu().numpy(), self._hidden[:size] * 3 + size):
                self.wrong.append(number)


def memory(device: str) -> dict[str, int]:
    """Bytes: the process's own, what torch's allocator holds, and what the driver has given away."""
    fields = Path("/proc/self/statm").read_text().split() if sys.platform == "linux" else ["0", "0"]
    found = {"host": int(fields[1]) * 4096, "reserved": 0, "allocated": 0, "device": 0}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found["reserved"] = torch.cuda.memory_reserved()
        found["allocated"] = torch.cuda.memory_allocated()
        found["device"] = total - free
    return found


def run(device: str, replays: int, *, seed: int = 0, is_alone: bool = True) -> dict[str, Any]:
    """The soak's outcome.

    Args:
        device: "cuda", or "cpu" for the recording backend.
        replays: how many steps.
        seed: of sizes and inputs.
        is_alone: whether no other process takes memory of the device meanwhile.
    """
    soak = Soak(device, seed)
    samples: list[dict[str, int]] = []
    sample_every = max(replays // 50, 1)
    began = time.perf_counter()
    for number in range(replays):
        soak.step(number)
        if number % sample_every == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            gc.collect(0)
            samples.append(memory(device))
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    # The first tenth is for what is made once.
    settled, end = samples[len(samples) // 10], samples[-1]
    growth = {kind: end[kind] - settled[kind] for kind in end}
    report = soak.group.report()
    counted = sum(row.replays for runner in report.runners for row in runner.graphs)
    eager = sum(runner.eager_runs for runner in report.runners)
    soak.group.close()
    kinds = ("reserved", "allocated", "device") if is_alone else ("reserved", "allocated")
    is_flat = growth["host"] <= HOST_SLACK and not any(growth[kind] > 0 for kind in kinds)
    return {
        "replays": replays,
        "graph_replays": counted,
        "eager_runs": eager,
        "seconds": seconds,
        "us_per_replay": seconds / replays * 1e6,
        "checks": soak.checks,
        "wrong": soak.wrong[:10],
        "memory_settled": settled,
        "memory_end": end,
        "memory_growth": growth,
        "is_flat": is_flat,
        "is_right": not soak.wrong,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line; 1 if a result was wrong, or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replays", type=int)
    parser.add_argument("--quick", action="store_true", help="20,000 replays")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    replays = options.replays or (20_000 if options.quick else 1_000_000)
    result = run(options.device, replays, seed=options.seed)
    shown = {k: str(v) if isinstance(v, (dict, list)) else v for k, v in result.items()}
    show(f"soak on {options.device}", ("figure", "value"), list(shown.items()))
    if options.out is not None:
        save("soak", {"soak": result}, options.out)
    return 0 if result["is_flat"] and result["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
