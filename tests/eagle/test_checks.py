"""The example's runners pass every check of `graphkit.testing`, on the batches of a run as it serves."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphkit as gk
from examples.eagle.batch import Batch
from examples.eagle.engine import Engine
from graphkit.buffers import shape_at
from graphkit.testing import check_all

from .test_speculator import engine_of

CLOSE = 1e-4


def held(runner: gk.GraphRunner, dispatch: gk.Dispatch) -> dict[str, torch.Tensor]:
    """What the step so far has left in the runner's resident buffers."""
    return {
        name: buffer.tensor[
            tuple(slice(0, n) for n in shape_at(buffer.spec.shape, dispatch.sizes))
        ].clone()
        for name, buffer in runner.binding.resident.items()
    }


def check(runner: gk.GraphRunner, batch: Batch, inputs: Mapping[str, Any] | None = None) -> int:
    """Check one runner on this step's batch; how many graphs it took."""
    named = {"reqs": batch.reqs, "tokens": batch.tokens, "query_len": batch.query_len}
    if "tokens" not in runner.dispatcher.dims:
        named = {"reqs": batch.reqs}
    named = {name: value for name, value in named.items() if value is not None}
    dispatch = runner.dispatch(**named)
    assert dispatch.mode is not gk.EAGER
    resident = held(runner, dispatch)
    reports = check_all(
        runner,
        batches=[named],
        inputs=lambda _: inputs or {},
        resident=lambda _: resident,
        context=lambda _: batch,
        rtol=CLOSE,
        atol=CLOSE,
    )
    return len(reports)


def serve(engine: Engine) -> int:
    """Serve a few steps; before each, check what is about to run."""
    engine.add(b"0x7f }{ Zq", 12)
    engine.add(b"if x", 12)
    engine.add(b"The global statement", 9)
    speculator, checked = engine.speculator, 0
    assert speculator is not None
    for step in range(4):
        if step == 2:
            engine.add(b"The with", 9)
        engine.scheduler.admit()
        batch = engine.scheduler.batch()
        checked += check(engine.target.runner, batch, batch.inputs)
        engine.target.run(batch)
        if speculator.propose_all is not None and batch.query_len is not None:
            checked += check(speculator.propose_all, batch)
        else:
            checked += check(speculator.prefill, batch)
            dispatch = speculator.prefill.dispatch(
                reqs=batch.reqs, tokens=batch.tokens, query_len=batch.query_len
            )
            speculator.prefill.run(dispatch, context=batch)
            checked += check(speculator.decode, batch)
        engine.step()
    return checked


@pytest.mark.parametrize(("graphs", "checked"), [("prefill+decode", 12), ("one", 10)])
def test_every_runner_passes_every_check(device, graphs, checked):
    assert serve(engine_of(device, graphs, 3)) == checked


def test_a_careless_pad_is_found(device, monkeypatch):
    """A padded request is known by its -1 drafts; with 0 it writes a token over that of a real row."""
    careless = SimpleNamespace(**{**vars(gk), "relied": lambda value: gk.relied(0)})
    monkeypatch.setattr("examples.eagle.memory.gk", careless)
    with pytest.raises(gk.CheckError, match="REAL: .*'draft_ids'.*differs in row"):
        serve(engine_of(device, "prefill+decode", 3))
