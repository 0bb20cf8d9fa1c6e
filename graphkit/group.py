"""A group: runners that share buffers, a memory pool and a capture stream, and never run at the same time."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphkit.backends import backend_for
from graphkit.backends.base import Backend, ErrorMode
from graphkit.bucket_graph import BucketGraph
from graphkit.buckets import Bucket
from graphkit.buffers import Buffer, Buffers, BufferSpec, dims_of
from graphkit.capture import CaptureSession, Progress
from graphkit.dims import check_name
from graphkit.dispatch import Mode, Policy, Reason, Support
from graphkit.errors import SpecError, StateError, user_frame
from graphkit.mutation import Scratch
from graphkit.options import RunnerOptions
from graphkit.outputs import Output
from graphkit.parameters import Count, Fed, Resident
from graphkit.report import GraphRow, Report, RunnerReport
from graphkit.runner import GraphRunner
from graphkit.shared import Shared, State
from graphkit.step import Step
from graphkit.wrap import Wrapped, default_policy

logger = logging.getLogger("graphkit")

CHECKED_VARIABLE = "GRAPHKIT_CHECKED"
"""Environment variable that, set to 1, makes groups checked by default."""


class GraphGroup:
    """Owns backend, pool, capture stream, buffers and runners. There are no globals.

    Args:
        device: "cuda", "cpu" (the recording backend), a `torch.device`, or a backend.
        checked: verify at each run what is otherwise trusted; by default the environment variable
            GRAPHKIT_CHECKED decides.
        on_error: what a bucket's failure does to `capture`: "raise", or "skip" (it falls back, with its reason).
        stream: to capture on.
        pool: to capture into.
        capture_context: entered once in each capture, and left before any replay.
        capture_error_mode: CUDA's.

    Raises:
        SpecError: the device is none that graphs are captured on, or an option is wrong.
    """

    def __init__(
        self,
        device: str | torch.device | Backend = "cuda",
        *,
        checked: bool | None = None,
        on_error: str = "raise",
        stream: Any = None,
        pool: Any = None,
        capture_context: Callable[[], AbstractContextManager[Any]] | None = None,
        capture_error_mode: ErrorMode = "thread_local",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise SpecError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise SpecError(
                f"capture_error_mode must be 'global', 'thread_local' or 'relaxed', got {capture_error_mode!r}"
            )
        self.backend = backend_for(device)
        self.device = self.backend.device
        if checked is None:
            checked = os.environ.get(CHECKED_VARIABLE) == "1"
        self._shared = Shared(self.backend, checked=checked)
        self.buffers = Buffers(self.device)
        self.capture_seconds = 0.0
        self._on_error = on_error
        self._stream = stream
        self._pool = pool
        self._capture_context = capture_context
        self._error_mode: ErrorMode = capture_error_mode
        self._runners: dict[str, GraphRunner] = {}
        self._owners: dict[str, str] = {}
        self._private: list[Buffers] = []
        self._messages: list[str] = []

    @property
    def state(self) -> State:
        """What the group can do."""
        return self._shared.state

    @property
    def checked(self) -> bool:
        """Whether each run verifies what is otherwise trusted."""
        return self._shared.checked

    # -- runners ----------------------------------------------------------------------------------

    def runner(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        policy: Policy,
        inputs: Mapping[str, Fed | Resident | Count] | None = None,
        prepare: Callable[[Step], Mapping[str, Any] | None] | None = None,
        prepare_host: Callable[[Step], None] | None = None,
        outputs: Output | Buffer | Mapping[str, Output | Buffer] | None = None,
        reads: Sequence[Any] = (),
        mutates: Sequence[torch.Tensor | Scratch] = (),
        example: Callable[[Bucket], Mapping[str, Any]] | None = None,
        supports: Support = Support.ALWAYS,
        strict: bool = False,
        generators: Sequence[torch.Generator] = (),
        warmup_as_capturing: bool = False,
        ring_depth: int = 8,
    ) -> GraphRunner:
        """Declare a runner of the group's buffers.

        Args:
            name: unique in the group.
            fn: the function or module. Its parameters are fed from the buffers that they are named
                after; those with a default keep it.
            policy: the routes.
            inputs: parameter -> `Fed(buffer)`, `Resident(buffer)` or `Count(dim)`, where names or
                roles differ.
            prepare: called with the `Step` after the inputs have moved, before each warm-up, capture,
                replay and eager run; what it returns is passed by name and baked.
            prepare_host: called with the `Step` after host inputs are padded and before they move; may
                write ``step.host``.
            outputs: path -> `Output` or a buffer, or one alone where the function returns one tensor;
                what isn't declared is inferred. A path is the key, index or field, joined by dots.
            reads: memory that the graphs read and the group doesn't own: modules, tensors, callables
                that give tensors.
            mutates: state that the function changes: tensors and `Scratch`; restored after warm-up
                and capture.
            example: bucket -> inputs by name for warm-up and capture.
            supports: which batches what `fn` calls can run in a FULL graph.
            strict: raise a `DispatchError` instead of falling back.
            generators: generators, besides the default one, that `fn` draws from.
            warmup_as_capturing: answer True to code that asks whether the stream is capturing, in
                warm-up too.
            ring_depth: slots of pinned memory, that is steps in flight.

        Raises:
            SpecError: anything doesn't fit together; nothing is declared.
        """
        options = {
            "inputs": inputs,
            "prepare": prepare,
            "prepare_host": prepare_host,
            "outputs": outputs,
            "reads": reads,
            "mutates": mutates,
            "example": example,
            "supports": supports,
            "strict": strict,
            "generators": generators,
            "warmup_as_capturing": warmup_as_capturing,
            "ring_depth": ring_depth,
        }
        return self._add(name, fn, policy, options, self.buffers)

    def wrap(
        self,
        fn: Callable[..., Any],
        /,
        *,
        name: str | None = None,
        policy: Policy | None = None,
        **specs: Any,
    ) -> Wrapped:
        """The function with private buffers, called like the function itself.

        Args:
            fn: the function or module.
            name: for messages; by default the function's.
            policy: by default FULL over powers of two of the dims in the specs.
            specs: a `BufferSpec` for each parameter, and any option of `runner`.

        Returns:
            A callable that takes the inputs by keyword (or in the order of the specs), reads the
            batch's sizes off their shapes, and returns independent tensors.
        """
        buffers = Buffers(self.device)
        declared = {k: v for k, v in specs.items() if isinstance(v, BufferSpec)}
        options = {k: v for k, v in specs.items() if not isinstance(v, BufferSpec)}
        if name is not None and not isinstance(name, str):
            check_name("buffer", "name")
        buffers.declare(**declared)
        # Private buffers are the function's inputs, and nothing else.
        roles = dict(options.get("inputs") or {})
        taken = {role.buffer for role in roles.values() if isinstance(role, (Fed, Resident))}
        options["inputs"] = {n: Fed(n) for n in declared if n not in taken} | roles
        module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        if isinstance(module, torch.nn.Module):
            # Its parameters are what the graphs read, whoever replaces them.
            options["reads"] = [*options.get("reads", ()), module]
        if policy is None:
            dims = {d.name: d for spec in declared.values() for d in dims_of(spec.shape)}
            policy = default_policy(tuple(dims.values()))
        base = name or str(getattr(fn, "__name__", type(fn).__name__))
        unique, number = base, 2
        while unique in self._runners:
            unique, number = f"{base}_{number}", number + 1
        runner = self._add(unique, fn, policy, options, buffers)
        self._private.append(buffers)
        return Wrapped(runner, declared)

    def _add(
        self,
        name: str,
        fn: Callable[..., Any],
        policy: Policy,
        options: Mapping[str, Any],
        buffers: Buffers,
    ) -> GraphRunner:
        self._check_open()
        if not isinstance(name, str) or not name:
            raise SpecError(f"a runner's name must be a non-empty str, got {name!r}")
        if name in self._runners:
            raise SpecError(f"the group has a runner named {name!r} already; use another name")
        if not isinstance(policy, Policy):
            raise SpecError(f"runner {name!r} needs a Policy, got {policy!r}")
        known = [a.name for a in RunnerOptions.__attrs_attrs__]
        for option, value in options.items():
            if option not in known:
                raise SpecError(
                    f"runner {name!r} got {option}={value!r}, which is no option; a parameter of the "
                    f"function needs a BufferSpec, and the options are policy, {', '.join(known)}"
                )
        runner = GraphRunner(self._shared, name, fn, policy, RunnerOptions(**options), buffers)
        used = (*runner.binding.buffers.values(), *runner.results.buffers)
        packed = [buffer for buffer in used if buffer.spec.moves]
        for buffer in packed:
            owner = self._owners.get(buffer.name, name) if buffers is self.buffers else name
            if owner != name:
                raise SpecError(
                    f"buffer {buffer.name!r} is packed, so that its elements move with the bucket, and "
                    f"runner {owner!r} uses it; a packed buffer is for one runner: give {name!r} its own, "
                    "or make it strided"
                )
        if buffers is self.buffers:
            self._owners.update({buffer.name: name for buffer in packed})
        self._runners[name] = runner
        return runner

    def __getitem__(self, name: str) -> GraphRunner:
        """The runner of this name."""
        return self._runners[name]

    @property
    def runners(self) -> tuple[GraphRunner, ...]:
        """All runners, in order of declaration."""
        return tuple(self._runners.values())

    # -- capture ----------------------------------------------------------------------------------

    def capture(
        self,
        *,
        order: Callable[[Mode, Bucket], Any] | None = None,
        progress: bool = True,
    ) -> Report:
        """Warm up and capture every bucket of every runner that isn't captured.

        All are warmed up, then captured, PIECEWISE before FULL and the largest first. After a failure
        the other buckets go on, and serve; with ``on_error="raise"`` the first failure is raised at the
        end. Another call goes on with the missing ones.

        Args:
            order: sort key of (mode, bucket) to capture by instead.
            progress: show a bar, on a terminal with tqdm, or log lines.

        Raises:
            CaptureError: the device refuses an operation of a function.
            MemoryBudgetError: the device's memory is too small.
            SpecError: an output's shape can't be inferred, or isn't as declared.
            Exception: what a function raises, with a note that names runner and bucket.
        """
        self._check_open()
        with self._shared.exclusive("capture"):
            began = time.perf_counter()
            missing = [e for r in self.runners for e in r.entries if not e.is_captured]
            missing.sort(key=(lambda e: order(e.mode, e.bucket)) if order else _capture_order)
            bar = Progress(2 * len(missing) if progress else 0, "graphkit capture")
            has_failed = True
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    self._capture(missing, bar)
                has_failed = False
            finally:
                bar.close()
                self.capture_seconds += time.perf_counter() - began
                self._messages.extend(
                    str(w.message) for w in caught if w.category.__module__.startswith("graphkit")
                )
                # Where warnings are errors, one must not take the place of the failure.
                with contextlib.suppress(*([Warning] if has_failed else [])):
                    for w in caught:
                        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        return self.report()

    def _capture(self, missing: Sequence[BucketGraph], bar: Progress) -> None:
        generators = list(dict.fromkeys(g for r in self.runners for g in r.options.generators))
        if self._stream is None:
            self._stream = self.backend.new_stream()
        self._pool = self.backend.pool_of(self._pool)
        session = CaptureSession(
            self.backend,
            stream=self._stream,
            pool=self._pool,
            capture_context=self._capture_context,
            error_mode=self._error_mode,
            generators=generators,
        )
        failures: list[Exception] = []
        for runner in dict.fromkeys(entry.runner for entry in missing):
            # Examples are written to its buffers, and its outputs.
            runner.end_leases(replay=True)
            self._runners[runner.name].drop_stage()
        with self._settling(), session:
            warmed = [
                entry
                for entry in missing
                if self._attempt(entry, lambda e: e.warm_up(session), bar, failures)
            ]
            for runner in self.runners:
                try:
                    runner.settle_outputs()
                except SpecError as error:
                    mine = [entry for entry in warmed if entry.runner is runner]
                    warmed = [entry for entry in warmed if entry.runner is not runner]
                    for entry in mine:
                        entry.failure = f"{type(error).__name__}: {error}"
                    if self._on_error == "raise":
                        failures.append(error)
                    else:
                        self._messages.append(f"runner {runner.name!r} was skipped: {error}")
            session.flush()
            for entry in warmed:
                if self._attempt(entry, lambda e: e.capture(session), bar, failures):
                    self._runners[entry.runner.name].mark_captured(entry)
        if failures:
            if len(failures) > 1:
                failures[0].add_note(
                    f"graphkit: and {len(failures) - 1} more failures; report() has them"
                )
            raise failures[0]

    @contextlib.contextmanager
    def _settling(self) -> Iterator[None]:
        """Afterwards, also where the session itself fails, say what the group can do: captured buckets serve."""
        try:
            yield
        finally:
            # The caller's stream is ordered after the session; a run on another one has to wait for it.
            self._shared.last_stream = self.backend.stream_key()
            captured = any(runner.dispatcher.captured for runner in self.runners)
            self._set_state(State.CAPTURED if captured else State.NEW)

    def _attempt(
        self,
        entry: BucketGraph,
        work: Callable[[BucketGraph], None],
        bar: Progress,
        failures: list[Exception],
    ) -> bool:
        """Do one bucket's work. A failure leaves the other buckets to go on, and is raised after them."""
        try:
            work(entry)
        except Exception as error:
            entry.release()
            frame = user_frame(error)
            at = f" at {frame}" if frame else ""
            entry.failure = f"{type(error).__name__}: {error}{at}"
            # The traceback's frames hold tensors, and so the failed bucket's memory.
            traceback.clear_frames(error.__traceback__)
            if self._on_error == "raise":
                error.add_note(f"graphkit: in {entry.where}{at}")
                failures.append(error)
            else:
                logger.warning("%s was skipped: %s", entry.where, entry.failure)
            return False
        except BaseException:
            # An interrupt: half a capture would be taken for a whole one.
            entry.release()
            raise
        finally:
            bar.step(f"{entry.runner.name} {entry.mode} {entry.bucket}")
        return True

    # -- lifecycle --------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop the graphs, and keep buffers: memory that they read has moved. `capture` makes new ones."""
        self._check_open()
        with self._shared.exclusive("invalidate"):
            for runner in self.runners:
                runner.drop_graphs()
            # A suspended group has no memory either, so that it stays what it is.
            if self.state is State.CAPTURED:
                self._set_state(State.STALE)

    def release(self) -> None:
        """Give all device memory back, and keep the declarations. Runs raise until `capture`."""
        self._check_open()
        with self._shared.exclusive("release"):
            self._drop()
            self._set_state(State.SUSPENDED)

    def close(self) -> None:
        """Drop everything for good. Closing twice is harmless."""
        if self.state is State.CLOSED:
            return
        with self._shared.exclusive("close"):
            self._drop()
            for buffers in (self.buffers, *self._private):
                buffers.close()
            self._set_state(State.CLOSED)

    def __enter__(self) -> GraphGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop(self) -> None:
        self.backend.synchronize()
        for runner in self.runners:
            runner.drop_memory()
        for buffers in (self.buffers, *self._private):
            buffers.forget()
        self._pool = None
        self._shared.last_stream = None
        self.backend.empty_cache()

    def check_addresses(self) -> None:
        """Raise a `StaleGraphError` if memory named in a runner's `reads=` has moved since the capture."""
        for runner in self.runners:
            runner.check_addresses()

    def _set_state(self, state: State) -> None:
        self._shared.state = state
        reason = {State.SUSPENDED: Reason.SUSPENDED, State.STALE: Reason.STALE}.get(state)
        for runner in self.runners:
            runner.dispatcher.set_reason(reason)

    def _check_open(self) -> None:
        if self.state is State.CLOSED:
            raise StateError("the group is closed; make a new GraphGroup")

    # -- running ----------------------------------------------------------------------------------

    def report(self) -> Report:
        """What is captured, what ran, and what fell back."""
        return Report(
            state=self.state.name,
            device=str(self.device),
            runners=tuple(_runner_report(runner) for runner in self.runners),
            buffer_bytes=sum(b.nbytes for b in (self.buffers, *self._private)),
            host_bytes=sum(runner.staging.host_nbytes for runner in self.runners),
            reserved_bytes=self.backend.memory_reserved(),
            capture_seconds=self.capture_seconds,
            messages=tuple(self._messages),
        )

    def __repr__(self) -> str:
        return f"GraphGroup({str(self.device)!r}, {self.state.name}, runners={list(self._runners)})"


def _capture_order(entry: BucketGraph) -> tuple[int, int]:
    return (-entry.mode.rank, -math.prod(max(size, 1) for size in entry.bucket.sizes.values()))


def _runner_report(runner: GraphRunner) -> RunnerReport:
    return RunnerReport(
        name=runner.name,
        graphs=tuple(_graph_row(runner, mode, bucket) for mode, bucket in runner.dispatcher.graphs),
        counts=runner.dispatcher.counts,
        eager_runs=runner.eager_runs,
        output_bytes=runner.results.nbytes,
    )


def _graph_row(runner: GraphRunner, mode: Mode, bucket: Bucket) -> GraphRow:
    entry = runner.entry(mode, bucket)
    if entry is None:
        return GraphRow(mode, str(bucket), captured=False, replays=0, nodes=0, failure=None)
    return GraphRow(
        mode, str(bucket), entry.is_captured, entry.replays, entry.num_nodes, entry.failure
    )
