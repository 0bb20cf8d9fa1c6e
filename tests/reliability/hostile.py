"""Values that nobody should give, and the calls that they are given to."""

from __future__ import annotations

import decimal
import enum
import fractions
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import graphkit as gk


class Unequal:
    """Can't be compared."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = object.__hash__


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


class Undecided:
    def __bool__(self) -> bool:
        raise ValueError("neither")


class Liar:
    """Says that it has a length, and has nothing."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


class Huge:
    def __index__(self) -> int:
        return 10**30

    def __int__(self) -> int:
        return 10**30


class Text(str):
    """A str, and no str."""


class Number(int):
    """An int, and no int."""


class Level(enum.IntEnum):
    LOW = 1


class Subclass(torch.Tensor):
    """A tensor subclass without any handler of its own."""


def cyclic_list() -> list[Any]:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    return cycle


def cyclic_dict() -> dict[str, Any]:
    cycle: dict[str, Any] = {"a": 1}
    cycle["self"] = cycle
    return cycle


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100):
        nested = [nested]
    return nested


def values() -> dict[str, Any]:
    """Every hostile value, by a name; made anew, since a call may change one."""
    with warnings.catch_warnings():
        # Nested and quantized tensors are told to be a prototype, and to be old.
        warnings.simplefilter("ignore")
        return _values()


def _values() -> dict[str, Any]:
    other = gk.Dim("other", 5)
    huge = gk.Dim("huge", 2**40)
    return {
        "None": None,
        "True": True,
        "False": False,
        "zero": 0,
        "one": 1,
        "minus one": -1,
        "2**31": 2**31,
        "2**63": 2**63,
        "-2**70": -(2**70),
        "10**400": 10**400,
        "half": 0.5,
        "three": 3.0,
        "nan": float("nan"),
        "inf": float("inf"),
        "minus inf": -float("inf"),
        "1e308": 1e308,
        "1j": 1j,
        "empty str": "",
        "str": "rows",
        "option": "clone",
        "keyword": "lambda",
        "dunder": "__class__",
        "null byte": "a\0b",
        "surrogate": "\ud800",
        "long str": "x" * 100_000,
        "str subclass": Text("rows"),
        "bytes": b"rows",
        "empty tuple": (),
        "tuple": (1, 2),
        "tuple of None": (None,),
        "empty list": [],
        "list": [1, 2],
        "ragged": [[1], [2, 3]],
        "mixed list": [1, "a", None],
        "empty dict": {},
        "dict": {"a": 1},
        "dict by int": {1: 2},
        "dict by None": {None: None},
        "set": {1, 2},
        "range": range(3),
        "huge range": range(2**62),
        "generator": (i for i in range(3)),
        "cyclic list": cyclic_list(),
        "cyclic dict": cyclic_dict(),
        "deep list": deep(),
        "object": object(),
        "class": int,
        "type": type,
        "Ellipsis": ...,
        "NotImplemented": NotImplemented,
        "function": lambda: None,
        "function of anything": lambda *a, **k: None,
        "function that returns a list": lambda *a, **k: [1],
        "int subclass": Number(3),
        "IntEnum": Level.LOW,
        "Huge": Huge(),
        "Unequal": Unequal(),
        "Unhashable": Unhashable(),
        "Undecided": Undecided(),
        "Liar": Liar(),
        "module": np,
        "exception": ValueError("mine"),
        "Decimal NaN": decimal.Decimal("NaN"),
        "Fraction": fractions.Fraction(1, 3),
        "np.int64": np.int64(3),
        "np.int64 negative": np.int64(-3),
        "np.bool": np.bool_(True),
        "np.float32 nan": np.float32("nan"),
        "np.array": np.array([1, 2]),
        "np.array 0-d": np.array(3),
        "np.array empty": np.zeros((0, 3)),
        "np.array of objects": np.array([None, "a"], object),
        "np.array of str": np.array(["a", "b"]),
        "np.array of times": np.array(["2020-01-01"], "datetime64[D]"),
        "np.array structured": np.zeros(2, [("a", "i4")]),
        "np.array big-endian": np.zeros(3, ">f4"),
        "np.dtype": np.dtype("float32"),
        "tensor": torch.ones(3),
        "tensor 0-d": torch.tensor(3),
        "tensor empty": torch.empty(0),
        "tensor nan": torch.full((3,), float("nan")),
        "tensor of zero-size": torch.empty(3, 0, 2),
        "tensor with grad": torch.ones(3, requires_grad=True),
        "tensor subclass": torch.ones(3).as_subclass(Subclass),
        "Parameter": torch.nn.Parameter(torch.ones(3)),
        "tensor on meta": torch.empty(3, device="meta"),
        "tensor sparse": torch.eye(3).to_sparse(),
        "tensor expanded": torch.ones(1).expand(3),
        "tensor complex": torch.ones(3, dtype=torch.complex64),
        "tensor conj": torch.ones(3, dtype=torch.complex64).conj(),
        "tensor bool": torch.ones(3, dtype=torch.bool),
        "tensor quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "tensor nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "tensor inference": _inference(),
        "dtype": torch.float32,
        "qint8": torch.qint8,
        "torch.device": torch.device("meta"),
        "layout": torch.strided,
        "Size": torch.Size([2, 3]),
        "torch.Generator": torch.Generator(),
        "module of torch's": torch.nn.Linear(2, 2),
        "Dim": other,
        "huge Dim": huge,
        "Affine": other * 3 + 1,
        "at_most": gk.at_most(other),
        "Bucket": gk.Bucket({"rows": 2}),
        "Buckets": gk.Buckets.of(other, 2),
        "Policy": gk.Policy.full(gk.Buckets.of(other, 2)),
        "Route": gk.Route(gk.FULL, gk.Buckets.of(other, 2)),
        "BufferSpec": gk.BufferSpec((other,), torch.float32, pad=0),
        "Output": gk.Output((other,), torch.float32),
        "Fed": gk.Fed("a"),
        "Count": gk.Count(other),
        "Mode": gk.EAGER,
        "keep": gk.keep,
        "relied": gk.relied(0),
        "group": gk.GraphGroup("cpu"),
    }


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


