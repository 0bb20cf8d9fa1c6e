"""The tables of the docs: up to date, and right about the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dispatch, eagle, piecewise, staging
from benchmarks.workloads.ways import WAYS
from docs import budgets, tables
from docs.budgets import BUDGETS, Budget
from docs.tables import Results, TableError, main, rewritten
from examples.eagle.speculator import GRAPHS

ENVIRONMENT = {"device": "NVIDIA H200", "torch": "2.11.0", "python": "3.12.3", "commit": "abc1234"}


def times(**host_us: float) -> dict[str, Any]:
    """What `benchmarks.measure.interleaved_us` gives: names with spaces for underscores."""
    return {name: {"host_us": us, "wall_us": us + 50} for name, us in host_us.items()}


def staging_result() -> dict[str, Any]:
    def shape(**further: float) -> dict[str, Any]:
        measured = times(**further)
        ways = {"arrays": 12.0, "CPU tensors": 30.0, "lists": 90.0}
        for inputs, us in ways.items():
            for where, more in (("in", 0.0), ("before", 5.0)):
                way = f"graphkit, {inputs}, copy {where} the graph"
                measured[way] = {"host_us": us + more, "wall_us": us + more + 50}
        measured["graphkit, resident, same size"] = {"host_us": 5.0, "wall_us": 55.0}
        measured["graphkit, resident, size changes"] = {"host_us": 11.0, "wall_us": 61.0}
        measured[budgets.FLOOR] = {"host_us": 10.0, "wall_us": 60.0}
        measured["memcpy of the payload"] = {"host_us": 2.0, "wall_us": 9.0}
        return measured

    small = shape()
    small["bare replay"] = {"host_us": 3.0, "wall_us": 53.0}
    small[budgets.SIX_COPIES] = {"host_us": 40.0, "wall_us": 90.0}
    small[budgets.FROM_LISTS] = {"host_us": 300.0, "wall_us": 350.0}
    return {"staging": {budgets.SMALL: small, budgets.LARGE: shape()}}


def proposal(reqs: int, k: int) -> dict[str, Any]:
    prefill = 1060.0 if reqs == 1 else 1040.0
    wall = {"none": 2500.0, "decode": 1550.0, "prefill+decode": prefill, "one": 1010.0}
    return {
        "reqs": reqs,
        "k": k,
        "gpu_us": 1000.0,
        "wall_us": wall,
        "host_us": wall,
        "over_gpu": {mode: us / 1000 for mode, us in wall.items()},
        "agree": reqs == 1,
        "kept": False,
    }


def workload(name: str, **further: Any) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    for number, way in enumerate(WAYS, 1):
        is_eager = way == "eager"
        ways[way] = {
            "host_us": 10.0 * number,
            "wall_us": 1000.0 + 10 * number,
            "gpu_share": None if "compile" in way else 0.96,
            "same": None if number == 1 else 1.0,
            "seconds": None if is_eager else 0.25,
            "bytes": None if is_eager else {"pool": 2**30, "static": 2**20, "driver": 0},
            "note": "",
        }
    return {"name": name, "ways": ways, "gpu_us": 900.0, "failures": {}, **further}


def results() -> dict[str, dict[str, Any]]:
    """A result for each benchmark, in the form that it writes."""
    segment = {"nothing": 3.0, "bare": 2.5, "run": 4.0, "same": 3.3, "fresh": 17.0, "eager": 21.0}
    return {
        "staging": staging_result(),
        "dispatch": {
            "dispatch": {
                "rows": [
                    {
                        "buckets": n,
                        "known_ns": ns,
                        "numpy_ns": 2800.0,
                        "new_ns": 9e3,
                        "make_ms": 1.0,
                    }
                    for n, ns in ((10, 300.0), (100, 310.0), (1000, 450.0))
                ]
            }
        },
        "capture": {
            "capture": {
                "buckets": 35,
                "graphkit_seconds": 0.3,
                "sum_of_calls_seconds": 0.2,
                "torch_cuda_graph_loop_seconds": 0.6,
                "against_sum_of_calls": 1.5,
                "loop_against_graphkit": 2.0,
                "pool_bytes": 2.0**20,
                "pool_bytes_of_largest_alone": 2.0**20,
                "pool_against_largest": 1.0,
                "static_bytes": 2.0**22,
            }
        },
        "piecewise": {
            "small": False,
            "per_segment": [{"segments": n, "per_segment_us": segment} for n in (1, 16)],
            "has_package": False,
            "model": {
                "tokens": 128,
                "host_us": {"eager": 3000.0, "full": 40.0, "piecewise": 1000.0, "fx": 2500.0},
                "wall_us": {"eager": 3100.0, "full": 900.0, "piecewise": 1550.0, "fx": 2600.0},
            },
            "capture": {"buckets": 35, "seconds": {"full": 1.0, "piecewise": 1.2}, "ratio": 1.2},
        },
        "eagle": {
            "small": False,
            "proposals": [proposal(1, 3), proposal(1, 5), proposal(64, 3)],
            "end_to_end": [
                {
                    "way": "EAGLE, K=3",
                    "graphs": "one",
                    "accepted_length": 3.6,
                    "tokens_per_second": 14000.0,
                    "ttft_ms": 9.0,
                    "tpot_ms": None,
                }
            ],
        },
        "workloads": workloads_result(),
    }


def workloads_result() -> dict[str, Any]:
    rows = [workload("llama, batch 8"), workload("llama, batch 250 of 256")]
    rows[1]["failures"] = {"make_graphed_callables": "RuntimeError: " + 40 * "no such luck, "}
    del rows[1]["ways"]["make_graphed_callables"]
    compiled = rows[0]["ways"]["torch.compile reduce-overhead"]
    compiled["note"], compiled["same"] = "cudagraphs were skipped", 0.5
    return {"small": False, "workloads": rows, "failed": {"policy": "ValueError: 3"}}


def write(folder: Path, **given: Any) -> Results:
    for module, result in given.items():
        whole = {"environment": ENVIRONMENT, **result}
        (folder / f"{module}.json").write_text(json.dumps(whole))
    return Results(folder)


@pytest.fixture
def measured(tmp_path: Path) -> Results:
    return write(tmp_path, **results())


NAMES = [*tables.TABLES, *(f"{name}-budgets" for name in BUDGETS), "environment", "missed"]


def test_the_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--check"])
    assert not code, f"run python -m docs.tables\n{capsys.readouterr().err}"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in tables.PAGES.rglob("*.md"))
    assert [name for name in NAMES if f"<!-- table: {name} -->" not in text] == []


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page outside of its programs' output, which is as it is."""
    fence = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence != "```":
            yield number, line


