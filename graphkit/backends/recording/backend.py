"""The recording backend: the device seam, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from graphkit.backends.base import ErrorMode, Peak
from graphkit.backends.recording import ambience
from graphkit.backends.recording.capture import RecordingCapture
from graphkit.backends.recording.pool import Allocations, RecordingPool
from graphkit.errors import SpecError


class _Pretense:
    recording = True


class RecordingBackend:
    """Captures and replays on the CPU, with a CUDA graph's semantics.

    Args:
        device: a CPU device.

    Raises:
        SpecError: `device` is not a CPU.
    """

    name = "recording"
    recordings = 2
    copies_in_graph = False
    copies_can_move = True
    has_triton = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise SpecError(
                f"the recording backend runs on the CPU, and was given {str(self.device)!r}; "
                f'use GraphGroup("cpu") for it'
            )

    def pool_of(self, pool: Any) -> Any:
        """What counts the graphs' memory; a pool of the caller's own kind is left alone."""
        return RecordingPool() if pool is None else pool

    def new_stream(self) -> Any:
        """None: there are no streams."""
        return None

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Nothing happens: there are no streams."""
        return nullcontext()

    def begin_capture(
        self,
        *,
        pool: Any = None,
        generators: Sequence[torch.Generator] = (),
        error_mode: ErrorMode = "thread_local",
    ) -> RecordingCapture:
        """Begin to log this thread's operations; they run as well.

        Args:
            pool: counts the memory of the graphs, if it is one that `pool_of` made.
            generators: those, besides the default one, that captured operations may draw from.
            error_mode: ignored: only this thread is looked at, as by "thread_local".

        Raises:
            StateError: this thread is being recorded already.
        """
        counted = pool if isinstance(pool, RecordingPool) else None
        return RecordingCapture(generators=generators, pool=counted)

    def is_capturing(self) -> bool:
        """Whether this thread is being recorded; False during an eager break."""
        return ambience.is_recording()

    @contextmanager
    def as_capturing(self) -> Iterator[None]:
        """Answer True to this thread's code, without logging it."""
        pretense = _Pretense()
        ambience.enter(pretense)
        try:
            yield
        finally:
            ambience.leave(pretense)

    def synchronize(self, stream_key: int | None = None) -> None:
        """Nothing to wait for."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def drop_workspaces(self) -> None:
        """Nothing is kept."""

    def rng_state(self, generators: Iterable[torch.Generator] = ()) -> Any:
        """The states of the default generator and of `generators`."""
        return [(g, g.get_state()) for g in (torch.default_generator, *generators)]

    def restore_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` gave."""
        for generator, value in state:
            generator.set_state(value)

    def stream_key(self) -> int:
        """0: there is one stream."""
        return 0

    def wait_for(self, stream_key: int) -> None:
        """Nothing to wait for."""

    def host_empty(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, shape ``(nbytes,)``; writable in and outside inference mode."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory: without a pool there is nothing to give it to. Writable outside inference mode too."""
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return empty.set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def empty_in(self, pool: Any, like: torch.Tensor) -> torch.Tensor:
        """Memory of its own."""
        with torch.inference_mode(False), torch.no_grad():
            return torch.empty_like(like, device=self.device)

    def sources(self, graph: Any, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """None: a copy is done by the host, before the replay."""
        return None

    def targets(
        self, graph: Any, target: torch.Tensor, targets: Sequence[torch.Tensor]
    ) -> list[Callable[[], None]]:
        """Set where the recorded copy writes; takes effect with the next replay."""
        return [functools.partial(graph.set_target, target, each) for each in targets]

    def new_fence(self) -> None:
        """None: a copy is done when its call returns."""
        return None

    def memory_reserved(self) -> int:
        """0: the CPU's allocator keeps no count."""
        return 0

    def memory_free(self) -> None:
        """None: the host's memory is no budget of a device."""
        return None

    def memory_outside(self) -> int:
        """0: there is no driver."""
        return 0

    def pool_bytes(self, pool: Any) -> int:
        """Bytes that the largest capture into the pool has made, as a pool that its graphs share would hold."""
        return pool.nbytes if isinstance(pool, RecordingPool) else 0

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measure by what operations make; a recording frees nothing of it meanwhile."""
        peak, allocations = Peak(), Allocations()
        try:
            with allocations:
                yield peak
        finally:
            peak.nbytes = allocations.nbytes
