"""Cases about capture: C1, C2, C3, C5, C6, C7, C8, C9, and P4."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 16)


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a CPU build has no stream to ask, except in a recording
        return False


def group_of(device: str, **options: Any) -> gk.GraphGroup:
    group = gk.GraphGroup(device, **options)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
    return group


def policy(*sizes: int) -> gk.Policy:
    return gk.Policy.full(gk.Buckets.of(BATCH, sizes or (2, 4, 8)))


def ambient(device: str) -> tuple[Any, ...]:
    """What a capture must leave as it was."""
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    return (
        stream,
        is_capturing(),
        gc.isenabled(),
        gc.get_threshold(),
        gc.get_freeze_count() > 0,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_rng_state().sum().item(),
    )


def values(count: int) -> list[float]:
    return [float(value) for value in range(1, count + 1)]


def assert_serves(runner: gk.GraphRunner, count: int, mode: gk.Mode, factor: float = 2.0) -> None:
    dispatch = runner.dispatch(batch=count)
    assert dispatch.mode is mode
    out = runner.run(dispatch, x=values(count))
    assert out.tolist() == [factor * value for value in values(count)]


# -- P4: state that warm-up changes ----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4,), (2, 4, 8)], ids=["one bucket", "three"])
@pytest.mark.parametrize("scratch", [False, True], ids=["tensor", "rows"])
def test_p4_declared_state_is_restored(device, scratch, sizes):
    """`state += x.sum()`: after warm-up and capture it isn't what it was (vllm#36939)."""
    state = torch.arange(6.0, device=device)

    def fn(x):
        state[2:4] += x.sum()
        return x * 2

    group = group_of(device, checked=True)
    mutates = [gk.Scratch(state, rows=[2, 3])] if scratch else [state]
    runner = group.runner(
        "r", fn, policy=policy(*sizes), mutates=mutates, outputs=gk.Output((BATCH,), torch.float32)
    )
    group.capture()
    assert state.tolist() == [0, 1, 2, 3, 4, 5]
    assert_serves(runner, 3, gk.FULL)
    bucket = runner.dispatch(batch=3).bucket["batch"]
    assert state.tolist() == [0, 1, 2 + 6 + bucket - 3, 3 + 6 + bucket - 3, 4, 5]


@pytest.mark.parametrize("write", ["+=", "out=", "index", "foreach"])
def test_p4_undeclared_state_is_reported(device, write):
    """A write to a tensor from outside that nobody declared is named (vllm#36939)."""
    state = torch.zeros(3, device=device)

    def fn(x):
        total = x.sum().expand(3)
        if write == "+=":
            state.add_(total)
        elif write == "out=":
            torch.mul(total, 2, out=state)
        elif write == "index":
            state[1:] = total[1:]
        else:
            torch._foreach_add_([state], [total])
        return x * 2

    group = group_of(device, checked=True)
    runner = group.runner("r", fn, policy=policy())
    with pytest.warns(gk.CaptureWarning, match=r"runner 'r': .*of shape .*mutates=") as seen:
        group.capture()
    assert __file__ in str(seen[0].message)
    assert_serves(runner, 3, gk.FULL)


def test_p4_state_is_restored_after_a_failed_capture_too(device):
    """An exception in the middle leaves declared state as it was (vllm#36939)."""
    state = torch.zeros(3, device=device)

    def fn(x):
        state.add_(1)
        if len(x) == 4:
            raise LookupError("four")
        return x * 2

    group = group_of(device)
    group.runner("r", fn, policy=policy(), mutates=[state])
    with pytest.raises(LookupError, match="four"):
        group.capture()
    assert state.tolist() == [0, 0, 0]


# -- C1: operations that sync ----------------------------------------------------------------------

