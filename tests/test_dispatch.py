from __future__ import annotations

import inspect
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graphkit.dims import Dim, at_most
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
    BucketError,
    DispatchError,
    GraphkitError,
    InputError,
    SpecError,
    UnreachableBucketWarning,
)
from graphkit.testing import strategies

reqs, tokens, pages = Dim("reqs", 256), Dim("tokens", 2048), Dim("pages", 512)
batch = Dim("batch", 64)

quiet = pytest.mark.filterwarnings("ignore::graphkit.errors.UnreachableBucketWarning")


def verify(**options: Any) -> Dispatcher:
    """A target model's runner: uniform decode of 4 tokens, and whatever else up to 512 tokens."""
    policy = Policy.full_and_piecewise(
        Buckets.uniform(reqs, tokens, query_len=4),
        Buckets.ladder(tokens, upto=512, reqs=at_most(tokens)),
    )
    return Dispatcher(policy, [reqs, tokens, pages], **options)


# -- the cases


def test_an_eager_policy_takes_the_dims_that_it_is_told():
    reqs, tokens = Dim("reqs", 8), Dim("tokens", 32)
    dispatcher = Dispatcher(Policy.eager(tokens), [reqs])
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    assert (answer.mode, dict(answer.sizes)) == (EAGER, {"reqs": 3, "tokens": 12})
    with pytest.raises(SpecError, match="further dims of a policy are Dims, got 3"):
        Policy.eager(3)


def test_d1_a_prompt_of_four_tokens_is_no_decode():
    dispatcher = verify()
    prompt = dispatcher.dispatch(reqs=1, tokens=4)
    assert (prompt.mode, prompt.reason) == (PIECEWISE, Reason.NOT_UNIFORM)
    assert not prompt.is_fallback
    decode = dispatcher.dispatch(reqs=1, tokens=4, query_len=4)
    assert (decode.mode, decode.reason) == (FULL, None)


@quiet
@settings(deadline=None)
@given(data=st.data())
def test_d2_every_captured_bucket_is_reached_at_its_own_size(data):
    """By itself, or by one that holds the batch in a better mode or at the same cost or less."""
    dispatcher = data.draw(strategies.dispatchers())
    for mode, bucket in dispatcher.captured:
        longest = bucket.max_query_len if bucket.query_len is None else None
        answer = dispatcher.dispatch(
            **bucket.sizes, query_len=bucket.query_len, max_query_len=longest
        )
        assert answer.bucket is not None
        assert answer.bucket.fits(bucket.sizes)
        assert answer.mode.rank <= mode.rank
        if answer.mode is mode:
            assert cost(dispatcher, answer.bucket) <= cost(dispatcher, bucket)
        if (mode, bucket) not in dispatcher.unreachable and dispatcher.captured == (
            dispatcher.graphs
        ):
            assert (answer.mode, answer.bucket) == (mode, bucket) or any(
                route.max_padding is not None for route in dispatcher.policy.routes
            )


def test_d2_exactly_itself():
    dispatcher = verify()
    for mode, bucket in dispatcher.graphs:
        answer = dispatcher.dispatch(**bucket.sizes, query_len=bucket.query_len)
        assert (answer.mode, answer.bucket) == (mode, bucket)
        assert set(answer.padding.values()) == {0}


def test_d3_the_better_mode_though_the_other_has_less_padding():
    policy = Policy(
        [
            Route(PIECEWISE, Buckets.of(tokens, 1, 2, 4, 8, 16, 24, reqs=at_most(tokens))),
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=3, tokens_sizes=[3, 6, 9, 18, 24])),
        ],
        # By tokens alone the PIECEWISE bucket of 16 is the cheaper one.
        cost=lambda bucket: bucket["tokens"],
    )
    answer = Dispatcher(policy).dispatch(reqs=4, tokens=12, query_len=3)
    assert answer.mode is FULL
    assert answer.bucket is not None
    assert answer.bucket["tokens"] == 18


def test_d4_97_of_100():
    answer = Dispatcher(Policy.full(Buckets.ladder(Dim("batch", 100)))).dispatch(batch=97)
    assert answer.bucket == Bucket({"batch": 100})


def test_d7_the_capture_of_16_failed():
    dispatcher = Dispatcher(Policy.full(Buckets.of(batch, 1, 2, 4, 8, 16)))
    dispatcher.forget(FULL, Bucket({"batch": 16}))
    answer = dispatcher.dispatch(batch=12)
    assert (answer.mode, answer.bucket, answer.reason) == (EAGER, None, Reason.NOT_CAPTURED)
    assert answer.is_fallback
    assert dispatcher.dispatch(batch=8).mode is FULL
    dispatcher.mark_captured(FULL, Bucket({"batch": 16}))
    assert dispatcher.dispatch(batch=12).mode is FULL


