"""Cases: the batches of one runner that have a graph, smallest first, each with its contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypedDict, cast

import attrs
import torch

from graphkit.checking.differences import Tolerance
from graphkit.checking.kept import Kept
from graphkit.dispatch.dispatcher import EAGER, Dispatch
from graphkit.errors import CheckError, DispatchError, SpecError
from graphkit.group.group import GraphGroup
from graphkit.group.wrap import Wrapped
from graphkit.outputs.outputs import Tree, output_name
from graphkit.runner.bucket_graph import BucketGraph
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import State
from graphkit.testing.boundaries import boundary_batches
from graphkit.testing.contents import contents_for
from graphkit.testing.residents import read_residents, write_residents

Target = GraphRunner | Wrapped | GraphGroup
"""What is checked: a runner, a wrapped function, or all runners of a group, which is captured if it isn't yet."""


class Given(TypedDict, total=False):
    """What the caller of a check may give; whatever is left out is made up."""

    batches: Iterable[Mapping[str, Any]]
    """Keyword arguments of `dispatch`, for each batch to try; by default the boundaries of all buckets."""
    inputs: Callable[[Dispatch], Mapping[str, Any]]
    """dispatch -> fed inputs by parameter, consistent with each other."""
    resident: Callable[[Dispatch], Mapping[str, Any]]
    """dispatch -> the batch's rows of resident buffers by parameter."""
    context: Callable[[Dispatch], Any]
    """dispatch -> what reaches prepare and breaks."""
    rtol: float | None
    """Relative tolerance at the real size."""
    atol: float | None
    """Absolute tolerance at the real size."""


@attrs.frozen(eq=False)
class Case:
    """One batch with its contents.

    Attributes:
        named: keyword arguments of `dispatch`.
        dispatch: the answer; not EAGER.
        inputs: what `run` is given.
        resident: rows of resident buffers.
        context: of the run.
    """

    runner: GraphRunner
    named: Mapping[str, Any]
    dispatch: Dispatch
    inputs: Mapping[str, Any]
    resident: Mapping[str, Any]
    context: Any

    @property
    def entry(self) -> BucketGraph | None:
        """Its graph."""
        bucket = self.dispatch.bucket
        return None if bucket is None else self.runner.entry(self.dispatch.mode, bucket)

    def place(self) -> None:
        """Write the resident buffers, as their producers would."""
        device = self.runner.backend.device
        contents = {
            name: torch.as_tensor(value, device=device) for name, value in self.resident.items()
        }
        write_residents(self.runner, self.dispatch, contents)

    def run(self, *, clone: bool = True) -> Any:
        """Place and run it; what the runner returns."""
        self.place()
        # What a caller's runs mustn't wait for, these may.
        self.runner.staging.settle()
        return self.runner.run(self.dispatch, self.inputs, context=self.context, clone=clone)

    def results(self) -> dict[str, torch.Tensor]:
        """Run it; copies of outputs and of resident rows, by the words that messages name them with."""
        outputs = named_outputs(self.run())
        rows = read_residents(self.runner, self.dispatch)
        return outputs | {f"buffer {name!r}": tensor for name, tensor in rows.items()}

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.named.items())
        return f"runner {self.runner.name!r}, dispatch({shown})"


