"""Dims: the named sizes that vary from call to call, and what can be made of them in a shape.

A shape is a tuple of ints, dims and affine expressions of one dim each: ``(reqs + 1,)``, ``(4 *
reqs, 512)``.
"""

from __future__ import annotations

import itertools
import keyword
import unicodedata
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NoReturn

import attrs

from graphkit.errors import GraphkitError, InputError, SpecError

RESERVED = frozenset(
    {
        "clone",
        "context",
        "dispatch",
        "eager",
        "example",
        "fn",
        "generators",
        "inputs",
        "max_query_len",
        "mutates",
        "name",
        "outputs",
        "policy",
        "prepare",
        "prepare_host",
        "query_len",
        "reads",
        "strict",
        "supports",
        "variant",
        "variants",
        "warmup_as_capturing",
    }
)
"""Names of options, which no dim and no buffer may have: both are given beside them by keyword."""


def check_name(kind: str, name: object) -> str:
    """Return `name` if a thing of this kind ("dim", "buffer") may have it.

    Raises:
        SpecError: not a Python identifier, a keyword, an option's name, or private.
    """
    if not isinstance(name, str):
        raise SpecError(f"a {kind}'s name must be a str, got {name!r} ({type(name).__name__})")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(
            f"{kind} name {name!r} can't be used as a keyword argument; "
            f"use a Python identifier that is no keyword"
        )
    if name in RESERVED:
        raise SpecError(f"{kind} name {name!r} is reserved for an option; use another name")
    if name.startswith("_"):
        raise SpecError(f"{kind} name {name!r} starts with an underscore; use a public name")
    # Python normalises identifiers in source, so that a name spelled otherwise could never be
    # given.
    if unicodedata.normalize("NFKC", name) != name:
        normal = unicodedata.normalize("NFKC", name)
        raise SpecError(f"{kind} name {name!r} is written {normal!r} in Python source; use that")
    return name


def as_size(
    value: object,
    what: str,
    *,
    minimum: int = 0,
    error: type[GraphkitError] = InputError,
) -> int:
    """Return `value` as an int if it is a size: an int or a NumPy integer, at least `minimum`.

    Args:
        value: anything. Bools and floats are refused although they may equal a size: they hash
            alike, and so would find or make another batch's key.
        what: what the value is, for the message, as in "dim 'reqs'".
        minimum: the least size allowed.
        error: the class to raise.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{what} must be an int, got {value!r} ({type(value).__name__})")
    size = int(value)
    if size < minimum:
        raise error(f"{what} must be at least {minimum}, got {size}")
    return size


def as_items(
    value: object,
    what: str,
    *,
    error: type[GraphkitError] = SpecError,
    limit: int = 65_536,
) -> tuple[Any, ...]:
    """The items of a list, a tuple or another iterable; a value that is one item is not wrapped.

    Args:
        value: anything.
        what: what the value is, for the message, as in "the routes of a policy".
        error: the class to raise, for what has no items, for text, and for more than `limit` of them.
        limit: so that an endless iterator is refused, too.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise error(f"{what} must be a list or tuple, got {value!r} ({type(value).__name__})")
    try:
        items = tuple(itertools.islice(value, limit + 1))
    except Exception as cause:
        # Tensors and arrays of some kinds are iterable by name only.
        raise error(f"{what} must be a list or tuple, got {type(value).__name__}") from cause
    if len(items) > limit:
        raise error(f"{what} must be at most {limit}, and more were given")
    return items


class _Linear:
    """The arithmetic that dims and affine expressions share."""

    __slots__ = ()

    def _parts(self) -> tuple[Dim, int, int, bool]:
        raise NotImplementedError

    def _make(self, factor: int, offset: int) -> Dim | Affine:
        dim, _, _, interleaved = self._parts()
        if factor == 1 and offset == 0:
            return dim
        return Affine(dim, factor, offset, interleaved and factor != 1)

    def __add__(self, other: object) -> Dim | Affine:
        if isinstance(other, _Linear):
            dim = self._parts()[0]
            if dim == other._parts()[0]:
                raise SpecError(f"{self} + {other} adds a dim twice; write a factor, as 2 * {dim}")
            raise SpecError(
                f"{self} + {other} adds two dims; an axis has one dim, so declare a dim of its "
                "own for the sum"
            )
        _, factor, offset, _ = self._parts()
        return self._make(factor, offset + self._operand(other, "+"))

    __radd__ = __add__

    def __sub__(self, other: object) -> Dim | Affine:
        if isinstance(other, _Linear):
            raise SpecError(f"{self} - {other} subtracts a dim; only an int can be subtracted")
        _, factor, offset, _ = self._parts()
        return self._make(factor, offset - self._operand(other, "-"))

    def __rsub__(self, other: object) -> NoReturn:
        raise SpecError(
            f"{other} - {self} shrinks as {self} grows; only factors of at least 1 work"
        )

    def __mul__(self, other: object) -> Dim | Affine:
        if isinstance(other, _Linear):
            raise SpecError(
                f"{_grouped(self)} * {_grouped(other)} multiplies two dims; "
                f"use one axis for each, or declare a dim of its own for the product"
            )
        _, factor, offset, _ = self._parts()
        by = self._operand(other, "*")
        return self._make(factor * by, offset * by)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> NoReturn:
        raise SpecError(
            f"{_grouped(self)} // {other} is not affine; declare a dim of its own for the quotient"
        )

    __truediv__ = __floordiv__

    def _operand(self, other: object, sign: str) -> int:
        if isinstance(other, bool) or not isinstance(other, Integral):
            left = _grouped(self) if sign == "*" else str(self)
            raise SpecError(
                f"{left} {sign} {other!r} ({type(other).__name__}): only ints go with a dim"
            )
        return int(other)


