"""Fixtures of the reliability tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import graphkit as gk


@pytest.fixture(autouse=True, scope="package")
def _young_garbage_only() -> Iterator[None]:
    # Each capture collects garbage, and most of the time that takes is for what other tests imported, and for what
    # the first capture imports.
    rows = gk.BufferSpec((gk.Dim("rows", 2),), torch.float32, pad=0)
    with gk.GraphGroup("cpu", checked=True) as group:
        group.wrap(lambda x: x + 1, x=rows)
        group.capture(progress=False)
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        # The count is asked for in each capture, and counting takes longer than all the rest of it.
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield
    gc.unfreeze()