def named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of what a runner returned, by the words that messages name them with."""
    tensors = Tree(result, "a check").tensors()
    return {output_words(path): tensor for path, tensor in tensors.items()}


def output_words(path: str) -> str:
    """An output in a message."""
    return output_name(path) if path else "the output"


def runners_of(target: Target) -> tuple[GraphRunner, ...]:
    """The runners to check.

    Raises:
        CheckError: there is none, or one of them has no graph.
    """
    if isinstance(target, GraphGroup):
        if target.state is not State.CAPTURED:
            target.capture(progress=False)
        runners: tuple[GraphRunner, ...] = target.runners
    elif isinstance(target, Wrapped):
        runners = (target.runner,)
    elif isinstance(target, GraphRunner):
        runners = (target,)
    else:
        raise CheckError(
            f"a check takes a runner, a wrapped function or a group, got {type(target).__name__}"
        )
    for runner in runners:
        if not runner.dispatcher.captured:
            raise CheckError(
                f"runner {runner.name!r}: none of its {len(runner.dispatcher.graphs)} graphs is captured; call "
                "capture() on the group first, or give the group to the check"
            )
    if not runners:
        raise CheckError("the group has no runner to check")
    return runners


def checked_options(given: Mapping[str, Any]) -> Given:
    """The options of a check, each known, and batches as they may be read several times. None is as if not given.

    Raises:
        SpecError: an option is unknown, or of another kind.
    """
    known = Given.__annotations__
    for name in given:
        if name not in known:
            raise SpecError(f"checks have no option {name!r}; they take {', '.join(known)}")
    options = {name: value for name, value in given.items() if value is not None}
    for name in ("inputs", "resident", "context"):
        if name in options and not callable(options[name]):
            raise SpecError(
                f"{name}= takes a function of the dispatch, got {type(options[name]).__name__}"
            )
    if "batches" in options:
        batches = options["batches"]
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise SpecError(
                f"batches= takes a sequence of mappings, one for each batch, got {batches!r}"
            )
        options["batches"] = tuple(batches)
        for batch in options["batches"]:
            if not isinstance(batch, Mapping):
                raise SpecError(
                    f"batches= takes mappings of dispatch's arguments, as {{'reqs': 3}}; got {batch!r}"
                )
    return cast(Given, options)


def cases_of(runner: GraphRunner, given: Given) -> Iterator[Case]:
    """The batches that have a graph, smallest first where nobody chose them.

    Raises:
        CheckError: none has.
    """
    batches = given.get("batches")
    if batches is None:
        batches = boundary_batches(runner.dispatcher)
    found = False
    for named in batches:
        try:
            dispatch = runner.dispatch(**named)
        except DispatchError:
            # Strict, and nobody's batch.
            continue
        if dispatch.mode is EAGER:
            continue
        found = True
        yield case_of(runner, named, dispatch, given)
    if not found:
        raise CheckError(f"runner {runner.name!r}: none of the batches has a graph")


def case_of(
    runner: GraphRunner,
    named: Mapping[str, Any],
    dispatch: Dispatch,
    given: Given,
    variation: int = 0,
) -> Case:
    """One batch with its contents."""
    fed, resident = contents_for(runner, dispatch, variation)
    if "inputs" in given:
        fed = dict(given["inputs"](dispatch))
    if "resident" in given:
        resident |= given["resident"](dispatch)
    context = given["context"](dispatch) if "context" in given else None
    return Case(runner, named, dispatch, fed, resident, context)


def tolerance_of(given: Given) -> Tolerance:
    """How close results of different computations have to be."""
    return Tolerance(rtol=given.get("rtol"), atol=given.get("atol"))


class Start(Protocol):
    """Puts memory and generators back as they were."""

    def __call__(self, *, buffers: bool = True) -> None:
        """Do it; `buffers` may be left with what the last run left."""


@contextlib.contextmanager
def starting_alike(runner: GraphRunner) -> Iterator[Start]:
    """Give a function that makes the next run start as the first one did; afterwards everything is as before.

    Put back are the runner's buffers, its declared state, the generators, and its counts of runs.
    """
    backend = runner.backend
    kept = Kept([*runner.binding.buffers.values(), *runner.results.buffers], runner.options.mutates)
    rng = backend.rng_state(runner.options.generators)
    counts = {entry: entry.replays for entry in runner.entries}

    def start(*, buffers: bool = True) -> None:
        with torch.no_grad():
            if buffers:
                kept.restore()
            else:
                kept.restore_state()
        backend.restore_rng_state(rng)

    try:
        yield start
    finally:
        start()
        for entry, replays in counts.items():
            entry.replays = replays
