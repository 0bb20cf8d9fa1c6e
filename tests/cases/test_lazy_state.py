"""CASES S3, S4, O5: what a function builds in warm-up, or leaves behind in a capture."""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any

import pytest
import torch

import graphkit as gk

BATCH = gk.Dim("batch", 8)


def group_of(device: str, fn: Any, *, checked: bool = True, **options: Any) -> gk.GraphGroup:
    group = gk.GraphGroup(device, checked=checked)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0))
    policy = gk.Policy([gk.Route(gk.FULL, gk.Buckets.of(BATCH, 2, 8))])
    group.runner("lazy", fn, policy=options.pop("policy", policy), **options)
    return group


def remarks(group: gk.GraphGroup) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.capture(progress=False)
    return [str(w.message) for w in caught if issubclass(w.category, gk.CaptureWarning)]


class LazyPlan(torch.nn.Module):
    """Makes its plan when it is first called, as a wrapper of a kernel library does."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plan is None:
            self.plan = x.argsort(dim=1)
        return x.gather(1, self.plan[: x.shape[0]])


class WrittenPlan(LazyPlan):
    """The same, in memory that it made before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.plan is None:
            self.plan = torch.zeros(8, 4, dtype=torch.int64, device=x.device)
            self.plan[: x.shape[0]] = x.argsort(dim=1)
        return x.gather(1, self.plan[: x.shape[0]])


