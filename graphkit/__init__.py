"""Static buffers, buckets, capture and replay of CUDA graphs, as a library.

    buffers  ->  buckets  ->  dispatch  ->  capture / replay  ->  runner
    (where)      (which size)  (which mode)   (how)                 (what users call)

`GraphGroup` is where to begin.
"""

import importlib as _importlib
from typing import Any as _Any

from graphkit.breaks import Break, Patch, break_at, eager_break
from graphkit.buckets import Bucket, Buckets
from graphkit.buffers import Buffer, Buffers, BufferSpec
from graphkit.capture import Captured, CaptureSession
from graphkit.dims import Affine, Dim, at_most, interleaved
from graphkit.dispatch import (
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
from graphkit.estimate import Estimate
from graphkit.findings import CheckReport, Comparison, Finding, FindingKind
from graphkit.group import GraphGroup
from graphkit.lint import Refusal, lint
from graphkit.mutation import Scratch
from graphkit.outputs import Output
from graphkit.pads import by_producer, continue_, keep, relied, repeat_last
from graphkit.parameters import Count, Fed, Resident
from graphkit.report import Report
from graphkit.runner import GraphRunner
from graphkit.shared import State
from graphkit.stage import Stage
from graphkit.step import Phase, Step, current_run
from graphkit.wrap import Wrapped

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    # Tracing is a large part of torch: `graphkit.fx` is imported when it is first named.
    if name == "fx":
        return _importlib.import_module("graphkit.fx")
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