SYNCS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu(),
}


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_c1_a_sync_in_the_function_is_refused_with_its_line(device, sync, on_error):
    """`if x.sum().item() > 0` in forward; other buckets and eager still work (vllm#10416)."""

    def fn(x):
        if len(x) == 4:
            SYNCS[sync](x)
        return x * 2

    group = group_of(device, on_error=on_error)
    runner = group.runner("r", fn, policy=policy())
    before = ambient(device)
    line = SYNCS[sync].__code__.co_firstlineno
    location = f"{__file__}:{line}"
    if on_error == "raise":
        with pytest.raises(gk.CaptureError) as raised:
            group.capture()
        error = raised.value
        assert error.location == location
        assert location in str(error)
        assert error.operation
        assert "runner 'r', FULL bucket [batch=4]" in error.__notes__[0]
    else:
        assert location in str(group.capture())
    assert ambient(device) == before
    assert {bucket["batch"] for _, bucket in runner.dispatcher.captured} == {2, 8}
    assert_serves(runner, 7, gk.FULL)
    assert_serves(runner, 4, gk.FULL)  # in the bucket of 8
    assert_serves(runner, 11, gk.EAGER)
    assert_serves(runner, 2, gk.FULL)
    assert torch.rand(2, device=device).isfinite().all()  # the generator is out of the capture


# -- C2: a workspace of each stream ----------------------------------------------------------------


@pytest.mark.gpu
def test_c2_a_workspace_of_each_stream_made_with_a_sync():
    """Made at first use; warm-up ran on the capture's stream, so it is there (vllm#53818)."""
    workspaces: dict[int, torch.Tensor] = {}

    def fn(x):
        key = torch.cuda.current_stream().cuda_stream
        if key not in workspaces:
            torch.cuda.synchronize()
            workspaces[key] = torch.full((16,), 2.0, device="cuda")
        return x * workspaces[key][: len(x)]

    group = group_of("cuda")
    runner = group.runner("r", fn, policy=policy())
    group.capture()
    assert_serves(runner, 3, gk.FULL)
    assert_serves(runner, 11, gk.EAGER)


# -- C3: the garbage collector ---------------------------------------------------------------------


@contextmanager
def collector(threshold: int, *, enabled: bool) -> Iterator[None]:
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(threshold, *before[1:])
    gc.enable() if enabled else gc.disable()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.enable() if was_enabled else gc.disable()


class Node:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_c3_reference_cycles_of_device_tensors(device, enabled, fails):
    """gc at threshold 1, 16 buckets, cycles holding tensors (pytorch#161037)."""

    def fn(x):
        for _ in range(3):
            Node(x + 1)  # garbage that only a collection frees
        if fails and len(x) == 5:
            raise LookupError("five")
        return x * 2

    group = group_of(device)
    runner = group.runner("r", fn, policy=policy(*range(1, 17)))
    gc.collect()  # from Python 3.12 on the first one freezes what is immortal
    with collector(1, enabled=enabled):
        for _ in range(20):
            Node(torch.zeros(8, device=device))
        before = ambient(device)
        if fails:
            with pytest.raises(LookupError, match="five"):
                group.capture()
        else:
            group.capture()
        assert ambient(device) == before
        for count in (1, 7, 16):
            assert_serves(runner, count, gk.FULL)


def test_c3_what_others_have_frozen_stays_frozen(device):
    """The session may freeze, and must not thaw what somebody else froze (rule 13)."""
    group = group_of(device)
    group.runner("r", lambda x: x * 2, policy=policy())
    before = gc.get_freeze_count()
    assert before > 0  # the fixture of tests/cases has frozen the heap
    group.capture()
    # What dies meanwhile leaves the count.
    assert 0.9 * before < gc.get_freeze_count() <= before


# -- C5: capture, drop, capture --------------------------------------------------------------------


@pytest.mark.parametrize("drop", ["invalidate", "release"])
def test_c5_captured_dropped_and_captured_again(device, drop):
    """The same group captures again after all graphs are gone (vllm#53679)."""
    group = group_of(device)
    factor = torch.full((), 2.0, device=device)
    runner = group.runner("r", lambda x: x * factor, policy=policy(), reads=[factor])
    reserved = []
    for round_ in range(4):
        factor.fill_(2.0 + round_)
        report = group.capture()
        assert group.state is gk.State.CAPTURED
        assert [row.replays for row in report.runners[0].graphs] == [0, 0, 0]
        for count in (1, 3, 8, 0):
            assert_serves(runner, count, gk.FULL, 2.0 + round_)
        reserved.append(report.reserved_bytes)
        getattr(group, drop)()
        assert not runner.dispatcher.captured
        state = {"invalidate": gk.State.STALE, "release": gk.State.SUSPENDED}[drop]
        assert group.state is state
    assert reserved[3] <= max(reserved[:2])  # nothing of the earlier rounds is kept
    group.close()


