"""Cases about host staging: H1, H2, H3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 8)
PAGES = gk.Dim("pages", 6)


def runner_of(
    device: str, spec: gk.BufferSpec, fn: Any = None, **options: Any
) -> tuple[gk.GraphRunner, gk.Buffer]:
    """A captured runner of one input `x`, whose output is `x + x` by default."""
    group = gk.GraphGroup(device)
    buf = group.buffers.declare(x=spec)
    sizes = {BATCH: (2, 8), PAGES: (3, 6)}
    used = {dim: sizes[dim] for dim in spec.dims}
    runner = group.runner(
        "r",
        fn or (lambda x: x + x),
        policy=gk.Policy.full(gk.Buckets.grid(used)),
        outputs=None if fn else gk.Output(spec.shape, spec.dtype),
        **options,
    )
    group.capture()
    return runner, buf.x


# -- H1: reuse of pinned memory --------------------------------------------------------------------


@pytest.mark.parametrize("direct", [False, True], ids=["packed", "on its own"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
def test_h1_a_step_sees_its_own_values_though_later_ones_are_staged(
    device, depth, direct, monkeypatch
):
    """Step t's copy is delayed while step t+1 overwrites its source (vllm#54269)."""
    if direct:
        monkeypatch.setattr("graphkit.staging.staging.PACKED_LIMIT", 0)
    spec = gk.BufferSpec((BATCH,), torch.int64, pad=-1)
    runner, _ = runner_of(device, spec, ring_depth=depth)
    steps = 2 * depth + 3
    outs = []
    for step in range(steps):
        if device == "cuda" and step % 2 == 0:
            torch.cuda._sleep(20_000_000)  # about 10 ms, much longer than a step on the host
        x = np.full(3, step)
        outs.append(runner.run(runner.dispatch(batch=3), x=x, clone=True))
        x.fill(1000)  # the caller's array is the caller's again
    assert [out.tolist() for out in outs] == [[2 * step] * 3 for step in range(steps)]


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_h1_staging_in_place_waits_for_the_copy_too(device, depth):
    """The arrays that stage() gives are the ring's, and may still be read by a copy (vllm#54269)."""
    spec = gk.BufferSpec((BATCH,), torch.int64, pad=-1)
    runner, _ = runner_of(device, spec, ring_depth=depth)
    outs = []
    for step in range(2 * depth + 3):
        if device == "cuda" and step % 2 == 0:
            torch.cuda._sleep(20_000_000)
        dispatch = runner.dispatch(batch=3)
        with runner.stage(dispatch) as stage:
            stage.host["x"][:] = step
        outs.append(runner.run(dispatch, clone=True))
    assert [out.tolist() for out in outs] == [[2 * step] * 3 for step in range(2 * depth + 3)]


@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("pad", [40, gk.repeat_last, gk.continue_(3), gk.keep], ids=str)
def test_h1_what_is_staged_in_place_is_padded(device, side, pad):
    """However a batch comes, the rows beyond it hold the pad (rule 3)."""
    runner, x = runner_of(device, gk.BufferSpec((BATCH,), torch.int64, pad=pad))
    for rows in (8, 3, 5, 1):
        dispatch = runner.dispatch(batch=rows)
        before = x.tensor.tolist()
        with runner.stage(dispatch) as stage:
            if side == "host":
                stage.host["x"][:] = np.arange(10, 10 + rows)
            else:
                stage.views["x"].copy_(torch.arange(10, 10 + rows))
        out = runner.run(dispatch)
        assert out.tolist() == [2 * value for value in range(10, 10 + rows)]
        found = x.view(dispatch.bucket.sizes).tolist()
        last = 9 + rows
        tail = {
            "40": [40] * 8,
            "repeat_last": [last] * 8,
            "continue_(3)": [last + 3 * (i - rows + 1) for i in range(8)],
            "keep": before,
        }[str(pad)]
        assert found == [*range(10, 10 + rows), *tail[rows : len(found)]]


