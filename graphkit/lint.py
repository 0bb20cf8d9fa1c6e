"""Lint: what a CUDA capture of a function would refuse, found by running it once, without a capture or a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.backends import check_generators
from graphkit.backends.recording import ambience, nests, refusals
from graphkit.backends.recording.memory import Memories
from graphkit.backends.recording.operations import Effect, Operation
from graphkit.backends.recording.trace import frame_at, same
from graphkit.capture.breaks import Break, recording
from graphkit.dispatch.policy import FULL, PIECEWISE, Mode
from graphkit.errors import InputError, SpecError, _is_library

_PAGEABLE = "it copies between pageable host memory and the device, which a capture can't wait for"
_PAGEABLE_ADVICE = "Copy before the run, into a buffer, or make the tensor once, outside"
_GENERATOR = "it draws from a generator that isn't registered with the capture"
_GENERATOR_ADVICE = "Name it in generators=, or use the default one"
_LAYOUT_ADVICE = "Use a strided tensor"
_BRANCH = "torch.Tensor.__bool__"
_BRANCH_ADVICE = "Compute both sides and choose with torch.where, or make the branch a variant"
_SIZES_ADVICE = (
    "Give the result a fixed size (a mask with torch.where, or the operation's own size argument), or do this in an "
    "eager break"
)


@attrs.frozen(kw_only=True)
class Refusal:
    """One operation that a capture would refuse.

    Attributes:
        operation: what was called, as ``torch.Tensor.item``, or the operator where Python's surface wasn't used.
        reason: why a capture refuses it.
        remedy: what to do instead.
        location: ``file:line`` of the user's code.
        function: the user's function there.
        source: the source line, stripped; empty if it can't be read.
        count: how often it was called there.
    """

    operation: str
    reason: str
    remedy: str
    location: str
    function: str
    source: str
    count: int = 1

    def __str__(self) -> str:
        line = f": {self.source}" if self.source else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"{self.location} in {self.function}{line}\n"
            f"  {self.operation} can't be captured{times}: {self.reason}. {self.remedy}"
        )


def lint(
    fn: Callable[..., Any],
    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor = (),
    *,
    mode: Mode = FULL,
    generators: Sequence[torch.Generator] = (),
) -> tuple[Refusal, ...]:
    """The operations of a function that a CUDA capture would refuse, all of them, in the order in which they ran.

    The function is run once, eagerly, on these inputs, wherever they are: a CPU will do. Code that asks whether the
    stream is capturing is told that it is. Memory that was there before and that torch's operations write, and the
    random numbers, are put back afterwards. Lint an engine that captures by hand as well: no group is needed.

    What it can't see: `torch.cuda` calls that aren't operations on tensors (synchronize, events, streams), what C++
    code and Triton kernels do inside, other threads, paths that these inputs don't take, and (on CPU inputs) copies
    between host and device. A capture finds those. Whether a function does the same each time is for
    a capture on the recording backend, which makes two.

    Args:
        fn: the function or module, called under `torch.no_grad`.
        inputs: by name, in order, or the one tensor.
        mode: PIECEWISE leaves out what runs in eager breaks; FULL captures them too.
        generators: those that will be registered, besides the default one.

    Returns:
        One `Refusal` for each operation and line; empty if nothing was found.

    Raises:
        SpecError: an argument is of the wrong kind.
        InputError: a name of the inputs is no str.
        Exception: what `fn` raises, with a note of what was found until then.
    """
    args, kwargs = _arguments(fn, inputs)
    if mode not in (FULL, PIECEWISE):
        raise SpecError(f"lint takes mode=FULL or mode=PIECEWISE, got {mode!r}")
    generators = check_generators(generators)
    linter = _Linter([*_defaults(fn, args, kwargs), *generators])
    with linter.at_work(), recording(linter if mode is PIECEWISE else None), torch.no_grad():
        try:
            fn(*args, **kwargs)
        except Exception as error:
            for refusal in linter.refusals:
                error.add_note(f"graphkit.lint: before this, {refusal}")
            raise
    return linter.refusals


def _arguments(fn: Any, inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if not callable(fn):
        raise SpecError(f"lint takes a function or module, got {fn!r}")
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        wrong = [name for name in inputs if not isinstance(name, str)]
        if wrong:
            raise InputError(f"inputs= maps parameters' names to values, got the name {wrong[0]!r}")
        return (), inputs
    if isinstance(inputs, (list, tuple)):
        return inputs, {}
    raise SpecError(
        f"inputs= takes a mapping of names, a sequence or one tensor, got {type(inputs).__name__}"
    )


def _defaults(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Generator]:
    """The default generators of the CPU and of the devices that the function's tensors are on."""
    try:
        leaves = pytree.tree_leaves((args, dict(kwargs)))
    except RecursionError:
        raise InputError("inputs= contains itself, or is nested too deep") from None
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    if isinstance(fn, torch.nn.Module):
        tensors += [*fn.parameters(), *fn.buffers()]
    found = [torch.default_generator]
    for kind, index in dict.fromkeys((t.device.type, t.device.index) for t in tensors):
        generators = getattr(getattr(torch, kind, None), "default_generators", ())
        if index is not None and index < len(generators):
            found.append(generators[index])
    return found