def test_d8_counters_and_strict():
    wide = Dim("tokens", 8192)
    policy = Policy.full(Buckets.ladder(wide, upto=512))
    dispatcher = Dispatcher(policy)
    for size in (3, 9, 9, 4096):
        dispatcher.dispatch(tokens=size)
    counts = {
        (count.mode, str(count.bucket), count.reason): (
            count.dispatches,
            count.rows["tokens"],
            count.padding["tokens"],
        )
        for count in dispatcher.counts
    }
    assert counts == {
        (FULL, "tokens=4", None): (1, 3, 1),
        (FULL, "tokens=16", None): (2, 18, 14),
        (EAGER, "None", Reason.ABOVE_MAX): (1, 4096, 0),
    }
    assert dispatcher.counts[0].dispatches == 2

    strict = Dispatcher(policy, strict=True, name="target")
    message = (
        "runner 'target': strict, and the batch would fall back: EAGER for tokens=4096: "
        "ABOVE_MAX, the batch is above every bucket that accepts its kind"
    )
    for _ in range(2):
        with pytest.raises(DispatchError, match=re.escape(message)):
            strict.dispatch(tokens=4096)
    assert [(c.dispatches, c.reason) for c in strict.counts] == [(2, Reason.ABOVE_MAX)]
    assert strict.dispatch(tokens=4096, eager="too large").reason is Reason.CALLER
    assert strict.dispatch(tokens=9).mode is FULL


@pytest.mark.parametrize("integer", [np.int8, np.int32, np.int64, np.uint16])
def test_d9_numpy_integers_find_the_same_answer(integer):
    dispatcher = verify()
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    assert dispatcher.dispatch(reqs=integer(3), tokens=integer(12), query_len=4) is answer
    assert dispatcher.dispatch(reqs=3, tokens=12, query_len=integer(4)) is answer
    assert all(type(size) is int for size in answer.sizes.values())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3.0, "the size of dim 'reqs' must be an int, got 3.0 (float)"),
        (True, "the size of dim 'reqs' must be an int, got True (bool)"),
        (np.bool_(True), "the size of dim 'reqs' must be an int, got"),
        (np.float64(3), "the size of dim 'reqs' must be an int, got"),
        ("3", "the size of dim 'reqs' must be an int, got '3' (str)"),
        (-1, "the size of dim 'reqs' must be at least 0, got -1"),
        ([3], "the size of dim 'reqs' must be an int, got [3] (list)"),
        (257, "reqs=257 is above the maximum 256 of dim 'reqs'"),
    ],
)
def test_d9_what_is_no_size_is_refused_though_it_hashes_like_one(value, message):
    dispatcher = verify(name="target")
    for known in (1, 3):
        dispatcher.dispatch(reqs=known, tokens=12)
    with pytest.raises(InputError, match=re.escape(f"runner 'target': {message}")):
        dispatcher.dispatch(reqs=value, tokens=12)


def test_d10_two_query_lengths_side_by_side():
    policy = Policy(
        [
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=2)),
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=5)),
        ]
    )
    dispatcher = Dispatcher(policy)
    for query_len in (2, 5):
        answer = dispatcher.dispatch(reqs=10, tokens=10 * query_len, query_len=query_len)
        assert answer.mode is FULL
        assert answer.bucket is not None
        assert answer.bucket.query_len == query_len
    answer = dispatcher.dispatch(reqs=10, tokens=30, query_len=3)
    assert (answer.mode, answer.reason) == (EAGER, Reason.NOT_UNIFORM)


def test_d10_varlen_takes_what_is_stated_and_within_its_bound():
    dispatcher = Dispatcher(Policy.full(Buckets.varlen(reqs, tokens, max_query_len=4)))
    for stated in ({"max_query_len": 4}, {"max_query_len": 3}, {"query_len": 3}):
        answer = dispatcher.dispatch(reqs=2, tokens=6, **stated)
        assert answer.mode is FULL
        assert answer.bucket is not None
        assert answer.bucket.max_query_len == 4
    for stated in ({}, {"max_query_len": 5}, {"query_len": 6}):
        answer = dispatcher.dispatch(reqs=1, tokens=6 if stated.get("query_len") else 4, **stated)
        assert (answer.mode, answer.reason) == (EAGER, Reason.QUERY_TOO_LONG)


def test_d10_piecewise_under_full_is_warned_of_and_serves_when_a_capture_fails():
    policy = Policy([Route(FULL, Buckets.powers(batch)), Route(PIECEWISE, Buckets.powers(batch))])
    message = (
        "runner 'target': PIECEWISE [batch=1; batch=2; batch=4; and 4 more] can't be reached while "
        "the FULL ones that take the same are captured. Drop them, or keep them for when a capture "
        "fails."
    )
    with pytest.warns(UnreachableBucketWarning, match=re.escape(message)) as caught:
        dispatcher = Dispatcher(policy, name="target")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for _, bucket in dispatcher.graphs[:7]:
        if bucket["batch"] >= 8:
            dispatcher.forget(FULL, bucket)
    answer = dispatcher.dispatch(batch=7)
    assert (answer.mode, answer.reason) == (PIECEWISE, Reason.NOT_CAPTURED)
    assert answer.is_fallback
    assert dispatcher.dispatch(batch=3).mode is FULL


# -- the answer


def test_the_answer_says_all():
    answer = verify().dispatch(reqs=3, tokens=12, query_len=4)
    assert answer.mode is FULL
    assert str(answer.bucket) == "reqs=4 tokens=16 pages=512 query_len=4"
    assert dict(answer.sizes) == {"reqs": 3, "tokens": 12, "pages": 512}
    assert dict(answer.padding) == {"reqs": 1, "tokens": 4, "pages": 0}
    assert (answer.query_len, answer.max_query_len) == (4, 4)
    assert str(answer) == (
        "FULL reqs=4 tokens=16 pages=512 query_len=4 for reqs=3 tokens=12 pages=512"
    )
    with pytest.raises(AttributeError):
        answer.mode = EAGER  # type: ignore[misc]


