"""Where graphs are captured: CUDA, and a recording on the CPU with the same semantics."""

from __future__ import annotations

from typing import Any, cast

import torch

from graphkit.backends.base import Backend
from graphkit.dims import as_items
from graphkit.errors import SpecError


def check_generators(generators: Any) -> tuple[torch.Generator, ...]:
    """The generators as a tuple.

    Raises:
        SpecError: one is none.
    """
    items = as_items(generators, "generators=")
    for item in items:
        if not isinstance(item, torch.Generator):
            raise SpecError(f"generators= takes torch.Generators, got {item!r}")
    return items


def backend_for(device: str | torch.device | Backend) -> Backend:
    """The backend of a device: CUDA's, or the recording one for "cpu". A backend is taken as it is.

    Raises:
        SpecError: the device is none that graphs are captured on, or CUDA isn't available.
    """
    if not isinstance(device, (str, torch.device)):
        if isinstance(device, type) or not hasattr(device, "begin_capture"):
            raise SpecError(
                f"a group needs a device, as 'cuda' or 'cpu', or a backend, got {device!r}"
            )
        return device
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise SpecError(f"{device!r} is no device: {error}") from None
    if resolved.type == "cpu":
        from graphkit.backends.recording import RecordingBackend

        return cast(Backend, RecordingBackend(resolved))
    if resolved.type != "cuda":
        raise SpecError(f"graphs are captured on 'cuda' or recorded on 'cpu', got {device!r}")
    if not torch.cuda.is_available():
        raise SpecError(
            "no CUDA device is available; GraphGroup('cpu') records graphs with the same semantics"
        )
    from graphkit.backends.cuda import CudaBackend

    return cast(Backend, CudaBackend(resolved))