class _Linter:
    """Lets everything run, and notes what a capture would refuse."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.recording = True
        self._generators = list(generators)
        self._memories = Memories()
        self._operations: dict[Any, Operation] = {}
        self._library: dict[str, bool] = {}
        self._found: dict[tuple[str, str], Refusal] = {}
        self._function: tuple[Any, Sequence[Any], Mapping[str, Any]] | None = None
        self._is_noted = False

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """What was found, in order."""
        return tuple(self._found.values())

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Look at what this thread does; memory and random numbers are put back in the end."""
        states = [(generator, generator.get_state()) for generator in self._generators]
        ambience.enter(self)
        try:
            with _Functions(self), _Operations(self):
                yield
        finally:
            ambience.leave(self)
            self._memories.restore()
            for generator, state in states:
                generator.set_state(state)

    def on_break(self, break_: Break, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An eager break of a PIECEWISE graph may do as it likes."""
        dims = () if break_.out is None else break_.out.spec.dims
        self.recording = False
        try:
            return break_.call(args, kwargs, {dim.name: dim.maximum for dim in dims})
        finally:
            self.recording = True

    # -- what the modes call ----------------------------------------------------------------------

    def on_function(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call of PyTorch's Python surface."""
        if not self.recording:
            return function(*args, **kwargs)
        outer = self._function, self._is_noted
        self._function = (function, args, kwargs)
        try:
            reason = refusals.of_function(function, args, kwargs, self._on_host)
            if reason is not None:
                self._note(refusals.name_of(function), reason)
                # What it does inside is the same refusal.
                self._is_noted = True
            return function(*args, **kwargs)
        finally:
            self._function, self._is_noted = outer

    def on_operation(
        self, func: Any, types: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A call of an operation, from whatever surface."""
        if any(t.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for t in types):
            return NotImplemented
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = Operation.of(func)
        if self.recording and not self._is_noted:
            self._check(operation, args, kwargs)
        tensors = [t for t in nests.tensors((args, kwargs)) if t.layout is torch.strided]
        for tensor in tensors if operation.opaque else operation.written(args, kwargs):
            self._memories.save(tensor)
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors}
        for tensor in nests.tensors(result):
            if tensor.layout is not torch.strided:
                continue
            is_constant = operation.effect is Effect.CONSTANT
            if is_constant or tensor.untyped_storage()._cdata not in given:
                self._memories.made(tensor, "constant" if is_constant else "made")
        return result

    def _check(self, operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if operation.refused is not None:
            reason = operation.refused(args, kwargs)
            if reason is not None and not self._allowed(operation, args):
                self._note(self._name(operation), reason)
        if _is_pageable_copy(operation.name, args, kwargs):
            self._note(self._name(operation), _PAGEABLE, _PAGEABLE_ADVICE)
        for _, leaf in nests.paths((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
                layout = str(leaf.layout).removeprefix("torch.")
                reason = f"its argument is of layout {layout}, whose operations wait for the device"
                self._note(self._name(operation), reason, _LAYOUT_ADVICE)
            elif isinstance(leaf, torch.Generator) and not self._is_registered(leaf):
                self._note(self._name(operation), _GENERATOR, _GENERATOR_ADVICE)

    def _is_registered(self, generator: torch.Generator) -> bool:
        return any(same(generator, known) for known in self._generators)

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
            and value.layout is torch.strided
            and self._memories.knows(value)
            and self._memories.of(value).kind == "constant"
        )

    def _name(self, operation: Operation) -> str:
        return operation.name if self._function is None else refusals.name_of(self._function[0])

    def _note(self, operation: str, reason: str, remedy: str | None = None) -> None:
        if remedy is None:
            remedy = refusals.ADVICE
            if operation == _BRANCH:
                remedy = _BRANCH_ADVICE
            elif reason in (refusals.SIZES, refusals.MASK):
                remedy = _SIZES_ADVICE
        frame = frame_at(*self._code())
        key = (operation, frame.location)
        earlier = self._found.get(key)
        if earlier is not None:
            self._found[key] = attrs.evolve(earlier, count=earlier.count + 1)
            return
        self._found[key] = Refusal(
            operation=operation,
            reason=reason,
            remedy=remedy,
            location=frame.location,
            function=frame.function,
            source=frame.source,
        )

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


def _is_pageable_copy(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation copies between the devices, in a way that waits."""
    if name == "aten::copy_":
        target, source = args[0], args[1]
        is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        target_device = target.device
        host = target if target.device.type == "cpu" else source
    elif name == "aten::_to_copy":
        source, target_device = args[0], kwargs.get("device") or args[0].device
        is_async, host = bool(kwargs.get("non_blocking")), source
    else:
        return False
    if target_device.type == source.device.type or "cpu" not in (
        target_device.type,
        source.device.type,
    ):
        return False
    if target_device.type == "cpu" and not is_async:
        return True
    return host.device.type != "cpu" or not host.is_pinned()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, linter: _Linter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._linter = linter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not hasattr(func, "_schema"):
            # A higher-order operator, which the function mode has noted.
            return func(*args, **(kwargs or {}))
        return self._linter.on_operation(func, types, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, linter: _Linter) -> None:
        super().__init__()
        self._linter = linter

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._linter.on_function(func, args, kwargs or {})
