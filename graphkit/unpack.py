"""The unpacking node: the first thing that a graph does with what a step has moved.

It copies the span's regions into the static buffers, leaving out what the device fed and what a pad keeps,
and pads the buffers that somebody wrote on the device. Sizes and flags come from the header on the device,
since a graph's launch can't be told them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphkit.backends.base import Backend
from graphkit.buffers import Buffer
from graphkit.dims import Dim, affine
from graphkit.layout import Layout
from graphkit.pads import as_bits, fill_device, written_mask


class Unpacker:
    """Unpacks one runner's layouts by torch operations.

    Args:
        on_device: parameter -> buffer, of those whose padding is done here.
        dims: the runner's dims, in the header's order.
    """

    def __init__(
        self, on_device: Mapping[str, Buffer], dims: Sequence[Dim], backend: Backend
    ) -> None:
        self._backend = backend
        self._index = {dim.name: i for i, dim in enumerate(dims)}
        self._padded = {
            name: buffer
            for name, buffer in on_device.items()
            if any(pad is not None and pad.is_written for pad in buffer.spec.pads)
        }

    @property
    def pads_on_device(self) -> bool:
        """Whether there is a buffer to pad that the host doesn't."""
        return bool(self._padded)

    def unpack(self, layout: Layout, header: torch.Tensor) -> None:
        """Launch the copies and pads for one layout; part of the graph.

        Args:
            header: int32 on the device: the real sizes of the dims, then the flags.
        """
        for name, region in layout.regions.items():
            view, pads = layout.views[name], region.buffer.spec.pads
            fed = header[region.flag] != 0
            if any(pad is not None and pad.kind == "keep" for pad in pads):
                real = self._real(region.buffer, header)
                fed = fed & written_mask(view.shape, real, pads, view.device)
            bits = as_bits(view)
            bits.copy_(torch.where(fed, as_bits(region.tensor), bits))
        for name, buffer in self._padded.items():
            fill_device(layout.views[name], self._real(buffer, header), buffer.spec.pads)

    def _real(self, buffer: Buffer, header: torch.Tensor) -> list[torch.Tensor]:
        """The real size of each axis, 0-d on the device; a fixed axis has no use for its own."""
        real = []
        for extent in buffer.spec.shape:
            if isinstance(extent, int):
                real.append(header[0])
                continue
            form = affine(extent)
            real.append(header[self._index[form.dim.name]] * form.factor + form.offset)
        return real
