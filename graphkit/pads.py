"""Pads: what a buffer holds between the batch and the bucket.

Where two pads meet (the corner of a two-dim buffer) the pad of the first axis wins. The same pad is
written by NumPy into host staging (`fill_host`) and by torch operations inside a graph, where the real
sizes are only known on the device (`fill_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch

from graphkit.errors import SpecError
from graphkit.staging.hostdata import encode as encode_value

Kind = Literal["value", "repeat_last", "continue", "keep", "by_producer"]


@attrs.frozen
class Pad:
    """One way to pad an axis. Made by the functions of this module, not by hand."""

    kind: Kind
    value: bool | int | float | None = None
    relied: bool = False

    def __str__(self) -> str:
        if self.kind == "value":
            return f"relied({self.value!r})" if self.relied else repr(self.value)
        if self.kind == "continue":
            return f"continue_({self.value!r})"
        if self.kind == "by_producer":
            return f"by_producer({self.value!r})"
        return self.kind

    @property
    def is_constant(self) -> bool:
        """Whether every padded element holds the same known value."""
        return self.kind in ("value", "by_producer")

    @property
    def is_written(self) -> bool:
        """Whether graphkit writes it."""
        return self.kind not in ("keep", "by_producer")


def _scalar(value: Any, what: str) -> bool | int | float:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return value
    raise SpecError(
        f"{what} must be a bool, an int or a float, got {value!r} of type {type(value).__name__}"
    )


repeat_last = Pad("repeat_last")
"""Each padded row repeats the last real one (0 where the batch is empty)."""

keep = Pad("keep")
"""Padded elements keep what they held; nothing may depend on them."""


def relied(value: Any) -> Pad:
    """A pad value that the function's result depends on, as a sum over rows depends on 0."""
    return Pad("value", _scalar(value, "a relied pad"), relied=True)


def continue_(step: Any) -> Pad:
    """Padded rows go on from the last real row in steps of `step` (from 0 where the batch is empty)."""
    return Pad("continue", _scalar(step, "the step of continue_"))


def by_producer(value: Any) -> Pad:
    """Whoever writes the buffer also pads it with `value`; checked mode verifies that it did."""
    return Pad("by_producer", _scalar(value, "a by_producer pad"))


def as_fed(pads: Sequence[Pad | None]) -> tuple[Pad | None, ...]:
    """The pads of a buffer that staging writes: there it is staging that pads for the producer."""
    return tuple(
        Pad("value", pad.value) if pad is not None and pad.kind == "by_producer" else pad
        for pad in pads
    )


def as_pad(value: Any) -> Pad:
    """A `Pad` as it is, or a plain value as the pad that fills with it."""
    return value if isinstance(value, Pad) else Pad("value", _scalar(value, "a pad"))


def _at(ndim: int, axis: int, index: slice) -> tuple[slice, ...]:
    return tuple(index if i == axis else slice(None) for i in range(ndim))


def _along(vector: Any, ndim: int, axis: int) -> Any:
    return vector.reshape([-1 if i == axis else 1 for i in range(ndim)])


@attrs.frozen
class Fill:
    """One assignment that pads: ``target[...] = source``, then ``target += step`` if there is one.

    Attributes:
        target: a view of an array or tensor.
        source: a value, or a view of the last real row.
        is_constant: whether the source doesn't depend on the batch's contents.
    """

    target: Any
    source: Any
    step: Any = None
    is_constant: bool = True

    def run(self) -> None:
        """Do it."""
        target = self.target
        target[...] = self.source
        if self.step is not None:
            target += self.step


def host_fills(
    region: np.ndarray[Any, Any],
    real: Sequence[int],
    pads: Sequence[Pad | None],
    encode: Callable[[Any], Any],
) -> tuple[Fill, ...]:
    """The assignments, in order, that pad `region` (bucket shape) around a batch of shape `real`.

    They are made once and run on each step: a source is a constant, or a view of the last real row.

    Args:
        encode: turns a pad value into what the array stores (bfloat16 has no NumPy dtype).
    """
    fills: list[Fill] = []
    for axis in reversed(range(region.ndim)):
        pad, size = pads[axis], real[axis]
        if pad is None or not pad.is_written or size >= region.shape[axis]:
            continue
        # Earlier axes are padded afterwards and win, so only their real part matters here.
        base = region[tuple(slice(0, real[i]) for i in range(axis))]
        target = base[_at(region.ndim, axis, slice(size, None))]
        if pad.kind == "value":
            fills.append(Fill(target, encode(pad.value)))
            continue
        step = None
        if pad.kind == "continue":
            first = 1 if size else 0
            counted = np.arange(first, region.shape[axis] - size + first) * (pad.value or 0)
            step = _along(counted, region.ndim, axis).astype(region.dtype)
        last = base[_at(region.ndim, axis, slice(size - 1, size))] if size else encode(0)
        fills.append(Fill(target, last, step, is_constant=False))
    return tuple(fills)


