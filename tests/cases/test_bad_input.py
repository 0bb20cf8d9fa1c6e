"""Bad input: each an error that names the thing, the values and the remedy, with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

REQS, TOKENS = gk.Dim("reqs", 8), gk.Dim("tokens", 32)


class Setup:
    """A group with two runners of one dim each, and what must not change."""

    def __init__(self, device: str, *, captured: bool = True) -> None:
        self.group = gk.GraphGroup(device)
        self.buf = self.group.buffers.declare(
            ids=gk.BufferSpec((REQS,), torch.int32, pad=7, valid=(0, 100)),
            x=gk.BufferSpec((REQS, 2), torch.float32, pad=0),
            state=gk.BufferSpec((REQS,), torch.float32, pad=1),
        )
        self.runner = self.group.runner(
            "decode",
            lambda ids, x, state: x.sum(-1) + ids + state,
            policy=gk.Policy.full(gk.Buckets.of(REQS, 2, 4)),
            inputs={"state": gk.Resident("state")},
        )
        if captured:
            self.group.capture()
            self.good()

    def good(self) -> None:
        self.buf.state.tensor[:3].fill_(0.5)
        out = self.runner.run(
            self.runner.dispatch(reqs=3), ids=[1, 2, 3], x=np.ones((3, 2), np.float32)
        )
        assert out.tolist() == [3.5, 4.5, 5.5]

    def snapshot(self) -> Any:
        report = self.group.report()
        return (
            {buffer.name: buffer.tensor.tolist() for buffer in self.group.buffers},
            self.group.state,
            self.group.runners,
            [[row.replays for row in runner.graphs] for runner in report.runners],
            [runner.eager_runs for runner in report.runners],
            [runner.counts for runner in report.runners],
        )


def refused(
    setup: Setup, error: type[gk.GraphkitError], message: str, call: Callable[[], Any]
) -> None:
    """`call` raises, changes nothing, and what was right stays right."""
    before = setup.snapshot()
    with pytest.raises(error, match=message) as raised:
        call()
    assert type(raised.value) is error
    assert isinstance(raised.value, gk.GraphkitError)
    assert setup.snapshot() == before
    setup.good()


def x(rows: int = 3, columns: int = 2) -> np.ndarray[Any, Any]:
    return np.full((rows, columns), 9.0, np.float32)


ids = [1, 2, 3]

RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype of an array": (
        {"ids": np.array(ids), "x": x()},
        r"runner 'decode', input 'ids': got int64, expected torch.int32; it is never cast",
    ),
    "dtype of a tensor": (
        {"ids": ids, "x": torch.zeros(3, 2, dtype=torch.float64)},
        r"runner 'decode', input 'x': got torch.float64, expected torch.float32; it is never cast",
    ),
    "dtype of a list": (
        {"ids": [1.0, 2.0, 3.0], "x": x()},
        r"input 'ids': got \[1.0, 2.0, 3.0\], expected integers for torch.int32",
    ),
    "range of a list": (
        {"ids": [1, 2, 2**40], "x": x()},
        r"input 'ids': got \[1, 2, 1099511627776\], out of the range of torch.int32",
    ),
    "too many rows": (
        {"ids": [*ids, 4], "x": x()},
        r"input 'ids': got shape \(4,\), expected \(3,\), which is \(reqs,\) at reqs=3",
    ),
    "too few rows": (
        {"ids": ids, "x": x(2)},
        r"input 'x': got shape \(2, 2\), expected \(3, 2\), which is \(reqs, 2\) at reqs=3",
    ),
    "one row, which would broadcast": (
        {"ids": ids, "x": x(1)},
        r"input 'x': got shape \(1, 2\), expected \(3, 2\)",
    ),
    "another number of axes": (
        {"ids": ids, "x": x().ravel()},
        r"input 'x': got shape \(6,\), expected \(3, 2\)",
    ),
    "a scalar": ({"ids": 5, "x": x()}, r"input 'ids': got shape \(\), expected \(3,\)"),
    "a ragged list": (
        {"ids": ids, "x": [[1, 2], [3], [4, 5]]},
        r"input 'x': can't make an array of it .*is it ragged\?",
    ),
    "device": (
        {"ids": ids, "x": torch.zeros(3, 2, device="meta")},
        r"input 'x': got a tensor on meta, expected one on (cpu|cuda:0) or the CPU",
    ),
    "sparse": (
        {"ids": ids, "x": torch.zeros(3, 2).to_sparse()},
        r"input 'x'",
    ),
    "missing": ({"ids": ids}, r"input 'x' is missing; run\(\) needs ids, x"),
    "all missing": ({}, r"input 'ids' is missing; run\(\) needs ids, x"),
    "unknown": (
        {"ids": ids, "x": x(), "y": 3},
        r"input 'y' is unknown; run\(\) takes ids, x",
    ),
    "resident": (
        {"ids": ids, "x": x(), "state": x()[:, 0]},
        r"input 'state' is resident: the device writes buffer 'state'.*given nothing",
    ),
    "None": ({"ids": None, "x": x()}, r"input 'ids'"),
    "a string": ({"ids": "abc", "x": x()}, r"input 'ids': got 'abc', expected numbers"),
}


@pytest.mark.parametrize("eager", [None, "by request"], ids=["FULL", "EAGER"])
@pytest.mark.parametrize("case", RUNS)
def test_what_is_given_to_run(device, case, eager):
    values, message = RUNS[case]
    setup = Setup(device)
    dispatch = setup.runner.dispatch(reqs=3, eager=eager)
    refused(setup, gk.InputError, message, lambda: setup.runner.run(dispatch, values))
    refused(setup, gk.InputError, message, lambda: setup.runner.run(dispatch, **values))


def test_how_run_is_called(device):
    setup = Setup(device)
    run, dispatch = setup.runner.run, setup.runner.dispatch(reqs=3)
    refused(
        setup,
        gk.InputError,
        "runner 'decode': ids is given twice",
        lambda: run(dispatch, {"ids": ids}, ids=ids, x=x()),
    )
    refused(
        setup,
        gk.InputError,
        r"runner 'decode': inputs must map names to values, got list",
        lambda: run(dispatch, [ids, x()]),
    )
    refused(
        setup,
        gk.InputError,
        r"runner 'decode': run\(\) takes what dispatch\(\) answered, got 3",
        lambda: run(3, ids=ids, x=x()),
    )
    other = gk.Dispatcher(gk.Policy.eager(), [TOKENS]).dispatch(tokens=3)
    refused(
        setup,
        gk.InputError,
        r"runner 'decode' has the dims \['reqs'\]; this dispatch is of another runner's: \['tokens'\]",
        lambda: run(other, ids=ids, x=x()),
    )


SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "above the maximum": (
        {"reqs": 9},
        "runner 'decode': reqs=9 is above the maximum 8 of dim 'reqs'",
    ),
    "negative": ({"reqs": -1}, "the size of dim 'reqs' must be at least 0, got -1"),
    "a float": ({"reqs": 3.0}, r"the size of dim 'reqs' must be an int, got 3.0 \(float\)"),
    "a NumPy float": ({"reqs": np.float32(3)}, r"must be an int, got .*3.0.* \(float32\)"),
    "a bool": ({"reqs": True}, r"the size of dim 'reqs' must be an int, got True \(bool\)"),
    "a NumPy bool": ({"reqs": np.True_}, r"must be an int, got .*True.* \(bool"),
    "a string": ({"reqs": "3"}, r"must be an int, got '3' \(str\)"),
    "a tensor": ({"reqs": torch.tensor(3)}, r"must be an int, got tensor\(3\) \(Tensor\)"),
    "not given": ({}, "the size of dim 'reqs' isn't given; give reqs=..."),
    "unknown": ({"reqs": 3, "rows": 3}, "got 'rows', which is no dim; the dims are reqs"),
}


@pytest.mark.parametrize("case", SIZES)
def test_what_is_given_to_dispatch(device, case):
    sizes, message = SIZES[case]
    setup = Setup(device)
    refused(setup, gk.InputError, message, lambda: setup.runner.dispatch(**sizes))


# -- declarations ----------------------------------------------------------------------------------


def declare(**specs: gk.BufferSpec) -> Callable[[Setup], Any]:
    return lambda setup: setup.group.buffers.declare(**specs)


def add(fn: Callable[..., Any], **options: Any) -> Callable[[Setup], Any]:
    policy = options.pop("policy", gk.Policy.full(gk.Buckets.of(REQS, 2, 4)))
    name = options.pop("name", "other")
    return lambda setup: setup.group.runner(name, fn, policy=policy, **options)


def whole(buckets: gk.Buckets) -> gk.Policy:
    return gk.Policy.full(buckets)


DECLARATIONS: dict[str, tuple[Callable[[Setup], Any], type[gk.GraphkitError], str]] = {
    "a bucket above capacity": (
        lambda _: gk.Buckets.of(gk.Dim("rows", 50), 48, 56),
        gk.BucketError,
        "a bucket size of dim 'rows' is 56, above the dim's maximum 50; raise the maximum or drop",
    ),
    "a bucket above capacity, through upto": (
        lambda _: gk.Buckets.ladder(REQS, upto=9),
        gk.BucketError,
        "upto of dim 'reqs' is 9, above the dim's maximum 8",
    ),
    "a bucket above capacity, in tokens": (
        lambda _: gk.Buckets.uniform(REQS, TOKENS, query_len=5, sizes=[7]),
        gk.BucketError,
        "7 requests of query_len 5 are 35 tokens, above the maximum 32 of dim 'tokens'",
    ),
    "a uniform bucket that is no multiple": (
        lambda _: gk.Buckets.uniform(REQS, TOKENS, query_len=3, tokens_sizes=[8]),
        gk.BucketError,
        "a uniform bucket of 8 tokens is no multiple of query_len 3; use 6 or 9",
    ),
    "a dim without a pad": (
        lambda _: gk.BufferSpec((REQS, 4), torch.float32),
        gk.SpecError,
        r"shape \(reqs, 4\) varies with 'reqs' and needs a pad.*e.g. pad=0, or pad=gk.keep",
    ),
    "one of two dims without a pad": (
        lambda _: gk.BufferSpec((REQS, TOKENS), torch.float32, pad={REQS: 0}),
        gk.SpecError,
        r"pad names \['reqs'\].* has the dims \['reqs', 'tokens'\]: give one pad for each",
    ),
    "a parameter from nowhere": (
        add(lambda ids, temperature: ids),
        gk.SpecError,
        (
            r"needs 'temperature', which no buffer is named after \(declared: ids, x, state\).*"
            r"declare a buffer, rename one with inputs="
        ),
    ),
    "a dim with a reserved name": (
        lambda _: gk.Dim("clone", 4),
        gk.SpecError,
        "dim name 'clone' is reserved for an option; use another name",
    ),
    "a dim with a keyword for a name": (
        lambda _: gk.Dim("lambda", 4),
        gk.SpecError,
        "dim name 'lambda' can't be used as a keyword argument; use a Python identifier",
    ),
    "a buffer with a reserved name": (
        declare(
            fresh=gk.BufferSpec((REQS,), torch.float32, pad=0),
            context=gk.BufferSpec((2,), torch.float32),
        ),
        gk.SpecError,
        "buffer name 'context' is reserved for an option; use another name",
    ),
    "a buffer declared otherwise": (
        declare(
            fresh=gk.BufferSpec((REQS,), torch.float32, pad=0),
            ids=gk.BufferSpec((REQS,), torch.int64, pad=7),
        ),
        gk.SpecError,
        (
            r"buffer 'ids' is declared already, and otherwise: first BufferSpec\(\(reqs,\), torch.int32.*"
            r"now BufferSpec\(\(reqs,\), torch.int64.*use another name"
        ),
    ),
    "a dim declared otherwise": (
        declare(fresh=gk.BufferSpec((gk.Dim("reqs", 9),), torch.float32, pad=0)),
        gk.SpecError,
        "reqs",
    ),
    "a runner's name twice": (
        add(lambda ids: ids, name="decode"),
        gk.SpecError,
        "the group has a runner named 'decode' already; use another name",
    ),
    "an unknown option": (
        lambda setup: setup.group.wrap(lambda ids: ids, prepares=print),
        gk.SpecError,
        "got prepares=.*, which is no option; a parameter of the function needs a BufferSpec, and the options are",
    ),
    "an input that the function doesn't take": (
        add(lambda ids: ids, inputs={"x": gk.Fed("x")}),
        gk.SpecError,
        "inputs names 'x', which .*doesn't take; it takes ids .*need prepare=",
    ),
    "a buffer that nobody declared": (
        add(lambda hidden: hidden, inputs={"hidden": gk.Resident("hiden")}),
        gk.SpecError,
        "no buffer is named 'hiden'; declared are: ids, x, state",
    ),
    "one buffer fed twice": (
        add(lambda a, b: a, inputs={"a": gk.Fed("ids"), "b": gk.Fed("ids")}),
        gk.SpecError,
        r"parameters 'a' and 'b' are both fed into buffer 'ids'.*Resident\('ids'\)",
    ),
    "an output that is none": (
        add(lambda ids: ids, outputs={"y": torch.float32}),
        gk.SpecError,
        "output 'y' must be an Output or a buffer, got torch.float32",
    ),
    "a ring without slots": (
        add(lambda ids: ids, ring_depth=0),
        gk.SpecError,
        "ring_depth",
    ),
    "a strict that is no bool": (add(lambda ids: ids, strict="yes"), gk.SpecError, "strict"),
    "supports that is none": (add(lambda ids: ids, supports="always"), gk.SpecError, "supports"),
    "generators that are none": (add(lambda ids: ids, generators=[3]), gk.SpecError, "generators"),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_declarations(case):
    call, error, message = DECLARATIONS[case]
    setup = Setup("cpu")
    refused(setup, error, message, lambda: call(setup))
    assert "fresh" not in setup.group.buffers
    # The names are free: nothing was declared by halves.
    setup.group.runner("other", lambda ids: ids + 1, policy=whole(gk.Buckets.of(REQS, 2, 4)))


def test_groups_are_checked_where_they_are_made():
    for options, message in (
        ({"device": "mps"}, "captured on 'cuda' or recorded on 'cpu', got 'mps'"),
        ({"device": "nowhere"}, "'nowhere' is no device"),
        (
            {"device": "cpu", "on_error": "ignore"},
            "on_error must be 'raise' or 'skip', got 'ignore'",
        ),
        ({"device": "cpu", "capture_error_mode": "x"}, "capture_error_mode must be 'global'"),
    ):
        with pytest.raises(gk.SpecError, match=message):
            gk.GraphGroup(**options)
    if not torch.cuda.is_available():
        with pytest.raises(gk.SpecError, match=r"no CUDA device is available; GraphGroup\('cpu'\)"):
            gk.GraphGroup("cuda")


# -- states ----------------------------------------------------------------------------------------


def test_a_run_before_the_capture_is_eager_with_its_reason(device):
    setup = Setup(device, captured=False)
    dispatch = setup.runner.dispatch(reqs=3)
    assert (dispatch.mode, dispatch.reason) == (gk.EAGER, gk.Reason.NOT_CAPTURED)
    setup.good()
    assert setup.group.state is gk.State.NEW
    assert setup.group.report().runners[0].eager_runs == 1


def test_a_closed_group(device):
    setup = Setup(device)
    group, runner = setup.group, setup.runner
    graphed = runner.dispatch(reqs=3)
    group.close()
    group.close()  # harmless
    assert group.state is gk.State.CLOSED
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: runner.run(graphed, ids=ids, x=x()),
        "run what is dispatched now": lambda: runner.run(runner.dispatch(reqs=3), ids=ids, x=x()),
        "capture": group.capture,
        "declare": lambda: group.buffers.declare(y=gk.BufferSpec((2,), torch.float32)),
        "runner": lambda: add(lambda ids: ids)(setup),
        "wrap": lambda: group.wrap(lambda z: z, z=gk.BufferSpec((REQS,), torch.float32, pad=0)),
        "invalidate": group.invalidate,
        "release": group.release,
        "a buffer's memory": lambda: setup.buf.ids.tensor,
    }
    for call in calls.values():
        with pytest.raises(gk.StateError, match="the group is closed.*make a new GraphGroup"):
            call()
    assert group.runners == (runner,)


def test_a_dispatch_to_a_graph_that_is_gone(device):
    setup = Setup(device)
    graphed = setup.runner.dispatch(reqs=3)
    setup.group.invalidate()
    refused(
        setup,
        gk.StateError,
        r"runner 'decode': FULL reqs=4 for reqs=3 was dispatched to a graph that isn't there now; "
        r"dispatch again",
        lambda: setup.runner.run(graphed, ids=ids, x=x()),
    )


@pytest.mark.parametrize("where", ["prepare", "prepare_host"])
def test_a_run_inside_a_run_is_refused(device, where):
    inner: list[BaseException] = []

    def nested(step: gk.Step) -> None:
        if step.phase is gk.Phase.REPLAY:
            for call in (
                lambda: runner.run(dispatch, ids=ids),
                group.capture,
                group.release,
                lambda: runner.stage(dispatch).__enter__(),
            ):
                with pytest.raises(gk.ConcurrentRunError, match="under way") as raised:
                    call()
                inner.append(raised.value)

    group = gk.GraphGroup(device)
    group.buffers.declare(ids=gk.BufferSpec((REQS,), torch.int32, pad=0))
    policy = whole(gk.Buckets.of(REQS, 2, 4))
    runner = group.runner("r", lambda ids: ids + 1, policy=policy, **{where: nested})
    group.capture()
    dispatch = runner.dispatch(reqs=3)
    assert runner.run(dispatch, ids=ids).tolist() == [2, 3, 4]
    assert len(inner) == 4
