"""CUDA graphs, driven directly: `torch.cuda.CUDAGraph` without `torch.cuda.graph`.

`torch.cuda.graph` collects garbage, synchronises and flushes the allocator for each graph; a session
does so once for all of them (`graphkit.capture`), which is most of the difference in capture time.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from graphkit.backends.base import ErrorMode
from graphkit.errors import StateError

_THREAD_LOCAL = 1


class CudaGraph:
    """One instantiated CUDA graph."""

    __slots__ = ("_graph", "num_nodes", "replay")

    def __init__(self, graph: torch.cuda.CUDAGraph, num_nodes: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.num_nodes = num_nodes
        # The bound method of the C++ object: a wrapper here would be a tenth of the launch.
        self.replay: Any = graph.replay

    def release(self) -> None:
        """Destroy the graph, which gives its memory back to the pool."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self.replay = _released

    def difference(self, other: object) -> str | None:
        """Nothing is known of what a CUDA graph computes."""
        return None


def _released() -> None:
    raise StateError("this graph was released; capture again")


class CudaCapture:
    """A capture under way on the current stream."""

    def __init__(
        self, pool: Any, generators: Sequence[torch.Generator], error_mode: ErrorMode
    ) -> None:
        self._pool = pool
        self._generators = generators
        self._error_mode = error_mode
        self._segments: list[CudaGraph] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self.resume()

    def resume(self) -> None:
        """Begin a segment."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)
        self._graph = graph

    def split(self) -> CudaGraph:
        """End the segment and run it, so that the eager code after it sees real values."""
        segment = self._end_segment()
        segment.replay()
        return segment

    def end(self) -> CudaGraph:
        """End the last segment."""
        return self._end_segment()

    def abort(self) -> None:
        """Leave streams, allocator and generators as before the capture, whatever state it is in."""
        graph, self._graph = self._graph, None
        if graph is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    graph.capture_end()
            except RuntimeError:
                _end_invalidated(graph)
            graph.reset()
        for segment in self._segments:
            segment.release()
        self._segments.clear()

    def _end_segment(self) -> CudaGraph:
        graph = self._graph
        if graph is None:
            raise StateError("no segment is under capture")
        with warnings.catch_warnings():
            # An empty graph is reported by the session, with the names of runner and bucket.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()
        self._graph = None
        graph.instantiate()
        segment = CudaGraph(graph, _count_nodes(graph))
        self._segments.append(segment)
        return segment


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    count = ctypes.c_size_t(0)
    status = _driver().cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    return count.value if status == 0 else -1


def _end_invalidated(graph: torch.cuda.CUDAGraph) -> None:
    """Finish a capture that CUDA has invalidated.

    torch's `capture_end` raises as soon as the stream's capture turns out to be invalid, before it
    takes the allocators and the generators out of capture mode: later random numbers fail, and the
    pool can't be captured into again. So the dead capture is ended here, an empty one is begun in its
    place, and torch ends that one, all of its own bookkeeping included.
    """
    driver = _driver()
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    dead = ctypes.c_void_p()
    driver.cuStreamEndCapture(stream, ctypes.byref(dead))
    if dead.value:
        driver.cuGraphDestroy(dead)
    driver.cuStreamBeginCapture_v2(stream, _THREAD_LOCAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.capture_end()


class CudaBackend:
    """Capture and replay on one CUDA device."""

    name = "cuda"
    recordings = 1

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._index = index

    def new_pool(self) -> Any:
        """A pool handle; the first capture into it makes the pool."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> torch.cuda.Stream:
        """A stream that is not the default one, which can't be captured."""
        return torch.cuda.Stream(self.device)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Make `stream` current, ordered after the caller's stream, and the reverse on the way out."""
        caller = torch.cuda.current_stream(self.device)
        stream.wait_stream(caller)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            caller.wait_stream(stream)

    def begin_capture(
        self,
        *,
        pool: Any,
        generators: Sequence[torch.Generator] = (),
        error_mode: ErrorMode = "thread_local",
    ) -> CudaCapture:
        """Begin a capture on the current stream."""
        return CudaCapture(pool, generators, error_mode)

    def is_capturing(self) -> bool:
        """Whether the current stream is capturing."""
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give cached blocks back to the device."""
        torch.cuda.empty_cache()

    def rng_state(self, generators: Iterable[torch.Generator] = ()) -> Any:
        """The states of the device's default generator, the CPU's, and `generators`."""
        return (
            torch.cuda.get_rng_state(self.device),
            torch.get_rng_state(),
            [(generator, generator.get_state()) for generator in generators],
        )

    def restore_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""
        device_state, host_state, others = state
        torch.cuda.set_rng_state(device_state, self.device)
        torch.set_rng_state(host_state)
        for generator, generator_state in others:
            generator.set_state(generator_state)

    def stream_key(self) -> int:
        """The raw handle of the current stream (0.07 µs, where the stream object costs 4)."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def wait_for(self, stream_key: int) -> None:
        """Make the current stream wait for what is queued on another."""
        other = torch.cuda.ExternalStream(stream_key, device=self.device)
        torch.cuda.current_stream(self.device).wait_stream(other)

    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that doesn't keep it from the pool."""
        storage = tensor.untyped_storage()
        borrowed = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), self.device, storage.nbytes()
        )
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return empty.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())

    def empty_in(self, pool: Any, like: torch.Tensor) -> torch.Tensor:
        """Memory of the pool, allocated outside a capture."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, pool)
        try:
            with torch.inference_mode(False), torch.no_grad():
                return torch.empty(like.shape, dtype=like.dtype, device=self.device)
        finally:
            torch._C._cuda_endAllocateToPool(self._index, pool)
            torch._C._cuda_releasePool(self._index, pool)

    def new_fence(self) -> torch.cuda.Event:
        """An event, to know when copies out of host memory are done."""
        return torch.cuda.Event()

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator holds on the device."""
        return torch.cuda.memory_reserved(self.device)
