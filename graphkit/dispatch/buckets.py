"""Buckets: sets of padded shapes, and ways to choose them.

A `Buckets` is declared by its maker, before the runner's other dims are known; `Buckets.resolve`
turns it into `Bucket` objects that size them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from graphkit.dims import AtMost, Dim, as_items, as_size, check_name, dims_by_name
from graphkit.dispatch.bucket import Bucket
from graphkit.errors import BucketError, SpecError

Size = int | Dim | AtMost
"""How a set sizes a further dim: a size, the dim itself (its maximum), or ``at_most(another)``."""

__all__ = ["Bucket", "Buckets", "Size"]


def _size(value: object, dim: Dim, what: str = "a bucket size") -> int:
    size = as_size(value, f"{what} of dim {dim.name!r}", minimum=1, error=BucketError)
    if size > dim.maximum:
        raise BucketError(
            f"{what} of dim {dim.name!r} is {size}, above the dim's maximum {dim.maximum}; "
            f"raise the maximum or drop the size"
        )
    return size


def _chosen(dim: Dim, values: Iterable[object], what: str = "a bucket size") -> list[int]:
    sizes = f"the sizes of dim {dim.name!r}"
    given = as_items(values, sizes, error=BucketError)
    if (
        len(given) == 1
        and not isinstance(given[0], (str, bytes))
        and isinstance(given[0], Iterable)
    ):
        given = as_items(given[0], sizes, error=BucketError)
    if not given:
        raise BucketError(f"no bucket sizes of dim {dim.name!r} were given; give at least one")
    return sorted({_size(value, dim, what) for value in given})


def _top(dim: Dim, upto: object) -> int:
    return dim.maximum if upto is None else _size(upto, dim, "upto")


def _powers(top: int) -> list[int]:
    return sorted({1 << power for power in range(top.bit_length())} | {top})


def _ladder(top: int, align: int = 1) -> list[int]:
    sizes = {1, 2, 4}
    size, step = 8, 8
    while size < top:
        sizes.add(size)
        if size >= 32 * step:
            step *= 2
        size += step
    aligned = {-(-size // align) * align for size in sizes}
    return sorted({size for size in aligned if size < top} | {top})


def _check_dim(value: object, what: str) -> Dim:
    if not isinstance(value, Dim):
        raise SpecError(f"{what} must be a Dim, got {value!r} ({type(value).__name__})")
    return value


def _of_dims(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(dim, Dim) for dim in value):
        raise SpecError(
            f"Buckets is made by its methods, as Buckets.of(batch, 1, 2, 4) or Buckets.powers(batch), got {value!r}"
        )


@attrs.frozen
class Buckets:
    """A set of buckets, by the dims that it sizes; made by its static methods.

    All makers take further dims by name (``reqs=at_most(tokens)``, ``pages=64``, ``pages=pages``).
    A dim that a runner uses and the set doesn't mention takes its maximum in every bucket: always
    right, and wasteful where its rows cost something.

    Sizes may be ints or NumPy integers in any order, and repeated; they are sorted and made unique.
    Anything else, 0 and negatives are refused. `upto` stops below the dim's maximum; it, or the
    maximum, is always a bucket itself.

    Raises:
        BucketError: a size can't be a bucket's (no int, below 1, above the maximum, no multiple of
            the query length).
        SpecError: a dim is none, or is sized twice.
    """

    dims: tuple[Dim, ...] = attrs.field(validator=_of_dims)
    """The dims whose sizes the set lists; `Route(max_padding=)` is about the first."""
    points: tuple[tuple[int, ...], ...]
    """The listed sizes, in the order of `dims`, ascending."""
    others: tuple[tuple[str, Size], ...] = ()
    """How further dims are sized, by name."""
    query_len: int | None = None
    max_query_len: int | None = None
    tied: tuple[str, str] | None = None
    """Names of the requests' and the tokens' dim, in a uniform or varlen set."""
    maker: str = attrs.field(default="of", eq=False)

    @staticmethod
    def of(dim: Dim, /, *sizes: int | Iterable[int], **others: Size) -> Buckets:
        """Exactly these sizes; a batch above the largest has no bucket."""
        return _one_axis(
            "of", dim, _chosen(_check_dim(dim, "the dim of Buckets.of"), sizes), others
        )

    @staticmethod
    def powers(dim: Dim, /, *, upto: int | None = None, **others: Size) -> Buckets:
        """1, 2, 4, 8, ... and the top: few graphs, padding below half of a bucket."""
        top = _top(_check_dim(dim, "the dim of Buckets.powers"), upto)
        return _one_axis("powers", dim, _powers(top), others)

    @staticmethod
    def ladder(dim: Dim, /, *, upto: int | None = None, align: int = 1, **others: Size) -> Buckets:
        """1, 2, 4, then steps of 8 up to 256, of 16 up to 512, of 32 up to 1024, ... and the top.

        Above 256 padding is at most a sixteenth of the batch; the number of buckets is about 35 up
        to 256 and 16 more for each doubling.

        Args:
            dim: the dim.
            upto: the top, instead of the dim's maximum.
            align: round every size but the top up to a multiple of this (of a kernel's tile, say).
            others: sizes of further dims.
        """
        top = _top(_check_dim(dim, "the dim of Buckets.ladder"), upto)
        align = as_size(align, "align", minimum=1, error=BucketError)
        return _one_axis("ladder", dim, _ladder(top, align), others)

    @staticmethod
    def uniform(
        reqs: Dim,
        tokens: Dim,
        *,
        query_len: int,
        sizes: Iterable[int] | None = None,
        tokens_sizes: Iterable[int] | None = None,
        upto: int | None = None,
        **others: Size,
    ) -> Buckets:
        """For batches whose requests all have exactly `query_len` tokens.

        Sized in requests; tokens are requests times `query_len`.

        Args:
            reqs: the requests' dim, which the sizes are of.
            tokens: the tokens' dim.
            query_len: tokens of every request.
            sizes: numbers of requests; by default those of `ladder`.
            tokens_sizes: the same as numbers of tokens, each a multiple of `query_len`.
            upto: the top in requests; by default as many as both dims hold.
            others: sizes of further dims.
        """
        query_len = as_size(query_len, "query_len", minimum=1, error=BucketError)
        _two_dims("uniform", reqs, tokens)
        room = min(reqs.maximum, tokens.maximum // query_len)
        if room < 1:
            raise BucketError(
                f"one request of query_len {query_len} is above the maximum {tokens.maximum} of "
                f"dim {tokens.name!r}"
            )
        if sum(given is not None for given in (sizes, tokens_sizes, upto)) > 1:
            raise BucketError("give one of sizes, tokens_sizes and upto")
        if tokens_sizes is not None:
            counts = [
                _requests(size, tokens, query_len) for size in _chosen(tokens, (tokens_sizes,))
            ]
            chosen = _chosen(reqs, counts)
        elif sizes is not None:
            chosen = _chosen(reqs, (sizes,))
        else:
            chosen = _ladder(room if upto is None else _top(reqs, upto))
        if chosen[-1] > room:
            raise BucketError(
                f"{chosen[-1]} requests of query_len {query_len} are {chosen[-1] * query_len} "
                "tokens, "
                f"above the maximum {tokens.maximum} of dim {tokens.name!r}"
            )
        return Buckets(
            dims=(reqs, tokens),
            points=tuple((size, size * query_len) for size in chosen),
            others=_further((reqs, tokens), others),
            query_len=query_len,
            max_query_len=query_len,
            tied=(reqs.name, tokens.name),
            maker="uniform",
        )

    @staticmethod
    def varlen(
        reqs: Dim,
        tokens: Dim,
        *,
        max_query_len: int,
        sizes: Iterable[int] | None = None,
        upto: int | None = None,
        **others: Size,
    ) -> Buckets:
        """For batches whose requests have at most `max_query_len` tokens each.

        Sized in requests; tokens are requests times `max_query_len`, or the tokens' maximum where
        that is less.
        """
        max_query_len = as_size(max_query_len, "max_query_len", minimum=1, error=BucketError)
        _two_dims("varlen", reqs, tokens)
        if sizes is not None and upto is not None:
            raise BucketError("give one of sizes and upto")
        chosen = _ladder(_top(reqs, upto)) if sizes is None else _chosen(reqs, (sizes,))
        return Buckets(
            dims=(reqs, tokens),
            points=tuple((size, min(size * max_query_len, tokens.maximum)) for size in chosen),
            others=_further((reqs, tokens), others),
            max_query_len=max_query_len,
            tied=(reqs.name, tokens.name),
            maker="varlen",
        )

    @staticmethod
    def grid(
        *dims: Dim | Mapping[Dim, Iterable[int]],
        where: Callable[..., bool] | None = None,
        **others: Size,
    ) -> Buckets:
        """Every combination of the sizes of two dims or more.

        Args:
            dims: a dim (its powers of two) or a mapping of dims to their sizes, as
                ``grid(batch, {length: (128, 512)})``.
            where: called with the sizes by name of dim; keeps the combinations for which it is
                true.
            others: sizes of further dims.
        """
        axes: dict[Dim, list[int]] = {}
        for item in dims:
            pairs = item.items() if isinstance(item, Mapping) else ((item, None),)
            for dim, sizes in pairs:
                _check_dim(dim, "a dim of Buckets.grid")
                if dim.name in dims_by_name(axes):
                    raise SpecError(f"dim {dim.name!r} is in the grid twice")
                axes[dim] = _powers(dim.maximum) if sizes is None else _chosen(dim, (sizes,))
        if not axes:
            raise SpecError("Buckets.grid needs at least one dim; use Buckets.fixed() without any")
        names = [dim.name for dim in axes]
        points = tuple(
            point
            for point in itertools.product(*axes.values())
            if where is None or where(**dict(zip(names, point, strict=True)))
        )
        if not points:
            raise BucketError(f"where= keeps no combination of {' and '.join(names)}")
        return Buckets(
            dims=tuple(axes), points=points, others=_further(tuple(axes), others), maker="grid"
        )

    @staticmethod
    def fixed(**sizes: Size) -> Buckets:
        """One bucket: of these sizes, or of a runner that has no dim."""
        return Buckets(dims=(), points=((),), others=_further((), sizes), maker="fixed")

    def __len__(self) -> int:
        return len(self.points)

    @property
    def all_dims(self) -> dict[str, Dim]:
        """Every dim that the set knows as an object, by name, its own first."""
        further: list[Dim | Any] = []
        for _, size in self.others:
            if isinstance(size, Dim):
                further.append(size)
            elif isinstance(size, AtMost):
                further.append(size.dim)
        return dims_by_name((*self.dims, *further))

    def resolve(self, dims: Mapping[str, Dim] | Iterable[Dim]) -> tuple[Bucket, ...]:
        """The buckets of a runner that uses these dims: each sizes every dim, in the dims' order.

        Raises:
            BucketError: a further dim's size is above its maximum.
            SpecError: a further dim is named that nobody declares, or two dims have one name.
        """
        used = dims.values() if isinstance(dims, Mapping) else dims
        known = dims_by_name((*used, *self.all_dims.values()))
        own = {dim.name for dim in self.dims}
        base: dict[str, int] = {}
        bounded: dict[str, AtMost] = {}
        for name, size in self.others:
            if name not in known:
                raise SpecError(
                    f"{self} sizes {name!r}, which is no dim of the runner; its dims are "
                    f"{_listed(known)}"
                )
            if isinstance(size, AtMost):
                bounded[name] = size
            elif isinstance(size, Dim):
                base[name] = size.maximum
            else:
                base[name] = _size(size, known[name])
        for name, dim in known.items():
            if name not in own and name not in base and name not in bounded:
                base[name] = dim.maximum
        buckets = []
        for point in self.points:
            sizes = base | {dim.name: size for dim, size in zip(self.dims, point, strict=True)}
            sizes |= {name: at.size(sizes, known[name].maximum) for name, at in bounded.items()}
            buckets.append(
                Bucket(
                    {name: sizes[name] for name in known},
                    query_len=self.query_len,
                    max_query_len=self.max_query_len,
                )
            )
        return tuple(buckets)

    def __str__(self) -> str:
        parts = [dim.name for dim in self.dims]
        if self.query_len is not None:
            parts.append(f"query_len={self.query_len}")
        elif self.max_query_len is not None:
            parts.append(f"max_query_len={self.max_query_len}")
        parts.extend(f"{name}={size}" for name, size in self.others)
        return f"{self.maker}({', '.join(parts)})"


def _one_axis(maker: str, dim: Dim, sizes: list[int], others: Mapping[str, Size]) -> Buckets:
    points = tuple((size,) for size in sizes)
    return Buckets(dims=(dim,), points=points, others=_further((dim,), others), maker=maker)


def _two_dims(maker: str, reqs: Dim, tokens: Dim) -> None:
    _check_dim(reqs, f"reqs of Buckets.{maker}")
    _check_dim(tokens, f"tokens of Buckets.{maker}")
    if reqs.name == tokens.name:
        raise SpecError(f"Buckets.{maker} needs two dims, got {reqs.name!r} twice")


def _requests(size: int, tokens: Dim, query_len: int) -> int:
    if size % query_len == 0:
        return size // query_len
    below = size // query_len * query_len
    nearest = [str(n) for n in (below, below + query_len) if 0 < n <= tokens.maximum]
    raise BucketError(
        f"a uniform bucket of {size} tokens is no multiple of query_len {query_len}; use "
        f"{' or '.join(nearest)}"
    )


def _further(dims: tuple[Dim, ...], others: Mapping[str, object]) -> tuple[tuple[str, Size], ...]:
    own = {dim.name for dim in dims}
    further: list[tuple[str, Size]] = []
    for name, size in others.items():
        check_name("dim", name)
        if name in own:
            raise SpecError(f"dim {name!r} is sized twice; the set sizes it already")
        if isinstance(size, AtMost):
            bound = size.dim.dim if not isinstance(size.dim, Dim) else size.dim
            if isinstance(others.get(bound.name), AtMost):
                raise SpecError(
                    f"{name}={size} depends on a dim that at_most sizes too; give {bound.name!r} "
                    "a size"
                )
            further.append((name, size))
        elif isinstance(size, Dim):
            if size.name != name:
                raise SpecError(
                    f"{name}={size.name} names another dim; use at_most({size.name}) for its size"
                )
            further.append((name, size))
        else:
            what = f"the bucket size of dim {name!r}"
            further.append((name, as_size(size, what, minimum=1, error=BucketError)))
    return tuple(further)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
