"""Fixtures that every test shares: the backends, parametrised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest_plugins = ["pytester"]
"""For the tests of graphkit's own plugin."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device that graphs are captured on: "cpu" (the recording backend) and "cuda"."""
    return str(request.param)


@pytest.fixture
def backend(device: str) -> Iterator[object]:
    """Each graph backend, made afresh."""
    if device == "cpu":
        from graphkit.backends.recording import RecordingBackend

        yield RecordingBackend(torch.device("cpu"))
    else:
        from graphkit.backends.cuda import CudaBackend

        yield CudaBackend(torch.device("cuda", 0))