def test_h1_staged_in_place_and_given_are_one_batch(device):
    """stage() for some inputs, run() for others; and on one side only."""
    group = gk.GraphGroup(device)
    spec = gk.BufferSpec((BATCH,), torch.int64, pad=0)
    group.buffers.declare(a=spec, b=spec, c=spec)
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 8))
    runner = group.runner("r", lambda a, b, c: a + 10 * b + 100 * c, policy=policy)
    group.capture()
    dispatch = runner.dispatch(batch=3)
    for step in range(3):
        with runner.stage(dispatch) as stage:
            stage.host["a"][:] = [1, 2, 3 + step]
            stage.views["b"].fill_(4)
        assert runner.run(dispatch, c=[7, 8, 9]).tolist() == [741, 842, 943 + step]

    def on_both_sides() -> None:
        with runner.stage(dispatch) as stage:
            stage.host["a"][:] = 1
            stage.views["a"].fill_(1)

    with pytest.raises(gk.InputError, match="a was staged on the host and on the device; use one"):
        on_both_sides()
    # Neither that block nor this one has staged anything.
    with pytest.raises(ZeroDivisionError), runner.stage(dispatch) as stage:
        stage.host["a"][:] = 1 // 0
    with pytest.raises(gk.InputError, match="input 'a' is missing"):
        runner.run(dispatch, b=[1, 2, 3], c=[1, 2, 3])


# -- H2: dtypes ------------------------------------------------------------------------------------

DTYPES = [torch.int32, torch.int64, torch.float32, torch.float16, torch.bool, torch.bfloat16]


@pytest.mark.parametrize("how", ["numpy", "cpu tensor", "device tensor"])
@pytest.mark.parametrize("declared", DTYPES, ids=str)
def test_h2_another_dtype_is_refused_and_never_cast(device, declared, how):
    """int64 given where int32 is declared (vllm#17211); and every other pair."""
    spec = gk.BufferSpec((BATCH,), declared, pad=0)
    runner, x = runner_of(device, spec, fn=lambda x: x.clone())
    dispatch = runner.dispatch(batch=3)
    runner.run(dispatch, x=torch.ones(3, dtype=declared))
    before = x.tensor.tolist()
    for given in DTYPES:
        if given is declared or (given is torch.bfloat16 and how == "numpy"):
            continue
        value: Any = torch.zeros(3, dtype=given)
        value = {"numpy": lambda v: v.numpy(), "cpu tensor": lambda v: v}.get(
            how, lambda v: v.to(device)
        )(value)
        message = (
            rf"runner 'r', input 'x': got {value.dtype}, expected {declared}; it is never cast"
        )
        with pytest.raises(gk.InputError, match=message):
            runner.run(dispatch, x=value)
        assert x.tensor.tolist() == before


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.uint8, torch.float64, torch.int8, torch.int16], ids=str
)
@pytest.mark.parametrize("how", ["numpy", "cpu tensor", "device tensor"])
def test_h2_the_declared_dtype_arrives_bit_for_bit(device, dtype, how):
    """Whatever way it comes, staging moves bits."""
    spec = gk.BufferSpec((BATCH, 3), dtype, pad=0)
    runner, _ = runner_of(device, spec, fn=lambda x: x.clone())
    value = (
        (torch.arange(15).reshape(5, 3) % 2 == 0).to(dtype)
        if dtype is torch.bool
        else (torch.arange(15).reshape(5, 3) * 1.5).to(dtype)
    )
    if how == "numpy" and dtype is torch.bfloat16:
        return  # NumPy has none
    given: Any = {"numpy": value.numpy if how == "numpy" else None}.get(how) or (
        lambda: value.to(device) if how == "device tensor" else value
    )
    out = runner.run(runner.dispatch(batch=5), x=given())
    assert out.dtype is dtype
    assert torch.equal(out.to("cpu"), value)


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        (torch.int32, [1, 2, 2**31], "out of the range of torch.int32"),
        (torch.int32, [1.0, 2.0, 3.0], "expected integers for torch.int32"),
        (torch.int64, [True, False, True], "bools and numbers aren't mixed"),
        (torch.bool, [1, 0, 1], "bools and numbers aren't mixed"),
        (torch.float32, [1, 2, 2**24 + 1], "which torch.float32 doesn't hold exactly"),
        (torch.bfloat16, [1, 2, 257], "which torch.bfloat16 doesn't hold exactly"),
        (torch.float32, ["1", "2", "3"], "expected numbers"),
        (torch.float32, [1j, 2, 3], "expected real numbers"),
        (torch.float32, [[1], [2, 3], 4], "is it ragged"),
    ],
)
def test_h2_lists_are_taken_where_they_are_exact(device, dtype, value, words):
    """A list has no dtype, so its values decide (vllm#17211)."""
    spec = gk.BufferSpec((BATCH,), dtype, pad=0)
    runner, x = runner_of(device, spec, fn=lambda x: x.clone())
    before = x.tensor.tolist()
    with pytest.raises(gk.InputError, match=rf"runner 'r', input 'x': .*{words}"):
        runner.run(runner.dispatch(batch=3), x=value)
    assert x.tensor.tolist() == before
    runner.run(runner.dispatch(batch=3), x=[True] * 3 if dtype is torch.bool else [1, 2, 3])


