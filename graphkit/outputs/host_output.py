"""Outputs that go to the host: pinned memory with a slot for each step in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from graphkit.buffers import prefix, shape_at

if TYPE_CHECKING:
    from graphkit.outputs.outputs import Output

HostState = tuple[list[torch.Tensor], list[int]]


class HostOutput:
    """The memory of one output that the graph copies to the host.

    A slot isn't written again until all others have been, so that the results of so many steps can be
    read while later ones are under way.

    Args:
        spec: the output.
        maximum: the sizes of the largest bucket.
        depth: number of slots.
        host_empty: makes pinned memory.

    Attributes:
        generations: per slot, how often it was written; leases are judged by it.
    """

    buffer = None

    def __init__(
        self,
        spec: Output,
        maximum: Mapping[str, int],
        depth: int,
        host_empty: Callable[[int], torch.Tensor],
    ) -> None:
        self.spec = spec
        count = math.prod(shape_at(spec.shape, maximum))
        nbytes = count * spec.dtype.itemsize
        with torch.inference_mode(False), torch.no_grad():
            self._slots = [
                host_empty(max(nbytes, 1))[:nbytes].view(spec.dtype) for _ in range(depth)
            ]
        self.generations = [0] * depth

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for slot in self._slots)

    def targets(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Per slot, where the graph of a bucket of these sizes writes: contiguous, so that one copy does it."""
        shape = shape_at(self.spec.shape, sizes)
        with torch.inference_mode(False), torch.no_grad():
            return [slot[: math.prod(shape)].view(shape) for slot in self._slots]

    def view(self, padded: Mapping[str, int], real: Mapping[str, int], slot: int) -> torch.Tensor:
        """The valid region, for a batch of the sizes `real` in a bucket of the sizes `padded`."""
        return prefix(self.targets(padded)[slot], shape_at(self.spec.shape, real))

    def write(self, value: torch.Tensor, sizes: Mapping[str, int]) -> None:
        """Copy `value` into the first slot; part of the graph, whose later replays write the others."""
        self.targets(sizes)[0].copy_(value.contiguous(), non_blocking=True)

    def state(self) -> HostState:
        """What all slots hold, and their generations."""
        return [slot.clone() for slot in self._slots], list(self.generations)

    def restore(self, state: HostState) -> None:
        """Put back what `state` gave: what was read from it may be read again."""
        contents, self.generations[:] = state
        for slot, content in zip(self._slots, contents, strict=True):
            slot.copy_(content)

    def end_leases(self, slot: int | None) -> None:
        """A slot is about to be written; all of them for None."""
        for index in range(len(self.generations)) if slot is None else (slot,):
            self.generations[index] += 1
