"""Every error and warning that users can meet, in one tree.

GraphkitError
├── SpecError            (ValueError)    a declaration is wrong: dim, buffer, output, runner
├── BucketError          (ValueError)    a bucket can't exist: size, capacity, multiple
├── InputError           (ValueError)    what was given to dispatch() or run() doesn't fit
├── DispatchError        (LookupError)   strict: the batch would fall back
├── CaptureError         (RuntimeError)  the function can't be captured as it is
│   └── BreakError                       an eager break returned what later segments can't use
├── StaleGraphError      (RuntimeError)  memory that a graph reads has moved
├── StaleOutputError     (RuntimeError)  an output was read after its lease ended
├── StateError           (RuntimeError)  not in this state: closed, released, under capture
├── ConcurrentRunError   (RuntimeError)  two runs of one group at a time
├── CheckError           (AssertionError) a check of a runner failed
└── MemoryBudgetError    (MemoryError)   the device, or the budget, is too small

GraphkitWarning          (UserWarning)
├── UnreachableBucketWarning             a bucket that dispatch never picks while better ones are captured
├── DowngradeWarning                     a route resolved to a slower mode than it asked for
└── CaptureWarning                       a capture that worked and still deserves a look
"""

from __future__ import annotations

import os
import traceback
from types import TracebackType

import attrs


class GraphkitError(Exception):
    """Root of all errors that graphkit raises."""


class SpecError(GraphkitError, ValueError):
    """A declaration (dim, buffer, output, policy, runner) is wrong; nothing was declared."""


class BucketError(GraphkitError, ValueError):
    """A bucket can't exist as asked: not a size, above capacity, or no multiple of a query length."""


class InputError(GraphkitError, ValueError):
    """What was given to `dispatch` or `run` doesn't fit the declaration; nothing was staged."""


class DispatchError(GraphkitError, LookupError):
    """A strict runner was given a batch that would fall back."""


class CaptureError(GraphkitError, RuntimeError):
    """The function can't be captured as it is.

    Attributes:
        operation: the operation that was refused, or None.
        location: the user's ``file:line``, or None.
    """

    def __init__(
        self, message: str, *, operation: str | None = None, location: str | None = None
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.location = location


class BreakError(CaptureError):
    """An eager break did something that the segments after it can't use."""


class StaleGraphError(GraphkitError, RuntimeError):
    """Memory that a captured graph reads, and doesn't own, has moved or changed its shape."""


class StaleOutputError(GraphkitError, RuntimeError):
    """An output was read after a later run had overwritten it."""


class StateError(GraphkitError, RuntimeError):
    """The operation isn't possible in the state that the group is in."""


class ConcurrentRunError(GraphkitError, RuntimeError):
    """A run began while another run of the same group was under way."""


class CheckError(GraphkitError, AssertionError):
    """A check of a runner failed; the message says what was found.

    Attributes:
        report: the `CheckReport` of the bucket that failed, where there is one.
    """

    def __init__(self, message: str, *, report: object = None) -> None:
        super().__init__(message)
        self.report = report


class MemoryBudgetError(GraphkitError, MemoryError):
    """The device's memory, or the budget, is too small.

    Attributes:
        wanted: bytes that were asked for, or None if unknown.
        free: bytes that there were, or None if unknown.
    """

    def __init__(self, message: str, *, wanted: int | None = None, free: int | None = None) -> None:
        super().__init__(message)
        self.wanted = wanted
        self.free = free


class GraphkitWarning(UserWarning):
    """Root of all warnings that graphkit gives."""


class UnreachableBucketWarning(GraphkitWarning):
    """A bucket that dispatch never picks while the better ones are captured."""


class DowngradeWarning(GraphkitWarning):
    """A route runs in a slower mode than it asked for, since what the runner calls allows no better."""


class CaptureWarning(GraphkitWarning):
    """A capture worked, and something about it deserves a look."""


@attrs.frozen
class UserFrame:
    """Where in the user's code something happened."""

    location: str
    """``file:line``."""
    function: str
    source: str
    """The source line, stripped; empty if it can't be read."""

    def __str__(self) -> str:
        line = f"{self.location} in {self.function}"
        return f"{line}: {self.source}" if self.source else line


_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _is_library(filename: str) -> bool:
    if filename.startswith((_OWN, "<")):
        return True
    parts = filename.replace("\\", "/").split("/")
    return "torch" in parts[:-1] and "site-packages" in parts


def user_frame(source: BaseException | TracebackType | None = None) -> UserFrame | None:
    """The innermost frame that is neither graphkit's nor torch's.

    Args:
        source: an exception or traceback to look in; by default the current call stack.
    """
    if isinstance(source, BaseException):
        source = source.__traceback__
    frames = traceback.extract_stack() if source is None else traceback.extract_tb(source)
    for frame in reversed(frames):
        if not _is_library(frame.filename):
            return UserFrame(
                location=f"{frame.filename}:{frame.lineno}",
                function=frame.name,
                source=(frame.line or "").strip(),
            )
    return None
