"""Where static buffers and their views lie."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.buffers import Buffers, shape_at
from graphkit.testing import strategies
from tests.properties import model
from tests.properties.bounds import examples

DIMS = (gk.Dim("reqs", 6), gk.Dim("pages", 4))


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte that a tensor touches, and the one after the last."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


@examples(60)
@given(
    specs=st.lists(strategies.buffer_specs(DIMS), min_size=1, max_size=4),
    sizes=st.lists(strategies.sizes_of(DIMS), min_size=1, max_size=5),
)
def test_views_lie_inside_their_buffer_at_its_address(
    specs: list[Any], sizes: list[dict[str, int]], device: str
) -> None:
    buffers = Buffers(torch.device(device))
    buffers.declare(**{f"b{index}": spec for index, spec in enumerate(specs)})
    for buffer in buffers:
        whole = buffer.tensor
        begin, end = extent_of(whole)
        assert whole.shape == buffer.spec.maximum_shape
        assert whole.dtype is buffer.spec.dtype
        assert whole.device.type == device
        assert end - begin == buffer.spec.nbytes
        for at in sizes:
            view = buffer.view(at)
            assert view is buffer.view(dict(at))
            assert tuple(view.shape) == model.shape_of(buffer.spec, at)
            assert tuple(view.shape) == shape_at(buffer.spec.shape, at)
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert view.storage_offset() == 0
            first, last = extent_of(view)
            if view.numel():
                assert begin == first
                assert last <= end
            if buffer.spec.layout == "packed":
                assert view.is_contiguous()
            elif view.numel():
                assert view.stride() == whole.stride()
        assert buffer.tensor is whole
    ranges = sorted(extent_of(b.tensor) for b in buffers if b.tensor.numel())
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert end <= begin


@examples(60)
@given(spec=strategies.buffer_specs(DIMS), inference=st.booleans())
def test_fresh_memory_holds_what_may_be_read(spec: Any, inference: bool, device: str) -> None:
    buffers = Buffers(torch.device(device))
    with torch.inference_mode(inference):
        buffer = buffers.declare(x=spec).x
        whole = buffer.tensor
        view = buffer.view({dim.name: 1 for dim in DIMS})
    assert not whole.is_inference()
    assert not view.is_inference()
    constants = [pad.value for pad in spec.pad.values() if pad.is_constant]
    expected = constants[0] if constants else 0
    assert all(value == expected for value in model.elements(whole).values())


@pytest.mark.parametrize("layout", ["strided", "packed"])
def test_the_same_declaration_is_the_same_memory(layout: Any, device: str) -> None:
    def spec() -> gk.BufferSpec:
        return gk.BufferSpec(DIMS, torch.int32, pad=0, layout=layout)

    buffers = Buffers(torch.device(device))
    first = buffers.declare(x=spec()).x
    assert buffers.declare(x=spec()).x is first
