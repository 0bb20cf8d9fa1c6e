from __future__ import annotations

import re
import threading

import pytest
import torch

import graphkit as gk

batch, length = gk.Dim("batch", 8), gk.Dim("length", 4)
X = gk.BufferSpec((batch, 2), torch.float32, pad=0)
POLICY = gk.Policy.full(gk.Buckets.of(batch, 1, 8))


@pytest.fixture
def group():
    made = gk.GraphGroup("cpu")
    made.buffers.declare(x=X)
    return made


def double(x):
    return x * 2


# -- declaring --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gk.GraphGroup("cpu", on_error="ignore"),
            "on_error must be 'raise' or 'skip', got",
        ),
        (
            lambda: gk.GraphGroup("cpu", capture_error_mode="lax"),
            "capture_error_mode must be 'global', 'thread_local' or 'relaxed', got 'lax'",
        ),
        (lambda: gk.GraphGroup("tpu"), "'tpu' is no device"),
        (
            lambda: gk.GraphGroup("meta"),
            "graphs are captured on 'cuda' or recorded on 'cpu', got 'meta'",
        ),
    ],
)
def test_groups_are_checked_where_they_are_made(make, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_other_backend_is_named():
    with pytest.raises(gk.SpecError, match=r"no CUDA device is available; GraphGroup\('cpu'\)"):
        gk.GraphGroup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "a runner's name must be a non-empty str, got ''"),
        ({"name": 3}, "a runner's name must be a non-empty str, got 3"),
        ({"policy": [1]}, "runner 'r' needs a Policy, got [1]"),
        ({"prepare": 3}, "prepare must be callable, got 3"),
        (
            {"supports": "uniform"},
            "supports must be a Support, as gk.Support.UNIFORM, got 'uniform'",
        ),
        ({"ring_depth": 0}, "ring_depth must be at least 1, got 0"),
        ({"ring_depth": True}, "ring_depth must be an int, got True"),
        ({"mutates": torch.zeros(1)}, "mutates= takes a list: mutates=[state]"),
        ({"mutates": [3]}, "mutates= takes tensors and Scratch(tensor, rows=), got 3"),
        ({"reads": [3]}, "reads= takes modules, tensors and callables"),
    ],
)
def test_runners_are_checked_where_they_are_declared(group, options, message):
    arguments = {"name": "r", "policy": POLICY, **options}
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        group.runner(arguments.pop("name"), double, **arguments)
    assert group.runners == ()


def test_names_are_unique(group):
    runner = group.runner("r", double, policy=POLICY)
    with pytest.raises(gk.SpecError, match="the group has a runner named 'r' already"):
        group.runner("r", double, policy=POLICY)
    assert group["r"] is runner
    assert group.runners == (runner,)
    assert repr(group) == "GraphGroup('cpu', NEW, runners=['r'])"
    assert repr(runner) == "GraphRunner('r', 0 of 2 graphs captured)"


def test_prepare_host_alone_makes_no_argument(group):
    with pytest.raises(
        gk.SpecError, match="plan must come from prepare, and there is only prepare_host"
    ):
        group.runner("r", lambda x, plan: x, policy=POLICY, prepare_host=lambda step: None)


@pytest.mark.parametrize(
    "shape", [(batch, length), (2, batch)], ids=["two dims", "a dim that isn't first"]
)
@pytest.mark.parametrize("output", [False, True])
def test_a_packed_buffer_is_for_one_runner(shape, output):
    group = gk.GraphGroup("cpu")
    spec = gk.BufferSpec(shape, torch.float32, pad=0, layout="packed")
    declared = group.buffers.declare(x=spec, y=gk.BufferSpec(shape, torch.float32, pad=0))
    group.runner("a", double, policy=POLICY)
    message = (
        "buffer 'x' is packed, so that its elements move with the bucket, and runner 'a' uses it; a "
        "packed buffer is for one runner: give 'b' its own, or make it strided"
    )
    fn, options = (lambda y: y, {"outputs": declared.x}) if output else (double, {})
    with pytest.raises(gk.SpecError, match=message):
        group.runner("b", fn, policy=POLICY, **options)
    assert len(group.runners) == 1


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_the_environment_makes_groups_checked(monkeypatch, value):
    monkeypatch.setenv("GRAPHKIT_CHECKED", value)
    assert gk.GraphGroup("cpu").checked is (value == "1")
    assert gk.GraphGroup("cpu", checked=False).checked is False
    assert gk.GraphGroup("cpu", checked=True).checked is True


