"""Kept memory: everything that a run of one runner may write, so that many runs can start from the same contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphkit.buffers import Buffer, prefix, shape_at, writable
from graphkit.capture.mutation import Scratch
from graphkit.capture.watch import WriteWatch
from graphkit.pads import Pad, tensor_fills


class StateWatch(WriteWatch):  # type: ignore[no-untyped-call]
    """Notes writes to memory that nobody declared, and saves what it held before.

    Attributes:
        saved: address of a storage -> its bytes, and a copy of what they held.
    """

    def __init__(self, allowed: Iterable[torch.Tensor]) -> None:
        super().__init__(allowed)
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def allow(self, values: Iterable[Any]) -> None:
        """Let the tensors among these values be written."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                self._known.add(value.untyped_storage().data_ptr())

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        super()._note(operation, tensor)
        address = storage.data_ptr()
        if address in self.found and address not in self.saved:
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self.saved[address] = whole, whole.clone()


def nobodys(view: torch.Tensor, rows: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor | None:
    """Which elements of a view lie in rows that nothing reads; None if none does.

    Args:
        view: of a buffer.
        rows: tensors, and indices into their first axes.

    Returns:
        A bool tensor of the view's shape, on its device.
    """
    storage, found = view.untyped_storage(), None
    for tensor, index in rows:
        if (
            tensor.layout is not torch.strided
            or tensor.untyped_storage()._cdata != storage._cdata
            or tensor.dtype is not view.dtype
        ):
            continue
        if (
            tensor.ndim
            and tensor.storage_offset() == view.storage_offset()
            and tensor.stride() == view.stride()
            and tensor.shape[1:] == view.shape[1:]
        ):
            # The same rows: one flag for each, as a cache may be as large as the device has room for.
            flags = torch.zeros(tensor.shape[0], dtype=torch.bool, device=view.device)
            flags[index] = True
            mine = flags[: view.shape[0]].view(-1, *[1] * (view.ndim - 1)).expand(view.shape)
        else:
            # One flag for each element of the storage, seen as both are.
            flags = torch.zeros(
                storage.nbytes() // view.element_size(), dtype=torch.bool, device=view.device
            )
            flags.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[index] = True
            mine = flags.as_strided(view.shape, view.stride(), view.storage_offset())
        found = mine if found is None else found | mine
    return found


class Kept:
    """Buffers and state of a runner, with the contents that each run of a check starts from.

    Args:
        buffers: those that a run writes or pads, each once.
        mutates: declared state; of a `Scratch` the whole tensor is kept.
    """

    def __init__(
        self, buffers: Iterable[Buffer], mutates: Iterable[torch.Tensor | Scratch]
    ) -> None:
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.state: dict[str, torch.Tensor] = {}
        self.scratch: dict[str, Any] = {}
        for index, item in enumerate(mutates):
            name = f"mutates[{index}]"
            tensor = item.tensor if isinstance(item, Scratch) else item
            self.state[name] = writable(tensor.detach())
            if isinstance(item, Scratch):
                self.scratch[name] = item.index()
        self._rows = [(self.state[name], index) for name, index in self.scratch.items()]
        self._buffers = [(b.tensor, b.tensor.clone()) for b in self.buffers.values()]
        self._state = [(tensor, tensor.clone()) for tensor in self.state.values()]

    def add_undeclared(self, watch: StateWatch) -> None:
        """From now on put back, too, what `watch` has seen written."""
        self._state.extend(watch.saved.values())

    def restore(self) -> None:
        """Put everything back as it was when this was made."""
        for tensor, contents in self._buffers:
            tensor.copy_(contents)
        self.restore_state()

    def restore_state(self) -> None:
        """Put the state back, and leave the buffers."""
        for tensor, contents in self._state:
            tensor.copy_(contents)

    def contents(
        self, padded: Mapping[str, int], real: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Copies of what the buffers hold for a batch.

        Args:
            padded: the sizes that decide where rows lie.
            real: the batch's.
        """
        return {
            name: prefix(b.view(padded), shape_at(b.spec.shape, real)).clone()
            for name, b in self.buffers.items()
        }

    def compared(
        self, padded: Mapping[str, int], real: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """The same, with zeros in the rows of a `Scratch` that is in the memory of a buffer."""
        found = self.contents(padded, real)
        for name, contents in found.items():
            mask = self._mask(self.buffers[name], padded, real)
            if mask is not None:
                contents[mask] = 0
        return found

    def _mask(
        self, buffer: Buffer, padded: Mapping[str, int], real: Mapping[str, int]
    ) -> torch.Tensor | None:
        view = prefix(buffer.view(padded), shape_at(buffer.spec.shape, real))
        return nobodys(view, self._rows) if self._rows else None

    def has_scratch(self, buffer: Buffer) -> bool:
        """Whether a `Scratch` is in the memory of this buffer."""
        return nobodys(buffer.tensor, self._rows) is not None

    def fixed(self, what: str) -> Buffer | None:
        """The buffer that messages call this, if its rows are not a batch's, as those of a cache."""
        for name, buffer in self.buffers.items():
            if what == f"buffer {name!r}":
                return buffer if has_fixed_rows(buffer) else None
        return None

    def state_contents(self) -> dict[str, torch.Tensor]:
        """Copies of the declared state."""
        return {name: tensor.clone() for name, tensor in self.state.items()}


def has_fixed_rows(buffer: Buffer) -> bool:
    """Whether the number of its rows is the same for every batch, so that a scratch row may be among them."""
    return bool(buffer.spec.shape) and isinstance(buffer.spec.shape[0], int)


def place(
    buffer: Buffer, values: torch.Tensor, padded: Mapping[str, int], real: Mapping[str, int]
) -> None:
    """Write a batch's rows into a resident buffer as its producer would, with the padding that it owes."""
    view = buffer.view(padded)
    shape = shape_at(buffer.spec.shape, real)
    prefix(view, shape).copy_(values)
    owed = [
        Pad("value", pad.value) if pad is not None and pad.kind == "by_producer" else None
        for pad in buffer.spec.pads
    ]
    for fill in tensor_fills(view, shape, owed, {}):
        fill.run()
