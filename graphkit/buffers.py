"""Static buffers: declared once, allocated once from the maxima, at one address for every bucket.

A buffer is memory; whether a runner feeds it, finds it written, or writes it is that runner's
business (`graphkit.parameters`). Runners of one group share a buffer by its name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import attrs
import torch

from graphkit.dims import Affine, Dim, affine, as_items, check_name, dims_by_name
from graphkit.errors import InputError, SpecError, StateError
from graphkit.pads import Pad, as_pad
from graphkit.staging.hostdata import check_dtype, has_numpy

Extent = int | Dim | Affine
"""One axis of a shape: fixed, or in terms of a dim."""

Layout = Literal["strided", "packed"]
_VIEWS = 4096

_INTEGERS = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


_MOST_AXES = 64
"""Of any tensor of torch's."""


def as_shape(shape: Any, what: str) -> tuple[Extent, ...]:
    """A shape as a tuple of ints, dims and affine expressions.

    Raises:
        SpecError: an axis is none of these, or is negative.
    """
    if isinstance(shape, (int, Dim, Affine)) and not isinstance(shape, bool):
        shape = (shape,)
    if not isinstance(shape, Sequence) or isinstance(shape, (str, bytes)):
        raise SpecError(f"the shape of {what} must be a tuple of ints and dims, got {shape!r}")
    shape = as_items(shape, f"the shape of {what}", limit=_MOST_AXES)
    for axis, extent in enumerate(shape):
        if isinstance(extent, (Dim, Affine)):
            continue
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise SpecError(
                f"axis {axis} of {what} must be a Dim, an expression of one, or an int of at least 0, "
                f"got {extent!r} of type {type(extent).__name__}"
            )
    return tuple(shape)


