"""Strategies for what a batch's inputs hold, and for the ways of giving them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from graphkit.buffers import Buffer, BufferSpec, shape_at
from graphkit.dims import Affine, affine
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import Dispatch
from graphkit.errors import SpecError
from graphkit.pads import as_bits
from graphkit.runner.runner import GraphRunner
from graphkit.staging.hostdata import has_numpy, numpy_dtype
from graphkit.testing.strategies.batches import Batch, batches_of, ties_of

WAYS = ("array", "tensor", "list", "strided", "reversed", "transposed", "device", "device strided")
"""How an input may be given: a NumPy array, a CPU tensor, a list or scalar, an array or tensor that isn't
contiguous in one of three manners, or a tensor on the runner's device."""

_LIST_LIMIT = 512
"""Elements that are still given as a list: making longer ones takes most of an example's time."""

_seeds = st.integers(0, 0xFFFF)

Given = Mapping[str, Any]
"""name -> a value, a strategy of one, or a function of the dispatch that gives either."""


@attrs.frozen
class Contents:
    """Which values are drawn.

    Args:
        extreme: the dtype's largest and smallest values, subnormal ones and -0.0 among them.
        nan: NaN and the infinities among them, where the dtype has them.
    """

    extreme: bool = False
    nan: bool = False


def inputs_for(
    runner: GraphRunner,
    dispatch: Dispatch | Batch,
    *,
    extreme: bool = False,
    nan: bool = False,
    ways: Sequence[str] = WAYS,
    given: Given | None = None,
) -> st.SearchStrategy[dict[str, Any]]:
    """Legal inputs for one run: ``runner.run(dispatch, inputs)``.

    Each fed parameter gets an array or tensor of its real shape. Integers with a `valid` range are indices: inside it,
    no two alike while there are enough, and never the pad. Other integers are from 0 to 7, in case somebody indexes
    with them all the same; floats are from -2 to 2 in eighths, which all dtypes hold. Row boundaries (integers of
    shape ``(reqs + 1,)``) begin at 0, never fall, end at the tokens, and keep to what the batch states of its queries.
    What the runner's ``example=`` gives is taken as it is. Inputs are independent of each other otherwise: where the
    function needs more (lengths that fit a page table), say so by `given`. Shrinks to inputs that all hold their pad.

    Args:
        runner: the runner, captured or not.
        dispatch: what its `dispatch` answered, or the batch.
        extreme: also the largest and smallest values of a dtype (of integers only where no `valid` is).
        nan: also NaN and infinities.
        ways: how inputs may be given, of `WAYS`.
        given: name -> what is given instead: a value, a strategy of it, or a function of `dispatch` that gives
            either.

    Raises:
        SpecError: a way or a name is unknown.
    """
    contents = Contents(extreme, nan)
    checked = _checked(runner, given)
    return _inputs(runner, dispatch, contents, _checked_ways(ways), checked)


@st.composite
def _inputs(
    draw: st.DrawFn,
    runner: GraphRunner,
    dispatch: Dispatch | Batch,
    contents: Contents,
    ways: tuple[str, ...],
    given: Given,
) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    given = {**_example(runner, dispatch), **given}
    for name, buffer in runner.binding.fed.items():
        if name in given:
            inputs[name] = draw(_as_strategy(given[name], dispatch))
            continue
        tensor = draw(_tensors(runner, buffer, dispatch, contents))
        way = draw(
            st.sampled_from([way for way in ways if _is_possible(way, tensor)] or ["tensor"])
        )
        inputs[name] = _in_the_way(way, tensor, runner.backend.device)
    return inputs


def residents_for(
    runner: GraphRunner,
    dispatch: Dispatch | Batch,
    *,
    extreme: bool = False,
    nan: bool = False,
    given: Given | None = None,
) -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """What a producer leaves in the runner's resident buffers: CPU tensors of the real shapes, by parameter.

    The arguments are those of `inputs_for`.
    """
    return _residents(runner, dispatch, Contents(extreme, nan), _checked(runner, given))


@st.composite
def _residents(
    draw: st.DrawFn,
    runner: GraphRunner,
    dispatch: Dispatch | Batch,
    contents: Contents,
    given: Given,
) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    given = {**_example(runner, dispatch), **given}
    for name, buffer in runner.binding.resident.items():
        if name in given:
            value = draw(_as_strategy(given[name], dispatch))
            made[name] = torch.as_tensor(value, dtype=buffer.spec.dtype, device="cpu")
        else:
            made[name] = draw(_tensors(runner, buffer, dispatch, contents))
    return made


