from __future__ import annotations

import copy

import pytest
import torch

import graphkit as gk
from graphkit.outputs.leases import Lease, LeasedTensor, with_lease


class Memory:
    generation = 0


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def leased(memory):
    return with_lease(torch.arange(6.0).reshape(2, 3), Lease("it", lambda: memory.generation))


VIEWS = {
    "index": lambda t: t[0],
    "slice": lambda t: t[:, 1:],
    "view": lambda t: t.view(-1),
    "transposed": lambda t: t.t(),
    "property": lambda t: t.T,
    "split": lambda t: t.split(1)[1],
    "unbind": lambda t: t.unbind()[0],
    "detach": lambda t: t.detach(),
    "in place": lambda t: t.add_(1),
    "function": lambda t: torch.narrow(t, 0, 0, 1),
    "chunks": lambda t: torch.chunk(t, 2)[0],
    "view of a view": lambda t: t[0][1:],
}
RESULTS = {
    "sum": lambda t: t + 1,
    "clone": lambda t: t.clone(),
    "named": lambda t: t.max(dim=0).values,
    "concatenated": lambda t: torch.cat([t, t]),
    "stacked": lambda t: torch.stack((t, t)),
    "another": lambda t: torch.add(torch.zeros(2, 3), other=t),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_under_the_same_lease(leased, memory, view):
    seen = VIEWS[view](leased)
    assert isinstance(seen, LeasedTensor)
    seen.tolist()
    memory.generation += 1
    with pytest.raises(gk.StaleOutputError):
        seen.tolist()


@pytest.mark.parametrize("result", RESULTS)
def test_results_are_the_reader_s_own(leased, memory, result):
    made = RESULTS[result](leased)
    assert type(made) is torch.Tensor
    memory.generation += 1
    made.tolist()
    with pytest.raises(gk.StaleOutputError):
        RESULTS[result](leased)


def test_the_message_says_what_to_do(leased, memory):
    memory.generation += 2
    with pytest.raises(
        gk.StaleOutputError,
        match=r"it was read after its lease ended: its memory has been written 2 time\(s\) since. "
        r"Read it before the next run, or take a copy with run\(..., clone=True\)",
    ):
        leased.sum()


@pytest.mark.parametrize(
    "read", [repr, copy.deepcopy, lambda t: t.numpy(), lambda t: t.to(torch.int32), list, bool]
)
def test_every_way_to_read_is_a_read(leased, memory, read):
    one = leased[0, :1]
    memory.generation += 1
    with pytest.raises(gk.StaleOutputError):
        read(one)


def test_a_stale_source_is_refused_too(leased, memory):
    target = torch.zeros(2, 3)
    target.copy_(leased)
    memory.generation += 1
    with pytest.raises(gk.StaleOutputError):
        target.copy_(leased)


def test_two_leases_at_once():
    first, second = Memory(), Memory()
    a = with_lease(torch.ones(2), Lease("a", lambda: first.generation))
    b = with_lease(torch.ones(2), Lease("b", lambda: second.generation))
    view = torch.broadcast_tensors(a, b)
    second.generation += 1
    assert view[0].tolist() == [1, 1]
    with pytest.raises(gk.StaleOutputError, match="b was read"):
        a + b


def test_a_stale_output_is_no_input():
    batch = gk.Dim("batch", 4)
    group = gk.GraphGroup("cpu", checked=True)
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.float32, pad=0))
    runner = group.runner("r", lambda x: x + 1, policy=gk.Policy.full(gk.Buckets.powers(batch)))
    group.capture()
    dispatch = runner.dispatch(batch=2)
    out = runner.run(dispatch, x=[1.0, 2.0])
    assert runner.run(dispatch, x=out).tolist() == [3.0, 4.0]
    with pytest.raises(gk.StaleOutputError, match="runner 'r', its output was read after"):
        runner.run(dispatch, x=out)
