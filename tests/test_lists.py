"""Lists as inputs: integers, and rows of different lengths."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.staging.hostdata import exact_array, numpy_dtype
from graphkit.staging.lists import is_ragged, packed_integers, ragged_rows

REQS, PAGES = gk.Dim("reqs", 6), gk.Dim("pages", 5)
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
            torch.uint64]  # fmt: skip


def bounds(dtype: torch.dtype) -> tuple[int, int]:
    info = np.iinfo(numpy_dtype(dtype))
    return int(info.min), int(info.max)


@given(st.data())
def test_packed_lists_are_what_numpy_makes_of_them(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(INTEGERS))
    low, high = bounds(dtype)
    shape = data.draw(st.sampled_from([(1,), (4,), (1, 1), (3, 2), (2, 5)]))
    count = int(np.prod(shape))
    flat = data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
    value = np.array(flat, numpy_dtype(dtype)).reshape(shape).tolist()
    packed = packed_integers(value, dtype, shape)
    assert packed is not None
    assert packed.dtype == numpy_dtype(dtype)
    assert packed.tolist() == value == exact_array(value, dtype, "x").tolist()


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ([1.0, 2.0], (2,)),
        ([1, 2.5], (2,)),
        ([True, False], (2,)),
        ([1, None], (2,)),
        ([1, 2, 3], (2,)),
        ([1], (2,)),
        ([1, 2**40], (2,)),
        ([[1, 2], [3]], (2, 2)),
        ([[1, 2], (3, 4)], (2, 2)),
        ([[], []], (2, 0)),
        ([[1], [2.0]], (2, 1)),
        ([np.int64(1), np.int64(2)], (2,)),
        (["a", "b"], (2,)),
    ],
)
def test_anything_else_is_left_to_the_slow_way(value: Any, shape: tuple[int, ...]) -> None:
    assert packed_integers(value, torch.int32, shape) is None


def test_no_float_buffer_takes_the_fast_way() -> None:
    assert packed_integers([1, 2], torch.float32, (2,)) is None


# -- rows of different lengths ---------------------------------------------------------------------


def runner_of(device: str, pad: Any) -> tuple[gk.GraphGroup, gk.GraphRunner, gk.Buffer]:
    group = gk.GraphGroup(device)
    buffer = group.buffers.declare(
        table=gk.BufferSpec((REQS, PAGES), torch.int32, pad=pad),
    ).table
    runner = group.runner(
        "r",
        lambda table: table * 1,
        policy=gk.Policy.full(gk.Buckets.grid({REQS: (2, 6), PAGES: (2, 5)})),
        outputs=gk.Output((REQS, PAGES), torch.int32),
    )
    group.capture(progress=False)
    return group, runner, buffer


ROWS = {
    "lists": lambda row: list(row),
    "tuples": lambda row: tuple(row),
    "arrays": lambda row: np.array(row, np.int32),
    "tensors": lambda row: torch.tensor(row, dtype=torch.int32),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("pages", [9, gk.keep, gk.by_producer(8)], ids=str)
def test_a_ragged_block_table_is_filled_up(device: str, kind: str, pages: Any) -> None:
    group, runner, buffer = runner_of(device, {REQS: 7, PAGES: pages})
    rows = [[1, 2, 3], [], [4], [5, 6]]
    fill = {"9": 9, "keep": 7, "by_producer(8)": 8}[str(pages)]
    out = runner.run(runner.dispatch(reqs=4, pages=3), table=[ROWS[kind](row) for row in rows])
    assert out.tolist() == [row + [fill] * (3 - len(row)) for row in rows]
    whole = buffer.tensor
    assert whole[4:6, :3].tolist() == [[7] * 3] * 2
    if fill == 9:
        assert whole[:4, 3:].tolist() == [[9, 9]] * 4
    group.close()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1], [2, 3], [4, 5, 6, 7]], r"row 2 has 4 elements, expected at most 3"),
        ([[1], [2, 3]], r"got 2 rows of different lengths, expected 3"),
        ([[1], [2.5], [3, 4]], r"row 1: got \[2.5\], expected integers"),
        ([[1], [2**40], [3, 4]], r"row 1: got \[1099511627776\], out of the range"),
        ([[1], [True], [3, 4]], r"row 1: got \[True\].*bools and numbers aren't mixed"),
        ([[1], [[2]], [3, 4]], r"row 1: got shape \(1, 1\), expected numbers"),
        ([[1], np.array([2]), [3, 4]], r"row 1: got int64, expected torch.int32; it is never cast"),
        ([[1], torch.tensor([2]), [3]], r"row 1: got torch.int64, expected torch.int32"),
        ([[1], 2, [3, 4]], r"is it ragged\?"),
    ],
)
def test_a_wrong_row_is_named_and_nothing_is_staged(value: Any, message: str) -> None:
    group, runner, buffer = runner_of("cpu", {REQS: 7, PAGES: gk.keep})
    before = buffer.tensor.clone()
    with pytest.raises(gk.InputError, match=message):
        runner.run(runner.dispatch(reqs=3, pages=3), table=value)
    assert buffer.tensor.equal(before)
    group.close()


def test_rows_that_the_pad_continues_must_be_whole() -> None:
    group, runner, _ = runner_of("cpu", {REQS: 7, PAGES: gk.repeat_last})
    with pytest.raises(gk.InputError, match="repeat_last pads them: give whole rows"):
        runner.run(runner.dispatch(reqs=2, pages=3), table=[[1], [2, 3]])
    group.close()


def test_a_fixed_axis_takes_whole_rows_only() -> None:
    assert is_ragged([[1], [2, 3]], (2, 2))
    assert not is_ragged([[1, 2], [2, 3]], (2, 2))
    assert not is_ragged([1, 2], (2, 2))
    assert not is_ragged(array("i", [1]), (2, 2))
    made = ragged_rows([[1], []], torch.int8, (2, 2), 0, "x")
    assert made.tolist() == [[1, 0], [0, 0]]
    assert made.dtype == np.int8
