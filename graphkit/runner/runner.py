"""A runner: one function with its policy, its buckets and its outputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.buffers import Buffers
from graphkit.capture.baked import same
from graphkit.capture.piecewise import launcher
from graphkit.capture.watch import check_fingerprints
from graphkit.checking.check import Check
from graphkit.checking.differences import Tolerance
from graphkit.checking.findings import CheckReport, Finding
from graphkit.checking.trials import OTHER_CONTENTS, Trials
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import PIECEWISE, Dispatch, Mode, Policy, Reason
from graphkit.errors import (
    CheckError,
    ConcurrentRunError,
    InputError,
    StaleGraphError,
    StateError,
)
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.core import RunnerCore
from graphkit.runner.options import RunnerOptions
from graphkit.runner.shared import Shared, busy
from graphkit.runner.step import Phase, Step, in_body
from graphkit.staging.layout import Plan
from graphkit.staging.stage import Stage
from graphkit.staging.staging import MAX_PLANS


class RunPlan:
    """Everything about running one dispatch that doesn't change from step to step."""

    __slots__ = ("dispatch", "entry", "launch", "plan", "results", "step")

    def __init__(
        self, dispatch: Dispatch, entry: BucketGraph | None, plan: Plan, depth: int
    ) -> None:
        self.dispatch = dispatch
        self.entry = entry
        self.plan = plan
        self.results: list[Any] = [None] * depth
        self.step: Step | None = None
        self.launch: Callable[[], None] = _nothing if entry is None else entry.launch


def _nothing() -> None:
    """What an EAGER run launches."""


