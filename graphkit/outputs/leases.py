"""Leases: in checked mode an output can't be read after a later run has overwritten it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphkit.errors import StaleOutputError


class Lease:
    """How long an output may be read: until the generation of its memory moves on."""

    __slots__ = ("_generation", "_now", "_what")

    def __init__(self, what: str, now: Callable[[], int]) -> None:
        self._what = what
        self._now = now
        self._generation = now()

    def check(self) -> None:
        """Raise a `StaleOutputError` if the lease has ended."""
        now = self._now()
        if now != self._generation:
            raise StaleOutputError(
                f"{self._what} was read after its lease ended: its memory has been written {now - self._generation} "
                f"time(s) since. Read it before the next run, or take a copy with run(..., clone=True)"
            )


class LeasedTensor(torch.Tensor):
    """An output under a lease; its views are under the same one. Results computed from it are plain tensors."""

    lease: Lease

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leased = [value for value in (*args, *kwargs.values()) if isinstance(value, LeasedTensor)]
        for value in (*args, *kwargs.values()):
            if isinstance(value, (list, tuple)):
                leased.extend(item for item in value if isinstance(item, LeasedTensor))
        if not torch.compiler.is_compiling():
            for tensor in leased:
                tensor.lease.check()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        storages = {t.untyped_storage().data_ptr(): t.lease for t in map(_plain_with_lease, leased)}
        return _inherit(result, storages)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An independent tensor, under no lease."""
        copied = memo[id(self)] = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor: a lease has no meaning elsewhere."""
        self.lease.check()
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _Plain:
    __slots__ = ("lease", "tensor")

    def __init__(self, tensor: torch.Tensor, lease: Lease) -> None:
        self.tensor = tensor
        self.lease = lease

    def untyped_storage(self) -> torch.UntypedStorage:
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensor.untyped_storage()


def _plain_with_lease(tensor: LeasedTensor) -> _Plain:
    return _Plain(tensor, tensor.lease)


def _inherit(result: Any, storages: dict[int, Lease]) -> Any:
    if isinstance(result, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            plain = result.as_subclass(torch.Tensor)
            lease = storages.get(plain.untyped_storage().data_ptr())
            return plain if lease is None else with_lease(plain, lease)
    if type(result) in (list, tuple):
        return type(result)(_inherit(item, storages) for item in result)
    return result


def with_lease(tensor: torch.Tensor, lease: Lease) -> LeasedTensor:
    """The tensor under a lease; it shares the memory."""
    leased = tensor.as_subclass(LeasedTensor)
    leased.lease = lease
    return leased
