"""Capturing 35 buckets: seconds and memory, against a `torch.cuda.graph` loop.

    python -m benchmarks.capture [--out results]

Needs a CUDA device. The budget is the sum over buckets of one eager call and one call under capture
with instantiation; the
loop is what people write: a warm-up and `torch.cuda.graph` for each bucket, in one pool, largest first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import graphkit as gk
from benchmarks.measure import save, show

LAYERS, WIDTH, FFN, VOCAB = 16, 1024, 4096, 8192


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, FFN, bias=False)
        self.gate = torch.nn.Linear(WIDTH, FFN, bias=False)
        self.down = torch.nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Model(torch.nn.Module):
    """The dense part of a small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedding.weight.T


def sizes_of(count: int) -> list[int]:
    """1, 2, 4, then multiples of 8."""
    return [1, 2, 4, *range(8, 8 * (count - 2), 8)][:count]


def pool_bytes() -> int:
    """Bytes of all private pools."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def with_graphkit(model: Model, sizes: list[int]) -> dict[str, float]:
    tokens = gk.Dim("tokens", max(sizes))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = pool_bytes()
    group = gk.GraphGroup("cuda")
    group.buffers.declare(ids=gk.BufferSpec((tokens,), torch.int64, pad=0))
    group.runner(
        "model",
        model,
        policy=gk.Policy.full(gk.Buckets.of(tokens, sizes)),
        outputs=gk.Output((tokens, VOCAB), torch.bfloat16),
    )
    began = time.perf_counter()
    report = group.capture(progress=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    result = {
        "seconds": seconds,
        "pool_bytes": float(pool_bytes() - before),
        "static_bytes": float(report.buffer_bytes + sum(r.output_bytes for r in report.runners)),
    }
    group.close()
    torch.cuda.empty_cache()
    return result


def with_loop(model: Model, sizes: list[int]) -> float:
    static = torch.zeros(max(sizes), dtype=torch.int64, device="cuda")
    pool, graphs = None, []
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        for size in sorted(sizes, reverse=True):
            ids = static[:size]
            model(ids)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                out = model(ids)
            pool = pool or graph.pool()
            graphs.append((graph, out))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def bare(model: Model, sizes: list[int]) -> float:
    """One eager call and one call under capture with instantiation for each bucket, and nothing else."""
    static = torch.zeros(max(sizes), dtype=torch.int64, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    graphs = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for size in sorted(sizes, reverse=True):
            ids = static[:size]
            model(ids)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            model(ids)
            graph.capture_end()
            graphs.append(graph)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def run(device: str = "cuda", *, quick: bool = False) -> dict[str, Any]:
    """Seconds and bytes."""
    if device == "cpu":
        return {}
    model = Model().to("cuda", torch.bfloat16)
    sizes = sizes_of(5 if quick else 35)
    with_graphkit(model, sizes[:2])
    bare(model, sizes[:2])
    rounds = [
        (with_graphkit(model, sizes), bare(model, sizes), with_loop(model, sizes)) for _ in range(3)
    ]
    rounds.sort(key=lambda each: each[0]["seconds"])
    ours, sum_of_calls, loop = rounds[1]
    largest = with_graphkit(model, [max(sizes)])
    return {
        "buckets": len(sizes),
        "graphkit_seconds": ours["seconds"],
        "sum_of_calls_seconds": sum_of_calls,
        "torch_cuda_graph_loop_seconds": loop,
        "against_sum_of_calls": ours["seconds"] / sum_of_calls,
        "loop_against_graphkit": loop / ours["seconds"],
        "pool_bytes": ours["pool_bytes"],
        "pool_bytes_of_largest_alone": largest["pool_bytes"],
        "pool_against_largest": ours["pool_bytes"] / max(largest["pool_bytes"], 1),
        "static_bytes": ours["static_bytes"],
        "static_bytes_of_largest_alone": largest["static_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("capture: needs a CUDA device")
        return
    result = run(quick=options.quick)
    show("capture", ("figure", "value"), list(result.items()))
    if options.out is not None:
        save("capture", {"capture": result}, options.out)


if __name__ == "__main__":
    main()
