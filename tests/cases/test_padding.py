"""Cases about padding and stale contents: P1, P2, P3, P5, P6, P7."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

ROLES = ["numpy", "cpu tensor", "device tensor", "resident"]


def role(name: str, buffer: str) -> gk.Fed | gk.Resident:
    return gk.Resident(buffer) if name == "resident" else gk.Fed(buffer)


def give(
    runner: gk.GraphRunner,
    dispatch: gk.Dispatch,
    how: str,
    buffers: Mapping[str, gk.Buffer],
    values: Mapping[str, torch.Tensor],
) -> Any:
    """Run on `values` (CPU tensors), each given in the way of `how`, or written where it resides."""
    given: dict[str, Any] = {}
    padded = dispatch.sizes if dispatch.bucket is None else dispatch.bucket.sizes
    for name, value in values.items():
        if how == "resident":
            view = buffers[name].view(padded)
            view[tuple(slice(0, size) for size in value.shape)].copy_(value)
        elif how == "numpy":
            given[name] = value.numpy()
        else:
            given[name] = value.to(view_device(buffers[name])) if how == "device tensor" else value
    return runner.run(dispatch, given)


def view_device(buffer: gk.Buffer) -> torch.device:
    return buffer.tensor.device


# -- P1: an index pad that hits a real row ---------------------------------------------------------

SCRATCH = 9


@pytest.mark.parametrize("how", ROLES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_p1_padded_rows_are_written_to_the_scratch_row(device, how, dtype):
    """An index buffer padded with -1 makes a graph overwrite the last real row (vllm#43810)."""
    batch = gk.Dim("batch", 8)
    cache = torch.zeros(10, 2, device=device)

    def fn(idx, x):
        cache[idx] = x
        return x + 1

    group = gk.GraphGroup(device)
    buffers = vars(
        group.buffers.declare(
            idx=gk.BufferSpec((batch,), dtype, pad=SCRATCH, valid=(0, 10)),
            x=gk.BufferSpec((batch, 2), torch.float32, pad=7.0),
        )
    )
    runner = group.runner(
        "scatter",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(batch, 8)),
        inputs={name: role(how, name) for name in buffers},
        outputs=gk.Output((batch, 2), torch.float32),
        mutates=[gk.Scratch(cache, rows=[SCRATCH])],
    )
    group.capture()
    expected = torch.zeros(10, 2)
    for rows, first in ((8, 1), (5, 0), (1, 8), (0, 0)):
        values = {
            "idx": torch.arange(first, first + rows).to(dtype),
            "x": torch.full((rows, 2), float(rows)),
        }
        expected[first : first + rows] = float(rows)
        give(runner, runner.dispatch(batch=rows), how, buffers, values)
        assert cache[:SCRATCH].tolist() == expected[:SCRATCH].tolist()


BATCH, PAGES = gk.Dim("batch", 8), gk.Dim("pages", 4)


@pytest.mark.parametrize("bad", [-1, 9, 1000])
@pytest.mark.parametrize("wrap", [lambda value: value, gk.relied, gk.by_producer])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_p1_an_index_pad_outside_the_valid_range_is_refused(bad, wrap, dtype):
    """Whatever kind of constant pad, and whichever dim of the buffer it is for (vllm#43810)."""
    good = wrap(0)
    for shape, pad in (
        ((BATCH,), wrap(bad)),
        ((BATCH, PAGES), wrap(bad)),
        ((BATCH, PAGES), {BATCH: wrap(bad), PAGES: good}),
        ((BATCH, PAGES), {BATCH: good, PAGES: wrap(bad)}),
    ):
        with pytest.raises(gk.SpecError, match=r"lies outside valid=\(0, 9\).*scratch row"):
            gk.BufferSpec(shape, dtype, pad=pad, valid=(0, 9))


@pytest.mark.parametrize("how", ["numpy", "cpu tensor"])
@pytest.mark.parametrize("bad", [-1, 9])
def test_p1_an_index_outside_the_valid_range_is_refused_in_checked_mode(device, how, bad):
    """A real index of -1 does what a pad of -1 does (vllm#43810)."""
    group = gk.GraphGroup(device, checked=True)
    buffers = vars(
        group.buffers.declare(idx=gk.BufferSpec((BATCH,), torch.int64, pad=8, valid=(0, 9)))
    )
    runner = group.runner("r", lambda idx: idx + 1, policy=gk.Policy.full(gk.Buckets.powers(BATCH)))
    group.capture()
    message = (
        rf"input 'idx' holds values from {min(bad, 3)} to {max(bad, 3)}, outside valid=\(0, 9\)"
    )
    with pytest.raises(gk.InputError, match=message):
        give(runner, runner.dispatch(batch=2), how, buffers, {"idx": torch.tensor([bad, 3])})


