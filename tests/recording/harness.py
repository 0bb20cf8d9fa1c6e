"""Capture, compare: what the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def capture(
    backend: Any,
    body: Callable[[], Any],
    *,
    generators: Sequence[torch.Generator] = (),
    mode: str = "no_grad",
) -> tuple[Any, Any]:
    """The graph of one call of `body`, and what the call returned."""
    with backend.on_stream(backend.new_stream()), MODES[mode]():
        under_way = backend.begin_capture(pool=backend.pool_of(None), generators=generators)
        try:
            result = body()
            return under_way.end(), result
        except BaseException:
            under_way.abort()
            raise


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def assert_same(got: Any, expected: Any) -> None:
    """Bit-equal, in shapes and dtypes too; NaN equals NaN."""
    pairs = list(zip(tensors(got), tensors(expected), strict=True))
    assert pairs
    for a, b in pairs:
        torch.testing.assert_close(
            a.resolve_conj(), b.resolve_conj(), rtol=0, atol=0, equal_nan=True
        )