def test_pages_have_short_lines() -> None:
    long = [
        f"{page.name}:{number}"
        for page in tables.PAGES.rglob("*.md")
        # The architecture page's tables are its own.
        if page.name != "architecture.md"
        for number, line in prose(page)
        if len(line) > 120
    ]
    assert long == []


# -- what the figures are held against -------------------------------------------------------------


def test_names_and_budgets_are_those_of_the_benchmarks(measured: Results) -> None:
    assert list(staging.SHAPES) == [budgets.SMALL, budgets.LARGE]
    assert tables.MODES == GRAPHS
    assert set(tables.PEERS) == set(WAYS)
    assert staging.PACKED in tables.WAYS.values()

    def bounds(module: str) -> dict[str, float]:
        return {b.what: b.bound for b in BUDGETS[module](measured.load(module))}

    assert next(iter(bounds("dispatch").values())) * 1e3 == dispatch.BUDGET_NS
    of_breaks = bounds("piecewise")
    assert of_breaks["1 segment: a segment / a bare replay"] == piecewise.PER_SEGMENT_BUDGET
    assert of_breaks["capture of 35 buckets: PIECEWISE / FULL"] == piecewise.CAPTURE_BUDGET
    name = "16 layers, host time: eager / PIECEWISE by graphkit.fx"
    assert of_breaks[name] == piecewise.SPEEDUP_BUDGET
    assert list(bounds("eagle").values()) == [
        *[eagle.GPU_BUDGET] * 2,
        *[eagle.DECODE_BUDGET] * 2,
        *[eagle.NONE_BUDGET] * 2,
    ]


@pytest.mark.parametrize(
    ("budget", "cells"),
    [
        (Budget("a / b", 1.5, 1.5), ("a / b", "at most 1.5 ×", "1.50 ×", "met")),
        (Budget("a / b", 1.5, 3), ("a / b", "at most 1.5 ×", "3.00 ×", "**missed**, 2.00 ×")),
        (Budget("a", 1, 0.05, "µs"), ("a", "at most 1 µs", "0.050 µs", "met")),
        (Budget("a", 2, 2.0, is_least=True), ("a", "at least 2 ×", "2.00 ×", "met")),
        (
            Budget("a", 2.2, 1.1, is_least=True),
            ("a", "at least 2.2 ×", "1.10 ×", "**missed**, 2.00 ×"),
        ),
        (Budget("a", 1, None), ("a", "at most 1 ×", "-", "not measured in this run")),
    ],
)
def test_a_budget_is_met_up_to_its_bound(budget: Budget, cells: tuple[str, ...]) -> None:
    assert budget.cells == cells


