"""Intake: which values are taken as a run's inputs, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphkit.buffers import shape_text
from graphkit.errors import InputError
from graphkit.parameters import Binding
from graphkit.staging.hostdata import encode, exact_array, has_numpy, numpy_dtype, tensor_to_numpy
from graphkit.staging.lists import is_ragged, packed_integers, ragged_rows


class Intake:
    """Checks the inputs of one runner. Nothing is cast, broadcast or guessed."""

    def __init__(self, runner: str, binding: Binding, device: torch.device) -> None:
        self._runner = runner
        self._binding = binding
        self._device = device

    def take(
        self, name: str, value: Any, shape: tuple[int, ...], real: Mapping[str, int]
    ) -> np.ndarray[Any, Any] | torch.Tensor:
        """A host value as an array, or a tensor on the group's device as it is.

        Args:
            name: the parameter.
            value: None stands for an input that isn't given.
            shape: what the batch asks for.
            real: the batch's sizes, for the message.

        Raises:
            InputError: it is missing, or of the wrong dtype, device or shape.
        """
        spec = self._binding.fed[name].spec
        if value is None:
            raise InputError(
                f"{self._where(name)} is missing; run() needs {', '.join(self._binding.fed)}"
            )
        taken: np.ndarray[Any, Any] | torch.Tensor
        if isinstance(value, torch.Tensor):
            if value.dtype is not spec.dtype:
                raise InputError(
                    f"{self._where(name)}: got {value.dtype}, expected {spec.dtype}; it is never cast"
                )
            if value.device == self._device and value.device.type != "cpu":
                taken = value.detach()
            elif value.is_nested:
                raise InputError(f"{self._where(name)}: got a nested tensor, expected a dense one")
            elif value.device.type == "cpu" and value.layout is torch.strided:
                taken = tensor_to_numpy(value)
            elif value.layout is not torch.strided:
                raise InputError(
                    f"{self._where(name)}: got a tensor of layout {value.layout}, expected a dense one"
                )
            else:
                raise InputError(
                    f"{self._where(name)}: got a tensor on {value.device}, expected one on {self._device} or the CPU"
                )
        elif isinstance(value, np.ma.MaskedArray):
            raise InputError(
                f"{self._where(name)}: got a masked array, whose mask would be lost; fill it first"
            )
        elif isinstance(value, np.ndarray):
            if value.dtype != numpy_dtype(spec.dtype) or not has_numpy(spec.dtype):
                raise InputError(
                    f"{self._where(name)}: got {value.dtype}, expected {spec.dtype}; it is never cast"
                )
            taken = value
        else:
            taken = self._from_list(name, value, shape)
        if tuple(taken.shape) != shape:
            sizes = ", ".join(f"{dim}={size}" for dim, size in real.items())
            raise InputError(
                f"{self._where(name)}: got shape {tuple(taken.shape)}, expected {shape}, which is "
                f"{shape_text(spec.shape)} at {sizes or 'fixed sizes'}"
            )
        return taken

    def _from_list(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        spec, where = self._binding.fed[name].spec, self._where(name)
        fast = packed_integers(value, spec.dtype, shape) if type(value) is list else None
        if fast is not None:
            return fast
        # The tail of a row is padding, where the axis is padded.
        if len(shape) == 2 and spec.pads[1] is not None and is_ragged(value, shape):
            if spec.pads[1].kind in ("repeat_last", "continue"):
                raise InputError(
                    f"{where}: got rows of different lengths, and {spec.pads[1]} pads them: give whole rows"
                )
            fill = spec.fill if spec.pads[1].value is None else spec.pads[1].value
            return ragged_rows(value, spec.dtype, shape, encode(fill, spec.dtype), where)
        return exact_array(value, spec.dtype, where)

    def as_tensor(self, name: str, taken: np.ndarray[Any, Any] | torch.Tensor) -> torch.Tensor:
        """What `take` gave as a tensor, on whichever side it is."""
        if isinstance(taken, torch.Tensor):
            return taken
        dtype = self._binding.fed[name].spec.dtype
        tensor = torch.from_numpy(np.require(taken, requirements=["C", "W"]))
        return tensor if tensor.dtype is dtype else tensor.view(dtype)

    def refuse_unknown(self, values: Mapping[str, Any]) -> None:
        """Raise an `InputError` if something is given that isn't fed."""
        for name in values:
            if name in self._binding.resident:
                buffer = self._binding.resident[name].name
                raise InputError(
                    f"{self._where(name)} is resident: the device writes buffer {buffer!r}, so run() is given nothing "
                    f"for it"
                )
            if name not in self._binding.fed:
                takes = ", ".join(self._binding.fed) or "no inputs"
                raise InputError(f"{self._where(name)} is unknown; run() takes {takes}")

    def check_valid(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Raise an `InputError` if an index lies outside the buffer's `valid` range."""
        valid = self._binding.fed[name].spec.valid
        if valid is None or array.size == 0:
            return
        low, high = int(array.min()), int(array.max())
        if low < valid[0] or high >= valid[1]:
            raise InputError(
                f"{self._where(name)} holds values from {low} to {high}, outside valid={valid}"
            )

    def _where(self, name: str) -> str:
        return f"runner {self._runner!r}, input {name!r}"
