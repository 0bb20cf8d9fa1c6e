"""The ring: slots of host memory that inputs are written to, on their way to the device."""

from __future__ import annotations

from graphkit.backends.base import Backend


class Ring:
    """Slots of host memory, reused in turn; a slot is never written while a copy out of it is in flight.

    Recording a fence costs as much as launching a graph, so one fence serves half of the slots.
    """

    def __init__(self, backend: Backend, nbytes: int, depth: int) -> None:
        self.depth = depth
        self.tensors = [backend.host_empty(max(nbytes, 1)) for _ in range(depth)]
        self.arrays = [tensor.numpy() for tensor in self.tensors]
        self.owners: list[object] = [None] * depth
        self._per_fence = depth // 2 if depth % 2 == 0 else 1
        self._fences = [backend.new_fence() for _ in range(depth // self._per_fence)]
        self._recorded = [False] * len(self._fences)
        self._next = 0

    def acquire(self) -> int:
        """The slot to write next, free of copies in flight; waits for the device if it must."""
        slot = self._next
        if slot % self._per_fence == 0 and self._recorded[slot // self._per_fence]:
            fence = self._fences[slot // self._per_fence]
            if fence is not None and not fence.query():
                fence.synchronize()
        return slot

    def commit(self) -> None:
        """The acquired slot's copy is queued; the next `acquire` gives the slot after it."""
        slot = self._next
        block, last = divmod(slot, self._per_fence)
        if last == self._per_fence - 1:
            fence = self._fences[block]
            if fence is not None:
                fence.record()
                self._recorded[block] = True
        self._next = (slot + 1) % self.depth
