"""Watching memory that a runner doesn't own: what its graphs read, and what it writes without saying so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.dims import as_items
from graphkit.errors import SpecError, StaleGraphError, UserFrame, user_frame

Source = torch.nn.Module | torch.Tensor | Callable[[], Any]
"""A module (its parameters and buffers), a tensor, or a callable that gives tensors in any nesting."""


@attrs.frozen
class Fingerprint:
    """Where a tensor lay, and how."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Fingerprint:
        """The fingerprint of a tensor."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.address:#x} {self.shape} {self.dtype}"


def check_reads(reads: Sequence[Any]) -> tuple[Any, ...]:
    """The sources as a tuple.

    Raises:
        SpecError: one is neither a module, a tensor nor callable.
    """
    sources = as_items(reads, "reads=")
    for source in sources:
        if not isinstance(source, torch.Tensor) and not callable(source):
            raise SpecError(
                f"reads= takes modules, tensors and callables that give tensors, got {source!r}"
            )
    return sources


def _named(reads: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, source in enumerate(reads):
        if isinstance(source, torch.nn.Module):
            yield from source.named_parameters()
            yield from source.named_buffers()
        elif isinstance(source, torch.Tensor):
            yield f"reads[{index}]", source
        else:
            for leaf_index, leaf in enumerate(pytree.tree_leaves(source())):
                if isinstance(leaf, torch.Tensor):
                    yield f"reads[{index}]()[{leaf_index}]", leaf


def watched_tensors(reads: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors that a runner's graphs read and the group doesn't own."""
    return [tensor for _, tensor in _named(reads) if tensor.layout is torch.strided]


def fingerprints(reads: Iterable[Any]) -> dict[str, Fingerprint]:
    """The fingerprints of all tensors that the sources give, by name."""
    found: dict[str, Fingerprint] = {}
    for name, tensor in _named(reads):
        # Two modules may have a parameter of one name.
        unique, number = name, 2
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = Fingerprint.of(tensor)
    return found


def check_fingerprints(reads: Iterable[Any], known: Mapping[str, Fingerprint], where: str) -> None:
    """Raise a `StaleGraphError` if a watched tensor is elsewhere than it was.

    Args:
        known: `fingerprints` at the capture.
        where: begins the message.
    """
    now = fingerprints(reads)
    for name, before in known.items():
        after = now.get(name)
        if after != before:
            raise StaleGraphError(
                f"{where}: {name} was {before} at the capture and is {after or 'gone'} now; the graph reads the old "
                f"memory. Copy into the old tensor instead, or call invalidate() and capture() on the group"
            )


@attrs.frozen
class ExternalWrite:
    """A write to memory that existed before and that nobody declared."""

    operation: str
    shape: tuple[int, ...]
    frame: UserFrame | None

    def __str__(self) -> str:
        at = f" at {self.frame}" if self.frame else ""
        return f"{self.operation} writes a tensor of shape {self.shape}{at}"


class WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes writes to storages that were not made under it and are not in `allowed`."""

    def __init__(self, allowed: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in allowed}
        self.found: dict[int, ExternalWrite] = {}

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            # A capture refuses it, and says so.
            return func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            for index, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in pytree.tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self._note(str(func), tensor)
        result = func(*args, **kwargs)
        inputs = {
            t.untyped_storage().data_ptr()
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and t.layout is torch.strided
        }
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                address = tensor.untyped_storage().data_ptr()
                if address not in inputs:
                    self._known.add(address)
        return result

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address and address not in self._known and address not in self.found:
            self.found[address] = ExternalWrite(operation, tuple(tensor.shape), user_frame())
