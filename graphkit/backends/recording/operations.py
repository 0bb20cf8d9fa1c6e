"""What the recording knows of an operation from its name and schema."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from graphkit.backends.recording import nests, refusals


class Effect(enum.Enum):
    """What repeating an operation would mean."""

    COMPUTES = enum.auto()
    """It fills memory: a replay repeats it, unless it turns out to have made a view."""
    SHAPES = enum.auto()
    """It changes a tensor's metadata in place, or allocates: a replay must not repeat it."""
    CONSTANT = enum.auto()
    """It wraps values that Python made: a replay writes them again."""
    NONE = enum.auto()
    """It isn't about tensors."""


_SHAPES = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::empty_quantized",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::as_strided_",
        "aten::t_",
        "aten::transpose_",
        "aten::swapdims_",
        "aten::swapaxes_",
        "aten::squeeze_",
        "aten::unsqueeze_",
        "aten::detach_",
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::_resize_output_",
        "aten::rename_",
        "aten::requires_grad_",
        "aten::set_data",
    }
)

# Their schemas don't say that they write the running statistics, or the noise.
_WRITES_UNSAID = frozenset(
    {
        "aten::batch_norm",
        "aten::native_batch_norm",
        "aten::_batch_norm_impl_index",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::instance_norm",
        "aten::rrelu_with_noise",
    }
)


@attrs.frozen
class Operation:
    """One overload of one operator."""

    call: Callable[..., Any]
    name: str
    """``namespace::operator``, with ``.overload`` where there is one."""
    effect: Effect
    opaque: bool
    """Whether it may write arguments that its schema doesn't say it writes."""
    trusted: bool
    """Whether a result that shares an argument's memory is sure to be a view, and no more."""
    refused: refusals.Rule | None
    reads_one_value: bool
    """Whether what is refused is to read the value of its last tensor argument."""
    writes: tuple[tuple[int | None, str], ...]
    """The arguments that its schema says it writes: position (None for keyword-only) and name."""

    @classmethod
    def of(cls, func: Any) -> Operation:
        """What is known of an overload."""
        schema = func._schema
        operator, overload = schema.name, schema.overload_name
        name = f"{operator}.{overload}" if overload else operator
        own = operator.startswith(("aten::", "prims::"))
        effect = Effect.COMPUTES
        if operator in _SHAPES:
            effect = Effect.SHAPES
        elif operator == "aten::lift_fresh":
            effect = Effect.CONSTANT
        elif operator.startswith("profiler::"):
            effect = Effect.NONE
        unsaid = operator in _WRITES_UNSAID
        rule = refusals.OPERATIONS.get(name) or refusals.OPERATIONS.get(operator)
        return cls(
            call=func,
            name=name,
            effect=effect,
            opaque=unsaid or not own,
            trusted=own and not unsaid,
            refused=rule,
            reads_one_value=name in refusals.READS_ONE_VALUE,
            writes=tuple(
                (None if a.kwarg_only else i, a.name)
                for i, a in enumerate(schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ),
        )

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors that this call writes, by the schema."""
        values = [
            args[i] if i is not None and i < len(args) else kwargs.get(name)
            for i, name in self.writes
        ]
        return [t for value in values for t in nests.tensors(value)]

    def repeats(self, result: Any, *, fresh: bool) -> bool:
        """Whether a replay has to run this call, given what the first run returned.

        Args:
            fresh: whether any of the results lies in memory that isn't an argument's.
        """
        if self.effect is not Effect.COMPUTES:
            return False
        return fresh or bool(self.writes) or not self.trusted or result is None
