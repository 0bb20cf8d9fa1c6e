"""Whether a value still is the one that a graph has baked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.capture.watch import Fingerprint

_SCALARS = (int, float, str, bytes)


def same(left: Any, right: Any) -> bool:
    """Whether two values are one to a graph that has baked either, leaf by leaf of their pytrees.

    Leaves of different types are different: 1, 1.0 and True are three values. NaN is NaN. Tensors
    are the same by address, shape, stride and dtype, whatever they contain; NumPy arrays by dtype,
    shape and contents; all else by ``==``, and if that raises, they are different. Dicts are the
    same if their keys come in the same order, too.

    An object is the same as itself: of one that is changed in place, compare a copy.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, _SCALARS):
        # A replay compares these; flattening them would take longer than all the rest.
        return _same_leaf(left, right)
    try:
        leaves, spec = pytree.tree_flatten(left)
        others, other_spec = pytree.tree_flatten(right)
        # The user's own containers compare as they like.
        return bool(spec == other_spec) and all(map(_same_leaf, leaves, others))
    except Exception:
        return False


def _same_leaf(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    try:
        if isinstance(left, torch.Tensor):
            return _same_tensor(left, right)
        if isinstance(left, (np.ndarray, np.generic)):
            return _same_array(np.asarray(left), np.asarray(right))
        if isinstance(left, complex):
            return _same_leaf(left.real, right.real) and _same_leaf(left.imag, right.imag)
        if isinstance(left, float) and left != left:
            return bool(right != right)
        return bool(left == right)
    except Exception:
        return False


def _same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    # A lazy conjugate or negative lies where the tensor lies that it is made of.
    flags = left.is_conj() == right.is_conj() and left.is_neg() == right.is_neg()
    return flags and Fingerprint.of(left) == Fingerprint.of(right)


def _same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.kind == "O":
        return all(map(same, left.flat, right.flat))
    if left.dtype.kind == "c":
        # NumPy takes two numbers for one NaN as soon as a part of each is NaN.
        return _same_array(left.real, right.real) and _same_array(left.imag, right.imag)
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fmM")
