"""Host values: turning what callers give (arrays, tensors, lists, scalars) into NumPy, exactly.

A value is taken where the buffer's dtype holds it exactly, and refused otherwise; only Python floats
are rounded, to the buffer's own float.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from graphkit.errors import InputError, SpecError

_NUMPY: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_RAW: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_RAW_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype; unsigned ints of the same width where NumPy has none."""
    found: np.dtype[Any] = np.dtype(_NUMPY.get(dtype) or _RAW[dtype.itemsize])
    return found


def is_stageable(dtype: torch.dtype) -> bool:
    """Whether buffers and outputs may have the dtype: not quantized, packed or of bits, which can't be filled."""
    if dtype in _NUMPY or dtype in (torch.bfloat16, torch.complex32):
        return True
    return str(dtype).startswith("torch.float8_")


def has_numpy(dtype: torch.dtype) -> bool:
    """Whether NumPy has the dtype itself."""
    return dtype in _NUMPY


def encode(value: Any, dtype: torch.dtype) -> Any:
    """A pad value as `numpy_dtype(dtype)` stores it."""
    if dtype in _NUMPY:
        return np.asarray(value, dtype=_NUMPY[dtype])[()]
    return tensor_to_numpy(torch.tensor(value, dtype=dtype, device="cpu"))[()]


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as NumPy, sharing memory where it can; raw bits where NumPy lacks the dtype."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype not in _NUMPY:
        tensor = tensor.contiguous().view(_RAW_TORCH[tensor.dtype.itemsize])
        return tensor.numpy().view(_RAW[tensor.dtype.itemsize])
    return tensor.numpy()


def check_dtype(value: Any) -> torch.dtype:
    """A dtype that buffers and outputs may have.

    Raises:
        SpecError: it is none, or one that can't be filled or copied by element.
    """
    if not isinstance(value, torch.dtype):
        raise SpecError(
            f"dtype must be a torch.dtype, got {value!r} of type {type(value).__name__}"
        )
    if not is_stageable(value):
        raise SpecError(
            f"dtype {value} is quantized or packed: its elements can't be filled or copied one by one. Declare the "
            "bytes, as torch.uint8, and view them in the function"
        )
    return value


def exact_array(value: Any, dtype: torch.dtype, where: str) -> np.ndarray[Any, Any]:
    """A list or scalar as an array that holds it exactly in `dtype`.

    Raises:
        InputError: it is ragged, of another kind, or out of the dtype's range. `where` begins the message.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise InputError(f"{where}: can't make an array of it ({error}); is it ragged?") from None
    if array.size == 0 and not isinstance(value, (np.ndarray, np.generic)):
        return np.zeros(array.shape, numpy_dtype(dtype))
    if dtype is torch.uint64 and array.dtype.kind in "fO":
        array = _large_integers(value, array)
    kind = array.dtype.kind
    if kind not in "biufc":
        raise InputError(f"{where}: got {_short(value)}, expected numbers that {dtype} holds")
    if dtype is torch.bool or kind == "b":
        if not (dtype is torch.bool and kind == "b"):
            raise InputError(
                f"{where}: got {_short(value)}, expected {dtype}; bools and numbers aren't mixed"
            )
        return array
    if not dtype.is_floating_point and not dtype.is_complex:
        if kind not in "iu":
            raise InputError(f"{where}: got {_short(value)}, expected integers for {dtype}")
        held = numpy_dtype(dtype)
        if array.dtype == held:
            return array
        narrow = array.astype(held)
        # A value out of range comes back as another one, perhaps of another sign.
        if not ((narrow == array) & ((narrow < 0) == (array < 0))).all():
            raise InputError(f"{where}: got {_short(value)}, out of the range of {dtype}")
        return narrow
    if kind == "c" and not dtype.is_complex:
        raise InputError(f"{where}: got {_short(value)}, expected real numbers for {dtype}")
    if isinstance(value, np.generic) and not (dtype in _NUMPY and array.dtype == _NUMPY[dtype]):
        exact, wide = _as_float(array, dtype), _wide(dtype.is_complex)
        back = exact.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
        if not np.array_equal(back, array.astype(wide), equal_nan=True):
            raise InputError(f"{where}: got {value!r}, which {dtype} doesn't hold exactly")
    if kind in "iu":
        exact = _as_float(array, dtype)
        back = exact.to(torch.complex128 if dtype.is_complex else torch.float64).numpy()
        if not (
            np.array_equal(back.real, array)
            and np.array_equal(back.real.astype(object), array.astype(object))
        ):
            raise InputError(f"{where}: got {_short(value)}, which {dtype} doesn't hold exactly")
        return tensor_to_numpy(exact)
    rounded = _as_float(array, dtype)
    info = torch.finfo(dtype)
    # Overflowing isn't rounding, be it to infinity, to NaN or to the largest value.
    limit = float(info.max) * (1 + float(info.eps))
    is_held = rounded.to(torch.complex128).isfinite().numpy()
    # In a narrower float the limit itself would overflow.
    wide_array = array.astype(_wide(kind == "c"))
    for part in (wide_array.real, wide_array.imag):
        is_held = is_held & ((np.abs(part) <= limit) | ~np.isfinite(part))
    if not (is_held | ~np.isfinite(array)).all():
        raise InputError(f"{where}: got {_short(value)}, out of the range of {dtype}")
    return tensor_to_numpy(rounded)


def _large_integers(value: Any, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integers of which some are above int64, which NumPy makes floats or objects of; otherwise `array`."""
    exact = np.asarray(value, dtype=object)
    if all(type(x) is int and 0 <= x < 2**64 for x in exact.flat):
        return exact.astype(np.uint64)
    return array


def _as_float(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array.astype(_wide(array.dtype.kind == "c"))).to(dtype)


def _wide(is_complex: bool) -> Any:
    return np.complex128 if is_complex else np.float64


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
