"""Example batches: what buffers hold during warm-up and capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphkit.buffers import Buffer, shape_at
from graphkit.dims import Affine
from graphkit.staging.hostdata import has_numpy, numpy_dtype


def default_example(
    buffers: Mapping[str, Buffer],
    sizes: Mapping[str, int],
    ties: Sequence[tuple[str, str]],
    variation: int = 0,
) -> dict[str, Any]:
    """A consistent batch that fills a bucket: every element a value that padding may hold.

    Row boundaries (integers of shape ``(reqs + 1,)``) spread the tokens evenly over the requests.
    Everything else holds the buffer's pad, which is safe to use as an index; a second variation moves
    the floats, so that two captures differ in their contents.

    Args:
        buffers: parameter -> buffer.
        sizes: the bucket's sizes.
        ties: pairs (requests, tokens) of dims.
    """
    return {name: _values(buffer, sizes, dict(ties), variation) for name, buffer in buffers.items()}


def _values(
    buffer: Buffer, sizes: Mapping[str, int], ties: Mapping[str, str], variation: int
) -> Any:
    spec = buffer.spec
    shape = shape_at(spec.shape, sizes)
    if not has_numpy(spec.dtype):
        value = torch.full((), float(spec.fill) + variation, dtype=spec.dtype, device="cpu")
        # One element for all: a large resident buffer is filled on the device.
        return value.expand(shape)
    values = np.full(shape, spec.fill, numpy_dtype(spec.dtype))
    boundaries = len(spec.shape) == 1 and isinstance(spec.shape[0], Affine)
    if boundaries and spec.shape[0].offset == 1 and values.dtype.kind in "iu":  # type: ignore[union-attr]
        requests = spec.shape[0].dim.name  # type: ignore[union-attr]
        total = sizes.get(ties.get(requests, ""), sizes[requests])
        spread = np.arange(shape[0]) * total // max(shape[0] - 1, 1)
        if spec.valid is None or (spread.min() >= spec.valid[0] and spread.max() < spec.valid[1]):
            values[...] = spread
    elif values.dtype.kind == "f" and variation:
        noise = np.random.default_rng(variation).uniform(0.5, 1.5, shape)
        values += noise.astype(values.dtype)
    return values
