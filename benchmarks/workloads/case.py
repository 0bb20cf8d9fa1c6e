"""Measuring one workload: every way that can be had here, in turns."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from benchmarks.measure import back_to_back_us, interleaved_us, step_us, synchronize
from benchmarks.workloads.footprint import footprint
from benchmarks.workloads.ways import (
    COMPILED,
    COMPILED_STATIC,
    EAGER,
    FLOOR,
    GRAPHKIT,
    SAME_KERNELS,
    WAYS,
    BareGraph,
    Compiled,
    Graphkit,
    Way,
)
from benchmarks.workloads.workload import Arrays, Workload

PEERS = (COMPILED, COMPILED_STATIC)


@attrs.define
class Made:
    """A way that could be made, and what that took."""

    way: Way
    seconds: float
    memory: dict[str, int]
    note: str = ""


class Case:
    """One workload with its ways.

    Args:
        workload: what to run.
        may_compile: asked before each torch.compile; gives a reason against it, or nothing.

    Attributes:
        failures: way -> why there is none.
    """

    def __init__(self, workload: Workload, may_compile: Callable[[], str]) -> None:
        self.workload = workload
        self.made: dict[str, Made] = {}
        self.failures: dict[str, str] = {}
        for name, kind in WAYS.items():
            if name in PEERS and not workload.is_compiled:
                continue
            reason = may_compile() if name in PEERS else ""
            if kind.needs_cuda and workload.device == "cpu":
                reason = "needs a CUDA device"
            if reason:
                self.failures[name] = reason
                continue
            try:
                if name not in PEERS:
                    # Once for what is loaded on first use, which is nobody's in particular.
                    self._begun(kind).close()
                self.made[name] = self._make(kind)
            except Exception as error:
                if kind.is_ours:
                    raise
                # A peer that fails is a result too.
                self.failures[name] = in_short(error)

    def _begun(self, kind: type[Way]) -> Way:
        way = kind(self.workload)
        for index in range(kind.calls):
            way.step(self.workload.inputs(index))
        synchronize()
        return way

    def _make(self, kind: type[Way]) -> Made:
        self._collect()
        is_compiler = issubclass(kind, Compiled)
        device = self.workload.device
        before, skipped = footprint(device), cudagraph_skips() if is_compiler else 0
        began = time.perf_counter()
        way = self._begun(kind)
        seconds = time.perf_counter() - began
        went_without = is_compiler and cudagraph_skips() > skipped
        note = "cudagraphs were skipped" if went_without else ""
        return Made(way, seconds, attrs.asdict(footprint(device) - before), note)

    def result(self) -> dict[str, Any]:
        """Times, memory, and whether the ways agree."""
        workload, steps = self.workload, self.workload.steps
        current: list[Arrays] = []

        def build(index: int) -> None:
            current[:] = [workload.inputs(index * steps + step) for step in range(steps)]

        def timed(step: Callable[[Arrays], object]) -> Callable[[int], None]:
            def call(index: int) -> None:
                for inputs in current:
                    step(inputs)

            return call

        same = self._same()
        calls = {name: timed(made.way.step) for name, made in self.made.items()}
        if FLOOR not in calls:
            calls[FLOOR] = timed(self._launch)
        number = workload.number
        seen = interleaved_us(calls, number=number, rounds=workload.rounds, before=build)
        gpu = back_to_back_us(self._replay, max(number // 5, 4))
        ways: dict[str, Any] = {}
        for name, times in seen.items():
            each: dict[str, Any] = {unit: us / steps for unit, us in times.items()}
            share = gpu / each["wall_us"] if name in SAME_KERNELS else None
            ways[name] = {**each, "gpu_share": share, "same": same.get(name)}
            made = self.made.get(name)
            if made is not None:
                captured = made.way.is_captured
                ways[name] |= {
                    "seconds": made.seconds if captured else None,
                    "bytes": made.memory if captured else None,
                    "note": made.note,
                }
        return {
            "name": workload.name,
            "model": workload.name.split(",")[0],
            "batch": workload.batch,
            "inputs_us": step_us(build, number=min(number, 50), warmup=4)[0] / steps,
            "gpu_us": gpu,
            "ways": ways,
            "failures": dict(self.failures),
        }

    def _launch(self, inputs: Arrays) -> None:
        # Without CUDA there is no bare graph; a recording's replay shows that the loop runs.
        ours = self.made[GRAPHKIT].way
        if isinstance(ours, Graphkit):
            ours.runner.entries[-1].launch()

    def _replay(self) -> None:
        floor = self.made.get(FLOOR)
        if floor is not None and isinstance(floor.way, BareGraph):
            floor.way.graph.replay()
        else:
            self._launch({})

    def _same(self) -> dict[str, float]:
        """Way -> the share of the results that are eager's, over a few steps from the same state."""
        wanted = self._run(self.made[EAGER].way)
        shares = {}
        for name in [name for name in self.made if name != FLOOR]:
            try:
                shares[name] = agreement(self._run(self.made[name].way), wanted)
            except Exception as error:
                if self.made[name].way.is_ours:
                    raise
                self.failures[name] = in_short(error)
                del self.made[name]
        return shares

    def _run(self, way: Way) -> list[Tensor]:
        self.workload.reset()
        found = []
        for index in range(3):
            result = way.step(self.workload.inputs(index))
            synchronize()
            found.append(result.detach().cpu().clone())
        return found

    def close(self) -> None:
        """Give everything back."""
        for made in self.made.values():
            made.way.close()
        self.made.clear()
        # It would import Inductor where nothing was compiled.
        if "torch._inductor.cudagraph_trees" in sys.modules:
            torch._dynamo.reset()
        self._collect()

    def _collect(self) -> None:
        # Only device memory is looked at.
        if self.workload.device != "cpu":
            gc.collect()


def in_short(error: Exception) -> str:
    """The first line of a failure."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


def agreement(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The share of equal elements; floats are equal within a few roundings of bfloat16."""
    shares = []
    for one, other in zip(got, wanted, strict=True):
        if one.dtype.is_floating_point:
            same = torch.isclose(one.float(), other.float(), rtol=0.05, atol=0.05)
        else:
            same = one == other
        shares.append(same.float().mean().item())
    return sum(shares) / len(shares)


def cudagraph_skips() -> int:
    """How often torch.compile has gone without a graph."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])