# torch has few operations for these, and for the bits of another type all that padding needs.
_AS_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _bits_dtype(dtype: torch.dtype) -> torch.dtype | None:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.uint8
    return _AS_BITS.get(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of a type that torch can pad: its bits where it can't pad the type itself."""
    dtype = _bits_dtype(tensor.dtype)
    return tensor if dtype is None else tensor.view(dtype)


def _value_as_bits(value: Any, dtype: torch.dtype) -> Any:
    bits = _bits_dtype(dtype)
    if bits is None:
        return value
    encoded = np.asarray(encode_value(value, dtype))
    return int(encoded.view(str(bits).removeprefix("torch.")))


def _steps(counted: torch.Tensor, step: Any, dtype: torch.dtype) -> torch.Tensor:
    # A float's product must not be rounded to the default dtype on its way.
    wide = counted.to(torch.float64) if isinstance(step, float) else counted
    made: torch.Tensor = (wide * step).to(dtype)
    return made


def steps_of(region: torch.Tensor, pads: Sequence[Pad | None]) -> dict[int, torch.Tensor]:
    """For each axis that counts on: 0, 1, 2, ... steps; what `tensor_fills` takes its steps from.

    Made ahead, since a run allocates nothing.
    """
    bits = as_bits(region)
    steps = {}
    for axis, pad in enumerate(pads):
        if pad is not None and pad.kind == "continue":
            counted = torch.arange(region.shape[axis], device=region.device, dtype=torch.int64)
            steps[axis] = _along(_steps(counted, pad.value, bits.dtype), region.ndim, axis)
    return steps


def tensor_fills(
    region: torch.Tensor,
    real: Sequence[int],
    pads: Sequence[Pad | None],
    steps: Mapping[int, torch.Tensor],
) -> tuple[Fill, ...]:
    """`host_fills` for a tensor, where the real sizes are known on the host but the data is on the device.

    Args:
        steps: `steps_of` the same region and pads.
    """
    dtype, region = region.dtype, as_bits(region)
    fills: list[Fill] = []
    for axis in reversed(range(region.ndim)):
        pad, size = pads[axis], real[axis]
        if pad is None or not pad.is_written or size >= region.shape[axis]:
            continue
        base = region[tuple(slice(0, real[i]) for i in range(axis))]
        target = base[_at(region.ndim, axis, slice(size, None))]
        if pad.kind == "value":
            fills.append(Fill(target, _value_as_bits(pad.value, dtype)))
            continue
        step = None
        if pad.kind == "continue":
            step = steps[axis].narrow(axis, 1 if size else 0, region.shape[axis] - size)
        last = base[_at(region.ndim, axis, slice(size - 1, size))] if size else 0
        fills.append(Fill(target, last, step, is_constant=False))
    return tuple(fills)


def fill_device(
    view: torch.Tensor, real: Sequence[torch.Tensor], pads: Sequence[Pad | None]
) -> None:
    """Pad `view` (bucket shape) around a batch whose sizes are 0-d tensors on the device.

    Launches torch operations only, without a sync, so that it can be captured.
    """
    dtype, view = view.dtype, as_bits(view)
    for axis in reversed(range(view.ndim)):
        pad, size = pads[axis], real[axis]
        if pad is None or not pad.is_written:
            continue
        index = torch.arange(view.shape[axis], device=view.device, dtype=torch.int64)
        beyond = _along(index >= size, view.ndim, axis)
        for earlier in range(axis):
            # An earlier axis wins, also by leaving its padded elements alone.
            other = pads[earlier]
            if other is not None and not other.is_written:
                rows = torch.arange(view.shape[earlier], device=view.device, dtype=torch.int64)
                beyond = beyond & _along(rows < real[earlier], view.ndim, earlier)
        if pad.kind == "value":
            if view.dtype is dtype:
                view.masked_fill_(beyond, pad.value)  # type: ignore[arg-type]
            else:
                # Made on the device, by an operation that may be captured.
                filler = torch.full((), pad.value, dtype=dtype, device=view.device)  # type: ignore[arg-type]
                view.copy_(torch.where(beyond, as_bits(filler), view))
            continue
        last = torch.clamp(torch.minimum(index, size - 1), min=0)
        filled = view.index_select(axis, last).masked_fill_(size <= 0, 0)
        if pad.kind == "continue":
            steps = _steps(index - size + (size > 0), pad.value, view.dtype)
            filled = filled + _along(steps, view.ndim, axis)
        view.copy_(torch.where(beyond, filled, view))


def written_mask(
    shape: Sequence[int],
    real: Sequence[torch.Tensor],
    pads: Sequence[Pad | None],
    device: torch.device,
) -> torch.Tensor:
    """Where staging holds something to move: all but the elements whose pad is `keep`.

    Returns:
        A bool tensor that broadcasts to `shape`.
    """
    written: torch.Tensor = torch.ones((), dtype=torch.bool, device=device)
    for axis in reversed(range(len(shape))):
        pad = pads[axis]
        if pad is None:
            continue
        index = torch.arange(shape[axis], device=device, dtype=torch.int64)
        beyond = _along(index >= real[axis], len(shape), axis)
        written = written & ~beyond if pad.kind == "keep" else written | beyond
    return written
