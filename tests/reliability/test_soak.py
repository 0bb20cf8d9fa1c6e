"""The soak of `benchmarks/soak.py`, short: it runs, and it would tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import soak


def test_two_thousand_replays_are_right_and_leave_memory_flat(device: str) -> None:
    # Other tests may be on the device.
    result = soak.run(device, 2_000, is_alone=False)
    assert result["is_right"], result["wrong"]
    assert result["is_flat"], result["memory_growth"]
    assert result["checks"] == 2
    # Each step is a run of one kind or the other, and so is the run that fills the buffer at first.
    assert result["graph_replays"] + result["eager_runs"] == 2_001
    assert result["eager_runs"] >= 20


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "CHECK_EVERY", 20)
    step = soak.Soak.step

    def spoilt(self: soak.Soak, number: int) -> None:
        if number == 81:
            self.buffers.hidden.tensor.add_(1)
        step(self, number)

    monkeypatch.setattr(soak.Soak, "step", spoilt)
    result = soak.run("cpu", 200)
    assert not result["is_right"]
    assert min(result["wrong"]) == 81


def test_memory_that_grows_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    step = soak.Soak.step

    def leaking(self: soak.Soak, number: int) -> None:
        kept.append(torch.ones(1 << 16))
        step(self, number)

    monkeypatch.setattr(soak.Soak, "step", leaking)
    assert not soak.run("cpu", 200)["is_flat"]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--device", "cpu", "--replays", "500", "--out", str(tmp_path)]) == 0
    assert "soak on cpu" in capsys.readouterr().out
    saved: dict[str, Any] = json.loads((tmp_path / "soak.json").read_text())
    assert saved["soak"]["replays"] == 500
    assert saved["environment"]["torch"] == torch.__version__


def test_the_exit_status_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"is_flat": True, "is_right": False}
    monkeypatch.setattr(soak, "run", lambda *a, **k: bad)
    assert soak.main(["--device", "cpu", "--quick"]) == 1