class LazyTable(torch.nn.Module):
    """Makes a table that no input goes into, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4, device=x.device).float().cos()
        return x * self.table


@pytest.mark.parametrize("module", [LazyPlan, WrittenPlan])
def test_s3_a_plan_made_in_warm_up_from_an_input_is_refused(
    device: str, module: type[LazyPlan]
) -> None:
    group = group_of(device, module().to(device))
    with pytest.raises(gk.CaptureError, match="from a runner's inputs") as caught:
        group.capture(progress=False)
    text = str(caught.value)
    assert "runner 'lazy', FULL bucket [batch=8]" in text
    assert "the capture reads at" in text
    assert "Make it in prepare" in text
    assert caught.value.location is not None
    assert "test_lazy_state.py" in caught.value.location
    assert not any(row.captured for row in group.report().runners[0].graphs)
    group.close()


def test_s3_a_plan_that_another_runner_made_is_refused_too(device: str) -> None:
    module = LazyPlan()
    group = group_of(device, module)
    group.runner(
        "second",
        lambda x: module(x),
        policy=gk.Policy([gk.Route(gk.FULL, gk.Buckets.of(BATCH, 2, 4))]),
    )
    with pytest.raises(gk.CaptureError, match="from a runner's inputs"):
        group.capture(progress=False)
    assert not any(row.captured for r in group.report().runners for row in r.graphs)
    group.close()


def test_s3_a_plan_of_what_prepare_returned_is_refused(device: str) -> None:
    class Planned(torch.nn.Module):
        plan: torch.Tensor | None = None

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            if self.plan is None:
                self.plan = lengths.cumsum(0)
            return x + self.plan[0]

    lengths = torch.ones(8, device=device)
    group = group_of(device, Planned(), prepare=lambda step: {"lengths": lengths})
    with pytest.raises(gk.CaptureError, match="from a runner's inputs"):
        group.capture(progress=False)
    group.close()


def test_s3_a_table_that_no_input_touched_is_reported_and_passes(device: str) -> None:
    group = group_of(device, LazyTable())
    found = remarks(group)
    assert any("the graph reads a tensor of shape (4,)" in text for text in found)
    assert all("not from an input" in text for text in found)
    runner = group["lazy"]
    x = torch.randn(5, 4, device=device)
    expected = x * torch.arange(4, device=device).float().cos()
    torch.testing.assert_close(runner.run(runner.dispatch(batch=5), x=x, clone=True), expected)
    group.close()


def test_s3_state_that_a_capture_writes_is_named_and_passes(device: str) -> None:
    class Cache(torch.nn.Module):
        rows: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.rows is None:
                self.rows = torch.zeros(8, 4, device=x.device)
            self.rows[: x.shape[0]] = x
            return self.rows[: x.shape[0]] * 2

    group = group_of(device, Cache())
    assert any("name it in mutates=" in text for text in remarks(group))
    runner = group["lazy"]
    x = torch.randn(5, 4, device=device)
    torch.testing.assert_close(runner.run(runner.dispatch(batch=5), x=x, clone=True), x * 2)
    group.close()


def test_s3_a_break_may_keep_a_plan_since_it_runs_again(device: str) -> None:
    plans: list[torch.Tensor] = []

    @gk.eager_break
    def planned(x: torch.Tensor) -> torch.Tensor:
        if not plans:
            plans.append(x.sum(dim=1, keepdim=True) * 0)
        return x + plans[0][:1]

    policy = gk.Policy([gk.Route(gk.PIECEWISE, gk.Buckets.of(BATCH, 2, 8))])
    group = group_of(device, lambda x: planned(x * 2) * 3, policy=policy)
    assert remarks(group) == []
    runner = group["lazy"]
    x = torch.randn(5, 4, device=device)
    torch.testing.assert_close(runner.run(runner.dispatch(batch=5), x=x, clone=True), x * 6)
    group.close()


def test_s3_an_unchecked_group_looks_at_nothing(device: str) -> None:
    group = group_of(device, LazyPlan(), checked=False)
    assert remarks(group) == []
    group.close()


def test_s4_an_attribute_that_changed_during_a_capture_is_named(device: str) -> None:
    class Remembers(torch.nn.Module):
        last: torch.Tensor | None = None
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            self.calls += 1
            return x + 1

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Remembers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    model = Outer()
    for fn, prefix in ((model, ""), (lambda x: model(x), "model.")):
        group = group_of(device, fn)
        found = remarks(group)
        assert any(f"attribute '{prefix}inner.last' was a tensor of shape" in t for t in found)
        assert any(f"attribute '{prefix}inner.calls' was" in text for text in found)
        assert all("a replay doesn't set it" in text for text in found)
        group.close()


def test_s4_an_object_that_is_no_module_and_a_replaced_buffer(device: str) -> None:
    class Plain:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(x.shape[0])
            return x + 1

    group = group_of(device, Plain().step)
    assert any("attribute 'seen'" in text for text in remarks(group))
    group.close()

    class Replaces(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4, device=device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.mean(dim=0)
            return x + 1

    group = group_of(device, Replaces())
    assert any("attribute 'mean'" in text for text in remarks(group))
    group.close()


def test_s4_nothing_is_said_of_a_function_that_leaves_nothing(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device)
    group = group_of(device, lambda x: model(x), reads=[model])
    assert remarks(group) == []
    group.close()


def test_o5_a_workspace_made_in_a_capture_and_kept_by_the_module_is_named(device: str) -> None:
    class Workspace(torch.nn.Module):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            total = doubled.sum()
            del doubled
            self.kept = torch.zeros(16, device=x.device)
            return x + total

    group = group_of(device, Workspace())
    found = remarks(group)
    assert any("'kept'" in text and "memory of the graphs' pool" in text for text in found)
    group.close()


@pytest.mark.gpu
def test_o5_what_outlives_a_capture_elsewhere_is_named_by_its_origin() -> None:
    kept: list[torch.Tensor] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept[:] = [x * 2]
        return kept[0] + 1

    group = group_of("cuda", fn)
    found = remarks(group)
    assert any("outlives the capture" in text and "aten.mul" in text for text in found)
    group.close()


@pytest.mark.gpu
def test_o5_a_cycle_outlives_nothing() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        cycle: list[Any] = [x * 2]
        cycle.append(cycle)
        return cycle[0] + 1

    group = group_of("cuda", fn)
    assert remarks(group) == []
    group.close()


# -- what a recording doesn't see ------------------------------------------------------------------


def by_address(x: torch.Tensor) -> torch.Tensor:
    """Copies as another library does, given addresses, where no dispatcher looks."""
    out = torch.empty_like(x)
    ctypes.memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out + 1


def test_work_outside_of_pytorch_does_not_pass_in_silence() -> None:
    group = group_of("cpu", by_address)
    with pytest.raises(gk.CaptureError, match="differs from an eager call") as caught:
        group.capture(progress=False)
    assert "runner 'lazy', FULL bucket [batch=8]" in str(caught.value)
    assert "what NumPy or another library does" in str(caught.value)
    rows = group.report().runners[0].graphs
    assert not any(row.captured for row in rows)
    assert all("differs from an eager call" in str(row.failure) for row in rows)
    runner = group["lazy"]
    dispatch = runner.dispatch(batch=2)
    assert (dispatch.mode, dispatch.reason) == (gk.EAGER, gk.Reason.NOT_CAPTURED)
    assert runner.run(dispatch, x=torch.ones(2, 4)).tolist() == [[2.0] * 4] * 2
    group.close()


def test_with_skip_the_bucket_falls_back() -> None:
    group = gk.GraphGroup("cpu", checked=True, on_error="skip")
    group.buffers.declare(x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0))
    policy = gk.Policy([gk.Route(gk.FULL, gk.Buckets.of(BATCH, 2, 8))])
    runner = group.runner("r", by_address, policy=policy)
    group.runner("right", lambda x: x * 2, policy=policy)
    group.capture(progress=False)
    assert runner.dispatch(batch=2).mode is gk.EAGER
    assert group["right"].dispatch(batch=2).mode is gk.FULL
    group.close()


def test_the_comparison_leaves_everything_as_it_was() -> None:
    state = torch.zeros(3)
    torch.manual_seed(5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum())
        return x + torch.rand_like(x)

    group = group_of("cpu", fn, mutates=[state])
    before = torch.get_rng_state()
    assert remarks(group) == []
    assert state.tolist() == [0.0] * 3
    assert torch.get_rng_state().equal(before)
    assert all(row.replays == 0 for row in group.report().runners[0].graphs)
    group.close()


# -- replays compared with eager calls, now and then -----------------------------------------------


def test_in_checked_mode_a_replay_is_compared_now_and_then(device: str) -> None:
    """A value that changed behind the graph's back shows at the next comparison, by name."""
    factor = [2.0]
    calls: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x * factor[0]

    group = group_of(device, fn)
    group.capture(progress=False)
    runner = group["lazy"]
    dispatch = runner.dispatch(batch=5)
    x = torch.ones(5, 4)
    assert runner.run(dispatch, x=x, clone=True).tolist() == [[2.0] * 4] * 5
    calls.clear()
    for _ in range(8):
        runner.run(dispatch, x=x)
    assert calls == []
    runner.run(dispatch, x=x)
    assert calls
    assert set(calls) == {8}
    factor[0] = 3.0
    for _ in range(89):
        runner.run(dispatch, x=x)
    with pytest.raises(gk.CheckError, match=r"FULL bucket \[batch=8\]: the output differs from an"):
        runner.run(dispatch, x=x)
    group.close()