# -- P2: a pad that reaches real rows --------------------------------------------------------------


@pytest.mark.parametrize("how", ROLES)
def test_p2_the_declared_pad_keeps_nan_out_of_real_rows(device, how):
    """A divisor padded with 0 makes all real rows NaN, only when padded (vllm#40047)."""
    assert divided(device, how, pad=1).isfinite().all()
    assert divided(device, how, pad=0).isnan().all()  # so the test can tell


def divided(device: str, how: str, pad: float) -> torch.Tensor:
    batch = gk.Dim("batch", 8)

    def fn(x, n):
        y = x / n[:, None]
        return y / y.abs().amax()

    group = gk.GraphGroup(device)
    buffers = vars(
        group.buffers.declare(
            x=gk.BufferSpec((batch, 3), torch.float32, pad=0),
            n=gk.BufferSpec((batch,), torch.float32, pad=pad),
        )
    )
    runner = group.runner(
        "divide",
        fn,
        policy=gk.Policy.full(gk.Buckets.of(batch, 8)),
        inputs={name: role(how, name) for name in buffers},
        outputs=gk.Output((batch, 3), torch.float32),
    )
    group.capture()
    full = {"x": torch.full((8, 3), 1e4), "n": torch.full((8,), 2.0)}
    give(runner, runner.dispatch(batch=8), how, buffers, full)
    part = {"x": torch.arange(15.0).reshape(5, 3), "n": torch.arange(1.0, 6.0)}
    out = give(runner, runner.dispatch(batch=5), how, buffers, part)
    if pad:
        torch.testing.assert_close(out.to("cpu"), fn(**part))
    return out


# -- P3: what an earlier, larger batch left --------------------------------------------------------


def padded(values: torch.Tensor, size: int, pad: Any) -> list[int]:
    """What a buffer of one dim must hold, by the words of the pads."""
    real = values.tolist()
    last = real[-1] if real else 0
    if pad is gk.repeat_last:
        return real + [last] * (size - len(real))
    if isinstance(pad, int):
        return real + [pad] * (size - len(real))
    start = last + 3 if real else 0
    return real + [start + 3 * i for i in range(size - len(real))]


@pytest.mark.parametrize("direct", [False, True], ids=["packed", "on its own"])
@pytest.mark.parametrize("pad", [40, gk.repeat_last, gk.continue_(3)], ids=str)
@pytest.mark.parametrize("how", ROLES)
def test_p3_the_tail_of_every_buffer_is_padded_on_every_run(device, how, pad, direct, monkeypatch):
    """Rows that a larger batch left are scattered again (vllm#13418, sglang#10892)."""
    if direct:
        monkeypatch.setattr("graphkit.staging.staging.PACKED_LIMIT", 0)
    batch = gk.Dim("batch", 12)
    group = gk.GraphGroup(device)
    spec = gk.BufferSpec((batch,), torch.int64, pad=pad)
    buffers = vars(group.buffers.declare(a=spec, b=spec))
    runner = group.runner(
        "r",
        lambda a, b: a + b,
        policy=gk.Policy.full(gk.Buckets.of(batch, 4, 8)),
        inputs={name: role(how, name) for name in buffers},
    )
    group.capture()
    start = itertools.count(1)
    # 12 is above every bucket and runs EAGER.
    for rows in (8, 3, 12, 5, 0, 4, 8, 1):
        values = {name: torch.arange(rows) + 100 * next(start) for name in buffers}
        dispatch = runner.dispatch(batch=rows)
        out = give(runner, dispatch, how, buffers, values)
        assert out.tolist() == (values["a"] + values["b"]).tolist()
        if dispatch.bucket is not None:
            for name, buffer in buffers.items():
                expected = padded(values[name], dispatch.bucket["batch"], pad)
                assert buffer.view(dispatch.bucket.sizes).tolist() == expected


