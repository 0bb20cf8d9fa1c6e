"""Rewrites the tables of the docs from the results of the benchmarks.

    python -m docs.tables [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` in any page below docs/, and is
made from a file in benchmarks/results/. A budget is marked met or missed here, from the measured
figures, so that no page can say otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from docs.budgets import (
    BUDGETS,
    FLOOR,
    FROM_LISTS,
    LARGE,
    SIX_COPIES,
    SMALL,
    Budget,
    Result,
    default_way,
)

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
MODULES = ("staging", "dispatch", "capture", "piecewise", "eagle", "workloads")

MARK = re.compile(r"^<!-- table: (\S+) -->$.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"-|[\d.,]+( [^\d(]+)?( \([\d.]+\))?")
OPENING = re.compile(r"^<!-- table: \S+ -->$", re.MULTILINE)


class TableError(ValueError):
    """A page asks for a table that doesn't exist, or a result isn't what its benchmark writes."""


class NotMeasured(Exception):
    """There are no figures for a table; the text is the line that stands in for it."""


# -- tables ---------------------------------------------------------------------------------------


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a column of figures is aligned to the right."""
    columns = list(zip(*rows, strict=True))
    rules = ["---:" if all(map(FIGURE.fullmatch, column)) else "---" for column in columns]
    lines = [heading, rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def staging_table(result: Result, shape: str) -> str:
    """Every way of one shape, against the floor."""
    measured = result["staging"][shape]
    floor = measured[FLOOR]
    rows = []
    for name, times in sorted(measured.items(), key=lambda item: item[1]["host_us"]):
        cells = [name]
        for unit in ("host_us", "wall_us"):
            cells += [_us(times[unit]), f"{times[unit] / floor[unit]:.2f}"]
        rows.append(cells if name != "memcpy of the payload" else [*cells[:3], "-", "-"])
    return markdown(("a step", "host µs", "/ floor", "wall µs", "/ floor"), rows)


WAYS = {
    "A: packed in place": "packed in place, one copy and replay",
    "B: a copy, and unpacking in the graph": "graphkit, arrays, copy before the graph",
    "D: the copy is a node of the graph": "graphkit, arrays, copy in the graph",
    "U: the graph reads the slot from the host": None,
}
"""The ways that the design weighs to bring inputs to a graph, and the rows that measure them."""


def staging_ways(result: Result) -> str:
    """The ways of the design, of which U isn't built."""
    measured = result["staging"][SMALL]
    floor = measured[FLOOR]
    rows = []
    for way, name in WAYS.items():
        times = measured.get(name)
        row = "not built" if name is None else name
        cells = ["-"] * 4
        if times is not None:
            cells = [
                cell
                for unit in ("host_us", "wall_us")
                for cell in (_us(times[unit]), f"{times[unit] / floor[unit]:.2f}")
            ]
        rows.append((way, row, *cells))
    return markdown(("way", "its row", "host µs", "/ floor", "wall µs", "/ floor"), rows)


def staging_gain(result: Result) -> str:
    """The host path in three lines, for the tutorial."""
    measured = result["staging"][SMALL]
    ways = {
        "lists to pinned tensors to device, then replay": measured.get(FROM_LISTS),
        "six pinned copies to slices, then replay": measured.get(SIX_COPIES),
        "graphkit: checked, padded, one copy, replay": default_way(measured, "arrays"),
        "nothing but one pinned copy, and replay": measured[FLOOR],
    }
    rows = [(name, _us(times["host_us"])) for name, times in ways.items() if times is not None]
    return markdown(("six inputs, batch 50 in a bucket of 64", "host µs"), rows)


def dispatch_table(result: Result) -> str:
    """By the number of buckets."""
    rows = [
        (
            str(row["buckets"]),
            *(f"{row[key] / 1e3:.2f}" for key in ("known_ns", "numpy_ns", "new_ns")),
            f"{row['make_ms']:.1f}",
        )
        for row in result["dispatch"]["rows"]
    ]
    heading = ("buckets", "seen before, µs", "NumPy sizes, µs", "a new batch, µs", "made in ms")
    return markdown(heading, rows)


def capture_table(result: Result) -> str:
    """Seconds and memory."""
    seen = result["capture"]
    rows = [
        (f"graphkit, {seen['buckets']} buckets", f"{seen['graphkit_seconds']:.3f} s"),
        ("a torch.cuda.graph loop over them", f"{seen['torch_cuda_graph_loop_seconds']:.3f} s"),
        ("one eager and one captured call each", f"{seen['sum_of_calls_seconds']:.3f} s"),
        ("pool of all buckets", _mib(seen["pool_bytes"])),
        ("pool of the largest alone", _mib(seen["pool_bytes_of_largest_alone"])),
        ("static buffers and outputs", _mib(seen["static_bytes"])),
    ]
    return markdown(("", "measured"), rows)


def segments_table(result: Result) -> str:
    """Host time of a segment."""
    names = {
        "bare": "bare replays",
        "nothing": "does nothing",
        "same": "passes a tensor on",
        "fresh": "returns a new tensor",
        "package": "breakable-cuda-graphs",
        "eager": "eager",
    }
    kept = [name for name in names if name in result["per_segment"][0]["per_segment_us"]]
    rows = [
        (str(row["segments"]), *(_us(row["per_segment_us"][name]) for name in kept))
        for row in result["per_segment"]
    ]
    return markdown(("segments", *(names[name] for name in kept)), rows)


def wins_table(result: Result) -> str:
    """EAGER, PIECEWISE and FULL over the same model."""
    model = result["model"]
    names = {
        "eager": "EAGER",
        "piecewise": "PIECEWISE, by `eager_break`",
        "fx": "PIECEWISE, by `graphkit.fx`",
        "full": "FULL",
        "attention alone": "of it, the 16 attentions, eagerly",
    }
    host, wall = model["host_us"], model["wall_us"]
    rows = [
        (name, _us(host[key]), _us(wall[key]), f"{wall['eager'] / wall[key]:.2f}")
        for key, name in names.items()
        if key in host
    ]
    heading = (f"16 layers, {model['tokens']} tokens", "host µs", "wall µs", "EAGER's wall / this")
    return markdown(heading, rows)


def piecewise_capture_table(result: Result) -> str:
    """Seconds of a capture, by mode."""
    capture = result["capture"]
    rows = [(mode.upper(), f"{seconds:.2f} s") for mode, seconds in capture["seconds"].items()]
    return markdown((f"capture of {capture['buckets']} buckets", "measured"), rows)


MODES = ("none", "decode", "prefill+decode", "one")


def proposals_table(result: Result) -> str:
    """propose() by mode, and over the GPU time."""
    rows = [
        (
            str(row["reqs"]),
            str(row["k"]),
            _us(row["gpu_us"]),
            *(f"{_us(row['wall_us'][mode])} ({row['over_gpu'][mode]:.2f})" for mode in MODES),
            "yes" if row["agree"] else "**no**",
        )
        for row in result["proposals"]
    ]
    heading = ("requests", "K", "GPU µs", *(f"`{mode}`" for mode in MODES), "same drafts")
    return markdown(heading, rows)


def eagle_gain(result: Result, slow: str, fast: str) -> str:
    """What one step of the tutorial gains."""
    rows = [
        (
            str(row["reqs"]),
            _us(row["wall_us"][slow]),
            _us(row["wall_us"][fast]),
            f"{row['wall_us'][slow] / row['wall_us'][fast]:.2f} ×",
            _us(row["gpu_us"]),
        )
        for row in result["proposals"]
        if row["k"] == 3
    ]
    heading = ("requests, K = 3", f"`{slow}`, µs", f"`{fast}`, µs", "faster", "GPU time, µs")
    return markdown(heading, rows)


def end_to_end_table(result: Result) -> str:
    """The tiny model, whole."""
    rows = [
        (
            row["way"],
            f"`{row['graphs']}`",
            f"{row['accepted_length']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ttft_ms']:.1f}",
            "-" if row["tpot_ms"] is None else f"{row['tpot_ms']:.2f}",
        )
        for row in result["end_to_end"]
    ]
    heading = ("8 requests", "graphs", "accepted length", "tokens/s", "TTFT ms", "TPOT ms")
    return markdown(heading, rows)


PEERS = {
    "floor: one pinned copy and replay": "floor",
    "graphkit": "graphkit",
    "pinned copies and replay": "pinned copies, replay",
    "make_graphed_callables": "make_graphed_callables",
    "torch.compile reduce-overhead": "reduce-overhead",
    "torch.compile reduce-overhead, static inputs marked": "reduce-overhead, marked",
    "eager": "eager",
}
"""The ways of `benchmarks.workloads`, as short as a table needs them."""


def workloads_table(result: Result) -> str:
    """What a step costs, by workload and way, and what there is to say about a way."""
    rows = []
    for each in result["workloads"]:
        floor = each["ways"][FLOOR]
        ways = each["ways"].items()
        for name, way in sorted(ways, key=lambda item: item[1]["host_us"]):
            cells = [each["name"], PEERS[name]]
            for unit in ("host_us", "wall_us"):
                cells += [_us(way[unit]), f"{way[unit] / floor[unit]:.2f}"]
            share = way["gpu_share"]
            rows.append((*cells, "-" if share is None else f"{share:.2f}"))
    heading = ("", "a step", "host µs", "/ floor", "wall µs", "/ floor", "GPU busy")
    return "\n".join([markdown(heading, rows), *_remarks(result)])


def _remarks(result: Result) -> list[str]:
    """A paragraph of peers that failed, went without graphs, or computed something else."""
    found = []
    for each in result["workloads"]:
        for name, reason in each["failures"].items():
            found.append(f"{each['name']}, {PEERS[name]}: {reason}")
        for name, way in each["ways"].items():
            if way.get("note"):
                found.append(f"{each['name']}, {PEERS[name]}: {way['note']}")
            same = way["same"]
            if same is not None and same < ALIKE:
                found.append(f"{each['name']}, {PEERS[name]}: {same:.0%} of the results as eager's")
    found += [f"{name}: failed, {reason}" for name, reason in result["failed"].items()]
    return ["", *(f"- *{textwrap.shorten(text, 110)}*" for text in found)] if found else []


ALIKE = 0.9
"""The share of results as eager's below which a table says so; roundings decide between likely tokens."""


def workloads_ratios(result: Result) -> str:
    """graphkit's time over each peer's: on the host, and on the wall."""
    peers = {name: short for name, short in PEERS.items() if short not in ("floor", "graphkit")}
    rows = []
    for each in result["workloads"]:
        ours, cells = each["ways"]["graphkit"], []
        for name in peers:
            way = each["ways"].get(name)
            cells.append(
                "-"
                if way is None
                else f"{ours['host_us'] / way['host_us']:.2f} "
                f"({ours['wall_us'] / way['wall_us']:.2f})"
            )
        rows.append((each["name"], *cells))
    return markdown(("graphkit /", *peers.values()), rows)


def workloads_memory(result: Result) -> str:
    """Seconds and bytes of making each way."""
    rows = []
    for each in result["workloads"]:
        for name, way in each["ways"].items():
            taken = way.get("bytes")
            if taken is not None:
                parts = (_mib(taken[kind]) for kind in ("pool", "static", "driver"))
                rows.append((each["name"], PEERS[name], f"{way['seconds']:.2f} s", *parts))
    return markdown(("", "way", "made in", "pool", "static", "driver"), rows)


def budget_table(budgets: Sequence[Budget]) -> str:
    """Every budget, and whether it is met."""
    rows = [budget.cells for budget in budgets]
    return markdown(("budget", "allowed", "measured", ""), rows)


@attrs.frozen
class Table:
    """A table of one result."""

    module: str
    make: Callable[[Result], str]


TABLES: Mapping[str, Table] = {
    "staging": Table("staging", lambda result: staging_table(result, SMALL)),
    "staging-large": Table("staging", lambda result: staging_table(result, LARGE)),
    "staging-gain": Table("staging", staging_gain),
    "staging-ways": Table("staging", staging_ways),
    "dispatch": Table("dispatch", dispatch_table),
    "capture": Table("capture", capture_table),
    "piecewise-segments": Table("piecewise", segments_table),
    "piecewise-wins": Table("piecewise", wins_table),
    "piecewise-capture": Table("piecewise", piecewise_capture_table),
    "eagle-proposals": Table("eagle", proposals_table),
    "eagle-end-to-end": Table("eagle", end_to_end_table),
    "workloads": Table("workloads", workloads_table),
    "workloads-ratios": Table("workloads", workloads_ratios),
    "workloads-memory": Table("workloads", workloads_memory),
    "gain-decode": Table("eagle", lambda result: eagle_gain(result, "none", "decode")),
    "gain-prefill": Table("eagle", lambda result: eagle_gain(result, "decode", "prefill+decode")),
    "gain-one": Table("eagle", lambda result: eagle_gain(result, "prefill+decode", "one")),
}
# Those of several results, and the budgets of each, are made by `table`.


class Results:
    """The benchmarks' results in a folder.

    Args:
        folder: with a ``<module>.json`` for each benchmark that was run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, module: str) -> Result:
        """One result.

        Raises:
            NotMeasured: there is none, or one whose times mean nothing.
            TableError: the file is no JSON object.
        """
        again = f"run `python -m benchmarks.{module} --out benchmarks/results` on a GPU"
        path = self.folder / f"{module}.json"
        if not path.is_file():
            raise NotMeasured(f"*Not measured yet: {again}.*")
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise TableError(f"{path} is no JSON ({error}): {again}") from None
        if not isinstance(result, dict):
            raise TableError(f"{path} holds no JSON object: {again}")
        if module != "dispatch" and result.get("environment", {}).get("device") == "cpu":
            raise NotMeasured(f"*Not measured yet: the result at hand is a CPU's; {again}.*")
        if result.get("small"):
            raise NotMeasured(f"*Not measured yet: the result at hand is of a quick run; {again}.*")
        return result

    def table(self, name: str) -> str:
        """The table of a name.

        Raises:
            TableError: no table has that name, or a result isn't what its benchmark writes.
        """
        module, make = self._maker(name)
        try:
            return make()
        except NotMeasured as line:
            return str(line)
        except (KeyError, IndexError, TypeError, StopIteration) as error:
            raise TableError(
                f"table {name!r} can't be made from {self.folder / module}.json ({error!r}): "
                "the benchmark writes something else by now; run it again, or mend docs/tables.py"
            ) from error

    def _maker(self, name: str) -> tuple[str, Callable[[], str]]:
        if name == "environment":
            return "*", self._environments
        if name == "missed":
            return "*", self._missed
        module = name.removesuffix("-budgets")
        if name.endswith("-budgets") and module in BUDGETS:
            return module, lambda: budget_table(BUDGETS[module](self.load(module)))
        if name in TABLES:
            table = TABLES[name]
            return table.module, lambda: table.make(self.load(table.module))
        known = sorted(
            {*TABLES, *(f"{module}-budgets" for module in BUDGETS), "environment", "missed"}
        )
        raise TableError(f"no table is named {name!r}; there are {', '.join(known)}")

    def _environments(self) -> str:
        rows = []
        for module in MODULES:
            try:
                where = self.load(module)["environment"]
            except NotMeasured:
                rows.append((f"`{module}`", *["not measured yet"] * 5))
                continue
            keys = ("device", "torch", "driver", "python", "commit")
            rows.append((f"`{module}`", *(str(where.get(key) or "-") for key in keys)))
        return markdown(("benchmark", "device", "PyTorch", "driver", "Python", "commit"), rows)

    def _missed(self) -> str:
        budgets, absent = [], []
        for module, make in BUDGETS.items():
            try:
                budgets += [(f"`{module}`", budget) for budget in make(self.load(module))]
            except NotMeasured:
                absent.append(f"`{module}`")
        missed = [(module, *budget.cells) for module, budget in budgets if budget.is_met is False]
        open_ = sum(budget.is_met is None for _, budget in budgets)
        met = len(budgets) - len(missed) - open_
        lines = []
        if budgets:
            further = f", {open_} not measured" if open_ else ""
            lines.append(f"{met} of {len(budgets)} budgets are met, {len(missed)} missed{further}.")
        if absent:
            lines.append(f"*Not measured yet: {', '.join(absent)}.*")
        if missed:
            heading = ("benchmark", "budget", "allowed", "measured", "")
            lines += ["", markdown(heading, missed)]
        return "\n".join(lines)


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


# -- pages ----------------------------------------------------------------------------------------


def rewritten(text: str, results: Results) -> str:
    """A page with its tables made anew.

    Raises:
        TableError: a table has no end, or no maker.
    """
    if len(MARK.findall(text)) != len(OPENING.findall(text)):
        raise TableError("a table has no <!-- end --> before the next one, or the page's end")

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table: {name} -->\n\n{results.table(name)}\n\n<!-- end -->"

    return MARK.sub(replace, text)


def stale_pages(pages: Path, results: Results) -> dict[Path, str]:
    """The pages whose tables aren't what the results say, and what they should be.

    Raises:
        TableError: see `rewritten`; the message begins with the page.
    """
    stale = {}
    for page in sorted(pages.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        try:
            new = rewritten(text, results)
        except TableError as error:
            raise TableError(f"{page}: {error}") from error
        if new != text:
            stale[page] = new
    return stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is stale"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="another folder of results")
    parser.add_argument("--pages", type=Path, default=PAGES, help="another folder of pages")
    options = parser.parse_args(arguments)
    try:
        stale = stale_pages(options.pages, Results(options.results))
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    for page, text in stale.items():
        if options.check:
            print(f"{page} is stale: run python -m docs.tables", file=sys.stderr)
        else:
            page.write_text(text, encoding="utf-8")
            print(f"rewrote {page}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
