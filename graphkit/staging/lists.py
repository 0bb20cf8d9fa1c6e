"""Lists as inputs: of integers, packed fast; and of rows of different lengths, as block tables are kept."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from graphkit.errors import InputError
from graphkit.staging.hostdata import exact_array, numpy_dtype

_CODES: dict[torch.dtype, str] = {
    torch.int8: "b",
    torch.uint8: "B",
    torch.int16: "h",
    torch.uint16: "H",
    torch.int32: "i",
    torch.uint32: "I",
    torch.int64: "q",
    torch.uint64: "Q",
}


@functools.lru_cache(maxsize=1024)
def _packer(code: str, count: int) -> struct.Struct:
    return struct.Struct(f"={count}{code}")


def packed_integers(
    value: list[Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> np.ndarray[Any, Any] | None:
    """A list of ints, or of lists of ints, of this shape as an array: twice as fast as NumPy makes one.

    Returns:
        None where it is anything else, which `exact_array` then takes or refuses.
    """
    code = _CODES.get(dtype)
    if code is None or len(shape) not in (1, 2) or 0 in shape or len(value) != shape[0]:
        return None
    array = np.empty(shape, numpy_dtype(dtype))
    memory = array.view(np.uint8).reshape(-1).data
    packer = _packer(code, shape[-1])
    rows = [value] if len(shape) == 1 else value
    offset, step = 0, shape[-1] * dtype.itemsize
    try:
        for row in rows:
            # NumPy's integers and tensors are ints to `struct` too, and bools are.
            if type(row) is not list or type(row[0]) is not int:
                return None
            packer.pack_into(memory, offset, *row)
            offset += step
    except (struct.error, TypeError, IndexError):
        return None
    return array


def is_ragged(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value for an input of two axes is a list of rows, of which one isn't of the full length."""
    if len(shape) != 2 or not isinstance(value, (list, tuple)):
        return False
    return all(_is_row(row) for row in value) and any(len(row) != shape[1] for row in value)


def ragged_rows(
    value: Sequence[Any], dtype: torch.dtype, shape: tuple[int, int], fill: Any, where: str
) -> np.ndarray[Any, Any]:
    """Rows of different lengths in an array of this shape, the rest of each row filled.

    Args:
        fill: as `numpy_dtype(dtype)` stores it.

    Raises:
        InputError: there are too many or too few rows, one is too long, or holds what the dtype doesn't. `where` begins
            the message.
    """
    if len(value) != shape[0]:
        raise InputError(
            f"{where}: got {len(value)} rows of different lengths, expected {shape[0]}"
        )
    array = np.full(shape, fill, numpy_dtype(dtype))
    for index, row in enumerate(value):
        if len(row) > shape[1]:
            raise InputError(
                f"{where}: row {index} has {len(row)} elements, expected at most {shape[1]}"
            )
        if len(row):
            array[index, : len(row)] = _row(row, dtype, f"{where}, row {index}")
    return array


def _is_row(row: Any) -> bool:
    if isinstance(row, torch.Tensor):
        return row.ndim == 1 and row.device.type == "cpu"
    return isinstance(row, (list, tuple)) or (isinstance(row, np.ndarray) and row.ndim == 1)


def _row(row: Any, dtype: torch.dtype, where: str) -> np.ndarray[Any, Any]:
    if isinstance(row, torch.Tensor):
        if row.dtype is not dtype:
            raise InputError(f"{where}: got {row.dtype}, expected {dtype}; it is never cast")
        row = row.numpy()
    if isinstance(row, np.ndarray):
        if row.dtype != numpy_dtype(dtype):
            raise InputError(f"{where}: got {row.dtype}, expected {dtype}; it is never cast")
        return row
    fast = packed_integers(row, dtype, (len(row),)) if type(row) is list else None
    made = exact_array(row, dtype, where) if fast is None else fast
    if made.ndim != 1:
        raise InputError(f"{where}: got shape {made.shape}, expected numbers")
    return made
