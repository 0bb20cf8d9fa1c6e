"""Trials: runs of one batch that all start from the same buffers, state and random generators."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.buffers import shape_at
from graphkit.capture.breaks import Break, out_sizes, recording
from graphkit.capture.watch import ExternalWrite
from graphkit.checking.differences import bit_difference
from graphkit.checking.kept import Kept, StateWatch, place
from graphkit.checking.poison import Poison, ends, poisons
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import EAGER, PIECEWISE, Dispatch, Reason
from graphkit.errors import InputError
from graphkit.outputs.inference import Sample, sizes_text
from graphkit.outputs.outputs import Tree, output_name
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.step import Phase, Step, in_body, running
from graphkit.staging.layout import Plan

if TYPE_CHECKING:
    from graphkit.runner.runner import GraphRunner


OTHER_CONTENTS = 17
"""Which variation of the example batch: none that a capture has left in the buffers."""


@attrs.frozen
class Seen:
    """What one run left: copies of outputs, buffers and state, by the words that messages name them with."""

    results: dict[str, torch.Tensor]
    """Outputs, and the batch's rows of buffers."""
    state: dict[str, torch.Tensor]


@attrs.define
class _Observed:
    """An eager call's outputs, as `Results.views` takes those of a graph."""

    where: str
    bucket: Bucket
    tree: Tree | None
    pool_outputs: dict[str, torch.Tensor]
    samples: dict[str, torch.Tensor] = attrs.field(factory=dict)

    def sample(self, path: str) -> Sample:
        """None: nothing is inferred of a check."""
        raise KeyError(path)


class _ReferenceBreaks:
    """Runs the breaks of an eager call as a replay of the PIECEWISE graph does: on the rows that they want."""

    def __init__(self, entry: BucketGraph, step: Step) -> None:
        self._calls = iter(entry.breaks)
        self._step = step

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it. A call that the graph doesn't have runs plainly."""
        call = next(self._calls, None)
        with recording(None), running(self._step):
            if call is None or call.break_ is not break_:
                return break_.call(args, kwargs, out_sizes(break_, self._step))
            return call.again(args, kwargs, self._step.dispatch.sizes)