def test_the_comparison_is_left_out_where_prepare_would_run_again(device: str) -> None:
    prepared: list[Any] = []

    def prepare(step: gk.Step) -> dict[str, Any]:
        prepared.append(step.phase)
        return {}

    group = group_of(device, lambda x: x * 2, prepare=prepare)
    group.capture(progress=False)
    prepared.clear()
    group["lazy"].run(group["lazy"].dispatch(batch=2), x=torch.ones(2, 4))
    assert prepared == [gk.Phase.REPLAY]
    group.close()


def test_an_unchecked_group_compares_nothing(device: str) -> None:
    calls: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x * 2

    group = group_of(device, fn, checked=False)
    group.capture(progress=False)
    calls.clear()
    for _ in range(12):
        group["lazy"].run(group["lazy"].dispatch(batch=5), x=torch.ones(5, 4))
    assert calls == []
    group.close()


# -- a comparison changes nothing that its caller sees -----------------------------------------------


@pytest.mark.parametrize("to", ["static", "host"])
def test_a_loop_that_feeds_its_own_output_is_compared_and_goes_on(device: str, to: Any) -> None:
    """The input is a view of what the comparison's own replays overwrite."""
    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    runner = group.runner(
        "loop",
        lambda x: (x * 3 + 1) % 97,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 8)),
        outputs=gk.Output((BATCH,), torch.int64, to=to),
    )
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    x: Any = torch.tensor([1, 2, 3], device=device if to == "static" else "cpu")
    expected = x.clone()
    for _ in range(12):
        x = runner.run(dispatch, x=x)
        expected = (expected * 3 + 1) % 97
        group.backend.synchronize()
        assert x.tolist() == expected.tolist()
    group.close()


