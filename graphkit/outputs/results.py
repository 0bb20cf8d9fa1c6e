"""Results: the outputs of one runner, from what its function returns to what its caller gets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from graphkit.buffers import Buffer, Extent, prefix, shape_at, shape_text
from graphkit.dims import Affine, Dim
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.dispatcher import Dispatch
from graphkit.errors import SpecError
from graphkit.outputs.host_output import HostOutput
from graphkit.outputs.inference import Sample, infer_shape
from graphkit.outputs.leases import Lease, with_lease
from graphkit.outputs.outputs import Output, StaticOutput, Tree, check_leaf, output_name
from graphkit.runner.shared import Shared


class Observed(Protocol):
    """What is known of one bucket's outputs."""

    where: str
    bucket: Bucket
    samples: dict[str, torch.Tensor]
    tree: Tree | None
    pool_outputs: dict[str, torch.Tensor]

    def sample(self, path: str) -> Sample:
        """What inference is told of one output."""


class Results:
    """Declared and inferred outputs, their static memory, and leases on it.

    Attributes:
        outputs: path -> `Output`; what isn't declared is added by `settle`.
        depth: slots of outputs on the host.
        turn: the slot of the next replay.
    """

    def __init__(
        self,
        runner: str,
        declared: Mapping[str, Output],
        largest: Mapping[str, int],
        shared: Shared,
        depth: int,
    ) -> None:
        self.depth = depth if shared.backend.copies_can_move else 1
        self.turn = 0
        self._runner = runner
        self._declared = dict(declared)
        self._largest = largest
        self._shared = shared
        self._static: dict[str, StaticOutput] = {}
        self._host: dict[str, HostOutput] = {}
        self.outputs: dict[str, Output] = dict(declared)

    @property
    def nbytes(self) -> int:
        """Bytes of static outputs on the device."""
        return sum(static.nbytes for static in self._static.values())

    @property
    def host_nbytes(self) -> int:
        """Bytes of pinned memory of outputs that go to the host."""
        return sum(output.nbytes for output in self._host.values())

    def nbytes_of(self, to: str) -> int:
        """Bytes of the outputs of this destination at the largest bucket, be they allocated yet or not.

        What isn't declared counts from when it is inferred.
        """
        return sum(_nbytes(o, self._largest) for o in self.outputs.values() if o.to == to)

    def pool_nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the outputs of one bucket that stay in the pool."""
        return sum(_nbytes(o, sizes) for o in self.outputs.values() if o.to == "pool")

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers that outputs are bound to."""
        return [output.to for output in self.outputs.values() if isinstance(output.to, Buffer)]

    @property
    def any_on_host(self) -> bool:
        """Whether an output is copied to the host, where it can't be read before the device is done."""
        return any(output.to == "host" for output in self.outputs.values())

    def forget(self) -> None:
        """Drop the memory, and what was inferred."""
        self._static.clear()
        self._host.clear()
        self.outputs = dict(self._declared)

    def forget_inferred(self) -> None:
        """Infer anew at the next `settle`; memory of the same shape stays where it is."""
        self.outputs = {path: out for path, out in self.outputs.items() if path in self._declared}

    def static(self, path: str) -> StaticOutput:
        """The static memory of an output, of the size of the largest bucket; allocated once."""
        static = self._static.get(path)
        if static is None:
            static = self._static[path] = StaticOutput(
                self.outputs[path], self._largest, self._shared.backend.device
            )
        return static

    def host(self, path: str) -> HostOutput:
        """The pinned memory of an output that goes to the host; allocated once."""
        output = self._host.get(path)
        if output is None:
            output = self._host[path] = HostOutput(
                self.outputs[path], self._largest, self.depth, self._shared.backend.host_empty
            )
        return output

    def targets(self, sizes: Mapping[str, int]) -> list[list[torch.Tensor]]:
        """For each output on the host, where a bucket's graph may write it: one tensor for each slot."""
        return [output.targets(sizes) for output in self._host.values()]

    @contextlib.contextmanager
    def host_kept(self) -> Iterator[None]:
        """Afterwards outputs on the host are as before, and their leases too."""
        if not self._host:
            yield
            return
        self._shared.backend.synchronize()
        states, turn = {path: output.state() for path, output in self._host.items()}, self.turn
        try:
            yield
        finally:
            self._shared.backend.synchronize()
            self.turn = turn
            for path, state in states.items():
                self._host[path].restore(state)

    # -- at capture -------------------------------------------------------------------------------

    def check(self, tree: Tree, sizes: Mapping[str, int], where: str) -> None:
        """Raise a `SpecError` unless the function returned what is declared, for these sizes."""
        missing = [path for path in self._declared if path not in tree.tensor_paths]
        if missing:
            raise SpecError(
                f"{where}: outputs declares {', '.join(map(repr, missing))}, and the function returns "
                f"{', '.join(repr(path) for path in tree.tensor_paths) or 'no tensor'}"
            )
        for path, tensor in tree.tensors().items():
            if path in self.outputs:
                check_leaf(path, tensor, self.outputs[path], sizes, where)

    def settle(
        self,
        seen: Sequence[Observed],
        dims: Iterable[Dim],
        uniform: Mapping[tuple[str, str], int],
    ) -> None:
        """Infer what isn't declared from the warm-ups of all buckets, and allocate static memory.

        Raises:
            SpecError: buckets return different outputs, or a shape can't be inferred.
        """
        if not seen:
            return
        paths = list(seen[0].samples)
        for entry in seen:
            if list(entry.samples) != paths:
                raise SpecError(
                    f"{entry.where} returns the outputs {list(entry.samples)}, and {seen[0].where} {paths}"
                )
        for path in paths:
            if path not in self.outputs:
                where = f"runner {self._runner!r}, {output_name(path)}"
                dtypes = {entry.samples[path].dtype for entry in seen}
                if len(dtypes) > 1:
                    raise SpecError(f"{where} has several dtypes: {sorted(map(str, dtypes))}")
                samples = [entry.sample(path) for entry in seen]
                shape = infer_shape(samples, dims, uniform, where)
                _refuse_offsets(shape, where)
                self.outputs[path] = Output(shape, dtypes.pop())
                old = self._static.get(path)
                if old is not None and old.spec != self.outputs[path]:
                    old.generation += 1
                    del self._static[path]
            self._allocate(path)

    def make_views(self, sizes: Mapping[str, int]) -> None:
        """Make the static views of a bucket ahead of its capture, which is to log no more than it must."""
        for path, output in self.outputs.items():
            if output.to not in ("pool", "host"):
                self.static(path).view(sizes)

    def _allocate(self, path: str) -> None:
        to = self.outputs[path].to
        if to == "host":
            self.host(path)
        elif to != "pool":
            self.static(path)

    def write(self, tree: Tree, sizes: Mapping[str, int], where: str) -> dict[str, torch.Tensor]:
        """Copy what a function returned into static memory; part of the graph.

        Returns:
            The outputs that stay in the pool.
        """
        self.check(tree, sizes, where)
        kept: dict[str, torch.Tensor] = {}
        for path, tensor in self._apart(tree.tensors()).items():
            output = self.outputs.get(path)
            if output is None:
                raise SpecError(f"{where}: output {path!r} was not there in warm-up")
            if output.to == "pool":
                kept[path] = tensor
            elif output.to == "host":
                self.host(path).write(tensor, sizes)
            else:
                self.static(path).write(tensor, sizes)
        return kept

    def _apart(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same, with copies of what lies in a buffer that another output is about to overwrite."""
        bound = {
            path: output.to.tensor.untyped_storage().data_ptr()
            for path, output in self.outputs.items()
            if isinstance(output.to, Buffer)
        }
        apart = dict(tensors)
        for path, tensor in tensors.items() if bound else ():
            address = tensor.untyped_storage().data_ptr()
            if any(address == other for name, other in bound.items() if name != path):
                apart[path] = tensor.clone()
        return apart

    # -- at a run ---------------------------------------------------------------------------------

    def views(self, dispatch: Dispatch, entry: Observed, *, clone: bool, slot: int = 0) -> Any:
        """What the caller gets of a replay: the valid region of each output.

        Args:
            slot: of outputs on the host.
        """
        tree = entry.tree
        if tree is None:
            return None
        tensors: dict[str, torch.Tensor] = {}
        for path in tree.tensor_paths:
            output = self.outputs[path]
            if output.to == "pool":
                view = prefix(entry.pool_outputs[path], shape_at(output.shape, dispatch.sizes))
            elif output.to == "host":
                view = self._host[path].view(entry.bucket.sizes, dispatch.sizes, slot)
            elif isinstance(output.to, Buffer) and output.to.spec.moves:
                # The elements lie where the bucket's view has them.
                whole = output.to.view(entry.bucket.sizes)
                view = prefix(whole, shape_at(output.shape, dispatch.sizes))
            else:
                view = self._static[path].view(dispatch.sizes)
            tensors[path] = self._given(path, view, clone, slot)
        return tree.rebuild(tensors)

    def bind_eager(self, dispatch: Dispatch, result: Any, *, clone: bool) -> Any:
        """What the caller gets of an eager run: outputs are where a graph would have put them."""
        if all(output.to in ("static", "pool") for output in self.outputs.values()):
            # A function may return a buffer's view, or its own memory.
            return _cloned(result) if clone else result
        where = f"runner {self._runner!r}, EAGER"
        tree = Tree(result, where)
        self.check(tree, dispatch.sizes, where)
        tensors = self._apart(tree.tensors())
        for path, output in self.outputs.items():
            if output.to == "host":
                # Also where the device is the host: the caller keeps it while later steps run.
                tensors[path] = tensors[path].to("cpu", copy=True)
            elif isinstance(output.to, Buffer):
                static = self.static(path)
                static.write(tensors[path], dispatch.sizes)
                tensors[path] = self._given(path, static.view(dispatch.sizes), clone=False)
        result = tree.rebuild(tensors)
        return _cloned(result) if clone else result

    def end_leases(self, *, replay: bool, slot: int | None = None) -> None:
        """A run overwrites outputs: all of them if it is a replay, those bound to buffers if it is eager.

        Args:
            slot: of outputs on the host; all of them for None.
        """
        for static in self._static.values():
            if static.buffer is not None:
                static.buffer.generation += 1
            elif replay:
                static.generation += 1
        if replay:
            for output in self._host.values():
                output.end_leases(slot)

    def poison(self) -> None:
        """Before a replay in checked mode: what the graph doesn't write can't pass for a result."""
        for static in self._static.values():
            static.poison()

    def _given(self, path: str, view: torch.Tensor, clone: bool, slot: int = 0) -> torch.Tensor:
        if clone:
            with torch.no_grad():
                return view.clone()
        if not self._shared.checked:
            return view
        to = self.outputs[path].to
        memory: Any = self._shared
        if to == "host":
            generations = self._host[path].generations
            what = f"runner {self._runner!r}, {output_name(path)}"
            return with_lease(view, Lease(what, lambda: generations[slot]))
        if to != "pool":
            memory = self._static[path].buffer or self._static[path]
        what = f"runner {self._runner!r}, {output_name(path)}"
        return with_lease(view, Lease(what, lambda: int(memory.generation)))


def _nbytes(output: Output, sizes: Mapping[str, int]) -> int:
    return math.prod(shape_at(output.shape, sizes)) * output.dtype.itemsize


def _cloned(result: Any) -> Any:
    with torch.no_grad():
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)


def _refuse_offsets(shape: Sequence[Extent], where: str) -> None:
    """Raise a `SpecError` where rows were inferred beside those of the batch.

    Whether they come first, so that the batch's are cut off at the end, can't be seen in a shape.
    """
    for extent in shape:
        if isinstance(extent, Affine) and extent.offset:
            raise SpecError(
                f"{where} looks like {shape_text(shape)}, whose rows for a smaller batch are a prefix only if what is "
                f"added comes first, as in row boundaries; declare it if it does, as "
                f"outputs=gk.Output({shape_text(shape)}, dtype) for a lone one"
            )
