"""One captured segment of a recording, and its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from graphkit.backends.recording import ambience, trace
from graphkit.backends.recording.trace import frame_at
from graphkit.errors import CaptureError, StateError


@attrs.frozen
class Copy:
    """Where one result of a repeated operation belongs: the memory that the first run gave it."""

    path: tuple[Any, ...]
    """Which result: the indices into what the operation returns."""
    tensor: torch.Tensor
    shape: torch.Size
    whole_storage: bool
    """Whether to copy storage to storage: the elements overlap, or don't fill it."""

    def run(self, step: Step, result: Any) -> None:
        """Move a result of a repeated step to where the first run's lies.

        Raises:
            CaptureError: it has another shape or dtype.
        """
        for index in self.path:
            result = result[index]
        if result.shape != self.shape or result.dtype is not self.tensor.dtype:
            frame = frame_at(*step.code)
            raise CaptureError(
                f"{step.name} at {frame} returned {_describe(result)} in a replay and "
                f"{_describe(self.tensor)} in the capture. A graph's shapes are fixed: give it an "
                f"output whose shape doesn't depend on values",
                operation=step.name,
                location=frame.location,
            )
        if self.whole_storage:
            self.tensor.untyped_storage().copy_(result.untyped_storage())
        else:
            self.tensor.copy_(result)


@attrs.frozen
class Step:
    """One operation to repeat."""

    operation: Callable[..., Any]
    arguments: Sequence[Any]
    keywords: dict[str, Any]
    copies: tuple[Copy, ...]
    default_dtype: torch.dtype
    name: str
    code: tuple[str, int, str]
    """File, line and function in the user's code."""


class RecordedGraph:
    """A log of operations and the memory that they work on.

    Replaying runs the operations, not the Python that called them. It means the same under whatever
    is ambient: gradient and inference mode, autocast, default dtype and device.

    Attributes:
        nbytes: bytes of memory that its operations made, and that it holds.
    """

    def __init__(self, steps: list[Step], calls: list[trace.Call], nbytes: int = 0) -> None:
        self._steps: list[Step] | None = steps
        self._targets: dict[int, int] = {}
        self.nbytes = nbytes
        self._calls = calls
        self._num_nodes = sum(step.name != "aten::lift_fresh" for step in steps)

    @property
    def num_nodes(self) -> int:
        """Number of operations that a replay runs; views, allocations and constants are none."""
        return self._num_nodes

    def replay(self) -> None:
        """Run the operations again, on the same memory.

        Raises:
            StateError: the graph was released.
            CaptureError: this thread is being recorded, or an operation's shape changed.
        """
        if self._steps is None:
            raise StateError("this graph was released, and can't be replayed; capture it again")
        if ambience.is_recording():
            raise CaptureError(
                "a graph can't be replayed inside a capture; do it in an eager break, or call the "
                "function that the graph was captured from"
            )
        with _as_recorded():
            default = dtype = torch.get_default_dtype()
            try:
                for step in self._steps:
                    if step.default_dtype is not dtype:
                        dtype = step.default_dtype
                        torch.set_default_dtype(dtype)
                    result = step.operation(*step.arguments, **step.keywords)
                    for copy in step.copies:
                        copy.run(step, result)
            finally:
                if dtype is not default:
                    torch.set_default_dtype(default)

    def set_target(self, target: torch.Tensor, other: torch.Tensor) -> None:
        """Make the copy that was recorded into `target` write `other`.

        Raises:
            StateError: there is no such copy.
        """
        address, steps = target.data_ptr(), self._steps or []
        index = self._targets.get(address)
        if index is None:
            copies = (
                i
                for i, step in enumerate(steps)
                if step.name == "aten::copy_" and step.arguments[0].data_ptr() == address
            )
            index = next(copies, None)
            if index is None:
                raise StateError("the graph has no copy whose target can be set")
            self._targets[address] = index
        step = steps[index]
        steps[index] = attrs.evolve(step, arguments=(other, *step.arguments[1:]))

    def release(self) -> None:
        """Drop the log, and with it the memory that nothing else holds."""
        self._steps = None
        self._calls = []
        self.nbytes = 0

    def difference(self, other: Any) -> str | None:
        """The first operation in which `other`, another recording of the same function, differs.

        Compared are operations, scalars, shapes, strides, which memory each tensor lies in, and the
        constants that Python made. None if all agree.
        """
        return trace.difference(self._calls, other._calls)


@contextmanager
def _as_recorded() -> Iterator[None]:
    """No mode of the caller's reaches the operations, as none reaches a CUDA graph's kernels."""
    with ExitStack() as stack:
        # In inference mode both normal and inference tensors may be written.
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch._C.DisableTorchFunction())
        if _get_current_dispatch_mode() is not None:
            stack.enter_context(_disable_current_modes())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        yield


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
