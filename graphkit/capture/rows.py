"""Rows: which axes of the tensors of a break grow with the batch, judged over all buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from graphkit.buffers import Extent
from graphkit.dims import Dim
from graphkit.errors import CaptureError, SpecError
from graphkit.outputs.inference import Sample, infer_shape

if TYPE_CHECKING:
    from graphkit.capture.breaks import Break
    from graphkit.capture.recorders import WarmupCall
    from graphkit.dispatch.buckets import Bucket

Shape = tuple[int, ...]


class RowInference:
    """What the axes of the arguments and results of breaks are, from the warm-ups of all buckets.

    Args:
        where: begins messages.
        warmups: the break calls of each bucket's warm-up.
        uniform: as `infer_shape` takes it.
    """

    def __init__(
        self,
        where: str,
        warmups: Sequence[tuple[Bucket, Sequence[WarmupCall]]],
        dims: Iterable[Dim],
        uniform: Mapping[tuple[str, str], int],
    ) -> None:
        self._where = where
        self._warmups = warmups
        self._dims = list(dims)
        self._uniform = uniform

    def argument(self, break_: Break, occurrence: int, leaf: int) -> tuple[Extent, ...]:
        """Each axis of an argument.

        Args:
            occurrence: which call of this break, counted from 0.
            leaf: which leaf of the arguments.

        Raises:
            CaptureError: an axis could be more than one thing: a pad row may not reach the break.
        """
        seen = self._seen(break_, occurrence, leaf, "shapes")
        try:
            return tuple(
                self._infer(seen, axis, f"argument {leaf}") for axis in range(len(seen[0][1]))
            )
        except SpecError as error:
            # What is said there of outputs doesn't help here.
            doubt = str(error).partition("; declare it")[0]
            raise CaptureError(
                f"{self._where}: break {break_.name} wants real rows, and {doubt}. Say it, as "
                "eager_break(rows={parameter: dim}) or eager_break(rows={parameter: {axis: dim}})"
            ) from None

    def result(
        self, break_: Break, occurrence: int, leaf: int, shape: Shape, sizes: Mapping[str, int]
    ) -> tuple[tuple[Extent, ...], ...]:
        """What each axis of a result may be at a batch, beside its size at the bucket.

        A wrong guess can't do harm here, since what comes has a shape of its own; so whatever fits
        is allowed.
        """
        seen = self._seen(break_, occurrence, leaf, "results")
        found: list[tuple[Extent, ...]] = []
        for axis, size in enumerate(shape):
            try:
                found.append((self._infer(seen, axis, f"result {leaf}"),))
            except SpecError:
                found.append(self._suspects(size, sizes))
        return tuple(found)

    def _suspects(self, size: int, sizes: Mapping[str, int]) -> tuple[Extent, ...]:
        suspects: list[Extent] = []
        for dim in self._dims:
            padded = sizes.get(dim.name, 0)
            if padded and size and size % padded == 0:
                suspects.append(dim * (size // padded) if size > padded else dim)
            elif size == padded + 1:
                suspects.append(dim + 1)
        return tuple(suspects)

    def _seen(
        self, break_: Break, occurrence: int, leaf: int, which: str
    ) -> list[tuple[Mapping[str, int], Shape]]:
        seen: list[tuple[Mapping[str, int], Shape]] = []
        for bucket, calls in self._warmups:
            mine = [call for call in calls if call.break_ is break_]
            shapes = getattr(mine[occurrence], which) if occurrence < len(mine) else ()
            shape = shapes[leaf] if leaf < len(shapes) else None
            if shape is not None:
                seen.append((bucket.sizes, shape))
        return seen

    def _infer(
        self, seen: Sequence[tuple[Mapping[str, int], Shape]], axis: int, what: str
    ) -> Extent:
        sizes = [shape[axis] for _, shape in seen]
        constant = len(set(sizes)) == 1
        if axis and constant:
            # Rows are rarely here; but a size that is the bucket's in all of them may well be rows.
            rows = [d for d in self._dims if all(s[d.name] == sizes[0] for s, _ in seen)]
            if not rows or sizes[0] == 1:
                return sizes[0]
            raise SpecError(
                f"{what}: axis {axis} of size {sizes[0]} could be {rows[0]} or {sizes[0]}, "
                "and the buckets can't tell"
            )
        samples = [Sample(at, (size,)) for (at, _), size in zip(seen, sizes, strict=True)]
        return infer_shape(samples, self._dims, self._uniform, what)[0]
