"""Any groups, any histories: buffers hold what the model says, and results are eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

import graphkit as gk
from graphkit.buffers import shape_text
from graphkit.staging import staging
from graphkit.staging.hostdata import has_numpy, numpy_dtype, tensor_to_numpy
from graphkit.testing import strategies
from tests.properties import model
from tests.properties.bounds import examples

REQS, PAGES = gk.Dim("reqs", 5), gk.Dim("pages", 3)
DIMS = (REQS, PAGES)
WAYS = ("array", "tensor", "strided", "list", "device", "staged host", "staged device")


@attrs.frozen
class RunnerPlan:
    """One runner: its parameters' roles, and its buckets."""

    roles: Mapping[str, str]
    buckets: gk.Buckets
    with_prepare: bool
    ring_depth: int


@attrs.frozen
class Plan:
    """A whole group."""

    specs: Mapping[str, gk.BufferSpec]
    runners: tuple[RunnerPlan, ...]
    checked: bool
    packed_limit: int

    def __str__(self) -> str:
        lines = [f"{name}: {spec}" for name, spec in self.specs.items()]
        lines += [f"{dict(r.roles)} {r.buckets.points} {r.with_prepare}" for r in self.runners]
        return "\n".join(lines)


@attrs.frozen
class Turn:
    """One run: whose, of how many rows, fed in which ways, with which contents."""

    runner: int
    sizes: Mapping[str, int]
    ways: tuple[str, ...]
    seed: int
    produced: bool


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Groups of one to three runners over one to four buffers."""
    count = draw(st.integers(1, 3))
    number = draw(st.integers(1, 4))
    specs = {
        f"b{index}": draw(strategies.buffer_specs(DIMS, packed=count == 1))
        for index in range(number)
    }
    runners = []
    for _ in range(count):
        used = draw(st.lists(st.sampled_from(sorted(specs)), min_size=1, unique=True))
        roles = {name: draw(st.sampled_from(["fed", "fed", "resident"])) for name in used}
        runners.append(
            RunnerPlan(
                roles,
                draw(strategies.bucket_sets(REQS, PAGES)),
                draw(st.booleans()),
                draw(st.sampled_from([1, 2, 3, 8])),
            )
        )
    return Plan(specs, tuple(runners), draw(st.booleans()), draw(st.sampled_from([1 << 20, 0, 24])))


@st.composite
def turns(draw: st.DrawFn, runners: int) -> Turn:
    """One run of one of so many runners."""
    return Turn(
        draw(st.integers(0, runners - 1)),
        draw(strategies.sizes_of(DIMS)),
        tuple(draw(st.lists(st.sampled_from(WAYS), min_size=4, max_size=4))),
        draw(st.integers(0, 1000)),
        draw(st.booleans()),
    )


histories = plans().flatmap(
    lambda plan: st.tuples(
        st.just(plan), st.lists(turns(len(plan.runners)), min_size=1, max_size=6)
    )
)


def contents(spec: gk.BufferSpec, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random small values that every dtype holds."""
    generator = np.random.default_rng(seed)
    values = generator.integers(0, 2 if spec.dtype is torch.bool else 8, shape)
    return torch.from_numpy(np.asarray(values)).to(spec.dtype)


