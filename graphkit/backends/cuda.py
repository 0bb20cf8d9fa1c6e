"""CUDA graphs, driven directly: `torch.cuda.CUDAGraph` without `torch.cuda.graph`.

`torch.cuda.graph` collects garbage, synchronises and flushes the allocator for each graph; a session
does so once for all of them (`graphkit.capture.session`), which is most of the difference in capture time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from graphkit.backends.base import ErrorMode, Graph, Peak
from graphkit.collected import collected_warnings
from graphkit.errors import StateError

# torch looks this name up on every call, whichever way its caller came by the function.
_QUERY = "_cuda_isCurrentStreamCapturing"
_LOCK = threading.Lock()
_THREAD_LOCAL = 1
_COPY_NODE = 1
_HOST_TO_DEVICE = 1
_DEVICE_TO_HOST = 2


class CudaGraph:
    """One instantiated CUDA graph."""

    __slots__ = ("_graph", "_pool", "num_nodes", "replay")

    def __init__(self, graph: torch.cuda.CUDAGraph, num_nodes: int, pool: CudaPool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        # Destroying the pool's anchor in a capture would invalidate it: the graphs keep it.
        self._pool = pool
        self.num_nodes = num_nodes
        # The bound method of the C++ object: a wrapper here would be a tenth of the launch.
        self.replay: Any = graph.replay

    def release(self) -> None:
        """Destroy the graph, which gives its memory back to the pool."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self.replay = _released

    def sources(
        self, target: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> list[Callable[[], None]]:
        """One function for each source, which makes the copy into `target` read it.

        Raises:
            StateError: there is no such copy, or CUDA's runtime library isn't found.
        """
        runtime = _runtime()
        graph = self._graph
        node = _copy_node(graph, target) if graph is not None else None
        if graph is None or node is None or runtime is None:
            raise StateError("the graph has no copy of the staged inputs whose source can be set")
        executable = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        return [
            _copy_setter(runtime, executable, node, target, source, _HOST_TO_DEVICE)
            for source in sources
        ]

    def targets(
        self, target: torch.Tensor, targets: Sequence[torch.Tensor]
    ) -> list[Callable[[], None]]:
        """One function for each target, which makes the copy into `target`, on the host, write there.

        Raises:
            StateError: there is no such copy, or CUDA's runtime library isn't found.
        """
        runtime = _runtime()
        graph = self._graph
        found = _copy_to_host(graph, target) if graph is not None else None
        if graph is None or found is None or runtime is None:
            raise StateError("the graph has no copy to the host whose target can be set")
        node, source = found
        executable = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        return [
            _copy_setter(runtime, executable, node, each, source, _DEVICE_TO_HOST)
            for each in targets
        ]

    def difference(self, other: object) -> str | None:
        """Nothing is known of what a CUDA graph computes."""
        return None


def _released() -> None:
    raise StateError("this graph was released; capture again")


class CudaPool:
    """A memory pool for graphs, which outlives them.

    torch gives a pool up with its last graph, and a capture into it then fails: after all graphs were dropped, or the
    first capture was refused. An empty graph keeps it, from the first capture on.

    Args:
        handle: an existing pool, as `torch.cuda.graph_pool_handle` gives it.
    """

    def __init__(self, handle: Any = None) -> None:
        self.handle = torch.cuda.graph_pool_handle() if handle is None else handle
        self._anchor: torch.cuda.CUDAGraph | None = None

    def anchor(self) -> None:
        """Keep the pool; on a stream that can be captured."""
        if self._anchor is None:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            _capture_end(graph)
            self._anchor = graph


def as_pool(pool: Any) -> CudaPool:
    """A `CudaPool` as it is, and any other pool handle as one."""
    return pool if isinstance(pool, CudaPool) else CudaPool(pool)


class CudaCapture:
    """A capture under way on the current stream."""

    def __init__(
        self, pool: CudaPool, generators: Sequence[torch.Generator], error_mode: ErrorMode
    ) -> None:
        self._pool = pool
        self._generators = generators
        self._error_mode = error_mode
        self._segments: list[CudaGraph] = []
        self._pooled: tuple[ctypes.c_void_p, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self.resume()

    def resume(self) -> None:
        """Begin a segment."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for generator in self._generators:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=self._pool.handle, capture_error_mode=self._error_mode)
        self._graph = graph

    def split(self) -> CudaGraph:
        """End the segment and run it, so that the eager code after it sees real values."""
        if not self._pooled:
            self._pooled = _pooled_streams(torch.cuda.current_device())
        side = _capturing_streams(self._pooled)
        try:
            segment = self._end_segment()
        except RuntimeError as error:
            if not side or "unjoined" not in str(error):
                raise
            # Which of them it is can't be asked any more.
            names = ", ".join(f"{handle:#x}" for handle in side)
            raise RuntimeError(f"unjoined work on side stream {names} ({error})") from error
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
                _capture_end(graph)
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
        _capture_end(graph)
        self._graph = None
        graph.instantiate()
        segment = CudaGraph(graph, _count_nodes(graph), self._pool)
        self._segments.append(segment)
        return segment


def _capture_end(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture without torch's warning of an empty graph: the session gives one that has a name."""
    with collected_warnings():
        graph.capture_end()


def _capturing_streams(handles: Iterable[ctypes.c_void_p]) -> list[int]:
    """Those of the streams that take part in the capture under way, besides the current one."""
    is_capturing = _driver().cuStreamIsCapturing
    status = ctypes.c_int(0)
    # Asked for every segment, so that it has to be quick.
    answer = ctypes.byref(status)
    capturing = [h for h in handles if is_capturing(h, answer) == 0 and status.value]
    current = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return [handle.value for handle in capturing if handle.value and handle.value != current]


@functools.cache
def _pooled_streams(index: int) -> tuple[ctypes.c_void_p, ...]:
    """The handles of the streams that torch gives out: 32 of each priority. It offers no list of them."""
    handles: dict[int, None] = {}
    for kind in (1, 2):
        for number in range(32):
            try:
                stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                    stream_id=(number << 5) | (kind << 1) | 1, device_index=index, device_type=1
                )
            except (RuntimeError, TypeError):
                return tuple(map(ctypes.c_void_p, handles))
            # The default stream may not be touched in a capture.
            if stream.cuda_stream:
                handles[stream.cuda_stream] = None
    return tuple(map(ctypes.c_void_p, handles))


def _snapshot() -> list[dict[str, Any]]:
    """The allocator's segments, without the history of allocations where torch can leave it out."""
    options = {"include_traces": False} if _can_omit_traces() else {}
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(**options)  # type: ignore[no-untyped-call]
    return segments


@functools.cache
def _can_omit_traces() -> bool:
    return "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        return ctypes.CDLL(f"libcudart.so.{major}")
    except OSError:
        return None


def _copy_setter(
    runtime: ctypes.CDLL,
    executable: ctypes.c_void_p,
    node: ctypes.c_void_p,
    target: torch.Tensor,
    source: torch.Tensor | int,
    direction: int,
) -> Callable[[], None]:
    call = runtime.cudaGraphExecMemcpyNodeSetParams1D
    # Made once: converting arguments would cost as much as the call.
    to = ctypes.c_void_p(target.data_ptr())
    out_of = ctypes.c_void_p(source if isinstance(source, int) else source.data_ptr())
    nbytes, kind = ctypes.c_size_t(target.nbytes), ctypes.c_int(direction)

    def set_copy() -> None:
        status = call(executable, node, to, out_of, nbytes, kind)
        if status:
            raise StateError(f"CUDA refused to set where a graph's copy goes (error {status})")

    return set_copy


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D, of which only the device addresses are looked at here."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcZ", ctypes.c_size_t),
        ("srcLOD", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_uint),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("reserved0", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("srcHeight", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstZ", ctypes.c_size_t),
        ("dstLOD", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_uint),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("reserved1", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


def _copy_node(graph: torch.cuda.CUDAGraph, target: torch.Tensor) -> ctypes.c_void_p | None:
    """The first root of a graph, if it is a copy into `target`."""
    driver, raw = _driver(), ctypes.c_void_p(graph.raw_cuda_graph())
    for node, copy in _copies(driver.cuGraphGetRootNodes, raw):
        if target.data_ptr() in (copy.dstDevice, copy.dstHost):
            return node
    return None


def _copy_to_host(
    graph: torch.cuda.CUDAGraph, target: torch.Tensor
) -> tuple[ctypes.c_void_p, int] | None:
    """The copy into `target` of a graph, and the address that it reads."""
    driver, raw = _driver(), ctypes.c_void_p(graph.raw_cuda_graph())
    for node, copy in _copies(driver.cuGraphGetNodes, raw):
        if target.data_ptr() in (copy.dstDevice, copy.dstHost):
            return node, int(copy.srcDevice or copy.srcHost or 0)
    return None


def _copies(list_nodes: Any, raw: ctypes.c_void_p) -> Iterator[tuple[ctypes.c_void_p, _Copy]]:
    """The copies among a graph's nodes."""
    driver, count = _driver(), ctypes.c_size_t(0)
    list_nodes(raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * max(count.value, 1))()
    list_nodes(raw, nodes, ctypes.byref(count))
    kind = ctypes.c_int(-1)
    for handle in nodes[: count.value]:
        node = ctypes.c_void_p(handle)
        driver.cuGraphNodeGetType(node, ctypes.byref(kind))
        if kind.value == _COPY_NODE:
            copy = _Copy()
            driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(copy))
            yield node, copy


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
    _capture_end(graph)


class _Answer:
    """Stands in for torch's capture query, for all threads that pretend to capture."""

    def __init__(self, original: Callable[[], bool]) -> None:
        self.original = original
        self.threads: list[int] = []

    def __call__(self) -> bool:
        return threading.get_ident() in self.threads or self.original()


class CudaBackend:
    """Capture and replay on one CUDA device.

    Args:
        device: a CUDA device.
        copy_in_graph: whether the copy of a step's host inputs is a node of the graph, whose source is set before each
            launch, instead of a copy queued before it.
    """

    name = "cuda"
    recordings = 1
    has_triton = True

    def __init__(self, device: torch.device, *, copy_in_graph: bool = True) -> None:
        self.copies_in_graph = copy_in_graph and _runtime() is not None
        self.copies_can_move = _runtime() is not None
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # The raw handle of the current stream: 0.07 µs, where the stream object costs 4.
        self.stream_key: Callable[[], int] = functools.partial(
            torch._C._cuda_getCurrentRawStream, index
        )
        self._index = index

    def pool_of(self, pool: Any) -> CudaPool:
        """The pool that will outlive its graphs; a new one for None."""
        return CudaPool() if pool is None else as_pool(pool)

    def new_stream(self) -> torch.cuda.Stream:
        """A stream that is not the default one, which can't be captured."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

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
        pool = as_pool(pool)
        pool.anchor()
        return CudaCapture(pool, generators, error_mode)

    def is_capturing(self) -> bool:
        """Whether the current stream is capturing."""
        return torch.cuda.is_current_stream_capturing()

    @contextlib.contextmanager
    def as_capturing(self) -> Iterator[None]:
        """Answer True to this thread's Python code; the stream itself isn't capturing."""
        thread = threading.get_ident()
        with _LOCK:
            answer = getattr(torch.cuda.graphs, _QUERY)
            if not isinstance(answer, _Answer):
                answer = _Answer(answer)
                setattr(torch.cuda.graphs, _QUERY, answer)
            answer.threads.append(thread)
        try:
            yield
        finally:
            with _LOCK:
                answer.threads.remove(thread)
                # What somebody else has put in place since is theirs to take away.
                if not answer.threads and getattr(torch.cuda.graphs, _QUERY) is answer:
                    setattr(torch.cuda.graphs, _QUERY, answer.original)

    def synchronize(self, stream_key: int | None = None) -> None:
        """Wait for a stream; to wait for the device is refused while another thread captures."""
        self._stream(self.stream_key() if stream_key is None else stream_key).synchronize()

    def _stream(self, stream_key: int) -> torch.cuda.Stream:
        if not stream_key:
            # To torch, an external stream of handle 0 is a new stream of its pool.
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(stream_key, device=self.device)  # type: ignore[no-untyped-call]

    def empty_cache(self) -> None:
        """Give cached blocks back to the device; while another thread captures, the allocator keeps them."""
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:
            if "captures_underway" not in str(error):
                raise

    def drop_workspaces(self) -> None:
        """Drop cuBLAS's workspaces; torch keeps one for each stream, and makes it anew where it is needed next."""
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

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

    def wait_for(self, stream_key: int) -> None:
        """Make the current stream wait for what is queued on another."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream(stream_key))

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
        pool = as_pool(pool).handle
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, pool)
        try:
            with torch.inference_mode(False), torch.no_grad():
                return torch.empty_like(like, device=self.device)
        finally:
            torch._C._cuda_endAllocateToPool(self._index, pool)
            torch._C._cuda_releasePool(self._index, pool)

    def sources(
        self, graph: Graph, target: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> Sequence[Callable[[], None]] | None:
        """Set the source of the graph's copy node; takes effect with the next launch."""
        if not self.copies_in_graph:
            return None
        if not isinstance(graph, CudaGraph):
            raise StateError(f"{graph!r} is no CUDA graph")
        return graph.sources(target, sources)

    def targets(
        self, graph: Graph, target: torch.Tensor, targets: Sequence[torch.Tensor]
    ) -> list[Callable[[], None]]:
        """Set the target of the graph's copy to the host; takes effect with the next launch."""
        if not isinstance(graph, CudaGraph):
            raise StateError(f"{graph!r} is no CUDA graph")
        return graph.targets(target, targets)

    def new_fence(self) -> torch.cuda.Event:
        """An event, to know when copies out of host memory are done."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator holds on the device."""
        return torch.cuda.memory_reserved(self.device)

    def memory_free(self) -> int:
        """Bytes that the driver says are free."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def memory_outside(self) -> int:
        """Bytes in use that torch's allocator doesn't hold."""
        free, total = torch.cuda.mem_get_info(self.device)
        return max(int(total) - int(free) - self.memory_reserved(), 0)

    def pool_bytes(self, pool: Any) -> int:
        """Bytes of the allocator's segments that are the pool's."""
        handle = tuple(as_pool(pool).handle)
        return sum(
            int(segment["total_size"])
            for segment in _snapshot()
            if segment.get("device") == self._index
            and tuple(segment.get("segment_pool_id", ())) == handle
        )

    @contextlib.contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measure by the allocator's peak statistics."""
        peak = Peak()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            yield peak
        finally:
            peak.nbytes = max(torch.cuda.max_memory_allocated(self.device) - before, 0)
