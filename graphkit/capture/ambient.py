"""Ambient modes: what a capture bakes of its surroundings, to compare at a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch


@attrs.frozen
class Ambient:
    """The modes that change what a function launches.

    Attributes:
        training: module -> whether it is in training mode, for the function's module and, if asked, those inside it.
    """

    autocast: torch.dtype | None
    deterministic: bool
    tf32: bool
    training: Mapping[str, bool]

    @classmethod
    def now(cls, device: torch.device, fn: Callable[..., Any], *, inside: bool = False) -> Ambient:
        """The modes at this moment, for a function on this device.

        Args:
            inside: look at the modules inside the function's too.
        """
        module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
        modules: Iterable[tuple[str, torch.nn.Module]] = ()
        if isinstance(module, torch.nn.Module):
            modules = module.named_modules() if inside else [("", module)]
        kind = device.type
        return cls(
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            tf32=torch.get_float32_matmul_precision() != "highest",
            training={name: each.training for name, each in modules},
        )

    def difference(self, other: Ambient) -> str | None:
        """What differs, as "name: this, then other"; None if nothing does."""
        pairs = [
            (name, getattr(self, name), getattr(other, name))
            for name in ("autocast", "deterministic", "tf32")
        ]
        for name, mode in self.training.items():
            what = f"training of module {name!r}" if name else "training"
            pairs.append((what, mode, other.training.get(name, mode)))
        for what, mine, theirs in pairs:
            if mine != theirs:
                return f"{what} was {mine} at the capture and is {theirs} at the run"
        return None