# -- life -------------------------------------------------------------------------------------------


def test_states_in_order(group):
    runner = group.runner("r", double, policy=POLICY)
    states = [group.state]
    for step in (group.capture, group.invalidate, group.capture, group.release, group.invalidate,
                 group.capture, group.close, group.close):  # fmt: skip
        step()
        states.append(group.state)
    S = gk.State
    assert states == [
        S.NEW, S.CAPTURED, S.STALE, S.CAPTURED, S.SUSPENDED, S.SUSPENDED, S.CAPTURED, S.CLOSED,
        S.CLOSED,
    ]  # fmt: skip
    for step in (group.capture, group.invalidate, group.release):
        with pytest.raises(gk.StateError, match="the group is closed; make a new GraphGroup"):
            step()
    with pytest.raises(gk.StateError, match="the group is closed; make a new GraphGroup"):
        group.runner("s", double, policy=POLICY)
    with pytest.raises(gk.StateError, match="runner 'r': the group is closed"):
        runner.run(runner.dispatch(batch=1), x=torch.zeros(1, 2))


def test_invalidating_what_is_new_changes_nothing(group):
    group.runner("r", double, policy=POLICY)
    group.invalidate()
    assert group.state is gk.State.NEW


def test_a_group_closes_with_its_block():
    with gk.GraphGroup("cpu") as group:
        assert group.state is gk.State.NEW
    assert group.state is gk.State.CLOSED


@pytest.mark.parametrize("when", ["new", "released", "closed"])
def test_a_report_allocates_nothing(group, when):
    group.runner("r", double, policy=POLICY)
    if when != "new":
        group.capture()
        group.release()
    if when == "closed":
        group.close()
    report = group.report()
    assert [row.captured for row in report.runners[0].graphs] == [False, False]
    assert not group.buffers["x"].is_allocated
    assert report.buffer_bytes == 8 * 2 * 4
    assert "0 of 2 graphs captured" in str(report)


def test_a_report_says_what_ran(group):
    runner = group.runner("r", double, policy=POLICY)
    report = group.capture()
    assert report.state == "CAPTURED"
    assert report.capture_seconds > 0
    runner.run(runner.dispatch(batch=3), x=torch.zeros(3, 2))
    runner.run(runner.dispatch(batch=1, eager="cascade"), x=torch.zeros(1, 2))
    report = group.report()
    text = str(report)
    assert "graph group on cpu: CAPTURED, captured in " in text
    assert "runner r: 2 of 2 graphs captured" in text
    assert re.search(r"FULL +batch=8 +1 +batch=3 +batch 62%", text)
    assert re.search(r"EAGER +- +1 +batch=1 +none +CALLER", text)
    assert "captured and never replayed: FULL batch=1" in text
    assert report.runners[0].eager_runs == 1
    assert [row.bucket for row in report.runners[0].never_replayed] == ["batch=1"]


def test_failures_and_empty_graphs_are_reported():
    group = gk.GraphGroup("cpu", on_error="skip")
    group.buffers.declare(x=X)

    def fn(x):
        if x.shape[0] == 1:
            raise KeyError("small")
        return x * 2

    group.runner("r", fn, policy=POLICY, outputs=gk.Output((batch, 2), torch.float32))
    report = group.capture()
    assert "not captured: FULL batch=1: KeyError: 'small'" in str(report)
    assert str(report).count("not captured") == 1  # said once, however many buckets it is of


def test_waiting_runs_are_refused_not_queued(group):
    runner = group.runner("r", double, policy=POLICY)
    group.capture()
    dispatch = runner.dispatch(batch=1)
    inside, done = threading.Event(), threading.Event()

    def hold():
        with group._shared.lock:
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    try:
        for call, what in (
            (lambda: runner.run(dispatch, x=torch.zeros(1, 2)), "runner 'r': a run or capture"),
            (lambda: runner.stage(dispatch).__enter__(), "runner 'r': a run or capture"),
            (group.capture, "capture: a run or capture of the group is under way"),
            (group.release, "release: a run"),
            (group.invalidate, "invalidate: a run"),
            (group.close, "close: a run"),
        ):
            with pytest.raises(gk.ConcurrentRunError, match=what):
                call()
    finally:
        done.set()
        thread.join()
    assert runner.run(dispatch, x=torch.ones(1, 2)).tolist() == [[2, 2]]