class Harness:
    """The group of a plan, and a shadow of each of its buffers."""

    def __init__(self, plan: Plan, device: str) -> None:
        self.device = device
        self.group = gk.GraphGroup(device, checked=plan.checked)
        self.specs = plan.specs
        self.group.buffers.declare(**plan.specs)
        with mock.patch.object(staging, "PACKED_LIMIT", plan.packed_limit):
            self.runners = [self._runner(index, item) for index, item in enumerate(plan.runners)]
        self.group.capture()
        self.shadows = {
            name: model.Shadow(spec, self.group.buffers[name].tensor)
            for name, spec in plan.specs.items()
        }

    def _runner(self, index: int, plan: RunnerPlan) -> gk.GraphRunner:
        def fn(**views: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: view.clone() for name, view in views.items()}

        roles = {"fed": gk.Fed, "resident": gk.Resident}
        inputs = {name: roles[role](name) for name, role in plan.roles.items()}
        counts = {"count_reqs": gk.Count(REQS), "count_pages": gk.Count(PAGES)}
        outputs = {
            name: gk.Output(self.specs[name].shape, self.specs[name].dtype) for name in inputs
        }
        outputs |= {name: gk.Output((), torch.int32) for name in counts}
        return self.group.runner(
            f"r{index}",
            fn,
            policy=gk.Policy.full(plan.buckets),
            inputs={**inputs, **counts},
            outputs=outputs,
            prepare=(lambda step: None) if plan.with_prepare else None,
            ring_depth=plan.ring_depth,
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        """Bit for bit, what all buffers hold."""
        return {
            name: self.group.buffers[name].tensor.clone().reshape(-1).view(torch.uint8)
            if self.group.buffers[name].tensor.numel()
            else torch.empty(0)
            for name in self.specs
        }

    def turn(self, turn: Turn, plan: RunnerPlan) -> None:
        """Run once, and compare buffers and results with the model."""
        runner = self.runners[turn.runner]
        dispatch = runner.dispatch(**turn.sizes)
        bucket = turn.sizes if dispatch.bucket is None else dispatch.bucket.sizes
        batches: dict[str, torch.Tensor] = {}
        for place, (name, role) in enumerate(plan.roles.items()):
            spec = self.specs[name]
            shape = model.shape_of(spec, turn.sizes)
            batches[name] = contents(spec, shape, turn.seed + place)
            if role == "resident" and turn.produced:
                # A producer wrote the rows, where the consumer's view has them.
                view = self.group.buffers[name].view(bucket)
                rows = view[tuple(slice(0, size) for size in shape)]
                rows.copy_(batches[name].to(self.device))
                written = self.shadows[name].read(bucket) | model.elements(batches[name])
                self.shadows[name].write(bucket, written)
        given = self._feed(runner, dispatch, plan, turn, batches)
        out = runner.run(dispatch, given)
        for name, role in plan.roles.items():
            spec, shadow = self.specs[name], self.shadows[name]
            before = shadow.read(bucket)
            batch = model.elements(batches[name]) if role == "fed" else before
            real = model.shape_of(spec, turn.sizes)
            held = model.padded(
                batch, before, model.shape_of(spec, bucket), real, spec.pads, spec.dtype,
                fed=role == "fed",
            )  # fmt: skip
            shadow.write(bucket, held)
            expected = {index: held[index] for index in model.places(real)}
            model.assert_holds(model.elements(out[name]), expected, f"result {name}")
        for name, shadow in self.shadows.items():
            shadow.settle(self.group.buffers[name].tensor, f"{dispatch}: buffer {name}")
        for dim in DIMS:
            assert out[f"count_{dim.name}"].item() == turn.sizes[dim.name]

    def _feed(
        self,
        runner: gk.GraphRunner,
        dispatch: gk.Dispatch,
        plan: RunnerPlan,
        turn: Turn,
        batches: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        given: dict[str, Any] = {}
        in_place: list[tuple[str, str]] = []
        fed = [name for name, role in plan.roles.items() if role == "fed"]
        for name, way in zip(fed, turn.ways, strict=False):
            batch = batches[name]
            exact = has_numpy(batch.dtype)
            if way.startswith("staged"):
                # Memory that is copied on its own has no place on the host.
                in_place.append((name, way))
            elif way == "array" and exact:
                given[name] = batch.numpy()
            elif way == "list" and exact and batch.numel():
                given[name] = batch.tolist()
            elif way == "device":
                given[name] = batch.to(self.device)
            elif way == "strided" and batch.ndim:
                given[name] = batch.repeat_interleave(2, 0)[::2] if exact else batch
            else:
                given[name] = batch
        if not in_place:
            return given
        with runner.stage(dispatch) as stage:
            for name, way in in_place:
                if way == "staged host" and name in stage.host:
                    stage.host[name][...] = tensor_to_numpy(batches[name])
                else:
                    stage.views[name].copy_(batches[name].to(self.device))
        return given


@examples(40, shrinks=False)
@given(case=histories)
def test_buffers_hold_the_batch_and_its_pads_after_any_history(
    case: tuple[Plan, list[Turn]], device: str
) -> None:
    plan, history = case
    note(str(plan))
    harness = Harness(plan, device)
    for turn in history:
        harness.turn(turn, plan.runners[turn.runner])
    harness.group.close()


BAD: dict[str, Any] = {
    "another dtype": lambda batch: batch.to(torch.complex64),
    "another shape": lambda batch: torch.zeros((*batch.shape, 2), dtype=batch.dtype),
    "text": lambda batch: "x",
    "nothing": lambda batch: None,
    "an object": lambda batch: object(),
}


@examples(18, shrinks=False)
@given(case=histories, data=st.data())
def test_nothing_is_staged_if_an_input_is_wrong(
    case: tuple[Plan, list[Turn]], data: st.DataObject, device: str
) -> None:
    plan, history = case
    note(str(plan))
    harness = Harness(plan, device)
    for turn in history:
        role = plan.runners[turn.runner]
        runner = harness.runners[turn.runner]
        fed = [name for name, kind in role.roles.items() if kind == "fed"]
        dispatch = runner.dispatch(**turn.sizes)
        given = {
            name: contents(harness.specs[name], model.shape_of(harness.specs[name], turn.sizes), 1)
            for name in fed
        }
        before = harness.buffers()
        mistakes = ["unknown", *(["missing", *BAD] if fed else [])]
        mistake = data.draw(st.sampled_from(mistakes))
        if mistake == "unknown":
            given["nobody"] = 1
        else:
            name = data.draw(st.sampled_from(fed))
            if mistake == "missing":
                del given[name]
            else:
                given[name] = BAD[mistake](given[name])
        with pytest.raises(gk.InputError, match=f"runner 'r{turn.runner}'"):
            runner.run(dispatch, given)
        after = harness.buffers()
        assert all(torch.equal(before[name], after[name]) for name in before)
        harness.turn(turn, role)
    harness.group.close()


@examples(15, shrinks=False)
@given(case=histories)
def test_a_replay_is_eager_on_the_same_batch(case: tuple[Plan, list[Turn]], device: str) -> None:
    """Two groups, one captured and one not, give the same bits for the same inputs."""
    plan, history = case
    plan = attrs.evolve(
        plan,
        specs={
            n: attrs.evolve(s, layout="strided", pad=dict(s.pad)) for n, s in plan.specs.items()
        },
        runners=tuple(attrs.evolve(r, roles=dict.fromkeys(r.roles, "fed")) for r in plan.runners),
    )

    def work(**views: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            name: _row_wise(view) for name, view in views.items() if not name.startswith("count_")
        }

    results = []
    for captured in (True, False):
        group = gk.GraphGroup(device)
        group.buffers.declare(**plan.specs)
        runners = [
            group.runner(
                f"r{index}",
                work,
                policy=gk.Policy.full(item.buckets),
                inputs={
                    **{name: gk.Fed(name) for name in item.roles},
                    # So that the runner has both dims, whatever its buffers are.
                    "count_reqs": gk.Count(REQS),
                    "count_pages": gk.Count(PAGES),
                },
                outputs={
                    n: gk.Output(plan.specs[n].shape, _result_dtype(plan.specs[n].dtype))
                    for n in item.roles
                },
            )
            for index, item in enumerate(plan.runners)
        ]
        if captured:
            group.capture()
        found = []
        for turn in history:
            runner = runners[turn.runner]
            dispatch = runner.dispatch(**turn.sizes)
            if not captured:
                assert dispatch.mode is gk.EAGER
            given = {
                name: contents(
                    plan.specs[name], model.shape_of(plan.specs[name], turn.sizes), turn.seed
                )
                for name in plan.runners[turn.runner].roles
            }
            found.append(runner.run(dispatch, given, clone=True))
        results.append(found)
        group.close()
    for graphed, eager in zip(*results, strict=True):
        assert graphed.keys() == eager.keys()
        for name, tensor in graphed.items():
            assert tensor.dtype is eager[name].dtype
            assert torch.equal(tensor, eager[name]), shape_text(plan.specs[name].shape)


def _result_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if has_numpy(dtype) else torch.float32


def _row_wise(view: torch.Tensor) -> torch.Tensor:
    wide = view.to(_result_dtype(view.dtype))
    return torch.where(wide > 2, wide * 3, wide - 1).abs()


@pytest.mark.gpu
@examples(15, shrinks=False)
@given(case=histories)
def test_no_run_allocates_device_memory(case: tuple[Plan, list[Turn]]) -> None:
    plan, history = case
    harness = Harness(plan, "cuda")
    given = []
    for turn in history:
        roles = plan.runners[turn.runner].roles
        fed = [name for name, role in roles.items() if role == "fed"]
        given.append(
            {
                name: _in_memory(
                    contents(
                        plan.specs[name], model.shape_of(plan.specs[name], turn.sizes), turn.seed
                    ),
                    way,
                )
                for name, way in zip(fed, turn.ways, strict=False)
            }
        )
    torch.cuda.synchronize()

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    for turn, inputs in zip(history, given, strict=True):
        runner = harness.runners[turn.runner]
        dispatch = runner.dispatch(**turn.sizes)
        before = allocations()
        runner.run(dispatch, inputs)
        if dispatch.mode is not gk.EAGER:
            assert allocations() == before
    harness.group.close()


def _in_memory(batch: torch.Tensor, way: str) -> Any:
    if way in ("device", "staged device"):
        return batch.to("cuda")
    if way == "array" and has_numpy(batch.dtype):
        return batch.numpy().astype(numpy_dtype(batch.dtype))
    return batch


def test_a_dispatch_is_run_where_a_stage_was_left_by_an_exception(device: str) -> None:
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((REQS,), torch.int32, pad=-1))
    runner = group.runner("r", lambda x: x * 1, policy=gk.Policy.full(gk.Buckets.powers(REQS)))
    group.capture()
    dispatch = runner.dispatch(reqs=3)
    with contextlib.suppress(KeyError), runner.stage(dispatch) as stage:
        stage.host["x"][...] = 5
        raise KeyError
    with pytest.raises(gk.InputError, match="input 'x' is missing"):
        runner.run(dispatch)
    assert runner.run(dispatch, x=[1, 2, 3]).tolist() == [1, 2, 3]
