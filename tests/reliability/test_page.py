"""The figures of docs/reliability.md that can be counted are those of the tests."""

from __future__ import annotations

from pathlib import Path

from tests.reliability import hostile, test_faults, test_random

PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()


def test_faults_are_counted() -> None:
    steps = len(test_faults.IN_A_BUCKET) + len(test_faults.OF_THE_SESSION)
    assert f"{len(list(test_faults.cases()))}: a user's exception" in PAGE
    assert f"at each of {steps} steps" in PAGE
    both = len(test_faults.IN_A_BUCKET)
    assert f"{2 * both - len(test_faults.BREAKS_ONLY)} more that are skipped" in PAGE


def test_refusals_are_counted() -> None:
    kinds, more = len(test_faults.REFUSED), len(test_faults.ON_CUDA)
    each = 2 * len(test_faults.PLACES)
    assert f"{kinds} kinds, {kinds * each} captures" in PAGE
    assert f"{kinds + more} kinds, {(kinds + more) * each} captures" in PAGE


def test_hostile_calls_are_counted() -> None:
    engine = hostile.Engine()
    calls = [*hostile.calls().values(), *engine.declares().values(), *engine.runs().values()]
    values = len(hostile.values())
    assert f"{values} values for each argument" in PAGE
    assert sum(len(arguments) for _, arguments in calls) * values >= 20_000
    assert "20,000 calls at least" in PAGE


def test_distributions_are_counted() -> None:
    assert f"{len(test_random.KINDS)} distributions" in PAGE