def test_leases_end_with_a_capture():
    group = gk.GraphGroup("cpu", checked=True)
    declared = group.buffers.declare(x=X, y=X)
    runner = group.runner("r", double, policy=POLICY, outputs=declared.y)
    out = runner.run(runner.dispatch(batch=1), x=torch.ones(1, 2))
    assert out.tolist() == [[2, 2]]
    group.capture()
    with pytest.raises(gk.StaleOutputError):
        out.tolist()


# -- wrap -------------------------------------------------------------------------------------------


def test_a_wrapped_function_is_called_like_itself(device):
    group = gk.GraphGroup(device)
    bias = gk.BufferSpec((2,), torch.float32)
    fast = group.wrap(lambda x, bias: x * 2 + bias, x=X, bias=bias)
    for _ in range(2):
        for size in range(9):
            x = torch.randn(size, 2)
            given = torch.tensor([1.0, 2.0])
            expected = x * 2 + given
            for out in (fast(x, given), fast(x, bias=given), fast(x=x, bias=[1.0, 2.0])):
                assert torch.allclose(out.cpu(), expected)
        group.capture()


def test_wraps_have_memory_of_their_own():
    group = gk.GraphGroup("cpu")
    first, second = (group.wrap(double, x=X) for _ in range(2))
    named = group.wrap(torch.nn.Identity(), input=X)
    group.capture()
    assert [runner.name for runner in group.runners] == ["double", "double_2", "Identity"]
    kept = first(torch.ones(3, 2))
    second(torch.zeros(3, 2))
    first(torch.zeros(3, 2))
    assert kept.tolist() == [[2.0, 2.0]] * 3
    assert named(torch.ones(1, 2)).tolist() == [[1, 1]]
    assert "x" not in group.buffers
    assert group.report().buffer_bytes == 3 * X.nbytes


def test_the_default_policy_is_powers_of_two_of_all_dims():
    group = gk.GraphGroup("cpu")
    two = gk.BufferSpec((batch, length), torch.int32, pad=0)
    grid = group.wrap(lambda x: x + 1, x=two, outputs=gk.Output((batch, length), torch.int32))
    none = group.wrap(lambda x: x + 1, x=gk.BufferSpec((2,), torch.int32), name="fixed")
    group.capture()
    assert len(grid.runner.dispatcher.graphs) == 4 * 3
    assert len(none.runner.dispatcher.graphs) == 1
    assert grid([[1, 2, 3]]).tolist() == [[2, 3, 4]]
    assert none([1, 2]).tolist() == [2, 3]
    dispatch = grid.dispatch({"x": torch.zeros(3, 3)})
    assert dict(dispatch.bucket.sizes) == {"batch": 4, "length": 4}


def test_sizes_are_solved_from_expressions():
    group = gk.GraphGroup("cpu")
    starts = gk.BufferSpec((batch + 1,), torch.int32, pad=gk.repeat_last)
    pairs = gk.BufferSpec((gk.interleaved(batch, 2),), torch.int32, pad=0)
    output = gk.Output((batch + 1,), torch.int32)
    fast = group.wrap(lambda starts, pairs: starts * 2, starts=starts, pairs=pairs, outputs=output)
    assert dict(fast.dispatch({"starts": [0, 1, 2], "pairs": [0] * 4}).sizes) == {"batch": 2}
    for given, message in (
        ({"starts": [0, 1, 2], "pairs": [0] * 3}, "input 'pairs' has 3 rows, which is no"),
        ({"starts": [], "pairs": []}, r"input 'starts' has 0 rows, which is no batch \+ 1"),
        (
            {"starts": [0], "pairs": [0, 0]},
            "the inputs disagree on dim 'batch': 0, and 1 by 'pairs'",
        ),
        ({"starts": [0]}, "input 'pairs' is missing; it takes starts, pairs"),
        ({"starts": [[0]], "pairs": []}, r"input 'starts' has shape \(1, 1\), expected 1 axes"),
    ):
        with pytest.raises(gk.InputError, match=message):
            fast.dispatch(given)