# -- C6: random numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
def test_c6_random_numbers_advance_on_every_replay(device, private):
    """A graph must not draw the same numbers for ever (pytorch#84614, Megatron-LM#5697)."""
    generator = torch.Generator(device=device) if private else None
    group = group_of(device)
    runner = group.runner(
        "r",
        lambda x: x * 0 + torch.rand(x.shape, generator=generator, device=device),
        policy=policy(),
        generators=[generator] if generator is not None else (),
    )
    seeded = generator if generator is not None else torch
    seeded.manual_seed(7)
    group.capture()

    def draw() -> list[list[float]]:
        seeded.manual_seed(3)
        return [runner.run(runner.dispatch(batch=4), x=values(4)).tolist() for _ in range(4)]

    first = draw()
    assert all(a != b for a, b in itertools.combinations(first, 2))
    assert all(0 <= value < 1 for row in first for value in row)
    assert draw() == first  # a seed still means what it says


@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
def test_c6_a_capture_leaves_generators_as_they_were(device, private):
    """Warm-up and capture draw, and the caller's sequence doesn't change (rule 14)."""
    generator = torch.Generator(device=device) if private else None
    seeded = generator if generator is not None else torch
    draw = lambda: torch.rand(4, generator=generator, device=device).tolist()  # noqa: E731
    seeded.manual_seed(5)
    expected = draw()
    group = group_of(device)
    group.runner(
        "r",
        lambda x: x + torch.rand(x.shape, generator=generator, device=device),
        policy=policy(),
        generators=[generator] if generator is not None else (),
    )
    seeded.manual_seed(5)
    group.capture()
    assert draw() == expected


def test_c6_an_unregistered_generator_is_refused(device):
    """It would give the same numbers on every replay (Megatron-LM#5697)."""
    generator = torch.Generator(device=device)
    group = group_of(device)
    runner = group.runner(
        "r", lambda x: x + torch.rand(x.shape, generator=generator, device=device), policy=policy()
    )
    with pytest.raises(gk.CaptureError, match=r"isn't registered.*generators="):
        group.capture()
    assert runner.dispatch(batch=3).reason is gk.Reason.NOT_CAPTURED
    assert torch.rand(2, device=device).isfinite().all()
    assert torch.rand(2, generator=generator, device=device).isfinite().all()


# -- C7: exceptions of the user's ------------------------------------------------------------------


class Custom(Exception):
    pass


