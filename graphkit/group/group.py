"""A group: runners that share buffers, a memory pool and a capture stream, and never run at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from graphkit.backends import backend_for
from graphkit.backends.base import Backend, ErrorMode
from graphkit.buffers import Buffer, Buffers, BufferSpec, dims_of
from graphkit.capture.mutation import Scratch
from graphkit.capture.session import Progress
from graphkit.dims import check_name
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Mode, Policy, Support
from graphkit.errors import CaptureError, SpecError, StateError
from graphkit.group.capture import GroupCapture, capture_order
from graphkit.group.estimate import Estimate, estimate_of, largest_graphs, missing_graphs
from graphkit.group.lazy import lazy_capture
from graphkit.group.memory import parse_bytes
from graphkit.group.report import Report
from graphkit.group.report_rows import runner_report
from graphkit.group.wrap import Wrapped, default_policy, wrap_options
from graphkit.outputs.outputs import Output
from graphkit.parameters import Count, Fed, Resident
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.options import RunnerOptions
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import Shared, State
from graphkit.runner.step import Step

CHECKED_VARIABLE = "GRAPHKIT_CHECKED"
"""Environment variable that, set to 1, makes groups checked by default."""


class GraphGroup:
    """Owns backend, pool, capture stream, buffers and runners. There are no globals.

    Args:
        device: "cuda", "cpu" (the recording backend), a `torch.device`, or a backend.
        checked: verify at each run what is otherwise trusted; by default the environment variable
            GRAPHKIT_CHECKED decides.
        memory_budget: bytes that the group may take on the device, as an int or as "2GiB", "512MiB" or "1.5GB": static
            memory, the graphs' pools, and what the driver takes for them. Graphs are captured by what they are worth a
            byte until it is spent; batches of the others fall back for the reason OVER_BUDGET.
        lazy: capture a graph when a run first needs it. `capture` warms up what it must, and lets graphs be dispatched
            to; see there.
        max_graphs: with `lazy`, how many graphs may live at a time; 64 by default. For one more, those that were used
            least recently go, a quarter of them together, since their memory comes back together.
        on_error: what a bucket's failure does to `capture`, and with `lazy` to the run: "raise", or "skip" (it falls
            back, with its reason).
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
        memory_budget: str | int | None = None,
        lazy: bool = False,
        max_graphs: int | None = None,
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
        if checked is not None and not isinstance(checked, bool):
            raise SpecError(f"checked must be True, False or None, got {checked!r}")
        self.backend = backend_for(device)
        self.device = self.backend.device
        if checked is None:
            checked = os.environ.get(CHECKED_VARIABLE) == "1"
        self._shared = Shared(self.backend, checked=checked)
        self.buffers = Buffers(self.device)
        self.capture_seconds = 0.0
        self._on_error = on_error
        self._runners: dict[str, GraphRunner] = {}
        self._owners: dict[str, str] = {}
        self._all_buffers = [self.buffers]
        self._capture = GroupCapture(
            self._shared,
            self._runners,
            self._all_buffers,
            on_error=on_error,
            stream=stream,
            pool=pool,
            capture_context=capture_context,
            error_mode=capture_error_mode,
        )
        self._lazy = lazy_capture(self._capture, self._shared, lazy, max_graphs)
        self.memory_budget = memory_budget

    @property
    def state(self) -> State:
        """What the group can do."""
        return self._shared.state

    @property
    def checked(self) -> bool:
        """Whether each run verifies what is otherwise trusted."""
        return self._shared.checked

    @property
    def memory_budget(self) -> int | None:
        """Bytes that the group may take on the device; None for no bound.

        May be set, to what the constructor takes. The next `capture` goes on with what was missing; it gives nothing
        back: for less than before, `release` first.
        """
        return self._capture.budget

    @memory_budget.setter
    def memory_budget(self, value: str | int | None) -> None:
        if value is not None and self._lazy is not None:
            raise SpecError(
                "memory_budget= is for graphs that are captured ahead; with lazy=True bound their number by max_graphs="
            )
        if value is not None:
            self._capture.refuse_given_pool("memory_budget=")
        self._capture.budget = None if value is None else parse_bytes(value, "memory_budget")

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
        ring_full: Literal["block", "raise"] = "block",
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
            ring_full: what a run does where the device hasn't read what earlier ones staged, half a ring ago: "block"
                waits, "raise" raises a `StateError` with nothing staged.

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
            "ring_full": ring_full,
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
        if name is not None and not isinstance(name, str):
            check_name("buffer", "name")
        buffers.declare(**declared)
        options = wrap_options(fn, declared, specs)
        if policy is None:
            dims = {d.name: d for spec in declared.values() for d in dims_of(spec.shape)}
            policy = default_policy(tuple(dims.values()))
        base = name or str(getattr(fn, "__name__", type(fn).__name__))
        unique, number = base, 2
        while unique in self._runners:
            unique, number = f"{base}_{number}", number + 1
        runner = self._add(unique, fn, policy, options, buffers)
        self._all_buffers.append(buffers)
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
        for buffer in runner.results.buffers:
            if all(buffer is not own for own in (*self.buffers, *buffers)):
                raise SpecError(
                    f"runner {name!r}: outputs= names buffer {buffer.name!r} of another group, whose graphs may run at "
                    "the same time; declare it on this group's buffers"
                )
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
        worth: Callable[[Mode, Bucket], float] | None = None,
        progress: bool = True,
    ) -> Report:
        """Warm up and capture every bucket of every runner that isn't captured.

        All are warmed up, then captured, PIECEWISE before FULL and the largest first. After a failure
        the other buckets go on, and serve; with ``on_error="raise"`` the first failure is raised at the
        end. Another call goes on with the missing ones.

        In a group with ``lazy=True`` none is captured, and all can be dispatched to: a run captures what it needs. A
        runner whose outputs are declared, and that has no PIECEWISE routes, costs nothing here; of any other, the
        buckets are warmed up, since one alone can't tell what has to be inferred from several.

        Args:
            order: sort key of (mode, bucket) to capture by instead.
            worth: with a `memory_budget`, how much it is worth to have a graph, as how often its batches come; at
                least 0, by default the same for all. Those worth most for each byte that they need are admitted
                first, so that by default it is the small ones; of equals, the better mode.
            progress: show a bar, on a terminal with tqdm, or log lines.

        Raises:
            CaptureError: the device refuses an operation of a function.
            MemoryBudgetError: the device's memory is too small; or static memory alone is above `memory_budget`,
                whatever `on_error` says.
            SpecError: an output's shape can't be inferred, or isn't as declared.
            Exception: what a function raises, with a note that names runner and bucket.
        """
        self._check_open()
        if order is not None and not callable(order):
            raise SpecError(f"order must be a function of mode and bucket, got {order!r}")
        if not isinstance(progress, bool):
            raise SpecError(f"progress must be True or False, got {progress!r}")
        with self._shared.exclusive("capture"):
            self._capture.check_static()
            began = time.perf_counter()
            if self._lazy is not None:
                missing = self._lazy.to_warm_up()
            else:
                missing = [e for r in self.runners for e in r.entries if not e.is_captured]
            missing.sort(key=(lambda e: order(e.mode, e.bucket)) if order else capture_order)
            steps = len(missing) if self._lazy is not None else 2 * len(missing)
            bar = Progress(steps if progress else 0, "graphkit capture")
            try:
                with self._capture.noting_warnings():
                    if self._lazy is not None:
                        self._lazy.arm(missing, bar)
                    else:
                        self._capture.capture(missing, bar, worth)
            finally:
                bar.close()
                self.capture_seconds += time.perf_counter() - began
        if self.checked and self.backend.recordings > 1:
            self._verify(missing)
        return self.report()

    def _verify(self, entries: Sequence[BucketGraph]) -> None:
        """Refuse the recordings that replay something else than an eager call computes.

        Raises:
            CaptureError: one does, and failures are to be raised.
        """
        refused: list[CaptureError] = []
        for entry in entries:
            runner = self._runners[entry.runner.name]
            try:
                findings = runner.verify(entry) if entry.is_captured else ()
            except Exception as error:
                # What prepare or a break needs of a real run, an example doesn't have.
                runner.remark(
                    f"{entry.where}: the capture wasn't compared with an eager call, which raised "
                    f"{type(error).__name__}: {error}"
                )
                continue
            for finding in findings:
                failure = CaptureError(
                    f"{entry.where}: {finding.message} A recording sees what PyTorch's operations do; what NumPy or "
                    "another library does to a tensor's memory it neither sees nor repeats"
                )
                runner.drop_graph(entry, f"CaptureError: {failure}")
                refused.append(failure)
                break
        if refused and self._on_error == "raise":
            raise refused[0]

    def estimate(self, *, measure: bool = False) -> Estimate:
        """What the group takes on the device, or will take: before the first capture, and before there are caches.

        Static memory, which is buffers, the spans that inputs arrive in, and declared outputs, is exact, and nothing is
        allocated to say so. What the graphs work in depends on the functions, and is None before all are captured
        unless it is measured; what the driver takes for graphs, more for more kernels, is known after a capture only.
        An engine that sizes its cache by what is left leaves room for that. Outputs that are declared in a dict may not
        be all that the function returns, which shows when it has run.

        Args:
            measure: run the largest bucket of each runner and mode that isn't captured once, as a warm-up does, and
                take the most that it has allocated at a time: a profile pass. The function must run as it does then,
                without a cache if there is none yet; static memory is allocated, and stays. A pool takes a little
                more, in whole segments and with libraries' workspaces. Not done for graphs that are captured, which
                say it themselves, nor for those that a `memory_budget` has no room for.

        Raises:
            StateError: the group is closed; or its memory is released, and `measure` would take it again.
            ConcurrentRunError: measuring, a run of the group is under way.
            MemoryBudgetError: measuring, the device's memory is too small.
            Exception: measuring, what a function raises.
        """
        self._check_open()
        if not isinstance(measure, bool):
            raise SpecError(f"measure must be True or False, got {measure!r}")
        if measure and self.state is State.SUSPENDED:
            raise StateError(
                "the group's memory is released, and measuring would take it again; measure before release(), or call "
                "capture()"
            )
        missing = {runner: missing_graphs(runner) for runner in self.runners}
        # A group without graphs hasn't captured them all.
        is_captured = self.state is State.CAPTURED and not any(missing.values())
        measured = {}
        if measure and not is_captured:
            with self._shared.exclusive("estimate"):
                measured = self._capture.measure(
                    [r.entry_of(*graph) for r in missing for graph in largest_graphs(missing[r])],
                    # What others have written there is still to be read.
                    keeps_buffers=self.state is State.CAPTURED,
                )
        use = self._capture.use()
        return estimate_of(
            missing,
            device=str(self.device),
            buffers=use.buffers,
            measured=measured,
            pool=use.pool,
            driver=use.driver if is_captured else None,
            pools=self._lazy.pools(missing) if self._lazy is not None else 1,
        )

    # -- lifecycle --------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop the graphs, and keep buffers: memory that they read has moved. `capture` makes new ones."""
        self._check_open()
        with self._shared.exclusive("invalidate"):
            for runner in self.runners:
                runner.drop_graphs()
            self._capture.forget_graphs()
            # A suspended group has no memory either, so that it stays what it is.
            if self.state is State.CAPTURED:
                self._capture.set_state(State.STALE)

    def release(self) -> None:
        """Give all device memory back, and keep the declarations. Runs raise until `capture`."""
        self._check_open()
        with self._shared.exclusive("release"):
            self._drop()
            self._capture.set_state(State.SUSPENDED)

    def close(self) -> None:
        """Drop everything for good. Closing twice is harmless."""
        if self.state is State.CLOSED:
            return
        with self._shared.exclusive("close"):
            self._drop()
            for buffers in self._all_buffers:
                buffers.close()
            self._capture.set_state(State.CLOSED)

    def __enter__(self) -> GraphGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _drop(self) -> None:
        if self._shared.last_stream is not None:
            self.backend.synchronize(self._shared.last_stream)
        for runner in self.runners:
            runner.drop_memory()
        for buffers in self._all_buffers:
            buffers.forget()
        self._capture.forget_memory()
        self._shared.last_stream = None
        self.backend.empty_cache()

    def check_addresses(self) -> None:
        """Raise a `StaleGraphError` if memory named in a runner's `reads=` has moved since the capture."""
        for runner in self.runners:
            runner.check_addresses()

    def _check_open(self) -> None:
        if self.state is State.CLOSED:
            raise StateError("the group is closed; make a new GraphGroup")

    # -- running ----------------------------------------------------------------------------------

    def report(self) -> Report:
        """What is captured, what ran, what fell back, and what memory that takes."""
        memory = self._capture.use()
        return Report(
            state=self.state.name,
            device=str(self.device),
            runners=tuple(runner_report(runner) for runner in self.runners),
            buffer_bytes=memory.buffers,
            host_bytes=sum(r.staging.host_nbytes + r.results.host_nbytes for r in self.runners),
            reserved_bytes=self.backend.memory_reserved(),
            capture_seconds=self.capture_seconds + (self._lazy.seconds if self._lazy else 0),
            messages=tuple(self._capture.messages),
            memory=memory,
            memory_budget=self.memory_budget,
            max_graphs=self._lazy.max_graphs if self._lazy else None,
            evictions=self._lazy.evictions if self._lazy else 0,
        )

    def __repr__(self) -> str:
        return f"GraphGroup({str(self.device)!r}, {self.state.name}, runners={list(self._runners)})"
