"""Tracing: a model as one graph for all sizes, through `torch.export` or through `torch.compile`.

Either way the parameters are arguments of the graph, looked up in the model at each call: they are the model's own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from graphkit.dims import Affine, affine
from graphkit.errors import SpecError
from graphkit.fx.inputs import TraceInputs

Source = Callable[[Sequence[Any]], Any]
"""What a graph's argument is, given the leaves of the inputs."""


@attrs.frozen
class Traced:
    """A traced model.

    Attributes:
        graph: its arguments are those of `sources`; it returns a sequence.
        sources: one for each argument of the graph.
        rebuild: from what the graph returned, and the leaves of the inputs, to what the model returns.
    """

    graph: GraphModule
    sources: tuple[Source, ...]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any]


class _Whole(torch.nn.Module):
    """A function or module that takes all inputs as one list, whose structure `torch.export` need not guess."""

    def __init__(self, fn: Callable[..., Any], names: Iterable[str]) -> None:
        super().__init__()
        self.fn = fn
        self.names = tuple(names)

    def forward(self, values: Sequence[Any]) -> Any:
        """Call it by keyword."""
        return self.fn(**dict(zip(self.names, values, strict=True)))


def _leaf(index: int) -> Source:
    return lambda leaves: leaves[index]


def _constant(value: Any) -> Source:
    return lambda leaves: value


def _size(index: int, axis: int) -> Source:
    return lambda leaves: leaves[index].shape[axis]


def _attribute(root: Any, path: str) -> Source:
    *parents, last = path.split(".")

    def look_up(leaves: Sequence[Any]) -> Any:
        owner = root
        for parent in parents:
            owner = getattr(owner, parent)
        return getattr(owner, last)

    return look_up


# -- torch.export ---------------------------------------------------------------------------------


