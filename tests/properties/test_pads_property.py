"""Every way to pad is the one of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphkit.buffers import BufferSpec
from graphkit.dims import Dim
from graphkit.pads import as_fed, continue_, fill_device, host_fills, steps_of, tensor_fills
from graphkit.staging.hostdata import encode, numpy_dtype, tensor_to_numpy
from graphkit.testing import strategies
from tests.properties import model
from tests.properties.bounds import examples

DIMS = (Dim("reqs", 4), Dim("pages", 3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[BufferSpec, dict[str, int], dict[str, int], torch.Tensor]:
    """A declaration, a bucket, a batch that fits, and what the memory holds before."""
    spec = draw(strategies.buffer_specs(DIMS, packed=False))
    bucket = draw(strategies.sizes_of(DIMS, least=1))
    batch = {name: draw(st.integers(0, size)) for name, size in bucket.items()}
    shape = model.shape_of(spec, bucket)
    count = int(np.prod(shape, dtype=int))
    values = draw(st.lists(strategies.small_values(spec.dtype), min_size=count, max_size=count))
    contents = torch.tensor(values, dtype=torch.float64).to(spec.dtype).reshape(shape)
    return spec, bucket, batch, contents


def expected(case: Any, *, fed: bool) -> model.Memory:
    spec, bucket, batch, contents = case
    held = model.elements(contents)
    shape, real = model.shape_of(spec, bucket), model.shape_of(spec, batch)
    return model.padded(held, held, shape, real, spec.pads, spec.dtype, fed=fed)


@examples(150)
@given(case=cases())
def test_numpy_pads_as_the_model_does(case: Any) -> None:
    spec, _, batch, contents = case
    array = tensor_to_numpy(contents.clone()).copy()
    assert array.dtype == numpy_dtype(spec.dtype)
    fills = host_fills(
        array,
        model.shape_of(spec, batch),
        as_fed(spec.pads),
        lambda value: encode(value, spec.dtype),
    )
    for fill in fills:
        fill.run()
    bits = torch.from_numpy(array)
    found = bits if bits.dtype is spec.dtype else bits.view(spec.dtype)
    model.assert_holds(model.elements(found), expected(case, fed=True), str(spec))


@examples(150)
@given(case=cases())
def test_tensors_of_known_sizes_are_padded_as_the_model_does(case: Any, device: str) -> None:
    spec, _, batch, contents = case
    region = contents.to(device)
    pads = as_fed(spec.pads)
    steps = steps_of(region, pads)
    for fill in tensor_fills(region, model.shape_of(spec, batch), pads, steps):
        fill.run()
    model.assert_holds(model.elements(region), expected(case, fed=True), str(spec))


@examples(150)
@given(case=cases(), fed=st.booleans())
def test_the_device_pads_as_the_model_does(case: Any, fed: bool, device: str) -> None:
    spec, _, batch, contents = case
    view = contents.to(device)
    real = [
        torch.tensor(size, dtype=torch.int32, device=device) for size in model.shape_of(spec, batch)
    ]
    fill_device(view, real, as_fed(spec.pads) if fed else spec.pads)
    model.assert_holds(model.elements(view), expected(case, fed=fed), str(spec))


@examples(60)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64]),
    step=st.floats(-10, 10, allow_nan=False),
    last=st.floats(-10, 10, allow_nan=False),
    real=st.integers(0, 3),
)
def test_steps_are_the_same_bits_on_host_and_device(
    dtype: torch.dtype, step: float, last: float, real: int, device: str
) -> None:
    spec = BufferSpec((Dim("rows", 40),), dtype, pad={"rows": continue_(step)})
    array = np.full(40, last, numpy_dtype(dtype))
    for fill in host_fills(array, (real,), spec.pads, lambda value: value):
        fill.run()
    on_host = torch.from_numpy(array)
    by_size = torch.full((40,), last, dtype=dtype, device=device)
    for fill in tensor_fills(by_size, (real,), spec.pads, steps_of(by_size, spec.pads)):
        fill.run()
    by_count = torch.full((40,), last, dtype=dtype, device=device)
    # The default dtype is the caller's business.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        size = torch.tensor(real, dtype=torch.int32, device=device)
        fill_device(by_count, [size], spec.pads)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(by_size.cpu(), on_host)
    assert torch.equal(by_count.cpu(), on_host)
