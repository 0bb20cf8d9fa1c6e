"""What is told of breaks: one recorder notes calls in a warm-up, one splits a capture at them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.backends.base import Backend, Capture, Graph
from graphkit.buffers import Buffer, Extent
from graphkit.capture.baked import same
from graphkit.capture.breaks import Break, leaf_parameters, out_sizes
from graphkit.capture.piecewise import BreakCall, PiecewiseGraph, Returned, describe
from graphkit.capture.rows import RowInference
from graphkit.errors import BreakError, CaptureError
from graphkit.runner.step import Step, running

_PLAIN = (bool, int, float, str, torch.dtype)


@attrs.frozen
class WarmupCall:
    """One call of a break in a warm-up.

    Attributes:
        shapes: of the arguments' leaves; None for what isn't a tensor.
        roots: weak references to the same, or to what they are views of; they give None for what
            isn't a tensor.
        values: the leaves of the arguments; None for tensors.
        spec: the arguments' structure.
        results: shapes of the results' leaves.
        returned: the results' leaves; None for tensors.
    """

    break_: Break
    shapes: tuple[tuple[int, ...] | None, ...]
    roots: tuple[Callable[[], torch.Tensor | None], ...]
    values: tuple[Any, ...]
    spec: Any
    results: tuple[tuple[int, ...] | None, ...]
    returned: tuple[Any, ...]


class WarmupRecorder:
    """Runs breaks plainly, and notes what they were called with, call by call."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.calls: list[WarmupCall] = []

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and note the call."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Before the call, which may change an array in place.
        noted = _shapes(leaves), tuple(map(_reference, leaves)), _values(leaves)
        with running(self._step):
            result = break_.call(args, kwargs, out_sizes(break_, self._step))
        returned = pytree.tree_leaves(result)
        call = WarmupCall(break_, *noted, spec, _shapes(returned), _values(returned))
        self.calls.append(call)
        return result


def _shapes(leaves: Iterable[Any]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)


