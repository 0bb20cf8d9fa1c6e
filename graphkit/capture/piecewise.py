"""PIECEWISE graphs: segments with eager breaks between, as they are replayed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from graphkit.backends.base import Graph
from graphkit.buffers import Buffer, Extent
from graphkit.capture.baked import same
from graphkit.capture.breaks import Break
from graphkit.errors import BreakError, CaptureError
from graphkit.outputs.inference import sizes_text
from graphkit.pads import as_fed, steps_of, tensor_fills
from graphkit.runner.step import Step, reset_current, set_current

Piece = Callable[[], Any]
"""A graph's replay, or a break's call."""


def launcher(pieces: Sequence[Piece], step: Step | None) -> Piece:
    """One call for all pieces, in order.

    Args:
        step: what breaks find as `current_run()`; None where there is no break.
    """
    if len(pieces) == 1 and step is None:
        return pieces[0]

    def launch() -> None:
        for piece in pieces:
            piece()

    if step is None:
        return launch

    def launch_with_breaks() -> None:
        graded = torch.is_grad_enabled()
        if graded:
            torch.set_grad_enabled(False)
        # A generator's context manager would cost a replay's time.
        token = set_current(step)
        piece: Piece = launch
        try:
            for piece in pieces:
                # A graph returns nothing, and so does what takes a break's value.
                result = piece()
                if result is not None:
                    piece.take(result)  # type: ignore[attr-defined]
        except Exception as error:
            note = getattr(piece, "note", None)
            if note is not None:
                error.add_note(note)
            raise
        finally:
            reset_current(token)
            if graded:
                torch.set_grad_enabled(True)

    return launch_with_breaks


class BreakCall:
    """One call of a break between two segments, as it is repeated.

    Args:
        leaves: of its arguments.
        cuts: for each of them, the axes to cut to the batch.
        padded: the sizes of the bucket.
    """

    def __init__(
        self,
        break_: Break,
        where: str,
        leaves: Sequence[Any],
        spec: Any,
        cuts: Sequence[Mapping[int, Extent] | None],
        padded: Mapping[str, int],
    ) -> None:
        self.break_ = break_
        self.where = where
        self._leaves = list(leaves)
        self._spec = spec
        self._cuts = list(cuts)
        self._padded = padded
        self._returned: list[Returned] = []
        self._returned_spec: Any = None

    def keep(self, returned: list[Returned], spec: Any) -> None:
        """What the call returned at the capture."""
        self._returned = returned
        self._returned_spec = spec

    def bind(self, sizes: Mapping[str, int]) -> Piece:
        """The call for a batch of these sizes; what stays from step to step is made here."""
        break_, fn = self.break_, self.break_.fn
        leaves = [
            leaf if cut is None else _cut(leaf, cut, sizes)
            for leaf, cut in zip(self._leaves, self._cuts, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        note = f"graphkit: in break {break_.name} of {self.where}, batch {sizes_text(sizes)}"
        out = break_.out
        take = self._taker(sizes) if out is None else self._filler(out, kwargs, sizes)
        spec, given_out = self._spec, kwargs.get("out")
        # What a break might change in place is made anew for each call, as the function would.
        is_changeable = any(isinstance(leaf, np.ndarray) for leaf in leaves) or any(
            isinstance(value, (list, dict, tuple)) for value in (*args, *kwargs.values())
        )

        if is_changeable:

            def run() -> Any:
                fresh = [x.copy() if isinstance(x, np.ndarray) else x for x in leaves]
                own_args, own_kwargs = pytree.tree_unflatten(fresh, spec)
                if out is not None:
                    own_kwargs["out"] = given_out
                return fn(*own_args, **own_kwargs)

        else:
            run = functools.partial(fn, *args, **kwargs)
        if out is None and self._returned_spec.is_leaf() and self._returned[0].is_none:
            # Between two launches every tenth of a microsecond is a part of theirs: the launcher looks for a value.
            bare = functools.partial(run)
            bare.take, bare.note = take, note  # type: ignore[attr-defined]
            return bare

        def call() -> None:
            take(run())

        call.note = note  # type: ignore[attr-defined]
        return call

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Mapping[str, int]) -> Any:
        """The same call outside the graph, on other tensors: what later segments would find.

        Args:
            args: of the bucket's size, like `kwargs`.
            kwargs: by name, without ``out``.
            sizes: the batch's.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        cut = [
            leaf if cut is None else _cut(leaf, cut, sizes)
            for leaf, cut in zip(leaves, self._cuts, strict=True)
        ]
        cut_args, cut_kwargs = pytree.tree_unflatten(cut, spec)
        out = self.break_.out
        if out is not None:
            pad = self._filler(out, cut_kwargs, sizes)
            pad(self.break_.fn(*cut_args, **cut_kwargs))
            return out.view(self._padded)
        found, found_spec = pytree.tree_flatten(self.break_.fn(*cut_args, **cut_kwargs))
        whole = [
            returned.whole(value) for returned, value in zip(self._returned, found, strict=True)
        ]
        return pytree.tree_unflatten(whole, found_spec)

    def _filler(
        self, out: Buffer, kwargs: dict[str, Any], sizes: Mapping[str, int]
    ) -> Callable[[Any], None]:
        """The break fills its buffer itself; rows beyond the batch get the buffer's pad."""
        padded = out.view(self._padded)
        view = padded if self.break_.rows == "bucket" else out.view(sizes)
        kwargs["out"] = view
        if view.shape == padded.shape:
            return lambda result: None
        # The break sees the batch's rows only, so that what its buffer's producer owes is owed here.
        pads = as_fed(out.spec.pads)
        fills = tensor_fills(padded, tuple(view.shape), pads, steps_of(padded, pads))

        def pad(result: Any) -> None:
            for each in fills:
                each.run()

        return pad

    def _taker(self, sizes: Mapping[str, int]) -> Callable[[Any], None]:
        """What takes the value of each call."""
        spec, where, name = self._returned_spec, self.where, self.break_.name
        keepers = [returned.bind(sizes) for returned in self._returned]
        if spec.is_leaf():
            return keepers[0]

        def take(result: Any) -> None:
            found, found_spec = pytree.tree_flatten(result)
            if found_spec != spec:
                raise BreakError(
                    f"{where}: break {name} returned {describe(result)} for the batch "
                    f"{sizes_text(sizes)}, and another structure at the capture"
                )
            for keeper, value in zip(keepers, found, strict=True):
                keeper(value)

        return take


