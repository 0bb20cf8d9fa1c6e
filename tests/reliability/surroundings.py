"""What a capture must leave as it was, whatever happens in it."""

from __future__ import annotations

import gc
import threading
import warnings
from typing import Any

import torch

import graphkit as gk


def is_capturing() -> bool:
    """Whether this thread's current stream is being captured, on either backend."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a CPU build has no stream to ask, except in a recording
        return False


def surroundings(device: str) -> dict[str, Any]:
    """Streams, collector, random numbers, flags and modes of this thread and process, by name."""
    on_cuda = device == "cuda"
    return {
        "stream": torch.cuda.current_stream().cuda_stream if on_cuda else 0,
        "device": torch.cuda.current_device() if on_cuda else 0,
        "capturing": is_capturing(),
        "gc enabled": gc.isenabled(),
        "gc thresholds": gc.get_threshold(),
        "CPU random numbers": torch.get_rng_state().tolist(),
        "device random numbers": torch.cuda.get_rng_state().tolist() if on_cuda else None,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "warning filters": list(warnings.filters),
        "threads": threading.active_count(),
        "current run": in_a_run(),
    }


def in_a_run() -> str | None:
    """What `current_run` says here; None where it has an answer."""
    try:
        gk.current_run()
    except gk.StateError as error:
        return str(error)
    return None


def changes(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What isn't as it was: name -> (before, after)."""
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
