"""A runner's whole life in any order, its results compared with an eager twin's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

try:
    import hypothesis as _hypothesis  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "graphkit.testing.RunnerMachine needs hypothesis, which isn't installed; install it with "
        "`pip install graphkit-cuda[test]`, or use the checks of graphkit.testing, which go without"
    ) from _error
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from graphkit.capture.mutation import Scratch
from graphkit.checking.kept import has_fixed_rows, nobodys
from graphkit.dispatch.dispatcher import Dispatch
from graphkit.errors import CheckError, DispatchError, InputError, SpecError
from graphkit.group.group import GraphGroup
from graphkit.outputs.outputs import Tree, output_name
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import State
from graphkit.testing.residents import read_residents, write_residents
from graphkit.testing.strategies import (
    Batch,
    batches_above,
    batches_of,
    inputs_for,
    residents_for,
)

_TWIN = "the twin that the graphs are compared with"


class RunnerMachine(RuleBasedStateMachine):
    """A stateful test of your own runner. Subclass it, make the runner, and run it as a test::

        class DecodeMachine(RunnerMachine):
            def make_runner(self, group):
                group.buffers.declare(x=gk.BufferSpec((ROWS, 8), torch.float32, pad=0))
                return group.runner("decode", MODEL, policy=gk.Policy.full(gk.Buckets.powers(ROWS)))

        TestDecode = DecodeMachine.TestCase         # or, in a test: DecodeMachine.check("cuda")

    Two groups are made, and a runner in each: one is captured, the other always runs EAGER. Batches of any size
    and kind are run through both, in any order, between captures, invalidations and releases; a batch's real rows
    must come out close to eager's, and so must the real rows of resident buffers and the state in ``mutates=``. Batches
    above a maximum must be refused. What fails is shrunk to the fewest steps and the smallest batch.

    `make_runner` is called twice, so that it must make what its function changes (a cache, a counter) each time
    afresh; weights may be shared. A function that draws random numbers needs its own `compare`: a graph draws for the
    padded batch.

    Attributes:
        device: of the groups.
        checked: whether they are checked.
        extreme: whether inputs hold the largest and smallest values of their dtypes.
        nan: whether they hold NaN and infinities.
        rtol: relative tolerance; None is `torch.testing.assert_close`'s for the dtype.
        atol: absolute tolerance; None likewise. Give both or none.
    """

    device: ClassVar[str] = "cpu"
    checked: ClassVar[bool] = True
    extreme: ClassVar[bool] = False
    nan: ClassVar[bool] = False
    rtol: ClassVar[float | None] = None
    atol: ClassVar[float | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.group = self.make_group(self.device)
        self.runner = self.make_runner(self.group)
        self._twin_group = self.make_group(self.device)
        self._twin = self.make_runner(self._twin_group)
        self._last: Batch | None = None
        self._has_run = False
        if self._twin is self.runner or self._twin_group is self.group:
            raise SpecError(
                f"{type(self).__name__}.make_runner gave the same runner twice; it has to make one in the group "
                "that it is given, each time it is called"
            )
        for mine, twins in zip(self.state_of(self.runner), self.state_of(self._twin), strict=True):
            if mine.data_ptr() == twins.data_ptr() and mine.numel():
                raise SpecError(
                    f"{type(self).__name__}.make_runner gave two runners that change the same state of shape "
                    f"{tuple(mine.shape)}; it has to make what is in mutates= each time it is called"
                )

    # -- what subclasses say ----------------------------------------------------------------------

    def make_group(self, device: str) -> GraphGroup:
        """The group to make the runner in; called twice. An engine that owns its group may give that."""
        return GraphGroup(device, checked=self.checked)

    def make_runner(self, group: GraphGroup) -> GraphRunner:
        """Declare buffers and runner in this group; called twice."""
        raise NotImplementedError(f"{type(self).__name__} must define make_runner(self, group)")

    def inputs(self, dispatch: Dispatch) -> Mapping[str, Any]:
        """Inputs that can't be drawn one by one: name -> a value, or a strategy of it. By default none."""
        return {}

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch can come up. By default all that `batches_of` the runner gives."""
        return True

    def note(self, group: GraphGroup) -> None:
        """Called with the group whose graphs were run, before it is closed. By default nothing is done."""

    def compare(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise an AssertionError unless `found` is as `expected`; by default close to it, NaN equal to NaN.

        Args:
            what: the output, resident buffer or state, for the message.
            found: of the run, cut to the batch.
            expected: eager's.
        """
        torch.testing.assert_close(
            found,
            expected,
            rtol=self.rtol,
            atol=self.atol,
            equal_nan=True,
            check_device=False,
            check_stride=False,
        )

    @classmethod
    def default_settings(cls) -> settings:
        """What `check` runs with: `settings(DecodeMachine.default_settings(), max_examples=5)` changes some."""
        return settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            # Explaining a failure runs it some hundred times more, each time with a capture of every bucket.
            phases=[phase for phase in Phase if phase is not Phase.explain],
            # A capture of every bucket is slow, and right so.
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.data_too_large,
                HealthCheck.filter_too_much,
            ],
        )

    @classmethod
    def check(
        cls,
        device: str | None = None,
        *,
        settings: settings | None = None,
        note: Callable[[GraphGroup], None] | None = None,
    ) -> None:
        """Run the machine as a test.

        Args:
            device: instead of the class's own, as a parametrised test gives it.
            settings: hypothesis's; by default 30 examples of 30 steps, without a deadline, and without explaining a
                failure, for which it would be repeated some hundred times.
            note: called with each group before it is closed: the plugin's `graph_exercise.note`.

        Raises:
            CheckError: a result differs from eager's.
        """
        said: dict[str, Any] = {} if device is None else {"device": str(device)}
        if note is not None:
            said["note"] = lambda self, group: note(group)
        machine: type[RuleBasedStateMachine] = type(cls.__name__, (cls,), said)
        with _only_young_garbage():
            run_state_machine_as_test(machine, settings=settings or cls.default_settings())

    # -- lifecycle --------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        """Most of a runner's life is after a capture."""
        self.group.capture(progress=False)

    @precondition(lambda self: self.group.state is not State.CAPTURED)
    @rule()
    def capture(self) -> None:
        """Capture again."""
        self.group.capture(progress=False)
        # A capture costs more than a hundred runs: not one goes without.
        self._has_run = False

    @precondition(lambda self: self._has_run and self.group.state is State.CAPTURED)
    @rule()
    def invalidate(self) -> None:
        """Drop the graphs: batches run EAGER until the next capture."""
        self.group.invalidate()

    @precondition(lambda self: self._has_run and self.group.state is not State.SUSPENDED)
    @rule()
    def release(self) -> None:
        """Give the memory back: the next capture has other addresses."""
        self.group.release()

    # -- batches ----------------------------------------------------------------------------------

    @precondition(lambda self: self.group.state is not State.SUSPENDED)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """Run a batch of any size and kind."""
        batch = data.draw(batches_of(self.runner, where=self.accepts), label="batch")
        self._run(data, batch)

    @precondition(lambda self: self._last and self.group.state is not State.SUSPENDED)
    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        """Run the last batch's sizes with other contents."""
        if self._last is not None:
            self._run(data, self._last)

    @precondition(lambda self: self.group.state is not State.SUSPENDED)
    @rule(data=st.data())
    def run_eagerly(self, data: st.DataObject) -> None:
        """Run a batch EAGER on the buffers that graphs use too."""
        batch = data.draw(batches_of(self.runner, where=self.accepts), label="batch")
        self._run(data, batch, eager="the machine's choice")

    @precondition(lambda self: self._has_run and self.runner.dispatcher.dims)
    @rule(data=st.data())
    def refuse_what_is_too_large(self, data: st.DataObject) -> None:
        """A batch above a maximum is an error, and nothing runs."""
        batch = data.draw(batches_above(self.runner), label="batch above a maximum")
        try:
            dispatch = self.runner.dispatch(**batch.named)
        except InputError:
            return
        raise CheckError(
            f"runner {self.runner.name!r}: {batch} is above a maximum and was answered: {dispatch}"
        )

    def teardown(self) -> None:
        """Close the groups."""
        self.note(self.group)
        self.group.close()
        self._twin_group.close()

    def _run(self, data: st.DataObject, batch: Batch, eager: str | None = None) -> None:
        try:
            dispatch = self.runner.dispatch(**batch.named, eager=eager)
        except DispatchError:
            # A strict runner refuses what would fall back.
            return
        drawn: dict[str, Any] = {
            "given": self.inputs(dispatch), "extreme": self.extreme, "nan": self.nan,
        }  # fmt: skip
        inputs = data.draw(inputs_for(self.runner, dispatch, **drawn), label="inputs")
        residents = data.draw(residents_for(self.runner, dispatch, **drawn), label="residents")
        as_eager = self._twin.dispatch(**batch.named, eager=_TWIN)
        expected = _run_one(self._twin, as_eager, inputs, residents)
        found = _run_one(self.runner, dispatch, inputs, residents)
        for runner, tensors in ((self.runner, found), (self._twin, expected)):
            _leave_out(runner, self._nobodys(runner), tensors)
        self._last, self._has_run = batch, True
        for what, value in expected.items():
            if what not in found:
                raise CheckError(f"{self._where(batch, dispatch)}: {what} is missing")
            self._compare(what, found[what], value, batch, dispatch)
        states = zip(self.state_of(self.runner), self.state_of(self._twin), strict=True)
        for place, (mine, twins) in enumerate(states):
            self._compare(f"state mutates[{place}]", mine, twins, batch, dispatch)

    def _compare(
        self,
        what: str,
        found: torch.Tensor,
        expected: torch.Tensor,
        batch: Batch,
        dispatch: Dispatch,
    ) -> None:
        try:
            self.compare(what, found, expected)
        except AssertionError as error:
            raise CheckError(
                f"{self._where(batch, dispatch)}: {what} differs from eager"
                f"{_rows(found, expected)}. {error}{self._advice(what)}"
            ) from None

    def _advice(self, what: str) -> str:
        """What to do where padding may have written a buffer that holds a cache."""
        for name, buffer in self.runner.binding.resident.items():
            if what == _resident(name) and has_fixed_rows(buffer):
                return (
                    "\nIf only padding writes those rows, and nothing reads them, say so: "
                    f"mutates=[gk.Scratch(group.buffers[{buffer.name!r}].tensor, rows=[...])]"
                )
        return ""

    def _where(self, batch: Batch, dispatch: Dispatch) -> str:
        bucket = f" [{dispatch.bucket}]" if dispatch.bucket is not None else ""
        return f"runner {self.runner.name!r}, {batch} in {dispatch.mode}{bucket}"

    def state_of(self, runner: GraphRunner) -> list[torch.Tensor]:
        """What is compared of the state in ``mutates=``: all but the rows that are nobody's.

        Those are the rows of a `Scratch`, and the rows that the constant pad of an index buffer (one with `valid`)
        points at.
        """
        scratch = self._index_pads(runner)
        return [_kept_rows(item, scratch) for item in runner.options.mutates]

    def _index_pads(self, runner: GraphRunner) -> set[int]:
        """The rows that the constant pads of index buffers point at."""
        return {
            int(pad.value)
            for buffer in runner.binding.buffers.values()
            if buffer.spec.valid is not None
            for pad in buffer.spec.pads
            if pad is not None and pad.is_constant and pad.value is not None
        }

    def _nobodys(self, runner: GraphRunner) -> list[tuple[torch.Tensor, Any]]:
        """State, and the indices of those of its rows that are nobody's."""
        pads = self._index_pads(runner)
        found: list[tuple[torch.Tensor, Any]] = []
        for item in runner.options.mutates:
            tensor = item.tensor if isinstance(item, Scratch) else item
            if isinstance(item, Scratch):
                found.append((tensor, item.index()))
            rows = [row for row in pads if tensor.ndim and -len(tensor) <= row < len(tensor)]
            if rows:
                found.append((tensor, torch.tensor(rows, device=tensor.device)))
        return found


