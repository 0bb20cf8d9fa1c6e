"""Python attributes that a function leaves behind: a capture sets them once, and a replay never again."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

_MACHINERY = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})

_LIBRARIES = frozenset({"torch", "numpy", "graphkit"})

_MOST_ENTRIES = 1000
"""Of a container with more, only the length is compared."""


@attrs.frozen
class Change:
    """An attribute that is another than before.

    Attributes:
        name: dotted, from the owner.
        before: None if it wasn't there.
        after: None if it is gone.
        tensors: that it holds now, and didn't before.
    """

    name: str
    before: Any
    after: Any
    tensors: tuple[torch.Tensor, ...] = ()

    def __str__(self) -> str:
        if self.before is self.after:
            return f"{self.name!r} has other contents"
        return f"{self.name!r} was {_text(self.before)} and is {_text(self.after)}"


def owners(fn: Callable[..., Any], reads: Iterable[Any]) -> dict[str, Any]:
    """The objects whose attributes a function is likely to set, by what to call them.

    They are the function itself, what it is a method of, modules and plain objects in its closure and its globals, and
    watched modules.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    found: dict[str, Any] = {}
    bound = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if bound is None and _is_plain(fn):
        bound = fn
    if bound is not None:
        found[""] = bound
    if inspect.ismethod(fn):
        fn = fn.__func__
    if inspect.isfunction(fn):
        names: dict[str, Any] = {}
        # A cell may be empty.
        with contextlib.suppress(ValueError):
            seen = inspect.getclosurevars(fn)
            names = {**seen.globals, **seen.nonlocals}
        for name, value in names.items():
            held = value.__self__ if inspect.ismethod(value) else value
            if isinstance(held, torch.nn.Module) or _is_plain(held):
                found[f"{name}."] = held
    for source in reads:
        if isinstance(source, torch.nn.Module) and all(source is not v for v in found.values()):
            found[f"{type(source).__name__}."] = source
    return found


class Attributes:
    """A snapshot of attributes; it holds the values, so that none is taken for another."""

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._holders = _holders(owners)
        self._values = {name: _Value.of(value) for name, value in self._now()}

    def changes(self) -> list[Change]:
        """What is different now."""
        now = {name: _Value.of(value) for name, value in self._now()}
        gone = _Value.of(None)
        changed = []
        for name in {**self._values, **now}:
            before, after = self._values.get(name, gone), now.get(name, gone)
            if before.mark != after.mark:
                known = set(map(id, before.tensors()))
                new = tuple(tensor for tensor in after.tensors() if id(tensor) not in known)
                changed.append(Change(name, before.value, after.value, new))
        return changed

    def _now(self) -> Iterator[tuple[str, Any]]:
        for prefix, holder in self._holders:
            for name, value in _attributes(holder):
                yield f"{prefix}{name}", value


@attrs.frozen
class _Value:
    """A value, what it holds, and what stays the same as long as neither changes."""

    value: Any
    entries: tuple[Any, ...]
    mark: Any

    @classmethod
    def of(cls, value: Any) -> _Value:
        if not isinstance(value, (list, tuple, dict, set)):
            return cls(value, (), _mark(value))
        if len(value) > _MOST_ENTRIES:
            return cls(value, (), (id(value), len(value)))
        entries = tuple(value.values() if isinstance(value, dict) else value)
        return cls(value, entries, (id(value), tuple(map(_mark, entries))))

    def tensors(self) -> Iterator[torch.Tensor]:
        return (v for v in (self.value, *self.entries) if isinstance(v, torch.Tensor))


def _holders(owners: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The owners, the plain objects that they and their modules hold, and all modules in any of these, each once."""
    found: dict[int, tuple[str, Any]] = {}

    def add(prefix: str, holder: Any, level: int) -> None:
        if id(holder) in found:
            return
        found[id(holder)] = prefix, holder
        for name, value in list(_attributes(holder)):
            for path, item in _items(name, value):
                if isinstance(item, torch.nn.Module):
                    add(f"{prefix}{path}.", item, level)
                elif level and path == name and _is_plain(item):
                    # What a module holds is as near to the owner as what the owner holds.
                    add(f"{prefix}{path}.", item, 0)

    for prefix, owner in owners.items():
        add(prefix, owner, 1)
    return list(found.values())


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ENTRIES:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{name}[{key!r}]", item) for key, item in pairs)


def _attributes(holder: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(holder, "__dict__", {})
    if not isinstance(holder, torch.nn.Module):
        yield from own.items()
        return
    for name, value in own.items():
        if name not in _MACHINERY and not name.endswith("_hooks"):
            yield name, value
    yield from holder._parameters.items()
    yield from holder._buffers.items()
    yield from holder._modules.items()


def _is_plain(value: Any) -> bool:
    """Whether it is an object of somebody's own class, which may hold a model, or what a function leaves behind."""
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return False
    library = type(value).__module__.partition(".")[0]
    is_library = library in _LIBRARIES or library in sys.stdlib_module_names
    return isinstance(getattr(value, "__dict__", None), dict) and not is_library


def _mark(value: Any) -> Any:
    """What stays the same as long as the attribute does."""
    if isinstance(value, torch.Tensor):
        return (id(value), tuple(value.shape), value.dtype)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        # Two floats that aren't numbers are the same attribute.
        return (type(value), repr(value))
    return id(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
