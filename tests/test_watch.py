from __future__ import annotations

import re

import pytest
import torch

import graphkit as gk
from graphkit.capture.watch import WriteWatch, check_fingerprints, check_reads, fingerprints


def test_sources_are_modules_tensors_and_callables():
    tensor = torch.zeros(2)
    assert check_reads([tensor, torch.nn.Linear(2, 2), lambda: tensor])
    with pytest.raises(gk.SpecError, match="reads= takes modules, tensors and callables that give"):
        check_reads([3])


def test_names_of_what_is_watched():
    model = torch.nn.BatchNorm1d(2)
    found = fingerprints([model, torch.zeros(2), lambda: {"k": [torch.zeros(1), 3]}])
    assert set(found) == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
        "reads[1]", "reads[2]()[0]",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: torch.zeros(8),
        lambda cache: cache[:4],
        lambda cache: cache.view(2, 4),
        lambda cache: cache[::2],
        lambda cache: cache.view(torch.int32),
        lambda cache: None,
    ],
)
def test_what_moved_or_changed_its_shape_is_stale(change):
    cache = {"kv": torch.zeros(8)}
    sources = [lambda: cache["kv"]]
    known = fingerprints(sources)
    check_fingerprints(sources, known, "it")
    cache["kv"].add_(1)
    check_fingerprints(sources, known, "it")
    cache["old"], cache["kv"] = cache["kv"], change(cache["kv"])
    message = (
        rf"it: reads\[0\]\(\)\[0\] was {re.escape(str(known['reads[0]()[0]']))} at the capture and "
        r"is (gone|0x.*) now; the graph reads the old memory. Copy into the old tensor instead, or "
        r"call invalidate\(\) and capture\(\) on the group"
    )
    with pytest.raises(gk.StaleGraphError, match=message):
        check_fingerprints(sources, known, "it")


WRITES = {
    "in place": lambda t: t.add_(1),
    "through a view": lambda t: t[1:].mul_(2),
    "indexed": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "out": lambda t: torch.ones(3, out=t),
    "foreach": lambda t: torch._foreach_add_([t, torch.zeros(1)], 1.0),
    "copied": lambda t: t.copy_(torch.zeros(3)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_memory_from_outside_are_noted(write):
    state = torch.zeros(3)
    with WriteWatch([]) as watch:
        WRITES[write](state)
    (found,) = watch.found.values()
    assert re.match(
        r"aten\..* writes a tensor of shape \(\d,\) at .*test_watch.py:\d+ in ", str(found)
    )


@pytest.mark.parametrize("write", WRITES)
def test_declared_memory_and_memory_made_inside_are_free(write):
    state = torch.zeros(3)
    with WriteWatch([state[:1]]) as watch:
        WRITES[write](state)
        WRITES[write](torch.zeros(3))
        WRITES[write](state.clone())
    assert not watch.found


def test_each_memory_is_noted_once():
    state = torch.zeros(3)
    with WriteWatch([]) as watch:
        for _ in range(3):
            state.add_(1)
            state[:2].zero_()
    assert len(watch.found) == 1


def test_a_view_of_memory_from_outside_is_outside_too():
    state = torch.zeros(4)
    with WriteWatch([]) as watch:
        view = state.view(2, 2).t()
        view.add_(1)
    assert len(watch.found) == 1