def through_export(fn: Callable[..., Any], inputs: TraceInputs) -> Traced:
    """Trace by `torch.export`, to ATen operators.

    Raises:
        SpecError: the model can't be traced, or only for one size.
    """
    root = _Whole(fn, inputs.values)
    dims: dict[str, Any] = {
        name: torch.export.Dim(name, min=1, max=dim.maximum) for name, dim in inputs.dims.items()
    }

    def dim_of(extent: Any) -> Any:
        expression: Affine = affine(extent)
        dim = dims[expression.dim.name]
        if expression.factor != 1:
            dim = expression.factor * dim
        return dim + expression.offset if expression.offset else dim

    shapes = [
        {axis: dim_of(e) for axis, e in inputs.extents[name].items()}
        if inputs.extents.get(name)
        else None
        for name in inputs.values
    ]

    def export(*, deferred: bool) -> Any:
        with torch.no_grad():
            return torch.export.export(
                root,
                (list(inputs.values.values()),),
                dynamic_shapes=(shapes,),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )

    try:
        try:
            program = export(deferred=False)
        except UserError as error:
            if error.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
                raise
            # A guard on sizes of which torch can't see that it holds for all; it becomes a check.
            program = export(deferred=True)
    except Exception as error:
        raise _explained(error, "torch.export") from error
    tree = program.call_spec.out_spec
    graph = program.graph_module
    _drop_checks(graph)
    sources = tuple(_export_sources(program, root))

    def rebuild(results: Sequence[Any], leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(list(results), tree)

    return Traced(graph, sources, rebuild)


def _export_sources(program: Any, root: Any) -> Iterator[Source]:
    leaf = 0
    for spec in program.graph_signature.input_specs:
        kind = spec.kind.name
        if kind in ("PARAMETER", "BUFFER"):
            yield _attribute(root, spec.target)
        elif kind == "CONSTANT_TENSOR":
            yield _constant(program.constants[spec.target])
        elif kind == "USER_INPUT":
            yield _leaf(leaf)
            leaf += 1
        else:
            raise SpecError(
                f"the traced model has the argument {spec.target!r} of kind {kind}, which a graph can't be given; "
                f'try through="compile"'
            )


def _drop_checks(graph: GraphModule) -> None:
    """Checks of metadata that hold by construction; they would only slow a capture down."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default and not node.users:
            graph.graph.erase_node(node)
    graph.recompile()


# -- torch.compile --------------------------------------------------------------------------------


class _Catcher:
    """A backend that keeps the graph, and runs nothing: it returns empty results of the right shapes."""

    def __init__(self) -> None:
        self.graph: GraphModule | None = None
        self.arguments: Sequence[Any] = ()
        self.results: list[Any] = []

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graph = graph
        output = next(iter(reversed(graph.graph.nodes)))
        fakes = [getattr(arg, "meta", {}).get("example_value", arg) for arg in output.args[0]]

        def run(*arguments: Any) -> list[Any]:
            self.arguments = arguments
            self.results = [_real(fake) for fake in fakes]
            return self.results

        return run


def _real(fake: Any) -> Any:
    if isinstance(fake, torch.Tensor):
        shape = [int(size) for size in fake.shape]
        return torch.empty(shape, dtype=fake.dtype, device=fake.device)
    return int(fake) if isinstance(fake, torch.SymInt) else fake


def through_compile(fn: Callable[..., Any], inputs: TraceInputs) -> Traced:
    """Trace by `torch.compile`, to torch's own functions.

    Raises:
        SpecError: the model can't be traced in one graph, or only for one size.
    """

    def call(**values: Any) -> Any:
        return fn(**values)

    # Dynamo counts recompilations by code object, and each trace is one of its own.
    fresh = types.FunctionType(
        call.__code__.replace(), call.__globals__, "traced", None, call.__closure__
    )
    fresh.__kwdefaults__ = call.__kwdefaults__
    values = {
        k: v.detach().clone() if isinstance(v, torch.Tensor) else v
        for k, v in inputs.values.items()
    }
    for name, axes in inputs.extents.items():
        for axis in axes:
            torch._dynamo.mark_dynamic(values[name], axis)
    catcher = _Catcher()
    try:
        with torch.no_grad(), torch.compiler.set_stance("default"):
            # Not dynamic, but for what is marked: what an earlier trace was given must not make more of it vary.
            traced = torch.compile(fresh, backend=catcher, fullgraph=True, dynamic=False)
            result = traced(**values)
    except Exception as error:
        raise _explained(error, "torch.compile") from error
    if catcher.graph is None:
        raise SpecError("torch.compile traced nothing: the model does no work on tensors")
    leaves = pytree.tree_leaves(values)
    sources = tuple(_compile_sources(catcher.graph, catcher.arguments, fn, leaves))
    return Traced(catcher.graph, sources, _rebuilder(result, catcher.results, leaves))


def _compile_sources(
    graph: GraphModule, arguments: Sequence[Any], fn: Any, leaves: Sequence[Any]
) -> Iterator[Source]:
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    own: dict[int, str] = {}
    if isinstance(module, torch.nn.Module):
        named = [*module.named_parameters(), *module.named_buffers()]
        own = {id(tensor): path for path, tensor in named}
    given = {id(leaf): index for index, leaf in enumerate(leaves)}
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    sizes: dict[Any, Source] = {}
    for node, value in zip(placeholders, arguments, strict=True):
        fake = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and id(value) in given and fake is not None:
            for axis, size in enumerate(fake.shape):
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(size.node.expr, _size(given[id(value)], axis))
    for node, value in zip(placeholders, arguments, strict=True):
        fake = node.meta.get("example_value")
        if id(value) in given:
            yield _leaf(given[id(value)])
        elif id(value) in own:
            yield _attribute(module, own[id(value)])
        elif isinstance(fake, torch.SymInt):
            if fake.node.expr not in sizes:
                raise SpecError(
                    f"the traced model takes {node.name!r}, a size that is no axis of an input; "
                    f'try through="export"'
                )
            yield sizes[fake.node.expr]
        else:
            yield _constant(value)


def _rebuilder(
    result: Any, results: Sequence[Any], leaves: Sequence[Any]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    found, tree = pytree.tree_flatten(result)
    made = {id(value): index for index, value in enumerate(results)}
    given = {id(value): index for index, value in enumerate(leaves)}
    takers: list[tuple[str, Any]] = []
    for position, value in enumerate(found):
        if id(value) in made:
            takers.append(("result", made[id(value)]))
        elif id(value) in given and isinstance(value, torch.Tensor):
            takers.append(("input", given[id(value)]))
        elif isinstance(value, torch.Tensor):
            raise SpecError(
                f"output {position} of the model is a tensor that its graph doesn't make; "
                f'try through="export"'
            )
        else:
            takers.append(("value", value))

    def take(kind: str, what: Any, results: Sequence[Any], leaves: Sequence[Any]) -> Any:
        if kind == "value":
            return what
        return results[what] if kind == "result" else leaves[what]

    def rebuild(results: Sequence[Any], leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten([take(*taker, results, leaves) for taker in takers], tree)

    return rebuild


# -- failures -------------------------------------------------------------------------------------


def _explained(error: Exception, tracer: str) -> Exception:
    """What to raise for a failure of torch's tracer; the user's own exceptions stay what they are."""
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    ours = type(error).__module__.split(".")[0] == "torch" or "torch._dynamo" in text
    if not ours:
        error.add_note(f"graphkit: while {tracer} traced the model")
        return error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    data = "DataDependent" in "".join(names) or "data-dependent" in text.lower() or "u0" in text
    if data:
        advice = (
            "The model decides by the contents of a tensor. Put that part into one custom operator whose result has a "
            "fixed shape, and name it in at="
        )
    elif "onstraint" in text or "specializ" in text.lower():
        advice = (
            "The model makes a Python constant of a size that varies: compute with the size instead, or don't "
            "declare that axis as varying"
        )
    elif "Unsupported" in names or "graph break" in text.lower():
        advice = (
            "torch.compile can't follow the model there (a graph break). Change that line, or use "
            'through="export"'
        )
    else:
        advice = "Give inputs= that the model accepts, or try the other tracer (through=)"
    return SpecError(f"{tracer} can't trace the model in one graph: {first}. {advice}")
