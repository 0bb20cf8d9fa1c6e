"""Python attributes that a function leaves behind: a capture sets them once, and a replay never again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

_MACHINERY = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})

_LIBRARIES = frozenset({"builtins", "torch", "numpy", "graphkit", "functools", "types", "logging"})


@attrs.frozen
class Change:
    """An attribute that is another than before.

    Attributes:
        name: dotted, from the owner.
        before: None if it wasn't there.
        after: None if it is gone.
    """

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
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
    if bound is not None:
        found[""] = bound
    if inspect.isfunction(fn):
        seen = inspect.getclosurevars(fn)
        for name, value in {**seen.globals, **seen.nonlocals}.items():
            if isinstance(value, torch.nn.Module) or _is_plain(value):
                found[f"{name}."] = value
    for source in reads:
        if isinstance(source, torch.nn.Module) and all(source is not v for v in found.values()):
            found[f"{type(source).__name__}."] = source
    return found


class Attributes:
    """A snapshot of attributes; it holds the values, so that none is taken for another."""

    def __init__(self, owners: Mapping[str, Any]) -> None:
        self._owners = owners
        self._values = {
            name: (value, _mark(value))
            for prefix, owner in owners.items()
            for name, value in _of(owner, prefix)
        }

    def changes(self) -> list[Change]:
        """What is different now."""
        now = {
            name: value
            for prefix, owner in self._owners.items()
            for name, value in _of(owner, prefix)
        }
        changed = []
        for name in {**self._values, **now}:
            before, mark = self._values.get(name, (None, None))
            after = now.get(name)
            if mark != (None if name not in now else _mark(after)):
                changed.append(Change(name, before, after))
        return changed


def _of(owner: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(owner, torch.nn.Module):
        for name, value in getattr(owner, "__dict__", {}).items():
            yield f"{prefix}{name}", value
            if isinstance(value, torch.nn.Module):
                yield from _of(value, f"{prefix}{name}.")
        return
    for path, module in owner.named_modules():
        inside = f"{prefix}{path}." if path else prefix
        for name, value in vars(module).items():
            if name not in _MACHINERY and not name.endswith("_hooks"):
                yield f"{inside}{name}", value
        for name, value in (*module._parameters.items(), *module._buffers.items()):
            yield f"{inside}{name}", value


def _is_plain(value: Any) -> bool:
    """Whether it is an object of somebody's own class, which a closure may hold a model by."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and library not in _LIBRARIES


def _mark(value: Any) -> Any:
    """What stays the same as long as the attribute does."""
    if isinstance(value, torch.Tensor):
        return (id(value), tuple(value.shape), value.dtype)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        # Two floats that aren't numbers are the same attribute.
        return (type(value), repr(value))
    if isinstance(value, (list, tuple, dict)) and len(value) <= 1000:
        entries = value.values() if isinstance(value, dict) else value
        return (id(value), tuple(map(id, entries)))
    if isinstance(value, (list, tuple, dict, set)):
        return (id(value), len(value))
    return id(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
