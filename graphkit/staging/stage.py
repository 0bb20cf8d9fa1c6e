"""Filling a batch's inputs in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphkit.dispatch.dispatcher import Dispatch
from graphkit.errors import InputError
from graphkit.staging.staging import ON_DEVICE, ON_HOST


class Stage:
    """Views of a batch's inputs, to fill in place; see `GraphRunner.stage`.

    Attributes:
        host: parameter -> NumPy array of exactly the batch's rows, in pinned memory.
        views: parameter -> tensor on the device of exactly the batch's rows.
        is_open: whether the block that fills it is under way.
    """

    def __init__(
        self, dispatch: Dispatch, host: Mapping[str, Any], views: Mapping[str, torch.Tensor]
    ) -> None:
        self.dispatch = dispatch
        self.is_open = True
        self.host = _Touched(host)
        self.views = _Touched(views)

    def filled(self) -> dict[str, Any]:
        """The inputs that were asked for, as what `Staging.write` takes for inputs that are there already."""
        return {
            **dict.fromkeys(self.host.names, ON_HOST),
            **dict.fromkeys(self.views.names, ON_DEVICE),
        }

    def check(self, runner: str) -> None:
        """Raise an `InputError` if an input was asked for on both sides."""
        both = self.host.names & self.views.names
        if both:
            raise InputError(
                f"runner {runner!r}: {', '.join(sorted(both))} was staged on the host and on the device; "
                f"use one of the two"
            )


class _Touched(Mapping[str, Any]):
    """A mapping that notes which of its values were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self.names.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
