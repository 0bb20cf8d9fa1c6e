"""A diffusion transformer that denoises one latent image in a loop of a fixed shape."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphkit as gk
from benchmarks.workloads.workload import Arrays, Workload


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of the model, and the steps of a loop."""

    blocks: int = 8
    width: int = 512
    heads: int = 8
    size: int = 64
    patch: int = 2
    steps: int = 20


TOY = Shape(blocks=1, width=16, heads=2, size=8, steps=3)
CHANNELS = 4


class Block(nn.Module):
    """Attention and a feed-forward, both scaled and shifted by the timestep."""

    def __init__(self, width: int, heads: int, **factory: Any) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (
            nn.LayerNorm(width, elementwise_affine=False, **factory) for _ in range(2)
        )
        self.modulation = nn.Linear(width, 4 * width, **factory)
        self.qkv = nn.Linear(width, 3 * width, **factory)
        self.out = nn.Linear(width, width, **factory)
        self.up = nn.Linear(width, 4 * width, **factory)
        self.down = nn.Linear(4 * width, width, **factory)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        scale1, shift1, scale2, shift2 = self.modulation(when).chunk(4, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        tokens, width = x.shape[1:]
        qkv = self.qkv(y).view(1, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        x = x + self.out(attended.transpose(1, 2).reshape(1, tokens, width))
        y = self.norm2(x) * (1 + scale2) + shift2
        after: Tensor = x + self.down(F.gelu(self.up(y)))
        return after


class Denoiser(nn.Module):
    """One step; the latents are a buffer of the module, and stay on the device over the loop."""

    latents: Tensor
    frequencies: Tensor

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed = nn.Conv2d(CHANNELS, shape.width, shape.patch, shape.patch, **factory)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.heads, **factory) for _ in range(shape.blocks)
        )
        self.project = nn.ConvTranspose2d(
            shape.width, CHANNELS, shape.patch, shape.patch, **factory
        )
        half = shape.width // 2
        frequencies = 10_000.0 ** (-torch.arange(half, device=device) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)
        noise = torch.randn(1, CHANNELS, shape.size, shape.size, **factory)
        self.register_buffer("latents", noise, persistent=False)
        self.noise = noise.clone()
        self.requires_grad_(False)

    def forward(self, timestep: Tensor, step_size: Tensor) -> Tensor:
        """The latents after a step, [1, CHANNELS, size, size]; both inputs are [1] float32."""
        angles = timestep * self.frequencies
        when = torch.cat((angles.cos(), angles.sin())).to(self.latents.dtype)
        x = self.embed(self.latents)
        height, width = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, when)
        x = self.project(x.transpose(1, 2).unflatten(2, (height, width)))
        # Bounded, however often it is run.
        after: Tensor = 0.9 * self.latents + step_size.to(x.dtype) * x.tanh()
        self.latents.copy_(after)
        return after

    def reset(self) -> None:
        """Noise again."""
        self.latents.copy_(self.noise)


def workloads(device: str, *, small: bool) -> list[Workload]:
    """The loop."""
    shape = TOY if small else Shape()
    torch.manual_seed(0)
    model = Denoiser(shape, device)

    def inputs(step: int) -> Arrays:
        left = 1 - step % shape.steps / shape.steps
        return {
            "timestep": np.full(1, 1000 * left, np.float32),
            "step_size": np.full(1, 0.1 * left, np.float32),
        }

    return [
        Workload(
            name=f"diffusion, a step of {shape.steps}",
            model=model,
            device=device,
            specs={name: gk.BufferSpec((1,), torch.float32) for name in inputs(0)},
            inputs=inputs,
            output=gk.Output(tuple(model.latents.shape), model.latents.dtype),
            steps=shape.steps,
            number=4 if small else 25,
            rounds=2 if small else 5,
            mutates=[model.latents],
            reset=model.reset,
        )
    ]