def shape_at(shape: Sequence[Extent], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape in numbers, for these sizes of the dims."""
    return tuple(extent if isinstance(extent, int) else extent.size(sizes) for extent in shape)


def shape_text(shape: Sequence[Extent]) -> str:
    """The shape as its declaration would write it."""
    inner = ", ".join(str(extent) for extent in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def dims_of(shape: Sequence[Extent]) -> tuple[Dim, ...]:
    """The dims in a shape, in order of first mention."""
    return tuple(dims_by_name([e for e in shape if not isinstance(e, int)]).values())


def prefix(memory: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The view of the first rows of every axis; writable in and outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        view = memory.view_as(memory)
        for axis, size in enumerate(shape):
            view = view.narrow(axis, 0, size)
        return view


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or, if it was made in inference mode, the same memory as a tensor that may be written outside it."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def _layout(value: Any) -> Any:
    if value not in ("strided", "packed"):
        raise SpecError(f"layout must be 'strided' or 'packed', got {value!r}")
    return value


def _buffer_shape(value: Any) -> tuple[Extent, ...]:
    return as_shape(value, "a buffer")


@attrs.frozen
class BufferSpec:
    """What a static buffer is.

    Args:
        shape: ints, `Dim`s and expressions of them; one axis for each.
        dtype: a `torch.dtype`.
        pad: what fills the rows between the batch and the bucket: a value, `relied(value)`,
            `repeat_last`, `continue_(step)`, `keep`, `by_producer(value)`, or a mapping with one for
            each dim. Required exactly where a dim is in the shape.
        valid: for index buffers, the half-open range ``(low, high)`` that every element lies in,
            padding included.
        layout: with two dims, "strided" keeps places (views have the maximum's strides), "packed"
            makes the view of each bucket contiguous, for a single runner's use.
        adopt: existing memory to use instead of allocating it: shape at the maxima, same dtype,
            contiguous, on the group's device.

    Raises:
        SpecError: any of these is wrong.
    """

    shape: tuple[Extent, ...] = attrs.field(converter=_buffer_shape)
    dtype: torch.dtype = attrs.field(converter=check_dtype)
    pad: Any = attrs.field(default=None, kw_only=True)
    valid: tuple[int, int] | None = attrs.field(default=None, kw_only=True)
    layout: Layout = attrs.field(default="strided", converter=_layout, kw_only=True)
    adopt: torch.Tensor | None = attrs.field(default=None, kw_only=True, eq=id, repr=False)

    def __attrs_post_init__(self) -> None:
        self._check_valid()
        object.__setattr__(self, "pad", self._checked_pads())
        self._check_adopted()

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims in the shape."""
        return dims_of(self.shape)

    @property
    def maximum_shape(self) -> tuple[int, ...]:
        """The shape at the maxima of all dims."""
        return tuple(e if isinstance(e, int) else e.maximum for e in self.shape)

    @property
    def pads(self) -> tuple[Pad | None, ...]:
        """The pad of each axis; None for fixed ones."""
        return tuple(
            None if isinstance(extent, int) else self.pad[affine(extent).dim.name]
            for extent in self.shape
        )

    @property
    def moves(self) -> bool:
        """Whether an element's place depends on the sizes: packed, with a dim beyond the first axis."""
        return self.layout == "packed" and any(not isinstance(e, int) for e in self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes at the maxima."""
        return _product(self.maximum_shape) * self.dtype.itemsize

    @property
    def fill(self) -> bool | int | float:
        """What a fresh buffer holds: the first constant pad, or the least valid value, or 0."""
        for pad in self.pad.values():
            if pad.is_constant:
                return pad.value  # type: ignore[no-any-return]
        return self.valid[0] if self.valid else 0

    def __str__(self) -> str:
        parts = [shape_text(self.shape), str(self.dtype)]
        if len(self.pad) == 1:
            parts.append(f"pad={next(iter(self.pad.values()))}")
        elif self.pad:
            inner = ", ".join(f"{name}: {pad}" for name, pad in self.pad.items())
            parts.append(f"pad={{{inner}}}")
        if self.valid is not None:
            parts.append(f"valid={self.valid}")
        if self.layout != "strided":
            parts.append(f"layout={self.layout!r}")
        return f"BufferSpec({', '.join(parts)})"

    def _checked_pads(self) -> dict[str, Pad]:
        dims = self.dims
        given = self.pad
        if not dims:
            return {}
        if given is None:
            raise SpecError(
                f"a buffer of shape {shape_text(self.shape)} varies with {dims[0].name!r} and needs a pad: "
                f"what its rows beyond the batch hold, e.g. pad=0, or pad=gk.keep if nothing reads them"
            )
        if isinstance(given, Mapping):
            pads = {
                (
                    key.dim.name
                    if isinstance(key, Affine)
                    else key.name
                    if isinstance(key, Dim)
                    else key
                ): as_pad(value)
                for key, value in given.items()
            }
            names = [dim.name for dim in dims]
            if sorted(map(str, pads)) != sorted(names):
                raise SpecError(
                    f"pad names {sorted(map(str, pads))}, and the shape {shape_text(self.shape)} has the "
                    f"dims {sorted(names)}: give one pad for each"
                )
        else:
            pads = {dim.name: as_pad(given) for dim in dims}
        for name, pad in pads.items():
            self._check_pad(name, pad)
        return pads

    def _check_pad(self, name: str, pad: Pad) -> None:
        if self.valid is not None and pad.kind == "continue":
            raise SpecError(
                f"pad {pad} of dim {name!r} may count out of valid={self.valid}: it would be used as an index. "
                f"Pad with a scratch row, or repeat_last"
            )
        if self.valid is not None and pad.kind == "repeat_last" and not self._is_valid(0):
            raise SpecError(
                f"pad {pad} of dim {name!r} is 0 for an empty batch, which lies outside valid={self.valid}; pad with a "
                f"value inside it"
            )
        if pad.value is None:
            return
        if self.dtype is torch.bool and pad.kind == "continue":
            raise SpecError(f"pad {pad} of dim {name!r} can't count in a bool buffer")
        if pad.kind == "continue" and not has_numpy(self.dtype):
            raise SpecError(
                f"pad {pad} of dim {name!r}: {self.dtype} has no counterpart to count in"
            )
        if not _is_exact(pad.value, self.dtype):
            raise SpecError(
                f"pad {pad} of dim {name!r} can't be held by {self.dtype}; use a value that can"
            )
        if pad.is_constant and self.valid is not None and not self._is_valid(pad.value):
            raise SpecError(
                f"pad {pad} of dim {name!r} lies outside valid={self.valid}: it would be used as an index. "
                f"Reserve a scratch row inside the range and pad with it"
            )

    def _is_valid(self, value: Any) -> bool:
        low, high = self.valid or (0, 0)
        return bool(low <= value < high)

    def _check_valid(self) -> None:
        if self.valid is None:
            return
        valid = self.valid
        if (
            not isinstance(valid, tuple)
            or len(valid) != 2
            or not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in valid)
            or valid[0] >= valid[1]
        ):
            raise SpecError(
                f"valid must be two ints, low below high (high excluded), got {valid!r}"
            )
        if self.dtype not in _INTEGERS:
            raise SpecError(f"valid is for integer buffers; this one holds {self.dtype}")

    def _check_adopted(self) -> None:
        tensor = self.adopt
        if tensor is None:
            return
        if not isinstance(tensor, torch.Tensor):
            raise SpecError(f"adopt must be a tensor, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise SpecError(f"adopted memory must be a strided tensor, got one of {tensor.layout}")
        if tensor.dtype != self.dtype or tuple(tensor.shape) != self.maximum_shape:
            raise SpecError(
                f"adopted memory is {tuple(tensor.shape)} of {tensor.dtype}; {self} needs "
                f"{self.maximum_shape} of {self.dtype}"
            )
        if not tensor.is_contiguous():
            raise SpecError("adopted memory must be contiguous; adopt its base, or a copy")


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _is_exact(value: bool | int | float, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return isinstance(value, bool) or value in (0, 1)
    if dtype in _INTEGERS:
        info = torch.iinfo(dtype)
        return not isinstance(value, float) and info.min <= int(value) <= info.max
    if dtype.is_floating_point and (isinstance(value, int) or math.isfinite(value)):
        return abs(value) <= torch.finfo(dtype).max
    return True


class Buffer:
    """One static buffer: a name, a declaration and, once something needs it, memory.

    Attributes:
        name: what it is declared as.
        spec: its `BufferSpec`.
        generation: how often a run has written or padded it; leases are judged by it.
    """

    __slots__ = ("_device", "_owner", "_tensor", "_views", "generation", "name", "spec")

    def __init__(self, name: str, spec: BufferSpec, device: torch.device, owner: Buffers) -> None:
        self.name = name
        self.spec = spec
        self.generation = 0
        self._device = device
        self._owner = owner
        self._tensor: torch.Tensor | None = None
        self._views: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def tensor(self) -> torch.Tensor:
        """The whole memory: shape at the maxima. Allocated at first use, and never moved."""
        if self._tensor is None:
            self._owner.check_open()
            self._tensor = self._allocate()
        return self._tensor

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory behind it yet."""
        return self._tensor is not None

    def view(self, sizes: Mapping[str, int]) -> torch.Tensor:
        """The part that a batch or bucket of these sizes uses; the same object each time.

        Args:
            sizes: a size for each of the buffer's dims.
        """
        try:
            shape = shape_at(self.spec.shape, sizes)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            wanted = ", ".join(dim.name for dim in self.spec.dims)
            raise InputError(
                f"a view of buffer {self.name!r} needs sizes by name of dim: {wanted or 'none'}; got {sizes!r}"
            ) from error
        view = self._views.get(shape)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[shape] = self._make_view(shape)
        return view

    def forget(self) -> None:
        """Drop the memory; the next use allocates again, at another address."""
        self._tensor = None
        self._views.clear()

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, {self.spec})"

    def _allocate(self) -> torch.Tensor:
        spec = self.spec
        if spec.adopt is not None:
            adopted = spec.adopt
            return writable(adopted.detach() if adopted.requires_grad else adopted)
        # Outside inference mode, so that callers in and out of it may write the memory.
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty(spec.maximum_shape, dtype=spec.dtype, device=self._device)
            return tensor.fill_(spec.fill)

    def _make_view(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.spec.layout == "packed":
            with torch.inference_mode(False), torch.no_grad():
                return self.tensor.view(-1)[: _product(shape)].view(shape)
        return prefix(self.tensor, shape)


class Buffers:
    """The buffers of one group, by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Buffer] = {}
        self._closed = False

    def declare(self, **specs: BufferSpec) -> Any:
        """Declare buffers; a name declared again alike is the same buffer.

        Returns:
            A namespace with a `Buffer` for each name.

        Raises:
            SpecError: a name is reserved or declared otherwise already, or adopted memory is on another
                device. Nothing is declared then.
        """
        self.check_open()
        for name, spec in specs.items():
            self._check(name, spec)
        self._refuse_shared_memory(specs)
        known = [dim for buffer in self for dim in buffer.spec.dims]
        dims_by_name([*known, *(dim for spec in specs.values() for dim in spec.dims)])
        for name, spec in specs.items():
            self._buffers.setdefault(name, Buffer(name, spec, self._device, self))
        return SimpleNamespace(**{name: self._buffers[name] for name in specs})

    def __getitem__(self, name: str) -> Buffer:
        try:
            return self._buffers[name]
        except KeyError:
            known = ", ".join(self._buffers) or "none"
            raise SpecError(f"no buffer is named {name!r}; declared are: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self._buffers.values())

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes that all buffers take at their maxima, adopted memory aside."""
        return sum(buffer.spec.nbytes for buffer in self if buffer.spec.adopt is None)

    def forget(self) -> None:
        """Drop all memory and keep the declarations."""
        for buffer in self:
            buffer.forget()

    def close(self) -> None:
        """Drop all memory for good."""
        self.forget()
        self._closed = True

    def check_open(self) -> None:
        """Raise a `StateError` if the group is closed."""
        if self._closed:
            raise StateError("the group is closed, and its buffers are gone; make a new GraphGroup")

    def _check(self, name: str, spec: BufferSpec) -> None:
        check_name("buffer", name)
        if not isinstance(spec, BufferSpec):
            raise SpecError(f"buffer {name!r} must be declared by a BufferSpec, got {spec!r}")
        known = self._buffers.get(name)
        if known is not None and known.spec != spec:
            raise SpecError(
                f"buffer {name!r} is declared already, and otherwise: first {known.spec}, now {spec}. "
                f"Share it by declaring it once, or use another name"
            )
        if spec.adopt is not None and not _same_device(spec.adopt.device, self._device):
            raise SpecError(
                f"buffer {name!r} adopts memory on {spec.adopt.device}; the group is on {self._device}"
            )

    def _refuse_shared_memory(self, specs: Mapping[str, BufferSpec]) -> None:
        known = {buffer.name: buffer.spec for buffer in self} | dict(specs)
        adopted = [(n, spec.adopt) for n, spec in known.items() if spec.adopt is not None]
        for (first, left), (second, right) in itertools.combinations(adopted, 2):
            if _overlap(left, right):
                raise SpecError(
                    f"buffers {first!r} and {second!r} adopt the same memory, and each would pad it its own way; "
                    "declare it once, and use it under several names with inputs="
                )


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    begin, other = left.data_ptr(), right.data_ptr()
    return begin < other + right.nbytes and other < begin + left.nbytes


def _same_device(left: torch.device, right: torch.device) -> bool:
    return left.type == right.type and (left.index or 0) == (right.index or 0)
