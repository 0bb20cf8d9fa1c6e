"""The unpacking node: the first thing that a graph does with what a step has moved.

It copies the span's regions into the static buffers, leaving out what the device fed and what a pad keeps,
and pads the buffers that somebody wrote on the device. Sizes and flags come from the header on the device,
since a graph's launch can't be told them.

Where Triton is, it is one kernel (`graphkit.staging.unpack_triton`); what that can't do, and all of it elsewhere, is
done by torch operations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphkit.backends.base import Backend
from graphkit.buffers import Buffer
from graphkit.dims import Dim, affine
from graphkit.pads import as_bits, fill_device, written_mask
from graphkit.staging.layout import Layout

if TYPE_CHECKING:
    from graphkit.staging.unpack_triton import Table


class Unpacker:
    """The unpacking nodes of one runner.

    Args:
        packed: parameter -> buffer, of those that the span carries.
        on_device: parameter -> buffer, of those that are written on the device or copied on their own.
        dims: the runner's dims, in the header's order.
    """

    def __init__(
        self,
        packed: Mapping[str, Buffer],
        on_device: Mapping[str, Buffer],
        dims: Sequence[Dim],
        backend: Backend,
    ) -> None:
        self._device = backend.device
        self._index = {dim.name: i for i, dim in enumerate(dims)}
        padded = {
            name: buffer
            for name, buffer in on_device.items()
            if any(pad is not None and pad.is_written for pad in buffer.spec.pads)
        }
        self.pads_on_device = bool(padded)
        self._kernel: Any = None
        if backend.has_triton and importlib.util.find_spec("triton") is not None:
            from graphkit.staging import unpack_triton

            self._kernel = unpack_triton
        supported = self._kernel.is_supported if self._kernel else _never
        self._packed = {n: b for n, b in packed.items() if not supported(b, is_fed=True)}
        self._padded = {n: b for n, b in padded.items() if not supported(b, is_fed=False)}
        self._by_kernel = {n: b for n, b in packed.items() if n not in self._packed}
        self._padded_by_kernel = {n: b for n, b in padded.items() if n not in self._padded}

    def pads_fed(self, name: str) -> bool:
        """Whether the node pads this parameter too when the device feeds it."""
        return name in self._by_kernel

    def prepare(self, layout: Layout) -> None:
        """Make ahead what the node needs for a layout; not inside a capture."""
        if self._kernel is not None and layout.table is None:
            layout.table = self._kernel.make_table(
                layout, self._by_kernel, self._padded_by_kernel, self._index, self._device
            )

    def unpack(self, layout: Layout, header: torch.Tensor) -> None:
        """Launch the node for one layout; part of the graph.

        Args:
            header: int32 on the device: the real sizes of the dims, then the flags.
        """
        table: Table | None = layout.table
        if table is not None:
            table.launch(header)
        for name, buffer in self._packed.items():
            region = layout.regions[name]
            view, pads = layout.views[name], buffer.spec.pads
            fed = header[region.flag] != 0
            if any(pad is not None and pad.kind == "keep" for pad in pads):
                real = self._real(buffer, header)
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


def _never(buffer: Buffer, *, is_fed: bool) -> bool:
    return False
