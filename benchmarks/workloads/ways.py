"""The ways to run a workload: eager, graphkit, copies by hand and a replay, and what PyTorch has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import graphkit as gk
from benchmarks.workloads.workload import Arrays, Workload

FLOOR = "floor: one pinned copy and replay"
EAGER, GRAPHKIT = "eager", "graphkit"
COPIES, GRAPHED = "pinned copies and replay", "make_graphed_callables"
COMPILED = "torch.compile reduce-overhead"
COMPILED_STATIC = "torch.compile reduce-overhead, static inputs marked"
SAME_KERNELS = (FLOOR, GRAPHKIT, COPIES, GRAPHED, EAGER)
"""Those that launch the model's own kernels; torch.compile makes others."""


class Feed:
    """Pinned tensors that a step's arrays are written to, as engines keep them.

    Padding is written once. There is a set for each step that is launched before the caller waits.
    """

    def __init__(self, workload: Workload) -> None:
        pin = workload.device != "cpu"
        self._sets = [workload.tensors(device="cpu", pin=pin) for _ in range(workload.steps)]
        self._arrays = [
            {name: tensor.numpy() for name, tensor in tensors.items()} for tensors in self._sets
        ]
        self._turn = 0

    def write(self, inputs: Arrays) -> dict[str, Tensor]:
        """The padded pinned tensors, with these inputs in their first rows."""
        turn = self._turn
        self._turn = turn + 1 if turn + 1 < len(self._sets) else 0
        arrays = self._arrays[turn]
        for name, value in inputs.items():
            arrays[name][: len(value)] = value
        return self._sets[turn]


class Way:
    """One way to run a workload. Made once, then called with the inputs of step after step.

    Args:
        workload: what to run.

    Attributes:
        is_ours: whether a failure of it is one of this benchmark, and no result.
        is_captured: whether making it takes time and memory that is worth telling.
        needs_cuda: whether there is no such thing without a CUDA device.
        calls: until it is what it will be.
    """

    is_ours = False
    is_captured = True
    needs_cuda = True
    calls = 1

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.on_host = None
        if workload.to_host:
            pin = workload.device != "cpu"
            self.on_host = workload.result(device="cpu", pin=pin)

    def step(self, inputs: Arrays) -> Tensor:
        """Launch; the result may be read once the device is idle."""
        raise NotImplementedError

    def finish(self, result: Tensor) -> Tensor:
        """The rows of the batch, on their way to the host if that is where the caller wants them."""
        if self.on_host is not None:
            return self.on_host.copy_(result, non_blocking=True)
        batch = self.workload.batch
        return result if batch is None or batch == len(result) else result[:batch]

    def close(self) -> None:
        """Give memory back that isn't just garbage."""


class Eager(Way):
    """No graph: the inputs are moved at their real size, and the model is called."""

    is_ours = True
    is_captured = False
    needs_cuda = False

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._feed = Feed(workload)

    def step(self, inputs: Arrays) -> Tensor:
        device = self.workload.device
        moved = {
            name: value[: len(inputs[name])].to(device, non_blocking=True)
            for name, value in self._feed.write(inputs).items()
        }
        return self.finish(self.workload.model(**moved))


class Graphkit(Way):
    """A runner of one bucket."""

    is_ours = True
    needs_cuda = False

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.group = gk.GraphGroup(workload.device)
        self.group.buffers.declare(**workload.specs)
        reqs = workload.reqs
        buckets = gk.Buckets.fixed() if reqs is None else gk.Buckets.of(reqs, reqs.maximum)
        self.runner = self.group.runner(
            "step",
            workload.model,
            policy=gk.Policy.full(buckets),
            outputs=workload.output,
            reads=[workload.model],
            mutates=workload.mutates,
            # A fence does for half a ring: no step waits for one that is launched with it.
            ring_depth=max(8, 2 * workload.steps),
        )
        self.group.capture(progress=False)
        self._sizes: dict[str, Any] = {} if reqs is None else {reqs.name: workload.batch}

    def step(self, inputs: Arrays) -> Tensor:
        runner = self.runner
        result: Tensor = runner.run(runner.dispatch(**self._sizes), inputs)
        return result

    def close(self) -> None:
        self.group.close()