def test_equal_batches_have_one_answer_and_answers_compare_by_identity():
    dispatcher = verify()
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    assert dispatcher.dispatch(tokens=12, query_len=4, reqs=3) is answer
    assert dispatcher.dispatch(reqs=3, tokens=12) is not answer
    assert answer != verify().dispatch(reqs=3, tokens=12, query_len=4)
    assert isinstance(hash(answer), int)


def test_the_empty_batch_is_ordinary():
    answer = verify().dispatch(reqs=0, tokens=0, query_len=4)
    assert (answer.mode, answer.reason) == (FULL, None)
    assert answer.bucket is not None
    assert answer.bucket["reqs"] == 1
    assert answer.padding["tokens"] == 4


def test_eager_is_the_callers_own_reason():
    dispatcher = verify()
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4, eager="cascade attention")
    assert (answer.mode, answer.bucket, answer.reason) == (EAGER, None, Reason.CALLER)
    assert answer.detail == "cascade attention"
    assert not answer.is_fallback
    assert dict(answer.padding) == {"reqs": 0, "tokens": 0, "pages": 0}
    assert str(answer).endswith("CALLER, cascade attention")
    again = dispatcher.dispatch(reqs=3, tokens=12, query_len=4, eager="cascade attention")
    assert again is answer
    assert dispatcher.dispatch(reqs=3, tokens=12, query_len=4).mode is FULL
    for wrong in (True, "", 3):
        with pytest.raises(InputError, match="eager is the reason in words"):
            dispatcher.dispatch(reqs=3, tokens=12, eager=wrong)


def test_tokens_may_be_left_out_where_a_varlen_route_ties_them():
    dispatcher = Dispatcher(Policy.full(Buckets.varlen(reqs, tokens, max_query_len=4)))
    assert dispatcher.dispatch(reqs=3, query_len=2).sizes["tokens"] == 6
    with pytest.raises(InputError, match="the size of dim 'tokens' isn't given"):
        dispatcher.dispatch(reqs=3, max_query_len=2)


def test_tokens_may_be_left_out_where_a_uniform_route_ties_them():
    dispatcher = verify()
    assert dict(dispatcher.dispatch(reqs=3, query_len=4).sizes) == {
        "reqs": 3,
        "tokens": 12,
        "pages": 512,
    }
    with pytest.raises(InputError, match=r"the size of dim 'tokens' isn't given; give tokens="):
        dispatcher.dispatch(reqs=3)
    with pytest.raises(InputError, match=r"the size of dim 'reqs' isn't given"):
        dispatcher.dispatch(tokens=12, query_len=4)
    with pytest.raises(InputError, match="tokens=2304 is above the maximum 2048 of dim 'tokens'"):
        dispatcher.dispatch(reqs=256, query_len=9)


def test_a_dim_at_its_maximum_in_every_bucket_may_be_left_out():
    dispatcher = verify()
    assert dispatcher.dispatch(reqs=3, tokens=12).sizes["pages"] == 512
    assert dispatcher.dispatch(reqs=3, tokens=12, pages=7).sizes["pages"] == 7
    narrow = Dispatcher(Policy.full(Buckets.powers(tokens, pages=64)), [tokens, pages])
    with pytest.raises(InputError, match="the size of dim 'pages' isn't given"):
        narrow.dispatch(tokens=8)
    assert narrow.dispatch(tokens=8, pages=65).reason is Reason.ABOVE_MAX


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"rows": 3}, "dispatch got 'rows', which is no dim; the dims are reqs, tokens, pages"),
        (
            {"tokens": 13, "query_len": 4},
            "tokens=13 contradicts reqs=3 with query_len=4, which is 12",
        ),
        (
            {"tokens": 13, "max_query_len": 4},
            "tokens=13 contradicts reqs=3 with max_query_len=4, which is at most 12",
        ),
        (
            {"tokens": 12, "query_len": 4, "max_query_len": 3},
            "tokens=12 contradicts reqs=3 with max_query_len=3, which is at most 9",
        ),
        (
            {"reqs": 0, "tokens": 0, "query_len": 4, "max_query_len": 3},
            "max_query_len=3 contradicts query_len=4",
        ),
        ({"tokens": 12, "query_len": 0}, "query_len must be at least 1, got 0"),
        ({"tokens": 12, "query_len": 4.0}, "query_len must be an int, got 4.0 (float)"),
        ({"tokens": 12, "max_query_len": True}, "max_query_len must be an int, got True (bool)"),
        ({"tokens": 12, "variant": {"n": 1}}, "variant 'n' is not the policy's; its variants are"),
        ({"tokens": 12, "variant": 3}, "variant must map names to values, got 3 (int)"),
    ],
)
def test_what_contradicts_itself_is_refused(call, message):
    dispatcher = verify()
    dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    with pytest.raises(InputError, match=re.escape(message)):
        dispatcher.dispatch(**{"reqs": 3, **call})


def test_above_every_bucket_within_the_maxima():
    answer = verify().dispatch(reqs=200, tokens=513)
    assert (answer.mode, answer.reason) == (EAGER, Reason.ABOVE_MAX)
    assert answer.is_fallback


