"""Cases about outputs (O1 to O4), and N1: what a graph returns, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 16)
WIDTH = 20


def declare(group: gk.GraphGroup, **specs: gk.BufferSpec) -> Any:
    x = gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0)
    return group.buffers.declare(x=x, **specs)


def rows(count: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(start, start + count * WIDTH).reshape(count, WIDTH)


# -- O1: two runners, one pool ---------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2, 7, 16])
@pytest.mark.parametrize("second", [1, 8, 16])
def test_o1_an_output_outlives_the_run_of_another_runner(device, first, second):
    """A and B share a pool; run A, run B, read A's output (vllm#53488, pytorch#166975)."""
    group = gk.GraphGroup(device)
    declare(group, y=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 8, 16))

    def a(x):
        return {"twice": x * 2, "sums": (x + 1).sum(-1)}

    def b(y):
        scratch = (y * -7).exp() * 0 - 5  # work that takes memory of the pool
        return scratch * 3

    runner_a = group.runner("a", a, policy=policy)
    runner_b = group.runner("b", b, policy=policy)
    group.capture()
    x = rows(first)
    out = runner_a.run(runner_a.dispatch(batch=first), x=x)
    for _ in range(3):
        runner_b.run(runner_b.dispatch(batch=second), y=rows(second) / 100)
    assert out["twice"].tolist() == (x * 2).tolist()
    assert out["sums"].tolist() == (x + 1).sum(-1).tolist()


# -- O2: leases ------------------------------------------------------------------------------------


def leased(device: str, to: str) -> tuple[gk.GraphGroup, gk.GraphRunner, Any]:
    group = gk.GraphGroup(device, checked=True)
    buf = declare(group, out=gk.BufferSpec((BATCH, WIDTH), torch.float32, pad=0))
    destination = buf.out if to == "buffer" else to
    runner = group.runner(
        "r",
        lambda x: x * 2,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 4)),
        outputs=gk.Output((BATCH, WIDTH), torch.float32, to=destination),
    )
    return group, runner, buf


READS = {
    "tolist": lambda y: y.tolist(),
    "add": lambda y: y + 1,
    "index": lambda y: y[0],
    "method of a view": lambda y: y.sum(),
    "in a list": lambda y: torch.cat([y, y]),
    "repr": repr,
}


@pytest.mark.parametrize("to", ["static", "pool", "host", "buffer"])
@pytest.mark.parametrize("read", READS)
def test_o2_reading_an_output_that_a_run_has_overwritten_raises(device, to, read):
    """y1 = run(a); y2 = run(b): reading y1 gives b's values (pytorch#148439)."""
    group, runner, _ = leased(device, to)
    group.capture()
    dispatch = runner.dispatch(batch=2)
    y1 = runner.run(dispatch, x=rows(2))
    view = y1[:1]
    READS[read](y1)
    group.backend.synchronize()
    assert y1.tolist() == (rows(2) * 2).tolist()
    # Outputs on the host have a slot for each step in flight.
    for _ in range(7 if to == "host" else 0):
        runner.run(dispatch, x=rows(2, 20.0))
        assert y1.tolist() == (rows(2) * 2).tolist()
    y2 = runner.run(runner.dispatch(batch=3), x=rows(3, 50.0))
    for stale in (y1, view):
        with pytest.raises(
            gk.StaleOutputError,
            match=r"runner 'r', its output was read after its lease.*clone=",
        ):
            READS[read](stale)
    group.backend.synchronize()
    assert y2.tolist() == (rows(3, 50.0) * 2).tolist()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("to", ["static", "pool", "host", "buffer"])
def test_o2_a_clone_stays_intact(device, to, checked):
    """With clone=True the tensor is the caller's (pytorch#148439)."""
    group, runner, _ = leased(device, to)
    group._shared.checked = checked
    group.capture()
    y1 = runner.run(runner.dispatch(batch=2), x=rows(2), clone=True)
    runner.run(runner.dispatch(batch=3), x=rows(3, 50.0))
    group.backend.synchronize()
    assert y1.tolist() == (rows(2) * 2).tolist()


def test_o2_an_eager_run_leaves_static_outputs_alone(device):
    """What a run doesn't write stays readable: an EAGER run returns tensors of its own."""
    group, runner, _ = leased(device, "static")
    group.capture()
    y1 = runner.run(runner.dispatch(batch=2), x=rows(2))
    eager = runner.run(runner.dispatch(batch=9), x=rows(9))
    assert y1.tolist() == (rows(2) * 2).tolist()
    assert eager.tolist() == (rows(9) * 2).tolist()


