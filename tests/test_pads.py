from __future__ import annotations

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.pads import (
    Pad,
    as_fed,
    as_pad,
    fill_device,
    host_fills,
    steps_of,
    tensor_fills,
    written_mask,
)


@pytest.mark.parametrize(
    ("pad", "text", "constant", "written"),
    [
        (as_pad(3), "3", True, True),
        (gk.relied(0.5), "relied(0.5)", True, True),
        (gk.repeat_last, "repeat_last", False, True),
        (gk.continue_(2), "continue_(2)", False, True),
        (gk.keep, "keep", False, False),
        (gk.by_producer(-1), "by_producer(-1)", True, False),
    ],
)
def test_what_a_pad_is(pad, text, constant, written):
    assert (str(pad), pad.is_constant, pad.is_written) == (text, constant, written)
    assert as_pad(pad) is pad


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: as_pad(None), "a pad must be"),
        (lambda: gk.relied("0"), "a relied pad must be"),
        (lambda: gk.continue_(1j), "the step of continue_ must be"),
        (lambda: gk.by_producer([1]), "a by_producer pad must be"),
    ],
)
def test_a_pad_is_a_number(make, what):
    with pytest.raises(gk.SpecError, match=f"{what} a bool, an int or a float, got .* of type"):
        make()


def test_numpy_scalars_are_numbers():
    assert as_pad(np.int32(4)) == Pad("value", 4)
    assert type(as_pad(np.float32(0.5)).value) is float


def test_what_staging_writes_it_also_pads():
    pads = (gk.by_producer(3), None, gk.keep)
    assert as_fed(pads) == (Pad("value", 3), None, gk.keep)


def padded(rows, real, pads, dtype=torch.int64):
    """The three ways to pad, which must agree."""
    array = np.array(rows)
    for fill in host_fills(array, real, pads, lambda value: value):
        fill.run()
    tensor = torch.tensor(rows, dtype=dtype)
    for fill in tensor_fills(tensor, real, pads, steps_of(tensor, pads)):
        fill.run()
    view = torch.tensor(rows, dtype=dtype)
    fill_device(view, [torch.tensor(size) for size in real], pads)
    assert array.tolist() == tensor.tolist() == view.tolist()
    return array.tolist()


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (as_pad(9), [4, 6, 9, 9]),
        (gk.repeat_last, [4, 6, 6, 6]),
        (gk.continue_(2), [4, 6, 8, 10]),
        (gk.keep, [4, 6, 7, 8]),
        (gk.by_producer(9), [4, 6, 7, 8]),
    ],
)
def test_rows_beyond_the_batch(pad, expected):
    assert padded([4, 6, 7, 8], (2,), (pad,)) == expected
    assert padded([4, 6, 7, 8], (4,), (pad,)) == [4, 6, 7, 8]


@pytest.mark.parametrize(
    ("pad", "expected"),
    [(as_pad(9), [9, 9, 9]), (gk.repeat_last, [0, 0, 0]), (gk.continue_(2), [0, 2, 4])],
)
def test_an_empty_batch_has_no_last_row(pad, expected):
    assert padded([4, 6, 7], (0,), (pad,)) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "corner"),
    [
        (as_pad(8), as_pad(9), 8),
        (as_pad(8), gk.keep, 8),
        (gk.keep, as_pad(9), 3),
        (gk.repeat_last, as_pad(9), 9),
        (gk.continue_(1), as_pad(9), 10),
    ],
)
def test_in_the_corner_the_first_axis_wins(rows, columns, corner):
    found = padded([[0, 1], [2, 3]], (1, 1), (rows, columns))
    assert found[0][0] == 0
    assert found[1][1] == corner


def test_a_mask_of_what_is_moved_leaves_out_what_is_kept():
    real = [torch.tensor(1), torch.tensor(1)]
    mask = written_mask((2, 2), real, (as_pad(0), gk.keep), torch.device("cpu"))
    assert mask.expand(2, 2).tolist() == [[True, False], [True, True]]
    mask = written_mask((2, 2), real, (gk.keep, as_pad(0)), torch.device("cpu"))
    assert mask.expand(2, 2).tolist() == [[True, True], [False, False]]
    mask = written_mask((2,), real[:1], (None,), torch.device("cpu"))
    assert mask.tolist() is True


def test_steps_are_not_rounded_to_the_default_dtype():
    view = torch.zeros(40, dtype=torch.float64)
    fill_device(view, [torch.tensor(1)], (gk.continue_(0.1),))
    assert view[-1].item() == 39 * 0.1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2])
def test_types_that_torch_cannot_fill_are_padded_as_bits(dtype):
    view = torch.tensor([1, 2, 3], dtype=torch.float64).to(dtype)
    fill_device(view, [torch.tensor(1)], (as_pad(4),))
    assert view.to(torch.float64).tolist() == [1, 4, 4]
    fill_device(view, [torch.tensor(1)], (gk.repeat_last,))
    assert view.to(torch.float64).tolist() == [1, 1, 1]
