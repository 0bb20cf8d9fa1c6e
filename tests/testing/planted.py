"""Small runners with one real bug each, of the kinds in the cases, and right ones that look like them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import torch

import graphkit as gk
from graphkit.testing.cases import Given, Target

F32, I64 = torch.float32, torch.int64
batch, length = gk.Dim("batch", 9), gk.Dim("length", 5)
reqs, tokens = gk.Dim("reqs", 6), gk.Dim("tokens", 12)
BUCKETS = gk.Buckets.of(batch, 1, 4, 9)
POLICY = gk.Policy.full(BUCKETS)
ROWS = gk.Output((batch, 3), F32)
SCRATCH = 11


def x_of(pad: Any) -> gk.BufferSpec:
    return gk.BufferSpec((batch, 3), F32, pad=pad)


X, X0 = x_of(0.0), x_of(gk.relied(0.0))
INDEX = gk.BufferSpec((batch,), I64, pad=SCRATCH, valid=(0, 12))


@attrs.frozen
class Planted:
    """A runner, and what is wrong with it.

    Attributes:
        make: device -> what to check, or that and what to give to the check.
        kind: of the finding; "" for a check besides `GraphRunner.check`.
        what: a pattern in the finding's message, or in the error's text where there is no finding.
        batch: the smallest that fails, where that is of interest.
    """

    make: Callable[[str], Any]
    kind: str = ""
    what: str = ""
    batch: str = ""

    @property
    def name(self) -> str:
        return self.make.__name__

    def target(self, device: str) -> tuple[Target, Given]:
        with warnings.catch_warnings():
            # That something is undeclared is said at the capture already.
            warnings.simplefilter("ignore", gk.CaptureWarning)
            made = self.make(device)
        return made if isinstance(made, tuple) else (made, {})


BUGS: list[Planted] = []
RIGHT: list[Planted] = []


def bug(
    kind: str, what: str, batch: str = ""
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    def add(make: Callable[[str], Any]) -> Callable[[str], Any]:
        BUGS.append(Planted(make, kind, what, batch))
        return make

    return add


def right(make: Callable[[str], Any]) -> Callable[[str], Any]:
    RIGHT.append(Planted(make))
    return make


def captured(
    device: str,
    fn: Any,
    specs: Mapping[str, gk.BufferSpec] | None = None,
    *,
    policy: gk.Policy = POLICY,
    checked: bool = False,
    **options: Any,
) -> gk.GraphRunner:
    group = gk.GraphGroup(device, checked=checked)
    group.buffers.declare(**(specs or {"x": X}))
    runner = group.runner("r", fn, policy=policy, **options)
    group.capture(progress=False)
    return runner


# -- padding and stale contents --------------------------------------------------------------------


def scatter(device: str, idx: gk.BufferSpec, rows: list[int]) -> gk.GraphRunner:
    cache = torch.ones(12, 3, device=device)

    def fn(idx, x):
        cache[idx] = x
        return x + 1

    runner = captured(
        device, fn, {"idx": idx, "x": X}, outputs=ROWS, mutates=[gk.Scratch(cache, rows=rows)]
    )
    # Whatever the capture has written where it shouldn't.
    cache.fill_(1.0)
    return runner


@bug("REAL", r"mutates\[0\] is not close .* in row 11 .*Padding has written there")
def p1_an_index_pad_of_minus_one(device):
    return scatter(device, gk.BufferSpec((batch,), I64, pad=-1, valid=(-1, 11)), [0]), {
        "inputs": lambda d: {
            "idx": np.arange(1, d.sizes["batch"] + 1),
            "x": np.full((d.sizes["batch"], 3), 2.0, "f"),
        }
    }


@bug("REAL", r"mutates\[0\] is not close .* in row 3 ")
def p1_an_index_pad_that_is_a_real_row(device):
    return scatter(device, gk.BufferSpec((batch,), I64, pad=3, valid=(0, 12)), [SCRATCH])


@bug("PADS", r"buffer 'n' \(pad 0.0\)")
def p2_a_divisor_padded_with_zero(device):
    def fn(x, n):
        y = x / n
        return y / y.abs().amax()

    return captured(
        device, fn, {"x": X0, "n": gk.BufferSpec((batch, 1), F32, pad=0.0)}, outputs=ROWS
    )


@bug("REAL", r"mutates\[0\] is not close")
def p3_stale_indices_are_scattered_again(device):
    return scatter(device, gk.BufferSpec((batch,), I64, pad=gk.keep, valid=(0, 12)), [SCRATCH])


@bug("HISTORY", "the output depends on what ran before")
def p3_a_sum_reads_what_the_last_batch_left(device):
    return captured(device, lambda x: x - x.sum(0), {"x": x_of(gk.keep)})


@bug("UNDECLARED", r"aten.add_.* writes a tensor of shape \(3,\) at .*planted.py")
def p4_state_that_nobody_declared(device):
    state = torch.zeros(3, device=device)

    def fn(x):
        state.add_(x.sum(0))
        return x * 2

    return captured(device, fn, {"x": X0}, outputs=ROWS)


@bug("PADDED", "the output differs .*Something is baked into the graph")
def p5_a_number_of_rows_from_prepare(device):
    return captured(
        device,
        lambda x, n: x.sum(0) / n,
        {"x": X0},
        prepare=lambda step: {"n": max(step.dispatch.sizes["batch"], 1)},
        outputs=gk.Output((3,), F32),
    )


def encoder(device: str, pad: Mapping[Any, Any], fn: Any, **options: Any) -> gk.GraphRunner:
    specs = {
        "x": gk.BufferSpec((batch, length, 3), F32, pad=0.0),
        "mask": gk.BufferSpec((batch, length), torch.bool, pad=pad),
    }
    policy = gk.Policy.full(gk.Buckets.grid({batch: [1, 4, 9], length: [2, 5]}))
    return captured(device, fn, specs, policy=policy, outputs=ROWS, **options)


def pooled(x, mask):
    weights = torch.where(mask[:, :, None], 0.0, float("-inf")).softmax(1)
    return (weights * x).sum(1)


@bug("PADS", r"buffer 'mask' \(pad relied\(False\), True|buffer 'mask' \(pad True")
def p6_a_rows_tail_is_attended_to(device):
    return encoder(device, {batch: True, length: True}, pooled)


@bug("REAL", "the output is not close")
def p6_a_padded_row_that_sees_nothing_is_nan(device):
    def fn(x, mask):
        rows = pooled(x, mask)
        # The usual way to leave padded rows out of a mean.
        keep = mask.any(1, keepdim=True).to(F32)
        return rows - (rows * keep).sum(0) / keep.sum(0)

    return encoder(device, {batch: gk.relied(False), length: gk.relied(False)}, fn)


@bug("REAL", "the output is not close")
def p6_a_mean_over_the_padded_length(device):
    def fn(x, mask):
        return (x * mask[:, :, None]).mean(1)

    return encoder(device, {batch: True, length: gk.relied(False)}, fn)


@bug("UNDECLARED", r"aten.add_.* writes a tensor of shape \(\)")
def p7_a_length_that_counts_its_calls(device):
    cache = SimpleNamespace(length=torch.zeros((), dtype=I64, device=device))

    def fn(x):
        cache.length.add_(1)
        return x + 1

    return captured(device, fn)


@bug("REAL", "the output is not close")
def a_mean_over_padded_rows(device):
    return captured(device, lambda x: x.mean(0), {"x": X0}, outputs=gk.Output((3,), F32))


@bug("REAL", "the output is not close .* in row ")
def a_neighbor_of_the_last_row(device):
    return captured(device, lambda x: x - x.roll(-1, 0), outputs=ROWS)


@bug("PADS", r"buffer 'x' \(pad 0.0\)")
def a_suffix_sum_that_padding_happens_not_to_change(device):
    return captured(device, lambda x: x.flip(0).cumsum(0).flip(0), outputs=ROWS)


@bug("PADS", r"buffer 'x' \(pad 0.0\).* with -?10000 there")
def a_scale_of_the_whole_tensor(device):
    return captured(device, lambda x: (x / x.abs().max() * 127).round(), outputs=ROWS)


@bug("PADS", r"buffer 'lengths' \(pad 1.0\)")
def lengths_padded_with_one_are_added_up(device):
    specs = {"x": X0, "lengths": gk.BufferSpec((batch, 1), F32, pad=1.0)}
    return captured(device, lambda x, lengths: x / lengths.sum(), specs, outputs=ROWS)


@bug("REAL", "the output is not close")
def batch_statistics_of_a_module_in_training(device):
    norm = torch.nn.BatchNorm1d(3, track_running_stats=False).to(device)
    # One row has no statistics.
    policy = gk.Policy.full(gk.Buckets.of(batch, 4, 9))
    runner = captured(device, lambda x: norm(x), {"x": X0}, policy=policy, outputs=ROWS)
    return runner, {"batches": [{"batch": n} for n in (2, 3, 4, 8)]}


def segments(pad: Any, device: str) -> Any:
    """Sums over the rows of each request, whose starts are an input."""

    def fn(x, start):
        owner = torch.searchsorted(start[1:], torch.arange(x.shape[0], device=x.device), right=True)
        sums = torch.zeros(start.shape[0], 3, device=x.device)
        return sums.index_add(0, owner.clamp(max=start.shape[0] - 1), x)[:-1]

    specs = {
        "x": gk.BufferSpec((tokens, 3), F32, pad=gk.relied(0.0)),
        "start": gk.BufferSpec((reqs + 1,), I64, pad=pad),
    }
    runner = captured(
        device,
        fn,
        specs,
        policy=gk.Policy.full(gk.Buckets.of(tokens, 2, 6, 12, reqs=gk.at_most(tokens))),
        outputs=gk.Output((reqs, 3), F32),
    )

    def inputs(dispatch):
        n, rows = dispatch.sizes["tokens"], dispatch.sizes["reqs"]
        x = np.random.default_rng(n).uniform(0.5, 1.5, (n, 3)).astype("f")
        return {"x": x, "start": np.arange(rows + 1) * n // max(rows, 1)}

    return runner, {"inputs": inputs}


@bug("REAL", "the output is not close")
def row_starts_padded_with_zero(device):
    return segments(0, device)


# -- prepared data and Python state ----------------------------------------------------------------


@bug("PADDED", "the output differs")
def s1_prepared_once_and_never_again(device):
    def prepare(step):
        if "offset" not in step.state:
            step.state["offset"] = step.views["x"].sum(0)
        return {"offset": step.state["offset"]}

    return captured(device, lambda x, offset: x - offset, {"x": X0}, prepare=prepare, outputs=ROWS)


@bug("PADDED", "the output differs")
def s2_prepared_anew_where_the_graph_doesnt_look(device):
    def prepare(step):
        offset = step.views["x"].sum(0)
        if step.phase is gk.Phase.REPLAY:
            return {"offset": offset}
        kept = step.state.setdefault("offset", torch.zeros_like(offset))
        kept.copy_(offset)
        return {"offset": kept}

    return captured(device, lambda x, offset: x - offset, {"x": X0}, prepare=prepare, outputs=ROWS)


@bug("PADDED", "the output differs")
def s4_an_attribute_that_was_set_after_the_capture(device):
    settings = SimpleNamespace(scale=1.0)
    runner = captured(device, lambda x: x * settings.scale, outputs=ROWS)
    settings.scale = 2.0
    return runner


@bug("PADDED", "the output differs")
def s6_a_weight_that_was_replaced(device):
    linear = torch.nn.Linear(3, 3, device=device)
    runner = captured(device, lambda x: linear(x), outputs=ROWS)
    # Kept, so that the graph reads what it read, and nobody else's memory.
    linear.kept = [linear.weight]
    linear.weight = torch.nn.Parameter(torch.ones(3, 3, device=device))
    return runner


@bug("PADDED", "the output differs")
def s7_a_cache_that_was_reallocated(device):
    memory = {"kv": torch.ones(3, device=device)}
    runner = captured(device, lambda x: x + memory["kv"], outputs=ROWS)
    memory["old"], memory["kv"] = memory["kv"], torch.zeros(3, device=device)
    return runner


# -- shapes, buckets and outputs -------------------------------------------------------------------


@bug("REAL", "the output is not close", batch="dispatch(batch=5) (number 6)")
def another_formula_for_large_batches(device):
    def fn(x):
        return x * 2 if x.shape[0] < 9 else x * 2.5

    runner = captured(device, fn, outputs=ROWS)
    return runner, {"batches": [{"batch": n} for n in range(9)]}


@bug("REAL", "the output is not close")
def o_rows_said_to_be_interleaved_that_sit_side_by_side(device):
    outputs = gk.Output((gk.interleaved(batch * 2), 3), F32)
    return captured(device, lambda x: torch.cat([x, -x]), outputs=outputs)


@bug("", "FULL bucket .*batch=9.* isn't captured: ValueError: too large for me")
def d7_a_bucket_whose_capture_failed(device):
    def fn(x):
        if x.shape[0] > 4:
            raise ValueError("too large for me")
        return x * 2

    group = gk.GraphGroup(device, on_error="skip")
    group.buffers.declare(x=X)
    runner = group.runner("r", fn, policy=POLICY, outputs=ROWS)
    group.capture(progress=False)
    return runner


@gk.eager_break
def centered_on_all(x):
    return x - x.sum(0) / 7


@gk.eager_break
def scaled(x, factor):
    return x * factor


@bug("PADS", "buffer 'x'")
def a_break_that_should_see_real_rows_only(device):
    policy = gk.Policy.piecewise(BUCKETS)
    return captured(device, lambda x: centered_on_all(x * 2), policy=policy, outputs=ROWS)


@bug("PADDED", "the output differs")
def a_breaks_argument_from_the_capture(device):
    def prepare(step):
        return {"factor": float(step.dispatch.sizes["batch"])}

    return captured(
        device,
        lambda x, factor: scaled(x + 1, factor),
        policy=gk.Policy.piecewise(BUCKETS),
        prepare=prepare,
        outputs=ROWS,
    )


@bug("PADDED", "buffer 'state' differs")
def a_resident_buffer_changed_by_a_baked_number(device):
    step = SimpleNamespace(size=1.0)

    def fn(state):
        state.add_(step.size)
        return state * 0

    runner = captured(
        device, fn, {"state": X}, inputs={"state": gk.Resident("state")}, outputs=ROWS
    )
    step.size = 3.0
    return runner


# -- right ones ------------------------------------------------------------------------------------


@right
def elementwise(device):
    return captured(device, lambda x: x.relu() * 2 - 1, outputs=ROWS)


@right
def everything_in_checked_mode(device):
    return captured(device, lambda x: x.relu() * 2 - 1, checked=True, outputs=ROWS)


@right
def a_sum_over_rows_with_a_relied_pad(device):
    return captured(device, lambda x: x - x.sum(0), {"x": X0}, outputs=ROWS), {"rtol": 1e-5}


@right
def a_multiplicative_mask(device):
    mask = gk.BufferSpec((batch, 1), F32, pad=gk.relied(0.0))
    runner = captured(
        device, lambda x, mask: x - (x * mask).sum(0), {"x": X, "mask": mask}, outputs=ROWS
    )
    return runner, {"rtol": 1e-5}


@right
def a_scatter_with_a_scratch_row(device):
    return scatter(device, INDEX, [SCRATCH])


@right
def a_scatter_that_reads_what_it_wrote(device):
    cache = torch.ones(12, 3, device=device)

    def fn(idx, x):
        cache[idx] = cache[idx] * 0.5 + x
        return cache.index_select(0, idx)

    return captured(
        device,
        fn,
        {"idx": INDEX, "x": X},
        outputs=ROWS,
        mutates=[gk.Scratch(cache, rows=[SCRATCH])],
    )


@right
def row_starts_that_repeat_the_last(device):
    runner, given = segments(gk.repeat_last, device)
    return runner, {**given, "rtol": 1e-5}


@right
def positions_that_count_on(device):
    specs = {"x": X, "at": gk.BufferSpec((batch,), I64, pad=gk.continue_(1))}
    runner = captured(device, lambda x, at: x + at[:, None], specs, outputs=ROWS)
    return runner, {
        "inputs": lambda d: {
            "x": np.ones((d.sizes["batch"], 3), "f"),
            "at": np.arange(d.sizes["batch"]) + 5,
        }
    }


@right
def an_encoder_with_masks(device):
    return encoder(device, {batch: True, length: gk.relied(False)}, pooled), {"rtol": 1e-5}


@right
def a_packed_encoder(device):
    pad = {batch: True, length: gk.relied(False)}
    specs = {
        "x": gk.BufferSpec((batch, length, 3), F32, pad=0.0, layout="packed"),
        "mask": gk.BufferSpec((batch, length), torch.bool, pad=pad, layout="packed"),
    }
    policy = gk.Policy.full(gk.Buckets.grid({batch: [1, 4, 9], length: [2, 5]}))
    return captured(device, pooled, specs, policy=policy, outputs=ROWS), {"rtol": 1e-5}


@right
def a_resident_buffer_changed_in_place(device):
    def fn(state, x):
        state.mul_(0.5).add_(x)
        return state * 2

    specs = {"state": X, "x": X}
    return captured(device, fn, specs, inputs={"state": gk.Resident("state")}, outputs=ROWS)


@right
def an_output_in_its_own_input(device):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(state=X)
    runner = group.runner(
        "r",
        lambda state: state * 0.5 + 1,
        policy=POLICY,
        inputs={"state": gk.Resident("state")},
        outputs=buffers.state,
    )
    group.capture(progress=False)
    return runner


@right
def state_that_is_declared(device):
    state, calls = torch.zeros(3, device=device), torch.zeros((), dtype=I64, device=device)

    def fn(x):
        state.add_(x.sum(0))
        calls.add_(1)
        return x + state

    runner = captured(device, fn, {"x": X0}, outputs=ROWS, mutates=[state, calls])
    return runner, {"rtol": 1e-5}


@gk.eager_break(rows="real")
def centered(x):
    return x - x.sum(0) / 7


@right
def breaks_that_see_real_rows(device):
    runner = captured(
        device,
        lambda x: centered(centered(x * 2) + 1) * 3,
        policy=gk.Policy.piecewise(BUCKETS),
        outputs=ROWS,
    )
    return runner, {"rtol": 1e-5, "atol": 1e-5}


@right
def a_break_that_fills_a_buffer(device):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(x=X, out=X)

    @gk.eager_break(rows="real", out=buffers.out)
    def double(x, out):
        torch.mul(x, 2, out=out)

    runner = group.runner(
        "r", lambda x: double(x + 1) - 1, policy=gk.Policy.piecewise(BUCKETS), outputs=ROWS
    )
    group.capture(progress=False)
    return runner


@right
def full_and_piecewise_side_by_side(device):
    policy = gk.Policy(
        [
            gk.Route(gk.FULL, gk.Buckets.uniform(reqs, tokens, query_len=2)),
            gk.Route(gk.PIECEWISE, gk.Buckets.of(tokens, 4, 12, reqs=gk.at_most(tokens))),
        ]
    )
    specs = {
        "x": gk.BufferSpec((tokens, 3), F32, pad=0.0),
        "scale": gk.BufferSpec((reqs, 1), F32, pad=1.0),
    }

    def fn(x, scale):
        return {"x": centered_rows(x) + 1, "scale": scale * 2}

    outputs = {"x": gk.Output((tokens, 3), F32), "scale": gk.Output((reqs, 1), F32)}
    return captured(device, fn, specs, policy=policy, outputs=outputs)


@gk.eager_break
def centered_rows(x):
    return x - x.sum(1, keepdim=True)


@right
def random_numbers(device):
    return captured(device, lambda x: x * torch.rand(x.shape, device=x.device), outputs=ROWS)


@right
def random_numbers_of_a_generator_of_its_own(device):
    generator = torch.Generator(device).manual_seed(5)

    def fn(x):
        return x + torch.rand(x.shape, device=x.device, generator=generator)

    return captured(device, fn, outputs=ROWS, generators=[generator])


@right
def a_pytree_of_outputs(device):
    def fn(x):
        return {"a": (x * 2, [x.sum(1)]), "none": None, "b": x.argmax(1)}

    outputs = {
        "a.0": ROWS,
        "a.1.0": gk.Output((batch,), F32),
        "b": gk.Output((batch,), I64),
    }
    return captured(device, fn, outputs=outputs)


@right
def outputs_in_the_pool(device):
    return captured(device, lambda x: x * 2, outputs=gk.Output((batch, 3), F32, to="pool"))


@right
def outputs_on_the_host(device):
    return captured(device, lambda x: x * 2, outputs=gk.Output((batch, 3), F32, to="host"))


@right
def a_count_of_real_rows(device):
    def fn(x, n):
        rows = torch.arange(x.shape[0], device=x.device) < n
        return (x * rows[:, None]).sum(0) / n.clamp(min=1)

    runner = captured(
        device,
        fn,
        {"x": x_of(gk.keep)},
        inputs={"x": gk.Fed("x"), "n": gk.Count(batch)},
        outputs=gk.Output((3,), F32),
    )
    return runner, {"rtol": 1e-5}


@right
def variants_that_are_baked(device):
    route = gk.Route(gk.FULL, BUCKETS, variants=gk.Variants(power=(1, 2), causal=(False, True)))

    def fn(x, power, causal):
        return x**power + (1 if causal else 0)

    return captured(device, fn, policy=gk.Policy([route]), outputs=ROWS)


@right
def metadata_prepared_in_place(device):
    def prepare(step):
        offset = step.state.setdefault("offset", torch.zeros(3, device=device))
        offset.copy_(step.views["x"].sum(0))
        return {"offset": offset}

    runner = captured(
        device, lambda x, offset: x - offset, {"x": X0}, prepare=prepare, outputs=ROWS
    )
    return runner, {"rtol": 1e-5}


@right
def half_precision(device):
    spec = gk.BufferSpec((batch, 3), torch.bfloat16, pad=0.0)
    runner = captured(device, lambda x: (x * 3).softmax(1), {"x": spec},
                      outputs=gk.Output((batch, 3), torch.bfloat16))  # fmt: skip
    return runner


@right
def padding_that_the_producer_owes(device):
    spec = x_of(gk.by_producer(0.0))
    runner = captured(
        device,
        lambda x: x - x.sum(0),
        {"x": spec},
        inputs={"x": gk.Resident("x")},
        outputs=ROWS,
        checked=True,
    )
    return runner, {"rtol": 1e-5}


@right
def a_wrapped_module(device):
    linear = torch.nn.Linear(3, 4, device=device)
    group = gk.GraphGroup(device)
    wrapped = group.wrap(linear.forward, input=X, outputs=gk.Output((batch, 4), F32))
    group.capture(progress=False)
    return wrapped, {"rtol": 1e-4, "atol": 1e-5}


@right
def two_runners_that_share_a_buffer(device):
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(x=X, hidden=X)
    group.runner("first", lambda x: x * 2, policy=POLICY, outputs=buffers.hidden)
    group.runner(
        "second",
        lambda hidden: hidden + 1,
        policy=POLICY,
        inputs={"hidden": gk.Resident("hidden")},
        outputs=ROWS,
    )
    # Not captured: the check does that.
    return group


@right
def no_dim_at_all(device):
    spec = gk.BufferSpec((3,), F32)
    policy = gk.Policy.full(gk.Buckets.fixed())
    return captured(device, lambda x: x * 2, {"x": spec}, policy=policy,
                    outputs=gk.Output((3,), F32))  # fmt: skip


@right
def decoding_over_a_paged_cache(device):
    """Writes one token's key a request, and attends to all that the request has."""
    keys = torch.zeros(12, 3, device=device)

    def fn(slot, table, lengths, q):
        keys[slot] = q
        seen = keys[table]
        scores = (seen * q[:, None]).sum(2)
        inside = torch.arange(table.shape[1], device=q.device) < lengths[:, None]
        return (scores.masked_fill(~inside, float("-inf")).softmax(1)[:, :, None] * seen).sum(1)

    requests = gk.Dim("requests", 4)
    specs = {
        "slot": gk.BufferSpec((requests,), I64, pad=SCRATCH, valid=(0, 12)),
        "table": gk.BufferSpec((requests, 3), I64, pad=SCRATCH, valid=(0, 12)),
        "lengths": gk.BufferSpec((requests,), I64, pad=1),
        "q": gk.BufferSpec((requests, 3), F32, pad=0.0),
    }
    runner = captured(
        device,
        fn,
        specs,
        policy=gk.Policy.full(gk.Buckets.of(requests, 1, 3, 4)),
        outputs=gk.Output((requests, 3), F32),
        mutates=[gk.Scratch(keys, rows=[SCRATCH])],
    )

    def inputs(dispatch):
        n = dispatch.sizes["requests"]
        table = np.arange(n)[:, None] * 2 + np.array([0, 1, 0])
        table[:, 2] = SCRATCH
        q = np.random.default_rng(n).uniform(0.5, 1.5, (n, 3)).astype("f")
        return {"slot": table[:, 1], "table": table, "lengths": np.full(n, 2), "q": q}

    return runner, {"inputs": inputs, "rtol": 1e-4, "atol": 1e-5}