class GraphRunner(RunnerCore):
    """One function that is captured for buckets and replayed for batches. Made by `GraphGroup.runner`.

    Attributes:
        name: for messages and the report.
        dispatch: see `Dispatcher.dispatch`; pure Python, a third of a microsecond for a batch seen before.
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
        self._is_compared = False

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
            next run of a runner that writes or pads their memory.

        Raises:
            InputError: an input is wrong; nothing was staged.
            StateError: the group is closed or released; or the graph is to be captured now, and can't be here.
            StaleGraphError: watched memory has moved.
            ConcurrentRunError: a run of the group is under way.
        """
        if inputs is not None:
            named = inputs if type(inputs) is dict and not named else self._merged(inputs, named)
        if clone is not False and clone is not True:
            raise InputError(f"runner {self.name!r}: clone must be True or False, got {clone!r}")
        shared = self.shared
        if not shared.lock.acquire(False):
            raise ConcurrentRunError(busy(f"runner {self.name!r}"))
        # The lock is taken by hand, and everything looked up: a step has no time for more.
        try:
            plan = self._plans.get(dispatch) if type(dispatch) is Dispatch else None
            if plan is None:
                plan = self._make_plan(dispatch)
            if self._stream_key() != shared.last_stream:
                shared.order_on_stream()
            if shared.checked:
                named = self._compare_now_and_then(plan, named, context)
            if self._pending is not None:
                named = self._take_stage(dispatch, named)
            staged = self.staging.write(plan.plan, named)
            entry = plan.entry
            if entry is None:
                return self._run_eager(plan, staged, context, clone)
            if shared.checked or entry.replays == 0:
                self._check_before_replay(entry)
            step = plan.step
            if step is not None:
                step.context = context
                step.host = staged.hosted
                self.prepare_host(step)
            if shared.checked:
                self.check_producers(entry.layout.views, dispatch.sizes, entry.where)
            if entry.set_source is None:
                self.staging.move(plan.plan, staged)
            else:
                entry.set_source[staged.index]()
                if staged.from_device:
                    self.staging.move_from_device(plan.plan, staged)
            if shared.checked:
                # Not before the inputs are read, which may be what an earlier run returned.
                self.end_leases(replay=True, slot=self.results.turn)
                self.results.poison()
            if entry.set_targets is not None:
                for set_target in entry.set_targets[self.results.turn]:
                    set_target()
            # The first of the graphs reads the ring's slot, also if it fails half-way.
            try:
                if self.has_prepare:
                    entry.unpack()
                else:
                    plan.launch()
            finally:
                if entry.set_source is not None:
                    self.staging.ring.commit()
            if step is not None and self.has_prepare:
                self._prepare_replay(step, entry)
                plan.launch()
            entry.replays += 1
            return self._result(plan, entry, clone)
        finally:
            shared.lock.release()

    @contextlib.contextmanager
    def stage(self, dispatch: Dispatch) -> Iterator[Stage]:
        """Fill a batch's inputs in place: ``with runner.stage(d) as s: s.host["ids"][:] = ids``, then ``run(d)``.

        What was asked for from `s.host` or `s.views` counts as given to the next `run` of this dispatch; other inputs
        are given to `run` as ever. A block left by an exception stages nothing.

        Raises:
            StateError: another such block of this runner is open, or the group is closed or released. A run of this
                runner inside the block raises it too.
        """
        shared = self.shared
        if not shared.lock.acquire(blocking=False):
            raise ConcurrentRunError(busy(f"runner {self.name!r}"))
        try:
            self._refuse_open_stage()
            plan = self._plans.get(dispatch) or self._make_plan(dispatch)
            slot = self.staging.open_slot(plan.plan)
            host = {target.name: target.rows for target in slot.targets}
            self._pending = stage = Stage(dispatch, host, plan.plan.rows)
        finally:
            shared.lock.release()
        try:
            yield stage
            stage.check(self.name)
        except BaseException:
            self._pending = None
            raise
        finally:
            stage.is_open = False

    def drop_stage(self) -> None:
        """Forget what was staged in place: something else is about to be written there."""
        self._pending = None

    def _refuse_open_stage(self) -> None:
        if self._pending is not None and self._pending.is_open:
            raise StateError(
                f"runner {self.name!r}: a stage() block of it is open, whose memory this would overwrite; leave "
                "the block first"
            )

    def _take_stage(self, dispatch: Dispatch, named: dict[str, Any]) -> dict[str, Any]:
        self._refuse_open_stage()
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
                f"another runner's: {list(dispatch.sizes)}"
            )
        for name, size in dispatch.sizes.items():
            maximum = self.dispatcher.dims[name].maximum
            if size > maximum:
                raise InputError(
                    f"runner {self.name!r}: this dispatch is of another runner's: {name}={size} is above the maximum "
                    f"{maximum} of dim {name!r} here"
                )
        entry: BucketGraph | None = None
        sizes: Mapping[str, int] = dispatch.sizes
        if dispatch.bucket is not None:
            entry = self._entries.get((dispatch.mode, dispatch.bucket))
            if entry is None or not entry.is_captured:
                entry = self._capture_now(dispatch, dispatch.bucket)
            if entry is not None:
                sizes = dispatch.bucket.sizes
        answer = dispatch
        if dispatch.bucket is not None and entry is None:
            answer = self.dispatcher.fall_back(dispatch, Reason.NOT_CAPTURED)
        staged = self.staging.plan(self.staging.layout(sizes), dispatch.sizes)
        plan = RunPlan(answer, entry, staged, self.results.depth)
        if entry is not None and (
            self.has_prepare or self.options.prepare_host is not None or entry.has_breaks
        ):
            plan.step = Step(dispatch, Phase.REPLAY, entry.layout.views, {}, None, entry.state)
            plan.step.prepared = entry.baked
        if entry is not None and entry.mode is PIECEWISE:
            step = plan.step if entry.has_breaks else None
            plan.launch = launcher(entry.pieces(dispatch.sizes), step)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[dispatch] = plan
        return plan

    def _capture_now(self, dispatch: Dispatch, bucket: Bucket) -> BucketGraph | None:
        """Capture what was dispatched to, where graphs are captured at their first use; None if that failed.

        Raises:
            StateError: graphs are captured ahead; or the inputs were staged in memory that an example has now.
        """
        capture = self.shared.capture_now
        if capture is None or not self.dispatcher.is_captured(dispatch.mode, bucket):
            raise StateError(
                f"runner {self.name!r}: {dispatch} was dispatched to a graph that isn't there now; dispatch again"
            )
        self._refuse_open_stage()
        staged, self._pending = self._pending, None
        entry = self.entry_of(dispatch.mode, bucket)
        is_there = capture(entry)
        if staged is not None and staged.dispatch is dispatch:
            raise StateError(
                f"runner {self.name!r}: the graph of {dispatch} was given up for others after the inputs were staged, "
                "and is captured anew, which takes their memory; stage them again"
            )
        return entry if is_there else None

    def _check_before_replay(self, entry: BucketGraph) -> None:
        if entry.reads:
            check_fingerprints(self.options.reads, entry.reads, entry.where)
        moved = entry.moved_buffer()
        if moved is not None:
            raise StaleGraphError(
                f"{entry.where}: buffer {moved!r} lies elsewhere than at the capture; the graph reads and writes the "
                "old memory. Write into the buffer's tensor, and never resize or replace its storage"
            )
        difference = entry.ambient_difference()
        if difference is not None:
            raise StateError(
                f"{entry.where}: {difference}; run under the modes of the capture, or capture under these"
            )

    def _prepare_replay(self, step: Step, entry: BucketGraph) -> None:
        made = self.made_by_prepare(step)
        step.prepared = entry.baked if made is None else made
        if made is not None and self.shared.checked:
            self._check_baked(made, entry)

    def _check_baked(self, made: Mapping[str, Any], entry: BucketGraph) -> None:
        for name, value in made.items():
            baked = entry.baked.get(name)
            if entry.mode is PIECEWISE and not _is_plain(value):
                # An object that breaks take from current_run(), where it is this step's.
                continue
            if not same(value, baked):
                raise StateError(
                    f"{entry.where}: prepare returned {name}={value!r} at a replay, and {baked!r} is baked "
                    "into the graph; write into the same tensor, keep it in step.state, or make it a variant"
                )

    def _run_eager(self, plan: RunPlan, staged: Any, context: Any, clone: bool) -> Any:
        layout = plan.plan.layout
        step = Step(plan.dispatch, Phase.EAGER, layout.views, staged.hosted, context, {})
        self.prepare_host(step)
        if self.shared.checked:
            self.end_leases(replay=False)
        with torch.no_grad():
            self.staging.move(plan.plan, staged)
            self.staging.unpack_exact(layout, staged)
            values = self.arguments(layout.views, plan.dispatch.variant)
            values.update(self.prepare(step))
            inspection = self.shared.inspection
            with in_body(step):
                if inspection is None:
                    result = self.binding.call(self.fn, values)
                else:
                    call = functools.partial(self.binding.call, self.fn, dict(values))
                    result = inspection.eager_run(call, values)
            self.eager_runs += 1
            bound = self.results.bind_eager(plan.dispatch, result, clone=clone)
            return self.leased(bound) if self.shared.checked and not clone else bound

    def _result(self, plan: RunPlan, entry: BucketGraph, clone: bool) -> Any:
        results = self.results
        slot = 0
        if entry.set_targets is not None:
            slot = results.turn
            results.turn = slot + 1 if slot + 1 < results.depth else 0
        if clone or self.shared.checked:
            if clone and results.any_on_host:
                self.backend.synchronize()
            return results.views(plan.dispatch, entry, clone=clone, slot=slot)
        known = plan.results[slot]
        if known is not None:
            return known
        result = results.views(plan.dispatch, entry, clone=False, slot=slot)
        # A dict or list is the caller's to change, so that it is made afresh each time.
        if isinstance(result, torch.Tensor) or (
            type(result) is tuple and all(isinstance(leaf, torch.Tensor) for leaf in result)
        ):
            plan.results[slot] = result
        return result

    # -- checking ---------------------------------------------------------------------------------

    def check(
        self,
        dispatch: Dispatch,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        context: Any = None,
        resident: Mapping[str, Any] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        raise_on_failure: bool = True,
        **named: Any,
    ) -> CheckReport:
        """Prove one bucket, for one batch: that its graph computes what the function does, and nothing else.

        The graph's results are compared with the function's on the same padded buffers, bit by bit, and on the batch
        alone, within tolerances; they must not depend on what buffers hold beyond the batch, nor on what ran before.
        Compared are outputs, the batch's rows of all buffers, and declared state. Each of some ten runs starts from the
        same buffers, state and random generators, which are as before afterwards; so are the counts of replays and
        eager runs. Leases on earlier outputs end. The whole of each `mutates` tensor is copied: check with a cache that
        the device can hold twice.

        Args:
            dispatch: what `dispatch` of this runner answered, FULL or PIECEWISE.
            inputs: as `run` takes them; more may be given by keyword.
            context: reaches prepare and eager breaks as it is, in every run of this batch.
            resident: parameter -> the batch's rows of a resident buffer; by default what it holds.
            rtol: relative tolerance at the real size; by default what `torch.testing.assert_close` takes for the dtype.
            atol: absolute tolerance, likewise.
            raise_on_failure: raise where the check fails, or only report it.

        Returns:
            What was found; also what fails nothing, as that random numbers are drawn.

        Raises:
            CheckError: the check failed; its message is the report's text, and its `report` the report.
            StateError: the dispatch is EAGER, and there is no graph to check; or what `run` raises it for.
            InputError: as from `run`.
            Exception: what the function raises.
        """
        if inputs is not None:
            named = self._merged(inputs, named)
        where = f"runner {self.name!r}"
        if resident is not None and not isinstance(resident, Mapping):
            raise InputError(f"{where}: resident must map names to values, got {resident!r}")
        if not isinstance(raise_on_failure, bool):
            raise InputError(
                f"{where}: raise_on_failure must be True or False, got {raise_on_failure!r}"
            )
        with self._tried(dispatch, named, context, resident or {}) as trials:
            report = Check(trials, Tolerance(rtol=rtol, atol=atol)).report()
        if raise_on_failure and not report.passed:
            raise CheckError(str(report), report=report)
        return report

    def verify(self, entry: BucketGraph) -> tuple[Finding, ...]:
        """Replay other contents than those of the capture, and compare with an eager call; what differs.

        So shows what a capture can't see, as work outside of PyTorch's operations.
        """
        fed, resident = self.example_batch(entry.bucket, OTHER_CONTENTS)
        with self._tried(entry.dispatch, fed, None, resident) as trials:
            return Check(trials, Tolerance()).against_eager()

    def _compare_now_and_then(
        self, plan: RunPlan, inputs: dict[str, Any], context: Any
    ) -> dict[str, Any]:
        """In checked mode, before the 1st, 10th, 100th replay of a bucket, compare it with an eager call.

        Not where prepare or breaks would run more often than the caller expects, nor for what is staged in place.

        Returns:
            The inputs to run with: they may lie in what the comparison has overwritten.
        """
        entry, options = plan.entry, self.options
        if entry is None or str(entry.replays + 1).strip("0") != "1" or self._is_compared:
            return inputs
        if (
            self.has_prepare
            or options.prepare_host is not None
            or entry.has_breaks
            or self._pending
        ):
            return inputs
        # What is wrong is refused here, before earlier outputs are overwritten.
        self._check_before_replay(entry)
        self.staging.write(plan.plan, inputs)
        inputs = {name: _own(value) for name, value in inputs.items()}
        with self.shared.lending(), self._trials(plan, inputs, context, {}) as trials:
            findings = Check(trials, Tolerance()).against_eager()
        if findings:
            raise CheckError(f"{entry.where}: {findings[0].message}")
        # The comparison's own runs must not fill the ring for the caller's.
        self.staging.settle()
        return inputs

    @contextlib.contextmanager
    def _tried(
        self,
        dispatch: Dispatch,
        inputs: Mapping[str, Any],
        context: Any,
        resident: Mapping[str, Any],
    ) -> Iterator[Trials]:
        """Runs of one batch, after which everything is as it was."""
        with self.shared.lent(f"check of runner {self.name!r}"):
            self._refuse_open_stage()
            self.drop_stage()
            plan = self._plans.get(dispatch) or self._make_plan(dispatch)
            with self._trials(plan, inputs, context, resident) as trials:
                yield trials

    @contextlib.contextmanager
    def _trials(
        self,
        plan: RunPlan,
        inputs: Mapping[str, Any],
        context: Any,
        resident: Mapping[str, Any],
    ) -> Iterator[Trials]:
        if plan.entry is None:
            raise StateError(
                f"runner {self.name!r}: {plan.dispatch} has no graph, so that there is nothing to check; give a batch "
                "that a captured bucket takes"
            )
        if self._stream_key() != self.shared.last_stream:
            self.shared.order_on_stream()
        inputs = {name: _own(value) for name, value in inputs.items()}
        resident = {name: _own(value) for name, value in resident.items()}
        if self.shared.checked:
            # What earlier runs returned is about to be overwritten.
            self.end_leases(replay=True, slot=self.results.turn)
        trials = Trials(
            self, plan.dispatch, plan.entry, plan.plan, inputs, context=context, resident=resident
        )
        self._is_compared = True
        try:
            with self.results.host_kept(), torch.no_grad():
                yield trials
        finally:
            self._is_compared = False
            trials.finish()

    # -- capture, called by the group -------------------------------------------------------------

    def entry(self, mode: Mode, bucket: Bucket) -> BucketGraph | None:
        """The one for this graph, if a capture has needed it; asking allocates nothing."""
        return self._entries.get((mode, bucket))

    @property
    def entries(self) -> tuple[BucketGraph, ...]:
        """One for each graph of the policy, in its order; made at first use."""
        return tuple([self.entry_of(mode, bucket) for mode, bucket in self.dispatcher.graphs])

    def entry_of(self, mode: Mode, bucket: Bucket) -> BucketGraph:
        """The one for this graph; made at first use."""
        entry = self._entries.get((mode, bucket))
        if entry is None:
            entry = self._entries[mode, bucket] = BucketGraph(self, mode, bucket)
        return entry

    def settle_outputs(self) -> None:
        """Infer what isn't declared from the warm-ups of all buckets, and allocate the static outputs."""
        if not self.dispatcher.captured:
            # No graph writes by what was inferred before.
            self.results.forget_inferred()
        seen = [entry for entry in self._entries.values() if entry.samples]
        self.results.settle(seen, self.dispatcher.dims.values(), self.uniform_lengths())
        self.check_factors(self.results.outputs)

    def mark_captured(self, entry: BucketGraph) -> None:
        """A graph of this runner is there: dispatch to it."""
        if not self.dispatcher.is_captured(entry.mode, entry.bucket):
            self.dispatcher.mark_captured(entry.mode, entry.bucket)
            self._plans.clear()

    def drop_graph(self, entry: BucketGraph, failure: str) -> None:
        """Release one graph, and say why it isn't there."""
        entry.release()
        entry.failure = failure
        self.dispatcher.forget(entry.mode, entry.bucket)
        self._plans.clear()

    def check_addresses(self) -> None:
        """Raise a `StaleGraphError` if watched memory has moved since a capture."""
        for entry in self._entries.values():
            if entry.is_captured:
                check_fingerprints(self.options.reads, entry.reads, entry.where)

    def drop_plans(self) -> None:
        """Graphs of this runner have gone, which its plans hold."""
        self._plans.clear()

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


def _own(value: Any) -> Any:
    """A copy of an input, which may be a view of what a run returned."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_plain(value: Any) -> bool:
    """Whether segments compute with it: tensors and numbers, in any nesting."""
    plain = (torch.Tensor, np.ndarray, bool, int, float, str)
    return all(leaf is None or isinstance(leaf, plain) for leaf in pytree.tree_leaves(value))
