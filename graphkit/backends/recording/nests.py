"""Arguments and results of operations: values nested in lists, tuples and dictionaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of `value`, each with the keys that lead to it."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, (*path, key))
    else:
        yield path, value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def substitute(value: Any, replacements: Mapping[int, Any]) -> Any:
    """`value` with each tensor replaced by what `replacements` has for its identity."""
    if isinstance(value, torch.Tensor):
        return replacements[id(value)]
    if isinstance(value, (list, tuple)):
        return [substitute(item, replacements) for item in value]
    if isinstance(value, dict):
        return {key: substitute(item, replacements) for key, item in value.items()}
    return value
