"""EAGLE: what a proposal costs by mode, against the GPU time of its kernels; and the tiny model end to end.

    python -m benchmarks.eagle [--device cuda] [--quick] [--out results]

The draft has the shape of one layer of Llama-3.2-1B (hidden 2048, 32 query and 8 key-value heads of
64, feed-forward 8192, vocabulary 128,256), random weights, bfloat16, and requests of 256 tokens.
"GPU" is a bare CUDA graph of the same function over the same memory, without anything of
graphkit's, replayed back to back. Every mode is timed from the call of propose() until the device
is idle, the ways in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import back_to_back_us, interleaved_us, save, show, synchronize
from examples.eagle import corpus
from examples.eagle.batch import Batch
from examples.eagle.draft import DraftConfig, DraftHead
from examples.eagle.engine import Engine
from examples.eagle.memory import Limits, Memory
from examples.eagle.model import Config, TinyLM
from examples.eagle.report import summarize
from examples.eagle.speculator import GRAPHS, EagleSpeculator, Graphs

GPU_BUDGET = 1.05
"""`one` and `prefill+decode`, over the GPU time, at every batch."""
DECODE_BUDGET, NONE_BUDGET = 1.5, 2.2
"""How much faster they are than the other two, at batch 1."""
LLAMA = Config(vocab=128_256, width=2048, layers=1, heads=32, kv_heads=8, head_dim=64, hidden=8192)
SMALL = Config(vocab=256, width=64, layers=1, heads=4, kv_heads=2, head_dim=16, hidden=128)
CONTEXT = 256


def models(device: str, *, small: bool) -> DraftHead:
    """A draft with random weights, and its target, which gives embedding and output head only."""
    config = SMALL if small else LLAMA
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target = TinyLM(config).to(device)
    draft = DraftHead(DraftConfig(config), target).to(device)
    for module in (target, draft):
        module.eval().requires_grad_(False)
        for parameter in module.parameters():
            # The parameters alone: the rotary table stays as exact as it was.
            parameter.data = parameter.data.to(dtype)
    return draft


def speculator_of(draft: DraftHead, graphs: Graphs, reqs: int, k: int) -> EagleSpeculator:
    """A speculator with graphs for this many requests, as if the target had just run on them."""
    config = draft.config.target
    limits = Limits(
        max_reqs=reqs,
        k=k,
        max_length=config.max_length,
        max_tokens=max(config.max_length, reqs * (k + 1)),
        mixed_tokens=(),
    )
    weight = draft.target.embedding.weight
    memory = Memory(config, limits, device=weight.device, dtype=weight.dtype)
    speculator = EagleSpeculator(draft, memory, graphs=graphs)
    if graphs != "none":
        memory.group.capture(progress=False)
    rows, pages = k + 1, limits.pages_per_request
    table = 1 + torch.arange(reqs * pages).view(reqs, pages)
    positions = CONTEXT - 1 + torch.arange(rows)
    slots = table[:, positions // limits.page_size] * limits.page_size
    contents = {
        "positions": positions.repeat(reqs),
        "slot_mapping": (slots + positions % limits.page_size).flatten(),
        "block_table": table,
        "seq_lens": torch.full((reqs,), CONTEXT + k),
        "first_row": torch.arange(reqs) * rows,
        "accepted": torch.arange(reqs) % rows,
        "draft_ids": torch.arange(reqs * rows) % config.vocab,
    }
    for name, content in contents.items():
        tensor = getattr(memory.buffers, name).tensor
        tensor[: len(content)].copy_(content)
    hidden = torch.randn(
        memory.buffers.hidden.tensor.shape, generator=torch.Generator().manual_seed(0)
    )
    memory.buffers.hidden.tensor.copy_(hidden)
    return speculator


def batch_of(reqs: int, k: int) -> Batch:
    """What a proposal is asked for; its rows are in the buffers already."""
    rows = np.zeros(reqs * (k + 1), np.int64)
    each = np.zeros(reqs, np.int64)
    return Batch(
        query_len=k + 1,
        query_start=np.arange(reqs + 1) * (k + 1),
        seq_lens=np.full(reqs, CONTEXT + k, np.int32),
        input_ids=rows,
        positions=rows,
        slot_mapping=rows,
        block_table=np.zeros((reqs, 1), np.int32),
        first_row=each,
        num_drafts=each,
        seats=each,
    )


def bare_graph(speculator: EagleSpeculator, reqs: int, k: int) -> Callable[[], None]:
    """The proposal's function alone, in a plain CUDA graph over views of the same buffers."""
    sizes = {"reqs": reqs, "tokens": reqs * (k + 1)}
    names = (
        "draft_ids", "hidden", "positions", "slot_mapping", "seq_lens", "block_table", "first_row",
        "accepted", "seats", "draft_probs",
    )  # fmt: skip
    views = {name: getattr(speculator.memory.buffers, name).view(sizes) for name in names}

    def body() -> None:
        with torch.no_grad():
            drafts = speculator._propose(**views)["draft_tokens"]
            speculator.memory.buffers.draft_tokens.view(sizes).copy_(drafts)

    if not torch.cuda.is_available():
        return body
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        body()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    replay: Callable[[], None] = graph.replay
    return replay


