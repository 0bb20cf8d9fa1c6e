"""Weights on disk: safetensors files beside this module, stored as fp16 and loaded as fp32.

The file carries what is needed to build the module again, and where the weights came from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from .model import Config, TinyLM

TARGET = Path(__file__).parent / "weights" / "target.safetensors"
"""The target model: 1.3 million parameters, 2.7 MB in fp16."""

METADATA = "graphkit"
"""The file's metadata entry, a JSON object."""


class WeightsError(RuntimeError):
    """A weights file is missing, damaged, or another model's."""


def save(path: Path, module: nn.Module, metadata: dict[str, Any]) -> None:
    """Write a module's parameters as fp16, and ``metadata`` (JSON values) with them.

    The file appears whole or not at all, so that an interrupted training leaves the last good one.
    """
    tensors = {name: p.detach().to("cpu", torch.float16) for name, p in module.named_parameters()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        partial,
        # One entry: safetensors writes several in random order, and equal files should be equal.
        metadata={METADATA: json.dumps(metadata)},
    )
    partial.replace(path)


def read_metadata(path: Path) -> dict[str, Any]:
    """What `save` was given as metadata.

    Raises:
        WeightsError: the file is missing, damaged, or a directory.
    """
    try:
        if path.is_dir():
            raise WeightsError(f"{path} is a directory: name the weights file in it")
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, Any] = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            return metadata
    except FileNotFoundError:
        raise WeightsError(
            f"no weights at {path}: train them, see examples/eagle/train.py"
        ) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{path} is no readable weights file ({error}): restore it") from None


def load_into(
    path: Path,
    module: nn.Module,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Replace all of a module's parameters by those of a file, and move the module to ``device``.

    Buffers (the rotary table) keep their dtype.

    Raises:
        WeightsError: the file is missing or damaged, or its names or shapes are another model's.
    """
    read_metadata(path)
    with safe_open(path, framework="pt", device="cpu") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    parameters = dict(module.named_parameters())
    if {n: t.shape for n, t in stored.items()} != {n: p.shape for n, p in parameters.items()}:
        odd = sorted(
            name
            for name in stored.keys() | parameters.keys()
            if name not in stored
            or name not in parameters
            or stored[name].shape != parameters[name].shape
        )
        raise WeightsError(
            f"{path} holds another model's weights (differing: {', '.join(odd[:4])}): "
            "restore it, or train anew"
        )
    for name, parameter in parameters.items():
        parameter.data = stored[name].to(device=device, dtype=dtype)
    module.to(device)


def load_target(
    path: Path = TARGET,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TinyLM:
    """The trained language model, ready to serve: no gradients, evaluation mode.

    Raises:
        WeightsError: the file is missing, damaged, or another model's.
    """
    metadata = read_metadata(path)
    try:
        config = Config(**metadata["config"])
    except (KeyError, TypeError, ValueError):
        raise WeightsError(f"{path} doesn't say what sizes its model has: restore it") from None
    with torch.device("cpu"):
        model = TinyLM(config)
    load_into(path, model, dtype, device)
    return model.eval().requires_grad_(False)


def describe(config: Config) -> dict[str, Any]:
    """A config as JSON values, as `load_target` reads it."""
    return attrs.asdict(config)