def test_a_check_reads_inputs_that_are_views_of_outputs_first(device: str) -> None:
    """A leak of padding is found whether or not the input is the last output."""
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.float32, pad=5))
    runner = group.runner(
        "leaks",
        lambda x: x + x.sum() / x.shape[0],
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 8)),
        outputs=gk.Output((BATCH,), torch.float32),
    )
    group.capture(progress=False)
    dispatch = runner.dispatch(batch=3)
    y = runner.run(dispatch, x=torch.ones(3))
    assert not runner.check(dispatch, x=y, raise_on_failure=False).passed
    group.close()


def test_a_capture_whose_prepare_needs_a_context_is_not_compared() -> None:
    def prepare(step: gk.Step) -> dict[str, Any]:
        scale = step.state.setdefault("scale", torch.ones(()))
        if step.phase in (gk.Phase.REPLAY, gk.Phase.EAGER):
            scale.fill_(step.context["scale"])
        return {"scale": scale}

    group = group_of("cpu", lambda x, scale: x * scale, prepare=prepare)
    found = remarks(group)
    assert any("wasn't compared with an eager call, which raised TypeError" in t for t in found)
    runner = group["lazy"]
    out = runner.run(runner.dispatch(batch=2), x=torch.ones(2, 4), context={"scale": 3.0})
    assert out.tolist() == [[3.0] * 4] * 2
    group.close()


def test_an_eager_run_gives_host_outputs_of_their_own(device: str) -> None:
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    runner = group.runner(
        "same",
        lambda x: x,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 4)),
        outputs=gk.Output((BATCH,), torch.int64, to="host"),
    )
    group.capture(progress=False)
    for rows in (3, 6):
        first, second = (runner.run(runner.dispatch(batch=rows), x=[k] * rows) for k in (1, 2))
        group.backend.synchronize()
        assert (first.tolist(), second.tolist()) == ([1] * rows, [2] * rows)
    group.close()


def test_a_buffer_whose_memory_moved_is_named_in_checked_mode(device: str) -> None:
    """Resizing a buffer's storage leaves the graph with the old address."""
    group = group_of(device, lambda x: x + 1)
    group.capture(progress=False)
    runner = group["lazy"]
    x = group.buffers["x"].tensor
    assert runner.run(runner.dispatch(batch=2), x=torch.ones(2, 4)).tolist() == [[2.0] * 4] * 2
    x.set_(torch.zeros(8, 4, device=device))
    with pytest.raises(gk.StaleGraphError, match="buffer 'x' lies elsewhere than at the capture"):
        runner.run(runner.dispatch(batch=2), x=torch.ones(2, 4))
    group.close()


# -- declared state that isn't all that is written ---------------------------------------------------


