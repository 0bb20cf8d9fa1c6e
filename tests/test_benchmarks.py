"""The benchmarks: each runs where there is no GPU, and its ways compute what the model does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import capture as capture_benchmark
from benchmarks import dispatch, eagle, measure, piecewise, run, staging, watch, workloads
from benchmarks.workloads import ways
from benchmarks.workloads.case import Case, agreement
from benchmarks.workloads.ways import COPIES, EAGER, FLOOR, GRAPHED, GRAPHKIT, WAYS
from benchmarks.workloads.workload import Workload


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks' own numbers of steps are for figures that mean something."""

    def seldom(steps: Any, **options: Any) -> Any:
        options |= {"number": 1, "rounds": 1}
        return measure_interleaved(steps, **options)

    measure_interleaved = measure.interleaved_us
    for module in (staging, piecewise, eagle):
        monkeypatch.setattr(module, "interleaved_us", seldom)


# -- each benchmark -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    """The workloads, run once."""
    return workloads.run("cpu", quick=True)


def test_every_module_is_run_by_make_bench() -> None:
    folder = Path(run.__file__).parent
    found = {path.stem for path in folder.glob("*.py")} - {"__init__", "measure", "run"}
    found |= {path.parent.name for path in folder.glob("*/__main__.py")}
    assert set(run.MODULES) == found


def test_dispatch_runs() -> None:
    assert [row["buckets"] for row in dispatch.run()["rows"]] == [10, 100, 1000]


def test_a_look_at_watched_memory_is_measured() -> None:
    assert [row["parameters"] for row in watch.run()["rows"]] == [10, 300, 1000]


def test_staging_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "SHAPES", {"toy": (3, 17, 4)})
    measured = staging.run("cpu", quick=True)["toy"]
    assert measured["graphkit, arrays, copy before the graph"]["host_us"] > 0


def test_a_piecewise_segment_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "SEGMENTS", (2,))
    (row,) = piecewise.per_segment("cpu", 1)
    assert row["segments"] == 2
    assert {"nothing", "bare", "fresh", "eager"} <= set(row["per_segment_us"])


def test_eagle_proposals_agree() -> None:
    row = eagle.proposals(eagle.models("cpu", small=True), 1, 3, 4)
    assert row["agree"]
    assert row["gpu_us"] > 0


def test_capture_needs_a_gpu() -> None:
    assert capture_benchmark.run("cpu") == {}


def test_workloads_run(toy: dict[str, Any], tmp_path: Path) -> None:
    assert toy["failed"] == {}
    assert [row["name"] for row in toy["workloads"]] == [
        "diffusion, a step of 3",
        "llama, batch 1",
        "llama, batch 3 of 4",
        "policy, batch 1",
    ]
    for row in toy["workloads"]:
        assert set(row["ways"]) == {FLOOR, GRAPHKIT, EAGER}
        assert row["failures"][COPIES] == "needs a CUDA device"
        assert row["ways"][GRAPHKIT]["same"] == 1
        assert row["ways"][GRAPHKIT]["bytes"] == {"pool": 0, "static": 0, "driver": 0}
    saved = measure.save("workloads", toy, tmp_path)
    assert json.loads(saved.read_text())["small"] is True


