"""The host path: what a step costs in front of a graph's launch, against the ways in which people write it.

    python -m benchmarks.staging [--out results]

Six inputs of a decode step (20 KB in a bucket of 64, batch 50), a model of a few matrix products, new
inputs on each step. The floor is
one pinned copy of the same bytes and a bare replay: nothing checked, nothing padded, nothing written on the host.
"Packed in place" writes the arrays with NumPy into a ring of pinned slots, copies the slot whole, and lets the graph
read the inputs where they land: buffers can't be shared, and nothing is checked or padded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graphkit as gk
from benchmarks.measure import interleaved_us, save, show
from graphkit.backends import backend_for

WIDTH = 256
NAMES = ("input_ids", "positions", "slot_mapping", "query_start", "seq_lens", "block_table")


class Model(torch.nn.Module):
    """A few small kernels that read every input."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            [torch.randn(WIDTH, WIDTH, device=device) / 16 for _ in range(4)]
        )
        self.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        """[reqs, WIDTH]."""
        rows = (input_ids + positions + slot_mapping).float() + seq_lens + query_start[1:]
        x = (rows + block_table.sum(1)).unsqueeze(1).expand(-1, WIDTH) / 1e4
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x


def make_inputs(batch: int, pages: int, number: int = 16) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Different inputs for step after step."""
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(0, 1000, batch),
            "positions": rng.integers(0, 1000, batch),
            "slot_mapping": rng.integers(0, 1000, batch),
            "query_start": np.arange(batch + 1, dtype=np.int32),
            "seq_lens": rng.integers(1, 1000, batch).astype(np.int32),
            "block_table": rng.integers(0, 1000, (batch, pages)).astype(np.int32),
        }
        for _ in range(number)
    ]


def make_runner(
    device: str, model: Model, maximum: int, pages: int, *, copy_in_graph: bool, resident: bool
) -> tuple[gk.GraphRunner, gk.GraphGroup]:
    """A captured runner of one bucket set."""
    reqs, width = gk.Dim("reqs", maximum), gk.Dim("pages", pages)
    backend: Any = backend_for(device)
    if backend.name == "cuda":
        backend.copies_in_graph = copy_in_graph
    group = gk.GraphGroup(backend)
    group.buffers.declare(
        input_ids=gk.BufferSpec((reqs,), torch.int64, pad=0),
        positions=gk.BufferSpec((reqs,), torch.int64, pad=0),
        slot_mapping=gk.BufferSpec((reqs,), torch.int64, pad=0, valid=(0, 100_000)),
        query_start=gk.BufferSpec((reqs + 1,), torch.int32, pad=gk.repeat_last),
        seq_lens=gk.BufferSpec((reqs,), torch.int32, pad=1),
        block_table=gk.BufferSpec((reqs, width), torch.int32, pad={reqs: 0, width: gk.keep}),
    )
    runner = group.runner(
        "decode",
        model,
        policy=gk.Policy.full(gk.Buckets.of(reqs, 1, 16, maximum)),
        inputs={name: gk.Resident(name) for name in NAMES} if resident else None,
        outputs=gk.Output((reqs, WIDTH), torch.float32),
    )
    group.capture(progress=False)
    return runner, group


def measure(device: str, batch: int, bucket: int, pages: int, *, number: int) -> dict[str, Any]:
    """Host and wall microseconds of each way, for one shape of batch."""
    model = Model(device)
    inputs = make_inputs(batch, pages)
    count = len(inputs)
    steps: dict[str, Callable[[int], object]] = {}
    keep: list[Any] = []

    def graphkit_steps(label: str, copy_in_graph: bool) -> None:
        runner, group = make_runner(
            device, model, bucket, pages, copy_in_graph=copy_in_graph, resident=False
        )
        keep.append(group)
        tensors = [{k: torch.from_numpy(v) for k, v in step.items()} for step in inputs]

        def arrays(index: int) -> object:
            return runner.run(runner.dispatch(reqs=batch), inputs[index % count])

        def from_tensors(index: int) -> object:
            return runner.run(runner.dispatch(reqs=batch), tensors[index % count])

        steps[f"graphkit, arrays, {label}"] = arrays
        steps[f"graphkit, CPU tensors, {label}"] = from_tensors
        if batch <= 64:
            lists = [{k: v.tolist() for k, v in step.items()} for step in inputs]
            steps[f"graphkit, lists, {label}"] = lambda i: runner.run(
                runner.dispatch(reqs=batch), lists[i % count]
            )

    graphkit_steps("copy before the graph", False)
    if device != "cpu":
        graphkit_steps("copy in the graph", True)
    runner, group = make_runner(device, model, bucket, pages, copy_in_graph=True, resident=True)
    keep.append(group)
    same = runner.dispatch(reqs=batch)
    others = [runner.dispatch(reqs=batch - i % 2) for i in range(2)]
    steps["graphkit, resident, same size"] = lambda i: runner.run(same)
    steps["graphkit, resident, size changes"] = lambda i: runner.run(others[i % 2])
    if device == "cpu":
        entry = runner.entries[-1]
        steps["floor: one pinned copy and replay"] = lambda i: entry.launch()
    else:
        steps |= peers(device, model, inputs, batch, bucket, pages)
    measured = interleaved_us(steps, number=number)
    # As cold as a step finds them: other inputs each time, and another slot of pinned memory.
    payloads = [np.concatenate([v.reshape(-1).view(np.uint8) for v in s.values()]) for s in inputs]
    slots = [
        torch.zeros(payloads[0].size, dtype=torch.uint8, pin_memory=device != "cpu")
        for _ in range(8)
    ]
    targets = [slot.numpy() for slot in slots]
    measured["memcpy of the payload"] = interleaved_us(
        {"": lambda i: np.copyto(targets[i % 8], payloads[i % count])}, number=number
    )[""]
    for group in keep:
        group.close()
    if device != "cpu":
        # Else the next shape would be compiled as a change of this one's.
        torch._dynamo.reset()
    return measured


def peers(
    device: str,
    model: Model,
    inputs: list[dict[str, np.ndarray[Any, Any]]],
    batch: int,
    bucket: int,
    pages: int,
) -> dict[str, Callable[[int], object]]:
    """The same step as people write it by hand, or get it from PyTorch."""
    count = len(inputs)
    shapes = {k: (bucket + (k == "query_start"), *v.shape[1:]) for k, v in inputs[0].items()}
    static = {
        k: torch.zeros(shape, dtype=torch.from_numpy(inputs[0][k]).dtype, device=device)
        for k, shape in shapes.items()
    }
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(**static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(**static)
    pinned = [{k: torch.from_numpy(v).pin_memory() for k, v in step.items()} for step in inputs]
    lists = [{k: v.tolist() for k, v in step.items()} for step in inputs]

    def six_copies(index: int) -> torch.Tensor:
        for name, value in pinned[index % count].items():
            static[name][: value.shape[0]].copy_(value, non_blocking=True)
        graph.replay()
        return out[:batch]

    def from_lists(index: int) -> torch.Tensor:
        for name, value in lists[index % count].items():
            made = torch.tensor(value, dtype=static[name].dtype, pin_memory=True)
            moved = made.to(device, non_blocking=True)
            static[name][: moved.shape[0]] = moved
        graph.replay()
        return out[:batch]

    on_device = [{k: torch.zeros_like(static[k]) for k in NAMES} for _ in range(2)]
    args = tuple(on_device[0][k] for k in NAMES)
    with torch.no_grad():
        graphed = torch.cuda.make_graphed_callables(_Frozen(model), args, allow_unused_input=True)
        compiled = torch.compile(model, mode="reduce-overhead")
        marked = {k: torch.zeros_like(static[k]) for k in NAMES}
        for tensor in marked.values():
            torch._dynamo.mark_static_address(tensor)
        compiled_in_place = torch.compile(_in_place(model), mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(**on_device[0])
            torch.compiler.cudagraph_mark_step_begin()
            compiled_in_place(**marked)

    def make_graphed(index: int) -> object:
        with torch.no_grad():
            return graphed(*[on_device[index % 2][k] for k in NAMES])

    def reduce_overhead(index: int) -> object:
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(**on_device[index % 2])

    def reduce_overhead_in_place(index: int) -> object:
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            return compiled_in_place(**marked)

    packed = sum(v.nbytes for v in static.values())
    source = torch.zeros(packed, dtype=torch.uint8, pin_memory=True)
    span = torch.zeros(packed, dtype=torch.uint8, device=device)

    def floor(index: int) -> None:
        span.copy_(source, non_blocking=True)
        graph.replay()

    return {
        "bare replay": lambda i: graph.replay(),
        "floor: one pinned copy and replay": floor,
        PACKED: packed_in_place(device, model, inputs, shapes),
        "six pinned copies and replay": six_copies,
        "lists to pinned tensors to device": from_lists,
        "make_graphed_callables": make_graphed,
        "torch.compile reduce-overhead": reduce_overhead,
        "torch.compile reduce-overhead, static inputs marked": reduce_overhead_in_place,
    }


def packed_in_place(
    device: str,
    model: Model,
    inputs: list[dict[str, np.ndarray[Any, Any]]],
    shapes: dict[str, tuple[int, ...]],
    depth: int = 8,
) -> Callable[[int], object]:
    """Way A of the design: one span of all inputs, which the graph reads as it is."""
    count, places, end = len(inputs), {}, 0
    for name, shape in shapes.items():
        places[name] = begin = -(-end // 16) * 16
        end = begin + int(np.prod(shape)) * inputs[0][name].itemsize
    span = torch.zeros(end, dtype=torch.uint8, device=device)

    def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for name, shape in shapes.items():
            dtype = torch.from_numpy(inputs[0][name]).dtype
            begin, size = places[name], int(np.prod(shape)) * dtype.itemsize
            found[name] = memory[begin : begin + size].view(dtype).view(shape)
        return found

    with torch.no_grad():
        model(**views(span))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(**views(span))
    slots = [torch.zeros(end, dtype=torch.uint8, pin_memory=True) for _ in range(depth)]
    ring = [
        {name: view.numpy()[: len(inputs[0][name])] for name, view in views(slot).items()}
        for slot in slots
    ]
    batch = len(inputs[0]["seq_lens"])

    def step(index: int) -> torch.Tensor:
        targets = ring[index % depth]
        for name, value in inputs[index % count].items():
            targets[name][...] = value
        span.copy_(slots[index % depth], non_blocking=True)
        graph.replay()
        return out[:batch]

    return step


def _in_place(model: Model) -> Callable[..., torch.Tensor]:
    # The compiler keeps what it made by code object: the model's own is the other way's.
    def in_place(**inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(**inputs)
        return result

    return in_place


class _Frozen(torch.nn.Module):
    """The model with positional inputs and no parameters of its own, for `make_graphed_callables`."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._call = [model]

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self._call[0](*args)


PACKED = "packed in place, one copy and replay"
SHAPES = {"decode, batch 50 of 64": (50, 64, 64), "batch 256, tables of 512": (256, 256, 512)}


def run(device: str, *, quick: bool = False) -> dict[str, Any]:
    """Every shape; medians in microseconds."""
    number = 50 if quick else 1000
    return {
        label: measure(device, batch, bucket, pages, number=number)
        for label, (batch, bucket, pages) in SHAPES.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = run(options.device, quick=options.quick)
    for label, measured in result.items():
        floor = measured["floor: one pinned copy and replay"]
        rows = [
            (
                name,
                times["host_us"],
                times["host_us"] / floor["host_us"],
                times["wall_us"],
                times["wall_us"] / floor["wall_us"],
            )
            for name, times in measured.items()
        ]
        show(label, ("a step", "host µs", "/ floor", "wall µs", "/ floor"), rows)
    if options.out is not None:
        save("staging", {"staging": result}, options.out)


if __name__ == "__main__":
    main()
