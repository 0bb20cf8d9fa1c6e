"""Inference: which expression in the dims a shape is, from what it was in several buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from graphkit.buffers import Extent
from graphkit.dims import Affine, Dim, affine
from graphkit.errors import SpecError


@attrs.frozen
class Sample:
    """One observation for inference: the padded sizes of a bucket, and an output's shape there."""

    sizes: Mapping[str, int]
    shape: tuple[int, ...]


def infer_shape(
    samples: Sequence[Sample],
    dims: Iterable[Dim],
    uniform: Mapping[tuple[str, str], int],
    where: str,
) -> tuple[Extent, ...]:
    """The one expression for each axis that fits all samples.

    An axis that looks constant is only taken for one if no slice of a dim could look so: if it exceeds the least size
    of every dim that varies, or that least size is 1.

    Args:
        uniform: (tokens, reqs) -> query length, where all batches that can be captured have tokens = reqs * length;
            then expressions in the two dims agree, and are one.
        where: begins the message.

    Raises:
        SpecError: none fits, or several do; the candidates are named.
    """
    if len({len(sample.shape) for sample in samples}) != 1:
        shapes = sorted({sample.shape for sample in samples})
        raise SpecError(f"{where}: the number of axes differs between buckets: {shapes}")
    dims = list(dims)
    return tuple(
        _infer_axis(axis, samples, dims, uniform, where) for axis in range(len(samples[0].shape))
    )


def _infer_axis(
    axis: int,
    samples: Sequence[Sample],
    dims: Sequence[Dim],
    uniform: Mapping[tuple[str, str], int],
    where: str,
) -> Extent:
    seen = [sample.shape[axis] for sample in samples]
    varying = [d for d in dims if len({s.sizes[d.name] for s in samples}) > 1]
    fixed = [d for d in dims if d not in varying]
    fits: list[Extent] = []
    for dim in varying:
        line = _line([s.sizes[dim.name] for s in samples], seen, dim)
        if line is not None:
            fits.append(line)
    constant = len(set(seen)) == 1
    doubts: list[Extent] = []
    if constant:
        for dim in varying:
            least = min(s.sizes[dim.name] for s in samples)
            if least > 1 and seen[0] <= least:
                doubts.append(dim)
        for dim in fixed:
            guess = _through(seen[0], samples[0].sizes[dim.name], dim)
            if guess is not None or not varying:
                doubts.append(dim if guess is None else guess)
        if not doubts:
            return seen[0]
        fits.append(seen[0])
    fits = _agreeing(fits, uniform)
    if len(fits) == 1 and not doubts:
        return fits[0]
    if not fits:
        shown = ", ".join(f"{sizes_text(s.sizes)}: {n}" for s, n in zip(samples, seen, strict=True))
        raise SpecError(
            f"{where}: axis {axis} is no one expression in the dims ({shown}); declare it with "
            f"outputs=, as an Output whose shape holds for every batch"
        )
    names = " or ".join(str(c) for c in [*fits, *[d for d in doubts if d not in fits]])
    raise SpecError(
        f"{where}: axis {axis} of size {seen[0]} could be {names}, and {len(samples)} bucket"
        f"{'s' if len(samples) > 1 else ''} can't tell; declare it, as outputs=gk.Output(shape, dtype) for a lone one"
    )


def _through(seen: int, size: int, dim: Dim) -> Extent | None:
    """The expression of `dim` that a reader would suspect behind `seen`, where only one size was observed."""
    if size and seen >= size and seen % size == 0:
        return dim * (seen // size)
    if 0 <= seen - size <= 1:
        return dim + (seen - size)
    # A slice of up to `seen` rows; a single row is the same for every batch.
    return dim if 1 < seen < size else None


def _line(sizes: Sequence[int], seen: Sequence[int], dim: Dim) -> Dim | Affine | None:
    low, high = min(sizes), max(sizes)
    at_low, at_high = seen[sizes.index(low)], seen[sizes.index(high)]
    factor, rest = divmod(at_high - at_low, high - low)
    offset = at_low - factor * low
    if rest or factor < 1 or offset < 0:
        return None
    if any(factor * size + offset != n for size, n in zip(sizes, seen, strict=True)):
        return None
    return dim * factor + offset


def _agreeing(fits: list[Extent], uniform: Mapping[tuple[str, str], int]) -> list[Extent]:
    """Drop an expression in the requests where one in the tokens says the same for every batch."""
    kept: list[Extent] = []
    for fit in fits:
        same = any(
            isinstance(other, (Dim, Affine)) and other is not fit and _implies(other, fit, uniform)
            for other in fits
        )
        if not same:
            kept.append(fit)
    return kept


def _implies(tokens: Dim | Affine, reqs: Extent, uniform: Mapping[tuple[str, str], int]) -> bool:
    if isinstance(reqs, int):
        return False
    left, right = affine(tokens), affine(reqs)
    length = uniform.get((left.dim.name, right.dim.name))
    if length is None:
        return False
    return left.factor * length == right.factor and left.offset == right.offset


def sizes_text(sizes: Mapping[str, int]) -> str:
    """Sizes in words, for a message."""
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "fixed"
