"""Contents: inputs for a batch where a test gives none; always the same for the same batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from graphkit.buffers import BufferSpec, shape_at
from graphkit.capture.example import default_example
from graphkit.dims import Affine
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import Dispatch
from graphkit.runner.runner import GraphRunner
from graphkit.staging.hostdata import has_numpy, numpy_dtype


def contents_for(
    runner: GraphRunner, dispatch: Dispatch, variation: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch's fed inputs and the rows of its resident buffers, by parameter.

    What the runner's `example=` gives for these sizes is taken as it is. Of the rest, floats are drawn between 0.5 and
    1.5, of both signs in odd variations; bools are mostly True; integers with a `valid` range are drawn from it, each
    once as long as there are enough, and never a pad. Row boundaries spread the tokens evenly over the requests, and
    other integers hold their pad, since nothing says what else they may.
    """
    sizes = dispatch.sizes
    ties = [route.buckets.tied for route in runner.policy.routes if route.buckets.tied]
    values = default_example(runner.binding.buffers, sizes, ties, 0)
    given: dict[str, Any] = {}
    # No bucket is empty, so that no example need know what to do with one.
    if runner.options.example is not None and all(sizes.values()):
        bucket = Bucket(sizes, dispatch.query_len, dispatch.max_query_len, dispatch.variant)
        given = dict(runner.options.example(bucket))
    generator = np.random.default_rng([variation, *sizes.values()])
    for name, buffer in runner.binding.buffers.items():
        if name in given:
            values[name] = given[name]
            continue
        drawn = _drawn(buffer.spec, shape_at(buffer.spec.shape, sizes), generator, variation)
        if drawn is not None:
            values[name] = drawn
    fed = {name: values[name] for name in runner.binding.fed}
    return fed, {name: values[name] for name in runner.binding.resident}


def _drawn(
    spec: BufferSpec, shape: tuple[int, ...], generator: np.random.Generator, variation: int
) -> np.ndarray[Any, Any] | torch.Tensor | None:
    dtype = spec.dtype
    if dtype is torch.bool:
        drawn = generator.random(shape) < 0.75
        if drawn.ndim and drawn.shape[-1]:
            # Not all of a row, or a softmax over it is NaN.
            drawn[..., 0] = True
        return drawn
    if dtype.is_floating_point or dtype.is_complex:
        numbers = generator.uniform(0.5, 1.5, shape)
        if variation % 2:
            numbers *= generator.choice([-1.0, 1.0], shape)
        if has_numpy(dtype):
            return numbers.astype(numpy_dtype(dtype))
        return torch.from_numpy(numbers).to(dtype)
    is_boundary = (
        len(spec.shape) == 1 and isinstance(spec.shape[0], Affine) and spec.shape[0].offset
    )
    if spec.valid is None or is_boundary:
        return None
    low, high = spec.valid
    pads = {pad.value for pad in spec.pad.values() if pad.is_constant}
    # Of a large range the beginning will do.
    choices = [n for n in range(low, min(high, low + 4 * math.prod(shape) + 8)) if n not in pads]
    order = generator.permutation(choices or [low])
    return np.resize(order, shape).astype(numpy_dtype(dtype))