def histories(
    runner: GraphRunner,
    *,
    max_size: int = 8,
    where: Callable[[Batch], bool] | None = None,
    extreme: bool = False,
    nan: bool = False,
    ways: Sequence[str] = WAYS,
    given: Given | None = None,
) -> st.SearchStrategy[list[tuple[Batch, dict[str, Any]]]]:
    """Batches with their inputs, to run one after the other. Shrinks to the shortest history of the least batches.

    Args:
        runner: the runner, captured or not.
        max_size: the longest history.
        where: keeps the batches for which it is true.
        extreme: see `inputs_for`.
        nan: see `inputs_for`.
        ways: see `inputs_for`.
        given: see `inputs_for`; functions are called with the `Batch`.

    Raises:
        SpecError: a way or a name is unknown.
    """
    ways, given = _checked_ways(ways), _checked(runner, given)

    def with_inputs(batch: Batch) -> st.SearchStrategy[tuple[Batch, dict[str, Any]]]:
        inputs = inputs_for(runner, batch, extreme=extreme, nan=nan, ways=ways, given=given)
        return st.tuples(st.just(batch), inputs)

    step = batches_of(runner, where=where).flatmap(with_inputs)
    return st.lists(step, min_size=1, max_size=max_size)


def _checked(runner: GraphRunner, given: Given | None) -> Given:
    """What is given, for parameters that there are; those of `inputs_for` and of `residents_for` may be mixed."""
    known = [*runner.binding.fed, *runner.binding.resident]
    for name in given or {}:
        if name not in known:
            raise SpecError(
                f"given= has {name!r}, which runner {runner.name!r} isn't fed and has no resident buffer for; it "
                f"takes {', '.join(known) or 'nothing'}"
            )
    return dict(given or {})


def _checked_ways(ways: Sequence[str]) -> tuple[str, ...]:
    if isinstance(ways, str):
        raise SpecError(f"ways= takes a sequence, got the string {ways!r}; write [{ways!r}]")
    for way in ways:
        if way not in WAYS:
            raise SpecError(f"ways= has no {way!r}; it takes {', '.join(WAYS)}")
    return tuple(ways)


def _example(runner: GraphRunner, dispatch: Dispatch | Batch) -> dict[str, Any]:
    """What the runner's own example says of a batch: its author knows what fits together."""
    example = runner.options.example
    # No bucket is empty, so that no example need know what to do with one.
    if example is None or not all(dispatch.sizes.values()):
        return {}
    bucket = Bucket(
        dispatch.sizes, dispatch.query_len, dispatch.max_query_len, dispatch.variant or {}
    )
    # A value is taken as it is, also one that can be called.
    return {name: st.just(value) for name, value in example(bucket).items()}


def _as_strategy(value: Any, dispatch: Dispatch | Batch) -> st.SearchStrategy[Any]:
    if callable(value) and not isinstance(value, (st.SearchStrategy, torch.Tensor)):
        value = value(dispatch)
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


# -- values -------------------------------------------------------------------------------------


@st.composite
def _tensors(
    draw: st.DrawFn,
    runner: GraphRunner,
    buffer: Buffer,
    dispatch: Dispatch | Batch,
    contents: Contents,
) -> torch.Tensor:
    """A contiguous CPU tensor of the buffer's real shape."""
    spec = buffer.spec
    shape = shape_at(spec.shape, dispatch.sizes)
    bounds = _boundaries(runner, spec, dispatch)
    if bounds is not None:
        return torch.from_numpy(draw(bounds).astype(numpy_dtype(spec.dtype)))
    size = math.prod(shape)
    if spec.valid is not None:
        places = draw(_indices(spec, size))
        return torch.from_numpy(places.astype(numpy_dtype(spec.dtype))).reshape(shape)
    style = draw(st.sampled_from(["pad", "count", "random"]))
    if style == "pad":
        return torch.full(shape, spec.fill, dtype=spec.dtype, device="cpu")
    table = _table(spec.dtype, contents)
    if style == "count":
        places = np.arange(size) % len(table)
    else:
        # Element by element would be more than hypothesis draws in reasonable time: a seed stands for all of them.
        places = np.random.default_rng(draw(_seeds)).integers(0, len(table), size)
    # Of some dtypes torch can't take elements, but of their bits.
    picked: torch.Tensor = as_bits(table)[torch.from_numpy(places)].reshape(shape)
    return picked if picked.dtype is spec.dtype else picked.view(spec.dtype)


