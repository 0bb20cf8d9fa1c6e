"""The recording backend: the device seam, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from graphkit.backends.base import ErrorMode
from graphkit.backends.recording import ambience
from graphkit.backends.recording.capture import RecordingCapture
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
    has_triton = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            raise SpecError(
                f"the recording backend runs on the CPU, and was given {str(self.device)!r}; "
                f'use GraphGroup("cpu") for it'
            )

    def pool_of(self, pool: Any) -> Any:
        """A token: memory on the CPU has no pools."""
        return object() if pool is None else pool

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
            pool: ignored.
            generators: those, besides the default one, that captured operations may draw from.
            error_mode: ignored: only this thread is looked at, as by "thread_local".

        Raises:
            StateError: this thread is being recorded already.
        """
        return RecordingCapture(generators=generators)

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

    def synchronize(self) -> None:
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

    def new_fence(self) -> None:
        """None: a copy is done when its call returns."""
        return None

    def memory_reserved(self) -> int:
        """0: the CPU's allocator keeps no count."""
        return 0
