"""Whether a value is still the one that a graph has baked."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphkit.capture.baked import same

NAN = float("nan")


def fresh_nan():
    """A NaN that is another object each time."""
    return float("inf") - float("inf")


class Color(enum.IntEnum):
    RED = 1


class Unequal:
    """Raises when it is compared."""

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "make",
    [
        lambda: 10**6,
        lambda: "".join(["a", "b"]),
        lambda: bytes([1, 2]),
        lambda: 0.1 + 0.2,
        lambda: complex(1, 2),
        lambda: complex(fresh_nan(), 1),
        lambda: None,
        lambda: torch.float32,
        lambda: fresh_nan(),
        lambda: np.float32("nan"),
        lambda: np.int64(3),
        lambda: np.datetime64("NaT"),
        lambda: np.array([1.0, NAN]),
        lambda: np.array([complex(NAN, 1)]),
        lambda: np.array(["a", "b"]),
        lambda: np.array([10**30, "a", fresh_nan()], dtype=object),
        lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: {1, 2},
        lambda: Decimal("1.5"),
        list,
        lambda: [1, {"a": (fresh_nan(), "b")}],
        lambda: Pair(1, [np.zeros(2)]),
        lambda: OrderedDict(a=1),
    ],
)
def test_a_value_made_twice_is_the_same(make):
    assert same(make(), make())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0, None),
        (1, Color.RED),
        (1, np.int64(1)),
        (1.0, np.float64(1)),
        (NAN, 1.0),
        (1.0, NAN),
        (complex(NAN, 1), complex(NAN, 2)),
        ("a", "b"),
        ("a", b"a"),
        (np.float32(1), np.float32(2)),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros(3)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        (np.zeros(2), np.ones(2)),
        (np.array([NAN, 1]), np.array([NAN, 2])),
        (np.array([complex(NAN, 1)]), np.array([complex(NAN, 2)])),
        (np.array([1], object), np.array([True], object)),
        (np.zeros(1), torch.zeros(1)),
        ([1, 2], [1, 3]),
        ([1, 2], [1, 2, 3]),
        ([1, 2], (1, 2)),
        ([1, (2,)], [1, [2]]),
        ([1], [True]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, OrderedDict(a=1)),
        ((1, 2), Pair(1, 2)),
        (Unequal(), Unequal()),
        ([Unequal()], [Unequal()]),
        (Decimal("sNaN"), Decimal("sNaN")),
        (object(), object()),
        (torch.float32, torch.float64),
    ],
)
def test_different_values(left, right):
    assert not same(left, right)
    assert not same(right, left)


def test_an_object_is_the_same_as_itself_though_it_can_t_be_compared():
    value = Unequal()
    assert same(value, value)
    assert same([value], [value])


def test_tensors_are_the_same_by_where_and_how_they_lie():
    tensor = torch.arange(6.0).view(2, 3)
    assert same(tensor, tensor.view(2, 3))
    assert same({"a": [tensor]}, {"a": [tensor.detach()]})
    for other in (
        tensor.clone(),
        tensor[:1],
        tensor.view(3, 2),
        tensor.view(3, 2).t(),
        tensor.view(torch.int32),
        torch.nn.Parameter(tensor),
    ):
        assert not same(tensor, other)
        assert not same([tensor], [other])


def test_a_tensor_that_changes_in_place_stays_the_same():
    tensor = torch.zeros(3)
    view = tensor[:]
    tensor.fill_(NAN)
    assert same(tensor, view)


def test_a_lazy_conjugate_or_negative_is_another_value_in_the_same_memory():
    tensor = torch.zeros(2, dtype=torch.complex64)
    assert tensor.conj().data_ptr() == tensor.data_ptr()
    assert not same(tensor, tensor.conj())
    assert same(tensor.conj(), tensor.conj())
    imag = tensor.conj().imag
    assert imag.is_neg()
    assert not same(imag, tensor.imag)


def test_a_tensor_without_an_address_is_itself_only():
    def sparse():
        return torch.eye(2).to_sparse()

    assert not same(sparse(), sparse())


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.sampled_from([0.0, 1.0, NAN]), st.text("ab")
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=6,
)


def spelled(tree):
    """Every value and type of a tree, in a form that compares by itself."""
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, tuple(map(spelled, tree))
    if isinstance(tree, dict):
        return "dict", tuple((key, spelled(value)) for key, value in tree.items())
    return type(tree).__name__, repr(tree)


@given(TREES, TREES)
def test_trees_are_the_same_when_they_spell_the_same(left, right):
    assert same(left, left)
    assert same(left, right) == same(right, left)
    assert same(left, right) == (spelled(left) == spelled(right))
