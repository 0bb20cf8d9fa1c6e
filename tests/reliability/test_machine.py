"""A group's whole life in any order against plain functions on plain tensors: twenty thousand steps of it.

Runners are made of a hundred small functions, share buffers, feed each other, are captured, fail to be captured, run
at any size and in any mode, and are dropped and captured again. The model knows what each buffer holds, row by row,
padding included, and which graphs there are. GRAPHKIT_MACHINE_EXAMPLES sets how many walks of 200 steps are made.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import graphkit as gk
from tests.reliability.functions import NAMES, compose

ROWS = gk.Dim("rows", 9)
STEPS = 200
MAX_RUNNERS = 4
PADS: dict[str, Any] = {"a": 0, "b": 7, "c": gk.repeat_last, "d": gk.keep}
POLICIES: tuple[dict[gk.Mode, tuple[int, ...]], ...] = (
    {gk.FULL: (2, 6)},
    {gk.FULL: (1, 4)},
    {gk.FULL: (9,)},
    {gk.PIECEWISE: (3, 8)},
    {gk.FULL: (2,), gk.PIECEWISE: (5,)},
    {gk.FULL: (3,)},
)

seeds = st.integers(0, 2**32 - 1)


class Mine(Exception):
    """A failure of the function's own."""


class Holder(torch.nn.Module):
    """What a runner reads and the group doesn't own."""

    weight: torch.Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([3, -2], device=device))


@attrs.define(eq=False)
class Known:
    """The model of one runner."""

    runner: gk.GraphRunner
    stages: tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
    graphs: dict[gk.Mode, tuple[int, ...]]
    inputs: dict[str, tuple[str, bool]]
    """Parameter -> its buffer, and whether it is fed."""
    counts: bool
    reads: bool
    out: str
    """Where the output goes: "static", "host", "dict", or a buffer's name."""
    captured: dict[tuple[gk.Mode, int], int] = attrs.field(factory=dict)
    """Graph -> the version of the watched weight that it reads."""

    @property
    def missing(self) -> list[tuple[gk.Mode, int]]:
        every = [(mode, size) for mode, sizes in self.graphs.items() for size in sizes]
        return [graph for graph in every if graph not in self.captured]

    def expected(self, size: int) -> tuple[gk.Mode, int]:
        """The mode and padded size that a batch gets: the best mode, then the least padding."""
        for mode in (gk.FULL, gk.PIECEWISE):
            fitting = [s for m, s in self.captured if m is mode and s >= size]
            if fitting:
                return mode, min(fitting)
        return gk.EAGER, size


class Memory:
    """What a buffer holds, and which of its rows are known."""

    def __init__(self, pad: Any) -> None:
        self.pad = pad
        self.rows = torch.zeros(ROWS.maximum, 2, dtype=torch.int64)
        self.known = [False] * ROWS.maximum

    def forget(self) -> None:
        self.known = [False] * ROWS.maximum

    def write(self, rows: torch.Tensor, known: list[bool]) -> None:
        self.rows[: len(rows)] = rows
        self.known[: len(rows)] = known

    def fill(self, size: int, padded: int) -> None:
        """Pad what lies behind the batch."""
        if self.pad is gk.keep or padded == size:
            return
        if self.pad is gk.repeat_last:
            self.rows[size:padded] = self.rows[size - 1] if size else 0
            known = self.known[size - 1] if size else True
        else:
            self.rows[size:padded] = self.pad
            known = True
        self.known[size:padded] = [known] * (padded - size)


