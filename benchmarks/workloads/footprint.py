"""Device memory: what graphs' pools hold, what lies outside them, and what the driver took."""

from __future__ import annotations

import attrs
import torch

from benchmarks.capture import pool_bytes
from graphkit.backends import backend_for


@attrs.frozen
class Footprint:
    """Bytes on the device; zeros where there is none.

    Attributes:
        pool: segments of all private pools.
        static: allocated outside them: static inputs and outputs.
        driver: in use, and not the allocator's: executable graphs, modules, contexts.
    """

    pool: int
    static: int
    driver: int

    def __sub__(self, before: Footprint) -> Footprint:
        return Footprint(
            self.pool - before.pool, self.static - before.static, self.driver - before.driver
        )


def footprint(device: str) -> Footprint:
    """What is taken now, once the allocator and the libraries have given back what nobody needs."""
    if device == "cpu":
        return Footprint(0, 0, 0)
    torch.cuda.synchronize()
    # Workspaces of libraries are neither way's; those in a pool stay part of it.
    backend_for(device).drop_workspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    static = sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0)
    )
    return Footprint(pool_bytes(), static, total - free - torch.cuda.memory_reserved())
