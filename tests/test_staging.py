from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.backends.recording import RecordingBackend
from graphkit.staging import staging as staging_module
from graphkit.staging.ring import Ring

batch = gk.Dim("batch", 8)


class Fence:
    """A fence of a device that is as far as the test says."""

    def __init__(self, log):
        self.log, self.passed = log, True

    def record(self):
        self.passed = False
        self.log.append("record")

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True
        self.log.append("wait")


class FencedBackend(RecordingBackend):
    """The recording backend with fences, as a device with a queue has them."""

    def __init__(self):
        super().__init__()
        self.log, self.fences = [], []

    def new_fence(self):
        self.fences.append(Fence(self.log))
        return self.fences[-1]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_a_slot_is_never_written_while_its_copy_is_in_flight(depth):
    backend = FencedBackend()
    ring = Ring(backend, 16, depth)
    in_flight: list[int] = []
    for _ in range(5 * depth):
        waits = backend.log.count("wait")
        slot = ring.acquire()
        assert ring.acquire() == slot, "an acquired slot stays the next one until it is used"
        if backend.log.count("wait") > waits:
            # What was committed before the fence is done.
            in_flight = (
                in_flight[len(in_flight) - depth // 2 :] if depth % 2 == 0 else in_flight[1:]
            )
            if depth in (1, 2):
                in_flight = [] if depth == 1 else in_flight
        assert slot not in in_flight
        in_flight.append(slot)
        ring.commit()
    assert backend.log.count("record") >= 5 * depth // max(depth // 2, 1) - 1
    assert backend.log.count("wait") >= 1


def test_no_fence_is_waited_for_that_has_passed():
    backend = FencedBackend()
    ring = Ring(backend, 16, 4)
    for _ in range(12):
        ring.acquire()
        ring.commit()
        for fence in backend.fences:
            fence.passed = True
    assert "wait" not in backend.log


def test_even_rings_fence_by_halves_and_odd_ones_by_slot():
    assert [len(FencedRing.fences) for FencedRing in map(fenced, (1, 2, 3, 8))] == [1, 2, 3, 2]


def fenced(depth):
    backend = FencedBackend()
    Ring(backend, 16, depth)
    return backend


def runner_of(fn, specs, *, buckets=None, checked=False, **options):
    group = gk.GraphGroup("cpu", checked=checked)
    group.buffers.declare(**specs)
    policy = gk.Policy.full(buckets or gk.Buckets.of(batch, 4, 8))
    runner = group.runner("r", fn, policy=policy, **options)
    group.capture()
    return group, runner


def test_memory_is_made_once_and_given_back():
    group, runner = runner_of(lambda x: x + 1, {"x": gk.BufferSpec((batch,), torch.int32, pad=0)})
    span, ring = runner.staging.span, runner.staging.ring
    for size in (1, 5, 8, 0):
        runner.run(runner.dispatch(batch=size), x=[1] * size)
    assert runner.staging.span is span
    assert runner.staging.ring is ring
    assert runner.staging.host_nbytes == 8 * runner.staging.span_nbytes
    assert group.report().host_bytes == runner.staging.host_nbytes
    group.release()
    assert group.report().host_bytes == runner.staging.host_nbytes
    group.capture()
    assert runner.staging.span is not span


@pytest.mark.parametrize("abandon", ["wrong input", "exception", "other dispatch"])
@pytest.mark.parametrize("pad", [gk.relied(0), gk.repeat_last, gk.continue_(0)])
def test_a_batch_that_was_given_up_leaves_the_next_one_s_padding_alone(abandon, pad):
    """The ring's slots remember what padding they hold; a write that came to nothing must not fool them."""
    specs = {
        "x": gk.BufferSpec((batch,), torch.int64, pad=pad),
        "y": gk.BufferSpec((batch,), torch.int64, pad=7),
    }
    group, runner = runner_of(
        lambda x, y: x.sum() + y.sum() * 0, specs, ring_depth=1, outputs=gk.Output((), torch.int64)
    )
    small, large = runner.dispatch(batch=1), runner.dispatch(batch=8)
    zero, ones = np.zeros(1, np.int64), np.ones(8, np.int64)
    assert runner.run(small, x=zero, y=zero).item() == 0
    if abandon == "wrong input":
        with pytest.raises(gk.InputError):
            runner.run(large, x=ones, y=ones[:3])
    elif abandon == "exception":
        with contextlib.suppress(ZeroDivisionError), runner.stage(large) as stage:
            stage.host["x"][...] = 1
            stage.host["y"][...] = 1
            raise ZeroDivisionError
    else:
        with runner.stage(large) as stage:
            stage.host["x"][...] = 1
            stage.host["y"][...] = 1
    assert runner.run(small, x=zero, y=zero).item() == 0
    assert group.buffers["y"].tensor[:4].tolist() == [0, 7, 7, 7]


def test_what_was_staged_for_one_dispatch_is_not_another_s():
    _, runner = runner_of(lambda x: x * 1, {"x": gk.BufferSpec((batch,), torch.int32, pad=0)})
    three, two = runner.dispatch(batch=3), runner.dispatch(batch=2)
    with runner.stage(three) as stage:
        stage.host["x"][...] = [1, 2, 3]
    assert stage.dispatch is three
    with pytest.raises(gk.InputError, match=r"runner 'r', input 'x' is missing; run\(\) needs x"):
        runner.run(two)
    with pytest.raises(gk.InputError, match="input 'x' is missing"):
        runner.run(three)


def test_staged_on_both_sides_is_refused():
    _, runner = runner_of(lambda x: x * 1, {"x": gk.BufferSpec((batch,), torch.int32, pad=0)})

    def stage_twice():
        with runner.stage(runner.dispatch(batch=3)) as stage:
            stage.host["x"][...] = 1
            stage.views["x"].fill_(2)

    with pytest.raises(gk.InputError, match="runner 'r': x was staged on the host and on the"):
        stage_twice()
    with runner.stage(runner.dispatch(batch=3)) as stage:
        pass
    assert set(stage.host) == {"x"}
    assert len(stage.views) == 1


def test_indices_outside_their_range_are_refused_in_checked_mode():
    spec = gk.BufferSpec((batch,), torch.int64, pad=0, valid=(0, 5))
    for size in (3, 8):
        _, runner = runner_of(
            lambda x: x * 1,
            {"x": spec},
            checked=True,
            buckets=gk.Buckets.of(batch, 1, 4),
        )
        for bad in (-1, 5):
            with pytest.raises(
                gk.InputError,
                match=r"runner 'r', input 'x' holds values from .* outside valid=\(0, 5\)",
            ):
                runner.run(runner.dispatch(batch=size), x=[1] * (size - 1) + [bad])
        assert runner.run(runner.dispatch(batch=size), x=[4] * size).tolist() == [4] * size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3).to_sparse(), "input 'x': got a tensor of layout torch.sparse_coo"),
        (np.zeros(3, ">f4"), "input 'x': got >f4, expected torch.float32; it is never cast"),
        (torch.zeros(3, device="meta"), "got a tensor on meta, expected one on cpu or the CPU"),
        ([[1.0]] * 3, r"got shape \(3, 1\), expected \(3,\), which is \(batch,\) at batch=3"),
    ],
)
def test_what_is_no_input(given, message):
    _, runner = runner_of(lambda x: x * 1, {"x": gk.BufferSpec((batch,), torch.float32, pad=0)})
    with pytest.raises(gk.InputError, match=message):
        runner.run(runner.dispatch(batch=3), x=given)


