"""The answer to one dispatch, the reasons for it, and how answers are counted."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.policy import Mode


class Reason(enum.Enum):
    """Why a batch didn't get a better mode. The value says it in words."""

    NOT_CAPTURED = "the bucket of the better mode is not captured"
    """Declared, accepted, and not there: not captured yet, failed, or forgotten."""
    EXCESS_PADDING = "every bucket that fits would be padded more than the route's max_padding"
    ABOVE_MAX = "the batch is above every bucket that accepts its kind"
    UNKNOWN_VARIANT = "no bucket has the variant that was asked for"
    QUERY_TOO_LONG = "the longest query isn't stated, or is above the route's max_query_len"
    """A varlen route accepts only a stated `query_len` or `max_query_len` within its bound."""
    NOT_UNIFORM = (
        "the route takes uniform batches only, and the call states another query_len or none"
    )
    """With a PIECEWISE answer that is the design, no fallback."""
    CALLER = "the caller asked for eager"
    """`eager=` was given; its text is the dispatch's `detail`."""
    EAGER_POLICY = "the policy has no routes"
    OVER_BUDGET = "the bucket of the better mode doesn't fit the group's memory_budget"
    SUSPENDED = "the graphs' memory is released"
    STALE = "memory that the graphs read has moved"

    def __repr__(self) -> str:
        return f"Reason.{self.name}"


NO_VARIANT: Mapping[str, Any] = MappingProxyType({})


@attrs.frozen(eq=False, kw_only=True)
class Dispatch:
    """The answer for one batch. Compared and hashed by identity.

    The answers for equal batches are mostly one object, so that whoever runs them can keep things
    by it.
    """

    mode: Mode
    bucket: Bucket | None
    """The padded shape; None where the mode is EAGER."""
    sizes: Mapping[str, int]
    """The real size of every dim."""
    padding: Mapping[str, int]
    """Rows of padding in every dim; 0 where the mode is EAGER."""
    reason: Reason | None = None
    """Why no better mode; None where the best mode for this kind of batch was used."""
    query_len: int | None = None
    """As stated by the caller."""
    max_query_len: int | None = None
    """As stated by the caller, or `query_len` where only that was stated."""
    variant: Mapping[str, Any] = NO_VARIANT
    """As the function gets it: the bucket's, or the caller's own where the mode is EAGER."""
    detail: str | None = None
    """The text of the caller's `eager=`."""
    is_fallback: bool = False
    """A worse mode than with every graph captured, or EAGER unasked; strict refuses it."""

    def __str__(self) -> str:
        real = _sizes_text(self.sizes)
        text = f"{self.mode} {self.bucket}" if self.bucket is not None else str(self.mode)
        text = f"{text} for {real}" if real else text
        if self.reason is not None:
            text = f"{text}: {self.reason.name}, {self.detail or self.reason.value}"
        return text


@attrs.frozen(kw_only=True)
class Tally:
    """How often one mode and bucket was the answer for one reason, and what was padded by it."""

    mode: Mode
    bucket: Bucket | None
    reason: Reason | None
    dispatches: int
    rows: Mapping[str, int]
    """Real rows of all those batches together, by name of dim."""
    padding: Mapping[str, int]
    """Rows of padding of all of them together, by name of dim."""


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())
