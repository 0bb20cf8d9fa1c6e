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
def preserve(mutates: Sequence[Any], *, where: str | None = None) -> Iterator[None]:
    """Put the declared state back afterwards, also after an exception.

    Args:
        where: begins the message; where it is given, that of a `Scratch` only its rows were written is verified, which
            costs a copy of the whole.

    Raises:
        SpecError: others were written.
    """
    wholes = [
        (item, item.tensor.clone()) for item in mutates if where and isinstance(item, Scratch)
    ]
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
    for item, whole in wholes:
        written = _rows_that_differ(item.tensor, whole)
        if written:
            with torch.no_grad():
                item.tensor.copy_(whole)
            raise SpecError(
                f"{where}: warm-up or capture wrote rows {written} of a state of shape {tuple(whole.shape)}, of which "
                f"Scratch declares rows={item.rows!r}: the example's indices and the pads must point at those, or name "
                "the whole tensor in mutates="
            )


def _rows_that_differ(now: torch.Tensor, before: torch.Tensor) -> list[int]:
    """The first rows that were written; NaN that stayed is no difference."""
    differs = (now != before) & ~((now != now) & (before != before))
    rows = differs.reshape(len(now), -1).any(dim=1) if now.ndim else differs.reshape(1)
    return [int(row) for row in rows.nonzero()[:5].flatten()]