def test_residents_are_given_nothing():
    _, runner = runner_of(
        lambda x: x * 1,
        {"x": gk.BufferSpec((batch,), torch.float32, pad=0)},
        inputs={"x": gk.Resident("x")},
    )
    message = r"input 'x' is resident: the device writes buffer 'x', so run\(\) is given nothing"
    with pytest.raises(gk.InputError, match=message):
        runner.run(runner.dispatch(batch=3), x=[1.0] * 3)
    with pytest.raises(gk.InputError, match=r"input 'z' is unknown; run\(\) takes no inputs"):
        runner.run(runner.dispatch(batch=3), z=1)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.bfloat16, torch.uint16), (torch.float8_e4m3fn, torch.uint8)],
)
@pytest.mark.parametrize("as_array", [False, True])
def test_bits_are_not_taken_for_the_type_that_they_stand_for(dtype, bits, as_array):
    _, runner = runner_of(
        lambda x: x.clone(),
        {"x": gk.BufferSpec((batch,), dtype, pad=0)},
        buckets=gk.Buckets.of(batch, 1, 4),
    )
    dispatch = runner.dispatch(batch=2)
    given = torch.ones(2).to(bits)
    message = rf"input 'x': got (torch\.)?uint\d+, expected {dtype}; it is never cast"
    with pytest.raises(gk.InputError, match=message):
        runner.run(dispatch, x=given.numpy() if as_array else given)
    assert runner.run(dispatch, x=torch.ones(2).to(dtype)).float().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("way", ["host", "staged host", "staged device"])
