"""What a CUDA capture refuses, and why: one table for operations and one for functions.

PyTorch's own tags aren't enough: an index by integers is tagged as an index by a mask is, a masked
assignment isn't tagged at all, and some calls never reach the dispatcher on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.overrides import resolve_name

READS = "it reads a value back from the device, which a capture can't wait for"
SIZES = "the size of its result depends on values, which a capture can't wait for"
MASK = "indexing by a mask has a result whose size depends on values"
CHECKS = "it checks values on the host, which a capture can't wait for"
COPIES_IN = "it copies from Python's memory to the device, once, and would be baked"
COPIES_OUT = "it copies to the host, which a capture can't wait for"
HIGHER_ORDER = "higher-order operators (torch.cond, torch.while_loop) can't be recorded"

Rule = Callable[[Sequence[Any], Mapping[str, Any]], str | None]
"""Given the arguments of a call, the reason to refuse it, or None."""

OnHost = Callable[[Any], bool]
"""Whether a value is a tensor that CUDA has on the host too."""
FunctionRule = Callable[[Sequence[Any], Mapping[str, Any], OnHost], str | None]
"""The same for a call of Python's surface, which may read what is on the host."""


def _always(reason: str) -> Rule:
    return lambda args, kwargs: reason


def _by_mask(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    return MASK if masks else None


def _without_output_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    return None if kwargs.get("output_size") is not None else SIZES


def _of_condition_alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    return SIZES if len(args) + len(kwargs) == 1 else None


def _unbounded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    low, high = (args[i] if len(args) > i else 0 for i in (2, 3))
    return READS if low == high else None


def _unknown_classes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    return SIZES if len(args) < 2 or args[1] == -1 else None


OPERATIONS: dict[str, Rule] = {
    "aten::_local_scalar_dense": _always(READS),
    "aten::item": _always(READS),
    "aten::is_nonzero": _always(READS),
    "aten::equal": _always(READS),
    "aten::allclose": _always(READS),
    "aten::masked_fill.Tensor": _always(READS),
    "aten::masked_fill_.Tensor": _always(READS),
    "aten::histc": _unbounded,
    "aten::ctc_loss": _always(COPIES_OUT),
    "aten::_ctc_loss": _always(COPIES_OUT),
    "aten::nonzero": _always(SIZES),
    "aten::nonzero_numpy": _always(SIZES),
    "aten::argwhere": _always(SIZES),
    "aten::where": _of_condition_alone,
    "aten::masked_select": _always(SIZES),
    "aten::index.Tensor": _by_mask,
    "aten::index_put": _by_mask,
    "aten::index_put_": _by_mask,
    "aten::_index_put_impl_": _by_mask,
    "aten::_unique": _always(SIZES),
    "aten::_unique2": _always(SIZES),
    "aten::unique_dim": _always(SIZES),
    "aten::unique_consecutive": _always(SIZES),
    "aten::unique_dim_consecutive": _always(SIZES),
    "aten::repeat_interleave.Tensor": _without_output_size,
    "aten::repeat_interleave.self_Tensor": _without_output_size,
    "aten::bincount": _always(SIZES),
    "aten::combinations": _always(SIZES),
    "aten::one_hot": _unknown_classes,
    "aten::normal.Tensor_Tensor": _always(CHECKS),
    "aten::normal.float_Tensor": _always(CHECKS),
    "aten::_linalg_check_errors": _always(CHECKS),
    "aten::linalg_cholesky": _always(CHECKS),
    "aten::cholesky": _always(CHECKS),
    "aten::linalg_inv": _always(CHECKS),
    "aten::inverse": _always(CHECKS),
    "aten::linalg_solve": _always(CHECKS),
    "aten::linalg_lu_factor": _always(CHECKS),
    "aten::linalg_eig": _always(CHECKS),
    "aten::linalg_eigvals": _always(CHECKS),
    "aten::linalg_eigh": _always(CHECKS),
    "aten::linalg_eigvalsh": _always(CHECKS),
    "aten::_linalg_eigh": _always(CHECKS),
    "aten::linalg_svd": _always(CHECKS),
    "aten::linalg_svdvals": _always(CHECKS),
    "aten::_linalg_svd": _always(CHECKS),
}
"""By operator, or by operator and overload where the overloads differ; the longer name wins."""


def _reading(reason: str) -> FunctionRule:
    """Refuse what needs its first argument on the host."""
    return lambda args, kwargs, on_host: None if args and on_host(args[0]) else reason


def _tensors_among(data: Any, depth: int = 64) -> Iterator[torch.Tensor]:
    """The tensors that would be elements of a tensor made of nested sequences of any kind."""
    # No tensor has more axes than that, and a list may contain itself.
    if isinstance(data, (str, bytes, bytearray, memoryview, np.ndarray, range)) or not depth:
        return
    if not (hasattr(type(data), "__getitem__") and hasattr(type(data), "__len__")):
        return
    if isinstance(data, (Mapping, torch.Tensor)):
        return
    for element in data:
        if isinstance(element, torch.Tensor):
            yield element
        else:
            yield from _tensors_among(element, depth - 1)


def _of_python_data(args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost) -> str | None:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if isinstance(data, torch.Tensor):
        return None
    # A list's elements are read back, one by one.
    if not all(on_host(tensor) for tensor in _tensors_among(data)):
        return READS
    return None if kwargs.get("device") is None else COPIES_IN


def _new_of_python_data(
    args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost
) -> str | None:
    data = args[1] if len(args) > 1 else kwargs.get("data")
    if isinstance(data, torch.Tensor):
        return None
    if not all(on_host(tensor) for tensor in _tensors_among(data)):
        return READS
    return None if on_host(args[0]) else COPIES_IN


def _new(args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost) -> str | None:
    is_data = len(args) == 2 and isinstance(args[1], (list, tuple))
    # Sizes are no data.
    if not is_data or isinstance(args[1], torch.Size):
        return None
    return _new_of_python_data(args, kwargs, on_host)


def _by_list(args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost) -> str | None:
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    if on_host(args[0]) or not any(isinstance(part, (list, np.ndarray)) for part in parts):
        return None
    return COPIES_IN


def _by_tensor(args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost) -> str | None:
    where = [*args[1:2], *kwargs.values()]
    return READS if any(isinstance(x, torch.Tensor) and not on_host(x) for x in where) else None


def _to_another_library(
    args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost
) -> str | None:
    """Refuse to hand a CPU's memory to NumPy, which couldn't take a device's; torch.from_dlpack can."""
    if args[0].device.type != "cpu" or on_host(args[0]):
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.Tensor.__dlpack__.__code__:
        frame = frame.f_back
    # Their arguments are the same: who asks is known by the caller alone.
    caller = None if frame is None else frame.f_back
    is_torch = caller is not None and caller.f_code is torch.utils.dlpack.from_dlpack.__code__
    return None if is_torch else COPIES_OUT


FUNCTIONS: dict[Any, FunctionRule] = {
    # PyTorch calls these on the elements of a list that a torch.LongTensor or torch.FloatTensor is made of.
    torch.Tensor.__bool__: _reading(READS),
    torch.Tensor.__int__: _reading(READS),
    torch.Tensor.__index__: _reading(READS),
    torch.Tensor.__float__: _reading(READS),
    torch.Tensor.__complex__: _reading(READS),
    torch.Tensor.tolist: _reading(READS),
    torch.Tensor.numpy: _reading(COPIES_OUT),
    torch.Tensor.__array__: _reading(COPIES_OUT),
    torch.Tensor.__dlpack__: _to_another_library,
    torch.Tensor.cpu: _reading(COPIES_OUT),
    torch.Tensor.__repr__: _reading(READS),
    torch.Tensor.__format__: _reading(READS),
    torch.Tensor.tensor_split: _by_tensor,
    torch.tensor_split: _by_tensor,
    torch.tensor: _of_python_data,
    torch.as_tensor: _of_python_data,
    torch.asarray: _of_python_data,
    torch.Tensor.new: _new,
    torch.Tensor.new_tensor: _new_of_python_data,
    torch.Tensor.__getitem__: _by_list,
    torch.Tensor.__setitem__: _by_list,
}
"""Calls that never reach the dispatcher on a CPU, or that lose there what CUDA refuses them for."""


def of_function(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], on_host: OnHost
) -> str | None:
    """The reason to refuse a call of PyTorch's Python surface, or None."""
    if isinstance(function, HigherOrderOperator):
        return HIGHER_ORDER
    rule = FUNCTIONS.get(function)
    return None if rule is None else rule(args, kwargs, on_host)


