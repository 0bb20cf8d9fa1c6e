"""The seam: what a device must offer for graphs to be captured and replayed on it.

Two backends are shipped, `graphkit.backends.cuda` and `graphkit.backends.recording`. Nothing above
this package knows which one it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

ErrorMode = Literal["global", "thread_local", "relaxed"]


class Graph(Protocol):
    """One captured segment."""

    @property
    def num_nodes(self) -> int:
        """Number of operations; 0 for a capture in which nothing was launched, -1 if unknown."""

    def replay(self) -> None:
        """Run the captured operations on the current stream, without Python."""

    def release(self) -> None:
        """Give the graph's memory back. Replaying afterwards is a `StateError`."""

    def difference(self, other: Any) -> str | None:
        """What differs from another capture of the same function, in words; None if nothing is known to."""


class Capture(Protocol):
    """A capture under way. Exactly one of `end` and `abort` finishes it."""

    def split(self) -> Graph:
        """End the current segment, so that eager code may run. Real values are in memory afterwards."""

    def resume(self) -> None:
        """Begin the next segment."""

    def end(self) -> Graph:
        """End the capture; the last segment's graph.

        Raises:
            CaptureError: the device refused the capture.
        """

    def abort(self) -> None:
        """End the capture after a failure: streams, allocator and generators are as before it."""


class Peak:
    """The most memory that work has held at a time, once it is done.

    Attributes:
        nbytes: bytes of the allocator beyond what it held before.
    """

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class Fence(Protocol):
    """A mark in the queue of a stream."""

    def record(self) -> None:
        """Put the mark after what is queued on the current stream."""

    def query(self) -> bool:
        """Whether the device has passed the mark."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Backend(Protocol):
    """A device on which graphs can be captured."""

    name: str
    device: torch.device
    recordings: int
    """How often the session captures a bucket, with different contents, to compare the results."""

    copies_in_graph: bool
    """Whether a graph's copies can be given another source between replays, by `sources`."""
    copies_can_move: bool
    """Whether a graph's copies can be given another target between replays, by `targets`."""
    stream_key: Callable[[], int]
    """Identity of the current stream, as cheap as the device allows."""
    has_triton: bool
    """Whether Triton kernels run there."""

    def pool_of(self, pool: Any) -> Any:
        """What captures are given as their pool: `pool`, or a new one if it is None."""

    def new_stream(self) -> Any:
        """A stream to capture on; None where the device has none."""

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Make `stream` current, ordered after the work already queued on the caller's stream, and the
        caller's stream ordered after it on the way out."""

    def begin_capture(
        self,
        *,
        pool: Any,
        generators: Sequence[torch.Generator] = (),
        error_mode: ErrorMode = "thread_local",
    ) -> Capture:
        """Begin a capture on the current stream."""

    def is_capturing(self) -> bool:
        """Whether the current stream is capturing."""

    def as_capturing(self) -> AbstractContextManager[None]:
        """Answer True to code of this thread that asks torch whether the current stream is capturing."""

    def synchronize(self, stream_key: int | None = None) -> None:
        """Wait until what is queued on a stream is done; by default on the current one.

        Not for the whole device, which another thread's capture would forbid.
        """

    def empty_cache(self) -> None:
        """Give cached memory that nobody uses back to the device."""

    def drop_workspaces(self) -> None:
        """Make libraries forget memory that they keep between calls.

        What a library made before a capture may be freed under the graph, by whoever else drops it; what it made in a
        capture is the pool's, and not for other work.
        """

    def rng_state(self, generators: Iterable[torch.Generator] = ()) -> Any:
        """The state of the default generator and of `generators`."""

    def restore_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""

    def wait_for(self, stream_key: int) -> None:
        """Make the current stream wait for everything queued on the stream of that key."""

    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can copy from without waiting: uint8, shape ``(nbytes,)``."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a claim on it: a pool may give it to others when its owners are gone."""

    def empty_in(self, pool: Any, like: torch.Tensor) -> torch.Tensor:
        """Memory of the pool, of the shape, strides and dtype of `like`; not inside a capture.

        Code after it may choose its kernels by the strides, as compiled code does.
        """

    def sources(
        self, graph: Graph, target: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> Sequence[Callable[[], None]] | None:
        """Functions that make the graph's copy into `target` read another source from the next replay on.

        Returns:
            One for each of `sources`, or None where `copies_in_graph` is False.

        Raises:
            StateError: the graph has no such copy.
        """

    def targets(
        self, graph: Graph, target: torch.Tensor, targets: Sequence[torch.Tensor]
    ) -> Sequence[Callable[[], None]]:
        """Functions that make the graph's copy into `target`, on the host, write another one from the next replay on.

        Returns:
            One for each of `targets`, which are of one shape and contiguous.

        Raises:
            StateError: the graph has no such copy.
        """

    def new_fence(self) -> Fence | None:
        """What tells when work queued so far is done; None where work is done when a call returns."""

    def memory_reserved(self) -> int:
        """Bytes that the allocator holds on the device; 0 where that means nothing."""

    def memory_free(self) -> int | None:
        """Bytes of the device's memory that nobody uses; None where that means nothing."""

    def memory_outside(self) -> int:
        """Bytes in use on the device that the allocator doesn't hold; 0 where that means nothing.

        The driver's share: contexts, kernels, the graphs' executables; and other processes.
        """

    def pool_bytes(self, pool: Any) -> int:
        """Bytes that a pool, as `pool_of` gives it, holds on the device."""

    def peak(self) -> AbstractContextManager[Peak]:
        """Measure what the work in the block allocates; the answer is there when the block is left.

        The allocator's own peak statistics begin anew.
        """
