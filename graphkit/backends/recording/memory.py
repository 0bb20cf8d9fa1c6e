"""Whose memory a recording works on, and what that held before it."""

from __future__ import annotations

import torch

from graphkit.backends.recording.trace import Memory, TensorUse


class Memories:
    """The storages that one capture has met: where they come from, and the contents to put back.

    A storage that the capture or an eager break made is known by being an operation's result. Any
    other one existed before.

    Attributes:
        nbytes: bytes of all storages that captured operations made.
    """

    def __init__(self) -> None:
        self._known: dict[int, Memory] = {}
        self._held: list[torch.UntypedStorage] = []  # so that no identity is met twice
        self._made = 0
        self.nbytes = 0
        self._in_breaks: set[int] = set()
        self._from_breaks = 0
        self._contents: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self._saved: set[int] = set()

    def made(self, tensor: torch.Tensor, kind: str = "made") -> None:
        """A captured operation returned `tensor`, in memory of its own."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._remember(storage, Memory(kind, self._made))
            self._made += 1
            self.nbytes += storage.nbytes()

    def made_in_break(self, tensor: torch.Tensor) -> None:
        """An operation of an eager break returned `tensor`, in memory of its own."""
        self._in_breaks.add(tensor.untyped_storage()._cdata)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a captured operation has met the tensor's memory."""
        return tensor.untyped_storage()._cdata in self._known

    def of(self, tensor: torch.Tensor) -> Memory:
        """The memory that a tensor lies in."""
        storage = tensor.untyped_storage()
        memory = self._known.get(storage._cdata)
        if memory is None:
            if storage._cdata in self._in_breaks:
                memory = Memory("break", self._from_breaks)
                self._from_breaks += 1
            else:
                memory = Memory("outside", storage.data_ptr())
            self._remember(storage, memory)
        return memory

    def use(self, tensor: torch.Tensor) -> TensorUse:
        """A tensor, in terms that two recordings share."""
        return TensorUse(
            self.of(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def save(self, tensor: torch.Tensor) -> None:
        """Keep the contents of a tensor's storage, which is about to be written the first time."""
        storage = tensor.untyped_storage()
        if self.of(tensor).kind != "outside" or storage._cdata in self._saved:
            return
        self._saved.add(storage._cdata)
        contents = storage.clone()  # type: ignore[no-untyped-call]
        self._contents.append((storage, contents))

    def restore(self) -> None:
        """Put all saved contents back, and let go of everything."""
        # The newest first: two storages may share memory, and the oldest contents are to win.
        for storage, contents in reversed(self._contents):
            if storage.nbytes() < contents.nbytes():
                storage.resize_(contents.nbytes())
            # An `out=` grows at its first use. It stays as large as the tensors now are that lie in it.
            _bytes(storage)[: contents.nbytes()].copy_(_bytes(contents))
        self._contents.clear()
        self._held.clear()

    def _remember(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self._known[storage._cdata] = memory
        self._held.append(storage)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