ADVICE = (
    "Keep the value in a tensor, compute it in prepare and pass it in, or do this in an eager break"
)


READS_ONE_VALUE = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::is_nonzero",
        "aten::masked_fill.Tensor",
        "aten::masked_fill_.Tensor",
    }
)
"""Operations that CUDA takes if the value, their last argument, is on the host."""


_QUANTILES = frozenset(
    {torch.quantile, torch.nanquantile, torch.Tensor.quantile, torch.Tensor.nanquantile}
)
_FILLS = frozenset({torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_})


def is_fine_on_cuda(
    operation: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether CUDA, for this call of Python's surface, doesn't run the refused operation."""
    # A CPU checks the range of the values, CUDA doesn't.
    if function in _QUANTILES:
        return True
    if function is torch.nn.functional.one_hot and operation == "aten::_local_scalar_dense":
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return bool(classes != -1)
    if operation.startswith("aten::masked_fill"):
        # Called by another function, which brings its value on the host.
        return function not in _FILLS
    # CUDA runs x[mask] = number as a masked fill, whose size is fixed.
    return (
        function is torch.Tensor.__setitem__
        and operation.startswith("aten::index_put")
        and isinstance(args[1], torch.Tensor)
        and isinstance(args[2], (bool, int, float, complex))
    )


def name_of(function: Any) -> str:
    """The name that a user knows a function by."""
    return resolve_name(function) or str(function)
