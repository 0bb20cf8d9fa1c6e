"""Layouts and plans: where the inputs of one bucket, and of one batch in it, lie.

A layout belongs to a set of padded sizes and is made once; a plan belongs to a batch's real sizes in a
layout. Both exist so that a step computes no shape, makes no view and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

from graphkit.buffers import Buffer
from graphkit.pads import Fill


@attrs.frozen
class Region:
    """Where one packed parameter lies in the span, for one layout.

    Attributes:
        offset: bytes from the beginning of the span.
        tensor: the region on the device, of the bucket's shape, contiguous.
        flag: its place in the header, where 1 says that the host fed it.
        steps: what `continue_` adds on the device, by axis; see `graphkit.pads.steps_of`.
    """

    buffer: Buffer
    offset: int
    tensor: torch.Tensor
    flag: int
    steps: Mapping[int, torch.Tensor]


class Layout:
    """The span and the views for one set of padded sizes.

    Attributes:
        sizes: the padded sizes, by dim.
        views: parameter -> device view at these sizes, for all parameters that live in buffers.
        regions: parameter -> where it lies in the span.
        moved: the part of the span that a step moves.
        table: what the unpacking kernel is told of it, once a graph is to be captured.
    """

    __slots__ = ("moved", "regions", "sizes", "table", "views")

    def __init__(
        self,
        sizes: Mapping[str, int],
        views: dict[str, torch.Tensor],
        regions: dict[str, Region],
        moved: torch.Tensor,
    ) -> None:
        self.sizes = sizes
        self.views = views
        self.regions = regions
        self.moved = moved
        self.table: Any = None


class Target(NamedTuple):
    """Where one input goes in a slot.

    Attributes:
        name: the parameter.
        rows: array of the batch's rows.
        dtype: of the array; None where NumPy lacks the buffer's.
        shape: of the rows.
        memory: dtype, address and bytes of the rows as memory, where a contiguous tensor may be copied as it is; None
            where it may not.
    """

    name: str
    rows: np.ndarray[Any, Any]
    dtype: Any
    shape: tuple[int, ...]
    memory: tuple[torch.dtype, int, int] | None


class Slot:
    """What one plan writes in one slot of the ring; made at its first use.

    Attributes:
        targets: where each input goes, in order.
        hosted: parameter -> array of the bucket's rows.
        constant: assignments that pad with values; done again only if another plan has used the slot.
        copied: assignments that pad with what the batch holds, each with what is added afterwards.
        header: the real sizes, then a flag for each packed parameter.
        moved: the part of the slot that a step moves.

    A slot is also what is staged where the host feeds everything; see `Staged`.
    """

    __slots__ = (
        "constant",
        "copied",
        "from_device",
        "header",
        "hosted",
        "index",
        "moved",
        "targets",
    )

    def __init__(
        self,
        index: int,
        targets: Sequence[Target],
        host: dict[str, np.ndarray[Any, Any]],
        fills: Sequence[Fill],
        header: np.ndarray[Any, Any],
        moved: torch.Tensor,
    ) -> None:
        self.index = index
        self.targets = tuple(targets)
        self.hosted = host
        self.from_device: Sequence[tuple[str, torch.Tensor | None]] = ()
        constant = [(f.target, f.source) for f in fills if f.is_constant]
        copied = [(f.target, f.source, f.step) for f in fills if not f.is_constant]
        self.constant = tuple(constant)
        self.copied = tuple(copied)
        self.header = header
        self.moved = moved


class Staged:
    """What `Staging.write` has checked and written, where some inputs come from the device.

    Attributes:
        hosted: parameter -> array of the bucket's rows, of what the host fed.
        from_device: parameter and tensor, of the others; None for what was written in place.
    """

    __slots__ = ("from_device", "hosted", "index", "moved")

    def __init__(
        self,
        slot: Slot,
        hosted: dict[str, np.ndarray[Any, Any]],
        from_device: Sequence[tuple[str, torch.Tensor | None]],
    ) -> None:
        self.index = slot.index
        self.moved = slot.moved
        self.hosted = hosted
        self.from_device = from_device


class Plan:
    """Where the inputs of one batch go: a layout, the real sizes, and per ring slot the arrays.

    Attributes:
        real: the batch's size of every dim, by name.
        shapes: parameter -> shape that a run has to give.
        rows: parameter -> the batch's rows of its buffer on the device.
        device_fills: parameter -> assignments that pad the buffer around rows that came from the device.
        header: what a slot's header holds if the host fed everything.
    """

    __slots__ = ("device_fills", "header", "layout", "real", "rows", "shapes", "slots")

    def __init__(
        self, layout: Layout, real: Mapping[str, int], header: np.ndarray[Any, Any], depth: int
    ) -> None:
        self.layout = layout
        self.real = real
        self.header = header
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.rows: dict[str, torch.Tensor] = {}
        self.device_fills: dict[str, tuple[Fill, ...]] = {}
        self.slots: list[Slot | None] = [None] * depth