def test_workloads_are_shown_as_meaningless(
    toy: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    workloads.table(toy)
    shown = capsys.readouterr().out
    assert shown.startswith("toy models: these figures mean nothing")
    assert "llama, batch 3 of 4: GPU" in shown
    assert "make_graphed_callables: needs a CUDA device" in shown


@pytest.mark.gpu
def test_workloads_run_on_a_gpu() -> None:
    """Everything but torch.compile, which takes too long for a test."""
    result = workloads.run("cuda", quick=True, skip_compile=True)
    assert result["failed"] == {}
    for row in result["workloads"]:
        assert set(row["failures"].values()) <= {"left out of this run"}
        assert set(row["ways"]) == {FLOOR, GRAPHKIT, COPIES, GRAPHED, EAGER}
        for name in (GRAPHKIT, COPIES, GRAPHED):
            assert row["ways"][name]["same"] >= 0.9, name
            assert row["ways"][name]["bytes"]["pool"] > 0, name


# -- the ways, with stand-ins for what needs a GPU ------------------------------------------------


class Graph:
    """A graph that computes anew: what a replay does to the same memory."""

    def __init__(self, body: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        self._body, self._result = body, result

    def replay(self) -> None:
        self._result.copy_(self._body())


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def captured(body: Callable[[], torch.Tensor]) -> Any:
        result = body().clone()
        return Graph(body, result), result

    def as_it_is(fn: Any, *args: Any, **options: Any) -> Any:
        return fn

    monkeypatch.setattr(ways, "captured", captured)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", as_it_is)
    monkeypatch.setattr(torch, "compile", as_it_is)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    for way in WAYS.values():
        monkeypatch.setattr(way, "needs_cuda", False)
    with torch.no_grad():
        yield


def toys() -> list[Workload]:
    return workloads.workloads("cpu", small=True)


@pytest.mark.usefixtures("standing_in")
@pytest.mark.parametrize("index", range(4))
def test_all_ways_compute_the_same(index: int) -> None:
    workload = toys()[index]
    case = Case(workload, lambda: "")
    assert case.failures == {}
    row = case.result()
    expected = set(WAYS)
    if not workload.is_compiled:
        expected -= {ways.COMPILED, ways.COMPILED_STATIC}
    assert set(row["ways"]) == expected
    shares = {name: way["same"] for name, way in row["ways"].items() if name != FLOOR}
    assert shares == dict.fromkeys(expected - {FLOOR}, 1)
    case.close()


@pytest.mark.usefixtures("standing_in")
def test_copies_by_hand_fill_the_rows_beyond_the_batch() -> None:
    workload = next(each for each in toys() if each.batch == 3)
    way = ways.Copies(workload)
    for tensor in way._static.values():
        tensor.fill_(1)
    way.step(workload.inputs(0))
    assert way._static["slot_mapping"][3:].tolist() == [0]
    assert way._static["seq_lens"][:3].tolist() == workload.inputs(0)["seq_lens"].tolist()


@pytest.mark.usefixtures("standing_in")
def test_a_peer_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("not for this model\nand more")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    case = Case(toys()[0], lambda: "no time left")
    assert case.failures == {
        GRAPHED: "RuntimeError: not for this model",
        ways.COMPILED: "no time left",
        ways.COMPILED_STATIC: "no time left",
    }
    with contextlib.closing(case):
        assert GRAPHED not in case.result()["ways"]


@pytest.mark.usefixtures("standing_in")
def test_a_peer_that_fails_later_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Case(toys()[0], lambda: "")) as case:

        def refuse(inputs: Any) -> Any:
            raise RuntimeError("no more")

        monkeypatch.setattr(case.made[GRAPHED].way, "step", refuse)
        row = case.result()
    assert GRAPHED not in row["ways"]
    assert row["failures"] == {GRAPHED: "RuntimeError: no more"}


def test_a_failure_of_ours_fails_the_workload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any, inputs: Any) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(ways.Graphkit, "step", refuse)
    policy = toys()[:1]
    monkeypatch.setattr(workloads, "workloads", lambda device, small: policy)
    result = workloads.run("cpu")
    assert result["workloads"] == []
    assert result["failed"] == {"policy, batch 1": "ValueError: broken"}
    assert "ValueError: broken" in capsys.readouterr().err


# -- the inputs, and the measuring ----------------------------------------------------------------


def test_requests_own_their_slots() -> None:
    """No two requests write where another reads, and nobody writes to the scratch page."""
    workload = next(each for each in toys() if each.batch == 3)
    for step in range(9):
        inputs = workload.inputs(step)
        pages = set(inputs["block_table"].flatten().tolist())
        assert len(pages) == inputs["block_table"].size
        assert 0 not in pages
        at = inputs["positions"]
        owned = inputs["block_table"][np.arange(3), at // 4] * 4 + at % 4
        assert inputs["slot_mapping"].tolist() == owned.tolist()
        assert (inputs["seq_lens"] == at + 1).all()
        for name, spec in workload.specs.items():
            assert torch.from_numpy(inputs[name]).dtype == spec.dtype
            if spec.valid is not None:
                assert inputs[name].min() >= spec.valid[0]
                assert inputs[name].max() < spec.valid[1]


def test_agreement_is_a_share() -> None:
    ints = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert agreement(ints, [torch.tensor([1, 2]), torch.tensor([3, 5])]) == 0.75
    floats = torch.tensor([1.0, 2.0])
    assert agreement([floats], [floats + 0.01]) == 1
    assert agreement([floats], [floats + 1]) == 0


def test_what_is_done_before_a_step_is_not_timed() -> None:
    import time

    seen: list[int] = []

    def slow(index: int) -> None:
        time.sleep(0.01)
        seen.append(index)

    found = measure.interleaved_us({"a": lambda i: None}, number=3, rounds=1, before=slow)
    assert seen == list(range(13))
    assert found["a"]["wall_us"] < 5000
