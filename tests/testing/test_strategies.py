"""What graphkit.testing's strategies generate: the boundaries, legal inputs, and the least that fails."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import graphkit as gk
from graphkit.buffers import shape_at
from graphkit.staging import staging
from graphkit.testing import strategies

BATCH = gk.Dim("batch", 40)
REQS, TOKENS = gk.Dim("reqs", 8), gk.Dim("tokens", 64)

quick = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
finding = settings(max_examples=2000, deadline=None, derandomize=True, database=None)


def seen(strategy: st.SearchStrategy[Any], count: int = 400) -> list[Any]:
    """So many examples of it."""
    found: list[Any] = []

    @settings(quick, max_examples=count)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def batch_runner(device: str = "cpu", **specs: gk.BufferSpec) -> gk.GraphRunner:
    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((BATCH, 2), torch.float32, pad=0), **specs)
    buckets = gk.Buckets.of(BATCH, 4, 16, 32)
    return group.runner("r", lambda **views: dict(views), policy=gk.Policy.full(buckets),
                        inputs={b.name: gk.Fed(b) for b in group.buffers})  # fmt: skip


def decode_policy() -> gk.Policy:
    return gk.Policy.full_and_piecewise(
        gk.Buckets.uniform(REQS, TOKENS, query_len=4, sizes=[1, 2, 8]),
        gk.Buckets.of(TOKENS, 16, 64, reqs=gk.at_most(TOKENS)),
    )


def decode_dispatcher() -> gk.Dispatcher:
    return gk.Dispatcher(decode_policy(), [REQS, TOKENS])


# -- sizes --------------------------------------------------------------------------------------


@given(
    marks=st.lists(st.integers(-5, 60), max_size=5),
    least=st.integers(0, 20),
    span=st.integers(0, 30),
    data=st.data(),
)
def test_sizes_lie_in_their_range(
    marks: list[int], least: int, span: int, data: st.DataObject
) -> None:
    size = data.draw(strategies.sizes_near(marks, least, least + span))
    assert least <= size <= least + span


def test_sizes_are_all_there_and_half_of_them_at_the_boundaries() -> None:
    found = Counter(seen(strategies.sizes_near([4, 16], 0, 40), 2000))
    assert set(found) == set(range(41))
    edges = {0, 1, 3, 4, 5, 15, 16, 17, 39, 40}
    share = sum(found[edge] for edge in edges) / found.total()
    assert 0.45 < share < 0.8


@pytest.mark.parametrize("threshold", [0, 1, 2, 3, 4, 5, 9, 16, 23, 39, 40])
def test_sizes_shrink_to_the_smallest_be_it_a_boundary_or_not(threshold: int) -> None:
    sizes = strategies.sizes_near([4, 16], 0, 40)
    assert find(sizes, lambda size: size >= threshold, settings=finding) == threshold


# -- batches ------------------------------------------------------------------------------------


def test_batches_come_at_each_bucket_beside_it_at_the_ends_and_above_every_bucket() -> None:
    found = Counter(batch.sizes["batch"] for batch in seen(strategies.batches_of(batch_runner())))
    wanted = {0, 1, 40, 39} | {bucket + by for bucket in (4, 16, 32) for by in (-1, 0, 1)}
    assert wanted <= set(found)
    assert all(0 <= size <= BATCH.maximum for size in found)


@settings(quick)
@given(batch=strategies.batches_of(decode_dispatcher()))
def test_batches_of_requests_are_consistent(batch: strategies.Batch) -> None:
    answer = decode_dispatcher().dispatch(**batch.named)
    assert dict(answer.sizes) == dict(batch.sizes)
    reqs, tokens = batch.sizes["reqs"], batch.sizes["tokens"]
    assert reqs <= tokens
    assert (reqs == 0) == (tokens == 0)
    if batch.query_len is not None:
        assert tokens == reqs * batch.query_len


def test_batches_are_of_every_kind_and_get_every_mode_and_bucket() -> None:
    dispatcher = decode_dispatcher()
    batches = seen(strategies.batches_of(dispatcher))
    assert {batch.query_len for batch in batches} == {None, 3, 4, 5}
    answers = [dispatcher.dispatch(**batch.named) for batch in batches]
    assert {(answer.mode, answer.bucket) for answer in answers} >= set(dispatcher.graphs)
    varlen = gk.Dispatcher(
        gk.Policy.full(gk.Buckets.varlen(REQS, TOKENS, max_query_len=3)), [REQS, TOKENS]
    )
    batches = seen(strategies.batches_of(varlen), 200)
    assert {batch.max_query_len for batch in batches} == {None, 1, 3, 4}
    assert {batch.query_len for batch in batches} == {None, 1}
    assert {varlen.dispatch(**batch.named).mode for batch in batches} == {gk.FULL, gk.EAGER}


def test_batches_ask_for_every_variant() -> None:
    route = gk.Route(
        gk.FULL,
        gk.Buckets.of(BATCH, 8),
        variants=gk.Variants(loras=gk.round_up(0, 2), flag=(True, 1)),
    )
    dispatcher = gk.Dispatcher(gk.Policy([route]))
    asked = [batch.variant for batch in seen(strategies.batches_of(dispatcher), 200)]
    assert {(v["loras"], type(v["flag"])) for v in asked if v} == {
        (loras, kind) for loras in (0, 1, 2) for kind in (bool, int)
    }


def test_batches_are_kept_by_where() -> None:
    batches = strategies.batches_of(decode_dispatcher(), where=lambda b: b.query_len == 4)
    assert {batch.query_len for batch in seen(batches, 50)} == {4}


@settings(quick)
@given(batch=strategies.batches_above(decode_dispatcher()))
def test_batches_that_are_too_large_are_refused(batch: strategies.Batch) -> None:
    with pytest.raises(gk.InputError, match="is above the maximum"):
        decode_dispatcher().dispatch(**batch.named)


def test_the_smallest_failing_batch_is_found() -> None:
    runner = batch_runner()
    fails = strategies.batches_of(runner)
    least = find(fails, lambda batch: batch.sizes["batch"] > 6, settings=finding)
    assert repr(least) == "Batch(batch=7)"
    least = find(
        strategies.batches_of(decode_dispatcher()),
        lambda batch: batch.query_len == 4 and batch.sizes["reqs"] > 2,
        settings=finding,
    )
    assert repr(least) == "Batch(reqs=3, tokens=12, query_len=4)"


# -- policies -----------------------------------------------------------------------------------


def test_bucket_sets_are_single_dense_sparse_and_of_every_maker() -> None:
    sets = seen(strategies.bucket_sets(REQS, TOKENS), 500)
    assert {buckets.maker for buckets in sets} == {
        "of", "powers", "ladder", "uniform", "varlen", "grid",
    }  # fmt: skip
    points = {buckets.points for buckets in sets}
    assert any(len(p) == 1 for p in points)
    assert tuple((size,) for size in range(1, 25)) in points
    assert ((1,), (TOKENS.maximum,)) in points


def test_policies_have_ladders_that_interleave() -> None:
    def interleaves(policy: gk.Policy) -> bool:
        """Each bucket's neighbors are the other mode's."""
        if any(route.buckets.dims != (TOKENS,) for route in policy.routes):
            return False
        sizes = [(size, r.mode) for r in policy.routes for (size,) in r.buckets.points]
        modes = [mode for _, mode in sorted(sizes, key=lambda item: item[0])]
        return len(modes) > 4 and all(a is not b for a, b in itertools.pairwise(modes))

    assert any(map(interleaves, seen(strategies.policies(REQS, TOKENS), 300)))


# -- inputs -------------------------------------------------------------------------------------


DTYPES = {
    name: gk.BufferSpec((BATCH, 3), dtype, pad=0)
    for dtype in strategies.BUFFER_DTYPES
    for name in [str(dtype).removeprefix("torch.") + "_rows"]
}


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["staged", "copied on its own"])
@settings(quick, max_examples=60)
@given(data=st.data())
def test_inputs_are_taken_in_every_way_and_arrive_as_they_are(
    data: st.DataObject, limit: int, device: str
) -> None:
    with mock.patch.object(staging, "PACKED_LIMIT", limit):
        runner = batch_runner(device, **DTYPES)
    batch = data.draw(strategies.batches_of(runner))
    dispatch = runner.dispatch(**batch.named)
    inputs = data.draw(strategies.inputs_for(runner, dispatch, extreme=True, nan=True))
    out = runner.run(dispatch, inputs)
    for name, given_ in inputs.items():
        spec = runner.binding.fed[name].spec
        held = torch.as_tensor(_plain(given_), dtype=spec.dtype).cpu()
        assert tuple(held.shape) == shape_at(spec.shape, dispatch.sizes)
        assert _bits(out[name].cpu()) == _bits(held), name


def _plain(value: Any) -> Any:
    # torch takes no array that runs backwards.
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


def _bits(tensor: torch.Tensor) -> bytes:
    # NaN may change its bits where it is converted, and is NaN all the same.
    tensor = tensor.contiguous()
    if tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float64).nan_to_num(nan=1.25e300)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_inputs_come_in_every_way_and_are_extreme_where_that_is_asked_for() -> None:
    runner = batch_runner(ids=gk.BufferSpec((BATCH,), torch.int64, pad=0, valid=(-2, 5)),
                          free=gk.BufferSpec((BATCH,), torch.int32, pad=0))  # fmt: skip
    dispatch = runner.dispatch(batch=5)
    plain = seen(strategies.inputs_for(runner, dispatch), 200)
    assert {type(inputs["x"]) for inputs in plain} == {np.ndarray, torch.Tensor, list}
    arrays = [inputs["x"] for inputs in plain if isinstance(inputs["x"], np.ndarray)]
    assert any(array.strides[0] < 0 for array in arrays)
    assert any(not i["x"].is_contiguous() for i in plain if isinstance(i["x"], torch.Tensor))

    def values(examples: list[dict[str, Any]], name: str) -> list[float]:
        return [v for i in examples for v in torch.as_tensor(_plain(i[name])).flatten().tolist()]

    assert max(map(abs, values(plain, "x"))) == 2
    assert set(values(plain, "ids")) == {-2, -1, 1, 2, 3, 4}
    assert set(values(plain, "free")) == set(range(8))
    wild = seen(strategies.inputs_for(runner, dispatch, extreme=True, nan=True), 200)
    largest = torch.finfo(torch.float32).max
    assert {largest, -largest, float("inf")} <= set(values(wild, "x"))
    assert any(value != value for value in values(wild, "x"))
    assert any(0 < abs(value) < torch.finfo(torch.float32).tiny for value in values(wild, "x"))
    assert {-(2**31), 2**31 - 1} <= set(values(wild, "free"))
    assert set(values(wild, "ids")) == {-2, -1, 1, 2, 3, 4}


@pytest.mark.parametrize("high", [1, 2, 5, 100])
def test_indices_differ_while_there_are_enough_and_keep_clear_of_the_pad(high: int) -> None:
    runner = batch_runner(ids=gk.BufferSpec((BATCH, 2), torch.uint8, pad=0, valid=(0, high)))
    dispatch = runner.dispatch(batch=20)
    for inputs in seen(strategies.inputs_for(runner, dispatch, ways=["array"]), 40):
        ids = inputs["ids"].flatten().tolist()
        allowed = set(range(1, high)) or {0}
        assert set(ids) <= allowed
        assert len(set(ids)) == min(len(allowed), 40)


def test_the_runners_own_example_is_kept_to() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(
        x=gk.BufferSpec((BATCH,), torch.float32, pad=0),
        lengths=gk.BufferSpec((BATCH,), torch.int64, pad=1),
    )
    runner = group.runner(
        "r",
        lambda x, lengths: x / lengths,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 8)),
        example=lambda bucket: {"lengths": np.arange(1, bucket["batch"] + 1)},
    )
    for ((batch, inputs),) in seen(strategies.histories(runner, max_size=1), 60):
        size = batch.sizes["batch"]
        assert np.asarray(inputs["lengths"]).tolist() == list(range(1, size + 1))


def starts_runner() -> gk.GraphRunner:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(
        starts=gk.BufferSpec((REQS + 1,), torch.int32, pad=gk.repeat_last),
        x=gk.BufferSpec((TOKENS,), torch.float32, pad=0),
    )
    policy = gk.Policy(
        [
            *decode_policy().routes,
            gk.Route(gk.FULL, gk.Buckets.varlen(REQS, TOKENS, max_query_len=5, sizes=[8])),
        ]
    )
    return group.runner("s", lambda starts, x: x + starts[0], policy=policy)


def test_row_boundaries_ascend_to_the_tokens_and_keep_what_is_stated() -> None:
    runner = starts_runner()
    history = strategies.histories(runner, ways=["tensor"], max_size=1)
    uneven = 0
    for ((batch, inputs),) in seen(history, 300):
        starts = inputs["starts"]
        lengths = starts.diff().tolist()
        assert starts[0] == 0
        assert starts[-1] == batch.sizes["tokens"]
        assert min(lengths, default=0) >= 0
        if batch.query_len is not None:
            assert set(lengths) <= {batch.query_len}
        if batch.max_query_len is not None:
            assert max(lengths, default=0) <= batch.max_query_len
        uneven += len(set(lengths)) > 2
    assert uneven


def test_what_is_given_takes_the_place_of_what_is_drawn() -> None:
    runner = batch_runner(ids=gk.BufferSpec((BATCH,), torch.int64, pad=0))
    dispatch = runner.dispatch(batch=3)
    given_ = {
        "x": np.ones((3, 2), np.float32),
        "ids": lambda d: st.sampled_from([[d.sizes["batch"]] * 3, [7, 8, 9]]),
    }
    found = seen(strategies.inputs_for(runner, dispatch, given=given_), 30)
    assert all(inputs["x"] is given_["x"] for inputs in found)
    assert {tuple(inputs["ids"]) for inputs in found} == {(3, 3, 3), (7, 8, 9)}


def test_residents_are_drawn_beside_the_inputs() -> None:
    group = gk.GraphGroup("cpu")
    group.buffers.declare(
        x=gk.BufferSpec((BATCH,), torch.float32, pad=0),
        state=gk.BufferSpec((BATCH, 2), torch.bfloat16, pad=0),
    )
    runner = group.runner(
        "r",
        lambda x, state: state.sum(1) + x,
        policy=gk.Policy.full(gk.Buckets.of(BATCH, 8)),
        inputs={"state": gk.Resident("state")},
    )
    dispatch = runner.dispatch(batch=3)
    assert list(find(strategies.inputs_for(runner, dispatch), lambda _: True)) == ["x"]
    found = seen(strategies.residents_for(runner, dispatch), 20)
    assert {(tuple(r["state"].shape), r["state"].dtype) for r in found} == {
        ((3, 2), torch.bfloat16)
    }


# -- histories ----------------------------------------------------------------------------------


def test_histories_shrink_to_the_shortest_of_the_least_batches() -> None:
    runner = batch_runner()

    def falls(history: list[tuple[strategies.Batch, dict[str, Any]]]) -> bool:
        """A smaller batch after one of more than six rows."""
        sizes = [batch.sizes["batch"] for batch, _ in history]
        return any(b < a and a > 6 for a, b in itertools.pairwise(sizes))

    least = find(strategies.histories(runner), falls, settings=finding)
    assert [repr(batch) for batch, _ in least] == ["Batch(batch=7)", "Batch(batch=0)"]
    assert not np.asarray(least[0][1]["x"]).any()


# -- a batch in words ---------------------------------------------------------------------------


def test_a_batch_is_what_dispatch_is_given() -> None:
    batch = strategies.Batch({"reqs": 2, "tokens": 8}, query_len=4)
    assert batch.named == {"reqs": 2, "tokens": 8, "query_len": 4}
    assert repr(batch) == "Batch(reqs=2, tokens=8, query_len=4)"


# -- what they don't take -----------------------------------------------------------------------


def test_unknown_names_and_ways_are_refused_where_they_are_given() -> None:
    runner = batch_runner()
    dispatch = runner.dispatch(batch=3)
    nope: Any = {"given": {"nope": 1}}
    words = (
        "given= has 'nope', which runner '.*' isn't fed and has no resident buffer for; it takes x"
    )
    for make in (strategies.inputs_for, strategies.residents_for):
        with pytest.raises(gk.SpecError, match=words):
            make(runner, dispatch, **nope)
    with pytest.raises(gk.SpecError, match=words):
        strategies.histories(runner, **nope)
    for ways, message in (
        (["array", "tensr"], "ways= has no 'tensr'; it takes array, tensor, list, "),
        ("tensor", r"takes a sequence, got the string 'tensor'; write \['tensor'\]"),
    ):
        with pytest.raises(gk.SpecError, match=message):
            strategies.inputs_for(runner, dispatch, ways=ways)
        with pytest.raises(gk.SpecError, match=message):
            strategies.histories(runner, ways=ways)
