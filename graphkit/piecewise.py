"""PIECEWISE: segments of a graph with eager breaks between, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils import _pytree as pytree

from graphkit.backends.base import Backend, Capture, Graph
from graphkit.breaks import Break
from graphkit.buffers import Buffer, Extent
from graphkit.dims import Dim
from graphkit.errors import BreakError, CaptureError, SpecError
from graphkit.inference import Sample, infer_shape
from graphkit.step import Step, running

if TYPE_CHECKING:
    from graphkit.buckets import Bucket


@attrs.frozen
class Call:
    """One call of a break in a warm-up.

    Attributes:
        shapes: of the tensors among the arguments, by position among the leaves, and then of the results.
        addresses: of the same tensors.
        values: the other leaves of the arguments.
    """

    break_: Break
    shapes: tuple[tuple[int, ...] | None, ...]
    addresses: tuple[int | None, ...]
    values: tuple[Any, ...]
    results: tuple[tuple[int, ...] | None, ...]


class WarmupRecorder:
    """Runs breaks plainly, and notes what they were called with, call by call."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.calls: list[Call] = []

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it, and note the call."""
        leaves = pytree.tree_leaves((args, kwargs))
        shapes, addresses, values = _split(leaves)
        with running(self._step):
            result = break_.call(args, kwargs, self._step.dispatch.sizes)
        results, _, _ = _split(pytree.tree_leaves(result))
        self.calls.append(Call(break_, shapes, addresses, values, results))
        return result


def _split(leaves: Iterable[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    leaves = list(leaves)
    shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves)
    addresses = tuple(x.data_ptr() if isinstance(x, torch.Tensor) else None for x in leaves)
    values = tuple(None if isinstance(x, torch.Tensor) else x for x in leaves)
    return shapes, addresses, values


class BreakCall:
    """One call of a break between two segments, as it is repeated."""

    def __init__(
        self,
        break_: Break,
        where: str,
        leaves: Sequence[Any],
        spec: Any,
        cuts: Sequence[tuple[Extent, ...] | None],
    ) -> None:
        self.break_ = break_
        self.where = where
        self._leaves = list(leaves)
        self._spec = spec
        self._cuts = list(cuts)
        self._results: list[_Result] = []
        self._result_spec: Any = None

    def keep(self, results: list[_Result], spec: Any) -> None:
        """What the call returned at the capture."""
        self._results = results
        self._result_spec = spec

    def bind(self, sizes: Mapping[str, int]) -> Callable[[], None]:
        """The call for a batch of these sizes, with everything made that doesn't change from step to step."""
        leaves = [
            leaf if cut is None else _cut(leaf, cut, sizes)
            for leaf, cut in zip(self._leaves, self._cuts, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        keepers = [result.bind(sizes) for result in self._results]
        break_, spec, where = self.break_, self._result_spec, self.where
        single = spec.is_leaf()
        at = sizes if break_.out is not None else None

        def call() -> None:
            try:
                result = break_.call(args, kwargs, at)
            except Exception as error:
                error.add_note(f"graphkit: in break {break_.name} of {where}, batch {dict(sizes)}")
                raise
            if single:
                keepers[0](result)
                return
            found, found_spec = pytree.tree_flatten(result)
            if found_spec != spec:
                raise BreakError(
                    f"{where}: break {break_.name} returned {_describe(result)} for the batch {dict(sizes)}, and "
                    f"another structure at the capture"
                )
            for keeper, value in zip(keepers, found, strict=True):
                keeper(value)

        return call


def _cut(tensor: torch.Tensor, cut: tuple[Extent, ...], sizes: Mapping[str, int]) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        for axis, extent in enumerate(cut):
            if not isinstance(extent, int):
                tensor = tensor.narrow(axis, 0, min(extent.size(sizes), tensor.shape[axis]))
        return tensor


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


class _Result:
    """One leaf of what a break returned, and how later runs have to agree with it."""

    def __init__(
        self, where: str, value: Any, stable: torch.Tensor | None, rows: Extent | None
    ) -> None:
        self._where = where
        self._stable = stable
        self._rows = rows
        self._value = None if isinstance(value, torch.Tensor) else value
        self._address = value.data_ptr() if isinstance(value, torch.Tensor) else None
        self._dtype = value.dtype if isinstance(value, torch.Tensor) else None
        self._shape = tuple(value.shape) if isinstance(value, torch.Tensor) else ()

    def bind(self, sizes: Mapping[str, int]) -> Callable[[Any], None]:
        """What takes the value in each run."""
        if self._dtype is None:
            return self._check_value
        batch = f"batch {dict(sizes)}"
        if self._stable is None:
            return lambda value: self._check_address(value, batch)
        rows = self._rows
        real = self._shape[0] if rows is None or isinstance(rows, int) else rows.size(sizes)
        shape = (min(real, self._shape[0]), *self._shape[1:]) if self._shape else ()
        target = self._stable if shape == self._shape else self._stable[: shape[0]]
        beyond = None if shape == self._shape else self._stable[shape[0] :]

        def keep(value: Any) -> None:
            if not isinstance(value, torch.Tensor) or value.dtype != self._dtype:
                raise BreakError(
                    f"{self._where} returned {_describe(value)} for the {batch}, and {self._dtype} at the capture"
                )
            if value.shape == self._shape:
                self._stable.copy_(value)  # type: ignore[union-attr]
            elif value.shape == shape:
                target.copy_(value)
                if beyond is not None:
                    beyond.zero_()
            else:
                raise BreakError(
                    f"{self._where} returned shape {tuple(value.shape)} for the {batch}, expected {shape} or {self._shape}"
                )

        return keep

    def _check_value(self, value: Any) -> None:
        if type(value) is not type(self._value) or value != self._value:
            raise BreakError(
                f"{self._where} returned {value!r}, and {self._value!r} at the capture, which the later segments have "
                f"baked; return a tensor, or make it a variant"
            )

    def _check_address(self, value: Any, batch: str) -> None:
        if not isinstance(value, torch.Tensor) or value.data_ptr() != self._address:
            raise BreakError(
                f"{self._where} returned {_describe(value)} for the {batch}, which is not the memory that it returned at the "
                f"capture; later segments read that memory"
            )


class CaptureRecorder:
    """Ends a segment at each break, runs the break on real values, and begins the next segment."""

    def __init__(
        self,
        backend: Backend,
        pool: Any,
        step: Step,
        where: str,
        calls: Sequence[Call],
        rows: RowInference,
        known: Mapping[int, Buffer],
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._step = step
        self._where = where
        self._calls = calls
        self._rows = rows
        self._known = known
        self._capture: Capture | None = None
        self.parts: list[Graph | BreakCall] = []

    def begin(self, capture: Capture) -> None:
        """The capture that the breaks split."""
        self._capture = capture

    def finish(self, last: Graph) -> PiecewiseGraph:
        """The capture has ended with this segment.

        Raises:
            CaptureError: fewer breaks were reached than in the warm-up.
        """
        reached = sum(isinstance(part, BreakCall) for part in self.parts)
        if reached != len(self._calls):
            raise CaptureError(
                f"{self._where}: the capture reached {reached} breaks and the warm-up {len(self._calls)}; a function must "
                f"reach the same breaks each time"
            )
        return PiecewiseGraph([*self.parts, last])

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, run the break, begin the next."""
        capture = self._capture
        if capture is None:
            raise CaptureError(
                f"{self._where}: break {break_.name} was reached outside the capture"
            )
        index = sum(isinstance(part, BreakCall) for part in self.parts)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        call = self._check(break_, index, leaves)
        try:
            self.parts.append(capture.split())
        except RuntimeError as error:
            raise BreakError(
                f"{self._where}: the segment before break {break_.name} can't be ended: {error}. A side stream must be joined "
                f"before a break, as by current_stream().wait_stream(side)"
            ) from error
        part = BreakCall(
            break_,
            self._where,
            [
                self._held(leaf, address)
                for leaf, address in zip(leaves, call.addresses, strict=True)
            ],
            spec,
            self._cuts(break_, index, leaves, spec),
        )
        with running(self._step):
            result = break_.call(args, kwargs, self._step.dispatch.sizes)
        given = self._keep(part, break_, index, leaves, result)
        self.parts.append(part)
        capture.resume()
        return given

    def _check(self, break_: Break, index: int, leaves: Sequence[Any]) -> Call:
        if index >= len(self._calls) or self._calls[index].break_ is not break_:
            expected = self._calls[index].break_.name if index < len(self._calls) else "none"
            raise CaptureError(
                f"{self._where}: the capture reached break {break_.name} as number {index + 1}, and the warm-up {expected}; a "
                f"function must reach the same breaks each time"
            )
        call = self._calls[index]
        for before, now in zip(call.values, leaves, strict=True):
            if not isinstance(now, torch.Tensor) and not _equal(before, now):
                raise CaptureError(
                    f"{self._where}: break {break_.name} got {before!r} in the warm-up and {now!r} in the capture. Its Python "
                    f"arguments are baked: take what changes from current_run(), or pass a tensor"
                )
        return call

    def _held(self, leaf: Any, warm_address: int | None) -> Any:
        """An argument as the call keeps it: memory of the pool must be free for later segments."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.data_ptr() == warm_address:
            # At the same address in the warm-up: memory from outside the capture.
            return leaf.detach()
        return self._backend.alias(leaf)

    def _cuts(
        self, break_: Break, index: int, leaves: Sequence[Any], spec: Any
    ) -> list[tuple[Extent, ...] | None]:
        if break_.rows == "bucket":
            return [None] * len(leaves)
        named = break_.rows if isinstance(break_.rows, Mapping) else None
        names = _leaf_names(break_, spec, len(leaves))
        cuts: list[tuple[Extent, ...] | None] = []
        for position, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
                cuts.append(None)
            elif named is not None:
                cuts.append((named[name],) if name in named else None)
            elif leaf.data_ptr() in self._known and self._is_view(leaf):
                cuts.append(self._known[leaf.data_ptr()].spec.shape)
            else:
                extent = self._rows.argument(break_, index, position)
                cuts.append(None if isinstance(extent, int) else (extent,))
        return cuts

    def _is_view(self, leaf: torch.Tensor) -> bool:
        buffer = self._known[leaf.data_ptr()]
        return leaf.shape == buffer.view(self._step.dispatch.sizes).shape

    def _keep(
        self, part: BreakCall, break_: Break, index: int, leaves: Sequence[Any], result: Any
    ) -> Any:
        found, spec = pytree.tree_flatten(result)
        storages = {
            leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)
        }
        storages |= {buffer.tensor.untyped_storage().data_ptr() for buffer in self._known.values()}
        if break_.out is not None:
            storages.add(break_.out.tensor.untyped_storage().data_ptr())
        where = f"{self._where}: break {break_.name}"
        results, given = [], []
        for position, value in enumerate(found):
            stable: torch.Tensor | None = None
            rows: Extent | None = None
            if isinstance(value, torch.Tensor):
                if value.untyped_storage().data_ptr() not in storages:
                    stable = self._backend.empty_in(self._pool, value)
                    stable.copy_(value)
                    if break_.rows != "bucket" and value.ndim:
                        rows = self._rows.result(break_, index, position)
            elif value is not None and not isinstance(value, (bool, int, float, str)):
                raise BreakError(
                    f"{where} returned {_describe(value)}; tensors, None and plain Python values can be returned"
                )
            results.append(_Result(where, value if stable is None else stable, stable, rows))
            given.append(value if stable is None else stable)
        part.keep([_weakened(r, self._backend) for r in results], spec)
        return pytree.tree_unflatten(given, spec)


def _weakened(result: _Result, backend: Backend) -> _Result:
    """The memory is the pool's: the function's own references decide how long no other tensor gets it."""
    if result._stable is not None:
        result._stable = backend.alias(result._stable)
    return result


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    try:
        return type(left) is type(right) and bool(left == right)
    except Exception:
        return False


def _leaf_names(break_: Break, spec: Any, count: int) -> list[str]:
    """The parameter that each leaf of the arguments belongs to; empty where it can't be told."""
    args_spec, kwargs_spec = spec.children() if hasattr(spec, "children") else spec.children_specs
    names: list[str] = []
    for position, child in enumerate(_children(args_spec)):
        parameter = break_.parameters[position] if position < len(break_.parameters) else ""
        names.extend([parameter] * child.num_leaves)
    keys = list(kwargs_spec.context) if kwargs_spec.context else []
    for key, child in zip(keys, _children(kwargs_spec), strict=True):
        names.extend([str(key)] * child.num_leaves)
    return names if len(names) == count else [""] * count


def _children(spec: Any) -> list[Any]:
    children = spec.children
    return list(children() if callable(children) else children)


class RowInference:
    """Which dim the first axis of each tensor of each break call is, judged over all buckets."""

    def __init__(
        self,
        where: str,
        warmups: Sequence[tuple[Bucket, Sequence[Call]]],
        dims: Iterable[Dim],
        uniform: Mapping[tuple[str, str], int],
    ) -> None:
        self._where = where
        self._warmups = warmups
        self._dims = list(dims)
        self._uniform = uniform

    def argument(self, break_: Break, index: int, position: int) -> Extent:
        """The first axis of an argument's leaf.

        Raises:
            CaptureError: it could be more than one thing.
        """
        return self._infer(break_, index, position, "shapes", "argument")

    def result(self, break_: Break, index: int, position: int) -> Extent:
        """The first axis of a result's leaf."""
        return self._infer(break_, index, position, "results", "result")

    def _infer(self, break_: Break, index: int, position: int, which: str, what: str) -> Extent:
        samples = []
        for bucket, calls in self._warmups:
            shapes = getattr(calls[index], which) if index < len(calls) else ()
            shape = shapes[position] if position < len(shapes) else None
            if shape:
                samples.append(Sample(bucket.sizes, (shape[0],)))
        try:
            return infer_shape(samples, self._dims, self._uniform, f"{what} {position}")[0]
        except SpecError as error:
            raise CaptureError(
                f"{self._where}: break {break_.name} wants real rows, and {error}. For a break, say it with "
                f"eager_break(rows={{parameter: dim}})"
            ) from None


class PiecewiseGraph:
    """Segments and break calls, in order."""

    def __init__(self, parts: Sequence[Graph | BreakCall]) -> None:
        self.parts = list(parts)

    @property
    def segments(self) -> tuple[Graph, ...]:
        """The graphs between the breaks."""
        return tuple(part for part in self.parts if not isinstance(part, BreakCall))

    @property
    def num_nodes(self) -> int:
        """Operations in all segments; -1 if unknown."""
        counts = [segment.num_nodes for segment in self.segments]
        return -1 if -1 in counts else sum(counts)

    def bind(self, sizes: Mapping[str, int]) -> tuple[Callable[[], None], ...]:
        """What a replay for a batch of these sizes calls, one after another."""
        return tuple(
            part.bind(sizes) if isinstance(part, BreakCall) else part.replay
            for part in self.parts
            if isinstance(part, BreakCall) or part.num_nodes != 0
        )

    def replay(self) -> None:
        """A PIECEWISE graph has no meaning without a batch."""
        raise CaptureError("a PIECEWISE graph is replayed for a batch: use bind(sizes)")

    def release(self) -> None:
        """Release all segments, and what the breaks kept."""
        for segment in self.segments:
            segment.release()
        self.parts = []

    def difference(self, other: Any) -> str | None:
        """The first difference of a segment from that of another capture."""
        mine, theirs = self.segments, other.segments
        if len(mine) != len(theirs):
            return f"one has {len(mine)} segments and the other {len(theirs)}"
        for left, right in zip(mine, theirs, strict=True):
            found = left.difference(right)
            if found is not None:
                return found
        return None
