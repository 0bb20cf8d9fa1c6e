from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.staging.hostdata import encode, exact_array, has_numpy, numpy_dtype, tensor_to_numpy

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def as_torch(array, dtype):
    bits = torch.from_numpy(np.ascontiguousarray(array))
    return bits if bits.dtype is dtype else bits.view(dtype)


@given(dtype=st.sampled_from(INTEGERS), values=st.lists(st.integers(-(2**40), 2**40), max_size=6))
def test_integers_are_held_exactly_or_refused(dtype, values):
    info = torch.iinfo(dtype)
    if all(info.min <= value <= info.max for value in values):
        found = exact_array(values, dtype, "it")
        assert found.dtype == numpy_dtype(dtype)
        assert found.tolist() == values
    else:
        with pytest.raises(gk.InputError, match=f"out of the range of {dtype}"):
            exact_array(values, dtype, "it")


@given(dtype=st.sampled_from(FLOATS), value=st.integers(-(2**60), 2**60))
def test_integers_in_floats_are_held_exactly_or_refused(dtype, value):
    held = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    if torch.isfinite(held) and int(held.to(torch.float64).item()) == value:
        assert as_torch(exact_array([value], dtype, "it"), dtype).item() == value
    else:
        with pytest.raises(gk.InputError, match="doesn't hold exactly"):
            exact_array([value], dtype, "it")


@given(dtype=st.sampled_from(FLOATS), value=st.floats(-6e4, 6e4))
def test_python_floats_round_as_torch_rounds(dtype, value):
    found = as_torch(exact_array([value, 0.5], dtype, "it"), dtype)
    assert torch.equal(found, torch.tensor([value, 0.5], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        ([[1], [1, 2]], torch.int32, "it: can't make an array of it ("),
        (["a"], torch.int32, "it: got ['a'], expected numbers that torch.int32 holds"),
        (object, torch.int32, "expected numbers that torch.int32 holds"),
        (
            [True],
            torch.int32,
            "it: got [True], expected torch.int32; bools and numbers aren't mixed",
        ),
        ([1, 0], torch.bool, "it: got [1, 0], expected torch.bool; bools and numbers aren't mixed"),
        ([1.0], torch.int64, "it: got [1.0], expected integers for torch.int64"),
        ([1j], torch.float32, "expected real numbers for torch.float32"),
        (2**70, torch.int64, "expected numbers that torch.int64 holds"),
        (np.int64(300), torch.uint8, "out of the range of torch.uint8"),
        (np.float64(0.1), torch.float32, "which torch.float32 doesn't hold exactly"),
        (np.float64(0.1), torch.bfloat16, "which torch.bfloat16 doesn't hold exactly"),
        (np.complex128(0.1), torch.complex64, "which torch.complex64 doesn't hold exactly"),
        (2**24 + 1, torch.float32, "which torch.float32 doesn't hold exactly"),
    ],
)
def test_what_is_refused(value, dtype, message):
    with pytest.raises(gk.InputError, match=re.escape(message)):
        exact_array(value, dtype, "it")


def test_long_values_are_shown_in_short():
    with pytest.raises(gk.InputError, match=r"it: got \[0\.5, .{40,60}\.\.\., expected integers"):
        exact_array([0.5] * 100, torch.int32, "it")


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (True, torch.bool, True),
        (np.float64(0.5), torch.float16, 0.5),
        (np.float32(0.1), torch.float64, float(np.float32(0.1))),
        (np.complex128(1 + 2j), torch.complex64, 1 + 2j),
        (np.int64(3), torch.complex64, 3),
        (3, torch.complex128, 3),
        (2.5j, torch.complex64, 2.5j),
        (np.int8(3), torch.float32, 3.0),
        ([], torch.float32, []),
        ([[], []], torch.int64, [[], []]),
    ],
)
def test_what_is_taken(value, dtype, expected):
    found = exact_array(value, dtype, "it")
    assert found.dtype == numpy_dtype(dtype)
    assert found.tolist() == expected


def test_types_without_a_counterpart_travel_as_bits():
    assert not has_numpy(torch.bfloat16)
    assert numpy_dtype(torch.bfloat16) == np.uint16
    assert numpy_dtype(torch.float8_e4m3fn) == np.uint8
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert tensor_to_numpy(tensor).dtype == np.uint16
    assert as_torch(tensor_to_numpy(tensor), torch.bfloat16).tolist() == [1.5, -2.0]
    assert encode(1.5, torch.bfloat16) == tensor_to_numpy(tensor)[0]
    assert encode(7, torch.int16) == 7


def test_tensors_share_their_memory_where_they_can():
    tensor = torch.zeros(3, requires_grad=True)
    tensor_to_numpy(tensor)[0] = 4
    assert tensor[0].item() == 4


def test_conjugated_and_negated_views_are_resolved():
    tensor = torch.tensor([1 + 2j])
    assert tensor_to_numpy(tensor.conj()).tolist() == [1 - 2j]
    assert tensor_to_numpy(tensor.conj().imag).tolist() == [-2.0]


def test_a_list_of_narrow_floats_is_taken_without_a_warning() -> None:
    value = [np.float32(1.5), np.float32(-2)]
    assert exact_array(value, torch.float32, "x").tolist() == [1.5, -2.0]
    largest = [np.float32(np.finfo(np.float32).max)]
    assert exact_array(largest, torch.float32, "x").tolist() == [float(largest[0])]


def test_large_unsigned_integers_keep_their_values() -> None:
    for value in ([0, 2**63], (1, 2**64 - 1), [[5], [2**63 + 1]]):
        taken = exact_array(value, torch.uint64, "x")
        assert taken.dtype == np.uint64
        assert taken.tolist() == [list(row) if isinstance(row, list) else row for row in value]
    for value in ([0, 2**64], [-1, 2**63], [0.5, 2**63]):
        with pytest.raises(gk.InputError):
            exact_array(value, torch.uint64, "x")