class Machine(RuleBasedStateMachine):
    """See the module's docstring."""

    device: ClassVar[str] = "cpu"
    tally: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.group: gk.GraphGroup | None = None

    def count(self, what: str) -> None:
        self.tally[what] = self.tally.get(what, 0) + 1

    # -- declarations -----------------------------------------------------------------------------

    @precondition(lambda self: self.group is None)
    @rule(seed=seeds)
    def begin(self, seed: int) -> None:
        draw = random.Random(seed)
        self.checked = draw.random() < 0.5
        self.group = gk.GraphGroup(self.device, checked=self.checked)
        specs = {n: gk.BufferSpec((ROWS, 2), torch.int64, pad=pad) for n, pad in PADS.items()}
        self.group.buffers.declare(**specs)
        self.memory = {name: Memory(pad) for name, pad in PADS.items()}
        self.holder = Holder(self.device)
        self.version = 0
        self.runners: list[Known] = []
        self.state = gk.State.NEW
        self.armed: tuple[str, int] | None = None
        self.side = torch.cuda.Stream() if self.device == "cuda" else None
        for _ in range(draw.randint(1, 3)):
            self._declare(draw)
        if draw.random() < 0.7:
            self._capture(draw)

    def _declare(self, draw: random.Random) -> None:
        assert self.group is not None
        name = f"r{len(self.runners)}"
        number = draw.randrange(len(NAMES))
        first, second = compose(number)
        graphs = draw.choice(POLICIES)
        x, y = draw.sample(list(PADS), 2)
        inputs = {"x": (x, draw.random() < 0.5)}
        other = draw.choice(["buffer", "weight", "weight", "self"])
        if other == "buffer":
            inputs["y"] = (y, draw.random() < 0.7)
        counts = draw.random() < 0.3
        out = draw.choice(["static", "host", "dict", *PADS])
        pause = gk.eager_break(lambda t: t + 1)
        holder = self.holder

        def fn(x: Any, y: Any = None, rows: Any = None) -> Any:
            if self.armed == (name, len(x)):
                raise Mine(name)
            z = first(x, holder.weight if other == "weight" else x if y is None else y)
            z = second(pause(z))
            if rows is not None:
                z = z + rows
            return {"z": z, "twice": z * 2} if out == "dict" else z

        def after(t: torch.Tensor) -> torch.Tensor:
            return second(t + 1)

        roles: dict[str, Any] = {
            p: (gk.Fed if fed else gk.Resident)(buffer) for p, (buffer, fed) in inputs.items()
        }
        if counts:
            roles["rows"] = gk.Count(ROWS)
        shape = (ROWS, 2)
        outputs: dict[str, Any] = {
            "static": gk.Output(shape, torch.int64),
            "host": gk.Output(shape, torch.int64, to="host"),
            "dict": {p: gk.Output(shape, torch.int64) for p in ("z", "twice")},
        }
        runner = self.group.runner(
            name,
            _signature(fn, list(roles)),
            policy=gk.Policy([gk.Route(m, gk.Buckets.of(ROWS, s)) for m, s in graphs.items()]),
            inputs=roles,
            outputs=outputs.get(out) or self.group.buffers[out],
            reads=[holder] if other == "weight" else [],
        )
        self.runners.append(
            Known(runner, (first, after), graphs, inputs, counts, other == "weight", out)
        )

    @precondition(lambda self: self.group is not None and len(self.runners) < MAX_RUNNERS)
    @rule(seed=seeds)
    def declare(self, seed: int) -> None:
        if self.state is gk.State.CLOSED:
            return
        draw = random.Random(seed)
        if draw.random() < 0.3:
            self._declare(draw)
            self.count("declared")

    # -- lifecycle --------------------------------------------------------------------------------

    @precondition(lambda self: self.group is not None)
    @rule(seed=seeds)
    def live(self, seed: int) -> None:
        """Something happens to the group: drawn here, since most steps are to be runs."""
        if self.state is gk.State.CLOSED:
            return
        draw = random.Random(seed)
        if draw.random() < 0.4:
            self._run(draw.choice(self.runners), draw.randint(0, ROWS.maximum), draw)
            return
        action = draw.choices(
            [
                self._capture,
                self._fail,
                self._move,
                self._budget,
                self._invalidate,
                self._release,
                self._close,
            ],
            [45, 15, 20, 8, 6, 5, 1],
        )[0]
        action(draw)

    def _capture(self, draw: random.Random) -> None:
        assert self.group is not None
        if draw.random() < 0.3:
            self._invalidate(draw)
        missing = [known for known in self.runners if known.missing]
        self.group.capture(progress=False)
        self.count("captures" if missing else "captures of nothing")
        self._captured(missing)

    def _captured(self, missing: list[Known], failed: tuple[Known, int] | None = None) -> None:
        for known in missing:
            for graph in known.missing:
                if failed is None or (known, graph[1]) != failed:
                    known.captured[graph] = self.version
        if missing:
            # Examples were written to the buffers, and released ones are new.
            for memory in self.memory.values():
                memory.forget()
        captured = any(known.captured for known in self.runners)
        self.state = gk.State.CAPTURED if captured else gk.State.NEW

    def _fail(self, draw: random.Random) -> None:
        assert self.group is not None
        missing = [known for known in self.runners if known.missing]
        if not missing:
            return
        victim = draw.choice(missing)
        size = draw.choice(victim.missing)[1]
        self.armed = victim.runner.name, size
        try:
            with pytest.raises(Mine) as raised:
                self.group.capture(progress=False)
        finally:
            self.armed = None
        assert f"runner {victim.runner.name!r}" in raised.value.__notes__[0]
        self.count("failed captures")
        self._captured(missing, (victim, size))

    def _move(self, draw: random.Random) -> None:
        assert self.group is not None
        # The old memory is kept, so that its address isn't given to the new one.
        self.kept = getattr(self, "kept", [])
        self.kept.append(self.holder.weight)
        self.holder.weight = self.holder.weight.flip(0).clone()
        self.version += 1
        self.count("moved weights")
        if any(known.reads and known.captured for known in self.runners):
            with pytest.raises(gk.StaleGraphError, match="weight was"):
                self.group.check_addresses()
        if draw.random() < 0.6:
            # As the message says.
            self._invalidate(draw)
            self._capture(draw)

    def _budget(self, draw: random.Random) -> None:
        """Capture what fits into little memory: the rest falls back, and comes with the next capture."""
        assert self.group is not None
        if draw.random() < 0.7:
            self._invalidate(draw)
        missing = [known for known in self.runners if known.missing]
        # Of no use, of use for some graphs, and for all. CUDA gives memory in pages, the recording backend to the byte.
        more = draw.choice([0, 300, 600, 1_200, 2_400]) * (1 if self.device == "cpu" else 4096)
        some = self.group.estimate().static + more
        budget = draw.choice([1, some, some, some, 1 << 30])
        self.group.memory_budget = budget
        try:
            self.group.capture(progress=False)
        except gk.MemoryBudgetError:
            # What isn't captured alone is above it.
            self.count("budgets below what is static")
            return
        finally:
            self.group.memory_budget = None
        self.count("budgets")
        for known in missing:
            captured = known.runner.dispatcher.captured
            there = {(mode, bucket["rows"]) for mode, bucket in captured}
            assert known.captured.keys() <= there
            left = {graph for graph in known.missing if graph not in there}
            self.count("graphs over budget") if left else None
            known.captured.update(dict.fromkeys(there - known.captured.keys(), self.version))
        for memory in self.memory.values() if missing else ():
            memory.forget()
        captured = any(known.captured for known in self.runners)
        self.state = gk.State.CAPTURED if captured else gk.State.NEW

    def _invalidate(self, draw: random.Random) -> None:
        assert self.group is not None
        self.group.invalidate()
        self.count("invalidated")
        if self.state is gk.State.CAPTURED:
            self.state = gk.State.STALE
        for known in self.runners:
            known.captured.clear()

    def _release(self, draw: random.Random) -> None:
        assert self.group is not None
        self.group.release()
        self.count("released")
        self.state = gk.State.SUSPENDED
        for known in self.runners:
            known.captured.clear()
        for memory in self.memory.values():
            memory.forget()

    def _close(self, draw: random.Random) -> None:
        assert self.group is not None
        self.group.close()
        self.count("closed")
        self.state = gk.State.CLOSED
        # The walk goes on with another group.
        self._check_dead(draw)
        self.group = None

    def _check_dead(self, draw: random.Random) -> None:
        known = draw.choice(self.runners)
        with pytest.raises(gk.StateError, match="closed"):
            known.runner.run(known.runner.dispatch(rows=1), self._given(known, 1, draw)[0])

    # -- runs -------------------------------------------------------------------------------------

    def _given(
        self, known: Known, size: int, draw: random.Random
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Fed inputs as a user gives them, in one of several ways, and as the model sees them."""
        given: dict[str, Any] = {}
        values: dict[str, torch.Tensor] = {}
        for name, (_, fed) in known.inputs.items():
            if not fed:
                continue
            numbers = [draw.randint(-9, 9) for _ in range(2 * size)]
            rows = torch.tensor(numbers, dtype=torch.int64).reshape(size, 2)
            values[name] = rows
            how = draw.randrange(4 if size else 3)
            given[name] = (rows, rows.numpy(), rows.to(self.device), rows.tolist())[how]
        return given, values

    def _run(self, known: Known, size: int, draw: random.Random) -> None:
        runner = known.runner
        eager = "on purpose" if draw.random() < 0.1 else None
        given, values = self._given(known, size, draw)
        dispatch = runner.dispatch(rows=size, eager=eager)
        if self.state is gk.State.SUSPENDED:
            with pytest.raises(gk.StateError, match="released"):
                runner.run(dispatch, given)
            return
        mode, padded = known.expected(size) if eager is None else (gk.EAGER, size)
        assert dispatch.mode is mode
        if mode is not gk.EAGER:
            assert dispatch.bucket is not None
            assert dispatch.bucket["rows"] == padded
            if known.reads and known.captured[mode, padded] != self.version:
                if self.checked:
                    with pytest.raises(gk.StaleGraphError, match="weight was"):
                        runner.run(dispatch, given)
                    self._staged_only(known, values, size)
                    self.count("stale graphs refused")
                # Unchecked, it is looked at once for each bucket: what a later run reads is unspecified.
                return
        clone = draw.random() < 0.2
        with self._stream(draw):
            if draw.random() < 0.1 and values and padded:
                out = self._staged_run(runner, dispatch, given, clone)
            else:
                out = runner.run(dispatch, given, clone=clone)
        self.count(f"{mode} runs")
        self._check(known, out, values, size, padded)

    def _staged_run(
        self, runner: gk.GraphRunner, dispatch: gk.Dispatch, given: dict[str, Any], clone: bool
    ) -> Any:
        """Fill one input in place, and give the others."""
        name = next(iter(given))
        value = given.pop(name)
        with runner.stage(dispatch) as staged:
            staged.host[name][...] = value.cpu() if isinstance(value, torch.Tensor) else value
        return runner.run(dispatch, given, clone=clone)

    @contextlib.contextmanager
    def _stream(self, draw: random.Random) -> Iterator[None]:
        if self.side is None or draw.random() < 0.7:
            yield
            return
        side: Any = self.side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream().wait_stream(side)

    def _staged_only(self, known: Known, values: dict[str, torch.Tensor], size: int) -> None:
        """A run that was refused after its inputs were staged may have left anything in what it is fed."""
        for buffer, _ in known.inputs.values():
            self.memory[buffer].forget()

    def _check(
        self, known: Known, out: Any, values: dict[str, torch.Tensor], size: int, padded: int
    ) -> None:
        for name, (buffer, fed) in known.inputs.items():
            if fed:
                self.memory[buffer].write(values[name], [True] * size)
            self.memory[buffer].fill(size, padded)
        x = self.memory[known.inputs["x"][0]]
        args = [self.memory[buffer] for buffer, _ in known.inputs.values()]
        if known.reads:
            second = self.holder.weight.cpu()
        else:
            second = (self.memory[known.inputs["y"][0]] if "y" in known.inputs else x).rows[:padded]
        first, after = known.stages
        expected = after(first(x.rows[:padded], second))
        if known.counts:
            expected = expected + size
        known_rows = [all(memory.known[row] for memory in args) for row in range(padded)]
        if known.out in self.memory:
            self.memory[known.out].write(expected, known_rows)
        if self.device == "cuda":
            torch.cuda.synchronize()
        parts = (
            {"z": (out["z"], 1), "twice": (out["twice"], 2)}
            if known.out == "dict"
            else {"": (out, 1)}
        )
        for tensor, factor in parts.values():
            assert tuple(tensor.shape) == (size, 2)
            assert tensor.dtype is torch.int64
            assert tensor.device.type == ("cpu" if known.out == "host" else self.device)
            found, wanted = tensor.tolist(), (expected * factor).tolist()
            for row in range(size):
                assert not known_rows[row] or found[row] == wanted[row]
            self.count("results compared") if all(known_rows[:size]) and size else None

    @precondition(lambda self: self.group is not None)
    @rule(size=st.integers(0, ROWS.maximum), seed=seeds)
    def run(self, size: int, seed: int) -> None:
        draw = random.Random(seed)
        self._run(draw.choice(self.runners), size, draw)

    @precondition(lambda self: self.group is not None)
    @rule(size=st.integers(0, ROWS.maximum), seed=seeds)
    def run_again(self, size: int, seed: int) -> None:
        self.run(size, seed)

    @precondition(lambda self: self.group is not None)
    @rule(size=st.integers(0, ROWS.maximum), seed=seeds)
    def chain(self, size: int, seed: int) -> None:
        """All runners one after another, as a drafter after its target."""
        draw = random.Random(seed)
        for known in draw.sample(self.runners, len(self.runners)):
            self._run(known, size, draw)

    @precondition(lambda self: self.group is not None)
    @rule(seed=seeds)
    def give_what_does_not_fit(self, seed: int) -> None:
        """It is refused, and changes nothing."""
        draw = random.Random(seed)
        known = draw.choice(self.runners)
        size = draw.randint(1, ROWS.maximum - 1)
        given, _ = self._given(known, size, draw)
        if not given or self.state is gk.State.SUSPENDED:
            return
        name = draw.choice(list(given))
        given[name] = torch.zeros(size + 1, 2, dtype=torch.int64)
        dispatch = known.runner.dispatch(rows=size)
        with pytest.raises(gk.InputError, match="got shape"):
            known.runner.run(dispatch, given)
        self.count("inputs refused")

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def buffers_hold_what_the_model_says(self) -> None:
        self.count("steps")
        if self.group is None or self.state is gk.State.SUSPENDED:
            return
        for name, memory in self.memory.items():
            buffer = self.group.buffers[name]
            if buffer.is_allocated and any(memory.known):
                rows = buffer.tensor.tolist()
                for row, known in enumerate(memory.known):
                    assert not known or rows[row] == memory.rows[row].tolist(), (name, row)

    @invariant()
    def states_agree(self) -> None:
        if self.group is not None:
            assert self.group.state is self.state
            for known in self.runners:
                assert len(known.runner.dispatcher.captured) == len(known.captured)

    def teardown(self) -> None:
        if self.group is not None:
            self.group.close()
        # What hypothesis remembers of the walks grows, and each capture would look it through for garbage.
        gc.freeze()


def _signature(fn: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The function with exactly these parameters: what has a default is no input."""
    if names == ["x"]:
        return lambda x: fn(x)
    if names == ["x", "y"]:
        return lambda x, y: fn(x, y)
    if names == ["x", "rows"]:
        return lambda x, rows: fn(x, rows=rows)
    return lambda x, y, rows: fn(x, y, rows)


HAPPENINGS = (
    "FULL runs",
    "PIECEWISE runs",
    "EAGER runs",
    "results compared",
    "captures",
    "failed captures",
    "moved weights",
    "stale graphs refused",
    "budgets",
    "graphs over budget",
    "invalidated",
    "released",
    "declared",
    "inputs refused",
)
"""What a walk of thousands of steps can't have missed."""


def machine_settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_a_group_behaves_as_its_model(device: str) -> None:
    default = 125 if device == "cpu" else 16
    examples = int(os.environ.get("GRAPHKIT_MACHINE_EXAMPLES", default))
    tally: dict[str, int] = {}
    machine = type("Walk", (Machine,), {"device": device, "tally": tally})
    run_state_machine_as_test(machine, settings=machine_settings(examples))
    print(f"\n{device}: {tally}")
    if examples >= default:
        assert tally["steps"] >= (20_000 if device == "cpu" else 2_000)
        for what in HAPPENINGS:
            assert tally.get(what, 0) > 0, what