def _table(dtype: torch.dtype, contents: Contents) -> torch.Tensor:
    """The values that elements are drawn from, plain ones first."""
    if dtype is torch.bool:
        return torch.tensor([False, True], device="cpu")
    values: list[Any]
    if dtype.is_floating_point or dtype.is_complex:
        values = [place / 8 for place in range(-16, 17)]
        info = torch.finfo(dtype)
        if contents.extreme:
            values += [-0.0, info.max, info.min, info.tiny, -info.tiny, info.eps]
            values += [info.smallest_normal * info.eps] if dtype.itemsize > 1 else []
        if contents.nan:
            values += [float("nan")]
            # Of a format without infinities they would be NaN, or its largest number.
            values += [float("inf"), float("-inf")] if dtype.itemsize > 1 else []
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.tensor(values, dtype=wide, device="cpu").to(dtype)
    values = list(range(8))
    if contents.extreme:
        values += [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    return torch.from_numpy(np.array(values, numpy_dtype(dtype)))


@st.composite
def _indices(draw: st.DrawFn, spec: BufferSpec, size: int) -> np.ndarray[Any, Any]:
    """Indices inside `valid`: no two alike while there are enough, and none that padding uses.

    What is written through equal indices has no defined result, nor has a row that padding writes too.
    """
    low, high = spec.valid or (0, 1)
    info = torch.iinfo(spec.dtype)
    low, high = max(low, info.min), min(high, info.max + 1)
    pads = {
        int(pad.value) for pad in spec.pads if pad and pad.is_constant and pad.value is not None
    }
    skipped = np.array(sorted(pad for pad in pads if low <= pad < high), np.int64)
    count = high - low - len(skipped)
    if count < 1:
        return np.full(size, low)
    style = draw(st.sampled_from(["up", "down", "random"]))
    if style == "random":
        generator = np.random.default_rng(draw(_seeds))
        places = generator.choice(count, min(size, count), replace=False)
        places = np.resize(places, size)
    else:
        places = np.arange(size) % count
        places = places if style == "up" else count - 1 - places
    places = places + low
    for pad in skipped:
        places = places + (places >= pad)
    return places


def _boundaries(
    runner: GraphRunner, spec: BufferSpec, dispatch: Dispatch | Batch
) -> st.SearchStrategy[np.ndarray[Any, Any]] | None:
    """Row boundaries, where the buffer looks like them: where each request begins, and where the last ends."""
    extent = spec.shape[0] if len(spec.shape) == 1 else None
    if not isinstance(extent, Affine) or extent.offset != 1 or extent.factor != 1:
        return None
    if spec.dtype.is_floating_point or spec.dtype.is_complex or spec.dtype is torch.bool:
        return None
    bound = ties_of(runner.dispatcher).get(extent.dim.name)
    reqs = dispatch.sizes[extent.dim.name]
    rows = reqs if bound is None else dispatch.sizes[affine(bound).dim.name]
    low, high = spec.valid or (0, torch.iinfo(spec.dtype).max + 1)
    if not low <= 0 <= rows < high:
        return None
    longest = rows if dispatch.max_query_len is None else dispatch.max_query_len
    return _ascending(reqs, rows, dispatch.query_len, longest)


@st.composite
def _ascending(
    draw: st.DrawFn, reqs: int, rows: int, query_len: int | None, longest: int
) -> np.ndarray[Any, Any]:
    even = np.arange(reqs + 1) * rows // max(reqs, 1)
    if query_len is not None or not reqs or reqs * longest <= rows or draw(st.booleans()):
        return even
    # Each request gets a row where there are enough, and then the rest is dealt out one by one.
    least = 1 if rows >= reqs else 0
    counts = np.full(reqs, least)
    generator = np.random.default_rng(draw(_seeds))
    spare = rows - counts.sum()
    while spare > 0:
        open_ = np.flatnonzero(counts < longest)
        request = generator.choice(open_)
        more = int(generator.integers(1, min(spare, longest - counts[request]) + 1))
        counts[request] += more
        spare -= more
    return np.concatenate([[0], np.cumsum(counts)])


# -- ways of giving -----------------------------------------------------------------------------


def _is_possible(way: str, tensor: torch.Tensor) -> bool:
    exact = has_numpy(tensor.dtype)
    match way:
        case "array":
            return exact
        case "list":
            return exact and 0 < tensor.numel() <= _LIST_LIMIT
        case "reversed":
            return exact and tensor.ndim > 0
        case "strided" | "device strided":
            return tensor.ndim > 0
        case "transposed":
            return tensor.ndim > 1
        case _:
            return True


def _in_the_way(way: str, tensor: torch.Tensor, device: torch.device) -> Any:
    match way:
        case "array":
            return tensor.numpy()
        case "list":
            return tensor.tolist()
        case "strided":
            return _spaced(tensor)
        case "reversed":
            return np.ascontiguousarray(tensor.numpy()[::-1])[::-1]
        case "transposed":
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        case "device":
            return tensor.to(device)
        case "device strided":
            return _spaced(tensor.to(device))
        case _:
            return tensor


def _spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with room between the rows of the first axis."""
    rows, *others = tensor.shape
    spaced = torch.zeros((rows, 2, *others), dtype=tensor.dtype, device=tensor.device)
    spaced[:, 0] = tensor
    return spaced[:, 0]
