"""The budgets of the benchmarks: what was promised about speed and memory, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

Result = Mapping[str, Any]
"""A benchmark's JSON."""


SMALL, LARGE = "decode, batch 50 of 64", "batch 256, tables of 512"
FLOOR = "floor: one pinned copy and replay"
SIX_COPIES, FROM_LISTS = "six pinned copies and replay", "lists to pinned tensors to device"
REDUCE_OVERHEAD, GRAPHED = "torch.compile reduce-overhead", "make_graphed_callables"
FLAT = 1.2
"""How much a dispatch may cost more with a hundred times the buckets, and still count as flat."""


@attrs.frozen
class Budget:
    """One promise about speed or memory, and what became of it.

    Attributes:
        what: the ratio in words.
        bound: at most this, or at least.
        value: as measured; None where this run had nothing to compare with.
        unit: "×" for a ratio.
        is_least: whether `bound` is the least that is allowed.
    """

    what: str
    bound: float
    value: float | None
    unit: str = "×"
    is_least: bool = attrs.field(default=False, kw_only=True)

    @property
    def is_met(self) -> bool | None:
        """None where it wasn't measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table."""
        least = "at least" if self.is_least else "at most"
        allowed = f"{least} {self.bound:.4g} {self.unit}"
        if self.value is None:
            return (self.what, allowed, "-", "not measured in this run")
        return (self.what, allowed, f"{_ratio(self.value)} {self.unit}", self.verdict)

    @property
    def verdict(self) -> str:
        """Met or missed, and by which factor it is missed."""
        if self.is_met or self.value is None:
            return "met"
        off = self.bound / self.value if self.is_least else self.value / self.bound
        return f"**missed**, {off:.2f} ×"


def staging_budgets(result: Result) -> list[Budget]:
    """The host path against its floor, and against the peers of the same run."""
    small, large = result["staging"][SMALL], result["staging"][LARGE]
    arrays, floor = default_way(small, "arrays"), small[FLOOR]
    wide = default_way(large, "arrays")
    least = large[FLOOR]["host_us"] + large["memcpy of the payload"]["host_us"]
    same, changes = (small[f"graphkit, resident, {what}"] for what in ("same size", "size changes"))
    return [
        _at_most("six arrays, host time / the floor", 1.5, arrays, floor),
        _at_most("six arrays, wall time / the floor", 1.15, arrays, floor, "wall_us"),
        _at_most(
            "six CPU tensors, host time / the floor", 2, default_way(small, "CPU tensors"), floor
        ),
        _at_most(
            "six lists / lists to pinned tensors to device",
            0.35,
            default_way(small, "lists"),
            small.get(FROM_LISTS),
        ),
        Budget(
            "tables of 512, host time / (the floor + one memcpy)",
            1.5,
            wide["host_us"] / least,
        ),
        _at_most("device inputs, same size / bare replay", 2, same, small.get("bare replay")),
        _at_most("device inputs, new size / the floor", 1, changes, floor),
        _at_most("six arrays / six pinned copies", 0.35, arrays, small.get(SIX_COPIES)),
        _at_most("six arrays / lists to pinned tensors", 0.1, arrays, small.get(FROM_LISTS)),
        _at_most("six arrays / reduce-overhead", 0.12, arrays, small.get(REDUCE_OVERHEAD)),
        _at_most("six arrays / make_graphed_callables", 1, arrays, small.get(GRAPHED)),
    ]


def dispatch_budgets(result: Result) -> list[Budget]:
    """Flat in the number of buckets, and below a microsecond."""
    rows = result["dispatch"]["rows"]
    known = [row["known_ns"] for row in rows]
    return [
        Budget("a batch seen before, any number of buckets", 1, max(known) / 1e3, "µs"),
        Budget(f"{rows[-1]['buckets']} buckets / {rows[0]['buckets']}", FLAT, known[-1] / known[0]),
    ]


def capture_budgets(result: Result) -> list[Budget]:
    """Seconds and bytes of a session."""
    seen = result["capture"]
    return [
        Budget(
            "seconds / an eager and a captured call of each bucket",
            1.25,
            seen["against_sum_of_calls"],
        ),
        Budget(
            "a torch.cuda.graph loop's seconds / graphkit's",
            1.5,
            seen["loop_against_graphkit"],
            is_least=True,
        ),
        Budget("bytes of the pool / the largest bucket's alone", 1.1, seen["pool_against_largest"]),
    ]


def piecewise_budgets(result: Result) -> list[Budget]:
    """What breaks cost, and what they gain."""
    budgets = []
    for row in result["per_segment"]:
        us, count = row["per_segment_us"], row["segments"]
        what = f"{count} segment{'s' if count > 1 else ''}"
        budgets.append(
            Budget(f"{what}: a segment / a bare replay", 1.3, us["nothing"] / us["bare"])
        )
        if "package" in us:
            ratio = us["nothing"] / us["package"]
            budgets.append(Budget(f"{what}: a segment / breakable-cuda-graphs'", 1, ratio))
    if not result["has_package"]:
        budgets.append(Budget("a segment / breakable-cuda-graphs'", 1, None))
    host, capture = result["model"]["host_us"], result["capture"]
    for way, name in (("piecewise", "eager_break"), ("fx", "graphkit.fx")):
        what = f"16 layers, host time: eager / PIECEWISE by {name}"
        budgets.append(Budget(what, 1.5, host["eager"] / host[way], is_least=True))
    what = f"capture of {capture['buckets']} buckets: PIECEWISE / FULL"
    return [*budgets, Budget(what, 1.3, capture["ratio"])]


def eagle_budgets(result: Result) -> list[Budget]:
    """The speculator's modes against the GPU time of their kernels, and against each other."""
    rows = result["proposals"]
    singles = [row["wall_us"] for row in rows if row["reqs"] == 1]
    budgets = [
        Budget(
            f"`{mode}` / GPU time, the worst of {len(rows)} batches",
            1.05,
            max(row["over_gpu"][mode] for row in rows),
        )
        for mode in ("prefill+decode", "one")
    ]
    for slow, bound in (("decode", 1.5), ("none", 2.2)):
        for fast in ("prefill+decode", "one"):
            gain = min((us[slow] / us[fast] for us in singles), default=None)
            budgets.append(Budget(f"batch 1: `{slow}` / `{fast}`", bound, gain, is_least=True))
    return budgets


BUDGETS: Mapping[str, Callable[[Result], list[Budget]]] = {
    "staging": staging_budgets,
    "dispatch": dispatch_budgets,
    "capture": capture_budgets,
    "piecewise": piecewise_budgets,
    "eagle": eagle_budgets,
}


def default_way(measured: Result, inputs: str) -> Result:
    """What graphkit does by default: the copy is a node of the graph wherever that is possible."""
    ways = [f"graphkit, {inputs}, copy {where} the graph" for where in ("in", "before")]
    found: Result = next(measured[way] for way in ways if way in measured)
    return found


def _at_most(
    what: str, bound: float, ours: Result, theirs: Result | None, unit: str = "host_us"
) -> Budget:
    return Budget(what, bound, None if theirs is None else ours[unit] / theirs[unit])


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