RAISED = [ValueError("mine"), RuntimeError("mine"), Custom("mine"), MemoryError("mine")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("in_capture", [False, True], ids=["in warm-up", "in capture"])
def test_c7_an_exception_of_the_users_arrives_as_itself(device, error, in_capture):
    """And not as "operation failed due to a previous error during capture" (pytorch#92684)."""
    raising = True

    def fn(x):
        y = x + 1
        if raising and len(x) == 4 and is_capturing() is in_capture:
            raise error
        return y * 2 - 2

    group = group_of(device)
    runner = group.runner("r", fn, policy=policy())
    before = ambient(device)
    with pytest.raises(type(error)) as raised:
        group.capture()
    assert raised.value is error
    assert str(error) == "mine"
    note = error.__notes__.pop()
    line = fn.__code__.co_firstlineno + 3
    assert note.startswith("graphkit: in runner 'r', FULL bucket [batch=4]")
    assert f"{__file__}:{line} in fn: raise error" in note
    assert ambient(device) == before
    assert torch.rand(2, device=device).isfinite().all()
    assert_serves(runner, 7, gk.FULL)
    raising = False
    group.capture()
    for count in (1, 3, 4, 7):
        assert_serves(runner, count, gk.FULL)


def test_c7_an_interrupt_arrives_and_leaves_the_group_usable(device):
    """Ctrl-C in the middle of a capture is no failure of a bucket, and breaks nothing."""
    raising = True

    def fn(x):
        if raising and len(x) == 4 and is_capturing():
            raise KeyboardInterrupt
        return x * 2

    group = group_of(device, on_error="skip")
    runner = group.runner("r", fn, policy=policy())
    before = ambient(device)
    with pytest.raises(KeyboardInterrupt):
        group.capture()
    assert ambient(device) == before
    raising = False
    group.capture()
    for count in (1, 3, 7):
        assert_serves(runner, count, gk.FULL)


@pytest.mark.parametrize("where", ["prepare", "prepare_host"])
@pytest.mark.parametrize("phase", list(gk.Phase), ids=lambda phase: phase.name)
def test_c7_an_exception_in_prepare_arrives_too(device, where, phase):
    """At capture with its note, at a run as it is; the next run works."""
    raising = True

    def prepare(step):
        if raising and step.phase is phase:
            raise Custom("mine")

    group = group_of(device)
    runner = group.runner("r", lambda x: x * 2, policy=policy(), **{where: prepare})
    if phase in (gk.Phase.WARMUP, gk.Phase.CAPTURE):
        with pytest.raises(Custom) as raised:
            group.capture()
        assert "in runner 'r', FULL bucket [batch=8]" in raised.value.__notes__[0]
    else:
        group.capture()
        count = 3 if phase is gk.Phase.REPLAY else 11
        with pytest.raises(Custom):
            runner.run(runner.dispatch(batch=count), x=values(count))
    raising = False
    group.capture()
    assert_serves(runner, 3, gk.FULL)
    assert_serves(runner, 11, gk.EAGER)


# -- C8: ambient modes -----------------------------------------------------------------------------


@contextmanager
def defaults(where: str, dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(where):
            yield
    finally:
        torch.set_default_dtype(old)


@pytest.mark.parametrize("inference", [False, True])
def test_c8_declared_under_defaults_of_the_engine(device, inference):
    """set_default_device and set_default_dtype(bfloat16), in inference mode or not (CASES C8)."""
    # On the CPU "meta" is the device that nothing may come to lie on by accident.
    where = "cuda" if device == "cuda" else "meta"
    weight = torch.full((), 2.0, device=device)
    mode = torch.inference_mode() if inference else nullcontext()
    with defaults(where, torch.bfloat16), mode:
        group = gk.GraphGroup(device, checked=True)
        buf = group.buffers.declare(
            x=gk.BufferSpec((BATCH,), torch.float32, pad=gk.relied(1)),
            ids=gk.BufferSpec((BATCH,), torch.int64, pad=gk.repeat_last),
            kept=gk.BufferSpec((BATCH,), torch.float32, pad=gk.keep),
            resident=gk.BufferSpec((BATCH,), torch.float32, pad=gk.continue_(1)),
        )

        def fn(x, ids, kept, resident, real):
            return {"y": x * weight, "sum": ids + real, "rest": kept + resident}

        runner = group.runner(
            "r",
            fn,
            policy=policy(),
            inputs={"real": gk.Count(BATCH), "resident": gk.Resident("resident")},
        )
        group.capture()
        dispatch = runner.dispatch(batch=3)
        buf.resident.tensor.fill_(1)
        out = runner.run(dispatch, x=values(3), ids=[4, 5, 6], kept=values(3))
        inside = {name: tensor.tolist() for name, tensor in out.items()}
        eager = runner.run(runner.dispatch(batch=9), x=values(9), ids=[1] * 9, kept=values(9))
        assert eager["sum"].tolist() == [10] * 9
    assert inside == {"y": [2, 4, 6], "sum": [7, 8, 9], "rest": [2, 3, 4]}
    assert {name: tensor.dtype for name, tensor in out.items()} == {
        "y": torch.float32,
        "sum": torch.int64,
        "rest": torch.float32,
    }
    for buffer in vars(buf).values():
        assert buffer.tensor.device.type == device
        assert buffer.tensor.dtype == buffer.spec.dtype
    # Outside of all that it is the same.
    out = runner.run(dispatch, x=values(3), ids=[4, 5, 6], kept=values(3))
    assert {name: tensor.tolist() for name, tensor in out.items()} == inside


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("at_run", AMBIENT)
@pytest.mark.parametrize("at_capture", AMBIENT)
@pytest.mark.parametrize("how", ["host", "device", "resident", "staged"])
def test_c8_a_run_under_another_gradient_mode_is_right(device, at_capture, at_run, how):
    """Static memory is made outside inference mode, for callers of both kinds (rule 12)."""
    group = gk.GraphGroup(device)
    with AMBIENT[at_capture]():
        buf = group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=1))
        weight = torch.full((1,), 2.0, device=device)
        role = gk.Resident("x") if how == "resident" else gk.Fed("x")
        runner = group.runner("r", lambda x: x * weight, policy=policy(), inputs={"x": role})
        group.capture()
    for _ in range(2):
        with AMBIENT[at_run]():
            x = torch.tensor(values(3))
            dispatch = runner.dispatch(batch=3)
            if how == "resident":
                buf.x.tensor[:3].copy_(x)
                out = runner.run(dispatch)
            elif how == "staged":
                with runner.stage(dispatch) as stage:
                    stage.views["x"].copy_(x)
                out = runner.run(dispatch)
            else:
                out = runner.run(dispatch, x=x.to(device) if how == "device" else x)
            assert out.tolist() == [2, 4, 6]
            assert not out.requires_grad
            out += 1  # the views are plain memory for either kind of caller
    assert_serves(runner, 11, gk.EAGER) if how == "host" else None