def missed(results: Results, module: str) -> list[str]:
    made = BUDGETS[module](results.load(module))
    return [budget.what for budget in made if budget.is_met is False]


def test_budgets_are_judged_by_the_figures(measured: Results) -> None:
    assert missed(measured, "staging") == [
        "six CPU tensors, host time / the floor",
        "device inputs, new size / the floor",
    ]
    assert missed(measured, "dispatch") == ["1000 buckets / 10"]
    assert missed(measured, "capture") == ["seconds / an eager and a captured call of each bucket"]
    assert missed(measured, "piecewise") == [
        "16 layers, host time: eager / PIECEWISE by graphkit.fx"
    ]
    assert missed(measured, "eagle") == [
        "`prefill+decode` / GPU time, the worst of 3 batches",
        "batch 1: `decode` / `prefill+decode`",
    ]


def test_missed_ones_are_gathered(measured: Results) -> None:
    text = measured.table("missed")
    assert text.startswith("18 of 28 budgets are met, 7 missed, 3 not measured.\n\n| benchmark |")
    assert (
        "| `dispatch` | 1000 buckets / 10 | at most 1.2 × | 1.50 × | **missed**, 1.25 × |" in text
    )


def test_the_default_way_is_judged(tmp_path: Path) -> None:
    """Where a copy can't be a node of the graph, the other way is what users get."""
    result = staging_result()
    for shape in result["staging"].values():
        for name in [name for name in shape if "copy in the graph" in name]:
            del shape[name]
    assert missed(write(tmp_path, staging=result), "staging")[0] == (
        "six arrays, host time / the floor"
    )


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_table_has_as_many_cells_in_each_row_and_short_lines(
    measured: Results, name: str
) -> None:
    lines = measured.table(name).splitlines()
    cells = {line.count(" | ") for line in lines if line.startswith("|")}
    assert len(cells) == 1
    assert max(map(len, lines)) <= 120


def test_the_package_is_compared_with_where_it_was_installed(tmp_path: Path) -> None:
    result = results()["piecewise"]
    result["has_package"] = True
    for row in result["per_segment"]:
        row["per_segment_us"] = {**row["per_segment_us"], "package": 2.0}
    given = write(tmp_path, piecewise=result)
    lines = given.table("piecewise-segments").splitlines()
    assert "| breakable-cuda-graphs |" in lines[0]
    assert max(map(len, lines)) <= 120
    assert missed(given, "piecewise")[:2] == [
        "1 segment: a segment / breakable-cuda-graphs'",
        "16 segments: a segment / breakable-cuda-graphs'",
    ]


def test_what_one_step_gains(measured: Results) -> None:
    assert measured.table("gain-prefill") == (
        "| requests, K = 3 | `decode`, µs | `prefill+decode`, µs | faster | GPU time, µs |\n"
        "| ---: | ---: | ---: | ---: | ---: |\n"
        "| 1 | 1,550 | 1,060 | 1.46 × | 1,000 |\n"
        "| 64 | 1,550 | 1,040 | 1.49 × | 1,000 |"
    )


def test_drafts_that_differ_are_shown(measured: Results) -> None:
    rows = measured.table("eagle-proposals").splitlines()[2:]
    assert [row.rsplit(" | ", 1)[1] for row in rows] == ["yes |", "yes |", "**no** |"]


def test_workloads_are_held_against_their_floor(measured: Results) -> None:
    lines = measured.table("workloads").splitlines()
    assert lines[2] == "| llama, batch 8 | floor | 10.0 | 1.00 | 1,010 | 1.00 | 0.96 |"
    assert "| llama, batch 8 | reduce-overhead | 60.0 | 6.00 | 1,060 | 1.05 | - |" in lines


