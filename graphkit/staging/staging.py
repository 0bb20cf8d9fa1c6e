"""Staging: how the inputs of a step reach their static buffers.

Host inputs are written by NumPy into one span of pinned memory, padded there, and moved by a single copy;
the first node of the graph unpacks the span into the buffers, and pads the buffers that somebody wrote on
the device (`graphkit.staging.unpack`). The span begins with a header: the batch's real sizes, which those pads and
`Count` read, and a flag for each input that says whether the host fed it in this step.

Inputs on the device are copied straight into their buffers. Buffers of over `PACKED_LIMIT` bytes never go
through the span.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from ctypes import memmove
from typing import Any, Literal

import numpy as np
import torch

from graphkit.backends.base import Backend
from graphkit.buffers import prefix, shape_at
from graphkit.dims import Dim
from graphkit.pads import Fill, as_fed, host_fills, steps_of, tensor_fills
from graphkit.parameters import Binding
from graphkit.staging.hostdata import encode, has_numpy, numpy_dtype
from graphkit.staging.intake import Intake
from graphkit.staging.layout import Layout, Plan, Region, Slot, Staged, Target
from graphkit.staging.ring import Ring
from graphkit.staging.unpack import Unpacker

PACKED_LIMIT = 1 << 20
"""Bytes at the maxima above which a fed buffer is copied on its own."""

ON_HOST: Any = object()
"""Given for an input that was written in place already, in the array of the slot."""
ON_DEVICE: Any = object()
"""Given for an input that was written in place already, in the plan's rows on the device."""

