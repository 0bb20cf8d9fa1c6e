from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkit.dims import (
    RESERVED,
    Affine,
    Dim,
    affine,
    as_size,
    at_most,
    check_name,
    dims_by_name,
    interleaved,
)
from graphkit.errors import BucketError, GraphkitError, InputError, SpecError
from graphkit.testing import strategies

reqs, tokens = Dim("reqs", 8), Dim("tokens", 32)


@given(dim=strategies.dims(), factor=st.integers(1, 9), offset=st.integers(0, 9), data=st.data())
def test_arithmetic_means_what_it_says(dim, factor, offset, data):
    size = data.draw(st.integers(0, dim.maximum))
    expected = factor * size + offset
    for made in (factor * dim + offset, dim * factor + offset, offset + dim * factor):
        assert made.size({dim.name: size}) == expected
        assert made.maximum == factor * dim.maximum + offset
    assert (dim + offset) * factor == dim * factor + offset * factor


@given(expression=strategies.affines())
def test_one_expression_is_one_value(expression):
    again = expression * 1 + 0
    assert again == expression
    assert hash(again) == hash(expression)
    assert affine(expression).maximum == expression.maximum


def test_adding_and_taking_away_gives_the_dim_back():
    assert (reqs + 1) - 1 is reqs
    assert reqs * 1 is reqs


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (reqs, "reqs"),
        (reqs + 1, "reqs + 1"),
        (reqs * 4, "4 * reqs"),
        (2 * reqs + 1, "2 * reqs + 1"),
        (interleaved(reqs, 2), "interleaved(2 * reqs)"),
        (at_most(tokens), "at_most(tokens)"),
    ],
)
def test_text(expression, text):
    assert str(expression) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reqs * tokens, "reqs * tokens multiplies two dims; use one axis for each"),
        (lambda: (reqs + 1) * tokens, "(reqs + 1) * tokens multiplies two dims"),
        (lambda: reqs + tokens, "reqs + tokens adds two dims; an axis has one dim"),
        (lambda: reqs + reqs, "reqs + reqs adds a dim twice; write a factor, as 2 * reqs"),
        (lambda: reqs - tokens, "reqs - tokens subtracts a dim"),
        (lambda: 9 - reqs, "9 - reqs shrinks as reqs grows"),
        (lambda: reqs - 1, "offset of -1 makes the axis negative at size 0"),
        (lambda: reqs * 0, "the factor of a dim must be at least 1, got 0"),
        (lambda: reqs * -2, "the factor of a dim must be at least 1, got -2"),
        (lambda: reqs * 2.0, "reqs * 2.0 (float): only ints go with a dim"),
        (lambda: reqs + True, "reqs + True (bool): only ints go with a dim"),
        (lambda: reqs // 2, "reqs // 2 is not affine"),
        (lambda: (reqs + 1) / 2, "(reqs + 1) // 2 is not affine"),
        (lambda: Affine("reqs"), "an affine expression is of a Dim, got 'reqs' (str)"),
        (lambda: affine(3), "expected a Dim or an expression of one, got 3 (int)"),
        (lambda: at_most(3), "expected a Dim or an expression of one, got 3 (int)"),
        (lambda: Dim("reqs", 0), "the maximum of a dim must be at least 1, got 0"),
        (lambda: Dim("reqs", True), "the maximum of a dim must be an int, got True (bool)"),
        (lambda: Dim("reqs", 8.0), "the maximum of a dim must be an int, got 8.0 (float)"),
        (lambda: Dim("reqs", "8"), "the maximum of a dim must be an int, got '8' (str)"),
        (lambda: Dim(3, 8), "a dim's name must be a str, got 3 (int)"),
        (lambda: Dim("a b", 8), "dim name 'a b' can't be used as a keyword argument"),
        (lambda: Dim("if", 8), "dim name 'if' can't be used as a keyword argument"),
        (lambda: Dim("", 8), "dim name '' can't be used as a keyword argument"),
        (lambda: Dim("_reqs", 8), "dim name '_reqs' starts with an underscore"),
        (lambda: Dim("ﬁt", 8), "dim name 'ﬁt' is written 'fit' in Python source"),
        (
            lambda: dims_by_name([reqs, Dim("reqs", 9)]),
            "dim 'reqs' is declared with maximum 8 and with maximum 9",
        ),
    ],
)
def test_refused_with_a_message(make, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_of_options_are_reserved(name):
    with pytest.raises(SpecError, match=f"buffer name '{name}' is reserved for an option"):
        check_name("buffer", name)
    with pytest.raises(SpecError, match=f"dim name '{name}' is reserved"):
        Dim(name, 4)


def test_numpy_maximum_is_an_int():
    dim = Dim("reqs", np.int64(8))
    assert type(dim.maximum) is int
    assert dim == reqs


def test_dims_are_frozen_and_equal_by_value():
    assert Dim("reqs", 8) == reqs
    assert Dim("reqs", 9) != reqs
    with pytest.raises(AttributeError):
        reqs.maximum = 9  # type: ignore[misc]


def test_interleaved_is_kept_by_arithmetic_and_said_in_two_ways():
    assert interleaved(reqs, 2) == interleaved(reqs * 2)
    assert interleaved(reqs, 2) != reqs * 2
    assert affine(interleaved(reqs, 2) + 1).interleaved
    assert affine(interleaved(reqs, 2)).factor == 2
    assert not affine(reqs * 2).interleaved


def test_at_most_is_the_least_of_both():
    bound = at_most(tokens)
    assert bound.size({"tokens": 16}, 256) == 16
    assert bound.size({"tokens": 500}, 256) == 256
    assert at_most(2 * tokens).size({"tokens": 16}, 256) == 32


def test_dims_by_name_takes_expressions():
    assert dims_by_name([reqs + 1, tokens, reqs]) == {"reqs": reqs, "tokens": tokens}


@pytest.mark.parametrize("value", [3, np.int32(3), np.uint8(3)])
def test_sizes_are_plain_ints(value):
    size = as_size(value, "a size")
    assert size == 3
    assert type(size) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "a size must be an int, got True (bool)"),
        (np.bool_(True), "a size must be an int, got"),
        (3.0, "a size must be an int, got 3.0 (float)"),
        ("3", "a size must be an int, got '3' (str)"),
        (None, "a size must be an int, got None (NoneType)"),
        (-1, "a size must be at least 0, got -1"),
    ],
)
@pytest.mark.parametrize("error", [InputError, BucketError])
def test_what_is_no_size(value, message, error):
    with pytest.raises(error, match=re.escape(message)):
        as_size(value, "a size", error=error)


@given(value=strategies.hostile)
def test_hostile_values_are_sizes_or_errors(value: Any):
    try:
        size = as_size(value, "a size")
    except GraphkitError:
        return
    assert type(size) is int
    assert size == value
    assert not isinstance(value, (bool, float))
