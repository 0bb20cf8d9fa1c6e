"""Checks of captured runners: functions that raise a `CheckError` naming what is wrong and the smallest batch.

They try the boundary sizes of the runner's buckets, smallest first, and need nothing besides graphkit. Inputs that
aren't given are made up (`graphkit.testing.contents`); a function whose inputs have to fit each other (row starts,
block tables, sequence lengths) needs the runner's `example=`, or ``inputs=``, a function of the dispatch. What a
function changes (`mutates=`, resident buffers) is put back around every call, and is as before afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch

from graphkit.checking.differences import difference
from graphkit.checking.findings import CheckReport, FindingKind
from graphkit.dispatch.bucket import Bucket
from graphkit.errors import CheckError
from graphkit.runner.runner import GraphRunner
from graphkit.testing.cases import (
    Given,
    Target,
    cases_of,
    checked_options,
    runners_of,
    starting_alike,
    tolerance_of,
)
from graphkit.testing.choice import best_graph_is_chosen
from graphkit.testing.lifetimes import (
    no_allocation,
    one_run_at_a_time,
    others_leave_outputs,
    outputs_survive,
)

_MATCHES = frozenset({FindingKind.PADDED, FindingKind.REAL, FindingKind.UNDECLARED})
_PADS = frozenset({FindingKind.PADS})
_HISTORY = frozenset({FindingKind.HISTORY})


def check_all(target: Target, /, **given: Unpack[Given]) -> tuple[CheckReport, ...]:
    """Every check of this module, on every boundary batch.

    Args:
        target: a captured runner, a wrapped function, or a group, whose runners are all checked.
        **given: `batches`, `inputs`, `resident`, `context`, `rtol`, `atol`; see `Given`.

    Returns:
        The report of each batch.

    Raises:
        CheckError: a check failed. What is listed first says most.
    """
    given = checked_options(given)
    reports: list[CheckReport] = []
    for runner in runners_of(target):
        reports.extend(_reports(runner, given, _MATCHES | _PADS | _HISTORY))
        for check in (
            _every_bucket_is_captured,
            _history,
            best_graph_is_chosen,
            one_run_at_a_time,
            outputs_survive,
        ):
            check(runner, given)
        # What prepare makes is its own affair.
        if not runner.has_prepare:
            no_allocation(runner, given)
    others_leave_outputs(runners_of(target), given)
    return tuple(reports)


def check_matches_eager(target: Target, /, **given: Unpack[Given]) -> tuple[CheckReport, ...]:
    """Each graph gives what the function gives: bit by bit on the same padded buffers, closely on the batch alone.

    Outputs, resident and in-place buffers and declared state are compared; state that isn't declared is a failure.

    Raises:
        CheckError: it doesn't; see `GraphRunner.check`.
    """
    given = checked_options(given)
    return tuple(r for runner in runners_of(target) for r in _reports(runner, given, _MATCHES))


def check_padding_independence(
    target: Target, /, **given: Unpack[Given]
) -> tuple[CheckReport, ...]:
    """No real row depends on what a buffer holds beyond the batch, where its pad isn't `relied` on.

    Raises:
        CheckError: one does; the buffer whose padding reaches it is named.
    """
    given = checked_options(given)
    return tuple(r for runner in runners_of(target) for r in _reports(runner, given, _PADS))


def check_history_independence(
    target: Target, /, **given: Unpack[Given]
) -> tuple[CheckReport, ...]:
    """No result depends on which batches ran before: neither after one that fills the bucket, nor in another order.

    Raises:
        CheckError: one does; the output or buffer and the two batches are named.
    """
    given = checked_options(given)
    reports: list[CheckReport] = []
    for runner in runners_of(target):
        reports.extend(_reports(runner, given, _HISTORY))
        _history(runner, given)
    return tuple(reports)


def check_outputs_survive(target: Target, /, **given: Unpack[Given]) -> None:
    """Outputs last as long as they say, and no longer.

    A view holds what a copy of it held; a copy outlives the next run; a view that the next run has overwritten raises
    in checked mode; and what one runner of a group returned, the others leave alone.

    Raises:
        CheckError: they don't.
    """
    given = checked_options(given)
    for runner in runners_of(target):
        outputs_survive(runner, given)
    others_leave_outputs(runners_of(target), given)


def check_every_bucket(target: Target, /, **given: Unpack[Given]) -> tuple[CheckReport, ...]:
    """Every bucket of the policy is captured, and is right for the batch that fills it.

    Raises:
        CheckError: one isn't; why its capture failed is said.
    """
    given = checked_options(given)
    reports: list[CheckReport] = []
    for runner in runners_of(target):
        _every_bucket_is_captured(runner, given)
        full = [_own_batch(bucket) for _, bucket in runner.dispatcher.graphs]
        full.sort(key=lambda named: sum(v for v in named.values() if isinstance(v, int)))
        mine: Given = {**given, "batches": full}
        reports.extend(_reports(runner, mine, _MATCHES | _PADS | _HISTORY))
    return tuple(reports)


def check_no_allocation(target: Target, /, **given: Unpack[Given]) -> None:
    """A FULL run allocates no device memory, and its outputs stay where they are.

    Counted where the device's allocator counts (CUDA); what `prepare` allocates counts too. Not in checked mode, which
    verifies at a price.

    Raises:
        CheckError: it does; bytes and batch are named.
    """
    given = checked_options(given)
    for runner in runners_of(target):
        no_allocation(runner, given)


def check_dispatch(target: Target, /, **given: Unpack[Given]) -> None:
    """Each batch gets the best mode that takes it, in the cheapest captured bucket that holds it.

    Raises:
        CheckError: one doesn't, or a captured bucket that should be reachable isn't.
    """
    given = checked_options(given)
    for runner in runners_of(target):
        best_graph_is_chosen(runner, given)


def check_one_run_at_a_time(target: Target, /, **given: Unpack[Given]) -> None:
    """A run that begins while another run of the group is under way is refused.

    Raises:
        CheckError: it isn't.
    """
    given = checked_options(given)
    for runner in runners_of(target):
        one_run_at_a_time(runner, given)


# -- eager, padding, history: what GraphRunner.check finds -----------------------------------------


def _reports(
    runner: GraphRunner, given: Given, kinds: frozenset[FindingKind]
) -> Iterator[CheckReport]:
    for number, case in enumerate(cases_of(runner, given), 1):
        try:
            report = runner.check(
                case.dispatch,
                case.inputs,
                context=case.context,
                resident=case.resident,
                rtol=given.get("rtol"),
                atol=given.get("atol"),
                raise_on_failure=False,
            )
        except Exception as error:
            error.add_note(f"graphkit: in the check of {case}")
            raise
        if any(finding.kind in kinds for finding in report.failures):
            first = "the smallest that fails, " if "batches" not in given else ""
            raise CheckError(f"{case} ({first}number {number}):\n{report}", report=report)
        yield report


def _history(runner: GraphRunner, given: Given) -> None:
    """Run all batches, smallest first and then largest first, and compare each with itself."""
    cases = list(cases_of(runner, given))
    tolerance = tolerance_of(given)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    with starting_alike(runner) as start:
        before = "the start"
        for order in (range(len(cases)), reversed(range(len(cases)))):
            for index in order:
                case = cases[index]
                start(buffers=False)
                found = case.results()
                for what, tensor in seen.setdefault(index, found).items():
                    differs = difference(found[what], tensor, tolerance)
                    if differs is not None:
                        raise CheckError(
                            f"{case}: {what} depends on what ran before: after {before} it differs {differs} from what "
                            "it was at first"
                        )
                before = str(case)


# -- buckets ----------------------------------------------------------------------------------------


def _every_bucket_is_captured(runner: GraphRunner, given: Given) -> None:
    for mode, bucket in runner.dispatcher.graphs:
        if not runner.dispatcher.is_captured(mode, bucket):
            entry = runner.entry(mode, bucket)
            why = entry.failure if entry is not None and entry.failure else "nobody tried"
            raise CheckError(
                f"runner {runner.name!r}: {mode} bucket [{bucket}] isn't captured: {why}"
            )


def _own_batch(bucket: Bucket) -> dict[str, object]:
    named: dict[str, object] = dict(bucket.sizes)
    if bucket.query_len is not None:
        named["query_len"] = bucket.query_len
    elif bucket.max_query_len is not None:
        named["max_query_len"] = bucket.max_query_len
    if bucket.variant:
        named["variant"] = dict(bucket.variant)
    return named
