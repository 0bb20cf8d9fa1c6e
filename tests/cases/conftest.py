"""Fixtures of the cases."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def small_heap() -> Iterator[None]:
    """Each capture collects garbage once; what the tests' own machinery holds isn't worth it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def thawed() -> Iterator[None]:
    """The collector as most processes have it: nothing is frozen."""
    gc.unfreeze()
    yield
    gc.freeze()