Call = tuple[Callable[..., Any], dict[str, Any]]
"""A function that takes everything by name, and arguments that it takes."""


def _positional(fn: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """The function with its positional-only parameters given by name."""
    return lambda **k: fn(*[k.pop(name) for name in names if name in k], **k)


def calls() -> dict[str, Call]:
    """What users construct and call, each with good arguments."""
    rows, reqs, tokens = gk.Dim("rows", 8), gk.Dim("reqs", 8), gk.Dim("tokens", 32)
    buckets = gk.Buckets.of(rows, 2, 4)
    f32 = torch.float32
    return {
        "Dim": (gk.Dim, {"name": "rows", "maximum": 8}),
        "Dim +": (lambda b: rows + b, {"b": 1}),
        "Dim *": (lambda b: rows * b, {"b": 2}),
        "Dim * +": (lambda a, b: rows * a + b, {"a": 2, "b": 1}),
        "Affine": (gk.Affine, {"dim": rows, "factor": 2, "offset": 1, "interleaved": False}),
        "at_most": (gk.at_most, {"dim": rows}),
        "interleaved": (gk.interleaved, {"value": rows, "factor": 2}),
        "relied": (gk.relied, {"value": 0}),
        "by_producer": (gk.by_producer, {"value": 0}),
        "continue_": (gk.continue_, {"step": 1}),
        "round_up": (lambda a, b: gk.round_up(a, b), {"a": 0, "b": 1}),
        "Variants": (lambda name, axis: gk.Variants(**{name: axis}), {"name": "k", "axis": (1, 2)}),
        "Bucket": (
            gk.Bucket,
            {"sizes": {"rows": 2}, "query_len": 1, "max_query_len": 1, "variant": {"k": 1}},
        ),
        "Bucket of a size": (lambda size: gk.Bucket({"rows": size}), {"size": 2}),
        "Buckets": (
            gk.Buckets,
            {
                "dims": (rows,),
                "points": ((2,),),
                "others": (),
                "query_len": None,
                "max_query_len": None,
                "tied": None,
                "maker": "of",
            },
        ),
        "Buckets.of": (
            _positional(gk.Buckets.of, "dim", "size"),
            {"dim": rows, "size": 2, "tokens": 3},
        ),
        "Buckets.powers": (
            _positional(gk.Buckets.powers, "dim"),
            {"dim": rows, "upto": 8, "tokens": 3},
        ),
        "Buckets.ladder": (
            _positional(gk.Buckets.ladder, "dim"),
            {"dim": rows, "upto": 8, "align": 1},
        ),
        "Buckets.uniform": (
            gk.Buckets.uniform,
            {"reqs": reqs, "tokens": tokens, "query_len": 2, "sizes": [1, 2], "upto": None},
        ),
        "Buckets.uniform by tokens": (
            gk.Buckets.uniform,
            {"reqs": reqs, "tokens": tokens, "query_len": 2, "tokens_sizes": [2, 4]},
        ),
        "Buckets.varlen": (
            gk.Buckets.varlen,
            {"reqs": reqs, "tokens": tokens, "max_query_len": 4, "sizes": [4, 8], "upto": None},
        ),
        "Buckets.grid": (
            _positional(gk.Buckets.grid, "a", "b"),
            {"a": {rows: [1, 2]}, "b": {tokens: [3]}, "where": None},
        ),
        "Buckets.fixed": (gk.Buckets.fixed, {"rows": 2}),
        "BufferSpec": (
            gk.BufferSpec,
            {
                "shape": (rows, 2),
                "dtype": torch.int32,
                "pad": 0,
                "valid": (0, 9),
                "layout": "strided",
                "adopt": None,
            },
        ),
        "BufferSpec of two dims": (
            gk.BufferSpec,
            {
                "shape": (rows, tokens),
                "dtype": torch.int32,
                "pad": {rows: 0, tokens: gk.keep},
                "layout": "packed",
            },
        ),
        "BufferSpec adopting": (
            gk.BufferSpec,
            {"shape": (rows,), "dtype": f32, "pad": 0, "adopt": torch.zeros(8)},
        ),
        "Output": (gk.Output, {"shape": (rows,), "dtype": f32, "to": "static"}),
        "Fed": (gk.Fed, {"buffer": "x"}),
        "Resident": (gk.Resident, {"buffer": "x"}),
        "Count": (gk.Count, {"dim": rows}),
        "Scratch": (gk.Scratch, {"tensor": torch.zeros(3), "rows": [0]}),
        "Route": (
            gk.Route,
            {"mode": gk.FULL, "buckets": buckets, "variants": None, "max_padding": 4},
        ),
        "Policy": (
            gk.Policy,
            {"routes": [gk.Route(gk.FULL, buckets)], "cost": None, "further_dims": ()},
        ),
        "Policy.full": (gk.Policy.full, {"buckets": buckets}),
        "Policy.piecewise": (gk.Policy.piecewise, {"buckets": buckets}),
        "Dispatcher": (
            gk.Dispatcher,
            {
                "policy": gk.Policy.full(buckets),
                "dims": (rows,),
                "captured": None,
                "strict": False,
                "name": "r",
            },
        ),
        "eager_break": (
            _positional(gk.eager_break, "fn"),
            {"fn": lambda x: x, "rows": "bucket", "out": None},
        ),
        "break_at": (
            _positional(gk.break_at, "target", "name"),
            {"target": torch.nn.Linear(2, 2), "name": "forward", "rows": "bucket", "out": None},
        ),
        "GraphGroup": (
            gk.GraphGroup,
            {
                "device": "cpu",
                "checked": False,
                "memory_budget": None,
                "lazy": False,
                "max_graphs": None,
                "on_error": "raise",
                "stream": None,
                "pool": None,
                "capture_context": None,
                "capture_error_mode": "thread_local",
            },
        ),
        "CaptureSession": (
            gk.CaptureSession,
            {
                "device": "cpu",
                "stream": None,
                "pool": None,
                "capture_context": None,
                "error_mode": "thread_local",
                "generators": (),
            },
        ),
        "Buffers": (gk.Buffers, {"device": torch.device("cpu")}),
        # What the function itself raises on its inputs is the function's.
        "lint": (
            _positional(gk.lint, "fn"),
            {"fn": lambda *a, **k: None, "inputs": (), "mode": gk.FULL, "generators": ()},
        ),
    }


class Engine:
    """A captured group whose methods are given what nobody should give."""

    def __init__(self, device: str = "cpu") -> None:
        self.rows = rows = gk.Dim("rows", 8)
        self.group = gk.GraphGroup(device)
        self.group.buffers.declare(
            x=gk.BufferSpec((rows, 2), torch.float32, pad=0),
            n=gk.BufferSpec((rows,), torch.int64, pad=0, valid=(0, 9)),
        )
        self.policy = gk.Policy.full(gk.Buckets.of(rows, 2, 4))
        self.runner = self.group.runner(
            "good",
            lambda x, n: x + n[:, None],
            policy=self.policy,
            outputs=gk.Output((rows, 2), torch.float32),
        )
        self.group.capture(progress=False)

    def assert_serves(self) -> None:
        out = self.runner.run(self.runner.dispatch(rows=1), x=[[1, 2]], n=[3])
        assert out.tolist() == [[4, 5]]

    def declares(self) -> dict[str, Call]:
        """Calls that add to a group, each with good arguments."""
        return {
            "declare": (self.group.buffers.declare, {"fresh": gk.BufferSpec((2,), torch.float32)}),
            "runner": (
                self.group.runner,
                {
                    "name": "fresh",
                    "fn": lambda x: x + 1,
                    "policy": self.policy,
                    "inputs": {"x": gk.Fed("x")},
                    "prepare": None,
                    "prepare_host": None,
                    "outputs": gk.Output((self.rows, 2), torch.float32),
                    "reads": [],
                    "mutates": [],
                    "example": None,
                    "supports": gk.Support.ALWAYS,
                    "strict": False,
                    "generators": (),
                    "warmup_as_capturing": False,
                    "ring_depth": 2,
                    "ring_full": "block",
                },
            ),
            "wrap": (
                _positional(self.group.wrap, "fn"),
                {
                    "fn": lambda x: x + 1,
                    "name": "wrapped",
                    "policy": None,
                    "x": gk.BufferSpec((self.rows,), torch.float32, pad=0),
                },
            ),
            "capture": (self.group.capture, {"order": None, "worth": None, "progress": False}),
        }

    def runs(self) -> dict[str, Call]:
        """Calls that run, each with good arguments."""
        good = {"x": [[1.0, 2.0]], "n": [3]}

        def stage(dispatch: Any) -> Any:
            with self.runner.stage(dispatch) as staged:
                staged.host["x"][...] = 1
            return None

        return {
            "dispatch": (
                self.runner.dispatch,
                {
                    "rows": 1,
                    "query_len": None,
                    "max_query_len": None,
                    "variant": None,
                    "eager": None,
                },
            ),
            "run": (
                _positional(self.runner.run, "dispatch", "inputs"),
                {"dispatch": self.runner.dispatch(rows=1), "inputs": None, "clone": False, **good},
            ),
            "run eagerly": (
                _positional(self.runner.run, "dispatch"),
                {"dispatch": self.runner.dispatch(rows=1, eager="so"), **good},
            ),
            "run with a mapping": (
                _positional(self.runner.run, "dispatch", "inputs"),
                {"dispatch": self.runner.dispatch(rows=1), "inputs": good},
            ),
            "stage": (stage, {"dispatch": self.runner.dispatch(rows=1)}),
            "view": (self.group.buffers["x"].view, {"sizes": {"rows": 1}}),
            "check": (
                _positional(self.runner.check, "dispatch", "inputs"),
                {
                    "dispatch": self.runner.dispatch(rows=1),
                    "inputs": good,
                    "resident": None,
                    "rtol": None,
                    "atol": None,
                    "raise_on_failure": False,
                },
            ),
            "estimate": (self.group.estimate, {"measure": False}),
            "buffer by name": (self.group.buffers.__getitem__, {"name": "x"}),
        }
