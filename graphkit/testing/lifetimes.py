"""Lifetimes: how long outputs may be read, where they lie, and that runs don't overlap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graphkit.checking.differences import Tolerance, difference
from graphkit.dispatch.dispatcher import FULL
from graphkit.errors import CheckError, ConcurrentRunError, StaleOutputError
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import Shared
from graphkit.testing.cases import (
    Case,
    Given,
    case_of,
    cases_of,
    named_outputs,
    output_words,
    starting_alike,
)


def outputs_survive(runner: GraphRunner, given: Given) -> None:
    """A view holds what a copy held; a copy outlives the next run; a view that it overwrote raises in checked mode.

    Raises:
        CheckError: one doesn't.
    """
    *_, case = cases_of(runner, given)
    # Another batch of the same bucket, so that every element is written again.
    other = case_of(runner, case.named, case.dispatch, given, variation=1)
    with starting_alike(runner) as start, _checked(runner.shared):
        copies = named_outputs(case.run())
        before = {what: tensor.clone() for what, tensor in copies.items()}
        start()
        views = named_outputs(case.run(clone=False))
        # Outputs on the host are there when the device is done.
        runner.backend.synchronize()
        now = {what: view.clone() for what, view in views.items()}
        _refuse_changed(case, before, now, "a view")
        # As often as there are slots for outputs on the host.
        for _ in range(runner.options.ring_depth):
            other.run()
        _refuse_changed(case, before, copies, "after another run, a copy")
        for what, view in views.items():
            if before[what].numel() and not _has_ended(view):
                raise CheckError(
                    f"{case}: {what} could be read after another run had overwritten it, in checked mode: its lease "
                    "never ends"
                )


def others_leave_outputs(runners: Sequence[GraphRunner], given: Given) -> None:
    """What one runner returned in memory of its own, runs of the group's others don't change.

    Raises:
        CheckError: they do.
    """
    if len(runners) < 2:
        return
    largest = {runner.name: list(cases_of(runner, given))[-1] for runner in runners}
    with contextlib.ExitStack() as stack:
        for runner in runners:
            stack.enter_context(starting_alike(runner))
        for runner in runners:
            case = largest[runner.name]
            own = {
                output_words(path)
                for path, output in runner.results.outputs.items()
                if output.to == "static"
            }
            views = named_outputs(case.run(clone=False))
            before = {what: view.clone() for what, view in views.items() if what in own}
            for other in runners:
                if other is not runner:
                    largest[other.name].run()
            which = "after runs of the group's other runners, a view"
            _refuse_changed(case, before, views, which)


def no_allocation(runner: GraphRunner, given: Given) -> None:
    """A FULL run allocates nothing on the device, and its outputs stay where they are.

    Raises:
        CheckError: it does, or they don't.
    """
    device = runner.backend.device
    if runner.shared.checked:
        # What is verified at each run takes memory of its own.
        return
    with starting_alike(runner):
        for case in cases_of(runner, given):
            if case.dispatch.mode is not FULL:
                continue
            # What is made once for batches of this size is made here.
            places = _places(case.run(clone=False))
            inputs, context = dict(case.inputs), case.context
            runner.staging.settle()
            before = _allocated(device)
            result = runner.run(case.dispatch, inputs, context=context)
            allocated = _allocated(device) - before
            if allocated:
                raise CheckError(
                    f"{case}: a run allocated {allocated} bytes on {device}; keep what prepare makes in step.state"
                )
            on_host = {output_words(p) for p, o in runner.results.outputs.items() if o.to == "host"}
            for what, place in _places(result).items():
                if place != places[what] and what not in on_host:
                    raise CheckError(f"{case}: {what} lies elsewhere after the next run")


def one_run_at_a_time(runner: GraphRunner, given: Given) -> None:
    """A run that begins while another run of the group is under way is refused.

    Raises:
        CheckError: it isn't.
    """
    case = next(cases_of(runner, given))
    with starting_alike(runner):
        case.place()
        runner.staging.settle()
        try:
            with runner.shared.exclusive(f"a check of runner {runner.name!r}"):
                runner.run(case.dispatch, case.inputs, context=case.context)
        except ConcurrentRunError:
            return
    raise CheckError(
        f"{case}: a run began while another one of the group was under way; runs of a group share buffers, and the "
        "second must be refused"
    )


def _has_ended(view: torch.Tensor) -> bool:
    try:
        view.clone()
    except StaleOutputError:
        return True
    return False


def _refuse_changed(
    case: Case,
    before: Mapping[str, torch.Tensor],
    now: Mapping[str, torch.Tensor],
    which: str,
) -> None:
    for what, tensor in before.items():
        try:
            differs = difference(now[what], tensor, Tolerance())
        except StaleOutputError as error:
            raise CheckError(f"{case}: {which} of {what} can't be read: {error}") from error
        if differs is not None:
            raise CheckError(
                f"{case}: {which} of {what} isn't what it was at the run: it differs {differs}"
            )


def _places(result: Any) -> dict[str, int]:
    return {what: tensor.data_ptr() for what, tensor in named_outputs(result).items()}


def _allocated(device: torch.device) -> int:
    """Bytes that the device's allocator has given out since the process began; 0 where it doesn't count."""
    if device.type == "cpu":
        return 0
    stats = torch.get_device_module(device).memory_stats(device)
    return int(stats.get("allocated_bytes.all.allocated", 0))


@contextlib.contextmanager
def _checked(shared: Shared) -> Iterator[None]:
    """Leases, and all else that checked mode does at a run."""
    was, shared.checked = shared.checked, True
    try:
        yield
    finally:
        shared.checked = was
