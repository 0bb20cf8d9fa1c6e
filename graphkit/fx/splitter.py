"""The splitting itself: matched nodes become breaks, and what lies between may be compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.split_module import split_module
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graphkit.capture.breaks import Break, Rows
from graphkit.errors import SpecError
from graphkit.fx.matching import Matcher, Operator, operator_name


class BreakModule(torch.nn.Module):
    """A break as a node of a graph."""

    def __init__(self, break_: Break) -> None:
        super().__init__()
        self.break_ = break_

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the break."""
        return self.break_(*args, **kwargs)


class Piece(torch.nn.Module):
    """What lies between two breaks, compiled; as it is where torch doesn't enter compiled code.

    One call under a dispatch mode would make Dynamo skip the piece for good.
    """

    def __init__(self, plain: torch.nn.Module, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.plain = plain
        self._compiled = (compiled,)

    def forward(self, *args: Any) -> Any:
        """Run the piece."""
        if _get_current_dispatch_mode() is not None:
            return self.plain(*args)
        return self._compiled[0](*args)


class Splitter:
    """A backend for `torch.compile` that runs the matched nodes as breaks: ``torch.compile(model,
    backend=Splitter(at=[...]))``.

    In a PIECEWISE capture each of them ends a segment. The capture is graphkit's: give the compiled model to a runner.
    Where dispatch modes are active (the recording backend, checked mode) torch doesn't enter compiled code, and would
    run the model
    unsplit: use ``split(model, ..., through="compile")`` there, which holds the graph and calls it itself.

    Args:
        at: operators and predicates; see `graphkit.fx.Operator`.
        rows: as for `graphkit.eager_break`, with the operators' parameters.
        compile_pieces: compile what lies between the breaks: True by Inductor, or a backend's name.

    Raises:
        SpecError: an argument is wrong; or, when a graph is split, no node matches or a size depends on data.
    """

    def __init__(
        self,
        *,
        at: Sequence[Operator],
        rows: Rows = "bucket",
        compile_pieces: bool | str = False,
    ) -> None:
        if not isinstance(compile_pieces, (bool, str)):
            raise SpecError(
                f"compile_pieces must be a bool or a backend's name, got {compile_pieces!r}"
            )
        self._matcher = Matcher(at)
        self._rows = rows
        self._backend = "inductor" if compile_pieces is True else compile_pieces or None

    def __call__(self, graph: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What `torch.compile` calls with each graph that it has traced."""
        return self.split(graph)

    def split(self, graph: GraphModule) -> GraphModule:
        """Turn the matched nodes of a graph into breaks, in place, and compile the pieces if asked to."""
        matched = self._matcher.nodes(graph)
        _refuse_data_dependence(graph, matched)
        breaks: dict[Any, BreakModule] = {}
        for index, node in enumerate(matched):
            module = breaks.get(node.target)
            if module is None:
                module = breaks[node.target] = BreakModule(_break_of(node, self._rows))
            name = f"break_{index}"
            graph.add_submodule(name, module)
            with graph.graph.inserting_before(node):
                call = graph.graph.call_module(name, node.args, node.kwargs)
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.graph.erase_node(node)
        graph.recompile()
        return graph if self._backend is None else self._compiled(graph, self._backend)

    def _compiled(self, graph: GraphModule, backend: str) -> GraphModule:
        pieces: dict[Node, int] = {}
        current = 0
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _is_break(graph, node):
                pieces[node] = current + 1
                current += 2
            elif node.target is operator.getitem and _is_break(graph, node.args[0]):
                # Taking a break's results apart launches nothing, and Inductor would copy them.
                pieces[node] = pieces[node.args[0]]
            else:
                pieces[node] = current
        split = split_module(graph, graph, lambda node: pieces[node], keep_original_order=True)
        options: Any = {"triton.cudagraphs": False} if backend == "inductor" else None
        for name, piece in list(split.named_children()):
            if any(isinstance(module, BreakModule) for module in piece.modules()):
                continue
            compiled = torch.compile(piece, backend=backend, dynamic=True, options=options)
            setattr(split, name, Piece(piece, compiled))
        return split


def _is_break(graph: GraphModule, node: Any) -> bool:
    return (
        isinstance(node, Node)
        and node.op == "call_module"
        and isinstance(graph.get_submodule(str(node.target)), BreakModule)
    )


def _break_of(node: Node, rows: Rows) -> Break:
    target: Any = node.target
    name = operator_name(node)
    if isinstance(target, str):
        method = target

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, method)(*args, **kwargs)

        target = call
    return Break(target, rows, name=name)


def _refuse_data_dependence(graph: GraphModule, matched: Sequence[Node]) -> None:
    """No segment can hold a node whose size or value the host has to ask the device for."""
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method") or node in matched:
            continue
        value = node.meta.get("val", node.meta.get("example_value"))
        if value is None or not _is_unbacked(value):
            continue
        at = _line_of(node.meta)
        raise SpecError(
            f"{operator_name(node)}{at} gives a size or a value that depends on data, which a graph can't "
            f"hold. Put it and "
            f"all that uses it into one custom operator whose result has a fixed shape, and name that in at="
        )


def _is_unbacked(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(
        bool(free_unbacked_symbols(leaf))
        for leaf in leaves
        if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def _line_of(meta: Mapping[str, Any]) -> str:
    lines = str(meta.get("stack_trace") or "").strip().splitlines()
    if len(lines) < 2:
        return ""
    place, source = lines[-2].strip(), lines[-1].strip()
    return f" ({place}: {source})" if place.startswith("File") else ""
