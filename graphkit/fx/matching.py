"""Matching: which nodes of a traced graph are breaks."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from graphkit.errors import SpecError

Operator = torch._ops.OpOverload | torch._ops.OpOverloadPacket | str | Callable[..., Any]
"""``torch.ops.aten.mm``, ``torch.ops.aten.mm.default``, "aten::mm", a builtin function of torch's, or a
predicate over nodes."""


class Matcher:
    """Finds the nodes that run as breaks.

    Args:
        at: operators and predicates; see `Operator`.

    Raises:
        SpecError: `at` is empty, or has something else in it.
    """

    def __init__(self, at: Sequence[Operator]) -> None:
        if isinstance(at, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or not (
            isinstance(at, Sequence)
        ):
            raise SpecError(f"at must be a list of operators or predicates, got {at!r}")
        if not at:
            raise SpecError("at is empty: name at least one operator to break at")
        for item in at:
            if not callable(item) and not isinstance(item, str):
                raise SpecError(
                    f"at takes operators (torch.ops.aten.mm, 'aten::mm') and predicates over nodes, got {item!r}"
                )
        self.at = tuple(at)

    def nodes(self, graph: GraphModule) -> list[Node]:
        """The nodes that match, in order.

        Raises:
            SpecError: none does, the operators that are there are listed.
        """
        calls = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
        found = [n for n in calls if any(_matches(item, n) for item in self.at)]
        if not found:
            counts = Counter(operator_name(node) for node in calls)
            there = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
            wanted = ", ".join(map(_shown, self.at))
            raise SpecError(
                f"no node of the traced model matches at=[{wanted}]; the operators that are there: {there or 'none'}"
            )
        return found


def operator_name(node: Node) -> str:
    """A node's operator, as ``aten::mm.default``, or as torch's function is called."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target._schema.name}.{target._overloadname}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, str):
        return f"Tensor.{target}"
    return str(getattr(target, "__name__", target))


def _matches(item: Operator, node: Node) -> bool:
    if isinstance(item, str):
        name = item.replace("::", ".").removeprefix("torch.ops.")
        parts = operator_name(node).replace("::", ".").split(".")
        # With and without namespace and overload.
        return name in (".".join(parts), ".".join(parts[:2]), parts[1] if parts[1:] else parts[0])
    if isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _is_operator(item, node)
    if isinstance(item, types.BuiltinFunctionType):
        return node.target is item
    return bool(item(node))


def _is_operator(item: torch._ops.OpOverload | torch._ops.OpOverloadPacket, node: Node) -> bool:
    target: Any = node.target
    if target is item:
        return True
    packet = item.overloadpacket if isinstance(item, torch._ops.OpOverload) else item
    if isinstance(target, torch._ops.OpOverload):
        return item is packet and target.overloadpacket is packet
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target is packet
    # A graph of torch.compile has torch's own functions and methods, which are named after the operators.
    namespace, _, name = str(packet._qualified_op_name).partition("::")
    own = target if isinstance(target, str) else getattr(target, "__name__", None)
    return namespace == "aten" and own == name


def _shown(item: Operator) -> str:
    if isinstance(item, torch._ops.OpOverload):
        return f"{item._schema.name}.{item._overloadname}"
    if isinstance(item, torch._ops.OpOverloadPacket):
        return str(item._qualified_op_name)
    return item if isinstance(item, str) else str(getattr(item, "__name__", item))