def _root(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def _reference(leaf: Any) -> Callable[[], torch.Tensor | None]:
    return weakref.ref(_root(leaf)) if isinstance(leaf, torch.Tensor) else _nothing


def _nothing() -> None:
    return None


def _values(leaves: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_value(x) for x in leaves)


def _value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return None
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


class CaptureRecorder:
    """Ends a segment at each break, runs the break on real values, and begins the next segment.

    Args:
        calls: those of the warm-up, which the capture has to repeat.
        rows: for breaks that want real rows.
        known: address -> buffer, of the runner's parameters.
        outliving: further memory that outlives the graphs, as buffers and declared state; results
            that lie there are passed on.
    """

    def __init__(
        self,
        backend: Backend,
        pool: Any,
        step: Step,
        where: str,
        calls: Sequence[WarmupCall],
        rows: RowInference,
        known: Mapping[int, Buffer],
        outliving: Iterable[torch.Tensor] = (),
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._step = step
        self._where = where
        self._calls = calls
        self._rows = rows
        self._known = known
        self._outliving = {_storage(tensor) for tensor in outliving}
        self._outliving |= {_storage(buffer.tensor) for buffer in known.values()}
        self._capture: Capture | None = None
        self._index = 0
        self._failed: tuple[str, BaseException] | None = None
        self.parts: list[Graph | BreakCall] = []

    def begin(self, capture: Capture) -> None:
        """The capture that the breaks split."""
        self._capture = capture

    def check_complete(self) -> None:
        """The function has returned.

        Raises:
            CaptureError: a break failed, and the function went on without it; or fewer breaks were
                reached than in the warm-up.
        """
        if self._failed is not None:
            name, error = self._failed
            raise CaptureError(
                f"{self._where}: break {name} raised {type(error).__name__}: {error}, and the "
                "function caught it and went on; a replay has no such way out. Catch it inside "
                "the break"
            ) from error
        if self._index != len(self._calls):
            raise CaptureError(
                f"{self._where}: the capture reached {self._index} breaks and the warm-up "
                f"{len(self._calls)}; a function must reach the same breaks each time"
            )

    def finish(self, last: Graph) -> PiecewiseGraph:
        """The capture has ended with this segment."""
        return PiecewiseGraph([*self.parts, last])

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, run the break, begin the next."""
        if self._failed is not None:
            self.check_complete()
        try:
            return self._split_at(break_, args, kwargs)
        except BaseException as error:
            self._failed = break_.name, error
            raise

    def _split_at(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        capture = self._capture
        if capture is None:
            self._refuse(break_, "was reached outside the capture")
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = self._check(break_, leaves, spec)
        self._end_segment(capture, break_)
        sizes = out_sizes(break_, self._step)
        part = BreakCall(
            break_,
            self._where,
            [self._held(leaf, root()) for leaf, root in zip(leaves, call.roots, strict=True)],
            spec,
            self._cuts(break_, call, leaves, spec),
            sizes,
        )
        with running(self._step):
            result = break_.call(args, kwargs, sizes)
        given = self._keep(part, break_, call, leaves, result)
        self.parts.append(part)
        self._index += 1
        capture.resume()
        return given

    def _refuse(self, break_: Break, what: str) -> NoReturn:
        raise CaptureError(f"{self._where}: break {break_.name} {what}")

    def _check(self, break_: Break, leaves: Sequence[Any], spec: Any) -> WarmupCall:
        """The call of the warm-up that this one repeats."""
        call = self._calls[self._index] if self._index < len(self._calls) else None
        if call is None or call.break_ is not break_:
            self._refuse_other(break_, call)
        if call.spec != spec:
            self._refuse(
                break_,
                "got arguments of another structure in the capture than in the warm-up: "
                f"{spec}, and {call.spec}",
            )
        for before, now, shape_before, shape in zip(
            call.values, _values(leaves), call.shapes, _shapes(leaves), strict=True
        ):
            if shape_before != shape:
                then = before if shape_before is None else f"a tensor of shape {shape_before}"
                later = now if shape is None else f"a tensor of shape {shape}"
                self._refuse(
                    break_,
                    f"got {then} in the warm-up and {later} in the capture; shapes are baked",
                )
            if not same(before, now):
                self._refuse(
                    break_,
                    f"got {before!r} in the warm-up and {now!r} in the capture. Its Python "
                    "arguments are baked: take what changes from current_run(), or pass a tensor",
                )
        return call

    def _refuse_other(self, break_: Break, call: WarmupCall | None) -> NoReturn:
        number = self._index + 1
        expected = "none" if call is None else call.break_.name
        if expected == break_.name:
            if all(known.break_ is not break_ for known in self._calls):
                self._refuse(
                    break_,
                    f"was reached as number {number} in the capture, and is another object than "
                    "the break of that name in the warm-up, as when the function makes it anew in "
                    "each call; decorate it once, outside the function",
                )
            expected = f"another {expected}"
        self._refuse(
            break_,
            f"was reached as number {number} in the capture, and {expected} in the warm-up; "
            "a function must reach the same breaks each time",
        )

    def _end_segment(self, capture: Capture, break_: Break) -> None:
        try:
            self.parts.append(capture.split())
        except CaptureError:
            raise
        except RuntimeError as error:
            if "unjoined" not in str(error):
                raise
            raise BreakError(
                f"{self._where}: the segment before break {break_.name} can't be ended, since work "
                f"on a side stream isn't joined: {str(error).splitlines()[0]}. Join it before the "
                "break, as by current_stream().wait_stream(side)"
            ) from error

    def _held(self, leaf: Any, warm_root: torch.Tensor | None) -> Any:
        """An argument as the call keeps it: memory of the pool must be free for later segments."""
        if isinstance(leaf, np.ndarray):
            # As it is before the capture's own call, which may change it.
            return leaf.copy()
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # An address that is the warm-up's proves nothing: the pool may have got the same memory.
        is_outside = warm_root is not None and _root(leaf) is warm_root
        # Host memory is no pool's, and a lazy conjugate is more than its memory.
        is_elsewhere = leaf.device.type != self._backend.device.type
        if is_outside or is_elsewhere or leaf.is_conj() or leaf.is_neg():
            return leaf.detach()
        return self._backend.alias(leaf)

    def _cuts(
        self, break_: Break, call: WarmupCall, leaves: Sequence[Any], spec: Any
    ) -> list[dict[int, Extent] | None]:
        if break_.rows == "bucket":
            return [None] * len(leaves)
        names = leaf_parameters(break_, spec, len(leaves))
        return [
            self._cut(break_, call, position, leaf, name)
            if isinstance(leaf, torch.Tensor) and leaf.ndim
            else None
            for position, (leaf, name) in enumerate(zip(leaves, names, strict=True))
        ]

    def _cut(
        self, break_: Break, call: WarmupCall, position: int, leaf: torch.Tensor, name: str
    ) -> dict[int, Extent] | None:
        if break_.rows != "real":
            named: dict[int, Extent] = dict(break_.axes.get(name, {}))
            if named and max(named) >= leaf.ndim:
                self._refuse(
                    break_,
                    f"has rows={{{name!r}: {{{max(named)}: ...}}}}, "
                    f"and {name!r} is of shape {tuple(leaf.shape)}",
                )
            return named or None
        buffer = self._known.get(leaf.data_ptr())
        if buffer is not None and leaf.shape == buffer.view(self._step.dispatch.sizes).shape:
            extents = buffer.spec.shape
        elif leaf is call.roots[position]():
            # A weight, say: what the warm-up got too, and is no view, can't be some bucket's rows.
            return None
        else:
            extents = self._rows.argument(break_, self._occurrence(break_), position)
        cut: dict[int, Extent] = {
            axis: e for axis, e in enumerate(extents) if not isinstance(e, int)
        }
        return cut or None

    def _occurrence(self, break_: Break) -> int:
        return sum(call.break_ is break_ for call in self._calls[: self._index])

    def _keep(
        self, part: BreakCall, break_: Break, call: WarmupCall, leaves: Sequence[Any], result: Any
    ) -> Any:
        """What the function gets for the result; the part knows how later results must agree."""
        found, spec = pytree.tree_flatten(result)
        where = f"{self._where}: break {break_.name}"
        _check_returned(where, call, found)
        lasting = {_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        lasting |= self._outliving
        if break_.out is not None:
            lasting.add(_storage(break_.out.tensor))
        returned: list[Returned] = []
        given: list[Any] = []
        copied: set[int] = set()
        for position, value in enumerate(found):
            if not isinstance(value, torch.Tensor) or _storage(value) in lasting:
                returned.append(Returned(where, value))
                given.append(value)
                continue
            if _storage(value) in copied:
                raise BreakError(
                    f"{where} returned two tensors in one new memory, and each would be copied apart: a later write to "
                    "one would miss the other. Return one of them, or copies"
                )
            copied.add(_storage(value))
            stable = self._backend.empty_in(self._pool, value)
            stable.copy_(value)
            extents = self._result_extents(break_, position, value)
            # Without a claim: the function's own references decide how long nobody else gets it.
            returned.append(Returned(where, value, self._backend.alias(stable), extents))
            given.append(stable)
        part.keep(returned, spec)
        return pytree.tree_unflatten(given, spec)

    def _result_extents(
        self, break_: Break, position: int, value: torch.Tensor
    ) -> tuple[tuple[Extent, ...], ...]:
        if break_.rows == "bucket":
            return ()
        sizes = self._step.dispatch.sizes
        shape = tuple(value.shape)
        return self._rows.result(break_, self._occurrence(break_), position, shape, sizes)


def _check_returned(where: str, call: WarmupCall, found: Sequence[Any]) -> None:
    """Refuse results unlike the warm-up's, and those that can't be baked."""
    if _shapes(found) != call.results or not same(call.returned, _values(found)):
        raise BreakError(
            f"{where} returned {_listed(found)} in the capture, and {_listed_call(call)} in the "
            "warm-up, for the same batch; later segments bake shapes and Python values. Return "
            "tensors of the same shape each time"
        )
    for value in found:
        if value is not None and not isinstance(value, (torch.Tensor, *_PLAIN)):
            raise BreakError(
                f"{where} returned {describe(value)}; tensors, None and plain Python values can be "
                "returned"
            )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _listed(leaves: Sequence[Any]) -> str:
    return ", ".join(map(describe, leaves)) or "nothing"


def _listed_call(call: WarmupCall) -> str:
    shown = [
        describe(value) if shape is None else f"a tensor of shape {shape}"
        for value, shape in zip(call.returned, call.results, strict=True)
    ]
    return ", ".join(shown) or "nothing"