def _run_one(
    runner: GraphRunner,
    dispatch: Dispatch,
    inputs: Mapping[str, Any],
    residents: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Outputs and resident buffers after a run: copies, by what they are."""
    write_residents(runner, dispatch, residents)
    runner.staging.settle()
    result = runner.run(dispatch, dict(inputs), clone=True)
    tensors = Tree(result, f"runner {runner.name!r}").tensors()
    found = {output_name(path): tensor for path, tensor in tensors.items()}
    for name, tensor in read_residents(runner, dispatch).items():
        found[_resident(name)] = tensor
    return found


def _resident(name: str) -> str:
    return f"resident buffer {name!r}"


def _leave_out(
    runner: GraphRunner,
    rows: Sequence[tuple[torch.Tensor, Any]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Clear those rows in the copies of buffers that share their memory."""
    for name, buffer in runner.binding.resident.items():
        if has_fixed_rows(buffer):
            copy = tensors[_resident(name)]
            mask = nobodys(buffer.tensor, rows)
            if mask is not None:
                copy[mask[tuple(slice(0, size) for size in copy.shape)]] = 0


def _kept_rows(item: torch.Tensor | Scratch, scratch: set[int]) -> torch.Tensor:
    """State without the rows that padding may write: those of a `Scratch`, and those that index pads name."""
    tensor = item.tensor if isinstance(item, Scratch) else item
    if not tensor.ndim:
        return tensor
    kept = torch.ones(tensor.shape[0], dtype=torch.bool)
    kept[[row for row in scratch if -len(kept) <= row < len(kept)]] = False
    if isinstance(item, Scratch):
        index = item.index()
        kept[index.cpu() if isinstance(index, torch.Tensor) else index] = False
    return tensor[kept.to(tensor.device)] if not bool(kept.all()) else tensor


def _rows(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Which rows differ, in words; nothing where the shapes do, or none is plainly different."""
    if found.shape != expected.shape or not found.ndim or not found.numel():
        return ""
    wide = torch.complex128 if found.dtype.is_complex else torch.float64
    left, right = found.detach().cpu().to(wide), expected.detach().cpu().to(wide)
    other = (left != right) & ~(left.isnan() & right.isnan())
    rows = other.reshape(len(other), -1).any(1).nonzero().flatten().tolist()
    if not rows:
        return ""
    shown = ", ".join(str(row) for row in rows[:4]) + (", ..." if len(rows) > 4 else "")
    return f" in row{'s' if len(rows) > 1 else ''} {shown} of {len(other)}"


@contextlib.contextmanager
def _only_young_garbage() -> Iterator[None]:
    """Each capture collects garbage, which takes far longer than the rest while all of torch is looked through."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
