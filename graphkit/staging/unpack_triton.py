"""The unpacking node as one Triton kernel, for all of a runner's inputs at once.

A table on the device describes each buffer: where it lies, what fills it, and which numbers of the header say how
much of it is real. Each program of the kernel handles one stretch of one buffer, as words of 4 bytes where rows allow
it and as bytes otherwise, so that one kernel serves every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
import triton
import triton.language as tl

from graphkit.buffers import Buffer, Extent
from graphkit.dims import affine
from graphkit.pads import Pad, as_fed
from graphkit.staging.hostdata import encode
from graphkit.staging.layout import Layout

_FIELDS = 20
_BLOCK = 1024
_KEEP, _VALUE, _REPEAT, _PRODUCER = 0, 1, 2, 3
_KINDS = {"keep": _KEEP, "value": _VALUE, "repeat_last": _REPEAT, "by_producer": _PRODUCER}


@triton.jit  # type: ignore[untyped-decorator]
def _stretch(table, header, start, BLOCK: tl.constexpr, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    dst = tl.load(table + 0).to(tl.pointer_type(UNIT))
    src = tl.load(table + 1).to(tl.pointer_type(UNIT))
    total = tl.load(table + 2).to(tl.int32)
    columns = tl.load(table + 3).to(tl.int32)
    units = tl.load(table + 4).to(tl.int32)
    stride = tl.load(table + 5)
    flag = tl.load(table + 6)
    row_dim = tl.load(table + 7)
    column_dim = tl.load(table + 10)
    row_kind = tl.load(table + 13)
    column_kind = tl.load(table + 14)
    row_bits = tl.load(table + 15)
    column_bits = tl.load(table + 16)
    per_element = tl.load(table + 17).to(tl.int32)
    unit_bits = tl.load(table + 18)

    rows = total // (columns * units)
    real_rows = rows
    if row_dim >= 0:
        real_rows = (tl.load(header + row_dim) * tl.load(table + 8) + tl.load(table + 9)).to(
            tl.int32
        )
    real_columns = columns
    if column_dim >= 0:
        real_columns = (
            tl.load(header + column_dim) * tl.load(table + 11) + tl.load(table + 12)
        ).to(tl.int32)
    fed = flag >= 0
    if fed:
        fed = tl.load(header + flag) != 0

    at = start + tl.arange(0, BLOCK)
    inside = at < total
    unit = at % units
    cell = at // units
    column = cell % columns
    row = cell // columns
    below = row >= real_rows
    beside = (column >= real_columns) & (row < real_rows)
    place = row * stride + column * units + unit
    if fed:
        kept = (below & (row_kind == 0)) | (beside & (column_kind == 0))
        moved = tl.load(src + at, mask=inside & (kept == 0), other=0)
        tl.store(dst + place, moved, mask=inside & (kept == 0))
    else:
        repeats = (below & (row_kind == 2)) | (beside & (column_kind == 2))
        fills = (below & (row_kind == 1)) | (beside & (column_kind == 1))
        from_row = tl.where(below, real_rows - 1, row)
        from_column = tl.where(beside, real_columns - 1, column)
        there = (from_row >= 0) & (from_column >= 0)
        last = tl.load(
            dst + from_row * stride + from_column * units + unit,
            mask=inside & repeats & there,
            other=0,
        )
        bits = tl.where(below, row_bits, column_bits)
        value = (bits >> ((unit % per_element) * unit_bits)).to(UNIT)
        tl.store(dst + place, tl.where(repeats, last, value), mask=inside & (repeats | fills))


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(tables, stretches, header, FIELDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    table = tables + tl.load(stretches + 2 * program) * FIELDS
    start = tl.load(stretches + 2 * program + 1).to(tl.int32)
    if tl.load(table + 19) == 4:
        _stretch(table, header, start, BLOCK, tl.int32)
    else:
        _stretch(table, header, start, BLOCK, tl.int8)


@attrs.frozen
class Table:
    """What the kernel is told of one layout; it lives as long as graphs that read it."""

    tables: torch.Tensor
    stretches: torch.Tensor

    def launch(self, header: torch.Tensor) -> None:
        """Launch the kernel on the current stream."""
        grid = (self.stretches.shape[0],)
        _unpack[grid](self.tables, self.stretches, header, FIELDS=_FIELDS, BLOCK=_BLOCK)


def is_supported(buffer: Buffer, *, is_fed: bool) -> bool:
    """Whether the kernel can pad this buffer: dims in its first one or two axes, and pads that are bits."""
    spec = buffer.spec
    pads = spec.pads
    if any(pad is not None for pad in pads[2:]):
        return False
    if len(pads) > 1 and pads[0] is None and pads[1] is not None:
        return False
    kinds = [pad.kind for pad in pads if pad is not None]
    if any(kind not in _KINDS for kind in kinds):
        return False
    if spec.dtype.itemsize > 8:
        return False
    # A repeated row would be read while its own padded columns are being written.
    return not (
        len(kinds) == 2 and kinds[0] == "repeat_last" and kinds[1] in ("value", "repeat_last")
    )


def make_table(
    layout: Layout,
    fed: Mapping[str, Buffer],
    on_device: Mapping[str, Buffer],
    dims: Mapping[str, int],
    device: torch.device,
) -> Table | None:
    """The table for a layout; None if there is nothing to do.

    Args:
        fed: parameter -> buffer, of those that the span carries.
        on_device: parameter -> buffer, of those that are only padded.
        dims: dim -> its place in the header.
    """
    rows: list[list[int]] = []
    for name, buffer in fed.items():
        region = layout.regions[name]
        rows.append(_describe(buffer, layout.views[name], region.tensor, region.flag, dims))
    for name, buffer in on_device.items():
        rows.append(_describe(buffer, layout.views[name], None, -1, dims))
    stretches = [(i, start) for i, row in enumerate(rows) for start in range(0, row[2], _BLOCK)]
    if not stretches:
        return None
    with torch.inference_mode(False), torch.no_grad():
        tables = torch.from_numpy(np.array(rows, dtype=np.uint64).view(np.int64)).to(device)
        starts = torch.from_numpy(np.array(stretches, dtype=np.int64)).to(device)
    return Table(tables, starts)


def _describe(
    buffer: Buffer,
    view: torch.Tensor,
    region: torch.Tensor | None,
    flag: int,
    dims: Mapping[str, int],
) -> list[int]:
    spec = buffer.spec
    pads: list[Pad | None] = [*(spec.pads if region is None else as_fed(spec.pads)), None, None]
    shape: list[Extent] = [*spec.shape, 1, 1]
    rows = view.shape[0] if view.ndim else 1
    columns = view.shape[1] if view.ndim > 1 and pads[1] is not None else 1
    inner = math.prod(view.shape) // max(rows * columns, 1)
    nbytes = inner * spec.dtype.itemsize
    row_bytes = (view.stride(0) if view.ndim else inner) * spec.dtype.itemsize
    word = 4 if nbytes % 4 == 0 and row_bytes % 4 == 0 and view.data_ptr() % 4 == 0 else 1
    units = nbytes // word
    row, column = _axis(shape[0], pads[0], dims), _axis(shape[1], pads[1], dims)
    source = 0 if region is None else region.data_ptr()
    return [
        view.data_ptr(),
        source,
        rows * columns * units,
        columns,
        max(units, 1),
        row_bytes // word,
        flag % 2**64,
        *row[:3],
        *column[:3],
        row[3],
        column[3],
        _bits(pads[0], spec.dtype, word),
        _bits(pads[1], spec.dtype, word),
        max(spec.dtype.itemsize // word, 1),
        8 * word,
        word,
    ]


def _axis(extent: Extent, pad: Pad | None, dims: Mapping[str, int]) -> Sequence[int]:
    """Dim (-1 for none), factor, offset, kind of pad."""
    if isinstance(extent, int) or pad is None:
        return (2**64 - 1, 0, 0, _KEEP)
    form = affine(extent)
    return (dims[form.dim.name], form.factor, form.offset, _KINDS[pad.kind])


def _bits(pad: Pad | None, dtype: torch.dtype, word: int) -> int:
    """The pad's value as bits, repeated to a whole word where an element is smaller."""
    if pad is None or pad.kind != "value":
        return 0
    raw = np.asarray(encode(pad.value, dtype)).tobytes()
    repeated = raw * max(word // len(raw), 1)
    return int.from_bytes(repeated.ljust(8, b"\0"), "little")
