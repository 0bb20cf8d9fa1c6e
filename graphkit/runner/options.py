"""The options of a runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from graphkit.backends import check_generators
from graphkit.capture.mutation import check_mutates
from graphkit.capture.watch import check_reads
from graphkit.dims import as_size
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Support
from graphkit.errors import SpecError
from graphkit.runner.step import Step


def _callable_or_none(instance: object, attribute: Any, value: Any) -> None:
    if value is not None and not callable(value):
        raise SpecError(f"{attribute.name} must be callable, got {value!r}")


def _mapping_or_none(instance: object, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise SpecError(f"{attribute.name} must map parameters to roles, got {value!r}")


def _support(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, Support):
        raise SpecError(f"supports must be a Support, as gk.Support.UNIFORM, got {value!r}")


def _bool(instance: object, attribute: Any, value: Any) -> None:
    if not isinstance(value, bool):
        raise SpecError(f"{attribute.name} must be True or False, got {value!r}")


def _ring_full(instance: object, attribute: Any, value: Any) -> None:
    if value not in ("block", "raise"):
        raise SpecError(f"ring_full must be 'block' or 'raise', got {value!r}")


def _as_generators(value: Any) -> tuple[torch.Generator, ...]:
    if isinstance(value, torch.Generator):
        raise SpecError("generators= takes a list: generators=[generator]")
    return check_generators(value)


def _as_depth(value: Any) -> int:
    return as_size(value, "ring_depth", minimum=1, error=SpecError)


@attrs.frozen(kw_only=True)
class RunnerOptions:
    """The options of a runner, beside its function and policy; see `GraphGroup.runner`."""

    inputs: Mapping[str, Any] | None = attrs.field(default=None, validator=_mapping_or_none)
    prepare: Callable[[Step], Mapping[str, Any] | None] | None = attrs.field(
        default=None, validator=_callable_or_none
    )
    prepare_host: Callable[[Step], None] | None = attrs.field(
        default=None, validator=_callable_or_none
    )
    outputs: Any = None
    reads: Sequence[Any] = attrs.field(default=(), converter=check_reads)
    mutates: Sequence[Any] = attrs.field(default=(), converter=check_mutates)
    example: Callable[[Bucket], Mapping[str, Any]] | None = attrs.field(
        default=None, validator=_callable_or_none
    )
    supports: Support = attrs.field(default=Support.ALWAYS, validator=_support)
    strict: bool = attrs.field(default=False, validator=_bool)
    generators: Sequence[torch.Generator] = attrs.field(default=(), converter=_as_generators)
    warmup_as_capturing: bool = attrs.field(default=False, validator=_bool)
    ring_depth: int = attrs.field(default=8, converter=_as_depth)
    ring_full: Literal["block", "raise"] = attrs.field(default="block", validator=_ring_full)