@pytest.mark.parametrize("fed", ["a", "b"])
def test_p3_new_values_of_one_buffer_and_the_other_resident(device, fed):
    """Passing new values of one only must pad the other as well (vllm#13418, sglang#10892)."""
    batch = gk.Dim("batch", 8)
    group = gk.GraphGroup(device)
    spec = gk.BufferSpec((batch,), torch.int64, pad=15)
    buffers = vars(group.buffers.declare(a=spec, b=spec))
    other = "b" if fed == "a" else "a"

    def scatter(a, b):
        hits = torch.zeros(16, dtype=torch.int64, device=a.device)
        ones = torch.ones_like(a)
        return hits.index_add(0, a, ones).index_add(0, b, 10 * ones)

    runner = group.runner(
        "scatter",
        scatter,
        policy=gk.Policy.full(gk.Buckets.of(batch, 8)),
        inputs={other: gk.Resident(other)},
        outputs=gk.Output((16,), torch.int64),
    )
    group.capture()
    buffers[other].tensor.copy_(torch.arange(8))
    runner.run(runner.dispatch(batch=8), {fed: np.arange(8)})
    buffers[other].tensor[:3].copy_(torch.tensor([4, 5, 6]))
    out = runner.run(runner.dispatch(batch=3), {fed: np.array([0, 1, 2])})
    one, ten = (1, 10) if fed == "a" else (10, 1)
    expected = {0: one, 1: one, 2: one, 4: ten, 5: ten, 6: ten}
    assert out[:15].tolist() == [expected.get(row, 0) for row in range(15)]


@pytest.mark.parametrize("second", ["fed", "resident"])
def test_p3_another_runner_of_the_group_left_the_rows(device, second):
    """Stale rows may be those of another runner that shares the buffer (sglang#10892)."""
    batch = gk.Dim("batch", 8)
    group = gk.GraphGroup(device)
    buf = group.buffers.declare(idx=gk.BufferSpec((batch,), torch.int64, pad=40))
    wide = group.runner(
        "wide", lambda idx: idx + 1, policy=gk.Policy.full(gk.Buckets.of(batch, 6, 8))
    )
    narrow = group.runner(
        "narrow",
        lambda idx: idx + 2,
        policy=gk.Policy.full(gk.Buckets.of(batch, 4, 8)),
        inputs={} if second == "fed" else {"idx": gk.Resident("idx")},
    )
    group.capture()
    wide.run(wide.dispatch(batch=8), idx=np.arange(8))
    given = {"idx": np.arange(5)} if second == "fed" else {}
    out = narrow.run(narrow.dispatch(batch=5), given)
    assert out.tolist() == [2, 3, 4, 5, 6]
    assert buf.idx.tensor.tolist() == [0, 1, 2, 3, 4, 40, 40, 40]


# -- P5: Python numbers ----------------------------------------------------------------------------


def scaled(x, n):
    return x * n


def test_p5_a_python_number_without_a_source_is_refused():
    """A Python int would be that of the capture for ever (transformers#45323, vllm#48892)."""
    group = gk.GraphGroup("cpu")
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    message = (
        r"scaled needs 'n', which no buffer is named after.*make it a variant if it is a Python"
    )
    with pytest.raises(gk.SpecError, match=message):
        group.runner("r", scaled, policy=gk.Policy.full(gk.Buckets.powers(BATCH)))
    assert group.runners == ()


def test_p5_a_number_cannot_be_smuggled_in_as_an_input(device):
    """run() takes no input that isn't a buffer, so that no value is dropped in silence (vllm#48892)."""
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.powers(BATCH))
    runner = group.runner("r", lambda x, n=3: x * n, policy=policy)
    group.capture()
    with pytest.raises(gk.InputError, match="input 'n' is unknown; run.. takes x"):
        runner.run(runner.dispatch(batch=2), x=[1, 2], n=4)


def test_p5_a_variant_has_a_graph_for_each_number(device):
    """n is part of the variant, and each has its graph (transformers#45323)."""
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    route = gk.Route(gk.FULL, gk.Buckets.of(BATCH, 4, 8), variants=gk.Variants(n=(2, 5)))
    runner = group.runner("r", scaled, policy=gk.Policy([route]))
    group.capture()
    for n in (2, 5, 2, 7):
        dispatch = runner.dispatch(batch=3, variant={"n": n})
        assert dispatch.reason is (gk.Reason.UNKNOWN_VARIANT if n == 7 else None)
        assert runner.run(dispatch, x=[1.0, 2.0, 3.0]).tolist() == [n, 2 * n, 3 * n]


@pytest.mark.parametrize(
    "make", [int, float, lambda n: torch.full((), n)], ids=["int", "float", "tensor"]
)
def test_p5_what_prepare_returns_is_baked_and_checked(device, make):
    """prepare may return a Python number, but not another at each replay (vllm#48892)."""
    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=0))
    factor = [3]

    def prepare(step):
        value = make(factor[0])
        return {"n": value.to(device) if isinstance(value, torch.Tensor) else value}

    runner = group.runner(
        "r", scaled, policy=gk.Policy.full(gk.Buckets.of(BATCH, 4, 8)), prepare=prepare
    )
    if make in (int, float):
        group.capture()
        dispatch = runner.dispatch(batch=2)
        assert runner.run(dispatch, x=[1.0, 2.0]).tolist() == [3.0, 6.0]
        factor[0] = 4
        with pytest.raises(
            gk.StateError, match=r"bucket \[batch=4\]: prepare returned n=4.* is baked"
        ):
            runner.run(dispatch, x=[1.0, 2.0])
    elif device == "cuda":
        group.capture()
        with pytest.raises(gk.StateError, match="prepare returned n="):
            runner.run(runner.dispatch(batch=2), x=[1.0, 2.0])
    else:
        # A new tensor each time differs between the two recordings already.
        with pytest.raises(gk.CaptureError, match="two captures differ"):
            group.capture()


