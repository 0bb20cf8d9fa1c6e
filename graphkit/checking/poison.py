"""Poison: other contents for padding, to see whether anything depends on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from graphkit.buffers import Buffer, shape_at
from graphkit.pads import Fill, Pad, as_bits, tensor_fills

LARGE = 1e4
"""The magnitude of floats, where the dtype's squares hold it."""


@attrs.frozen
class Poison:
    """What one buffer's padding is overwritten with, in one of two variants.

    Attributes:
        buffer: its name.
        value: what padded elements become, in words.
        pad: what they should hold, in words.
        is_index: whether they may be used as an index.
    """

    buffer: str
    value: str
    pad: str
    is_index: bool
    fills: tuple[Fill, ...] = attrs.field(eq=False, repr=False)

    def apply(self) -> None:
        """Write it."""
        for fill in self.fills:
            fill.run()


def poisons(
    buffers: Mapping[str, Buffer],
    views: Mapping[str, torch.Tensor],
    real: Mapping[str, int],
) -> tuple[list[Poison], list[Poison]]:
    """Two poisons for each buffer that has padding at these sizes on which nothing may depend.

    Floats become large and finite, of either sign, and bools both values. Integers may be used as an index, alone or
    added to each other, so that the padding of all of them becomes one and the same row of the batch, its first or its
    last: where those lead, padding may lead. Left alone are pads that the function may rely on (`relied`), that follow
    from the batch (`repeat_last`, `continue_`), and that the producer owes (`by_producer`).

    Args:
        buffers: parameter -> buffer.
        views: parameter -> device view at the bucket's sizes.
        real: the batch's sizes.
    """
    first: list[Poison] = []
    second: list[Poison] = []
    distinct = {buffer.name: parameter for parameter, buffer in buffers.items()}
    for name, parameter in distinct.items():
        spec, view = buffers[parameter].spec, views[parameter]
        shape = shape_at(spec.shape, real)
        loose = [pad if pad is not None and _may_change(pad) else None for pad in spec.pads]
        is_index = not (spec.dtype.is_floating_point or spec.dtype.is_complex)
        is_index &= spec.dtype is not torch.bool
        for index, chosen in enumerate((first, second)):
            if is_index:
                value = f"what the batch's {'last' if index else 'first'} row holds"
                fills = _repeated(view, shape, loose, last=bool(index))
            else:
                constant = _values(spec.dtype)[index]
                value = f"{constant:g}" if isinstance(constant, float) else str(constant)
                pads = [Pad("value", constant) if pad is not None else None for pad in loose]
                fills = tensor_fills(view, shape, pads, {})
            if fills:
                held = ", ".join(dict.fromkeys(str(pad) for pad in loose if pad is not None))
                chosen.append(Poison(name, value, held, is_index, fills))
    return first, second


def ends(
    buffers: Mapping[str, Buffer],
    views: Mapping[str, torch.Tensor],
    real: Mapping[str, int],
) -> list[Poison]:
    """For each buffer of indices its padding at either end of its `valid` range.

    A range may be wider than what a bucket's own tensors hold, so that a function given these may raise: they are for
    where that does no harm.
    """
    found: list[Poison] = []
    distinct = {buffer.name: parameter for parameter, buffer in buffers.items()}
    for name, parameter in distinct.items():
        spec, view = buffers[parameter].spec, views[parameter]
        if spec.valid is None:
            continue
        shape = shape_at(spec.shape, real)
        loose = [pad if pad is not None and _may_change(pad) else None for pad in spec.pads]
        held = ", ".join(dict.fromkeys(str(pad) for pad in loose if pad is not None))
        for value in (spec.valid[0], spec.valid[1] - 1):
            pads = [Pad("value", value) if pad is not None else None for pad in loose]
            fills = tensor_fills(view, shape, pads, {})
            if fills:
                found.append(Poison(name, str(value), held, True, fills))
    return found


def _may_change(pad: Pad) -> bool:
    return pad.kind == "keep" or (pad.kind == "value" and not pad.relied)


def _repeated(
    region: torch.Tensor, real: Sequence[int], loose: Sequence[Pad | None], *, last: bool
) -> tuple[Fill, ...]:
    """Assignments that make each padded row one of the batch's."""
    region = as_bits(region)
    fills: list[Fill] = []
    for axis in reversed(range(region.ndim)):
        size = real[axis]
        if loose[axis] is None or not 0 < size < region.shape[axis]:
            continue
        # Earlier axes are padded afterwards and win, as in `graphkit.pads.tensor_fills`.
        base = region[tuple(slice(0, real[i]) for i in range(axis))]
        row = base.narrow(axis, size - 1 if last else 0, 1)
        fills.append(Fill(base.narrow(axis, size, region.shape[axis] - size), row))
    return tuple(fills)


def _values(dtype: torch.dtype) -> tuple[bool | float, bool | float]:
    if dtype is torch.bool:
        return (False, True)
    part = torch.empty(0, dtype=dtype, device="cpu").real.dtype if dtype.is_complex else dtype
    large = float(min(LARGE, math.floor(math.sqrt(torch.finfo(part).max) / 4)))
    return (large, -large)