@pytest.mark.parametrize("direct", [False, True])
def test_staging_pads_for_the_producer_that_it_is(way, direct, monkeypatch):
    monkeypatch.setattr("graphkit.staging.staging.PACKED_LIMIT", 0 if direct else 1 << 20)
    spec = gk.BufferSpec((batch,), torch.int32, pad=gk.by_producer(7))
    group, runner = runner_of(lambda x: x * 1, {"x": spec}, ring_depth=1)

    def run(size):
        dispatch = runner.dispatch(batch=size)
        values = np.arange(1, size + 1, dtype=np.int32)
        if way == "host":
            return runner.run(dispatch, x=values)
        with runner.stage(dispatch) as stage:
            if way == "staged host" and not direct:
                stage.host["x"][...] = values
            else:
                stage.views["x"].copy_(torch.from_numpy(values))
        return runner.run(dispatch)

    run(4)
    assert run(2).tolist() == [1, 2]
    assert group.buffers["x"].tensor[:4].tolist() == [1, 2, 7, 7]


# -- CPU tensors ------------------------------------------------------------------------------------


TENSORS = {
    "contiguous": lambda: torch.tensor([5, 6, 7], dtype=torch.int32),
    "of a longer one": lambda: torch.arange(4, 9, dtype=torch.int32)[1:4],
    "strided": lambda: torch.arange(5, 11, dtype=torch.int32)[::2] - torch.tensor([0, 1, 2], dtype=torch.int32),
    "every other": lambda: torch.tensor([5, 0, 6, 0, 7, 0], dtype=torch.int32)[::2],
    "expanded": lambda: torch.tensor(6, dtype=torch.int32).expand(3),
    "made in inference mode": lambda: _in_inference_mode(),
}  # fmt: skip


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.tensor([5, 6, 7], dtype=torch.int32)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_cpu_tensor_is_taken_however_it_lies(kind):
    group, runner = runner_of(lambda x: x + 1, {"x": gk.BufferSpec((batch,), torch.int32, pad=0)})
    given = TENSORS[kind]()
    out = runner.run(runner.dispatch(batch=3), x=given)
    assert out.tolist() == [value + 1 for value in given.tolist()]
    group.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "got torch.int64, expected torch.int32"),
        (torch.zeros(4, dtype=torch.int32), r"got shape \(4,\), expected \(3,\)"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "got a tensor on meta"),
        (torch.zeros(3, dtype=torch.int32).to_sparse(), "of layout torch.sparse_coo"),
    ],
)
def test_a_wrong_cpu_tensor_is_refused(given, message):
    group, runner = runner_of(lambda x: x + 1, {"x": gk.BufferSpec((batch,), torch.int32, pad=0)})
    with pytest.raises(gk.InputError, match=message):
        runner.run(runner.dispatch(batch=3), x=given)
    group.close()


def test_a_tensor_that_stands_for_the_negative_of_its_memory_is_resolved():
    group, runner = runner_of(lambda x: x + 1, {"x": gk.BufferSpec((batch,), torch.float32, pad=0)})
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    assert runner.run(runner.dispatch(batch=1), x=negative).tolist() == [-1.0]
    group.close()


# -- device inputs ----------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_device_input_that_is_the_buffer_is_not_copied(monkeypatch):
    group = gk.GraphGroup("cuda")
    buf = group.buffers.declare(
        x=gk.BufferSpec((batch,), torch.float32, pad=0),
        y=gk.BufferSpec((batch,), torch.float32, pad=0),
        z=gk.BufferSpec((batch,), torch.int64, pad=0),
    )
    runner = group.runner(
        "r",
        lambda x, y, z: x + y + z,
        policy=gk.Policy.full(gk.Buckets.of(batch, 8)),
        outputs=gk.Output((batch,), torch.float32),
    )
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    buf.x.tensor[:3] = 1
    own = buf.x.tensor[:3]
    ones = torch.ones(3, device="cuda")
    copied = []
    fused = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda a, b: (copied.append(len(a)), fused(a, b))[1]
    )
    z = torch.ones(3, dtype=torch.int64, device="cuda")
    assert runner.run(dispatch, x=own, y=ones, z=z).tolist() == [3.0] * 3
    assert copied == []
    assert runner.run(dispatch, x=ones * 5, y=ones, z=z).tolist() == [7.0] * 3
    assert copied == [2]
    group.close()


def test_what_lies_in_the_buffer_already_is_not_copied():
    memory = torch.arange(8.0)
    assert staging_module._is_same(memory[:3], memory[:3])
    assert not staging_module._is_same(memory[:3], memory[1:4])
    assert not staging_module._is_same(memory[:3], memory[::2][:3])
