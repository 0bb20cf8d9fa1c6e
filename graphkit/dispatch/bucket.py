"""A bucket: one padded shape that a graph is captured for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from graphkit.errors import BucketError


def _frozen_mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BucketError(f"a bucket's sizes and variant map names to values, got {value!r}")
    return MappingProxyType(dict(value))


@attrs.frozen(eq=False, repr=False)
class Bucket:
    """One padded shape that a graph is captured for.

    Equal buckets are one bucket, whatever the order of their sizes; hashable, with the hash
    computed once.

    Args:
        sizes: padded size by name of dim, for every dim of the runner.
        query_len: the tokens of every request, where the bucket is for uniform batches only;
            otherwise None.
        max_query_len: the most tokens of any request, where the bucket has such a bound; otherwise
            None.
        variant: what else is baked, by name, as the function gets it.
    """

    sizes: Mapping[str, int] = attrs.field(converter=_frozen_mapping)
    query_len: int | None = None
    max_query_len: int | None = None
    variant: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
    _key: tuple[Any, ...] = attrs.field(init=False)
    _hash: int = attrs.field(init=False)

    @_key.default
    def _make_key(self) -> tuple[Any, ...]:
        # The types are in the key since True == 1: a variant of a bool and one of an int are two.
        variant = tuple(sorted((name, type(v).__name__, v) for name, v in self.variant.items()))
        return (frozenset(self.sizes.items()), self.query_len, self.max_query_len, variant)

    @_hash.default
    def _make_hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bucket):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __getitem__(self, name: str) -> int:
        """The padded size of the dim of this name."""
        return self.sizes[name]

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a batch of these real sizes fits in."""
        own = self.sizes
        return all(size <= own[name] for name, size in sizes.items())

    def padding(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Rows of padding by name of dim, for a batch of these real sizes (every dim)."""
        return {name: size - sizes[name] for name, size in self.sizes.items()}

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.sizes.items()]
        if self.query_len is not None:
            parts.append(f"query_len={self.query_len}")
        elif self.max_query_len is not None:
            parts.append(f"max_query_len={self.max_query_len}")
        parts.extend(f"{name}={value!r}" for name, value in self.variant.items())
        return " ".join(parts) or "fixed"

    def __repr__(self) -> str:
        return f"<Bucket {self}>"