_ALIGNMENT = 16
MAX_PLANS = 4096
"""Layouts, plans and views that are kept; a serving loop's sizes are fewer, and others are made anew."""


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class Staging:
    """The inputs of one runner: span, ring, layouts and the unpacking node."""

    def __init__(
        self,
        runner: str,
        backend: Backend,
        binding: Binding,
        dims: Sequence[Dim],
        *,
        ring_depth: int,
        ring_full: Literal["block", "raise"],
        checked: bool,
        writes_host: bool,
    ) -> None:
        self._backend = backend
        self._binding = binding
        self._dims = tuple(dims)
        self._depth = ring_depth
        self._full = ring_full
        self._checked = checked
        self._writes_host = writes_host
        self._intake = Intake(runner, binding, backend.device)
        self._packed = {n: b for n, b in binding.fed.items() if b.spec.nbytes <= PACKED_LIMIT}
        self._direct = {n: b for n, b in binding.fed.items() if n not in self._packed}
        self._flags = {name: len(self._dims) + i for i, name in enumerate(self._packed)}
        self._header_nbytes = _aligned(4 * (len(self._dims) + len(self._packed)))
        self.span_nbytes = self._header_nbytes + sum(
            _aligned(buffer.spec.nbytes) for buffer in self._packed.values()
        )
        self._unpacker = Unpacker(
            self._packed, binding.resident | self._direct, self._dims, backend
        )
        self._needs_header = bool(binding.counts) or self._unpacker.pads_on_device
        self._span: torch.Tensor | None = None
        self._ring: Ring | None = None
        self._moved_real: Mapping[str, int] | None = None
        self._layouts: dict[tuple[int, ...], Layout] = {}

    # -- memory -----------------------------------------------------------------------------------

    @property
    def host_nbytes(self) -> int:
        """Bytes of pinned memory that the ring takes."""
        return self.span_nbytes * self._depth

    def forget(self) -> None:
        """Drop the memory and every view of it."""
        self._span = None
        self._ring = None
        self._moved_real = None
        self._layouts.clear()

    def settle(self) -> None:
        """Wait until the next step has a slot to write."""
        if self._ring is not None:
            self._ring.wait()

    @property
    def span(self) -> torch.Tensor:
        """The span on the device: uint8, shape ``(span_nbytes,)``."""
        if self._span is None:
            with torch.inference_mode(False), torch.no_grad():
                self._span = torch.zeros(
                    max(self.span_nbytes, 1), dtype=torch.uint8, device=self._backend.device
                )
        return self._span

    @property
    def ring(self) -> Ring:
        """The slots of host memory."""
        if self._ring is None:
            with torch.inference_mode(False), torch.no_grad():
                self._ring = Ring(self._backend, self.span_nbytes, self._depth, full=self._full)
        return self._ring

    @property
    def header(self) -> torch.Tensor:
        """The header on the device: int32, real sizes and flags."""
        return self._at(0, (self._header_nbytes // 4,), torch.int32)

    def _at(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            nbytes = math.prod(shape) * dtype.itemsize
            return self.span[offset : offset + nbytes].view(dtype).view(shape)

    # -- layouts and plans ------------------------------------------------------------------------

    def layout(self, sizes: Mapping[str, int]) -> Layout:
        """The layout for these padded sizes; made once."""
        key = tuple([sizes[dim.name] for dim in self._dims])
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MAX_PLANS:
                self._layouts.clear()
            layout = self._layouts[key] = self._make_layout(sizes)
        return layout

    def _make_layout(self, sizes: Mapping[str, int]) -> Layout:
        views = {name: buffer.view(sizes) for name, buffer in self._binding.buffers.items()}
        names = [dim.name for dim in self._dims]
        for name, dim in self._binding.counts.items():
            views[name] = self._at(4 * names.index(dim.name), (), torch.int32)
        regions: dict[str, Region] = {}
        offset = self._header_nbytes
        for name, buffer in self._packed.items():
            shape = shape_at(buffer.spec.shape, sizes)
            tensor = self._at(offset, shape, buffer.spec.dtype)
            steps = steps_of(views[name], buffer.spec.pads)
            regions[name] = Region(buffer, offset, tensor, self._flags[name], steps)
            offset = _aligned(offset + tensor.nbytes)
        return Layout(sizes, views, regions, self._at(0, (offset,), torch.uint8))

    def plan(self, layout: Layout, real: Mapping[str, int]) -> Plan:
        """Where a batch of these real sizes goes in `layout`."""
        header = np.array([*real.values(), *(1 for _ in self._packed)], dtype=np.int32)
        plan = Plan(layout, real, header, self._depth)
        for name, buffer in self._binding.fed.items():
            shape = shape_at(buffer.spec.shape, real)
            view = layout.views[name]
            plan.shapes[name] = shape
            plan.rows[name] = prefix(view, shape)
            pads = as_fed(buffer.spec.pads)
            if name in self._packed and not self._unpacker.pads_fed(name):
                steps = layout.regions[name].steps
                plan.device_fills[name] = tensor_fills(view, shape, pads, steps)
            elif name in self._direct and pads != buffer.spec.pads:
                # The node leaves to producers what is theirs to pad; of this one it is staging.
                own = [
                    p if p is not q else None for p, q in zip(pads, buffer.spec.pads, strict=True)
                ]
                plan.device_fills[name] = tensor_fills(view, shape, own, {})
        return plan

    def open_slot(self, plan: Plan) -> Slot:
        """The slot that the next `write` of this plan fills."""
        index = self.ring.acquire()
        slot = plan.slots[index] or self._make_slot(plan, index)
        if self.ring.owners[index] is not slot:
            # What is written from here on may be given up, by a wrong input or a stage that is never run.
            self.ring.owners[index] = None
        return slot

    def _make_slot(self, plan: Plan, index: int) -> Slot:
        array, tensor = self.ring.arrays[index], self.ring.tensors[index]
        targets, host = [], {}
        fills: list[Fill] = []
        for name, region in plan.layout.regions.items():
            spec = region.buffer.spec
            flat = array[region.offset : region.offset + region.tensor.nbytes]
            padded = flat.view(numpy_dtype(spec.dtype)).reshape(tuple(region.tensor.shape))
            cuts: list[Any] = [slice(0, size) for size in plan.shapes[name]]
            rows = padded[(*cuts, ...)]
            # Bits that stand for a type that NumPy lacks are nobody's own dtype.
            dtype = rows.dtype if has_numpy(spec.dtype) else None
            targets.append(Target(name, rows, dtype, rows.shape, _memory(rows, spec.dtype)))
            host[name] = padded
            fills.extend(
                host_fills(
                    padded,
                    rows.shape,
                    as_fed(spec.pads),
                    functools.partial(encode, dtype=spec.dtype),
                )
            )
        header = array[: 4 * plan.header.size].view(np.int32)
        slot = Slot(index, targets, host, fills, header, tensor[: plan.layout.moved.nbytes])
        plan.slots[index] = slot
        return slot

    # -- a step -----------------------------------------------------------------------------------

    def write(self, plan: Plan, values: Mapping[str, Any]) -> Slot | Staged:
        """Check every input, and write and pad the host ones in the ring's next slot.

        No static buffer is touched yet.

        Raises:
            InputError: an input is missing, unknown, or of the wrong shape, dtype or device.
        """
        ring = self._ring or self.ring
        index = ring.acquire()
        slot = plan.slots[index] or self._make_slot(plan, index)
        owners = ring.owners
        is_new = owners[index] is not slot
        if is_new:
            # What is written from here on is given up if an input is wrong.
            owners[index] = None
        others: list[tuple[str, torch.Tensor | None]] | None = None
        for name, target, dtype, shape, memory in slot.targets:
            value: Any = values.get(name)
            kind = type(value)
            array = value
            if kind is torch.Tensor and value.is_cpu:
                # What neither way can show as it is, as bfloat16 or a sparse tensor, goes the way below.
                try:
                    # To show a tensor as an array costs three times its copy.
                    if memory is not None and value.dtype is memory[0] and value.shape == shape:
                        address = value.data_ptr() if value.is_contiguous() else 0
                        if address:
                            memmove(memory[1], address, memory[2])
                            continue
                    array = value.numpy()
                    kind = np.ndarray
                except (TypeError, RuntimeError):
                    pass
            if kind is np.ndarray and array.dtype is dtype and array.shape == shape:
                target[...] = array
            elif value is ON_DEVICE:
                others = [*(others or ()), (name, None)]
            elif value is not ON_HOST:
                taken = self._intake.take(name, value, shape, plan.real)
                if isinstance(taken, torch.Tensor):
                    others = [*(others or ()), (name, taken)]
                else:
                    target[...] = taken
        if self._direct:
            others = [*(others or ()), *self._take_direct(plan, values)]
        if len(values) != len(self._binding.fed):
            self._intake.refuse_unknown(values)
        if self._checked:
            self._check_valid(slot, others)
        # Constant padding, and the header, are still there if this plan was the slot's last user.
        if is_new:
            slot.header[...] = plan.header
            for target, source in slot.constant:
                target[...] = source
            owners[index] = None if self._writes_host else slot
        for target, source, step in slot.copied:
            target[...] = source
            if step is not None:
                target += step
        if others is None:
            return slot
        return self._mark_device(slot, others)

    def _mark_device(self, slot: Slot, others: Sequence[tuple[str, torch.Tensor | None]]) -> Staged:
        """Say in the header which inputs the host hasn't fed."""
        hosted = dict(slot.hosted)
        for name, _ in others:
            if hosted.pop(name, None) is not None:
                slot.header[self._flags[name]] = 0
                self.ring.owners[slot.index] = None
        return Staged(slot, hosted, others)

    def _take_direct(
        self, plan: Plan, values: Mapping[str, Any]
    ) -> list[tuple[str, torch.Tensor | None]]:
        taken: list[tuple[str, torch.Tensor | None]] = []
        for name in self._direct:
            value = values.get(name)
            if value is ON_DEVICE:
                taken.append((name, None))
                continue
            array = self._intake.take(name, value, plan.shapes[name], plan.real)
            if self._checked and isinstance(array, np.ndarray):
                self._intake.check_valid(name, array)
            taken.append((name, self._intake.as_tensor(name, array)))
        return taken

    def _check_valid(
        self, slot: Slot, others: Sequence[tuple[str, torch.Tensor | None]] | None
    ) -> None:
        elsewhere = {name for name, _ in others or ()}
        for target in slot.targets:
            if target.name not in elsewhere:
                self._intake.check_valid(target.name, target.rows)

    @property
    def has_span(self) -> bool:
        """Whether there are inputs that the span carries."""
        return bool(self._packed)

    def move(self, plan: Plan, staged: Slot | Staged) -> None:
        """Queue the copies of what `write` staged on the current stream."""
        if self._packed or (self._needs_header and self._moved_real != plan.real):
            plan.layout.moved.copy_(staged.moved, non_blocking=True)
            self._moved_real = plan.real
            self.ring.commit()
        if staged.from_device:
            self.move_from_device(plan, staged)

    def move_from_device(self, plan: Plan, staged: Slot | Staged) -> None:
        """Queue the copies of what the device feeds, each straight into its buffer; those of one dtype at once."""
        copies: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for name, tensor in staged.from_device:
            rows = plan.rows[name]
            if tensor is not None and not _is_same(tensor, rows):
                targets, sources = copies.setdefault(rows.dtype, ([], []))
                targets.append(rows)
                sources.append(tensor)
        for targets, sources in copies.values():
            if len(targets) == 1:
                targets[0].copy_(sources[0])
            else:
                torch._foreach_copy_(targets, sources)
        for name, _ in staged.from_device:
            for fill in plan.device_fills.get(name, ()):
                fill.run()

    def unpack(self, layout: Layout) -> None:
        """Launch what moves the span into the buffers and pads what was written on the device.

        The real sizes are read on the device, so that this can be captured.
        """
        self._unpacker.unpack(layout, self.header)

    def prepare_unpack(self, layout: Layout) -> None:
        """Make ahead what `unpack` needs; not inside a capture."""
        self._unpacker.prepare(layout)

    def unpack_exact(self, layout: Layout, staged: Slot | Staged) -> None:
        """Move the span into the buffers where the layout is the batch's own size, and nothing is padded."""
        for name in staged.hosted:
            layout.views[name].copy_(layout.regions[name].tensor)


def _memory(rows: np.ndarray[Any, Any], dtype: torch.dtype) -> tuple[torch.dtype, int, int] | None:
    # Only of integers: a float tensor may stand for the negative, or the conjugate, of its memory.
    if dtype.is_floating_point or dtype.is_complex or not rows.flags.c_contiguous:
        return None
    return dtype, rows.ctypes.data, rows.nbytes


def _is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_conj() or left.is_neg():
        return False
    return left.data_ptr() == right.data_ptr() and left.stride() == right.stride()
