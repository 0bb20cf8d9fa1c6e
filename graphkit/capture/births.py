"""Memory that is born in a warm-up or a capture and outlives it: lazily built plans, tables and workspaces."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.errors import UserFrame, user_frame
from graphkit.runner.step import live_step


@attrs.frozen
class Birth:
    """Where a storage comes from.

    Attributes:
        operation: that made it.
        shape: of the tensor that it was made for.
        frame: the user's line.
        from_input: whether a runner's inputs, or anything computed from them, went into it.
        from_host: whether values on the host went into it, whose origin nobody sees.
        during: what made it, in words.
    """

    operation: str
    shape: tuple[int, ...]
    frame: UserFrame | None
    from_input: bool
    from_host: bool = False
    during: str = "a warm-up"

    def __str__(self) -> str:
        at = f" at {self.frame}" if self.frame else ""
        return f"a tensor of shape {self.shape} that {self.operation} made{at}"


class Births:
    """The storages that were born under a watch, as long as they live. An identity is never met twice."""

    def __init__(self) -> None:
        self._born: dict[int, tuple[StorageWeakRef, Birth]] = {}

    def add(self, tensor: torch.Tensor, birth: Birth) -> None:
        """A storage was born."""
        storage = tensor.untyped_storage()
        self._born[storage._cdata] = (StorageWeakRef(storage), birth)  # type: ignore[no-untyped-call]

    def taint(self, identity: int, *, from_input: bool, from_host: bool) -> None:
        """An input, or values on the host, were written to this storage."""
        reference, birth = self._born[identity]
        birth = attrs.evolve(
            birth,
            from_input=birth.from_input or from_input,
            from_host=birth.from_host or from_host,
        )
        self._born[identity] = (reference, birth)

    def get(self, identity: int) -> Birth | None:
        """Where a storage comes from; None if it wasn't born under a watch."""
        found = self._born.get(identity)
        return None if found is None else found[1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Drop these, and what nobody holds any more."""
        for tensor in tensors:
            self._born.pop(tensor.untyped_storage()._cdata, None)
        self.forget_dead()

    def forget_dead(self) -> None:
        """Drop what nobody holds any more."""
        self._born = {
            identity: (reference, birth)
            for identity, (reference, birth) in self._born.items()
            if not reference.expired()  # type: ignore[no-untyped-call]
        }

    def __iter__(self) -> Iterator[tuple[int, Birth]]:
        return ((identity, birth) for identity, (_, birth) in self._born.items())

    def __contains__(self, identity: int) -> bool:
        return identity in self._born


class BirthWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations make, read and write.

    Args:
        births: to add to.
        inputs: what a runner's function is given.
        earlier: whose reads are noted with their lines.
        during: what is watched, in words.

    Attributes:
        reads: identity of a storage that was born earlier -> the line that first used it.
        writes: identities of storages.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        births: Births,
        inputs: Iterable[Any],
        *,
        earlier: Births | None = None,
        during: str = "a warm-up",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._births = births
        self._earlier = earlier
        self._during = during
        self._inputs = set(_identities(list(inputs)))
        self.reads: dict[int, UserFrame | None] = {}
        self.writes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = set(_identities((args, kwargs)))
        result = func(*args, **kwargs)
        written = set(_written(func, args, kwargs))
        read = given - written
        if _name(func) in _WITHOUT_CONTENTS:
            read = set(_identities((args[1:], kwargs)))
        is_tainted = any(self._is_tainted(identity) for identity in read)
        from_host = any(self._is_from_host(identity) for identity in read)
        if self._earlier is None:
            from_host = from_host or self._comes_from_host(func, args, result)
        # An eager break is run again at each replay; what it reads isn't baked.
        if self._earlier is not None and live_step() is None:
            for identity in given:
                if identity in self._earlier and identity not in self.reads:
                    self.reads[identity] = user_frame()
        for identity in written:
            self.writes.add(identity)
            if (is_tainted or from_host) and identity in self._births:
                self._births.taint(identity, from_input=is_tainted, from_host=from_host)
        for tensor in tensors_in(result):
            identity = tensor.untyped_storage()._cdata
            is_new = identity not in given or (self._earlier is None and _name(func) in _LIFTS)
            if is_new and identity not in self._births and identity not in self._inputs:
                made = Birth(
                    str(func),
                    tuple(tensor.shape),
                    user_frame(),
                    is_tainted,
                    from_host=from_host,
                    during=self._during,
                )
                self._births.add(tensor, made)
        return result

    def _comes_from_host(self, func: Any, args: Any, result: Any) -> bool:
        """Whether this brings values from the host that no operation has made: a list's, or another library's."""
        if _name(func) in _LIFTS:
            return True
        if not args or not isinstance(args[0], torch.Tensor):
            return False
        into = args[0] if _name(func) == "aten::copy_" else result
        source = args[1] if _name(func) == "aten::copy_" else args[0]
        return (
            isinstance(into, torch.Tensor)
            and isinstance(source, torch.Tensor)
            and source.device.type == "cpu" != into.device.type
            and source.layout is torch.strided
            and source.untyped_storage()._cdata not in self._births
        )

    def _is_from_host(self, identity: int) -> bool:
        birth = self._births.get(identity)
        return birth is not None and birth.from_host

    def _is_tainted(self, identity: int) -> bool:
        if identity in self._inputs:
            return True
        birth = self._births.get(identity)
        return birth is not None and birth.from_input


_WITHOUT_CONTENTS = frozenset(
    {
        *(f"aten::new_{how}" for how in ("empty", "empty_strided", "zeros", "ones", "full")),
        *(
            f"aten::{how}_like"
            for how in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
        ),
    }
)
"""Operations that take from a tensor its shape, dtype or device, and nothing that is in it."""


_LIFTS = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
"""What `torch.tensor` ends with: its memory was filled where no dispatcher looks."""


def _name(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    return "" if schema is None else str(schema.name)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in any nesting of values."""
    # One by one: a list that contains itself has no leaves, and must not hide the others'.
    each = values.values() if isinstance(values, Mapping) else (values,)
    for leaf in itertools.chain.from_iterable(map(_leaves, each)):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf


def _leaves(value: Any) -> list[Any]:
    try:
        return pytree.tree_leaves(value)
    except RecursionError:
        return []


def _identities(values: Any) -> Iterator[int]:
    for tensor in tensors_in(values):
        yield tensor.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[int]:
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from _identities(value)
