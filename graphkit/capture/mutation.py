"""Declared state: what a runner's function changes, put back after warm-up and capture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch

from graphkit.dims import as_items
from graphkit.errors import SpecError


@attrs.frozen
class Scratch:
    """State of which warm-up and capture write only some rows, so that only those are saved.

    Args:
        tensor: the state.
        rows: an index into its first axis: an int, a slice, a list of ints, or an int64 tensor.
    """

    tensor: torch.Tensor = attrs.field(validator=attrs.validators.instance_of(torch.Tensor))
    rows: Any = attrs.field(kw_only=True)

    def index(self) -> Any:
        """The rows as an index."""
        if isinstance(self.rows, (slice, torch.Tensor)):
            return self.rows
        if isinstance(self.rows, (int, np.integer)):
            row = int(self.rows)
            # After the last row, counted from the end, comes no row 0.
            return slice(row, row + 1 or None)
        return torch.tensor(list(self.rows), dtype=torch.int64, device=self.tensor.device)


def check_mutates(mutates: Sequence[Any]) -> tuple[Any, ...]:
    """The declared state as a tuple.

    Raises:
        SpecError: an item is neither a tensor nor a `Scratch`.
    """
    if isinstance(mutates, (torch.Tensor, Scratch)):
        raise SpecError("mutates= takes a list: mutates=[state]")
    items = as_items(mutates, "mutates=")
    for item in items:
        if not isinstance(item, (torch.Tensor, Scratch)):
            raise SpecError(f"mutates= takes tensors and Scratch(tensor, rows=), got {item!r}")
    return items


@contextmanager
def preserve(mutates: Sequence[Any]) -> Iterator[None]:
    """Put the declared state back afterwards, also after an exception."""
    with torch.no_grad():
        saved = [
            (item, item.tensor[item.index()].clone() if isinstance(item, Scratch) else item.clone())
            for item in mutates
        ]
    try:
        yield
    finally:
        with torch.no_grad():
            for item, contents in saved:
                if isinstance(item, Scratch):
                    item.tensor[item.index()] = contents
                else:
                    item.copy_(contents)
