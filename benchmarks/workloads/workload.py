"""A workload: a model, what a step of it is fed, and what each way of running it has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

import graphkit as gk
from graphkit.buffers import shape_at

Arrays = dict[str, np.ndarray[Any, Any]]


def nothing() -> None:
    """For workloads without state."""


@attrs.frozen(kw_only=True)
class Workload:
    """One model at one batch.

    Attributes:
        name: as tables show it.
        model: takes the tensors of `specs` by name; gives one tensor, whose rows are requests if the specs' are.
        device: "cuda", or "cpu" for the recording backend.
        batch: requests; None for a fixed shape.
        reqs: their dim, whose maximum is the bucket.
        specs: of the inputs; their shapes and pads are what people who write copies by hand use too.
        inputs: step -> the inputs on the host, made anew as a scheduler does.
        refilled: inputs whose rows beyond the batch engines fill in every step.
        output: shape and dtype of the result.
        to_host: whether the caller reads the result on the host.
        steps: steps that are launched before the caller waits.
        number, rounds: how often it is timed.
        state: what the model changes, and how it is put back.
        is_compiled: whether torch.compile is among the ways.
    """

    name: str
    model: nn.Module
    device: str
    batch: int | None = None
    reqs: gk.Dim | None = None
    specs: Mapping[str, gk.BufferSpec]
    inputs: Callable[[int], Arrays]
    refilled: tuple[str, ...] = ()
    output: gk.Output
    to_host: bool = False
    steps: int = 1
    number: int = 75
    rounds: int = 5
    mutates: Sequence[Tensor | gk.Scratch] = ()
    reset: Callable[[], None] = nothing
    is_compiled: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """The padded sizes by dim."""
        return {} if self.reqs is None else {self.reqs.name: self.reqs.maximum}

    def tensors(self, *, device: str, pin: bool = False) -> dict[str, Tensor]:
        """New tensors for the inputs at their padded shapes, holding what padding holds."""
        return {
            name: torch.full(
                shape_at(spec.shape, self.sizes),
                spec.fill,
                dtype=spec.dtype,
                device=device,
                pin_memory=pin,
            )
            for name, spec in self.specs.items()
        }

    def result(self, *, device: str, pin: bool = False) -> Tensor:
        """A new tensor for the result at its padded shape."""
        shape = shape_at(self.output.shape, self.sizes)
        return torch.zeros(shape, dtype=self.output.dtype, device=device, pin_memory=pin)
