"""Variants: what a route's graphs bake besides sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import numpy as np

from graphkit.dims import as_items, as_size, check_name
from graphkit.errors import SpecError


def variant_value(value: Any) -> Any:
    """A variant's value as it is compared: NumPy scalars as Python's, all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


@attrs.frozen
class RoundUp:
    """The sizes that a variant is rounded up to; made by `round_up`."""

    values: tuple[int, ...]


def round_up(*values: int) -> RoundUp:
    """A variant that is a number, rounded up to one of these: ``num_loras=round_up(0, 1, 4)``.

    Raises:
        SpecError: no value, or one that is no int of at least 0.
    """
    if not values:
        raise SpecError("round_up needs at least one value")
    sizes = {as_size(value, "a value of round_up", error=SpecError) for value in values}
    return RoundUp(tuple(sorted(sizes)))


def _as_axis(name: str, values: object) -> tuple[Any, ...] | RoundUp:
    check_name("variant", name)
    if isinstance(values, RoundUp):
        return values
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise SpecError(
            f"variant {name!r} needs round_up(...) or a tuple of its values, got {values!r}"
        )
    allowed: dict[tuple[type, Any], Any] = {}
    for value in map(variant_value, as_items(values, f"the values of variant {name!r}")):
        try:
            allowed[type(value), value] = value
            is_itself = bool(value == value)
        except TypeError:
            raise SpecError(
                f"variant {name!r} has a value that can't be hashed: {value!r}"
            ) from None
        except (ValueError, RuntimeError):
            # As of a tensor, whose hash is its identity.
            raise SpecError(
                f"variant {name!r} has a value that can't be compared: {value!r}"
            ) from None
        # NaN is not itself: a key of it would never be found again.
        if not is_itself:
            raise SpecError(f"variant {name!r} has a value that doesn't equal itself: {value!r}")
    if not allowed:
        raise SpecError(f"variant {name!r} has no values; give at least one")
    return tuple(allowed.values())


class Variants:
    """What a route's graphs bake besides sizes, one graph for each combination of values.

    ``Variants(num_loras=round_up(0, 1, 4), cascade=(False, True))`` makes six graphs a bucket. The
    function gets the (rounded) values by keyword. Values are told apart by type too: ``True`` is
    not ``1``.

    Raises:
        SpecError: an axis has no values, or one that can't be a key.
    """

    __slots__ = ("axes",)

    axes: Mapping[str, tuple[Any, ...] | RoundUp]
    """Allowed values by name."""

    def __init__(self, **axes: tuple[Any, ...] | RoundUp) -> None:
        if not axes:
            raise SpecError(
                "Variants needs at least one axis, as Variants(num_loras=round_up(0, 1))"
            )
        made = MappingProxyType({name: _as_axis(name, values) for name, values in axes.items()})
        object.__setattr__(self, "axes", made)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("Variants are frozen")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Variants) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> frozenset[Any]:
        return frozenset(
            (name, axis if isinstance(axis, RoundUp) else tuple((type(v), v) for v in axis))
            for name, axis in self.axes.items()
        )

    def combinations(self) -> tuple[dict[str, Any], ...]:
        """Every combination of values, as the function gets them."""
        values = [axis.values if isinstance(axis, RoundUp) else axis for axis in self.axes.values()]
        return tuple(
            dict(zip(self.axes, combination, strict=True))
            for combination in itertools.product(*values)
        )

    def accepts(self, bucket: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        """Whether a batch that asks for these values may use a bucket of those."""
        for name, axis in self.axes.items():
            mine, wanted = bucket[name], asked[name]
            if isinstance(axis, RoundUp):
                if type(wanted) is not int or not 0 <= wanted <= mine:
                    return False
            elif type(wanted) is not type(mine) or wanted != mine:
                return False
        return True

    def __repr__(self) -> str:
        parts = (
            f"{name}={f'round_up{axis.values}' if isinstance(axis, RoundUp) else axis}"
            for name, axis in self.axes.items()
        )
        return f"Variants({', '.join(parts)})"