@pytest.mark.parametrize("size", [3, 9], ids=["FULL", "EAGER"])
@pytest.mark.parametrize("how", ["writes", "is fed", "pads"])
def test_o2_any_runner_that_writes_or_pads_the_buffer_ends_the_lease(device, how, size):
    """An output bound to a buffer ends with whoever writes that buffer next (rule 19)."""
    group, runner, buf = leased(device, "buffer")
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 4))
    feed: dict[str, Any] = {}
    if how == "writes":
        other = group.runner("other", lambda x: x - 1, policy=policy, outputs=buf.out)
        feed = {"x": rows(size)}
    else:
        role = gk.Fed("out") if how == "is fed" else gk.Resident("out")
        other = group.runner("other", lambda out: out - 1, policy=policy, inputs={"out": role})
        feed = {"out": rows(size)} if how == "is fed" else {}
    group.capture()
    y1 = runner.run(runner.dispatch(batch=2), x=rows(2))
    other.run(other.dispatch(batch=size), feed)
    with pytest.raises(gk.StaleOutputError, match="runner 'r', its output"):
        y1.tolist()


def test_o2_a_runner_that_has_nothing_to_do_with_it_does_not_end_a_lease(device):
    """Static outputs are outside the pool, so that a step of several runners can read them all."""
    group, runner, _ = leased(device, "static")
    group.buffers.declare(z=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 4))
    other = group.runner("other", lambda z: z * 9, policy=policy)
    group.capture()
    y1 = runner.run(runner.dispatch(batch=2), x=rows(2))
    z1 = other.run(other.dispatch(batch=3), z=[1, 2, 3])
    assert y1.tolist() == (rows(2) * 2).tolist()
    assert z1.tolist() == [9, 18, 27]


# -- O3: memory ------------------------------------------------------------------------------------


def test_o3_output_memory_is_that_of_the_largest_bucket(device):
    """32 buckets with outputs [n, 8192]: the largest's memory, not the sum's (CASES O3)."""
    batch = gk.Dim("batch", 512 if device == "cuda" else 32)
    step = batch.maximum // 32
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((batch, 1), torch.float32, pad=0))
    runner = group.runner(
        "r",
        lambda x: x.expand(-1, 8192) * 2,
        policy=gk.Policy.full(gk.Buckets.of(batch, range(step, batch.maximum + 1, step))),
    )
    group.backend.empty_cache()
    before = group.backend.memory_reserved()
    report = group.capture()
    assert sum(row.captured for row in report.runners[0].graphs) == 32
    largest = batch.maximum * 8192 * 4
    assert report.runners[0].output_bytes == largest
    addresses = set()
    for size in range(step, batch.maximum + 1, step):
        out = runner.run(runner.dispatch(batch=size), x=torch.ones(size, 1))
        assert out.shape == (size, 8192)
        addresses.add(out.data_ptr())
    assert len(addresses) == 1
    if device == "cuda":
        # The static output and, in the pool, the product that is copied to it; the sum is 16 times.
        group.backend.empty_cache()
        assert group.backend.memory_reserved() - before <= 4 * largest