# -- H3: strides -----------------------------------------------------------------------------------


def strided(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in other memory layouts."""
    rows, columns = values.shape
    wide = torch.full((2 * rows, 2 * columns), -5, dtype=values.dtype)
    wide[::2, 1::2] = values
    reverse = torch.arange(rows - 1, -1, -1)
    return {
        "contiguous": values.contiguous(),
        "transposed": values.t().contiguous().t(),
        "every second": wide[::2, 1::2],
        "flipped": values[reverse][reverse],
        "expanded": values[:, :1].expand(rows, columns),
    }


SHAPES: dict[str, tuple[Any, Any]] = {
    "rows first": ((BATCH, 4), {"batch": 5}),
    "rows last": ((4, BATCH), {"batch": 5}),
    "two dims": ((BATCH, PAGES), {"batch": 5, "pages": 4}),
    "two dims, turned": ((PAGES, BATCH), {"batch": 5, "pages": 4}),
}


@pytest.mark.parametrize("layout", ["strided", "packed"])
@pytest.mark.parametrize("direct", [False, True], ids=["packed", "on its own"])
@pytest.mark.parametrize("how", ["numpy", "cpu tensor", "device tensor"])
@pytest.mark.parametrize("shape", SHAPES)
def test_h3_strided_inputs_and_any_row_dim(device, shape, how, direct, layout, monkeypatch):
    """Non-contiguous inputs, and buffers whose row dim isn't first (vllm#50445)."""
    if direct:
        monkeypatch.setattr("graphkit.staging.staging.PACKED_LIMIT", 0)
    extents, sizes = SHAPES[shape]
    spec = gk.BufferSpec(extents, torch.int64, pad=-9, layout=layout)
    runner, x = runner_of(device, spec)
    real = [extent if isinstance(extent, int) else sizes[extent.name] for extent in extents]
    dispatch = runner.dispatch(**sizes)
    assert dispatch.mode is gk.FULL
    for start in (0, 100):
        values = torch.arange(start, start + 20).reshape(real)
        for name, value in strided(values).items():
            given: Any = value.numpy() if how == "numpy" else value
            if how == "device tensor":
                # Strides have to survive the way to the device.
                given = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
                given.copy_(value) if name != "expanded" else given[:, :1].copy_(value[:, :1])
            out = runner.run(dispatch, x=given)
            assert out.tolist() == (2 * value).tolist(), name
            view = x.view(dispatch.bucket.sizes)
            inside = torch.zeros(view.shape, dtype=torch.bool)
            inside[: real[0], : real[1]] = True
            assert set(view.to("cpu")[~inside].tolist()) <= {-9}, name


def test_h3_an_adopted_tensor_must_be_contiguous(device):
    """What can't be supported is refused: memory whose rows aren't side by side (vllm#50445)."""
    memory = torch.zeros(4, 8, dtype=torch.int64, device=device)
    with pytest.raises(gk.SpecError, match="adopted memory must be contiguous"):
        gk.BufferSpec((BATCH, 4), torch.int64, pad=0, adopt=memory.t())
    runner, x = runner_of(device, gk.BufferSpec((4, BATCH), torch.int64, pad=0, adopt=memory))
    assert x.tensor is memory
    values = torch.arange(20).reshape(4, 5)
    assert runner.run(runner.dispatch(batch=5), x=values).tolist() == (2 * values).tolist()
    assert memory[:, :5].tolist() == values.tolist()
    assert not memory[:, 5:].any()
