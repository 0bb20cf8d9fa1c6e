"""A recording under way: what is logged, what is refused, and what is put back at the end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.backends.recording import ambience, nests, refusals
from graphkit.backends.recording.graph import Copy, RecordedGraph, Step
from graphkit.backends.recording.memory import Memories
from graphkit.backends.recording.operations import Effect, Operation
from graphkit.backends.recording.pool import RecordingPool
from graphkit.backends.recording.trace import Call, frame_at, same
from graphkit.errors import CaptureError, StateError, _is_library

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


class RecordingCapture:
    """Logs what this thread runs, in segments, from its making to `end` or `abort`.

    The modes stay on PyTorch's stacks throughout, since `split` may be called from within modes of
    the user's; a segment ends by no longer listening.

    Args:
        generators: generators, besides the default one, that operations may draw from.
        pool: that counts the memory of its graphs.

    Raises:
        StateError: this thread is being recorded already.
    """

    def __init__(
        self, *, generators: Sequence[torch.Generator] = (), pool: RecordingPool | None = None
    ) -> None:
        if ambience.is_recording():
            raise StateError(
                "a capture is under way on this thread; end it before beginning another one"
            )
        self.recording = True
        self._thread = threading.get_ident()
        self._generators = [torch.default_generator, *generators]
        self._states = [generator.get_state() for generator in self._generators]
        self._failure: CaptureError | None = None
        self._steps: list[Step] = []
        self._calls: list[Call] = []
        self._operations: dict[Any, Operation] = {}
        self._library: dict[str, bool] = {}
        self._memories = Memories()
        self._pool = RecordingPool() if pool is None else pool
        self._number = self._pool.begin()
        self._counted = 0
        self._function: tuple[Any, Sequence[Any], Mapping[str, Any]] | None = None
        self._finished = False
        self._modes = (_Functions(self), _Operations(self))
        ambience.enter(self)
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def split(self) -> RecordedGraph:
        """End the segment, and stop listening until `resume`. What was computed is in memory.

        Raises:
            CaptureError: an operation was refused, though the function went on.
            StateError: no segment is under way, or this is another thread.
        """
        self._expect(recording=True)
        self.recording = False
        return self._segment()

    def resume(self) -> None:
        """Begin the next segment.

        Raises:
            StateError: a segment is under way, or this is another thread.
        """
        self._expect(recording=False)
        self.recording = True

    def end(self) -> RecordedGraph:
        """End the capture; the last segment's graph.

        Memory from before the capture that it wrote, and the generators, are as they were.

        Raises:
            CaptureError: an operation was refused, though the function went on.
            StateError: no segment is under way, or this is another thread.
        """
        self._expect(recording=True)
        self._finish()
        return self._segment()

    def abort(self) -> None:
        """End the capture and drop it. Memory and generators are as before it."""
        if not self._finished:
            self._finish()
        self._steps, self._calls = [], []

    def _expect(self, *, recording: bool) -> None:
        if self._finished:
            raise StateError("this capture has ended")
        if threading.get_ident() != self._thread:
            raise StateError(
                "a capture can be split, resumed and ended only by the thread that began it"
            )
        if self.recording is not recording:
            state = "between segments" if recording else "recording a segment"
            raise StateError(
                f"the capture is {state}; calls of split() and resume() have to alternate"
            )

    def _segment(self) -> RecordedGraph:
        if self._failure is not None:
            raise self._failure
        made = self._memories.nbytes - self._counted
        self._counted = self._memories.nbytes
        graph = RecordedGraph(self._steps, self._calls, made)
        self._pool.add(graph, self._number)
        self._steps, self._calls = [], []
        return graph

    def _finish(self) -> None:
        self.recording = False
        self._finished = True
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        ambience.leave(self)
        self._memories.restore()
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    # What the modes call.

    def on_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of PyTorch's Python surface."""
        if not self.recording:
            return function(*args, **kwargs)
        outer, self._function = self._function, (function, args, kwargs)
        try:
            reason = refusals.of_function(function, args, kwargs, self._on_host)
            if reason is not None:
                raise self._refusal(refusals.name_of(function), reason)
            return function(*args, **kwargs)
        finally:
            self._function = outer

    def on_operation(
        self, func: Any, types: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A call of an operation, from whatever surface."""
        if any(t.__torch_dispatch__ is not _NO_DISPATCH for t in types):
            return NotImplemented  # a subclass: its own handler runs, and calls operations in turn
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = Operation.of(func)
        if not self.recording:
            return self._pass(operation, args, kwargs)
        if operation.effect is Effect.NONE:
            return func(*args, **kwargs)
        self._check(operation, args, kwargs)
        return self._log(operation, args, kwargs)

    def _pass(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = operation.call(*args, **kwargs)
        given = set()
        if operation.effect is not Effect.CONSTANT:
            given = {_storage(t) for t in nests.tensors((args, kwargs)) if _has_storage(t)}
        for tensor in nests.tensors(result):
            if _has_storage(tensor) and _storage(tensor) not in given:
                self._memories.made_in_break(tensor)
        return result

    def _check(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if operation.refused is not None:
            reason = operation.refused(args, kwargs)
            if reason is not None and not self._allowed(operation, args):
                raise self._refusal(self._name(operation), reason)
        for _, leaf in nests.paths((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._check_layout(operation, leaf)
            elif isinstance(leaf, torch.Generator) and not self._registered(leaf):
                raise self._refusal(
                    self._name(operation),
                    "it draws from a generator that isn't registered with the capture",
                    "Pass the generator to the runner (generators=), or use the default one",
                )

    def _registered(self, generator: torch.Generator) -> bool:
        return any(same(generator, known) for known in self._generators)

    def _check_layout(self, operation: Operation, tensor: torch.Tensor) -> None:
        if not _has_storage(tensor):
            layout = str(tensor.layout).removeprefix("torch.")
            raise self._refusal(
                self._name(operation), f"tensors of layout {layout} can't be recorded"
            )

    def _allowed(self, operation: Operation, args: Sequence[Any]) -> bool:
        if operation.reads_one_value and self._on_host(args[-1]):
            return True
        return self._function is not None and refusals.is_fine_on_cuda(
            operation.name, *self._function
        )

    def _on_host(self, value: Any) -> bool:
        """Whether a value was made by Python, without a device: CUDA has it on the host."""
        return (
            isinstance(value, torch.Tensor)
            and _has_storage(value)
            and self._memories.knows(value)
            and self._memories.of(value).kind == "constant"
        )

    def _name(self, operation: Operation) -> str:
        return operation.name if self._function is None else refusals.name_of(self._function[0])

    def _refusal(self, name: str, reason: str, advice: str = refusals.ADVICE) -> CaptureError:
        frame = frame_at(*self._code())
        error = CaptureError(
            f"{name} can't be captured: {reason} ({frame}). {advice}",
            operation=name,
            location=frame.location,
        )
        self._failure = self._failure or error
        return error

    def _code(self) -> tuple[str, int, str]:
        frame = sys._getframe(1)
        while True:
            filename = frame.f_code.co_filename
            library = self._library.get(filename)
            if library is None:
                library = self._library[filename] = _is_library(filename)
            if not library or frame.f_back is None:
                return filename, frame.f_lineno, frame.f_code.co_name
            frame = frame.f_back

    def _log(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = list(nests.tensors((args, kwargs)))
        if operation.effect is Effect.CONSTANT and self._is_constant(tensors[0]):
            return self._log_constant(operation, tensors[0])
        uses = {id(t): self._memories.use(t) for t in tensors}
        written = operation.written(args, kwargs)
        for tensor in tensors if operation.opaque else written:
            self._memories.save(tensor)
        changed = {id(t) for t in written}
        # Aliases, since the tensors' own metadata may change later; of what is written, as it is
        # afterwards, since an `out=` is resized once.
        aliases = {id(t): t.detach() for t in tensors if id(t) not in changed}
        result = operation.call(*args, **kwargs)
        aliases.update((id(t), t.detach()) for t in written)

        given = {_storage(t) for t in tensors}
        copies = []
        for path, leaf in nests.paths(result):
            if isinstance(leaf, torch.Tensor):
                self._check_layout(operation, leaf)
                if _storage(leaf) not in given:
                    self._memories.made(leaf)
                    copies.append(_copy(path, leaf))
        code = self._code()
        self._calls.append(
            Call(
                operation.name,
                tuple(nests.substitute(args, uses)),
                tuple(nests.substitute(kwargs, uses).items()),
                nests.substitute(
                    result, {id(t): self._memories.use(t) for t in nests.tensors(result)}
                ),
                None,
                code,
            )
        )
        if operation.repeats(result, fresh=bool(copies)):
            self._steps.append(
                Step(
                    operation.call,
                    nests.substitute(args, aliases),
                    nests.substitute(kwargs, aliases),
                    tuple(copies),
                    torch.get_default_dtype(),
                    operation.name,
                    code,
                )
            )
        return result

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        # What can't be resized is somebody else's memory (a NumPy array's): it is read live.
        return not self._memories.knows(tensor) and tensor.untyped_storage().resizable()

    def _log_constant(self, operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
        self._memories.made(tensor, "constant")
        storage = tensor.untyped_storage()
        contents = storage.clone()  # type: ignore[no-untyped-call]
        code = self._code()
        use = self._memories.use(tensor)
        self._calls.append(Call(operation.name, (use,), (), use, _bytes(contents), code))
        # Written again by each replay, since a later operation may have worked on it in place.
        self._steps.append(
            Step(
                storage.copy_, (contents,), {}, (), torch.get_default_dtype(), operation.name, code
            )
        )
        result: torch.Tensor = operation.call(tensor)
        return result


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, capture: RecordingCapture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._capture.on_operation(func, types, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, capture: RecordingCapture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._capture.on_function(func, args, kwargs or {})


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _copy(path: tuple[Any, ...], tensor: torch.Tensor) -> Copy:
    fills = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    overlaps = any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    plain = fills and not overlaps and not tensor.is_conj() and not tensor.is_neg()
    return Copy(path, tensor.detach(), tensor.shape, whole_storage=not plain)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
