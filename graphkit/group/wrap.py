"""Wrapping: a function with private static buffers, called like the function itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch

from graphkit.buffers import BufferSpec
from graphkit.dims import Dim
from graphkit.dispatch.buckets import Buckets
from graphkit.dispatch.dispatcher import FULL, Dispatch, Policy, Route
from graphkit.errors import InputError
from graphkit.parameters import Fed, Resident
from graphkit.runner.runner import GraphRunner


class Wrapped:
    """A function with private static buffers; made by `GraphGroup.wrap`.

    Attributes:
        runner: the runner behind it.
    """

    def __init__(self, runner: GraphRunner, specs: Mapping[str, BufferSpec]) -> None:
        self.runner = runner
        self._specs = dict(specs)

    def __call__(self, *args: Any, context: Any = None, **inputs: Any) -> Any:
        """Run on a batch; the sizes are read off the inputs' shapes.

        Returns:
            What the function returns, as independent tensors.
        """
        if len(args) > len(self._specs):
            raise InputError(
                f"{self.runner.name!r} takes {len(self._specs)} inputs, got {len(args)} by position"
            )
        for name, value in zip(self._specs, args, strict=False):
            if name in inputs:
                raise InputError(f"{self.runner.name!r}: input {name!r} is given twice")
            inputs[name] = value
        return self.runner.run(self.dispatch(inputs), inputs, context=context, clone=True)

    def dispatch(self, inputs: Mapping[str, Any]) -> Dispatch:
        """The dispatch for these inputs."""
        sizes: dict[str, int] = {}
        for name, spec in self._specs.items():
            if name not in inputs:
                raise InputError(
                    f"{self.runner.name!r}: input {name!r} is missing; it takes {', '.join(self._specs)}"
                )
            try:
                shape = _shape_of(inputs[name])
            except RecursionError:
                raise InputError(
                    f"{self.runner.name!r}: input {name!r} contains itself, or is nested too deep"
                ) from None
            if len(shape) != len(spec.shape):
                raise InputError(
                    f"{self.runner.name!r}: input {name!r} has shape {shape}, expected {len(spec.shape)} axes: {spec}"
                )
            for extent, size in zip(spec.shape, shape, strict=True):
                if isinstance(extent, int):
                    continue
                dim, count = _solve(extent, size, name)
                if sizes.setdefault(dim.name, count) != count:
                    raise InputError(
                        f"{self.runner.name!r}: the inputs disagree on dim {dim.name!r}: {sizes[dim.name]}, "
                        f"and {count} by {name!r}"
                    )
        return self.runner.dispatch(**sizes)


def _shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an array, or of nested rows, of which the longest says how wide the others are."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    if not isinstance(value, (list, tuple)):
        return ()
    # Numbers have no shape to look for, and there may be many of them.
    if not value or isinstance(value[0], (int, float)):
        return (len(value),)
    rows = [_shape_of(row) for row in value]
    return (len(value), *(max(sizes) for sizes in zip_longest(*rows, fillvalue=0)))


def _solve(extent: Any, size: int, name: str) -> tuple[Dim, int]:
    if isinstance(extent, Dim):
        return extent, size
    count, rest = divmod(size - extent.offset, extent.factor)
    if rest or count < 0:
        raise InputError(f"input {name!r} has {size} rows, which is no {extent}")
    return extent.dim, count


def wrap_options(
    fn: Callable[..., Any], declared: Mapping[str, BufferSpec], specs: Mapping[str, Any]
) -> dict[str, Any]:
    """The runner's options behind a wrapped function.

    Args:
        declared: those of `specs` that are buffers; the others are options.
    """
    options = {name: value for name, value in specs.items() if name not in declared}
    # Private buffers are the function's inputs, and nothing else.
    roles = dict(options.get("inputs") or {})
    taken = {role.buffer for role in roles.values() if isinstance(role, (Fed, Resident))}
    options["inputs"] = {name: Fed(name) for name in declared if name not in taken} | roles
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if isinstance(module, torch.nn.Module):
        # Its parameters are what the graphs read, whoever replaces them.
        options["reads"] = [*options.get("reads", ()), module]
    return options


def default_policy(dims: tuple[Dim, ...]) -> Policy:
    """FULL over powers of two of every dim, in each combination; one graph where there is no dim."""
    if not dims:
        return Policy([Route(FULL, Buckets.fixed())])
    if len(dims) == 1:
        return Policy([Route(FULL, Buckets.powers(dims[0]))])
    sizes = {dim: [point[0] for point in Buckets.powers(dim).points] for dim in dims}
    return Policy([Route(FULL, Buckets.grid(sizes))])
