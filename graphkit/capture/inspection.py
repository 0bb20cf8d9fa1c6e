"""What checked mode looks at while a bucket is warmed up and captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from graphkit.capture.attributes import Attributes, owners
from graphkit.capture.births import Births, BirthWatch
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
                f"{self._where}: the capture reads{at} {birth}, in a warm-up and from a runner's inputs: a graph would "
                "use that warm-up's plan for ever. Make it in prepare, or anew in each call",
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
                    f"{self._where}: {birth} in a warm-up is state that the graph writes; name it in mutates="
                )
            else:
                yield (
                    f"{self._where}: the graph reads {birth} in a warm-up, and not from an input; it must stay as it "
                    "is, where it is"
                )
        named = {tensor.untyped_storage()._cdata for tensor in kept}
        for change in self._attributes.changes():
            value = change.after
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                identity = value.untyped_storage()._cdata
                if identity in self._new:
                    named.add(identity)
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
