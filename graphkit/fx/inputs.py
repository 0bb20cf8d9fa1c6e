"""Inputs for a trace: examples of the declared buffers, at sizes that can't be mistaken for one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphkit.buffers import Buffer, BufferSpec, Extent, shape_at
from graphkit.dims import Affine, Dim, affine, dims_by_name
from graphkit.errors import SpecError


class TraceInputs:
    """Example values by parameter, and which of their axes vary.

    Args:
        inputs: parameter -> a `Buffer`, a `BufferSpec`, a tensor, or a Python value that is baked.
        dynamic: parameter -> axis -> dim, for tensors.
        device: where examples of declared buffers are made.

    Raises:
        SpecError: an input is wrong, or no axis varies.

    Attributes:
        values: parameter -> example.
        extents: parameter -> axis -> dim, of the axes that vary.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        dynamic: Mapping[str, Mapping[int, Any]],
        device: torch.device,
    ) -> None:
        specs = {
            name: value.spec if isinstance(value, Buffer) else value
            for name, value in inputs.items()
            if isinstance(value, (Buffer, BufferSpec))
        }
        self.values: dict[str, Any] = {}
        self.extents: dict[str, dict[int, Dim | Affine]] = {}
        sizes = _example_sizes(spec.shape for spec in specs.values())
        for name, value in inputs.items():
            spec = specs.get(name)
            if spec is None:
                self.values[name] = value
                self._take_tensor(name, value, dynamic.get(name, {}))
                continue
            if name in dynamic:
                raise SpecError(f"dynamic names {name!r}, whose dims are declared by its buffer")
            self.extents[name] = {
                axis: e
                for axis, e in enumerate(spec.shape)
                if not isinstance(e, int) and _varies(e)
            }
            shape = shape_at(spec.shape, sizes)
            self.values[name] = torch.full(shape, spec.fill, dtype=spec.dtype, device=device)
        unknown = [name for name in dynamic if name not in inputs]
        if unknown:
            raise SpecError(
                f"dynamic names {unknown[0]!r}, which is not among the inputs {list(inputs)}"
            )
        if not any(self.extents.values()):
            raise SpecError(
                "no axis of any input varies: give buffers with a dim, or dynamic={name: {axis: dim}}"
            )

    def _take_tensor(self, name: str, value: Any, axes: Mapping[int, Any]) -> None:
        if not axes:
            return
        if not isinstance(value, torch.Tensor):
            raise SpecError(f"dynamic names {name!r}, which is no tensor: {value!r}")
        for axis, extent in axes.items():
            if not isinstance(extent, (Dim, Affine)) or not 0 <= axis < value.ndim:
                raise SpecError(f"dynamic[{name!r}] must map axes to Dims, got {dict(axes)!r}")
            if value.shape[axis] < 2:
                raise SpecError(
                    f"axis {axis} of the example {name!r} has size {value.shape[axis]}, which a trace takes "
                    f"for fixed; use 2 or more"
                )
        self.extents[name] = dict(axes)

    @property
    def dims(self) -> dict[str, Dim]:
        """The dims of the axes that vary."""
        return dims_by_name(affine(e).dim for axes in self.extents.values() for e in axes.values())


def _varies(extent: Dim | Affine) -> bool:
    return affine(extent).dim.maximum > 1


def _example_sizes(shapes: Iterable[tuple[Extent, ...]]) -> dict[str, int]:
    """A size for each dim such that no two expressions, and no fixed size, are equal where that is possible."""
    extents = [extent for shape in shapes for extent in shape]
    taken = {extent for extent in extents if isinstance(extent, int)}
    expressions: dict[str, list[Affine]] = {}
    dims: dict[str, Dim] = {}
    for extent in extents:
        if not isinstance(extent, int):
            expression = affine(extent)
            dims[expression.dim.name] = expression.dim
            expressions.setdefault(expression.dim.name, []).append(expression)
    sizes: dict[str, int] = {}
    for name, dim in sorted(dims.items(), key=lambda item: item[1].maximum):
        top = dim.maximum
        candidates = [*range(3, min(top, 64) + 1), min(2, top)]
        size = next(
            (c for c in candidates if not taken & {e.size({name: c}) for e in expressions[name]}),
            candidates[0],
        )
        sizes[name] = size
        taken |= {e.size({name: size}) for e in expressions[name]}
    return sizes