class Trials:
    """Runs one batch of one bucket again and again.

    Args:
        runner: whose graph is run.
        dispatch: of the batch; not EAGER.
        entry: its graph.
        plan: where its inputs go.
        inputs: what `run` is given.
        context: likewise.
        resident: parameter -> the batch's rows of resident buffers; those of the others are what they hold.

    Attributes:
        runner: whose graph is run.
        entry: its graph.
        padded: the bucket's sizes.
        real: the batch's.
        kept: what each run may write.
        draws: whether the function draws random numbers; known after `look_for_state`.
        lost: inputs that aren't in their buffers when the function is called; likewise.

    Raises:
        InputError: `resident` doesn't fit the declaration.
    """

    def __init__(
        self,
        runner: GraphRunner,
        dispatch: Dispatch,
        entry: BucketGraph,
        plan: Plan,
        inputs: Mapping[str, Any],
        *,
        context: Any,
        resident: Mapping[str, Any],
    ) -> None:
        self.runner = runner
        self.entry = entry
        self._dispatch = dispatch
        self._plan = plan
        self._inputs = dict(inputs)
        self._context = context
        self._where = f"{entry.where}, batch [{sizes_text(dispatch.sizes)}]"
        self.padded, self.real = entry.bucket.sizes, dispatch.sizes
        breaks = [call.break_.out for call in entry.breaks]
        buffers = [*runner.binding.buffers.values(), *runner.results.buffers, *breaks]
        given = {name: self._resident(name, value) for name, value in resident.items()}
        self.kept = Kept([b for b in buffers if b is not None], runner.options.mutates)
        held = self.kept.contents(self.padded, self.real)
        self._residents = {
            name: given.get(name, held[buffer.name])
            for name, buffer in runner.binding.resident.items()
        }
        self._rng = runner.backend.rng_state(runner.options.generators)
        self._counts = entry.replays, runner.eager_runs
        self.draws = False
        self.lost: list[str] = []

    def look_for_state(self) -> list[ExternalWrite]:
        """Call the function once, to learn whether it draws and what else it writes; from now on that is kept too.

        Returns:
            The writes to memory that nobody declared.
        """
        watch = StateWatch(self.runner.declared_memory(self.entry.layout))
        self.eager(watch=watch)
        now = self.runner.backend.rng_state(self.runner.options.generators)
        pairs = zip(pytree.tree_leaves(self._rng), pytree.tree_leaves(now), strict=True)
        self.draws = any(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in pairs)
        self.kept.add_undeclared(watch)
        return list(watch.found.values())

    def poisons(self) -> tuple[list[Poison], list[Poison]]:
        """Two variants of other padding, a poison for each buffer that has padding to change."""
        return poisons(self.runner.binding.buffers, self.entry.layout.views, self.real)

    def ends(self) -> list[Poison]:
        """Padding of indices at either end of their range; none where an index that is too large kills the process."""
        if self.runner.backend.device.type != "cpu":
            return []
        return ends(self.runner.binding.buffers, self.entry.layout.views, self.real)

    def finish(self) -> None:
        """Put memory, generators and counters back as they were."""
        self.entry.replays, self.runner.eager_runs = self._counts
        with torch.no_grad():
            self.kept.restore()
        self.runner.backend.restore_rng_state(self._rng)

    def _resident(self, name: str, value: Any) -> torch.Tensor:
        buffer = self.runner.binding.resident.get(name)
        where = f"runner {self.runner.name!r}, resident {name!r}"
        if buffer is None:
            known = ", ".join(self.runner.binding.resident) or "none"
            raise InputError(f"{where}: it is no resident input; those are: {known}")
        spec = buffer.spec
        tensor = torch.as_tensor(value, device=self.runner.backend.device)
        if not isinstance(value, torch.Tensor) and not hasattr(value, "dtype"):
            tensor = tensor.to(spec.dtype)
        shape = shape_at(spec.shape, self.real)
        if tuple(tensor.shape) != shape or tensor.dtype is not spec.dtype:
            raise InputError(
                f"{where}: got {tuple(tensor.shape)} of {tensor.dtype}, expected {shape} of {spec.dtype}"
            )
        return tensor.detach().clone()

    # -- runs -------------------------------------------------------------------------------------

    def _start(self, padded: Mapping[str, int], *, fresh: bool = True) -> None:
        if fresh:
            self.kept.restore()
        # What a caller's runs mustn't wait for, these may.
        self.runner.staging.ring.wait()
        for name, buffer in self.runner.binding.resident.items():
            place(buffer, self._residents[name], padded, self.real)
        # What an earlier trial returned must not pass for what this one does.
        self.runner.results.poison()
        self.runner.backend.restore_rng_state(self._rng)

    def replay(self, *, fresh: bool = True) -> Seen:
        """Run the graph.

        Args:
            fresh: put the buffers back before; otherwise what the last run left is there beyond the batch.
        """
        if not fresh:
            self.kept.restore_state()
        self._start(self.padded, fresh=fresh)
        result = self.runner.run(self._dispatch, self._inputs, context=self._context, clone=True)
        return self._seen(result, self.padded)

    def alone(self) -> Seen:
        """Run the batch without a graph, at its own size."""
        dispatch = self._dispatch
        eager = Dispatch(
            mode=EAGER,
            bucket=None,
            sizes=dispatch.sizes,
            padding=dict.fromkeys(dispatch.sizes, 0),
            reason=Reason.CALLER,
            query_len=dispatch.query_len,
            max_query_len=dispatch.max_query_len,
            variant=dispatch.variant,
            detail="check",
        )
        self._start(self.real)
        result = self.runner.run(eager, self._inputs, context=self._context, clone=True)
        return self._seen(result, self.real)

    def run_another(self) -> str | None:
        """Replay a batch that fills the bucket with other contents; its exception in words, if it raises one."""
        runner, entry = self.runner, self.entry
        fed, resident = runner.example_batch(entry.bucket, OTHER_CONTENTS)
        self._start(self.padded)
        for name, value in resident.items():
            buffer = runner.binding.resident[name]
            tensor = torch.as_tensor(value, device="cpu").to(buffer.spec.dtype)
            place(buffer, tensor, self.padded, self.padded)
        try:
            runner.run(entry.dispatch, fed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def eager(self, *, poison: Sequence[Poison] = (), watch: StateWatch | None = None) -> Seen:
        """One call of the function on the padded buffers, prepared as at warm-up."""
        # A run inside this one's prepare or break is as wrong as in any run.
        with self.runner.shared.exclusive(f"check of runner {self.runner.name!r}"):
            return self._call_eagerly(poison, watch)

    def _call_eagerly(self, poison: Sequence[Poison], watch: StateWatch | None) -> Seen:
        runner, entry, plan = self.runner, self.entry, self._plan
        self._start(self.padded)
        layout = entry.layout
        staged = runner.staging.write(plan, self._inputs)
        step = Step(self._dispatch, Phase.WARMUP, layout.views, staged.hosted, self._context, {})
        runner.prepare_host(step)
        runner.staging.move(plan, staged)
        runner.staging.unpack(layout)
        values = runner.arguments(layout.views, entry.bucket.variant)
        values.update(runner.prepare(step))
        if watch is not None:
            self.lost = self._not_arrived()
        for item in poison:
            item.apply()
        breaks = _ReferenceBreaks(entry, step) if entry.mode is PIECEWISE else None
        with recording(breaks), in_body(None, self.padded):
            if watch is not None:
                watch.allow(pytree.tree_leaves(step.prepared))
                with _uncompiled(), watch:
                    result = runner.binding.call(runner.fn, values)
            elif runner.options.warmup_as_capturing:
                with runner.backend.as_capturing():
                    result = runner.binding.call(runner.fn, values)
            else:
                result = runner.binding.call(runner.fn, values)
        tree = Tree(result, self._where)
        kept = runner.results.write(tree, self.padded, self._where)
        if runner.results.any_on_host:
            runner.backend.synchronize()
        observed = _Observed(self._where, entry.bucket, tree, kept)
        return self._seen(runner.results.views(self._dispatch, observed, clone=True), self.padded)

    def _not_arrived(self) -> list[str]:
        """The fed inputs whose buffers don't hold what was given."""
        if self.runner.options.prepare_host is not None:
            # It may have changed them.
            return []
        lost = []
        for name in self.runner.binding.fed:
            value = self._inputs[name]
            if not isinstance(value, (np.ndarray, torch.Tensor)):
                # Lists may be ragged, and numbers are rounded.
                continue
            if isinstance(value, np.ndarray):
                # A copy: torch takes neither negative strides nor, without a warning, what can't be written.
                value = np.array(value, order="C")
            given = torch.as_tensor(value, device=self.runner.backend.device)
            rows = self._plan.rows[name]
            if bit_difference(rows, given) is not None:
                lost.append(name)
        return lost

    def _seen(self, result: Any, padded: Mapping[str, int]) -> Seen:
        outputs = Tree(result, self._where).tensors()
        results = {_output(path): tensor.clone() for path, tensor in outputs.items()}
        for name, contents in self.kept.compared(padded, self.real).items():
            results[f"buffer {name!r}"] = contents
        return Seen(results, self.kept.state_contents())


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """One call under a dispatch mode would make Dynamo skip a compiled function for good."""
    # Importing Dynamo costs seconds, and while nobody has, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _output(path: str) -> str:
    return output_name(path) if path else "the output"
