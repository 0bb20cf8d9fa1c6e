"""What a runner is made of, settled at its construction: what its buckets need to be captured and run."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphkit.buffers import Buffers, shape_at, shape_text
from graphkit.capture.example import default_example
from graphkit.capture.mutation import preserve
from graphkit.capture.recorders import WarmupCall
from graphkit.capture.rows import RowInference
from graphkit.capture.watch import ExternalWrite
from graphkit.dims import Affine, Dim, dims_by_name
from graphkit.dispatch.buckets import Bucket
from graphkit.dispatch.dispatcher import Dispatcher, Policy
from graphkit.errors import CaptureWarning, DowngradeWarning, SpecError, StateError
from graphkit.outputs.leases import Lease, LeasedTensor, with_lease
from graphkit.outputs.outputs import Output, as_outputs, output_dims
from graphkit.outputs.results import Results
from graphkit.parameters import Binding, bind
from graphkit.runner.options import RunnerOptions
from graphkit.runner.shared import Shared
from graphkit.runner.step import Step, running
from graphkit.staging.layout import Layout
from graphkit.staging.staging import Staging


class RunnerCore:
    """The function of a runner with its policy, its inputs and its outputs, but without graphs.

    Attributes:
        name: for messages and the report.
        break_calls: PIECEWISE bucket -> the break calls that its warm-up saw.
        writes_undeclared: whether a warm-up changed memory that isn't declared.
    """

    def __init__(
        self,
        shared: Shared,
        name: str,
        fn: Callable[..., Any],
        policy: Policy,
        options: RunnerOptions,
        buffers: Buffers,
    ) -> None:
        self.name = name
        self.fn = fn
        self.options = options
        self.backend = shared.backend
        self.shared = shared
        self._buffers = buffers
        self.policy, self.downgrades = policy.resolve(options.supports)
        for downgrade in self.downgrades:
            warnings.warn(f"runner {name!r}: {downgrade}", DowngradeWarning, stacklevel=4)
        axes = [route.variants.axes for route in policy.routes if route.variants is not None]
        variants = list(dict.fromkeys(axis for route_axes in axes for axis in route_axes))
        self.binding: Binding = bind(
            fn,
            buffers,
            inputs=options.inputs,
            variants=variants,
            has_prepare=options.prepare is not None or options.prepare_host is not None,
        )
        if self.binding.by_prepare and options.prepare is None:
            raise SpecError(
                f"runner {name!r}: {', '.join(self.binding.by_prepare)} must come from prepare, and there "
                "is only prepare_host"
            )
        declared = as_outputs(options.outputs)
        used = [d for b in self.binding.buffers.values() for d in b.spec.dims]
        used += [*self.binding.counts.values(), *self.policy.dims.values()]
        self.dims: Mapping[str, Dim] = dims_by_name([*used, *output_dims(declared)])
        self.check_factors(declared)
        self.dispatcher = Dispatcher(
            self.policy, self.dims, captured=(), strict=options.strict, name=name
        )
        self.staging = Staging(
            name,
            self.backend,
            self.binding,
            tuple(self.dispatcher.dims.values()),
            ring_depth=options.ring_depth,
            ring_full=options.ring_full,
            checked=shared.checked,
            writes_host=options.prepare_host is not None,
        )
        largest = {
            name: max((bucket.sizes[name] for _, bucket in self.dispatcher.graphs), default=0)
            for name in self.dispatcher.dims
        }
        self.results = Results(name, declared, largest, shared, options.ring_depth)
        self.moves_in_graph = self.staging.has_span and self.backend.copies_in_graph
        self.has_prepare = options.prepare is not None
        self.watches_writes = shared.checked or self.backend.name == "recording"
        self.writes_undeclared = False
        self._noted: set[str] = set()
        self.break_calls: dict[Bucket, list[WarmupCall]] = {}

    def check_factors(self, outputs: Mapping[str, Output]) -> None:
        """A factor is a uniform query length, or its rows are interleaved; else real rows are no prefix."""
        lengths = {
            (route.buckets.tied[0], route.buckets.query_len)
            for route in self.policy.routes
            if route.buckets.tied is not None and route.buckets.query_len is not None
        }
        shapes = {f"buffer {b.name!r}": b.spec.shape for b in self.binding.buffers.values()}
        shapes |= {f"output {path!r}": output.shape for path, output in outputs.items()}
        for what, shape in shapes.items():
            for extent in shape:
                if not isinstance(extent, Affine) or extent.factor == 1 or extent.interleaved:
                    continue
                if (extent.dim.name, extent.factor) not in lengths:
                    raise SpecError(
                        f"runner {self.name!r}: {what} of shape {shape_text(shape)} has {extent.factor} "
                        "rows for each of "
                        f"{extent.dim.name!r}, whose real rows are a prefix only if they sit side by side: write "
                        f"gk.interleaved({extent}) if they do, or give the axis a dim of its own"
                    )

    def prepare(self, step: Step) -> dict[str, Any]:
        """Call prepare, and check that it made what the function needs."""
        made = self.made_by_prepare(step) or {}
        for name in made:
            if self.binding.accepted is not None and name not in self.binding.accepted:
                raise SpecError(
                    f"runner {self.name!r}: prepare returned {name!r}, which the function doesn't take; keep what "
                    "isn't passed to it in step.state"
                )
        for name in self.binding.by_prepare:
            if name not in made:
                raise SpecError(
                    f"runner {self.name!r}: the function needs {name!r}, and prepare returned "
                    f"{', '.join(made) or 'nothing'}"
                )
        step.prepared = made
        return made

    def made_by_prepare(self, step: Step) -> dict[str, Any] | None:
        """What prepare returned for this step; None if nothing, or if there is no prepare.

        Raises:
            SpecError: it returned something else than a mapping of names.
        """
        prepare = self.options.prepare
        if prepare is None:
            return None
        with running(step), torch.no_grad():
            made = prepare(step)
        if made is None:
            return None
        if not isinstance(made, Mapping):
            raise SpecError(
                f"runner {self.name!r}: prepare must return a mapping of parameters to values, or None, "
                f"got {type(made).__name__}"
            )
        return dict(made)

    def check_producers(
        self, views: Mapping[str, torch.Tensor], real: Mapping[str, int], where: str
    ) -> None:
        """Raise a `StateError` if a resident buffer isn't padded as `by_producer` promises."""
        for name, buffer in self.binding.resident.items():
            sizes = shape_at(buffer.spec.shape, real)
            for axis, pad in enumerate(buffer.spec.pads):
                if pad is None or pad.kind != "by_producer":
                    continue
                rows = tuple(slice(0, size) for size in sizes[:axis])
                beyond = views[name][(*rows, slice(sizes[axis], None))]
                wanted = torch.full_like(beyond, pad.value or 0)
                same = (beyond == wanted) | ((beyond != beyond) & (wanted != wanted))
                if not bool(same.all()):
                    raise StateError(
                        f"{where}: buffer {buffer.name!r} should hold {pad} beyond row {sizes[axis]} of axis "
                        f"{axis}, and its producer left something else; pad it there, or declare a pad that graphkit "
                        "writes"
                    )

    def prepare_host(self, step: Step) -> None:
        """Call prepare_host, if there is one."""
        if self.options.prepare_host is not None:
            with running(step):
                self.options.prepare_host(step)

    def arguments(
        self, views: Mapping[str, torch.Tensor], variant: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The function's arguments but for what prepare makes."""
        values: dict[str, Any] = {name: views[name] for name in self.binding.passed}
        values.update({name: variant[name] for name in self.binding.variants if name in variant})
        return values

    def end_leases(self, *, replay: bool, slot: int | None = None) -> None:
        """What this run writes or pads can't be read any more as what an earlier run left.

        Args:
            slot: of outputs on the host; all of them for None.
        """
        if replay:
            self.shared.generation += 1
        for buffer in self.binding.buffers.values():
            buffer.generation += 1
        filled = {c.break_.out for calls in self.break_calls.values() for c in calls}
        for out in filled:
            if out is not None:
                out.generation += 1
        self.results.end_leases(replay=replay, slot=slot)

    def leased(self, result: Any) -> Any:
        """What an eager run returns, with a lease on each tensor that lies in an input's buffer."""
        buffers = {b.tensor.untyped_storage().data_ptr(): b for b in self.binding.buffers.values()}

        def lease(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, LeasedTensor) or tensor.layout is not torch.strided:
                return tensor
            buffer = buffers.get(tensor.untyped_storage().data_ptr())
            if buffer is None or tensor.numel() == 0:
                return tensor
            what = f"runner {self.name!r}, an output in the memory of buffer {buffer.name!r},"
            return with_lease(tensor, Lease(what, lambda: buffer.generation))

        return pytree.tree_map_only(torch.Tensor, lease, result)

    def example_batch(
        self, bucket: Bucket, variation: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The example batch of a bucket: fed inputs, resident contents."""
        ties = [route.buckets.tied for route in self.policy.routes if route.buckets.tied]
        values = default_example(self.binding.buffers, bucket.sizes, ties, variation)
        if self.options.example is not None:
            given = dict(self.options.example(bucket))
            unknown = given.keys() - values.keys()
            if unknown:
                raise SpecError(
                    f"runner {self.name!r}: example gave {', '.join(sorted(unknown))}; its inputs are "
                    f"{', '.join(values)}"
                )
            values.update(given)
        fed = {name: values[name] for name in self.binding.fed}
        return fed, {name: values[name] for name in self.binding.resident}

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """Leave declared state as it was; in checked mode also verify that no more was written than is declared."""
        where = f"runner {self.name!r}" if self.shared.checked else None
        return preserve(self.options.mutates, where=where)

    @contextlib.contextmanager
    def kept_buffers(self, sizes: Mapping[str, int]) -> Iterator[None]:
        """Leave what the buffers hold for a bucket of these sizes as it was: somebody may have written it for a run."""
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for buffer in self._buffers:
                if not buffer.is_allocated:
                    continue
                has_sizes = all(dim.name in sizes for dim in buffer.spec.dims)
                memory = buffer.view(sizes) if has_sizes else buffer.tensor
                saved.append((memory, memory.clone()))
        try:
            yield
        finally:
            with torch.no_grad():
                for memory, contents in saved:
                    memory.copy_(contents)

    def declared_memory(self, layout: Layout) -> list[torch.Tensor]:
        """All tensors whose storage the function may write without further notice."""
        tensors = [*layout.views.values(), self.staging.span]
        tensors.extend(buffer.tensor for buffer in self.results.buffers)
        # A break's `out` is any buffer of the group's.
        tensors.extend(buffer.tensor for buffer in self._buffers if buffer.is_allocated)
        for item in self.options.mutates:
            tensors.append(item if isinstance(item, torch.Tensor) else item.tensor)
        return tensors

    def note_undeclared(self, write: ExternalWrite) -> None:
        """Warn, once for each place, of a write to state that is not declared."""
        self.writes_undeclared = True
        self.remark(
            f"runner {self.name!r}: {write}, memory from outside that isn't declared: warm-up has "
            "changed it. Name it in mutates="
        )

    def remark(self, message: str) -> None:
        """Give a `CaptureWarning`, once."""
        if message not in self._noted:
            self._noted.add(message)
            self.warn(message)

    def warn(self, message: str) -> None:
        """Give a `CaptureWarning`."""
        warnings.warn(message, CaptureWarning, stacklevel=2)

    def row_inference(self, where: str) -> RowInference:
        """Which dims the tensors of breaks have, judged over the warm-ups of all PIECEWISE buckets."""
        warmups = list(self.break_calls.items())
        return RowInference(where, warmups, self.dispatcher.dims.values(), self.uniform_lengths())

    def uniform_lengths(self) -> dict[tuple[str, str], int]:
        """(tokens, requests) -> query length, where every batch that can be captured has that one."""
        found: dict[tuple[str, str], int] = {}
        for route in self.policy.routes:
            tied, length = route.buckets.tied, route.buckets.query_len
            if tied is None or length is None:
                return {}
            reqs, tokens = tied
            if found.setdefault((tokens, reqs), length) != length:
                return {}
        return found
