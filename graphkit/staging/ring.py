"""The ring: slots of host memory that inputs are written to, on their way to the device."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from graphkit.backends.base import Backend, Fence
from graphkit.errors import SpecError, StateError


class Ring:
    """Slots of host memory, reused in turn; a slot is never written while a copy out of it is in flight.

    Recording a fence costs as much as launching a graph, so one fence serves half of the slots, and a ring is full
    when its next half isn't free.

    Args:
        backend: of the device that copies out of the slots.
        nbytes: of each slot.
        depth: number of slots, at least 1.
        full: what `acquire` does where all slots are in flight: "block" or "raise".

    Attributes:
        tensors: the slots: uint8, shape ``(nbytes,)``.
        arrays: the same memory as NumPy arrays.
        owners: per slot, who may find its own padding in it; None if nobody.
    """

    def __init__(
        self,
        backend: Backend,
        nbytes: int,
        depth: int,
        *,
        full: Literal["block", "raise"] = "block",
    ) -> None:
        if depth < 1:
            raise SpecError(f"a ring needs at least one slot, got ring_depth={depth}")
        self.depth = depth
        self._raises = full == "raise"
        self.tensors: list[torch.Tensor] = [
            backend.host_empty(max(nbytes, 1)) for _ in range(depth)
        ]
        self.arrays = [tensor.numpy().view(np.uint8) for tensor in self.tensors]
        self.owners: list[object] = [None] * depth
        block = depth // 2 if depth % 2 == 0 else 1
        fences = [backend.new_fence() for _ in range(depth // block)]
        # A block is entered at its first slot, and left at its last.
        self._entered: list[Fence | None] = [None] * depth
        self._left: list[Fence | None] = [None] * depth
        for number, fence in enumerate(fences):
            self._entered[number * block] = fence
            self._left[number * block + block - 1] = fence
        self._recorded: set[Fence] = set()
        self._next = 0

    def wait(self) -> None:
        """Wait until the next `acquire` neither waits nor raises."""
        fence = self._entered[self._next]
        if fence is not None and fence in self._recorded:
            fence.synchronize()

    def acquire(self) -> int:
        """The slot to write next, free of copies in flight; waits for the device if it must.

        Raises:
            StateError: the copies out of it are in flight, and the ring doesn't block.
        """
        slot = self._next
        fence = self._entered[slot]
        if fence is not None and fence in self._recorded and not fence.query():
            if self._raises:
                raise StateError(
                    f"the ring of {self.depth} slots is full: the device hasn't read what earlier runs staged. Wait "
                    'for a result first, make it deeper with ring_depth=, or let runs wait with ring_full="block"'
                )
            fence.synchronize()
        return slot

    def commit(self) -> None:
        """The acquired slot's copy is queued; the next `acquire` gives the slot after it."""
        slot = self._next
        fence = self._left[slot]
        if fence is not None:
            fence.record()
            self._recorded.add(fence)
        self._next = slot + 1 if slot + 1 < self.depth else 0
