"""Roles: where each parameter of a runner's function comes from.

A role belongs to the parameter, not to the buffer: one runner may write what another is fed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from graphkit.buffers import Buffer, Buffers
from graphkit.dims import Affine, Dim, check_name
from graphkit.errors import SpecError


def _name_of(buffer: Any) -> str:
    if isinstance(buffer, Buffer):
        return buffer.name
    if isinstance(buffer, str):
        return buffer
    raise SpecError(f"a buffer is given by itself or by its name, got {buffer!r}")


@attrs.frozen
class Fed:
    """The caller gives the parameter to each run; it is staged into the buffer.

    Args:
        buffer: a declared `Buffer`, or its name.
    """

    buffer: str = attrs.field(converter=_name_of)


@attrs.frozen
class Resident:
    """Somebody on the device writes the buffer; a run is given nothing for it, and pads it.

    Args:
        buffer: a declared `Buffer`, or its name.
    """

    buffer: str = attrs.field(converter=_name_of)


@attrs.frozen
class Count:
    """The parameter is the batch's real size of a dim: an int32 scalar on the device."""

    dim: Dim


Role = Fed | Resident | Count


@attrs.frozen
class Binding:
    """How a function is called: what each parameter is, settled once at construction.

    Attributes:
        fed: parameter -> buffer that a run stages into.
        resident: parameter -> buffer that is written on the device.
        counts: parameter -> dim whose real size it is.
        passed: the parameters of the three above that the function takes; others are for prepare alone.
        by_prepare: parameters without a default that prepare has to return.
        variants: parameters that the policy's variants give.
        positional: positional-only parameters with their defaults, in order.
        accepted: the names that the function takes; None if it takes any.
    """

    fed: dict[str, Buffer]
    resident: dict[str, Buffer]
    counts: dict[str, Dim]
    passed: tuple[str, ...]
    by_prepare: tuple[str, ...]
    variants: tuple[str, ...]
    positional: tuple[tuple[str, Any], ...]
    accepted: frozenset[str] | None

    @property
    def buffers(self) -> dict[str, Buffer]:
        """parameter -> buffer, fed and resident."""
        return {**self.fed, **self.resident}

    def call(self, fn: Callable[..., Any], values: dict[str, Any]) -> Any:
        """Call `fn` with the values by name; positional-only parameters by position."""
        if not self.positional:
            return fn(**values)
        leading = [values.pop(name, default) for name, default in self.positional]
        return fn(*leading, **values)


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"the parameters of {_name(fn)} can't be read ({error}); wrap it in a Python function"
        ) from None


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def bind(
    fn: Callable[..., Any],
    buffers: Buffers,
    *,
    inputs: Mapping[str, Any] | None = None,
    variants: Sequence[str] = (),
    has_prepare: bool = False,
) -> Binding:
    """Settle where every parameter of `fn` comes from.

    A parameter in `inputs` has the role given there; one that a variant is named after is given by it; one that a
    buffer is named after is fed; one with a default keeps it; any other must come from prepare.

    Raises:
        SpecError: a parameter has no source, or `inputs` names something that doesn't exist.
    """
    if not callable(fn):
        raise SpecError(f"a runner needs a callable, got {fn!r}")
    parameters = _signature(fn).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    fed: dict[str, Buffer] = {}
    resident: dict[str, Buffer] = {}
    counts: dict[str, Dim] = {}
    roles = dict(inputs or {})
    for name, role in roles.items():
        if name not in parameters and not takes_any and not has_prepare:
            raise SpecError(
                f"inputs names {name!r}, which {_name(fn)} doesn't take; it takes "
                f"{', '.join(parameters) or 'nothing'} (inputs for prepare alone need prepare=)"
            )
        check_name("buffer", name)
        if isinstance(role, Fed):
            fed[name] = buffers[role.buffer]
        elif isinstance(role, Resident):
            resident[name] = buffers[role.buffer]
        elif isinstance(role, Count) and isinstance(role.dim, Dim):
            counts[name] = role.dim
        elif isinstance(role, Count) and isinstance(role.dim, Affine):
            raise SpecError(f"inputs[{name!r}]: Count takes a Dim, got the expression {role.dim}")
        else:
            raise SpecError(
                f"inputs[{name!r}] must be Fed(buffer), Resident(buffer) or Count(dim), got {role!r}"
            )
    by_prepare: list[str] = []
    positional: list[tuple[str, Any]] = []
    taken = [*roles] if takes_any else [name for name in roles if name in parameters]
    used_variants = list(variants) if takes_any else []
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append((name, parameter.default))
        if name in roles:
            continue
        if name in variants:
            used_variants.append(name)
        elif name in buffers:
            fed[name] = buffers[name]
            taken.append(name)
        elif parameter.default is parameter.empty:
            by_prepare.append(name)
    if by_prepare and not has_prepare:
        known = ", ".join(buffer.name for buffer in buffers) or "none"
        names = " and ".join(repr(name) for name in by_prepare)
        raise SpecError(
            f"{_name(fn)} needs {names}, which no buffer is named after (declared: {known}), no variant gives and no "
            f"prepare makes: declare a buffer, rename one with inputs=, make it a variant if it is a Python value, "
            f"or give it a default"
        )
    missing = [name for name in variants if name not in used_variants]
    if missing:
        raise SpecError(
            f"the policy has the variants {missing}, which {_name(fn)} takes no parameter for"
        )
    _refuse_shared_writes(fed)
    return Binding(
        fed,
        resident,
        counts,
        tuple(taken),
        tuple(by_prepare),
        tuple(used_variants),
        tuple(positional),
        None if takes_any else frozenset(parameters),
    )


def _refuse_shared_writes(fed: Mapping[str, Buffer]) -> None:
    seen: dict[str, str] = {}
    for parameter, buffer in fed.items():
        if buffer.name in seen:
            raise SpecError(
                f"parameters {seen[buffer.name]!r} and {parameter!r} are both fed into buffer {buffer.name!r}; "
                f"feed one, and make the other Resident({buffer.name!r})"
            )
        seen[buffer.name] = parameter
