"""A runner: one function with its policy, its buckets and its outputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.bucket_graph import BucketGraph
from graphkit.buckets import Bucket
from graphkit.buffers import Buffers, shape_text
from graphkit.dims import Affine, Dim, dims_by_name
from graphkit.dispatch import PIECEWISE, Dispatch, Dispatcher, Mode, Policy
from graphkit.errors import (
    CaptureWarning,
    ConcurrentRunError,
    DowngradeWarning,
    InputError,
    SpecError,
    StateError,
)
from graphkit.example import default_example
from graphkit.layout import Plan
from graphkit.mutation import preserve
from graphkit.options import RunnerOptions
from graphkit.outputs import Output, as_outputs, output_dims
from graphkit.parameters import Binding, bind
from graphkit.piecewise import launcher
from graphkit.results import Results
from graphkit.rows import RowInference
from graphkit.stage import Stage
from graphkit.staging import Staging
from graphkit.step import Phase, Step, in_body, running
from graphkit.watch import ExternalWrite, Fingerprint, check_fingerprints

if TYPE_CHECKING:
    from graphkit.group import GraphGroup


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


class GraphRunner:
    """One function that is captured for buckets and replayed for batches. Made by `GraphGroup.runner`.

    Attributes:
        name: for messages and the report.
        dispatch: see `Dispatcher.dispatch`; pure Python, about half a microsecond for a batch seen before.
    """

    def __init__(
        self,
        group: GraphGroup,
        name: str,
        fn: Callable[..., Any],
        policy: Policy,
        options: RunnerOptions,
        buffers: Buffers,
    ) -> None:
        self.name = name
        self.fn = fn
        self.options = options
        self.backend = group.backend
        self._group = group
        self._buffers = buffers
        self.policy, self.downgrades = policy.resolve(options.supports)
        for downgrade in self.downgrades:
            warnings.warn(f"runner {name!r}: {downgrade}", DowngradeWarning, stacklevel=4)
        axes = [route.variants.axes for route in policy.routes if route.variants is not None]
        variants = list(dict.fromkeys(axis for route_axes in axes for axis in route_axes))
        self.binding: Binding = bind(
            fn,
            buffers,
            inputs=options.inputs,
            variants=variants,
            has_prepare=options.prepare is not None or options.prepare_host is not None,
        )
        if self.binding.by_prepare and options.prepare is None:
            raise SpecError(
                f"runner {name!r}: {', '.join(self.binding.by_prepare)} must come from prepare, and there "
                "is only prepare_host"
            )
        declared = as_outputs(options.outputs)
        used = [d for b in self.binding.buffers.values() for d in b.spec.dims]
        used += [*self.binding.counts.values(), *self.policy.dims.values()]
        self.dims: Mapping[str, Dim] = dims_by_name([*used, *output_dims(declared)])
        self._check_factors(declared)
        self.dispatcher = Dispatcher(
            self.policy, self.dims, captured=(), strict=options.strict, name=name
        )
        self.dispatch: Callable[..., Dispatch] = self.dispatcher.dispatch
        self.staging = Staging(
            name,
            self.backend,
            self.binding,
            tuple(self.dispatcher.dims.values()),
            ring_depth=options.ring_depth,
            checked=group.checked,
            writes_host=options.prepare_host is not None,
        )
        largest = {
            name: max((bucket.sizes[name] for _, bucket in self.dispatcher.graphs), default=0)
            for name in self.dispatcher.dims
        }
        self.results = Results(
            name,
            declared,
            largest,
            self.backend.device,
            self.backend.host_empty,
            checked=group.checked,
        )
        self.moves_in_graph = self.staging.has_span and self.backend.copies_in_graph
        self._stream_key = self.backend.stream_key
        self.has_prepare = options.prepare is not None
        self.watches_writes = group.checked or self.backend.name == "recording"
        self._entries: dict[tuple[Mode, Bucket], BucketGraph] = {}
        self._plans: dict[Dispatch, RunPlan] = {}
        self._pending: Stage | None = None
        self._noted: set[str] = set()
        self.eager_runs = 0

    # -- construction -----------------------------------------------------------------------------

    def _check_factors(self, outputs: Mapping[str, Output]) -> None:
        """A factor is a uniform query length, or its rows are interleaved; else real rows are no prefix."""
        lengths = {
            (route.buckets.tied[0], route.buckets.query_len)
            for route in self.policy.routes
            if route.buckets.tied is not None and route.buckets.query_len is not None
        }
        shapes = {f"buffer {b.name!r}": b.spec.shape for b in self.binding.buffers.values()}
        shapes |= {f"output {path!r}": output.shape for path, output in outputs.items()}
        for what, shape in shapes.items():
            for extent in shape:
                if not isinstance(extent, Affine) or extent.factor == 1 or extent.interleaved:
                    continue
                if (extent.dim.name, extent.factor) not in lengths:
                    raise SpecError(
                        f"runner {self.name!r}: {what} of shape {shape_text(shape)} has {extent.factor} "
                        "rows for each of "
                        f"{extent.dim.name!r}, whose real rows are a prefix only if they sit side by side: write "
                        f"gk.interleaved({extent}) if they do, or give the axis a dim of its own"
                    )

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
        group = self._group
        if not group.lock.acquire(False):
            raise ConcurrentRunError(
                f"runner {self.name!r}: a run or capture of its group is under way, in another thread or "
                "around this call; "
                f"the graphs of one group share memory and never run at the same time"
            )
        try:
            plan = self._plans.get(dispatch)
            if plan is None:
                plan = self._make_plan(dispatch)
            if self._stream_key() != group.last_stream:
                group.order_on_stream()
            if self._pending is not None:
                named = self._take_stage(dispatch, named)
            staged = self.staging.write(plan.plan, named)
            if plan.entry is None:
                return self._run_eager(plan, staged, context, clone)
            entry = plan.entry
            if group.checked or entry.replays == 0:
                self._check_before_replay(entry)
            step = plan.step
            if step is not None:
                step.context = context
                step.host = staged.hosted
                if self.options.prepare_host is not None:
                    with running(step):
                        self.options.prepare_host(step)
            if group.checked:
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
            group.lock.release()

    @contextlib.contextmanager
    def stage(self, dispatch: Dispatch) -> Iterator[Stage]:
        """Fill a batch's inputs in place: ``with runner.stage(d) as s: s.host["ids"][:] = ids``, then ``run(d)``.

        What was asked for from `s.host` or `s.views` counts as given to the next `run` of this dispatch; other inputs
        are given to `run` as ever. A block left by an exception stages nothing.
        """
        group = self._group
        if not group.lock.acquire(blocking=False):
            raise ConcurrentRunError(f"runner {self.name!r}: a run of its group is under way")
        try:
            plan = self._plans.get(dispatch) or self._make_plan(dispatch)
            self._pending = None
            slot = self.staging.open_slot(plan.plan)
            host = {name: target for name, target, _, _ in slot.targets}
            stage = Stage(dispatch, host, plan.plan.rows)
        finally:
            group.lock.release()
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
        self._group.check_runnable(self.name)
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

    def prepare(self, step: Step) -> dict[str, Any]:
        """Call prepare, and check that it made what the function needs."""
        prepare = self.options.prepare
        if prepare is None:
            return {}
        with running(step):
            made = prepare(step)
        made = dict(made or {})
        for name in self.binding.by_prepare:
            if name not in made:
                raise SpecError(
                    f"runner {self.name!r}: the function needs {name!r}, and prepare returned "
                    f"{', '.join(made) or 'nothing'}"
                )
        step.prepared = made
        return made

    def _prepare_replay(self, step: Step, entry: BucketGraph) -> None:
        prepare = self.options.prepare
        if prepare is None:
            return
        with running(step), torch.no_grad():
            made = prepare(step)
        step.prepared = entry.baked if made is None else dict(made)
        # Between segments what prepare returned is live, and so may differ from step to step.
        if made is not None and self._group.checked and entry.mode is not PIECEWISE:
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
        if self._group.checked:
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
        if clone or self._group.checked:
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

    # -- leases -----------------------------------------------------------------------------------

    def end_leases(self, *, replay: bool) -> None:
        """What this run writes or pads can't be read any more as what an earlier run left."""
        if replay:
            for runner in self._group.runners:
                runner.results.generation += 1
        for buffer in self.binding.buffers.values():
            buffer.generation += 1
        self.results.end_leases(replay=replay)

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

    def example_batch(
        self, bucket: Bucket, variation: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The example batch of a bucket: fed inputs, resident contents."""
        ties = [route.buckets.tied for route in self.policy.routes if route.buckets.tied]
        values = default_example(self.binding.buffers, bucket.sizes, ties, variation)
        if self.options.example is not None:
            given = dict(self.options.example(bucket))
            unknown = given.keys() - values.keys()
            if unknown:
                raise SpecError(
                    f"runner {self.name!r}: example gave {', '.join(sorted(unknown))}; its inputs are "
                    f"{', '.join(values)}"
                )
            values.update(given)
        fed = {name: values[name] for name in self.binding.fed}
        return fed, {name: values[name] for name in self.binding.resident}

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Leave declared state as it was."""
        return preserve(self.options.mutates)

    def declared_memory(self, layout: Any) -> list[torch.Tensor]:
        """All tensors whose storage the function may write without further notice."""
        tensors = [*layout.views.values(), self.staging.span]
        tensors.extend(buffer.tensor for buffer in self.results.buffers)
        # A break's `out` is any buffer of the group's.
        tensors.extend(buffer.tensor for buffer in self._buffers if buffer.is_allocated)
        for item in self.options.mutates:
            tensors.append(item if isinstance(item, torch.Tensor) else item.tensor)
        return tensors

    def note_undeclared(self, write: ExternalWrite) -> None:
        """Warn, once for each place, of a write to state that is not declared."""
        text = str(write)
        if text not in self._noted:
            self._noted.add(text)
            self.warn(
                f"runner {self.name!r}: {text}, memory from outside that isn't declared: warm-up has "
                "changed it. Name it in mutates="
            )

    def warn(self, message: str) -> None:
        """Give a `CaptureWarning`."""
        warnings.warn(message, CaptureWarning, stacklevel=2)

    def settle_outputs(self) -> None:
        """Infer what isn't declared from the warm-ups of all buckets, and allocate the static outputs."""
        seen = [entry for entry in self._entries.values() if entry.samples]
        self.results.settle(seen, self.dispatcher.dims.values(), self._uniform_lengths())
        self._check_factors(self.results.outputs)

    def row_inference(self, where: str) -> RowInference:
        """Which dims the tensors of breaks have, judged over the warm-ups of all PIECEWISE buckets."""
        warmups = [
            (entry.bucket, entry.break_calls)
            for entry in self._entries.values()
            if entry.mode is PIECEWISE and entry.break_calls
        ]
        return RowInference(where, warmups, self.dispatcher.dims.values(), self._uniform_lengths())

    def _uniform_lengths(self) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = {}
        for route in self.policy.routes:
            tied, length = route.buckets.tied, route.buckets.query_len
            if tied is None or length is None:
                return {}
            reqs, tokens = tied
            if found.setdefault((tokens, reqs), length) != length:
                return {}
        return found

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