def _cut(tensor: torch.Tensor, cut: Mapping[int, Extent], sizes: Mapping[str, int]) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        for axis, extent in cut.items():
            if not isinstance(extent, int):
                tensor = tensor.narrow(axis, 0, min(extent.size(sizes), tensor.shape[axis]))
        return tensor


def _beyond(tensor: torch.Tensor, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of what lies in `tensor` outside its first `shape`, each element once."""
    rest = []
    with torch.inference_mode(False), torch.no_grad():
        for axis, size in enumerate(shape):
            if size < tensor.shape[axis]:
                rest.append(tensor.narrow(axis, size, tensor.shape[axis] - size))
                tensor = tensor.narrow(axis, 0, size)
    return rest


def describe(value: Any) -> str:
    """A value in words, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"{value!r} ({type(value).__name__})"


class Returned:
    """One leaf of what a break returned, and how later runs have to agree with it.

    Args:
        value: what it was at the capture.
        stable: the memory that later segments read; None if it is the value's own.
        extents: for each axis, what its size at a batch may be, beside its size at the bucket.
    """

    def __init__(
        self,
        where: str,
        value: Any,
        stable: torch.Tensor | None = None,
        extents: tuple[tuple[Extent, ...], ...] = (),
    ) -> None:
        self._where = where
        self._stable = stable
        self._extents = extents
        is_tensor = isinstance(value, torch.Tensor)
        self._value = None if is_tensor else value
        self._address = value.data_ptr() if is_tensor else None
        self._stride = value.stride() if is_tensor else ()
        self._dtype = value.dtype if is_tensor else None
        self._shape = value.shape if is_tensor else torch.Size(())

    @property
    def is_none(self) -> bool:
        """Whether it was None."""
        return self._dtype is None and self._value is None

    def whole(self, value: Any) -> Any:
        """The value of an eager call at the bucket's size, as later segments would find it."""
        if not isinstance(value, torch.Tensor) or value.shape == self._shape:
            return value
        if self._stable is None:
            # Memory that was there before: they read all of it.
            return value.as_strided(self._shape, self._stride)
        whole = torch.zeros(self._shape, dtype=value.dtype, device=value.device)
        whole[tuple(slice(0, size) for size in value.shape)] = value
        return whole

    def bind(self, sizes: Mapping[str, int]) -> Callable[[Any], None]:
        """What takes the value in each run."""
        if self._dtype is None:
            return self._check_value
        batch = f"batch {sizes_text(sizes)}"
        if self._stable is None:
            return self._address_check(batch)
        return self._copier(self._stable, sizes, batch)

    def _copier(
        self, stable: torch.Tensor, sizes: Mapping[str, int], batch: str
    ) -> Callable[[Any], None]:
        dtype, full = self._dtype, self._shape
        allowed = self._shapes_at(sizes)
        # The parts to write, by the shape that came; made when it first comes.
        parts: dict[torch.Size, tuple[torch.Tensor, list[torch.Tensor]]] = {}

        def keep(value: Any) -> None:
            if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
                raise BreakError(
                    f"{self._where} returned {describe(value)} for the {batch}, "
                    f"and {dtype} at the capture"
                )
            shape = value.shape
            if shape == full:
                stable.copy_(value)
                return
            part = parts.get(shape)
            if part is None:
                if tuple(shape) not in allowed:
                    expected = " or ".join(map(str, allowed))
                    raise BreakError(
                        f"{self._where} returned shape {tuple(shape)} for the {batch}, "
                        f"expected {expected}; later segments have baked the shape"
                    )
                target = stable
                for axis, size in enumerate(shape):
                    target = target.narrow(axis, 0, size)
                part = parts[shape] = target, _beyond(stable, tuple(shape))
            target, beyond = part
            target.copy_(value)
            for rest in beyond:
                rest.zero_()

        return keep

    def _shapes_at(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes that may come at a batch of these sizes; the likeliest first."""
        if not self._extents:
            return [tuple(self._shape)]
        axes = []
        for full, extents in zip(self._shape, self._extents, strict=True):
            real = [e if isinstance(e, int) else min(e.size(sizes), full) for e in extents]
            axes.append(list(dict.fromkeys([*real, full])))
        return list(itertools.product(*axes))

    def _check_value(self, value: Any) -> None:
        if same(value, self._value):
            return
        raise BreakError(
            f"{self._where} returned {value!r}, and {self._value!r} at the capture, "
            "which the later segments have baked; return a tensor, or make it a variant"
        )

    def _address_check(self, batch: str) -> Callable[[Any], None]:
        address, stride, dtype = self._address, self._stride, self._dtype

        def check(value: Any) -> None:
            # A batch of no rows has no address.
            if (
                isinstance(value, torch.Tensor)
                and value.data_ptr() in (address, 0)
                and (value.stride() == stride or self._lies_alike(value))
                and value.dtype is dtype
            ):
                return
            raise BreakError(
                f"{self._where} returned {describe(value)} for the {batch}, which is not the "
                "memory that it returned at the capture, or not as it lay there; later segments "
                "read that memory"
            )

        return check

    def _lies_alike(self, value: torch.Tensor) -> bool:
        """Whether the strides agree in each axis where they mean anything."""
        return value.ndim == len(self._stride) and all(
            size <= 1 or mine == theirs
            for size, mine, theirs in zip(value.shape, value.stride(), self._stride, strict=True)
        )


class PiecewiseGraph:
    """Segments and break calls, in order."""

    def __init__(self, parts: Sequence[Graph | BreakCall]) -> None:
        self.parts = list(parts)

    @property
    def segments(self) -> tuple[Graph, ...]:
        """The graphs between the breaks."""
        return tuple(part for part in self.parts if not isinstance(part, BreakCall))

    @property
    def breaks(self) -> tuple[BreakCall, ...]:
        """The break calls between the segments."""
        return tuple(part for part in self.parts if isinstance(part, BreakCall))

    @property
    def num_nodes(self) -> int:
        """Operations in all segments; -1 if unknown."""
        counts = [segment.num_nodes for segment in self.segments]
        return -1 if -1 in counts else sum(counts)

    def bind(self, sizes: Mapping[str, int]) -> tuple[Piece, ...]:
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
