"""The memory of recordings, counted as a device's pool would be."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.backends.recording.graph import RecordedGraph


class RecordingPool:
    """The graphs that were recorded into it.

    Each recording keeps its own memory, so that on the CPU nothing is shared. It is counted as if it were: graphs
    that never run at the same time use the same memory, so that a pool holds what its largest capture made.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[RecordedGraph, int] = weakref.WeakKeyDictionary()
        self._captures = itertools.count()

    def begin(self) -> int:
        """A number for a new capture."""
        return next(self._captures)

    def add(self, graph: RecordedGraph, capture: int) -> None:
        """A segment of this capture was recorded."""
        self._graphs[graph] = capture

    @property
    def nbytes(self) -> int:
        """Bytes that the largest capture of those that live has made."""
        made: dict[int, int] = {}
        for graph, capture in self._graphs.items():
            made[capture] = made.get(capture, 0) + graph.nbytes
        return max(made.values(), default=0)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all memory that operations make under it, as a recording of them would hold it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        # Held, so that no address is met twice.
        self._made: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return result
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if storage._cdata not in given and storage._cdata not in self._made:
                self._made[storage._cdata] = storage
                self.nbytes += storage.nbytes()
        return result


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [
        leaf.untyped_storage()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]