# -- O4: shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("sizes", [(4, 16), (16, 4), (1, 4, 16)], ids=str)
def test_o4_the_order_of_capture_does_not_size_the_outputs(device, sizes, declared):
    """Capture 4, then 16: every bucket equals eager (vllm#37588, TensorRT-LLM#16706)."""
    group = gk.GraphGroup(device)
    declare(group)

    def fn(x):
        return {"y": x + 1, "nested": [x.sum(-1), (x.repeat(1, 2),)], "none": None}

    outputs = {
        "y": gk.Output((BATCH, WIDTH), torch.float32),
        "nested.0": gk.Output((BATCH,), torch.float32),
        "nested.1.0": gk.Output((BATCH, 2 * WIDTH), torch.float32),
    }
    runner = group.runner(
        "r",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, sizes)),
        outputs=outputs if declared else None,
    )
    group.capture(order=lambda mode, bucket: sizes.index(bucket["batch"]))
    for count in (3, 4, 16, 1, 0, 11):
        x = rows(count, 3.0)
        out = runner.run(runner.dispatch(batch=count), x=x)
        expected = fn(x)
        assert out["none"] is None
        assert isinstance(out["nested"][1], tuple)
        assert out["y"].tolist() == expected["y"].tolist()
        assert out["nested"][0].tolist() == expected["nested"][0].tolist()
        assert out["nested"][1][0].tolist() == expected["nested"][1][0].tolist()


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("bad", [4, 16])
@pytest.mark.parametrize("shape", ["one row", "no axis", "a slice"])
def test_o4_a_result_of_another_shape_is_refused_and_never_broadcast(device, bad, shape, declared):
    """A function that returns one row for one bucket would be broadcast in silence (vllm#37588)."""
    group = gk.GraphGroup(device)
    declare(group)
    cut = {"one row": lambda x: x[:1], "no axis": lambda x: x.sum(), "a slice": lambda x: x[:3]}

    def fn(x):
        y = x + 1
        return cut[shape](y) if len(x) == bad else y

    runner = group.runner(
        "r",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 4, 16)),
        outputs=gk.Output((BATCH, WIDTH), torch.float32) if declared else None,
    )
    message = r"never broadcast" if declared else r"is no one expression|number of axes differs"
    with pytest.raises(gk.SpecError, match=message) as raised:
        group.capture()
    if declared:
        assert f"bucket [batch={bad}]" in str(raised.value)
    dispatch = runner.dispatch(batch=5)
    assert dispatch.mode is (gk.FULL if declared and bad == 4 else gk.EAGER)
    assert runner.run(dispatch, x=rows(5)).tolist() == (rows(5) + 1).tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_o4_a_shape_that_buckets_cannot_tell_is_asked_for(device, count):
    """One bucket, or two on which a slice looks constant, must not be guessed (section 3)."""
    group = gk.GraphGroup(device)
    declare(group)
    sizes = (8, 16)[:count]
    runner = group.runner("r", lambda x: x[:8], policy=gk.Policy.full(gk.Buckets.of(BATCH, sizes)))
    with pytest.raises(
        gk.SpecError, match=r"runner 'r', its output: axis 0 of size 8 could be .*batch.*Output"
    ):
        group.capture()
    assert runner.dispatch(batch=3).reason is gk.Reason.NOT_CAPTURED


def test_o4_an_output_of_another_dtype_is_refused(device):
    """What is declared is never cast in silence (rule 4)."""
    group = gk.GraphGroup(device)
    declare(group)
    group.runner(
        "r",
        lambda x: x.double(),
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 4, 16)),
        outputs=gk.Output((BATCH, WIDTH), torch.float32),
    )
    with pytest.raises(
        gk.SpecError, match=r"is torch.float64, expected torch.float32; it is never cast"
    ):
        group.capture()


@pytest.mark.parametrize(
    "value", [3, 2.5, True, "text", object()], ids=lambda value: type(value).__name__
)
def test_o4_a_python_value_is_no_output(device, value):
    """It would be that of the capture for ever (rule 11)."""
    group = gk.GraphGroup(device)
    declare(group)
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 4, 16))
    group.runner("r", lambda x: {"y": x + 1, "n": value}, policy=policy)
    with pytest.raises(gk.CaptureError, match=r"as output 'n': a Python value would be baked"):
        group.capture()


# -- N1: numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 8, 13, 16])
def test_n1_a_graph_is_bit_equal_at_the_padded_size_and_close_at_the_real_one(device, count):
    """Kernels chosen by shape differ in the last bits between the two sizes (vllm#55238)."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    batch = gk.Dim("batch", 16)

    def fn(x):
        hidden = torch.nn.functional.silu(x @ first)
        return hidden / hidden.square().mean(-1, keepdim=True).sqrt() @ second

    group = gk.GraphGroup(device)
    buf = group.buffers.declare(x=gk.BufferSpec((batch, 64), torch.float32, pad=0.5))
    policy = gk.Policy.full(gk.Buckets.of(batch, 2, 8, 16))
    runner = group.runner("r", fn, policy=policy)
    group.capture()
    x = torch.randn(count, 64, generator=generator)
    dispatch = runner.dispatch(batch=count)
    out = runner.run(dispatch, x=x)
    assert dispatch.mode is gk.FULL
    with torch.no_grad():
        padded = buf.x.view(dispatch.bucket.sizes)
        assert torch.equal(out, fn(padded)[:count])
        torch.testing.assert_close(out, fn(x.to(device)), rtol=1e-4, atol=1e-4)
