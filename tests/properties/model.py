"""Padding and staging in plain Python, element by element: what the library is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graphkit.buffers import BufferSpec
from graphkit.dims import Affine, Dim

Index = tuple[int, ...]
Memory = dict[Index, Any]
"""Elements by their place, as Python numbers."""

ANYTHING: Any = object()
"""An element that nothing is promised about."""

_BITS = {
    torch.uint8: (8, False),
    torch.int16: (16, True),
    torch.int32: (32, True),
    torch.int64: (64, True),
    torch.uint16: (16, False),
    torch.uint32: (32, False),
}


def wrapped(value: Any, dtype: torch.dtype) -> Any:
    """The value as an integer dtype keeps it."""
    if dtype not in _BITS:
        return value
    bits, signed = _BITS[dtype]
    value %= 1 << bits
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def size_at(extent: int | Dim | Affine, sizes: Mapping[str, int]) -> int:
    """Rows of an axis."""
    if isinstance(extent, int):
        return extent
    if isinstance(extent, Dim):
        return sizes[extent.name]
    return extent.factor * sizes[extent.dim.name] + extent.offset


def shape_of(spec: BufferSpec, sizes: Mapping[str, int]) -> Index:
    """The shape at these sizes."""
    return tuple(size_at(extent, sizes) for extent in spec.shape)


def places(shape: Sequence[int]) -> Iterator[Index]:
    """Every index into this shape."""
    return itertools.product(*(range(size) for size in shape))


def padded(
    batch: Memory,
    before: Memory,
    shape: Index,
    real: Index,
    pads: Sequence[Any],
    dtype: torch.dtype,
    *,
    fed: bool,
) -> Memory:
    """What a buffer of the bucket's shape holds, for a batch of shape `real`."""

    def at(index: Index) -> Any:
        axis = next((i for i, place in enumerate(index) if place >= real[i]), None)
        if axis is None:
            return batch[index]
        pad, size = pads[axis], real[axis]
        if pad.kind == "keep" or (pad.kind == "by_producer" and not fed):
            return before[index]
        if pad.kind in ("value", "by_producer"):
            return pad.value
        count = index[axis] - size + (1 if size else 0)
        last: Any = 0
        if size:
            index_of_last = (*index[:axis], size - 1, *index[axis + 1 :])
            later = [i for i in range(axis + 1, len(index)) if index[i] >= real[i]]
            if later and pads[later[0]].kind in ("keep", "by_producer"):
                return ANYTHING
            last = at(index_of_last)
        if last is ANYTHING or pad.kind == "repeat_last":
            return last
        return wrapped(last + count * pad.value, dtype)

    return {index: at(index) for index in places(shape)}


def elements(tensor: torch.Tensor) -> Memory:
    """The elements of a tensor, bools as 0 and 1."""
    tensor = tensor.detach().cpu()
    if tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float64)
    flat = tensor.reshape(-1).tolist()
    return dict(zip(places(tuple(tensor.shape)), flat, strict=True))


def assert_holds(found: Memory, expected: Memory, what: str) -> None:
    """Every element is as expected, where anything is."""
    assert found.keys() == expected.keys(), what
    wrong = {
        index: (found[index], value)
        for index, value in expected.items()
        if value is not ANYTHING and found[index] != value
    }
    assert not wrong, f"{what}: (found, expected) by place: {wrong}"


class Shadow:
    """The whole memory of one static buffer, as it should be."""

    def __init__(self, spec: BufferSpec, tensor: torch.Tensor) -> None:
        self.spec = spec
        self.memory: list[Any] = list(elements(tensor).values())

    def _offset(self, index: Index, shape: Index) -> int:
        strides = shape if self.spec.layout == "packed" else self.spec.maximum_shape
        offset = 0
        for place, size in zip(index, strides, strict=True):
            offset = offset * size + place
        return offset

    def read(self, sizes: Mapping[str, int]) -> Memory:
        """The view at these sizes."""
        shape = shape_of(self.spec, sizes)
        return {index: self.memory[self._offset(index, shape)] for index in places(shape)}

    def write(self, sizes: Mapping[str, int], values: Memory) -> None:
        """Write the view at these sizes."""
        shape = shape_of(self.spec, sizes)
        for index, value in values.items():
            self.memory[self._offset(index, shape)] = value

    def settle(self, tensor: torch.Tensor, what: str) -> None:
        """Compare with the real memory, and learn what nothing was promised about."""
        found = list(elements(tensor).values())
        wrong = {
            offset: (there, expected)
            for offset, (there, expected) in enumerate(zip(found, self.memory, strict=True))
            if expected is not ANYTHING and there != expected
        }
        assert not wrong, f"{what}: (found, expected) by offset: {wrong}"
        self.memory = found
