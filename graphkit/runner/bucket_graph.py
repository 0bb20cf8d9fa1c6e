"""One bucket of one runner: how it is warmed up, captured and launched."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphkit.backends.base import Graph
from graphkit.capture.ambient import Ambient
from graphkit.capture.breaks import recording
from graphkit.capture.inspection import CaptureInspection
from graphkit.capture.piecewise import BreakCall, PiecewiseGraph
from graphkit.capture.recorders import CaptureRecorder, WarmupRecorder
from graphkit.capture.session import CaptureSession
from graphkit.capture.watch import Fingerprint, WriteWatch, fingerprints, watched_tensors
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import PIECEWISE, Dispatch, Mode
from graphkit.errors import CaptureError
from graphkit.outputs.inference import Sample
from graphkit.outputs.outputs import Tree
from graphkit.runner.core import RunnerCore
from graphkit.runner.step import Phase, Step, in_body
from graphkit.staging.layout import Layout, Plan


class BucketGraph:
    """What a runner keeps for one mode and bucket.

    Attributes:
        layout: span and views at the bucket's sizes.
        state: the dict that `prepare` finds as ``step.state``; it is new with each capture.
        samples: output path -> what was seen in warm-up.
        replays: how often the graph has run.
        set_source: one function for each ring slot, which makes the graph's own copy of the inputs
            read that slot; None where the copy is queued before the launch.
        set_targets: for each slot of outputs on the host, functions that make the graph write there; None if it writes
            the same one always.
    """

    def __init__(self, runner: RunnerCore, mode: Mode, bucket: Bucket) -> None:
        self.runner = runner
        self.mode = mode
        self.bucket = bucket
        self.where = f"runner {runner.name!r}, {mode} bucket [{bucket}]"
        self.layout: Layout = runner.staging.layout(bucket.sizes)
        self.state: dict[Any, Any] = {}
        self.baked: dict[str, Any] = {}
        self.samples: dict[str, torch.Tensor] = {}
        self.tree: Tree | None = None
        self.pool_outputs: dict[str, torch.Tensor] = {}
        self.replays = 0
        self.reads: dict[str, Fingerprint] = {}
        self._addresses: dict[str, int] = {}
        self._ambient: Ambient | None = None
        self.failure: str | None = None
        self.set_source: Sequence[Callable[[], None]] | None = None
        self.set_targets: Sequence[Sequence[Callable[[], None]]] | None = None
        self._source = torch.empty(0, device="cpu")
        self._graphs: list[Graph] = []
        self.launch: Callable[[], None] = self._not_captured
        self.unpack: Callable[[], None] = self._not_captured
        # A dispatch of its own, for the batches of warm-up and capture, which fill the bucket.
        self.dispatch = Dispatch(
            mode=mode,
            bucket=bucket,
            sizes=bucket.sizes,
            padding=dict.fromkeys(bucket.sizes, 0),
            query_len=bucket.query_len,
            max_query_len=bucket.max_query_len or bucket.query_len,
            variant=bucket.variant,
        )
        self._plan: Plan | None = None

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph to launch."""
        return bool(self._graphs)

    def ambient_difference(self) -> str | None:
        """How the ambient modes differ from those of the capture, in words; None if they don't."""
        if self._ambient is None:
            return None
        return self._ambient.difference(self._ambient_now())

    def moved_buffer(self) -> str | None:
        """The name of a buffer whose memory is elsewhere than at the capture, or None."""
        now = self._buffer_addresses()
        return next((name for name in now if now[name] != self._addresses[name]), None)

    def _buffer_addresses(self) -> dict[str, int]:
        runner = self.runner
        buffers = (*runner.binding.buffers.values(), *runner.results.buffers)
        return {buffer.name: buffer.tensor.data_ptr() for buffer in buffers}

    def _ambient_now(self) -> Ambient:
        runner = self.runner
        return Ambient.now(runner.backend.device, runner.fn, inside=runner.shared.checked)

    @property
    def breaks(self) -> tuple[BreakCall, ...]:
        """The eager breaks that a replay runs, in order."""
        graph = self._graphs[-1] if self._graphs else None
        return graph.breaks if isinstance(graph, PiecewiseGraph) else ()

    @property
    def has_breaks(self) -> bool:
        """Whether a replay runs eager breaks."""
        return bool(self.breaks)

    def pieces(self, sizes: Mapping[str, int]) -> tuple[Callable[[], None], ...]:
        """What a replay of a PIECEWISE graph calls, one after another, for a batch of these sizes."""
        graph = self._graphs[-1]
        return graph.bind(sizes) if isinstance(graph, PiecewiseGraph) else (graph.replay,)

    @property
    def num_nodes(self) -> int:
        """Operations in the graph of the function itself; -1 if unknown."""
        return self._graphs[-1].num_nodes if self._graphs else 0

    def release(self) -> None:
        """Drop the graph, its memory and its state."""
        for graph in self._graphs:
            graph.release()
        self._graphs = []
        self.state = {}
        self.baked = {}
        self.tree = None
        self.pool_outputs = {}
        self.replays = 0
        self.launch = self.unpack = self._not_captured
        self.set_source = self.set_targets = None

    def _not_captured(self) -> None:
        raise CaptureError(f"{self.where} is not captured")

    # -- warm-up ----------------------------------------------------------------------------------

    def warm_up(self, session: CaptureSession) -> None:
        """Run the function eagerly on the example batch, and note the shapes of its outputs."""
        runner = self.runner
        step, values = self._load(Phase.WARMUP, variation=0)
        breaks = WarmupRecorder(step) if self.mode is PIECEWISE else None
        call = functools.partial(self._call, values)
        as_capturing = runner.options.warmup_as_capturing
        inspection = runner.shared.inspection
        watched = contextlib.nullcontext() if inspection is None else inspection.warmup(values)
        with runner.preserved(), recording(breaks), watched:
            if runner.watches_writes:
                with WriteWatch(runner.declared_memory(self.layout)) as watch:
                    result = session.warmup(call, as_capturing=as_capturing)
                for write in watch.found.values():
                    runner.note_undeclared(write)
            else:
                result = session.warmup(call, as_capturing=as_capturing)
        if breaks is not None:
            runner.break_calls[self.bucket] = breaks.calls
        tree = Tree(result, self.where)
        runner.results.check(tree, self.bucket.sizes, self.where)
        self.samples = {
            path: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for path, tensor in tree.tensors().items()
        }

    def sample(self, path: str) -> Sample:
        """What inference is told of one output."""
        return Sample(self.bucket.sizes, tuple(self.samples[path].shape))

    # -- capture ----------------------------------------------------------------------------------

    def capture(self, session: CaptureSession) -> None:
        """Capture the graph; on the recording backend twice, with different contents, to compare."""
        runner = self.runner
        # Gives prepare a new state too: one for all recordings, since what it keeps there is the graph's.
        self.release()
        runner.results.make_views(self.bucket.sizes)
        for variation in range(runner.backend.recordings):
            step, values = self._load(Phase.CAPTURE, variation=variation)
            with runner.preserved():
                graphs, tree, kept = self._record(session, step, values)
            earlier, self._graphs = self._graphs, graphs
            self.tree, self.pool_outputs, self.baked = tree, kept, step.prepared
            if earlier:
                difference = earlier[-1].difference(graphs[-1])
                for graph in earlier:
                    graph.release()
                if difference is not None:
                    self.release()
                    raise CaptureError(
                        f"{self.where}: two captures differ, and a replay would repeat only one: "
                        f"{difference}"
                    )
        self.failure = None
        self.reads = fingerprints(runner.options.reads)
        self._addresses = self._buffer_addresses()
        self._ambient = self._ambient_now()
        if self.mode is not PIECEWISE:
            self.launch = self._graphs[-1].replay
        if runner.has_prepare:
            self.unpack = self._graphs[0].replay
        if runner.moves_in_graph:
            sources = [tensor[: self.layout.moved.nbytes] for tensor in runner.staging.ring.tensors]
            self.set_source = runner.backend.sources(
                self._first_segment(), self.layout.moved, sources
            )
        if runner.results.depth > 1 and runner.results.any_on_host:
            self.set_targets = self._target_setters()
        if self.num_nodes == 0:
            runner.warn(
                f"{self.where}: the graph is empty: nothing was launched while it was captured"
            )

    def _record(
        self, session: CaptureSession, step: Step, values: dict[str, Any]
    ) -> tuple[list[Graph], Tree, dict[str, torch.Tensor]]:
        graphs: list[Graph] = []
        if self.runner.has_prepare:
            # prepare runs between the two, on what the first has unpacked.
            graphs.append(session.capture(self._begin).graph)

        inspection = self._inspected(values)

        def body() -> tuple[Tree, dict[str, torch.Tensor]]:
            if not self.runner.has_prepare:
                self._begin()
            with inspection or contextlib.nullcontext():
                tree = Tree(self._call(values), self.where)
            return tree, self.runner.results.write(tree, self.bucket.sizes, self.where)

        breaks = self._capture_recorder(session, step) if self.mode is PIECEWISE else None
        captured = session.capture(body, breaks=breaks)
        graphs.append(captured.graph)
        tree, kept = captured.result
        # What isn't kept must not hold memory of the pool, which the next capture uses again.
        tree.leaves = [None] * len(tree.leaves)
        if inspection is not None:
            self._inspect(inspection, graphs, kept)
        return graphs, tree, kept

    def _inspected(self, values: Mapping[str, Any]) -> CaptureInspection | None:
        runner, inspection = self.runner, self.runner.shared.inspection
        if inspection is None:
            return None
        declared = [*runner.declared_memory(self.layout), *watched_tensors(runner.options.reads)]
        return inspection.capture(self.where, runner.fn, runner.options.reads, values, declared)

    def _inspect(
        self,
        inspection: CaptureInspection,
        graphs: Sequence[Graph],
        kept: Mapping[str, torch.Tensor],
    ) -> None:
        try:
            inspection.refuse_stale_plan()
        except CaptureError:
            for graph in graphs:
                graph.release()
            raise
        # A recording holds what it made, and so do the breaks' arguments.
        finds_all = self.mode is not PIECEWISE and self.runner.backend.recordings == 1
        for remark in inspection.remarks(kept=kept.values(), finds_all=finds_all):
            self.runner.remark(remark)

    def _begin(self) -> None:
        """The graph's first nodes: what the step has staged reaches the buffers."""
        staging = self.runner.staging
        if self.runner.moves_in_graph:
            self.layout.moved.copy_(self._source, non_blocking=True)
        staging.unpack(self.layout)

    def _first_segment(self) -> Graph:
        first = self._graphs[0]
        return first.segments[0] if isinstance(first, PiecewiseGraph) else first

    def _target_setters(self) -> list[tuple[Callable[[], None], ...]]:
        last = self._graphs[-1]
        segment = last.segments[-1] if isinstance(last, PiecewiseGraph) else last
        setters = [
            self.runner.backend.targets(segment, targets[0], targets)
            for targets in self.runner.results.targets(self.bucket.sizes)
        ]
        return list(zip(*setters, strict=True))

    def _capture_recorder(self, session: CaptureSession, step: Step) -> CaptureRecorder:
        runner = self.runner
        return CaptureRecorder(
            runner.backend,
            session.pool,
            step,
            self.where,
            runner.break_calls[self.bucket],
            runner.row_inference(self.where),
            {buffer.tensor.data_ptr(): buffer for buffer in runner.binding.buffers.values()},
            runner.declared_memory(self.layout),
        )

    # -- both -------------------------------------------------------------------------------------

    def _load(self, phase: Phase, variation: int) -> tuple[Step, dict[str, Any]]:
        """Fill the buffers with the example batch, by the same way as a run's inputs, and prepare."""
        runner = self.runner
        if self._plan is None:
            self._plan = runner.staging.plan(self.layout, self.bucket.sizes)
            runner.staging.prepare_unpack(self.layout)
        fed, resident = runner.example_batch(self.bucket, variation)
        # What a run must not wait for, a capture may.
        runner.staging.ring.wait()
        staged = runner.staging.write(self._plan, fed)
        step = Step(self.dispatch, phase, self.layout.views, staged.hosted, None, self.state)
        runner.prepare_host(step)
        runner.staging.move(self._plan, staged)
        self._source = staged.moved
        for name, value in resident.items():
            _fill(self.layout.views[name], value)
        runner.staging.unpack(self.layout)
        values = runner.arguments(self.layout.views, self.bucket.variant)
        values.update(runner.prepare(step))
        return step, values

    def _call(self, values: dict[str, Any]) -> Any:
        runner = self.runner
        # The breaks of a PIECEWISE graph get the step from their recorder; a FULL graph has none.
        with in_body(None, self.bucket.sizes):
            return runner.binding.call(runner.fn, dict(values))


def _fill(view: torch.Tensor, value: Any) -> None:
    """Write example contents, which may be one value for all elements."""
    source = torch.as_tensor(value, device="cpu")
    if source.numel() > 1 and not any(source.stride()):
        view.fill_(source.flatten()[0].item())
    else:
        view.copy_(source.to(view.dtype))
