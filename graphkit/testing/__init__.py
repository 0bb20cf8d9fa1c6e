"""Tests for your own runners: checks of a captured runner, and property-based tests.

`strategies` and `RunnerMachine` need hypothesis, and are imported when they are first named; the checks
need nothing more than graphkit does. Nothing else of graphkit imports this package.
"""

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from graphkit.testing.checks import (
    check_all,
    check_dispatch,
    check_every_bucket,
    check_history_independence,
    check_matches_eager,
    check_no_allocation,
    check_one_run_at_a_time,
    check_outputs_survive,
    check_padding_independence,
)

if TYPE_CHECKING:
    import graphkit.testing.strategies as strategies
    from graphkit.testing.machine import RunnerMachine

__all__ = [
    "RunnerMachine",
    "check_all",
    "check_dispatch",
    "check_every_bucket",
    "check_history_independence",
    "check_matches_eager",
    "check_no_allocation",
    "check_one_run_at_a_time",
    "check_outputs_survive",
    "check_padding_independence",
    "strategies",
]


def __getattr__(name: str) -> _Any:
    # What needs hypothesis waits until somebody asks for it: the checks work without.
    if name == "strategies":
        return _importlib.import_module("graphkit.testing.strategies")
    if name == "RunnerMachine":
        return _importlib.import_module("graphkit.testing.machine").RunnerMachine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