@pytest.mark.parametrize("count", range(7))
def test_any_number_of_dims(count):
    dims = [Dim(f"dim{place}", 8) for place in range(count)]
    buckets = Buckets.grid(*[{dim: (4, 8)} for dim in dims]) if dims else Buckets.fixed()
    dispatcher = Dispatcher(Policy.full(buckets), dims)
    sizes = {dim.name: 3 for dim in dims}
    answer = dispatcher.dispatch(**sizes)
    assert dispatcher.dispatch(**sizes) is answer
    assert answer.mode is FULL
    assert answer.bucket == Bucket({dim.name: 4 for dim in dims})
    assert [c.dispatches for c in dispatcher.counts] == [2]
    for name in ("query_len", "max_query_len"):
        dispatcher.dispatch(**sizes, **{name: 1})
        for wrong in (True, 1.0):
            with pytest.raises(InputError, match=f"{name} must be an int, got {wrong}"):
                dispatcher.dispatch(**sizes, **{name: wrong})
    with pytest.raises(InputError, match=r"'other', which is no dim; the dims are (dim0|none)"):
        dispatcher.dispatch(**sizes, other=3)
    for place, dim in enumerate(dims):
        # Asked for first, so that what hashes alike would find the answer.
        dispatcher.dispatch(**{**sizes, dim.name: 1})
        for wrong in (True, 3.0):
            with pytest.raises(InputError, match=f"must be an int, got {wrong}"):
                dispatcher.dispatch(**{**sizes, dim.name: wrong})
        larger = dispatcher.dispatch(**{**sizes, dim.name: 5}).bucket
        assert larger is not None
        assert list(larger.sizes.values()) == [8 if place == p else 4 for p in range(count)]
    parameters = inspect.signature(dispatcher.dispatch).parameters
    assert list(parameters)[: count + 4] == [
        *sizes,
        "query_len",
        "max_query_len",
        "variant",
        "eager",
    ]
    with pytest.raises(TypeError, match="positional"):
        dispatcher.dispatch(3)


@pytest.mark.parametrize("name", ["memo", "entry", "type", "int", "miss", "a", "others", "self"])
def test_a_dim_may_have_any_name(name):
    dispatcher = Dispatcher(Policy.full(Buckets.powers(Dim(name, 8))))
    first = dispatcher.dispatch(**{name: 3})
    assert first.bucket == Bucket({name: 4})
    assert dispatcher.dispatch(**{name: 3}) is first


def test_dispatchers_do_not_share_answers():
    one, other = (Dispatcher(Policy.full(Buckets.of(batch, size))) for size in (8, 16))
    for _ in range(2):
        assert one.dispatch(batch=3).bucket == Bucket({"batch": 8})
        assert other.dispatch(batch=3).bucket == Bucket({"batch": 16})


# -- cost, padding, ties


