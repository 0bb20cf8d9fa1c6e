"""A ring whose slots the device gives back itself, by a number that it writes into host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from graphkit.backends.base import Backend
from graphkit.errors import StateError
from graphkit.staging.ring import Ring, full_message

_MASK, _HALF = 0x7FFFFFFF, 0x40000000
_PATIENCE = 0.1
"""Seconds for which a slot is waited for by looking; then the device is waited for."""


class ReportedRing(Ring):
    """Every step has a number, which travels with its inputs. Where they are unpacked, the device writes it to `cell`.

    So it costs a look at memory to know which slots are free, where a fence costs as much as a launch to record. And a
    slot may be taken again as soon as its step has begun: a graph that reads it needn't be pointed elsewhere.

    Args:
        drain: waits for all that was launched.

    Attributes:
        cell: int32 on the host, shape ``(1,)``: the number of the latest step that was unpacked.
        number: of the step that is written next.
    """

    def __init__(
        self,
        backend: Backend,
        nbytes: int,
        depth: int,
        *,
        full: Literal["block", "raise"] = "block",
        drain: Callable[[], None],
    ) -> None:
        super().__init__(backend, nbytes, depth, full=full)
        self.cell = backend.host_empty(4).view(torch.int32)
        self.cell.zero_()
        self.number = 1
        self._drain = drain
        self._seen = self.cell.numpy().data
        # Per slot, the number of the last step that was written there.
        self._written = [0] * depth
        self._open = -1

    def _is_free(self, slot: int) -> bool:
        # Numbers begin anew after two thousand million steps.
        return (self._seen[0] - self._written[slot]) & _MASK < _HALF

    def _find(self, preferred: int) -> int:
        """A free slot, the longest free ones first; -1 if there is none."""
        for step in range(1, self.depth):
            slot = (preferred + step) % self.depth
            if self._is_free(slot):
                return slot
        return -1

    def acquire(self, preferred: int = 0) -> int:
        """The slot to write next, the preferred one if it is free. It stays the next one until it is committed."""
        slot = self._open
        if slot < 0:
            if (self._seen[0] - self._written[preferred]) & _MASK < _HALF:
                slot = preferred
            else:
                slot = self._find(preferred)
                if slot < 0:
                    slot = self._wait_for(preferred)
            self._open = slot
        return slot

    def commit(self) -> None:
        """What reads the acquired slot is queued."""
        self._written[self._open] = self.number
        self.number = (self.number + 1) & _MASK
        self._open = -1

    def wait(self) -> None:
        """Wait until the next `acquire` neither waits nor raises."""
        if self._open < 0 and not self._is_free(0) and self._find(0) < 0:
            self._wait()

    def _wait_for(self, preferred: int) -> int:
        if self._raises:
            raise StateError(full_message(self.depth))
        self._wait()
        return preferred if self._is_free(preferred) else self._find(preferred)

    def _wait(self) -> None:
        """Until a slot is free. The device's word is waited for, unless a launch has failed and it never comes."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            if any(self._is_free(slot) for slot in range(self.depth)):
                return
            time.sleep(0)
        self._drain()
        self._written = [self._seen[0]] * self.depth
