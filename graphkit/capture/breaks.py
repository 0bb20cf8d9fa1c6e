"""Eager breaks: functions that a PIECEWISE capture leaves out, and runs between its segments.

Outside a PIECEWISE capture a break is the plain function: in an eager run, and in a FULL capture,
where it is captured like everything else.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol, overload

import torch

from graphkit.buffers import Buffer
from graphkit.dims import Affine, Dim
from graphkit.errors import SpecError
from graphkit.runner.step import Step, body_sizes, live_step, running

Axes = Dim | Affine | Mapping[int, Dim | Affine]
Rows = Literal["real", "bucket"] | Mapping[str, Axes]
"""Which rows of its tensors a break sees; see `eager_break`."""


class Recorder(Protocol):
    """Who is told of breaks while a function is warmed up or captured PIECEWISE."""

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A break is reached; the value is what its caller gets."""


_recorder: ContextVar[Recorder | None] = ContextVar("graphkit_break_recorder", default=None)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Tell `recorder` of the breaks that are reached."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


class Break:
    """A function that runs eagerly between the segments of a PIECEWISE graph; see `eager_break`.

    Attributes:
        name: of the function, for messages.
        fn: the plain function.
        rows: which rows of its tensors it sees in a replay.
        out: the buffer that it fills, or None.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        rows: Rows = "bucket",
        out: Buffer | None = None,
        *,
        name: str | None = None,
    ) -> None:
        if not callable(fn):
            raise SpecError(f"eager_break needs a function, got {fn!r}")
        if not isinstance(rows, Mapping) and rows not in ("real", "bucket"):
            raise SpecError(
                f"rows must be 'real', 'bucket' or a mapping of parameters to dims, got {rows!r}"
            )
        if out is not None and not isinstance(out, Buffer):
            raise SpecError(f"out must be a declared buffer, got {out!r}")
        # What the function itself carries in its attributes must not replace the break's.
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.name = name or str(getattr(fn, "__qualname__", None) or type(fn).__name__)
        self.rows: Rows = rows
        self.out = out
        self.parameters, takes_any = _parameters(fn)
        self.axes: dict[str, dict[int, Dim | Affine]] = {}
        if isinstance(rows, Mapping):
            for parameter, axes in rows.items():
                if self.parameters and parameter not in self.parameters and not takes_any:
                    raise SpecError(
                        f"rows names {parameter!r}, and {self.name} takes "
                        + ", ".join(self.parameters)
                    )
                self.axes[parameter] = _axes(parameter, axes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, between two segments where a PIECEWISE capture is under way."""
        recorder = _recorder.get()
        if recorder is not None:
            return recorder.on_break(self, args, kwargs)
        step = live_step()
        if step is None:
            return self.call(args, kwargs, body_sizes())
        with running(step):
            return self.call(args, kwargs, out_sizes(self, step))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Mapping[str, int] | None
    ) -> Any:
        """Run the function itself; breaks inside it are plain.

        Args:
            sizes: at which sizes to give it the view of `out`, if there is one.
        """
        with recording(None):
            if self.out is None or sizes is None:
                return self.fn(*args, **kwargs)
            view = self.out.view(sizes)
            self.fn(*args, out=view, **kwargs)
            return view


def out_sizes(break_: Break, step: Step) -> Mapping[str, int]:
    """The sizes at which a break gets the view of its `out` in this step."""
    bucket = step.dispatch.bucket
    return step.dispatch.sizes if bucket is None or break_.rows != "bucket" else bucket.sizes


def _axes(parameter: str, axes: Any) -> dict[int, Dim | Affine]:
    found = dict(axes) if isinstance(axes, Mapping) else {0: axes}
    for axis, extent in found.items():
        if not isinstance(axis, int) or axis < 0 or not isinstance(extent, (Dim, Affine)):
            raise SpecError(
                f"rows[{parameter!r}] must be a Dim, or a mapping of axes to Dims, got {axes!r}"
            )
    return found


def _parameters(fn: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """The names of the parameters, if they can be told, and whether it may take others by name."""
    schema = getattr(fn, "_schema", None)
    if isinstance(schema, torch._C.FunctionSchema):
        return tuple(argument.name for argument in schema.arguments), False
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return (), True
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), takes_any


def leaf_parameters(break_: Break, spec: Any, count: int) -> list[str]:
    """The parameter that each leaf of the arguments belongs to; empty where it can't be told.

    Args:
        spec: the structure of ``(args, kwargs)``.
        count: of its leaves.
    """
    args_spec, kwargs_spec = _children(spec)
    names: list[str] = []
    for position, child in enumerate(_children(args_spec)):
        parameter = break_.parameters[position] if position < len(break_.parameters) else ""
        names.extend([parameter] * child.num_leaves)
    keys = list(kwargs_spec.context) if kwargs_spec.context else []
    for key, child in zip(keys, _children(kwargs_spec), strict=True):
        names.extend([str(key)] * child.num_leaves)
    return names if len(names) == count else [""] * count


def _children(spec: Any) -> list[Any]:
    if hasattr(spec, "children"):
        children = spec.children
        return list(children() if callable(children) else children)
    return list(spec.children_specs)