def test_the_default_cost_is_the_product_over_the_dims_that_vary():
    length = Dim("length", 512)
    grid = Buckets.grid({batch: (1, 8), length: (64, 512)}, where=lambda batch, length: batch == 8)
    other = Buckets.grid({batch: (2,), length: (512,)})
    dispatcher = Dispatcher(Policy([Route(FULL, grid), Route(FULL, other)]))
    answer = dispatcher.dispatch(batch=1, length=64)
    assert answer.bucket == Bucket({"batch": 8, "length": 64})
    by_rows = Policy(dispatcher.policy.routes, cost=lambda bucket: bucket["batch"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachableBucketWarning)
        answer = Dispatcher(by_rows).dispatch(batch=1, length=64)
    assert answer.bucket == Bucket({"batch": 2, "length": 512})


def test_ties_go_to_fewer_rows_of_the_first_dim_and_then_to_the_first_route():
    wide, tall = Buckets.grid({batch: (8,), pages: (2,)}), Buckets.grid({batch: (2,), pages: (8,)})
    dispatcher = Dispatcher(Policy([Route(FULL, wide), Route(FULL, tall)]), [batch, pages])
    assert dispatcher.dispatch(batch=1, pages=1).bucket == Bucket({"batch": 2, "pages": 8})
    twice = Policy([Route(FULL, Buckets.of(batch, 8)), Route(FULL, Buckets.of(batch, 8))])
    assert Dispatcher(twice).graphs == ((FULL, Bucket({"batch": 8})),)


@pytest.mark.parametrize("cost", [lambda bucket: "much", lambda bucket: math.nan, lambda _: None])
def test_a_cost_is_a_number(cost):
    policy = Policy([Route(FULL, Buckets.of(batch, 8))], cost=cost)
    with pytest.raises(SpecError, match=r"cost= must return a number, got .* for bucket batch=8"):
        Dispatcher(policy)


def test_max_padding_in_rows():
    policy = Policy([Route(FULL, Buckets.of(batch, 16, 64), max_padding=8)])
    dispatcher = Dispatcher(policy)
    assert dispatcher.dispatch(batch=8).mode is FULL
    answer = dispatcher.dispatch(batch=7)
    assert (answer.mode, answer.reason) == (EAGER, Reason.EXCESS_PADDING)
    assert dispatcher.dispatch(batch=17).reason is Reason.EXCESS_PADDING
    assert dispatcher.dispatch(batch=56).mode is FULL


def test_max_padding_as_a_share():
    policy = Policy([Route(FULL, Buckets.of(batch, 1, 16), max_padding=0.25)])
    dispatcher = Dispatcher(policy)
    assert dispatcher.dispatch(batch=12).mode is FULL
    assert dispatcher.dispatch(batch=11).reason is Reason.EXCESS_PADDING
    assert dispatcher.dispatch(batch=0).mode is FULL


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (1.0, "max_padding=1.0 as a float is a share of the bucket, at least 0 and below 1"),
        (-0.5, "max_padding=-0.5 as a float is a share"),
        (math.nan, "max_padding=nan as a float is a share"),
        (True, "max_padding must be an int, got True (bool)"),
        (-1, "max_padding must be at least 0, got -1"),
        ("8", "max_padding must be an int, got '8' (str)"),
    ],
)
def test_max_padding_is_rows_or_a_share(limit, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        Route(FULL, Buckets.of(batch, 8), max_padding=limit)


# -- what is captured


def test_nothing_is_captured_for_a_runner_at_first():
    dispatcher = verify(captured=())
    assert dispatcher.captured == ()
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    assert (answer.mode, answer.reason) == (EAGER, Reason.NOT_CAPTURED)
    for mode, bucket in dispatcher.graphs:
        if mode is PIECEWISE:
            dispatcher.mark_captured(mode, bucket)
    answer = dispatcher.dispatch(reqs=3, tokens=12, query_len=4)
    assert (answer.mode, answer.reason) == (PIECEWISE, Reason.NOT_CAPTURED)
    assert answer.is_fallback
    mode, bucket = dispatcher.graphs[2]
    dispatcher.mark_captured(mode, bucket)
    assert dispatcher.is_captured(mode, bucket)
    assert dispatcher.dispatch(reqs=3, tokens=12, query_len=4).bucket == bucket
    dispatcher.clear_captured()
    assert dispatcher.dispatch(reqs=3, tokens=12, query_len=4).mode is EAGER
    assert sum(count.dispatches for count in dispatcher.counts) == 4
    dispatcher.reset_counts()
    assert dispatcher.counts == ()


def test_a_larger_bucket_of_the_same_mode_is_no_fallback():
    dispatcher = Dispatcher(Policy.full(Buckets.powers(batch)), strict=True)
    dispatcher.forget(FULL, Bucket({"batch": 8}))
    answer = dispatcher.dispatch(batch=7)
    assert (answer.bucket, answer.reason) == (Bucket({"batch": 16}), None)


@pytest.mark.parametrize("call", ["mark_captured", "forget"])
def test_what_is_no_graph_can_not_be_captured(call):
    dispatcher = Dispatcher(Policy.full(Buckets.powers(batch)))
    for mode, size in ((PIECEWISE, 8), (FULL, 9)):
        message = f"{mode} batch={size} is no graph of the policy"
        with pytest.raises(BucketError, match=message):
            getattr(dispatcher, call)(mode, Bucket({"batch": size}))


@pytest.mark.parametrize("reason", [Reason.SUSPENDED, Reason.STALE])
def test_a_state_makes_everything_eager(reason):
    dispatcher = Dispatcher(Policy.full(Buckets.powers(batch)))
    assert dispatcher.dispatch(batch=3).mode is FULL
    dispatcher.set_reason(reason)
    answer = dispatcher.dispatch(batch=3)
    assert (answer.mode, answer.reason, answer.is_fallback) == (EAGER, reason, True)
    assert dispatcher.dispatch(batch=3, eager="mine").reason is Reason.CALLER
    dispatcher.set_reason(None)
    assert dispatcher.dispatch(batch=3).mode is FULL
    with pytest.raises(SpecError, match=r"SUSPENDED, STALE or None, got Reason\.CALLER"):
        dispatcher.set_reason(Reason.CALLER)


def test_the_memo_is_bounded_and_loses_no_count():
    wide = Dim("rows", 200_000)
    dispatcher = Dispatcher(Policy.full(Buckets.of(wide, 200_000)))
    for size in range(70_000):
        dispatcher.dispatch(rows=size)
    assert len(dispatcher._memo) <= 65_536
    (count,) = dispatcher.counts
    assert count.dispatches == 70_000
    assert count.rows["rows"] == sum(range(70_000))


# -- warnings


def test_decode_and_mixed_are_both_reachable():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify()


def test_a_route_with_a_limit_leaves_the_other_reachable():
    limited = Route(FULL, Buckets.powers(batch), max_padding=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dispatcher(Policy([limited, Route(PIECEWISE, Buckets.powers(batch))]))


def test_a_cost_that_prefers_the_largest_hides_the_rest():
    policy = Policy([Route(FULL, Buckets.of(batch, 8, 16))], cost=lambda bucket: -bucket["batch"])
    with pytest.warns(UnreachableBucketWarning, match=r"FULL \[batch=8\] can't be reached"):
        Dispatcher(policy)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_warned_of_is_what_no_batch_reaches(data):
    count, rows = Dim("reqs", 5), Dim("tokens", 10)
    policy = data.draw(strategies.policies(count, rows))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dispatcher = Dispatcher(policy, [count, rows])
    reached = set()
    for a in range(count.maximum + 1):
        for b in range(rows.maximum + 1):
            kinds: list[dict[str, int]] = [{}]
            kinds += [{"max_query_len": q} for q in range(1, 7) if a * q >= b]
            kinds += [{"query_len": q} for q in range(1, 7) if a * q == b]
            for kind in kinds:
                answer = dispatcher.dispatch(reqs=a, tokens=b, **kind)
                reached.add((answer.mode, answer.bucket))
    lost = {graph for graph in dispatcher.graphs if graph not in reached}
    assert bool(caught) == bool(dispatcher.unreachable)
    if any(route.max_padding is not None for route in policy.routes):
        # A limit can hide a bucket in ways that aren't looked for.
        assert lost.issuperset(dispatcher.unreachable)
    else:
        assert lost == set(dispatcher.unreachable)


# -- policies


def test_presets():
    decode, mixed = Buckets.uniform(reqs, tokens, query_len=1), Buckets.ladder(tokens)
    assert Policy.eager().routes == ()
    assert Policy.full(mixed).routes == (Route(FULL, mixed),)
    assert Policy.piecewise(mixed).routes == (Route(PIECEWISE, mixed),)
    assert Policy.full_decode_only(decode).routes == (Route(FULL, decode),)
    both = Policy.full_and_piecewise(decode, mixed)
    assert both.routes == (Route(FULL, decode), Route(PIECEWISE, mixed))
    assert list(both.dims) == ["reqs", "tokens"]
    for preset in (Policy.full_decode_only, lambda b: Policy.full_and_piecewise(b, mixed)):
        with pytest.raises(SpecError, match=r"needs uniform decode buckets, got ladder\(tokens\)"):
            preset(mixed)


def test_no_routes_no_graphs_and_no_fallback():
    dispatcher = Dispatcher(Policy.eager(), [batch], strict=True)
    answer = dispatcher.dispatch(batch=3, variant={"n": 1})
    assert (answer.mode, answer.reason) == (EAGER, Reason.EAGER_POLICY)
    assert dict(answer.variant) == {"n": 1}
    assert dispatcher.graphs == ()


@pytest.mark.parametrize(
    ("support", "modes"),
    [
        (Support.ALWAYS, [FULL, FULL, FULL]),
        (Support.UNIFORM, [FULL, FULL, PIECEWISE]),
        (Support.SINGLE_TOKEN, [FULL, PIECEWISE, PIECEWISE]),
        (Support.NEVER, [PIECEWISE, PIECEWISE, PIECEWISE]),
    ],
)
def test_resolve_leaves_no_full_route_that_is_not_supported(support, modes):
    policy = Policy(
        [
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=1)),
            Route(FULL, Buckets.uniform(reqs, tokens, query_len=4), max_padding=3),
            Route(FULL, Buckets.ladder(tokens)),
        ]
    )
    resolved, downgrades = policy.resolve(support)
    assert [route.mode for route in resolved.routes] == modes
    assert [d.route for d in downgrades] == [
        route for route, mode in zip(policy.routes, modes, strict=True) if mode is PIECEWISE
    ]
    assert resolved.routes[1].max_padding == 3
    if not downgrades:
        assert resolved is policy


