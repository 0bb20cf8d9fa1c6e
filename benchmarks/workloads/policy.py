"""A control policy: a small network at batch 1, an observation in and an action out on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import graphkit as gk
from benchmarks.workloads.workload import Arrays, Workload

OBSERVATION, WIDTH, ACTION = 48, 256, 12


class Policy(nn.Module):
    """Two hidden layers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(OBSERVATION, WIDTH, device=device),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH, device=device),
            nn.Tanh(),
            nn.Linear(WIDTH, ACTION, device=device),
        )
        self.requires_grad_(False)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """[1, OBSERVATION] to [1, ACTION], float32."""
        action: torch.Tensor = self.layers(observation).tanh()
        return action


def inputs(step: int) -> Arrays:
    """What the sensors say."""
    readings = np.sin(np.arange(OBSERVATION, dtype=np.float32) + np.float32(step))
    return {"observation": readings.reshape(1, OBSERVATION)}


def workloads(device: str, *, small: bool) -> list[Workload]:
    """The policy, which is small enough whatever `small` says."""
    torch.manual_seed(0)
    return [
        Workload(
            name="policy, batch 1",
            model=Policy(device),
            device=device,
            specs={"observation": gk.BufferSpec((1, OBSERVATION), torch.float32)},
            inputs=inputs,
            output=gk.Output((1, ACTION), torch.float32, to="host"),
            to_host=True,
            number=4 if small else 1000,
            rounds=2 if small else 15,
        )
    ]