def test_in_checked_mode_a_pad_that_writes_beside_the_scratch_rows_is_named(device: str) -> None:
    """A pad of a live row corrupts a cache for good, and every comparison sees the same corrupt row."""
    cache = torch.arange(32.0, device=device).view(8, 4)
    before = cache.clone()

    def write(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        cache[slots] = x
        return cache[slots] * 2

    for pad, is_right in ((3, False), (0, True)):
        group = gk.GraphGroup(device, checked=True)
        group.buffers.declare(
            x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0),
            slots=gk.BufferSpec((BATCH,), torch.int64, pad=pad, valid=(0, 8)),
        )
        group.runner(
            "cache",
            write,
            policy=gk.Policy.full(gk.Buckets.of(BATCH, 2, 8)),
            mutates=[gk.Scratch(cache, rows=[0])],
        )
        if is_right:
            group.capture(progress=False)
        else:
            with pytest.raises(
                gk.SpecError, match=r"wrote rows \[3\] of a state of shape \(8, 4\)"
            ):
                group.capture(progress=False)
        assert cache.equal(before)
        group.close()


def test_in_checked_mode_other_ambient_modes_are_named_as_ever(device: str) -> None:
    group = group_of(device, lambda x: x @ x.T)
    with torch.autocast(device, dtype=torch.bfloat16):
        group.capture(progress=False)
    runner = group["lazy"]
    with pytest.raises(gk.StateError, match="autocast was"):
        runner.run(runner.dispatch(batch=2), x=torch.ones(2, 4))
    group.close()


def test_s3_memory_that_is_declared_or_takes_only_a_shape_is_no_plan(device: str) -> None:
    """A cache that another runner writes is named in reads=; new_full takes an input's dtype and nothing more."""

    class Engine:
        kv: torch.Tensor | None = None
        table: torch.Tensor | None = None

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            if self.kv is None:
                self.kv = torch.zeros(8, 4, device=x.device)
            self.kv[: x.shape[0]] = x * 2
            return x + 1

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            assert self.kv is not None
            return self.kv[: x.shape[0]] + x

        def scale(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = x.new_full((4,), 2.0)
            return x * self.table

    engine = Engine()
    group = gk.GraphGroup(device, checked=True)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 4), torch.float32, pad=0))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 8))
    cache: dict[str, Any] = {"reads": [lambda: engine.kv if engine.kv is not None else []]}
    group.runner("encode", engine.encode, policy=policy, **cache)
    group.runner("decode", engine.decode, policy=policy, **cache)
    group.runner("scale", engine.scale, policy=policy)
    remarks(group)  # nothing is refused
    x = torch.randn(2, 4, device=device)
    for name, expected in (("encode", x + 1), ("decode", x * 3), ("scale", x * 2)):
        runner = group[name]
        torch.testing.assert_close(runner.run(runner.dispatch(batch=2), x=x, clone=True), expected)
    group.close()


def test_s4_attributes_behind_a_plain_object_are_named(device: str) -> None:
    class Model(torch.nn.Module):
        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x
            return x + 1

    class Engine:
        def __init__(self) -> None:
            self.model, self.seen = Model(), {"last": None}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen["last"] = x * 3  # type: ignore[assignment]
            return self.model(x)

    engine = Engine()
    for fn, prefix in ((engine.forward, ""), (lambda x: engine.forward(x), "engine.")):
        group = group_of(device, fn)
        found = remarks(group)
        for name in ("model.last", "seen"):
            assert any(f"attribute '{prefix}{name}'" in text for text in found), (name, found)
        group.close()


@pytest.mark.skipif(
    not hasattr(torch.ops.aten.randint_like, "Tensor"), reason="this torch takes only numbers"
)
def test_s3_of_an_input_only_what_is_in_it_counts(device: str) -> None:
    """randint_like takes a shape of its first tensor, and contents of its second."""

    class Engine:
        noise: torch.Tensor | None = None

        def __init__(self, is_bound: bool) -> None:
            self.is_bound = is_bound

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.noise is None:
                zeros = torch.zeros(4, device=x.device)
                bound = x.abs().max().cpu() + 9 if self.is_bound else torch.tensor(9)
                self.noise = torch.randint_like(zeros, bound)
            return x + self.noise

    group = group_of(device, Engine(is_bound=True).forward)
    with pytest.raises(gk.CaptureError, match="from a runner's inputs"):
        group.capture(progress=False)
    group.close()
    group = group_of(device, Engine(is_bound=False).forward)
    assert any("the graph reads a tensor of shape (4,)" in text for text in remarks(group))
    group.close()


