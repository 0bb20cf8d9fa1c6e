"""Resident buffers in tests: written as a producer would, and read back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphkit.buffers import Buffer, shape_at
from graphkit.dispatch.dispatcher import Dispatch
from graphkit.runner.runner import GraphRunner


def write_residents(
    runner: GraphRunner, dispatch: Dispatch, contents: Mapping[str, torch.Tensor]
) -> None:
    """Write the real rows of resident buffers, and the padding that their producer promises.

    Args:
        runner: whose buffers.
        dispatch: of the run that is to read them: a packed buffer's elements lie where its bucket has them.
        contents: parameter -> a tensor of the real shape, of the buffer's dtype, on any device.
    """
    with torch.no_grad():
        for name, tensor in contents.items():
            buffer = runner.binding.resident[name]
            view, shape = _view(buffer, dispatch), shape_at(buffer.spec.shape, dispatch.sizes)
            view[tuple(slice(0, size) for size in shape)].copy_(tensor)
            for axis, pad in enumerate(buffer.spec.pads):
                if pad is not None and pad.kind == "by_producer" and pad.value is not None:
                    beyond = tuple(slice(0, size) for size in shape[:axis])
                    view[(*beyond, slice(shape[axis], None))] = pad.value


def read_residents(runner: GraphRunner, dispatch: Dispatch) -> dict[str, torch.Tensor]:
    """What the real rows of resident buffers hold after that run: copies, by parameter."""
    found = {}
    for name, buffer in runner.binding.resident.items():
        shape = shape_at(buffer.spec.shape, dispatch.sizes)
        view = _view(buffer, dispatch)[tuple(slice(0, size) for size in shape)]
        found[name] = view.detach().clone()
    return found


def _view(buffer: Buffer, dispatch: Dispatch) -> torch.Tensor:
    return buffer.view(dispatch.sizes if dispatch.bucket is None else dispatch.bucket.sizes)
