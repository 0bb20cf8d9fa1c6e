"""The checks are checked: a graphkit with one thing broken must fail them, on runners that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import graphkit as gk
from graphkit import testing

from . import planted

Patch = pytest.MonkeyPatch


class NoLock:
    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass


def never_pads_host_inputs(patch: Patch) -> None:
    patch.setattr("graphkit.staging.staging.host_fills", lambda *args: ())


def never_pads_on_the_device(patch: Patch) -> None:
    patch.setattr("graphkit.staging.unpack.fill_device", lambda *args: None)


def pads_the_first_axis_only(patch: Patch) -> None:
    from graphkit.pads import host_fills

    def broken(region, real, pads, encode):
        return host_fills(region, real, [*pads[:1], *[None] * (len(pads) - 1)], encode)

    patch.setattr("graphkit.staging.staging.host_fills", broken)


def pads_with_zero_whatever_is_declared(patch: Patch) -> None:
    from graphkit.pads import Pad, host_fills

    def broken(region, real, pads, encode):
        zeros = [Pad("value", 0) if pad is not None else None for pad in pads]
        return host_fills(region, real, zeros, encode)

    patch.setattr("graphkit.staging.staging.host_fills", broken)


def infers_outputs_from_one_bucket(patch: Patch) -> None:
    patch.setattr("graphkit.outputs.results.infer_shape", lambda samples, *args: samples[0].shape)


def returns_the_whole_bucket(patch: Patch) -> None:
    from graphkit.outputs.results import Results

    right = Results.views

    def broken(self, dispatch, entry, **options):
        if dispatch.bucket is None:
            return right(self, dispatch, entry, **options)
        whole = attrs.evolve(dispatch, sizes=dispatch.bucket.sizes)
        return right(self, whole, entry, **options)

    patch.setattr(Results, "views", broken)


def has_no_lock(patch: Patch) -> None:
    patch.setattr("graphkit.runner.shared.threading.Lock", NoLock)


def keeps_a_lease_for_ever(patch: Patch) -> None:
    patch.setattr("graphkit.outputs.leases.Lease.check", lambda self: None)


def clones_nothing(patch: Patch) -> None:
    from graphkit.outputs.results import Results

    right = Results._given

    def broken(self, path, view, clone, *rest):
        return right(self, path, view, False, *rest)

    patch.setattr(Results, "_given", broken)


def replays_nothing(patch: Patch) -> None:
    from graphkit.backends.recording.graph import RecordedGraph

    patch.setattr(RecordedGraph, "replay", lambda self: None)


def forgets_the_last_operation(patch: Patch) -> None:
    from graphkit.backends.recording.graph import RecordedGraph

    right = RecordedGraph.__init__

    def broken(self, steps, *rest):
        right(self, steps[:-1], *rest)

    patch.setattr(RecordedGraph, "__init__", broken)


def moves_no_inputs(patch: Patch) -> None:
    patch.setattr("graphkit.staging.staging.Staging.move", lambda *args: None)


def prepares_no_replay(patch: Patch) -> None:
    patch.setattr("graphkit.runner.runner.GraphRunner._prepare_replay", lambda *args: None)


def binds_no_outputs_when_eager(patch: Patch) -> None:
    patch.setattr(
        "graphkit.outputs.results.Results.bind_eager", lambda self, dispatch, result, clone: result
    )


def picks_the_dearest_bucket(patch: Patch) -> None:
    from graphkit.dispatch.ranking import ranked

    def broken(*args):
        return sorted(ranked(*args), key=lambda candidate: (candidate.rank, -candidate.order[1]))

    patch.setattr("graphkit.dispatch.dispatcher.ranked", broken)


def prefers_the_slower_mode(patch: Patch) -> None:
    from graphkit.dispatch.ranking import ranked

    def broken(*args):
        return sorted(ranked(*args), key=lambda candidate: -candidate.rank)

    patch.setattr("graphkit.dispatch.dispatcher.ranked", broken)


def cuts_no_rows_for_breaks(patch: Patch) -> None:
    patch.setattr("graphkit.capture.piecewise._cut", lambda tensor, cut, sizes: tensor)


def resident_sum(device: str) -> Any:
    runner = planted.captured(
        device,
        lambda x: x - x.sum(0),
        {"x": planted.X0},
        inputs={"x": gk.Resident("x")},
        outputs=planted.ROWS,
    )
    return runner, {"rtol": 1e-5}


def plain_sum(device: str) -> Any:
    return planted.a_sum_over_rows_with_a_relied_pad(device)


Mutant = tuple[Callable[[Patch], None], Callable[[str], Any], str]

MUTANTS: list[Mutant] = [
    (never_pads_host_inputs, plain_sum, "(?s)(REAL|HISTORY): "),
    (never_pads_on_the_device, resident_sum, "(?s)(REAL|HISTORY): "),
    (pads_the_first_axis_only, planted.an_encoder_with_masks, "REAL: "),
    (pads_with_zero_whatever_is_declared, planted.a_scatter_with_a_scratch_row, "REAL: mutates"),
    (pads_with_zero_whatever_is_declared, planted.row_starts_that_repeat_the_last, "REAL: "),
    (returns_the_whole_bucket, planted.elementwise, "REAL: the output"),
    (has_no_lock, planted.elementwise, "a run began while another one"),
    (keeps_a_lease_for_ever, planted.elementwise, "its lease never ends"),
    (clones_nothing, planted.elementwise, "after another run, a copy of the output"),
    (replays_nothing, planted.elementwise, "PADDED: (buffer 'x'|the output)"),
    (forgets_the_last_operation, planted.elementwise, "PADDED: the output"),
    (moves_no_inputs, planted.elementwise, "PADDED: input 'x' isn't in its buffer"),
    (prepares_no_replay, planted.metadata_prepared_in_place, "PADDED: the output"),
    (binds_no_outputs_when_eager, planted.an_output_in_its_own_input, "REAL: buffer 'state'"),
    (picks_the_dearest_bucket, planted.elementwise, "the best captured graph that takes it is"),
    (prefers_the_slower_mode, planted.full_and_piecewise_side_by_side, "the best captured graph"),
    (cuts_no_rows_for_breaks, planted.breaks_that_see_real_rows, "REAL: "),
]


def name_of(mutant: Any) -> str:
    return getattr(mutant, "__name__", "")


@pytest.mark.filterwarnings("ignore::graphkit.GraphkitWarning")
@pytest.mark.parametrize(("mutate", "make", "finds"), MUTANTS, ids=name_of)
def test_a_broken_library_is_found(
    monkeypatch: Patch, mutate: Callable[[Patch], None], make: Callable[[str], Any], finds: str
) -> None:
    made = make("cpu")
    target, given = made if isinstance(made, tuple) else (made, {})
    testing.check_all(target, **given)  # whole, it is right
    mutate(monkeypatch)
    made = make("cpu")
    target, given = made if isinstance(made, tuple) else (made, {})
    with pytest.raises(gk.CheckError, match=finds):
        testing.check_all(target, **given)


def test_outputs_inferred_from_one_bucket_are_found(monkeypatch: Patch) -> None:
    """The library asks; one that took the sizes it saw for constants would return nine rows for every batch."""

    def make() -> gk.GraphRunner:
        policy = gk.Policy.full(gk.Buckets.of(planted.batch, 9))
        return planted.captured("cpu", lambda x: x * 2, policy=policy)

    with pytest.raises(gk.SpecError, match="could be 9 or batch, and 1 bucket can't tell"):
        make()
    infers_outputs_from_one_bucket(monkeypatch)
    with pytest.raises(gk.CheckError, match="REAL: the output is not close"):
        testing.check_all(make())


def test_outputs_that_two_runners_share_are_found(monkeypatch: Patch) -> None:
    """As in a pool whose memory one graph gives back while its output is still read (case O1)."""
    shared = torch.zeros(9, 3)

    def one_memory(self, spec, *rest):
        self.spec, self.buffer, self.generation, self._views = spec, None, 0, {}
        self.tensor = shared

    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=planted.X)
    group.runner("a", lambda x: x * 2, policy=planted.POLICY, outputs=planted.ROWS)
    group.runner("b", lambda x: x * 3, policy=planted.POLICY, outputs=planted.ROWS)
    testing.check_outputs_survive(group)
    group.release()
    monkeypatch.setattr("graphkit.outputs.outputs.StaticOutput.__init__", one_memory)
    for check in (testing.check_outputs_survive, testing.check_all):
        with pytest.raises(gk.CheckError, match="after runs of the group's other runners, a view"):
            check(group)
