"""What the properties need to be quick."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def _young_garbage_only() -> Iterator[None]:
    # Each capture collects garbage, and most of the time that takes is for what other tests imported.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
