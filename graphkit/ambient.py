"""Ambient modes: what a capture bakes of its surroundings, to compare at a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch


@attrs.frozen
class Ambient:
    """The modes that change what a function launches."""

    autocast: torch.dtype | None
    deterministic: bool
    tf32: bool
    training: bool | None

    @classmethod
    def now(cls, device: torch.device, fn: Callable[..., Any]) -> Ambient:
        """The modes at this moment, for a function on this device."""
        module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        kind = device.type
        return cls(
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            tf32=torch.get_float32_matmul_precision() != "highest",
            training=module.training if isinstance(module, torch.nn.Module) else None,
        )

    def difference(self, other: Ambient) -> str | None:
        """What differs, as "name: this, then other"; None if nothing does."""
        for name in ("autocast", "deterministic", "tf32", "training"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} was {mine} at the capture and is {theirs} at the run"
        return None
