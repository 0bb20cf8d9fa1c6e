"""Outputs: static buffers of the maximum, written inside the graph, read through views of the valid region.

The shape of each output is an expression in the dims: declared by an `Output`, or inferred where exactly
one expression fits every bucket that the runner has. It is never the shape of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from torch.utils import _pytree as pytree

from graphkit.buffers import (
    Buffer,
    Extent,
    as_shape,
    dims_of,
    prefix,
    shape_at,
    shape_text,
)
from graphkit.dims import Dim
from graphkit.errors import CaptureError, SpecError, StateError
from graphkit.outputs.inference import sizes_text
from graphkit.staging.hostdata import check_dtype

Destination = Literal["static", "pool", "host"]


def _to(value: Any) -> Any:
    if isinstance(value, Buffer) or value in ("static", "pool", "host"):
        return value
    raise SpecError(f"Output(to=) must be 'static', 'pool', 'host' or a buffer, got {value!r}")


def _output_shape(value: Any) -> tuple[Extent, ...]:
    return as_shape(value, "an output")


@attrs.frozen
class Output:
    """What one output is.

    Args:
        shape: ints, dims and expressions of them. The valid region is this shape at the real batch.
        dtype: a `torch.dtype`.
        to: "static" copies it into a buffer of its own outside the pool; "pool" leaves it in the graphs' pool,
            which saves the copy of a huge output and ends its lease at the group's next run; "host"
            copies it into pinned memory,
            inside the graph; a `Buffer` binds it to that buffer.
    """

    shape: tuple[Extent, ...] = attrs.field(converter=_output_shape)
    dtype: torch.dtype = attrs.field(converter=check_dtype)
    to: Destination | Buffer = attrs.field(default="static", converter=_to, kw_only=True)

    def __str__(self) -> str:
        return f"Output({shape_text(self.shape)}, {self.dtype})"


def bound_to(buffer: Buffer) -> Output:
    """The output that is written into `buffer`, in every mode."""
    return Output(buffer.spec.shape, buffer.spec.dtype, to=buffer)


def output_name(path: str) -> str:
    """An output in a message; a lone one has no path."""
    return f"output {path!r}" if path else "its output"


def as_outputs(declared: Any) -> dict[str, Output]:
    """Declarations by path; one declaration alone is that of a function that returns one tensor.

    Raises:
        SpecError: a declaration is neither an `Output` nor a `Buffer`.
    """
    if declared is None:
        return {}
    if isinstance(declared, (Output, Buffer)):
        declared = {"": declared}
    if not isinstance(declared, Mapping):
        raise SpecError(f"outputs must map paths to Output or a buffer, got {declared!r}")
    found: dict[str, Output] = {}
    for path, value in declared.items():
        if isinstance(value, Buffer):
            found[str(path)] = bound_to(value)
        elif isinstance(value, Output):
            found[str(path)] = value
        else:
            raise SpecError(f"output {path!r} must be an Output or a buffer, got {value!r}")
    return found


class Tree:
    """The structure of what a function returns, and its tensor leaves by path.

    Raises:
        CaptureError: a leaf is neither a tensor nor None: it would be baked into the graph; or two leaves have
            one path.
    """

    def __init__(self, value: Any, where: str) -> None:
        try:
            with_path, self.spec = pytree.tree_flatten_with_path(value)
        except RecursionError:
            raise CaptureError(
                f"{where} returned something that contains itself, or is nested too deep; return plain lists and dicts"
            ) from None
        self.paths: list[str] = []
        self.leaves: list[torch.Tensor | None] = []
        for keys, leaf in with_path:
            path = ".".join(_key(key) for key in keys)
            if path in self.paths:
                raise CaptureError(
                    f"{where} returned two outputs that are both named {path or 'value'!r}: outputs are told apart by "
                    f"their keys as text, joined by dots. Rename a key"
                )
            if leaf is not None and not isinstance(leaf, torch.Tensor):
                raise CaptureError(
                    f"{where} returned {leaf!r} ({type(leaf).__name__}) as {output_name(path)}: a Python value "
                    f"would be baked into the graph. Return tensors only; what doesn't change can be kept outside"
                )
            self.paths.append(path)
            self.leaves.append(leaf)
        self.tensor_paths = [
            path for path, leaf in zip(self.paths, self.leaves, strict=True) if leaf is not None
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor leaves by path."""
        return {
            p: leaf for p, leaf in zip(self.paths, self.leaves, strict=True) if leaf is not None
        }

    def rebuild(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The same structure with other tensors."""
        return pytree.tree_unflatten([tensors.get(path) for path in self.paths], self.spec)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class StaticOutput:
    """The memory of one output of one runner on the device, for all of its buckets."""

    __slots__ = ("_views", "buffer", "generation", "spec", "tensor")

    def __init__(
        self,
        spec: Output,
        maximum: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.buffer = spec.to if isinstance(spec.to, Buffer) else None
        self.generation = 0
        self._views: dict[tuple[int, ...], torch.Tensor] = {}
        self.tensor: torch.Tensor | None = None
        if self.buffer is not None or spec.to == "pool":
            return
        shape = shape_at(spec.shape, maximum)
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.zeros(shape, dtype=spec.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of its own memory; none if it is bound to a buffer or stays in the pool."""
        return self.tensor.nbytes if self.tensor is not None else 0

    def view(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The part that is valid for a batch or bucket of these sizes."""
        if self.buffer is not None:
            return self.buffer.view(sizes)
        shape = shape_at(self.spec.shape, sizes)
        view = self._views.get(shape)
        if view is None and self.tensor is not None:
            if len(self._views) >= 4096:
                self._views.clear()
            view = self._views[shape] = prefix(self.tensor, shape)
        if view is None:
            raise StateError("an output that stays in the pool has no static view")
        return view

    def write(self, value: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Copy `value` into the view for these sizes, unless it is that view already."""
        view = self.view(sizes)
        if (
            value.data_ptr() == view.data_ptr()
            and value.stride() == view.stride()
            and value.device == view.device
            and not (value.is_conj() or value.is_neg())
        ):
            return
        if value.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
            value = value.clone()
        view.copy_(value)

    def poison(self) -> None:
        """Fill it with what no reader takes for a result."""
        if self.tensor is None:
            return
        dtype = self.spec.dtype
        with torch.no_grad():
            if dtype.is_floating_point or dtype.is_complex:
                self.tensor.fill_(float("nan"))
            elif dtype is not torch.bool:
                self.tensor.fill_(torch.iinfo(dtype).max)


def check_leaf(
    path: str, value: torch.Tensor, spec: Output, sizes: Mapping[str, int], where: str
) -> None:
    """Raise a `SpecError` unless `value` has the shape and dtype of `spec` at these sizes."""
    expected = shape_at(spec.shape, sizes)
    if tuple(value.shape) != expected:
        raise SpecError(
            f"{where}: {output_name(path)} has shape {tuple(value.shape)}, expected {expected}, which is "
            f"{shape_text(spec.shape)} at {sizes_text(sizes)}; it is never broadcast"
        )
    if value.dtype != spec.dtype:
        raise SpecError(
            f"{where}: {output_name(path)} is {value.dtype}, expected {spec.dtype}; it is never cast"
        )


def output_dims(outputs: Mapping[str, Output]) -> tuple[Dim, ...]:
    """The dims that declared outputs name."""
    return tuple(dim for output in outputs.values() for dim in dims_of(output.shape))
