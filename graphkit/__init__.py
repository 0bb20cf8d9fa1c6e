"""Static buffers, buckets, capture and replay of CUDA graphs, as a library.

    buffers  ->  buckets  ->  dispatch  ->  capture / replay  ->  runner
    (where)      (which size)  (which mode)   (how)                 (what users call)

`GraphGroup` is where to begin.
"""

import importlib as _importlib
from typing import Any as _Any

from graphkit.buffers import Buffer, Buffers, BufferSpec
from graphkit.capture.breaks import Break, Patch, break_at, eager_break
from graphkit.capture.mutation import Scratch
from graphkit.capture.session import Captured, CaptureSession
from graphkit.checking.findings import CheckReport, Comparison, Finding, FindingKind
from graphkit.dims import Affine, Dim, at_most, interleaved
from graphkit.dispatch.buckets import Bucket, Buckets
from graphkit.dispatch.dispatcher import (
    EAGER,
    FULL,
    PIECEWISE,
    Dispatch,
    Dispatcher,
    Mode,
    Policy,
    Reason,
    Route,
    Support,
    Variants,
    round_up,
)
from graphkit.errors import (
    BreakError,
    BucketError,
    CaptureError,
    CaptureWarning,
    CheckError,
    ConcurrentRunError,
    DispatchError,
    DowngradeWarning,
    GraphkitError,
    GraphkitWarning,
    InputError,
    MemoryBudgetError,
    SpecError,
    StaleGraphError,
    StaleOutputError,
    StateError,
    UnreachableBucketWarning,
)
from graphkit.group.estimate import Estimate
from graphkit.group.group import GraphGroup
from graphkit.group.report import Report
from graphkit.group.wrap import Wrapped
from graphkit.lint import Refusal, lint
from graphkit.outputs.outputs import Output
from graphkit.pads import by_producer, continue_, keep, relied, repeat_last
from graphkit.parameters import Count, Fed, Resident
from graphkit.runner.runner import GraphRunner
from graphkit.runner.shared import State
from graphkit.runner.step import Phase, Step, current_run
from graphkit.staging.stage import Stage

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    # Imported when they are first named: tracing is a large part of torch, and `testing` is for tests.
    if name in ("fx", "testing"):
        return _importlib.import_module(f"graphkit.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "EAGER",
    "FULL",
    "PIECEWISE",
    "Affine",
    "Break",
    "BreakError",
    "Bucket",
    "BucketError",
    "Buckets",
    "Buffer",
    "BufferSpec",
    "Buffers",
    "CaptureError",
    "CaptureSession",
    "CaptureWarning",
    "Captured",
    "CheckError",
    "CheckReport",
    "Comparison",
    "ConcurrentRunError",
    "Count",
    "Dim",
    "Dispatch",
    "DispatchError",
    "Dispatcher",
    "DowngradeWarning",
    "Estimate",
    "Fed",
    "Finding",
    "FindingKind",
    "GraphGroup",
    "GraphRunner",
    "GraphkitError",
    "GraphkitWarning",
    "InputError",
    "MemoryBudgetError",
    "Mode",
    "Output",
    "Patch",
    "Phase",
    "Policy",
    "Reason",
    "Refusal",
    "Report",
    "Resident",
    "Route",
    "Scratch",
    "SpecError",
    "Stage",
    "StaleGraphError",
    "StaleOutputError",
    "State",
    "StateError",
    "Step",
    "Support",
    "UnreachableBucketWarning",
    "Variants",
    "Wrapped",
    "at_most",
    "break_at",
    "by_producer",
    "continue_",
    "current_run",
    "eager_break",
    "interleaved",
    "keep",
    "lint",
    "relied",
    "repeat_last",
    "round_up",
]