@overload
def eager_break(fn: Callable[..., Any], /) -> Break: ...
@overload
def eager_break(
    *, rows: Rows = "bucket", out: Buffer | None = None
) -> Callable[[Callable[..., Any]], Break]: ...
@overload
def eager_break(
    fn: Callable[..., Any], /, *, rows: Rows = "bucket", out: Buffer | None = None
) -> Break: ...
def eager_break(
    fn: Callable[..., Any] | None = None, /, *, rows: Rows = "bucket", out: Buffer | None = None
) -> Any:
    """Mark a function as a break.

    Used as ``@eager_break``, ``@eager_break(rows="real")`` or ``eager_break(fn)``; once, outside
    the function that calls it, since the warm-up and the capture have to reach the same object.

    In a PIECEWISE capture the call ends the segment, the function runs eagerly, and the next
    segment begins. At replay the function runs again, on the same memory; `current_run` gives it
    the live dispatch, what prepare returned in this step, and the caller's context. Its Python
    arguments are those of the capture.

    What it returns: a tensor in memory that was there before (an argument's, a buffer's) is passed
    on, and must be at the same address each time; any other is copied into memory of the graph's,
    the rows beyond the batch being zero; Python values must not change from run to run.

    Args:
        fn: the function.
        rows: "bucket" gives it the tensors as they are; "real" cuts them to the batch, in every
            axis that grows with a dim from bucket to bucket. Where that can't be told (there is
            one bucket, say), a mapping says which dim the first axis of which parameter is,
            ``{"q": tokens}``, or which axes, ``{"q": {2: tokens}}``; what it doesn't name is not
            cut.
        out: a buffer that the function fills itself, given to it by the keyword ``out``; the call's
            value is the buffer's view. Outside any runner the function is called without it.

    Raises:
        SpecError: an argument is wrong.
    """
    if fn is None:
        return lambda function: Break(function, rows, out)
    return Break(fn, rows, out)


class Patch:
    """A break that was put into somebody else's code; a context manager that takes it out again."""

    def __init__(self, owner: Any, name: str, broken: Break) -> None:
        self._owner = owner
        self._name = name
        self._broken: Any = broken
        own = vars(owner) if hasattr(owner, "__dict__") else {}
        self._had = name in own
        self._own = own.get(name)
        if isinstance(self._own, (staticmethod, classmethod)):
            # What was looked up is bound already; a plain attribute would be bound once more.
            self._broken = staticmethod(broken)
        try:
            setattr(owner, name, self._broken)
        except (AttributeError, TypeError) as error:
            raise SpecError(
                f"{_shown(owner)} doesn't let its {name!r} be replaced ({error}); name a place "
                f"where the function is looked up that does: break_at(namespace, {name!r})"
            ) from None

    def remove(self) -> None:
        """Take the break out; doing so twice is harmless."""
        if self._owner is None:
            return
        owner, self._owner = self._owner, None
        if self._had:
            setattr(owner, self._name, self._own)
        else:
            delattr(owner, self._name)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def break_at(
    target: Any, name: str | None = None, /, *, rows: Rows = "bucket", out: Buffer | None = None
) -> Patch:
    """Make a break of a module or function that one can't edit.

    ``break_at(layer.attention)`` breaks at one module's call; ``break_at(library.kernels.attend)``
    at a function wherever it is looked up in the module that defines it;
    ``break_at(namespace, "attend")`` at whatever `namespace.attend` is.

    Graphs that are captured keep their breaks when the patch is removed.

    Returns:
        A `Patch`: a context manager, or `remove` it when done.

    Raises:
        SpecError: the target can't be patched, or is a break already.
    """
    if name is not None:
        found = getattr(target, name, None)
        if not callable(found):
            raise SpecError(f"{_shown(target)} has no callable named {name!r}")
        if not isinstance(found, torch.nn.Module):
            return _patch(target, name, found, rows, out)
        target = found
    if isinstance(target, torch.nn.Module):
        return _patch(target, "forward", target.forward, rows, out)
    if isinstance(target, Break):
        raise SpecError(f"{target.name} is a break already")
    owner = sys.modules.get(getattr(target, "__module__", None) or "")
    qualified = str(getattr(target, "__qualname__", ""))
    for part in qualified.split(".")[:-1]:
        owner = getattr(owner, part, None)
    last = qualified.split(".")[-1]
    if owner is None or getattr(owner, last, None) is not target:
        raise SpecError(
            f"can't tell where {target!r} is looked up; "
            "name the place: break_at(namespace, 'function')"
        )
    return _patch(owner, last, target, rows, out)


def _patch(owner: Any, name: str, found: Any, rows: Rows, out: Buffer | None) -> Patch:
    if isinstance(found, Break) or isinstance(getattr(found, "__func__", None), Break):
        raise SpecError(f"{name!r} of {_shown(owner)} is a break already; remove that one first")
    return Patch(owner, name, Break(found, rows, out))


def _shown(owner: Any) -> str:
    """A namespace in one line."""
    return type(owner).__name__ if isinstance(owner, torch.nn.Module) else repr(owner)
