"""Memory that libraries keep between calls must not be freed under a graph."""

from __future__ import annotations

import pytest
import torch

import graphkit as gk


@pytest.mark.gpu
def test_graphs_survive_that_somebody_drops_cublas_workspaces():
    """torch.compile(mode="reduce-overhead") drops them while it records its own graphs."""
    batch = gk.Dim("batch", 64)
    weights = [torch.randn(256, 256, device="cuda") / 16 for _ in range(4)]

    def model(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = torch.relu(x @ weight)
        return x

    group = gk.GraphGroup("cuda")
    fast = group.wrap(model, x=gk.BufferSpec((batch, 256), torch.float32, pad=0))
    group.capture(progress=False)
    x = torch.randn(50, 256, device="cuda")
    before = fast(x=x)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # What was free a moment ago now holds something else.
    rubbish = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    after = fast(x=x)
    assert torch.equal(before, after)
    assert all(bool(r.isnan().all()) for r in rubbish)
    group.close()
