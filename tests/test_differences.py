"""Whether two tensors hold the same: judged as `torch.testing` judges, and said where they don't."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkit.checking.differences import (
    Difference,
    Tolerance,
    bit_difference,
    difference,
    largest_difference,
)

SPECIAL = [0.0, -0.0, 1.0, 1.0 + 1e-6, 1.0 + 1e-3, -1.0, 1e30, math.inf, -math.inf, math.nan]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
numbers = st.sampled_from(SPECIAL) | st.floats(-2, 2, width=32)


@settings(deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers), max_size=6),
    st.sampled_from(FLOATS),
    st.none() | st.sampled_from([0.0, 1e-3, 0.1]),
)
def test_closeness_is_that_of_torch_testing(pairs, dtype, tolerance):
    left = torch.tensor([a for a, _ in pairs], dtype=torch.float64).to(dtype)
    right = torch.tensor([b for _, b in pairs], dtype=torch.float64).to(dtype)
    found = difference(left, right, Tolerance(rtol=tolerance, atol=tolerance))
    try:
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        expected = True
    except AssertionError:
        expected = False
    assert (found is None) is expected


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=6), st.sampled_from(FLOATS))
def test_bits_are_compared_but_for_those_of_nan(pairs, dtype):
    left = torch.tensor([a for a, _ in pairs], dtype=torch.float64).to(dtype)
    right = torch.tensor([b for _, b in pairs], dtype=torch.float64).to(dtype)
    rows = [
        index
        for index, (a, b) in enumerate(zip(left.tolist(), right.tolist(), strict=True))
        if not (math.isnan(a) and math.isnan(b))
        and (a != b or math.copysign(1, a) != math.copysign(1, b))
    ]
    found = bit_difference(left, right)
    assert (found.rows if found is not None else ()) == tuple(rows)
    assert found is None or found.elements == len(rows)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.complex64, torch.float8_e4m3fn],
)
def test_every_dtype(dtype):
    left = torch.ones(3, 2).to(dtype)
    right = left.clone()
    assert bit_difference(left, right) is None
    assert difference(left, right, Tolerance()) is None
    right[1, 1] = 0
    for found in (bit_difference(left, right), difference(left, right, Tolerance())):
        assert found == Difference(rows=(1,), elements=1, largest=1.0)
        assert str(found) == "in row 1 by up to 1"


def test_where_and_how_far():
    left, right = torch.zeros(20), torch.zeros(20)
    right[3:13] = 2.0
    right[5] = math.inf
    found = difference(left, right, Tolerance())
    assert found is not None
    assert str(found) == "in rows 3, 4, 5, 6, 7, 8 and 4 more by up to inf"
    assert largest_difference(left[:5], right[:5]) == 2.0
    assert str(bit_difference(torch.tensor(1.0), torch.tensor(3.0))) == "by up to 2"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_is_equal_to_nothing(shape):
    empty = torch.zeros(shape)
    assert bit_difference(empty, empty) is None
    assert difference(empty, empty, Tolerance()) is None
    assert largest_difference(empty, empty) == 0.0


def test_strides_and_conjugates_are_resolved():
    x = torch.arange(6.0).view(2, 3)
    assert bit_difference(x.t(), x.t().contiguous()) is None
    assert bit_difference(x[:1, ::3], x[:1, :1].clone()) is None
    z = torch.tensor([1 + 2j])
    assert bit_difference(z.conj(), torch.tensor([1 - 2j])) is None


def test_integers_are_compared_exactly_beyond_what_a_float_holds() -> None:
    left = torch.tensor([2**60, 2**53 + 1, 5])
    right = torch.tensor([2**60 + 1, 2**53, 5])
    found = difference(left, right, Tolerance())
    assert found is not None
    assert found.rows == (0, 1)
    assert difference(left, left.clone(), Tolerance()) is None


LARGEST = torch.iinfo(torch.int64).max
LEAST = torch.iinfo(torch.int64).min


@pytest.mark.parametrize(
    ("dtype", "left", "right", "distance"),
    [
        (torch.int64, 2**53, 2**53 + 1, 1),
        (torch.int64, LARGEST, LARGEST - 1, 1),
        (torch.int64, LEAST, LEAST + 3, 3),
        (torch.int64, LEAST, LARGEST, 2**64 - 1),
        (torch.int64, -2, 3, 5),
        (torch.uint64, 2**64 - 1, 2**64 - 2, 1),
        (torch.uint64, 2**63, 2**63 - 1, 1),
        (torch.uint64, 0, 2**64 - 1, 2**64 - 1),
        (torch.uint32, 2**32 - 1, 0, 2**32 - 1),
        (torch.int8, -128, 127, 255),
    ],
)
def test_integers_differ_by_what_they_differ_by(dtype, left, right, distance):
    """Beyond 2**53 two of them may be one float."""
    # torch takes no uint64 from a list of them everywhere.
    one, other = (
        torch.from_numpy(np.array([x, 1], str(dtype).removeprefix("torch."))) for x in (left, right)
    )
    for a, b in ((one, other), (other, one)):
        expected = Difference(rows=(0,), elements=1, largest=float(distance))
        assert bit_difference(a, b) == expected
        assert difference(a, b, Tolerance()) == expected
        assert largest_difference(a, b) == float(distance)
        below = Tolerance(
            rtol=0, atol=math.nextafter(distance, 0) if distance > 2**53 else distance - 1
        )
        assert difference(a, b, below) == expected
        assert difference(a, b, Tolerance(rtol=0, atol=distance)) is None
        assert difference(a, b, Tolerance(rtol=math.inf, atol=math.inf)) is None


@settings(max_examples=200, deadline=None)
@given(
    left=st.integers(LEAST, LARGEST),
    by=st.integers(-(2**54), 2**54),
    atol=st.sampled_from([0, 1, 2**52, 2**53 + 2, 2**60, 2**63, 2.0**70]),
)
def test_integers_are_close_where_python_says_so(left, by, atol):
    right = min(max(left + by, LEAST), LARGEST)
    found = difference(torch.tensor([left]), torch.tensor([right]), Tolerance(rtol=0, atol=atol))
    assert (found is None) is (abs(left - right) <= atol)
    if found is not None:
        assert found.largest == float(abs(left - right))