# -- P6: masks over batch and length ---------------------------------------------------------------


def attend(x, mask):
    weights = torch.softmax(x.masked_fill(~mask, float("-inf")), dim=-1)
    out = (weights * x).sum(-1)
    return out / (1 + out.abs().amax())  # rows meet, so that a NaN anywhere is one everywhere


@pytest.mark.parametrize("layout", ["strided", "packed"])
@pytest.mark.parametrize("how", ROLES)
def test_p6_a_mask_is_padded_by_dim(device, layout, how):
    """A tail must be False, and a pad row not all False: softmax gives NaN otherwise (CASES P6)."""
    batch, length = gk.Dim("batch", 4), gk.Dim("length", 6)
    group = gk.GraphGroup(device)
    buffers = vars(
        group.buffers.declare(
            x=gk.BufferSpec((batch, length), torch.float32, pad=0, layout=layout),
            mask=gk.BufferSpec(
                (batch, length), torch.bool, pad={batch: True, length: False}, layout=layout
            ),
        )
    )
    runner = group.runner(
        "encode",
        attend,
        policy=gk.Policy.full(gk.Buckets.grid({batch: (2, 4), length: (3, 6)})),
        inputs={name: role(how, name) for name in buffers},
        outputs=gk.Output((batch,), torch.float32),
    )
    group.capture()
    for rows, columns in ((4, 6), (3, 4), (1, 2), (2, 3), (3, 6), (4, 5), (1, 6)):
        x = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) / 7
        real = 1 + torch.arange(rows) % columns  # a row's own length
        values = {"x": x, "mask": torch.arange(columns) < real[:, None]}
        dispatch = runner.dispatch(batch=rows, length=columns)
        assert dispatch.mode is gk.FULL
        out = give(runner, dispatch, how, buffers, values)
        torch.testing.assert_close(out.to("cpu"), attend(**values))
        mask = buffers["mask"].view(dispatch.bucket.sizes)
        assert not mask[:rows, columns:].any()
        assert mask[rows:].all()
        if layout == "packed":
            assert mask.is_contiguous()


# -- P7: state that each run advances --------------------------------------------------------------


@pytest.mark.parametrize("checked", [False, True])
def test_p7_declared_state_is_as_it_was_before_the_capture(device, checked):
    """A static cache's length is advanced by warm-ups and captures (transformers' static cache)."""
    batch = gk.Dim("batch", 8)
    lengths = [torch.full((1,), 5 + layer, device=device) for layer in range(3)]

    def fn(x):
        for length in lengths:
            length += 1
        return x + torch.cat(lengths).sum()

    group = gk.GraphGroup(device, checked=checked)
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.int64, pad=0))
    policy = gk.Policy.full(gk.Buckets.powers(batch))
    runner = group.runner("r", fn, policy=policy, mutates=lengths)
    group.capture()
    assert [int(length) for length in lengths] == [5, 6, 7]
    for run in range(1, 4):
        out = runner.run(runner.dispatch(batch=3), x=[0, 1, 2])
        assert [int(length) for length in lengths] == [5 + run, 6 + run, 7 + run]
        assert out.tolist() == [18 + 3 * run + row for row in range(3)]


def test_p7_undeclared_state_is_reported(device):
    """A length that nobody declared is named, with the line that advances it (CASES P7)."""
    batch = gk.Dim("batch", 4)
    length = torch.zeros(1, dtype=torch.int64, device=device)

    def fn(x):
        length.add_(1)
        return x + 1

    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((batch,), torch.int64, pad=0))
    group.runner("r", fn, policy=gk.Policy.full(gk.Buckets.powers(batch)))
    with pytest.warns(
        gk.CaptureWarning, match=r"r'.*add_.* writes a tensor of shape \(1,\).*mutates="
    ) as seen:
        report = group.capture()
    assert len(seen) == 1  # once for each place, whatever the number of buckets
    assert "length.add_(1)" in str(seen[0].message)
    assert "length.add_(1)" in str(report)
