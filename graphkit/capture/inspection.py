"""What checked mode looks at while a bucket is warmed up and captured."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from graphkit.capture.attributes import Attributes, owners
from graphkit.capture.births import Births, BirthWatch, tensors_in
from graphkit.errors import CaptureError


class Inspection:
    """One for each group: modules are shared between runners, and so is what they build lazily."""

    def __init__(self) -> None:
        self._born = Births()

    @contextlib.contextmanager
    def warmup(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Note what a warm-up makes, and whether from its inputs."""
        with BirthWatch(self._born, inputs.values()):
            yield

    def eager_run(self, call: Callable[[], Any], inputs: Mapping[str, Any]) -> Any:
        """Call the function of an EAGER run, and note what it makes: a capture may find it there.

        What it returns is its caller's, who may well keep it.
        """
        with _uncompiled(), BirthWatch(self._born, inputs.values(), during="an EAGER run"):
            result = call()
        self._born.forget(tensors_in(result))
        return result

    def capture(
        self,
        where: str,
        fn: Callable[..., Any],
        reads: Iterable[Any],
        inputs: Mapping[str, Any],
        declared: Iterable[torch.Tensor],
    ) -> CaptureInspection:
        """Watch the capture of a bucket; enter the answer around the function's call.

        Args:
            declared: memory of which nothing need be said, whenever it was allocated.
        """
        self._born.forget(declared)
        return CaptureInspection(self._born, where, Attributes(owners(fn, reads)), inputs)


class CaptureInspection:
    """A capture under watch, and what is said of it."""

    def __init__(
        self, born: Births, where: str, attributes: Attributes, inputs: Mapping[str, Any]
    ) -> None:
        self._earlier = born
        self._where = where
        self._attributes = attributes
        self._new = Births()
        self._watch = BirthWatch(self._new, inputs.values(), earlier=born)

    def __enter__(self) -> CaptureInspection:
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self._watch.__exit__(*exception)  # type: ignore[no-untyped-call]

    def refuse_stale_plan(self) -> None:
        """Raise a `CaptureError` if the capture read what a warm-up made from an input, and didn't make it again."""
        for identity, frame in self._watch.reads.items():
            birth = self._earlier.get(identity)
            if birth is None or not birth.from_input or identity in self._watch.writes:
                continue
            at = f" at {frame}" if frame else ""
            raise CaptureError(
                f"{self._where}: the capture reads{at} {birth}, in {birth.during} and from a runner's inputs: a graph "
                "would use that batch's plan for ever. Make it in prepare, or anew in each call",
                operation=birth.operation,
                location=birth.frame.location if birth.frame else None,
            )

    def remarks(self, *, kept: Iterable[torch.Tensor], finds_all: bool) -> Iterator[str]:
        """What deserves a look: attributes that changed, tables made in warm-up, memory that outlives the capture.

        Args:
            kept: tensors that may outlive it.
            finds_all: whether nothing else holds what the capture made, so that all that is left can be named.
        """
        for identity in self._watch.reads:
            birth = self._earlier.get(identity)
            if birth is None:
                continue
            if identity in self._watch.writes:
                yield (
                    f"{self._where}: {birth} in {birth.during} is state that the graph writes; name it in mutates="
                )
            elif birth.from_host:
                yield (
                    f"{self._where}: the graph reads {birth} in {birth.during}, from values on the host, which may be "
                    "an input's: then it is the plan of one batch, to be made in prepare. Otherwise it must stay as it "
                    "is, where it is"
                )
            else:
                yield (
                    f"{self._where}: the graph reads {birth} in {birth.during}, and not from an input; it must stay as "
                    "it is, where it is"
                )
        named = {tensor.untyped_storage()._cdata for tensor in kept}
        for change in self._attributes.changes():
            new = {tensor.untyped_storage()._cdata for tensor in tensors_in(change.tensors)}
            in_pool = {identity for identity in new if identity in self._new}
            if in_pool:
                named |= in_pool
                yield (
                    f"{self._where}: attribute {change} after the capture, in memory of the graphs' pool, which "
                    "any replay overwrites; return it as an output, or copy it into memory of your own"
                )
                continue
            yield (
                f"{self._where}: attribute {change} after the capture; a replay doesn't set it, so that it stays "
                "as the last capture left it"
            )
        if not finds_all:
            return
        self._new.forget_dead()
        if any(identity not in named for identity, _ in self._new):
            # A cycle may hold it for no longer than this.
            gc.collect()
            self._new.forget_dead()
        for identity, birth in self._new:
            if identity not in named:
                yield (
                    f"{self._where}: {birth} outlives the capture, in memory of the graphs' pool, which any replay "
                    "overwrites; return it as an output, or make it before"
                )


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """One call under a dispatch mode would make Dynamo skip a compiled function for good."""
    # Importing Dynamo costs seconds, and while nobody has, nothing is compiled.
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
