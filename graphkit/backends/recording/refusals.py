"""What a CUDA capture refuses, and why: one table for operations and one for functions.

PyTorch's own tags aren't enough: an index by integers is tagged as an index by a mask is, a masked
assignment isn't tagged at all, and some calls never reach the dispatcher on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._ops import HigherOrderOperator
from torch.overrides import resolve_name
from torch.utils import _pytree as pytree

READS = "it reads a value back from the device, which a capture can't wait for"
SIZES = "the size of its result depends on values, which a capture can't wait for"
MASK = "indexing by a mask has a result whose size depends on values"
CHECKS = "it checks values on the host, which a capture can't wait for"
COPIES_IN = "it copies from Python's memory to the device, once, and would be baked"
COPIES_OUT = "it copies to the host, which a capture can't wait for"
HIGHER_ORDER = "higher-order operators (torch.cond, torch.while_loop) can't be recorded"

Rule = Callable[[Sequence[Any], Mapping[str, Any]], str | None]
"""Given the arguments of a call, the reason to refuse it, or None."""


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


def _of_python_data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, (list, tuple)) and any(
        isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(data)
    ):
        # Each element is read back, one by one.
        return READS
    moved = kwargs.get("device") is not None and not isinstance(data, torch.Tensor)
    return COPIES_IN if moved else None


def _new_of_python_data(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    data = args[1] if len(args) > 1 else kwargs.get("data")
    return None if isinstance(data, torch.Tensor) else COPIES_IN


def _by_list(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    return COPIES_IN if any(isinstance(part, (list, np.ndarray)) for part in parts) else None


def _by_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    where = [*args[1:2], *kwargs.values()]
    return READS if any(isinstance(x, torch.Tensor) for x in where) else None


FUNCTIONS: dict[Any, Rule] = {
    torch.Tensor.tolist: _always(READS),
    torch.Tensor.numpy: _always(COPIES_OUT),
    torch.Tensor.__array__: _always(COPIES_OUT),
    torch.Tensor.cpu: _always(COPIES_OUT),
    torch.Tensor.__repr__: _always(READS),
    torch.Tensor.__format__: _always(READS),
    torch.Tensor.tensor_split: _by_tensor,
    torch.tensor_split: _by_tensor,
    torch.tensor: _of_python_data,
    torch.as_tensor: _of_python_data,
    torch.asarray: _of_python_data,
    torch.Tensor.new_tensor: _new_of_python_data,
    torch.Tensor.__getitem__: _by_list,
    torch.Tensor.__setitem__: _by_list,
}
"""Calls that never reach the dispatcher on a CPU, or that lose there what CUDA refuses them for."""


def of_function(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The reason to refuse a call of PyTorch's Python surface, or None."""
    if isinstance(function, HigherOrderOperator):
        return HIGHER_ORDER
    rule = FUNCTIONS.get(function)
    return None if rule is None else rule(args, kwargs)


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


def value_read(function: Any, args: Sequence[Any]) -> Any:
    """The argument that a refused call of Python's surface needs on the host."""
    position = 1 if function in (torch.tensor_split, torch.Tensor.tensor_split) else 0
    return args[position] if len(args) > position else None


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