@pytest.mark.parametrize("way", ["list", "numpy"])
def test_s3_a_plan_that_went_through_the_host_is_reported(device: str, way: str) -> None:
    def make(x: torch.Tensor) -> torch.Tensor:
        order = x[0].argsort().cpu()
        if way == "list":
            return torch.tensor(order.tolist(), device=x.device) + 0
        return torch.from_numpy(order.numpy().copy()).to(x.device)

    class Lazy:
        plan: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.plan is None:
                self.plan = make(x)
            return x[:, self.plan]

    group = group_of(device, Lazy().forward)
    found = remarks(group)
    assert any("the graph reads a tensor of shape (4,)" in text for text in found)
    assert all("values on the host, which may be an input's" in text for text in found)
    group.close()


def test_s3_a_plan_made_in_an_eager_run_is_refused(device: str) -> None:
    group = group_of(device, LazyPlan())
    runner = group["lazy"]
    runner.run(runner.dispatch(batch=8), x=torch.rand(8, 4, device=device))
    with pytest.raises(gk.CaptureError, match="in an EAGER run and from a runner's inputs"):
        group.capture(progress=False)
    group.close()


def test_s3_what_an_eager_run_returned_is_its_callers(device: str) -> None:
    kept: dict[str, torch.Tensor] = {}
    group = group_of(device, lambda x: x * 2)
    runner = group["lazy"]
    kept["scale"] = runner.run(runner.dispatch(batch=1), x=torch.ones(1, 4))
    policy = gk.Policy.full(gk.Buckets.of(BATCH, 2, 8))
    group.runner("uses", lambda x: x * kept["scale"], policy=policy)
    assert remarks(group) == []
    user = group["uses"]
    out = user.run(user.dispatch(batch=2), x=torch.ones(2, 4), clone=True)
    assert out.tolist() == [[2.0] * 4] * 2
    group.close()


def test_s4_one_object_further_and_modules_in_lists(device: str) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stats: dict[str, Any] = {"rows": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stats["rows"] = x.shape[0] * 1000
            return x + 1

    class Helper:
        def __init__(self) -> None:
            self.last: Any = None
            self.layers = [Layer()]

    class Engine:
        def __init__(self) -> None:
            self.helper = Helper()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.helper.last = x.shape
            return self.helper.layers[0](x)

    engine = Engine()
    step = engine.forward
    for fn, prefix in ((engine.forward, ""), (lambda x: step(x), "step.")):
        group = group_of(device, fn)
        found = remarks(group)
        for name in ("helper.last", "helper.layers[0].stats"):
            assert any(f"attribute '{prefix}{name}'" in text for text in found), (name, found)
        group.close()


def test_s4_a_module_that_a_capture_replaces_is_named(device: str) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = torch.nn.Identity()
            return self.inner(x) + 1

    group = group_of(device, Outer())
    assert any("attribute 'inner' was" in text for text in remarks(group))
    group.close()


def test_s4_nothing_is_said_where_equal_values_are_set_again(device: str) -> None:
    class Config:
        """Never changes; the engine holds what it needs besides."""

        width = 4

        def __init__(self) -> None:
            self.scale, self.sizes = 2.0, [1, 2]

    class Engine:
        def __init__(self) -> None:
            self.config, self.known = Config(), {"scale": 500.0, "name": "x" * 3}
            self.itself = self
            self.lock = threading.Lock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.known["scale"] = float(str(500.0))
            self.known["name"] = "".join(["x"] * 3)
            self.config.scale = float("2.0")
            return x * self.config.scale

    engine = Engine()
    for fn in (engine.forward, lambda x: engine.forward(x)):
        group = group_of(device, fn)
        assert remarks(group) == []
        group.close()
