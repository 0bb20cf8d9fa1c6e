"""Eager breaks: functions that a PIECEWISE capture leaves out, and runs between its segments.

Outside a PIECEWISE capture a break is the plain function: in an eager run, and in a FULL capture, where it is
captured like everything else.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Protocol, overload

import torch

from graphkit.buffers import Buffer
from graphkit.dims import Affine, Dim
from graphkit.errors import SpecError
from graphkit.step import live_step, running

Rows = Literal["real", "bucket"] | Mapping[str, Dim | Affine]
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
    """A function that runs eagerly between the segments of a PIECEWISE graph. Made by `eager_break`.

    Attributes:
        name: of the function, for messages.
        fn: the plain function.
        rows: which rows of its tensors it sees in a replay.
        out: the buffer that it fills, or None.
    """

    def __init__(self, fn: Callable[..., Any], rows: Rows, out: Buffer | None) -> None:
        if not callable(fn):
            raise SpecError(f"eager_break needs a function, got {fn!r}")
        if not isinstance(rows, Mapping) and rows not in ("real", "bucket"):
            raise SpecError(
                f"rows must be 'real', 'bucket' or a mapping of parameters to dims, got {rows!r}"
            )
        if out is not None and not isinstance(out, Buffer):
            raise SpecError(f"out must be a declared buffer, got {out!r}")
        self.fn = fn
        self.name = str(getattr(fn, "__qualname__", None) or type(fn).__name__)
        self.rows: Rows = rows
        self.out = out
        self.parameters = _parameters(fn)
        if isinstance(rows, Mapping):
            for parameter, expression in rows.items():
                if self.parameters and parameter not in self.parameters:
                    raise SpecError(
                        f"rows names {parameter!r}, and {self.name} takes {', '.join(self.parameters)}"
                    )
                if not isinstance(expression, (Dim, Affine)):
                    raise SpecError(f"rows[{parameter!r}] must be a Dim, got {expression!r}")
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, between two segments where a PIECEWISE capture is under way."""
        recorder = _recorder.get()
        if recorder is not None:
            return recorder.on_break(self, args, kwargs)
        step = live_step()
        if step is None:
            return self.call(args, kwargs, None)
        with running(step):
            return self.call(args, kwargs, None if self.out is None else step.dispatch.sizes)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

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


def _parameters(fn: Callable[..., Any]) -> tuple[str, ...]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()


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
    """Mark a function as a break: ``@eager_break``, ``@eager_break(rows="real")``, or ``eager_break(fn)``.

    In a PIECEWISE capture the call ends the segment, the function runs eagerly, and the next segment begins. At
    replay the function runs again, on the same memory; `current_run` gives it the live dispatch, what prepare
    returned in this step, and the caller's context. Its Python arguments are those of the capture.

    What it returns: a tensor in memory that was there before (an argument's, a buffer's) is passed on, and must be at the same
    address each time; any other is copied into memory of the graph's, the rows beyond the batch being zero;
    Python values must not change from run to run.

    Args:
        fn: the function.
        rows: "bucket" gives it the tensors as they are; "real" cuts them to the batch: buffers of the runner in every axis, others
            in the first one, if that grows with a dim from bucket to bucket; a mapping says which dim the first
            axis of which parameter is.
        out: a buffer that the function fills itself, given to it by the keyword ``out``; the call's value is the buffer's view.

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
        self._own = vars(owner).get(name) if hasattr(owner, "__dict__") else None
        setattr(owner, name, broken)

    def remove(self) -> None:
        """Take the break out; doing so twice is harmless."""
        if self._owner is None:
            return
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)
        self._owner = None

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def break_at(
    target: Any, name: str | None = None, /, *, rows: Rows = "bucket", out: Buffer | None = None
) -> Patch:
    """Make a break of a module or function that one can't edit.

    ``break_at(layer.attention)`` breaks at one module's call; ``break_at(library.kernels.attend)`` at a
    function wherever it is looked up in the module that defines it; ``break_at(namespace, "attend")`` at whatever
    `namespace.attend` is.

    Returns:
        A `Patch`: a context manager, or `remove` it when done.

    Raises:
        SpecError: the target can't be patched.
    """
    if name is not None:
        if not callable(getattr(target, name, None)):
            raise SpecError(f"{target!r} has no callable named {name!r}")
        return Patch(target, name, Break(getattr(target, name), rows, out))
    if isinstance(target, torch.nn.Module):
        return Patch(target, "forward", Break(target.forward, rows, out))
    owner = sys.modules.get(getattr(target, "__module__", None) or "")
    qualified = str(getattr(target, "__qualname__", ""))
    for part in qualified.split(".")[:-1]:
        owner = getattr(owner, part, None)
    last = qualified.split(".")[-1]
    if owner is None or getattr(owner, last, None) is not target:
        raise SpecError(
            f"can't tell where {target!r} is looked up; name the place: break_at(namespace, 'function')"
        )
    return Patch(owner, last, Break(target, rows, out))