def test_how_a_wrapped_function_is_called():
    fast = gk.GraphGroup("cpu").wrap(double, x=X)
    with pytest.raises(gk.InputError, match="'double' takes 1 inputs, got 2 by position"):
        fast(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(gk.InputError, match="'double': input 'x' is given twice"):
        fast(torch.ones(1, 2), x=torch.ones(1, 2))


def test_a_failed_wrap_declares_nothing(group):
    with pytest.raises(
        gk.SpecError, match="inputs names 'y', which double doesn't take; it takes x"
    ):
        group.wrap(double, y=X)
    assert group.runners == ()
    assert group.report().buffer_bytes == X.nbytes


def test_static_outputs_are_plain_memory_for_both_gradient_modes(group):
    runner = group.runner("r", double, policy=POLICY)
    with torch.inference_mode():
        group.capture()
    out = runner.run(runner.dispatch(batch=1), x=torch.ones(1, 2))
    assert not out.is_inference()
    out += 1


@pytest.mark.parametrize("to", ["static", "pool", "host"])
def test_leases_end_with_a_replay_and_not_before(to):
    group = gk.GraphGroup("cpu", checked=True)
    group.buffers.declare(x=X)
    output = gk.Output((batch, 2), torch.float32, to=to)
    runner = group.runner("r", double, policy=POLICY, outputs=output)
    group.capture()
    small, large = runner.dispatch(batch=1), runner.dispatch(batch=5)
    first = runner.run(small, x=torch.ones(1, 2))
    with pytest.raises(gk.InputError):
        runner.run(large, x=torch.ones(1, 2))
    assert first.tolist() == [[2, 2]]
    for _ in range(7 if to == "host" else 0):
        runner.run(small, x=torch.zeros(1, 2))
        assert first.tolist() == [[2, 2]]
    second = runner.run(large, x=torch.zeros(5, 2))
    with pytest.raises(gk.StaleOutputError, match="its output was read after its lease ended"):
        first.tolist()
    assert second.tolist() == [[0, 0]] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["default", "side"])
def test_a_run_on_another_stream_waits_for_the_last_launch(first):
    """The default stream's handle is 0, which to torch is no stream in particular (rule 18)."""
    group = gk.GraphGroup("cuda")
    hidden = group.buffers.declare(x=X, hidden=X).hidden
    producer = group.runner(
        "producer",
        lambda x: (torch.cuda._sleep(50_000_000), x * 2)[1],
        policy=POLICY,
        outputs=hidden,
    )
    consumer = group.runner(
        "consumer",
        lambda hidden: hidden + 1,
        policy=POLICY,
        inputs={"hidden": gk.Resident("hidden")},
    )
    group.capture(progress=False)
    streams = {"default": torch.cuda.default_stream(), "side": torch.cuda.Stream()}
    second = "side" if first == "default" else "default"
    for value in (3.0, 5.0):
        with torch.cuda.stream(streams[first]):
            producer.run(producer.dispatch(batch=5), x=torch.full((5, 2), value))
        with torch.cuda.stream(streams[second]):
            out = consumer.run(consumer.dispatch(batch=5), clone=True)
        streams[second].synchronize()
        assert out.tolist() == [[2 * value + 1] * 2] * 5
    group.close()


@pytest.mark.gpu
def test_closing_waits_for_the_group_s_own_work_while_another_thread_captures():
    """To wait for the whole device is refused while a stream of any thread captures."""
    group = gk.GraphGroup("cuda")
    group.buffers.declare(x=X)
    runner = group.runner("r", double, policy=POLICY)
    group.capture(progress=False)
    begun, done = threading.Event(), threading.Event()
    failures = []

    def capture():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                begun.set()
                done.wait(20)
                torch.zeros(1, device="cuda")
                graph.capture_end()
        except BaseException as error:
            failures.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    try:
        out = runner.run(runner.dispatch(batch=2), x=torch.ones(2, 2), clone=True)
        group.backend.synchronize()
    finally:
        done.set()
        thread.join()
    assert out.tolist() == [[2.0, 2.0]] * 2
    assert not failures
    group.close()