def test_a_downgrade_is_said_in_words():
    ladder = Buckets.ladder(tokens)
    _, (downgrade,) = Policy.full(ladder).resolve(Support.UNIFORM)
    assert str(downgrade) == (
        "route FULL ladder(tokens) runs PIECEWISE: "
        "what the runner calls supports FULL graphs for uniform batches"
    )
    both = Policy([Route(FULL, ladder), Route(PIECEWISE, ladder)])
    resolved, (downgrade,) = both.resolve(Support.NEVER)
    assert resolved.routes == (Route(PIECEWISE, ladder),)
    assert downgrade.mode is None
    assert "is dropped for the PIECEWISE route over the same" in str(downgrade)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Route(EAGER, Buckets.powers(batch)), "EAGER needs no route"),
        (lambda: Route("FULL", Buckets.powers(batch)), "mode is FULL or PIECEWISE, got 'FULL'"),
        (lambda: Route(FULL, [8]), "a route needs Buckets, as Buckets.powers(batch), got [8]"),
        (lambda: Route(FULL, Buckets.powers(batch), variants={}), "variants are Variants(...)"),
        (lambda: Policy([Buckets.powers(batch)]), "a policy needs routes, as Route(FULL, bucke"),
        (lambda: Policy("FULL"), "a policy needs a list of routes, got 'FULL'"),
        (lambda: Policy(3), "a policy needs a list of routes, got 3"),
        (lambda: Policy([], cost=3), "cost must be a function of a Bucket, got 3"),
        (lambda: Policy.full(8), "a route needs Buckets"),
        (lambda: Dispatcher([]), "a dispatcher needs a Policy, got []"),
        (
            lambda: Policy(
                [
                    Route(FULL, Buckets.of(batch, 8), variants=Variants(n=(1, 2))),
                    Route(PIECEWISE, Buckets.of(batch, 8)),
                ]
            ),
            "routes FULL of(batch) and PIECEWISE of(batch) have different variants (n; none)",
        ),
        (
            lambda: Policy(
                [Route(FULL, Buckets.of(batch, 8)), Route(FULL, Buckets.of(Dim("batch", 9), 8))]
            ),
            "dim 'batch' is declared with maximum 64 and with maximum 9",
        ),
    ],
)
def test_policies_are_checked_where_they_are_made(make, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


# -- variants


def test_variants_are_rounded_up_and_made_one_graph_each():
    variants = Variants(num_loras=round_up(4, 0, 1), cascade=(False, True))
    dispatcher = Dispatcher(Policy([Route(FULL, Buckets.of(batch, 8), variants=variants)]))
    assert len(dispatcher.graphs) == 6
    for asked, made in ((0, 0), (1, 1), (2, 4), (4, 4), (np.int64(3), 4)):
        answer = dispatcher.dispatch(batch=3, variant={"num_loras": asked, "cascade": True})
        assert dict(answer.variant) == {"num_loras": made, "cascade": True}
        assert answer.bucket is not None
        assert answer.bucket.variant == answer.variant
    answer = dispatcher.dispatch(batch=3, variant={"num_loras": 5, "cascade": np.bool_(True)})
    assert (answer.mode, answer.reason) == (EAGER, Reason.UNKNOWN_VARIANT)
    assert dict(answer.variant) == {"num_loras": 5, "cascade": True}
    for wrong in (1, "yes", None):
        answer = dispatcher.dispatch(batch=3, variant={"num_loras": 1, "cascade": wrong})
        assert answer.reason is Reason.UNKNOWN_VARIANT
    assert dispatcher.dispatch(batch=64, variant={"num_loras": 1, "cascade": True}).reason is (
        Reason.ABOVE_MAX
    )


def test_a_variant_that_is_not_captured_is_rounded_further_up():
    variants = Variants(n=round_up(1, 4))
    dispatcher = Dispatcher(Policy([Route(FULL, Buckets.of(batch, 8), variants=variants)]))
    dispatcher.forget(FULL, Bucket({"batch": 8}, variant={"n": 1}))
    assert dict(dispatcher.dispatch(batch=3, variant={"n": 1}).variant) == {"n": 4}


def test_equal_variants_of_other_types_are_told_apart():
    variants = Variants(n=(1, True))
    dispatcher = Dispatcher(Policy([Route(FULL, Buckets.of(batch, 8), variants=variants)]))
    for value in (1, True, 1):
        answer = dispatcher.dispatch(batch=3, variant={"n": value})
        assert answer.variant["n"] is value
    assert dispatcher.dispatch(batch=3, variant={"n": 1.0}).reason is Reason.UNKNOWN_VARIANT


def test_variants_must_be_given_and_known():
    variants = Variants(n=round_up(1, 4))
    policy = Policy([Route(FULL, Buckets.of(batch, 8), variants=variants)])
    dispatcher = Dispatcher(policy)
    with pytest.raises(InputError, match=re.escape("variant 'n' isn't given; give variant={'n': ")):
        dispatcher.dispatch(batch=3)
    with pytest.raises(InputError, match="variant 'm' is not the policy's; its variants are n"):
        dispatcher.dispatch(batch=3, variant={"n": 1, "m": 1})
    with pytest.raises(InputError, match="the values of variant must be hashable"):
        dispatcher.dispatch(batch=3, variant={"n": [1]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Variants(), "Variants needs at least one axis"),
        (lambda: Variants(n=()), "variant 'n' has no values"),
        (lambda: Variants(n="abc"), "variant 'n' needs round_up(...) or a tuple of its values"),
        (lambda: Variants(n=3), "variant 'n' needs round_up(...) or a tuple of its values, got 3"),
        (lambda: Variants(n=([],)), "variant 'n' has a value that can't be hashed: []"),
        (lambda: Variants(n=(math.nan,)), "variant 'n' has a value that doesn't equal itself"),
        (lambda: Variants(eager=(1,)), "variant name 'eager' is reserved for an option"),
        (lambda: round_up(), "round_up needs at least one value"),
        (lambda: round_up(1, True), "a value of round_up must be an int, got True (bool)"),
    ],
)
def test_variants_are_checked(make, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


def test_variants_are_values():
    variants = Variants(n=round_up(1, 4), cascade=(False,))
    assert variants == Variants(cascade=(False,), n=round_up(4, 1))
    assert hash(variants) == hash(Variants(cascade=(False,), n=round_up(4, 1)))
    assert variants != Variants(n=round_up(1, 4), cascade=(0,))
    assert repr(variants) == "Variants(n=round_up(1, 4), cascade=(False,))"
    with pytest.raises(AttributeError, match="frozen"):
        variants.axes = {}


# -- against brute force


def cost(dispatcher: Dispatcher, bucket: Bucket) -> int:
    """The product over the dims that vary, told once more."""
    total = 1
    for name in dispatcher.dims:
        if len({other[name] for _, other in dispatcher.graphs}) > 1:
            total *= bucket[name]
    return total


def accepting(dispatcher: Dispatcher, asked: strategies.Batch) -> dict[Mode, set[Bucket]]:
    """Every captured bucket that may serve the batch."""
    longest = asked.query_len if asked.query_len is not None else asked.max_query_len
    found: dict[Mode, set[Bucket]] = {FULL: set(), PIECEWISE: set()}
    for route in dispatcher.policy.routes:
        for bucket in route.resolve(dispatcher.dims):
            if bucket.query_len is not None:
                if asked.query_len != bucket.query_len:
                    continue
            elif bucket.max_query_len is not None and (
                longest is None or longest > bucket.max_query_len
            ):
                continue
            if any(size > bucket[name] for name, size in asked.sizes.items()):
                continue
            first = route.buckets.dims[0].name
            padded, real = bucket[first], asked.sizes[first]
            limit = route.max_padding
            if isinstance(limit, float) and (padded - max(1, real)) / padded > limit:
                continue
            if type(limit) is int and padded - real > limit:
                continue
            if dispatcher.is_captured(route.mode, bucket):
                found[route.mode].add(bucket)
    return found


@quiet
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_answer_is_the_cheapest_of_the_best_mode(data):
    dispatcher = data.draw(strategies.dispatchers())
    count, rows = dispatcher.dims.values()
    for asked in data.draw(st.lists(strategies.batches(count, rows), min_size=1, max_size=5)):
        answer = dispatcher.dispatch(**asked.named)
        found = accepting(dispatcher, asked)
        mode = FULL if found[FULL] else PIECEWISE if found[PIECEWISE] else EAGER
        assert answer.mode is mode
        if mode is EAGER:
            assert answer.bucket is None
            assert answer.reason is not None
            assert answer.is_fallback
            continue
        assert answer.bucket in found[mode]
        assert answer.bucket is not None
        least = min(cost(dispatcher, bucket) for bucket in found[mode])
        assert cost(dispatcher, answer.bucket) == least
        assert answer.bucket["reqs"] == min(
            bucket["reqs"] for bucket in found[mode] if cost(dispatcher, bucket) == least
        )
        assert answer.padding == answer.bucket.padding(asked.sizes)
        if mode is FULL:
            assert answer.reason is None


@quiet
@settings(deadline=None)
@given(data=st.data())
def test_a_smaller_batch_never_costs_more(data):
    dispatcher = data.draw(strategies.dispatchers())
    if any(route.max_padding is not None for route in dispatcher.policy.routes):
        return
    count, rows = dispatcher.dims.values()
    larger = data.draw(strategies.batches(count, rows).filter(lambda b: b.query_len is None))
    smaller = {
        "reqs": larger.sizes["reqs"],
        "tokens": data.draw(st.integers(0, larger.sizes["tokens"])),
        "max_query_len": larger.max_query_len,
    }
    one, other = dispatcher.dispatch(**larger.named), dispatcher.dispatch(**smaller)
    assert other.mode.rank <= one.mode.rank
    if other.mode is one.mode and one.bucket is not None and other.bucket is not None:
        assert cost(dispatcher, other.bucket) <= cost(dispatcher, one.bucket)


@quiet
@settings(deadline=None)
@given(data=st.data())
def test_integers_of_any_kind_are_one_batch(data):
    dispatcher = data.draw(strategies.dispatchers())
    asked = data.draw(strategies.batches(*dispatcher.dims.values()))
    other = {name: data.draw(strategies.as_integer(v)) for name, v in asked.named.items()}
    assert dispatcher.dispatch(**other) is dispatcher.dispatch(**asked.named)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    call=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("reqs", "tokens", "pages", "query_len", "max_query_len", "variant", "eager"),
            strategies.hostile,
        ),
    )
)
def test_hostile_calls_are_answers_or_errors(call):
    dispatcher = SHARED
    try:
        answer = dispatcher.dispatch(**call)
    except GraphkitError:
        return
    assert isinstance(answer, Dispatch)
    assert all(type(size) is int for size in answer.sizes.values())
    assert all(size <= dispatcher.dims[name].maximum for name, size in answer.sizes.items())


