"""The split model: one trace for all buckets, with breaks at the operators that were named."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphkit.capture.breaks import Break, Rows
from graphkit.dims import Affine, Dim
from graphkit.errors import SpecError
from graphkit.fx.inputs import TraceInputs
from graphkit.fx.matching import Operator
from graphkit.fx.splitter import BreakModule, Splitter
from graphkit.fx.tracing import through_compile, through_export

_TRACERS = {"export": through_export, "compile": through_compile}


class Split:
    """A model whose matched operators are breaks; to hand to a runner with a PIECEWISE route. Made by `split`.

    It takes the traced inputs by keyword, and returns what the model returns. Parameters and buffers are the model's
    own, looked up at
    each call; anything else that isn't an input is as it was at the trace.

    Attributes:
        model: what was traced. Name it in the runner's ``reads=``.
        graph: the split graph, to look at: ``print(split.graph.code)``.
        breaks: one for each kind of operator that was matched.
    """

    def __init__(
        self, model: Callable[..., Any], splitter: Splitter, inputs: TraceInputs, tracer: str
    ) -> None:
        traced = _TRACERS[tracer](model, inputs)
        self.model = model
        self.graph = splitter.split(traced.graph)
        self.breaks: tuple[Break, ...] = tuple(
            dict.fromkeys(m.break_ for m in self.graph.modules() if isinstance(m, BreakModule))
        )
        self.__name__ = str(getattr(model, "__name__", type(model).__name__))
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in inputs.values]
        )
        self._sources = traced.sources
        self._rebuild = traced.rebuild
        self._examples = inputs.values
        self._extents = inputs.extents

    @property
    def num_breaks(self) -> int:
        """How often a call reaches a break."""
        calls = [node for module in self.graph.modules() for node in _nodes(module)]
        return sum(1 for module, node in calls if _is_break(module, node))

    def __call__(self, **inputs: Any) -> Any:
        """Run the split model.

        Raises:
            SpecError: an input is missing, or isn't what the model was traced for.
        """
        ordered = [self._checked(name, inputs) for name in self._examples]
        if len(inputs) > len(ordered):
            extra = [name for name in inputs if name not in self._examples]
            raise SpecError(
                f"{self.__name__} was traced without {', '.join(map(repr, extra))}; name it in inputs="
            )
        leaves = pytree.tree_leaves(ordered)
        results = self.graph(*(source(leaves) for source in self._sources))
        return self._rebuild(results, leaves)

    def _checked(self, name: str, inputs: Mapping[str, Any]) -> Any:
        example = self._examples[name]
        if name not in inputs:
            if isinstance(example, torch.Tensor):
                raise SpecError(
                    f"{self.__name__} was traced with the input {name!r}, and got {list(inputs)}"
                )
            return example
        value = inputs[name]
        if not isinstance(example, torch.Tensor):
            if isinstance(value, torch.Tensor) or value != example:
                raise SpecError(
                    f"{self.__name__} was traced for {name}={example!r}, and got {value!r}"
                )
            return value
        varying = self._extents.get(name, {})
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype != example.dtype
            or value.ndim != example.ndim
            or any(
                size != fixed
                for axis, (size, fixed) in enumerate(zip(value.shape, example.shape, strict=True))
                if axis not in varying
            )
        ):
            shape = [str(varying.get(axis, size)) for axis, size in enumerate(example.shape)]
            got = (
                f"{list(value.shape)} of {value.dtype}"
                if isinstance(value, torch.Tensor)
                else repr(value)
            )
            raise SpecError(
                f"{self.__name__} was traced for {name!r} of [{', '.join(shape)}] of {example.dtype}, and got {got}"
            )
        return value


def _nodes(module: Any) -> list[tuple[Any, Any]]:
    graph = getattr(module, "graph", None)
    return [(module, node) for node in graph.nodes] if isinstance(graph, torch.fx.Graph) else []


def _is_break(module: Any, node: Any) -> bool:
    return node.op == "call_module" and isinstance(
        module.get_submodule(str(node.target)), BreakModule
    )


def split(
    model: Callable[..., Any],
    *,
    at: Sequence[Operator],
    inputs: Any,
    dynamic: Mapping[str, Mapping[int, Dim | Affine]] | None = None,
    rows: Rows = "bucket",
    through: str = "export",
    compile_pieces: bool | str = False,
    device: str | torch.device | None = None,
) -> Split:
    """Trace a model once, and make breaks of the named operators.

        split = graphkit.fx.split(model, at=[torch.ops.aten.scaled_dot_product_attention], inputs=vars(buffers))
        runner = group.runner("model", split, policy=gk.Policy.piecewise(buckets), reads=[model])

    Args:
        model: a module or function; it is not changed.
        at: ``torch.ops`` packets or overloads, their names, builtin functions of torch's, or predicates over FX nodes.
        inputs: parameter -> `Buffer` or `BufferSpec` (its dims vary), a tensor (see `dynamic`), or a Python value,
        which is baked.
            What isn't named keeps its default.
        dynamic: parameter -> axis -> dim, for inputs given as tensors.
        rows: which rows the operators see, as for `graphkit.eager_break`; a mapping names the operators' parameters.
        through: "export" (`torch.export`, to ATen operators) or "compile" (`torch.compile`'s tracer, to torch's
        functions).
        compile_pieces: compile what lies between the breaks, for all buckets at once: True by Inductor, or a
        backend's name.
            A bucket of size 1 is compiled apart. In checked mode and on the recording backend pieces run uncompiled.
        device: where examples are made; by default the first parameter's or tensor's device.

    Raises:
        SpecError: an argument is wrong, no operator matches, or the model can't be traced in one graph for all sizes.
    """
    if through not in _TRACERS:
        raise SpecError(f"through must be 'export' or 'compile', got {through!r}")
    if not callable(model):
        raise SpecError(f"split needs a module or function, got {model!r}")
    if not isinstance(inputs, Mapping) or not inputs:
        raise SpecError(f"inputs must map the model's parameters to buffers, got {inputs!r}")
    _check_call(model, inputs)
    splitter = Splitter(at=at, rows=rows, compile_pieces=compile_pieces)
    where = torch.device(device) if device is not None else _device_of(model, inputs)
    return Split(model, splitter, TraceInputs(inputs, dynamic or {}, where), through)


def _check_call(model: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    target = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**dict(inputs))
    except TypeError as error:
        name = getattr(model, "__name__", type(model).__name__)
        raise SpecError(
            f"{name} can't be called with the inputs {list(inputs)}: {error}; inputs= maps its own parameters"
        ) from None


def _device_of(model: Any, inputs: Mapping[str, Any]) -> torch.device:
    module = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    tensors = (
        [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    )
    tensors += [v for v in dict(inputs).values() if isinstance(v, torch.Tensor)]
    if not tensors:
        raise SpecError("the model has no parameter to tell the device by: give device=")
    return tensors[0].device