def proposals(draft: DraftHead, reqs: int, k: int, number: int) -> dict[str, Any]:
    """One batch size and K: microseconds by mode, and the ratios that are budgeted."""
    batch = batch_of(reqs, k)
    speculators = {graphs: speculator_of(draft, graphs, reqs, k) for graphs in GRAPHS}
    gpu = back_to_back_us(bare_graph(speculators["one"], reqs, k), max(number // 5, 4))
    steps = {graphs: _step(each, batch) for graphs, each in speculators.items()}
    seen = interleaved_us(steps, number=number)
    wall = {graphs: value["wall_us"] for graphs, value in seen.items()}
    drafts = [each.propose(batch).clone() for each in speculators.values()]
    kept = max(wall["one"], wall["prefill+decode"]) <= GPU_BUDGET * gpu
    if reqs == 1:
        slower = max(wall["one"], wall["prefill+decode"])
        kept = kept and wall["decode"] >= DECODE_BUDGET * slower
        kept = kept and wall["none"] >= NONE_BUDGET * slower
    for each in speculators.values():
        each.memory.group.close()
    return {
        "reqs": reqs,
        "k": k,
        "gpu_us": gpu,
        "wall_us": wall,
        "host_us": {graphs: value["host_us"] for graphs, value in seen.items()},
        "over_gpu": {graphs: us / gpu for graphs, us in wall.items()},
        "agree": all(torch.equal(drafts[0], each) for each in drafts[1:]),
        "kept": kept,
    }


def _step(speculator: EagleSpeculator, batch: Batch) -> Callable[[int], object]:
    return lambda index: speculator.propose(batch)


def end_to_end(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """The tiny model, 8 requests at a time: plain and EAGLE, by mode."""
    prompts = corpus.heldout_prompts(8, 32)
    tokens = 16 if quick else 128
    ways: list[tuple[int, Graphs]] = [(0, "none"), (0, "prefill+decode")]
    ways += [(3, graphs) for graphs in GRAPHS]
    rows = []
    for k, graphs in ways:
        engine = Engine.from_files(
            Limits(max_reqs=8, k=k, max_tokens=512), device=device, graphs=graphs
        )
        if graphs != "none":
            engine.group.capture(progress=False)
        engine.generate(prompts, tokens)  # the first round loads kernels
        engine.records.clear()
        began = time.perf_counter()
        engine.generate(prompts, tokens)
        figures = summarize(engine.records, began)
        rows.append(
            {
                "way": "plain" if k == 0 else f"EAGLE, K={k}",
                "graphs": graphs if k else ("none" if graphs == "none" else "all"),
                "accepted_length": figures.accepted_length,
                "tokens_per_second": figures.tokens_per_second,
                "ttft_ms": 1e3 * figures.ttft,
                "tpot_ms": None if figures.tpot is None else 1e3 * figures.tpot,
            }
        )
    return rows


def run(device: str = "cuda", quick: bool = False) -> dict[str, Any]:
    """All figures; on the CPU they mean nothing, and show only that it runs."""
    small = device == "cpu"
    draft = models(device, small=small)
    sizes = (1, 2) if small else (1, 8, 64)
    number = 10 if small else (50 if quick else 200)
    rows = [proposals(draft, reqs, k, number) for reqs in sizes for k in (3, 5)]
    return {
        "name": "eagle",
        "small": small,
        "proposals": rows,
        "end_to_end": end_to_end(device, quick=quick or small),
        "kept": all(row["kept"] for row in rows),
    }


def table(result: dict[str, Any]) -> None:
    """The result for people."""
    show(
        "propose(), µs from the call until the device is idle (and over the GPU time)",
        ["reqs", "K", "GPU", *GRAPHS, "agree", "budget"],
        [
            [
                row["reqs"],
                row["k"],
                row["gpu_us"],
                *(f"{row['wall_us'][g]:.0f} ({row['over_gpu'][g]:.2f})" for g in GRAPHS),
                row["agree"],
                "kept" if row["kept"] else "missed",
            ]
            for row in result["proposals"]
        ],
    )
    show(
        "the tiny model, 8 requests",
        ["way", "graphs", "accepted length", "tokens per second", "TTFT ms", "TPOT ms"],
        [list(row.values()) for row in result["end_to_end"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--quick", action="store_true", help="fewer steps and tokens")
    parser.add_argument("--out", type=Path, help="a folder for the result as JSON")
    options = parser.parse_args()
    result = run(options.device, options.quick)
    table(result)
    if options.out is not None:
        print(f"\nwritten to {save('eagle', result, options.out)}")


if __name__ == "__main__":
    main()