SHARED = verify()


class Captures(RuleBasedStateMachine):
    """Whatever was marked and forgotten before, the answer is that of a fresh dispatcher."""

    policy = Policy.full_and_piecewise(
        Buckets.uniform(Dim("reqs", 8), Dim("tokens", 32), query_len=2, sizes=[1, 2, 4, 8]),
        Buckets.of(Dim("tokens", 32), 4, 16, 32, reqs=at_most(Dim("tokens", 32))),
    )

    def __init__(self) -> None:
        super().__init__()
        self.dispatcher = Dispatcher(self.policy, captured=())
        self.there: set[tuple[Mode, Bucket]] = set()
        self.reason: Reason | None = None
        self.asked = 0

    @rule(place=st.integers(0, 6))
    def mark(self, place: int) -> None:
        graph = self.dispatcher.graphs[place]
        self.dispatcher.mark_captured(*graph)
        self.there.add(graph)

    @rule(place=st.integers(0, 6))
    def forget(self, place: int) -> None:
        graph = self.dispatcher.graphs[place]
        self.dispatcher.forget(*graph)
        self.there.discard(graph)

    @rule()
    def clear(self) -> None:
        self.dispatcher.clear_captured()
        self.there.clear()

    @rule(reason=st.sampled_from([None, Reason.SUSPENDED, Reason.STALE]))
    def state(self, reason: Reason | None) -> None:
        self.dispatcher.set_reason(reason)
        self.reason = reason

    @rule(asked=strategies.batches(Dim("reqs", 8), Dim("tokens", 32)))
    def ask(self, asked: strategies.Batch) -> None:
        fresh = Dispatcher(self.policy, captured=self.there)
        fresh.set_reason(self.reason)
        expected = fresh.dispatch(**asked.named)
        answer = self.dispatcher.dispatch(**asked.named)
        self.asked += 1
        assert (answer.mode, answer.bucket, answer.reason, answer.is_fallback) == (
            expected.mode,
            expected.bucket,
            expected.reason,
            expected.is_fallback,
        )

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.dispatcher.captured) == self.there
        assert sum(count.dispatches for count in self.dispatcher.counts) == self.asked


TestCaptures = Captures.TestCase
TestCaptures.settings = settings(max_examples=40, deadline=None, stateful_step_count=20)