@contextmanager
def precision(value: str) -> Iterator[None]:
    old = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(old)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def in_training(module: torch.nn.Module) -> Iterator[None]:
    module.train()
    try:
        yield
    finally:
        module.eval()


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("mode", ["autocast", "deterministic", "tf32", "training"])
@pytest.mark.parametrize("checked", [False, True])
def test_c8_a_run_under_other_ambient_modes_is_refused(device, mode, checked):
    """They choose kernels, which the graph has baked (CASES C8)."""
    net = Scale().eval()
    group = group_of(device, checked=checked)
    runner = group.runner("r", net, policy=policy())
    group.capture()
    enter = {
        "autocast": lambda: torch.autocast(device, dtype=torch.bfloat16),
        "deterministic": deterministic,
        "tf32": lambda: precision("high"),
        "training": lambda: in_training(net),
    }[mode]
    assert_serves(runner, 1, gk.FULL)
    message = rf"FULL bucket \[batch=4\]: {mode} was .* at the capture and is .* at the run"
    with enter():
        with pytest.raises(gk.StateError, match=message):
            runner.run(runner.dispatch(batch=3), x=values(3))
        if checked:
            with pytest.raises(gk.StateError, match=mode):
                runner.run(runner.dispatch(batch=1), x=values(1))
    assert_serves(runner, 3, gk.FULL)


# -- C9: code that asks ----------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["torch.cuda", "imported", "graphs"])
def test_c9_code_that_asks_for_a_capture_is_told(device, ask):
    """torch.cuda.is_current_stream_capturing() is True in a capture on both backends (CASES C9)."""
    from torch.cuda import is_current_stream_capturing
    from torch.cuda.graphs import is_current_stream_capturing as of_graphs

    questions = {
        "torch.cuda": lambda: torch.cuda.is_current_stream_capturing(),
        "imported": is_current_stream_capturing,
        "graphs": of_graphs,
    }
    answers: list[bool] = []

    def fn(x):
        try:
            answers.append(questions[ask]())
        except RuntimeError:  # a CPU build, outside of a recording
            answers.append(False)
        return x * 2 if answers[-1] else x * 3

    group = group_of(device)
    runner = group.runner("r", fn, policy=policy(2, 4))
    group.capture()
    assert answers == [False] * 2 + [True] * (2 * group.backend.recordings)
    assert_serves(runner, 3, gk.FULL)
    assert_serves(runner, 9, gk.EAGER, 3.0)


def test_c9_warm_up_may_take_the_path_of_the_capture(device):
    """warmup_as_capturing=True, for code that takes another path otherwise (rule 12)."""
    answers: list[bool] = []

    def fn(x):
        answers.append(is_capturing())
        return x * 2

    group = group_of(device)
    group.runner("r", fn, policy=policy(2, 4), warmup_as_capturing=True)
    group.capture()
    assert all(answers)
    assert not is_capturing()


@pytest.mark.parametrize("fails", [False, True])
def test_c9_the_answer_in_warm_up_is_taken_back(device, fails):
    """After a failure too, and another thread is not told."""
    others: list[bool] = []
    calls: list[int] = []

    def fn(x):
        calls.append(len(x))
        if len(calls) <= 2:  # the warm-ups: a capture is no place for threads
            thread = threading.Thread(target=lambda: others.append(is_capturing()))
            thread.start()
            thread.join()
        if fails:
            raise Custom("mine")
        return x * 2

    group = group_of(device)
    group.runner("r", fn, policy=policy(2, 4), warmup_as_capturing=True)
    if fails:
        with pytest.raises(Custom):
            group.capture()
    else:
        group.capture()
    assert others == [False, False]
    assert not is_capturing()
