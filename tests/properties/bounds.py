"""How many examples a property gets."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, Phase, settings


def examples(count: int, *, steps: int = 20, shrinks: bool = True) -> settings:
    """Settings for a property: the same examples each time, fewer where each costs a GPU's captures.

    Args:
        count: how many examples.
        steps: of a state machine.
        shrinks: whether a failing example is made small, which takes minutes where each is a capture.
    """
    if torch.cuda.is_available():
        count = max(count // 4, 5)
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[phase for phase in Phase if shrinks or phase is not Phase.shrink],
        # The `device` fixture is a constant, and a group of graphs takes its time.
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
