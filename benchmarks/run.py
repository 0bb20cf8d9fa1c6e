"""All benchmarks, one after another: `make bench`.

    python -m benchmarks.run [--quick] [--out benchmarks/results]

On a machine without a GPU what can run there runs, and shows that it runs; its figures mean nothing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import torch

MODULES = ("dispatch", "staging", "capture", "piecewise", "eagle", "workloads", "soak", "watch")


def main() -> int:
    """Run each in a process of its own, so that none measures what another left behind."""
    options = sys.argv[1:]
    if not torch.cuda.is_available() and "--quick" not in options:
        print(
            "no CUDA device: the figures below are the CPU's, where graphs are recordings, for correctness "
            "and not speed"
        )
    failed = []
    for module in MODULES:
        if importlib.util.find_spec(f"benchmarks.{module}") is None:
            continue
        print(f"\n== {module}", flush=True)
        if subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *options], check=False
        ).returncode:
            failed.append(module)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