def test_a_peer_that_fails_or_goes_without_a_graph_is_told(measured: Results) -> None:
    remarks = measured.table("workloads").split("\n\n")[1].splitlines()
    assert remarks == [
        "- *llama, batch 8, reduce-overhead: cudagraphs were skipped*",
        "- *llama, batch 8, reduce-overhead: 50% of the results as eager's*",
        remarks[2],
        "- *policy: failed, ValueError: 3*",
    ]
    assert remarks[2].startswith("- *llama, batch 250 of 256, make_graphed_callables: RuntimeError")
    assert measured.table("workloads-ratios").splitlines()[2:] == [
        "| llama, batch 8 | 0.67 (0.99) | 0.50 (0.98) | 0.33 (0.96) | 0.29 (0.95) | 0.40 (0.97) |",
        "| llama, batch 250 of 256 | 0.67 (0.99) | - | 0.33 (0.96) | 0.29 (0.95) | 0.40 (0.97) |",
    ]


def test_memory_of_what_was_made(measured: Results) -> None:
    lines = measured.table("workloads-memory").splitlines()
    assert "| llama, batch 8 | graphkit | 0.25 s | 1024.0 MiB | 1.0 MiB | 0.0 MiB |" in lines
    assert not [line for line in lines if "| eager |" in line]


def test_a_way_without_figures_keeps_its_row(measured: Results) -> None:
    """The rows came later than the first results."""
    lines = measured.table("staging-ways").splitlines()
    assert "| A: packed in place | packed in place, one copy and replay | - | - | - | - |" in lines
    assert any(line.endswith("| 12.0 | 1.20 | 62.0 | 1.03 |") for line in lines)


@pytest.mark.parametrize(
    ("device", "small", "line"),
    [
        ("cpu", False, "the result at hand is a CPU's"),
        ("NVIDIA H200", True, "the result at hand is of a quick run"),
    ],
)
def test_what_means_nothing_is_not_shown(
    tmp_path: Path, device: str, small: bool, line: str
) -> None:
    result = {**results()["eagle"], "environment": {"device": device}, "small": small}
    (tmp_path / "eagle.json").write_text(json.dumps(result))
    assert line in Results(tmp_path).table("eagle-proposals")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_result_leaves_a_line(tmp_path: Path, name: str) -> None:
    text = Results(tmp_path).table(name)
    assert "not measured yet" in text.lower()
    if name in tables.TABLES:
        module = tables.TABLES[name].module
        assert text == (
            f"*Not measured yet: run `python -m benchmarks.{module} --out benchmarks/results` "
            "on a GPU.*"
        )


def test_results_of_another_form_are_named(tmp_path: Path) -> None:
    given = write(tmp_path, capture={"capture": {"buckets": 35}})
    with pytest.raises(TableError, match=r"table 'capture' can't be made from .*capture\.json"):
        given.table("capture")
    (tmp_path / "eagle.json").write_text("{")
    with pytest.raises(TableError, match=r"eagle\.json is no JSON .*: run `python -m benchmarks"):
        given.table("eagle-proposals")
    (tmp_path / "eagle.json").write_text("[]")
    with pytest.raises(TableError, match="holds no JSON object"):
        given.table("eagle-proposals")


# -- pages ----------------------------------------------------------------------------------------

PAGE = "# Title\n\n<!-- table: dispatch -->\nold\n<!-- end -->\n\nText.\n"


def test_only_what_stands_between_the_marks_changes(measured: Results) -> None:
    new = rewritten(PAGE, measured)
    assert new.startswith("# Title\n\n<!-- table: dispatch -->\n\n| buckets | seen before")
    assert new.endswith(" |\n\n<!-- end -->\n\nText.\n")
    assert "old" not in new
    assert rewritten(new, measured) == new
    assert rewritten("no table\n", measured) == "no table\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PAGE.replace("<!-- end -->", ""), "no <!-- end -->"),
        (PAGE.replace("<!-- end -->", "") + PAGE, "no <!-- end -->"),
        (
            PAGE.replace("dispatch", "dispatched"),
            "no table is named 'dispatched'; there are .*wins",
        ),
    ],
)
def test_a_wrong_mark_is_refused(measured: Results, text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        rewritten(text, measured)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, pages = tmp_path / "results", tmp_path / "pages"
    folder.mkdir()
    (pages / "how-to").mkdir(parents=True)
    page = pages / "how-to" / "page.md"
    page.write_text(PAGE)
    write(folder, **results())
    options = ["--results", str(folder), "--pages", str(pages)]
    assert main([*options, "--check"]) == 1
    assert "page.md is stale: run python -m docs.tables" in capsys.readouterr().err
    assert page.read_text() == PAGE
    assert main(options) == 0
    assert main([*options, "--check"]) == 0
    page.write_text("<!-- table: nothing -->\n<!-- end -->\n")
    assert main([*options, "--check"]) == 2
    assert "page.md: no table is named 'nothing'" in capsys.readouterr().err