class BareGraph(Way):
    """The floor: one packed pinned copy of the inputs' bytes, and a replay.

    Nothing is written on the host, unpacked, padded or checked. The copy of the result to the host is in the graph.
    """

    is_ours = True

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._static = workload.tensors(device=workload.device)
        packed = sum(tensor.nbytes for tensor in self._static.values())
        pin = workload.device != "cpu"
        self._source = torch.zeros(packed, dtype=torch.uint8, pin_memory=pin)
        self._span = torch.zeros(packed, dtype=torch.uint8, device=workload.device)
        self.graph, self._result = captured(lambda: self.finish(workload.model(**self._static)))

    def step(self, inputs: Arrays) -> Tensor:
        self._span.copy_(self._source, non_blocking=True)
        self.graph.replay()
        return self._result


class Copies(Way):
    """What engines write: pinned tensors, a copy of each into a slice of its static one, and a replay."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._feed = Feed(workload)
        self._static = workload.tensors(device=workload.device)
        self._graph, self._result = captured(lambda: workload.model(**self._static))
        maximum = workload.sizes.get("reqs")
        self._refilled = {
            name: workload.specs[name].fill
            for name in workload.refilled
            if workload.batch != maximum
        }

    def step(self, inputs: Arrays) -> Tensor:
        static = self._static
        for name, value in self._feed.write(inputs).items():
            rows = len(inputs[name])
            static[name][:rows].copy_(value[:rows], non_blocking=True)
        for name, fill in self._refilled.items():
            static[name][len(inputs[name]) :].fill_(fill)
        self._graph.replay()
        return self.finish(self._result)


class Graphed(Way):
    """`torch.cuda.make_graphed_callables`, with the inputs moved to the device as they come."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._feed = Feed(workload)
        samples = workload.tensors(device=workload.device)
        names = list(samples)

        def positional(*args: Tensor) -> Any:
            return workload.model(**dict(zip(names, args, strict=True)))

        self._graphed: Callable[..., Tensor] = torch.cuda.make_graphed_callables(
            positional, tuple(samples.values()), allow_unused_input=True
        )

    def step(self, inputs: Arrays) -> Tensor:
        device = self.workload.device
        host = self._feed.write(inputs).values()
        return self.finish(self._graphed(*[t.to(device, non_blocking=True) for t in host]))


class Compiled(Way):
    """`torch.compile(mode="reduce-overhead")`, with the inputs moved to the device as they come."""

    calls = 4  # it compiles, warms up, records, and replays

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._feed = Feed(workload)
        model = workload.model

        # The compiler keeps what it made by code object: each way needs one of its own.
        def as_they_come(**inputs: Tensor) -> Any:
            return model(**inputs)

        self._compiled = torch.compile(as_they_come, mode="reduce-overhead")

    def step(self, inputs: Arrays) -> Tensor:
        device = self.workload.device
        host = self._feed.write(inputs)
        moved = {name: value.to(device, non_blocking=True) for name, value in host.items()}
        torch.compiler.cudagraph_mark_step_begin()
        return self.finish(self._compiled(**moved))


class CompiledStatic(Compiled):
    """The same, with copies into tensors that are marked as being where they always are."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._static = workload.tensors(device=workload.device)
        for tensor in self._static.values():
            torch._dynamo.mark_static_address(tensor)
        model = workload.model

        def in_place(**inputs: Tensor) -> Any:
            return model(**inputs)

        self._compiled = torch.compile(in_place, mode="reduce-overhead")

    def step(self, inputs: Arrays) -> Tensor:
        static = self._static
        for name, value in self._feed.write(inputs).items():
            static[name].copy_(value, non_blocking=True)
        torch.compiler.cudagraph_mark_step_begin()
        return self.finish(self._compiled(**static))


WAYS: dict[str, type[Way]] = {
    FLOOR: BareGraph,
    GRAPHKIT: Graphkit,
    COPIES: Copies,
    GRAPHED: Graphed,
    EAGER: Eager,
    COMPILED: Compiled,
    COMPILED_STATIC: CompiledStatic,
}
"""In the order in which they are made: what torch.compile does to the allocator comes last."""


def captured(body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A plain CUDA graph and its result, after a warm-up, as the documentation of PyTorch has it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result
