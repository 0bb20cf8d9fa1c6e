"""A runner: one function with its policy, its buckets and its outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.bucket_graph import BucketGraph
from graphkit.buckets import Bucket
from graphkit.buffers import Buffers
from graphkit.dispatch import PIECEWISE, Dispatch, Mode, Policy
from graphkit.errors import (
    ConcurrentRunError,
    InputError,
    StateError,
)
from graphkit.layout import Plan
from graphkit.options import RunnerOptions
from graphkit.piecewise import launcher
from graphkit.runner_core import RunnerCore
from graphkit.shared import Shared
from graphkit.stage import Stage
from graphkit.step import Phase, Step, in_body, running
from graphkit.watch import Fingerprint, check_fingerprints


class RunPlan:
    """Everything about running one dispatch that doesn't change from step to step."""

    __slots__ = ("dispatch", "entry", "launch", "plan", "result", "step")

    def __init__(self, dispatch: Dispatch, entry: BucketGraph | None, plan: Plan) -> None:
        self.dispatch = dispatch
        self.entry = entry
        self.plan = plan
        self.result: Any = None
        self.step: Step | None = None
        # Without an entry the run is EAGER, and launches nothing.
        self.launch: Callable[[], None] = launcher((), None) if entry is None else entry.launch


class GraphRunner(RunnerCore):
    """One function that is captured for buckets and replayed for batches. Made by `GraphGroup.runner`.

    Attributes:
        name: for messages and the report.
        dispatch: see `Dispatcher.dispatch`; pure Python, about half a microsecond for a batch seen before.
    """

    def __init__(
        self,
        shared: Shared,
        name: str,
        fn: Callable[..., Any],
        policy: Policy,
        options: RunnerOptions,
        buffers: Buffers,
    ) -> None:
        super().__init__(shared, name, fn, policy, options, buffers)
        self.dispatch: Callable[..., Dispatch] = self.dispatcher.dispatch
        self.eager_runs = 0
        self._stream_key = self.backend.stream_key
        self._entries: dict[tuple[Mode, Bucket], BucketGraph] = {}
        self._plans: dict[Dispatch, RunPlan] = {}
        self._pending: Stage | None = None

    # -- running ----------------------------------------------------------------------------------

    def run(
        self,
        dispatch: Dispatch,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        context: Any = None,
        clone: bool = False,
        **named: Any,
    ) -> Any:
        """Stage the inputs, prepare, and launch.

        Args:
            dispatch: what `dispatch` of this runner answered.
            inputs: inputs by name; more may be given by keyword. Each is a NumPy array, a CPU or device tensor, or
                a list or scalar that the buffer's dtype holds exactly, of the batch's real shape.
            context: reaches prepare and eager breaks as it is.
            clone: give independent tensors instead of views under a lease.

        Returns:
            What the function returns, each tensor cut to the batch. The views are overwritten by the
            next run of a runner
            that writes or pads their memory.

        Raises:
            InputError: an input is wrong; nothing was staged.
            StateError: the group is closed or released.
            StaleGraphError: watched memory has moved.
            ConcurrentRunError: a run of the group is under way.
        """
        if inputs is not None:
            named = inputs if type(inputs) is dict and not named else self._merged(inputs, named)
        shared = self.shared
        if not shared.lock.acquire(False):
            raise ConcurrentRunError(
                f"runner {self.name!r}: a run or capture of its group is under way, in another thread or "
                "around this call; "
                f"the graphs of one group share memory and never run at the same time"
            )
        try:
            plan = self._plans.get(dispatch)
            if plan is None:
                plan = self._make_plan(dispatch)
            if self._stream_key() != shared.last_stream:
                shared.order_on_stream()
            if self._pending is not None:
                named = self._take_stage(dispatch, named)
            staged = self.staging.write(plan.plan, named)
            if plan.entry is None:
                return self._run_eager(plan, staged, context, clone)
            entry = plan.entry
            if shared.checked or entry.replays == 0:
                self._check_before_replay(entry)
            step = plan.step
            if step is not None:
                step.context = context
                step.host = staged.hosted
                if self.options.prepare_host is not None:
                    with running(step):
                        self.options.prepare_host(step)
            if shared.checked:
                self.end_leases(replay=True)
            if entry.set_source is None:
                self.staging.move(plan.plan, staged)
            else:
                entry.set_source[staged.index]()
                if staged.from_device:
                    self.staging.move_from_device(plan.plan, staged)
            if self.has_prepare:
                entry.unpack()
                if entry.set_source is not None:
                    self.staging.ring.commit()
                if step is not None:
                    self._prepare_replay(step, entry)
                plan.launch()
            elif entry.set_source is None:
                plan.launch()
            else:
                try:
                    plan.launch()
                finally:
                    self.staging.ring.commit()
            entry.replays += 1
            return self._result(plan, entry, clone)
        finally:
            shared.lock.release()

    @contextlib.contextmanager
    def stage(self, dispatch: Dispatch) -> Iterator[Stage]:
        """Fill a batch's inputs in place: ``with runner.stage(d) as s: s.host["ids"][:] = ids``, then ``run(d)``.

        What was asked for from `s.host` or `s.views` counts as given to the next `run` of this dispatch; other inputs
        are given to `run` as ever. A block left by an exception stages nothing.
        """
        shared = self.shared
        if not shared.lock.acquire(blocking=False):
            raise ConcurrentRunError(f"runner {self.name!r}: a run of its group is under way")
        try:
            plan = self._plans.get(dispatch) or self._make_plan(dispatch)
            self._pending = None
            slot = self.staging.open_slot(plan.plan)
            host = {name: target for name, target, _, _ in slot.targets}
            stage = Stage(dispatch, host, plan.plan.rows)
        finally:
            shared.lock.release()
        yield stage
        stage.check(self.name)
        self._pending = stage

    def _take_stage(self, dispatch: Dispatch, named: dict[str, Any]) -> dict[str, Any]:
        stage, self._pending = self._pending, None
        if stage is None or stage.dispatch is not dispatch:
            return named
        return {**stage.filled(), **named}

    def _merged(self, inputs: Mapping[str, Any], named: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"runner {self.name!r}: inputs must map names to values, got {type(inputs).__name__}"
            )
        twice = inputs.keys() & named.keys()
        if twice:
            raise InputError(f"runner {self.name!r}: {', '.join(sorted(twice))} is given twice")
        return {**inputs, **named}

    def _make_plan(self, dispatch: Dispatch) -> RunPlan:
        self.shared.check_runnable(self.name)
        if not isinstance(dispatch, Dispatch):
            raise InputError(
                f"runner {self.name!r}: run() takes what dispatch() answered, got {dispatch!r}"
            )
        if tuple(dispatch.sizes) != tuple(self.dispatcher.dims):
            raise InputError(
                f"runner {self.name!r} has the dims {list(self.dispatcher.dims)}; this dispatch is of "
                "another runner's: "
                f"{list(dispatch.sizes)}"
            )
        entry: BucketGraph | None = None
        sizes: Mapping[str, int] = dispatch.sizes
        if dispatch.bucket is not None:
            entry = self._entries.get((dispatch.mode, dispatch.bucket))
            if entry is None or not entry.is_captured:
                raise StateError(
                    f"runner {self.name!r}: {dispatch} was dispatched to a graph that isn't there now; dispatch again"
                )
            sizes = dispatch.bucket.sizes
        plan = RunPlan(
            dispatch, entry, self.staging.plan(self.staging.layout(sizes), dispatch.sizes)
        )
        if entry is not None and (
            self.has_prepare or self.options.prepare_host is not None or entry.has_breaks
        ):
            plan.step = Step(dispatch, Phase.REPLAY, entry.layout.views, {}, None, entry.state)
            plan.step.prepared = entry.baked
        if entry is not None and entry.mode is PIECEWISE:
            step = plan.step if entry.has_breaks else None
            plan.launch = launcher(entry.pieces(dispatch.sizes), step)
        if len(self._plans) >= 4096:
            self._plans.clear()
        self._plans[dispatch] = plan
        return plan

    def _check_before_replay(self, entry: BucketGraph) -> None:
        if entry.reads:
            check_fingerprints(self.options.reads, entry.reads, entry.where)
        difference = entry.ambient_difference()
        if difference is not None:
            raise StateError(
                f"{entry.where}: {difference}; run under the modes of the capture, or capture under these"
            )

    def _prepare_replay(self, step: Step, entry: BucketGraph) -> None:
        prepare = self.options.prepare
        if prepare is None:
            return
        with running(step), torch.no_grad():
            made = prepare(step)
        step.prepared = entry.baked if made is None else dict(made)
        # Between segments what prepare returned is live, and so may differ from step to step.
        if made is not None and self.shared.checked and entry.mode is not PIECEWISE:
            self._check_baked(made, entry)

    def _check_baked(self, made: Mapping[str, Any], entry: BucketGraph) -> None:
        for name, value in made.items():
            baked = entry.baked.get(name)
            if not _is_baked(value, baked):
                raise StateError(
                    f"{entry.where}: prepare returned {name}={value!r} at a replay, and {baked!r} is baked "
                    "into the graph; "
                    f"write into the same tensor, keep it in step.state, or make it a variant"
                )

    def _run_eager(self, plan: RunPlan, staged: Any, context: Any, clone: bool) -> Any:
        layout = plan.plan.layout
        step = Step(plan.dispatch, Phase.EAGER, layout.views, staged.hosted, context, {})
        if self.options.prepare_host is not None:
            with running(step):
                self.options.prepare_host(step)
        if self.shared.checked:
            self.end_leases(replay=False)
        with torch.no_grad():
            self.staging.move(plan.plan, staged)
            self.staging.unpack_exact(layout, staged)
            values: dict[str, Any] = {name: layout.views[name] for name in self.binding.passed}
            values.update(
                {
                    name: plan.dispatch.variant[name]
                    for name in self.binding.variants
                    if name in plan.dispatch.variant
                }
            )
            values.update(self.prepare(step))
            with in_body(step):
                result = self.binding.call(self.fn, values)
            self.eager_runs += 1
            return self.results.bind_eager(plan.dispatch, result, clone=clone)

    def _result(self, plan: RunPlan, entry: BucketGraph, clone: bool) -> Any:
        if clone or self.shared.checked:
            if clone and self.results.any_on_host:
                self.backend.synchronize()
            return self.results.views(plan.dispatch, entry, clone=clone)
        if plan.result is not None:
            return plan.result
        result = self.results.views(plan.dispatch, entry, clone=False)
        # A dict or list is the caller's to change, so that it is made afresh each time.
        if isinstance(result, torch.Tensor) or (
            type(result) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in result)
        ):
            plan.result = result
        return result

    # -- capture, called by the group -------------------------------------------------------------

    def entry(self, mode: Mode, bucket: Bucket) -> BucketGraph | None:
        """The one for this graph, if a capture has needed it; asking allocates nothing."""
        return self._entries.get((mode, bucket))

    @property
    def entries(self) -> tuple[BucketGraph, ...]:
        """One for each graph of the policy, in its order; made at first use."""
        for mode, bucket in self.dispatcher.graphs:
            if (mode, bucket) not in self._entries:
                self._entries[mode, bucket] = BucketGraph(self, mode, bucket)
        return tuple(self._entries.values())

    def settle_outputs(self) -> None:
        """Infer what isn't declared from the warm-ups of all buckets, and allocate the static outputs."""
        seen = [entry for entry in self._entries.values() if entry.samples]
        self.results.settle(seen, self.dispatcher.dims.values(), self.uniform_lengths())
        self.check_factors(self.results.outputs)

    def mark_captured(self, entry: BucketGraph) -> None:
        """A graph of this runner is there: dispatch to it."""
        self.dispatcher.mark_captured(entry.mode, entry.bucket)
        self._plans.clear()

    def check_addresses(self) -> None:
        """Raise a `StaleGraphError` if watched memory has moved since a capture."""
        for entry in self._entries.values():
            if entry.is_captured:
                check_fingerprints(self.options.reads, entry.reads, entry.where)

    def drop_graphs(self) -> None:
        """Release all graphs."""
        for entry in self._entries.values():
            entry.release()
        self.dispatcher.clear_captured()
        self._plans.clear()
        self._pending = None

    def drop_memory(self) -> None:
        """Release graphs, staging and static outputs."""
        self.drop_graphs()
        self._entries.clear()
        self.results.forget()
        self.staging.forget()

    def __repr__(self) -> str:
        captured = len(self.dispatcher.captured)
        return f"GraphRunner({self.name!r}, {captured} of {len(self.dispatcher.graphs)} graphs captured)"


def _is_baked(value: Any, baked: Any) -> bool:
    """Whether a graph that has baked one value means the other too: tensors by address, the rest by value."""
    if value is baked:
        return True
    leaves, structure = pytree.tree_flatten(value)
    known, known_structure = pytree.tree_flatten(baked)
    return structure == known_structure and all(map(_is_same_leaf, leaves, known))


def _is_same_leaf(value: Any, baked: Any) -> bool:
    if value is baked:
        return True
    if type(value) is not type(baked):
        return False
    if isinstance(value, torch.Tensor):
        return Fingerprint.of(value) == Fingerprint.of(baked)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, baked)
    return bool(value == baked)