def _grouped(expression: _Linear) -> str:
    return f"({expression})" if expression._parts()[2] else str(expression)


def _as_dim_name(value: object) -> str:
    return check_name("dim", value)


def _as_maximum(value: object) -> int:
    return as_size(value, "the maximum of a dim", minimum=1, error=SpecError)


@attrs.frozen
class Dim(_Linear):
    """A named size that varies from call to call, up to a maximum.

    Two dims of one name and one maximum are the same dim. ``reqs + 1``, ``4 * reqs`` and ``2 * reqs
    + 1`` are `Affine` expressions for shapes.

    Args:
        name: a public Python identifier that is no option's name (`RESERVED`).
        maximum: the largest size of any call, at least 1. Memory is allocated for it.

    Raises:
        SpecError: the name can't be used, or the maximum is no int of at least 1.
    """

    name: str = attrs.field(converter=_as_dim_name)
    maximum: int = attrs.field(converter=_as_maximum)

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of rows at these sizes (name of dim -> size)."""
        return sizes[self.name]

    def _parts(self) -> tuple[Dim, int, int, bool]:
        return self, 1, 0, False

    def __str__(self) -> str:
        return self.name


def _as_dim(value: object) -> Dim:
    if not isinstance(value, Dim):
        raise SpecError(f"an affine expression is of a Dim, got {value!r} ({type(value).__name__})")
    return value


def _as_factor(value: object) -> int:
    return as_size(value, "the factor of a dim", minimum=1, error=SpecError)


def _as_offset(value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, Integral) and int(value) < 0:
        raise SpecError(
            f"an offset of {value} makes the axis negative at size 0, and the empty batch is an "
            "ordinary one; "
            f"use an offset of at least 0"
        )
    return as_size(value, "the offset of a dim", error=SpecError)


@attrs.frozen
class Affine(_Linear):
    """``factor * dim + offset`` rows; made by arithmetic on a `Dim`.

    Args:
        dim: the dim.
        factor: rows for each item, at least 1.
        offset: rows beside them, at least 0 (so that an empty batch has a size).
        interleaved: the rows of each item sit side by side, so that the real rows are a prefix; see
            `interleaved`.
    """

    dim: Dim = attrs.field(converter=_as_dim)
    factor: int = attrs.field(default=1, converter=_as_factor)
    offset: int = attrs.field(default=0, converter=_as_offset)
    interleaved: bool = False

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of rows at these sizes (name of dim -> size)."""
        return self.factor * sizes[self.dim.name] + self.offset

    @property
    def maximum(self) -> int:
        """The number of rows at the dim's maximum."""
        return self.factor * self.dim.maximum + self.offset

    def _parts(self) -> tuple[Dim, int, int, bool]:
        return self.dim, self.factor, self.offset, self.interleaved

    def __str__(self) -> str:
        text = self.dim.name if self.factor == 1 else f"{self.factor} * {self.dim.name}"
        if self.offset:
            text = f"{text} + {self.offset}"
        return f"interleaved({text})" if self.interleaved else text


def affine(value: Dim | Affine) -> Affine:
    """The `Affine` form of a dim or expression, for code that wants factor and offset of both."""
    if isinstance(value, Dim):
        return Affine(value)
    if isinstance(value, Affine):
        return value
    raise SpecError(
        f"expected a Dim or an expression of one, got {value!r} ({type(value).__name__})"
    )


def interleaved(value: Dim | Affine, factor: int = 1) -> Affine:
    """State that the rows of each item sit side by side: item 0's first, then item 1's.

    ``interleaved(batch, 2)`` is ``interleaved(batch * 2)``: rows 0 and 1 are item 0's. Then the
    real rows are a prefix of the buffer, which ``batch * 2`` alone doesn't say (two halves, as in
    classifier-free guidance, are no prefix).
    """
    form = affine(affine(value) * factor)
    return attrs.evolve(form, interleaved=True)


@attrs.frozen
class AtMost:
    """Another dim's size in a bucket, or the own dim's maximum if less; see `at_most`."""

    dim: Dim | Affine

    def size(self, sizes: Mapping[str, int], own_maximum: int) -> int:
        """The size in a bucket of these sizes, of a dim of this maximum."""
        return min(self.dim.size(sizes), own_maximum)

    def __str__(self) -> str:
        return f"at_most({self.dim})"


def at_most(dim: Dim | Affine) -> AtMost:
    """Size a dim of a bucket by another: ``reqs=at_most(tokens)`` is min(tokens, reqs' maximum).

    16 tokens are at most 16 requests, whatever the largest number of requests is.
    """
    affine(dim)
    return AtMost(dim)


def dims_by_name(dims: Iterable[Dim | Affine]) -> dict[str, Dim]:
    """Dims by name, in order of first mention.

    Raises:
        SpecError: two dims have one name and different maxima.
    """
    found: dict[str, Dim] = {}
    for item in dims:
        dim = affine(item).dim
        known = found.setdefault(dim.name, dim)
        if known != dim:
            raise SpecError(
                f"dim {dim.name!r} is declared with maximum {known.maximum} and with maximum "
                f"{dim.maximum}; "
                f"declare it once and use that object"
            )
    return found
