from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkit.dims import Dim, at_most
from graphkit.dispatch.buckets import Bucket, Buckets
from graphkit.errors import BucketError, GraphkitError, SpecError
from graphkit.testing import strategies

batch = Dim("batch", 64)
reqs, tokens, pages = Dim("reqs", 256), Dim("tokens", 2048), Dim("pages", 512)


def listed(buckets: Buckets) -> list[int]:
    """The sizes of the first dim."""
    return [point[0] for point in buckets.points]


# -- a bucket


def test_bucket_reads_as_what_it_is():
    bucket = Bucket({"reqs": 64, "tokens": 256}, query_len=4, max_query_len=4)
    assert str(bucket) == "reqs=64 tokens=256 query_len=4"
    assert repr(bucket) == "<Bucket reqs=64 tokens=256 query_len=4>"
    assert str(Bucket({"reqs": 4, "tokens": 16}, max_query_len=5)) == (
        "reqs=4 tokens=16 max_query_len=5"
    )
    assert str(Bucket({"reqs": 4}, variant={"num_loras": 1})) == "reqs=4 num_loras=1"
    assert str(Bucket({})) == "fixed"
    assert bucket["tokens"] == 256


def test_bucket_padding_is_the_rest():
    bucket = Bucket({"reqs": 4, "tokens": 16})
    assert bucket.padding({"reqs": 3, "tokens": 12}) == {"reqs": 1, "tokens": 4}
    assert bucket.fits({"reqs": 4, "tokens": 16})
    assert not bucket.fits({"reqs": 4, "tokens": 17})


def test_equal_buckets_are_one_key():
    first = Bucket({"reqs": 4, "tokens": 16}, query_len=4)
    assert first == Bucket({"tokens": 16, "reqs": 4}, query_len=4)
    assert hash(first) == hash(Bucket({"tokens": 16, "reqs": 4}, query_len=4))
    assert first != Bucket({"reqs": 4, "tokens": 16})
    assert first != Bucket({"reqs": 4, "tokens": 16}, query_len=4, variant={"n": 1})
    assert first != "reqs=4 tokens=16"


def test_variants_of_equal_values_and_other_types_are_two_buckets():
    assert Bucket({"reqs": 4}, variant={"n": 1}) != Bucket({"reqs": 4}, variant={"n": True})


def test_bucket_is_frozen():
    given = {"reqs": 4}
    bucket = Bucket(given)
    given["reqs"] = 5
    assert bucket["reqs"] == 4
    with pytest.raises(TypeError):
        bucket.sizes["reqs"] = 5  # type: ignore[index]
    with pytest.raises(AttributeError):
        bucket.query_len = 3  # type: ignore[misc]


# -- the makers


@pytest.mark.parametrize("maximum", [1, 2, 42, 100, 257, 1000])
@pytest.mark.parametrize("maker", [Buckets.powers, Buckets.ladder])
def test_d4_the_maximum_is_a_bucket(maker, maximum):
    dim = Dim("batch", maximum)
    assert listed(maker(dim))[-1] == maximum
    assert listed(maker(dim))[0] == 1


def test_d4_97_of_100_gets_100():
    sizes = listed(Buckets.ladder(Dim("batch", 100)))
    assert min(size for size in sizes if size >= 97) == 100


def test_powers():
    assert listed(Buckets.powers(batch)) == [1, 2, 4, 8, 16, 32, 64]
    assert listed(Buckets.powers(Dim("batch", 48))) == [1, 2, 4, 8, 16, 32, 48]
    assert listed(Buckets.powers(batch, upto=24)) == [1, 2, 4, 8, 16, 24]


def test_ladder():
    assert listed(Buckets.ladder(Dim("batch", 42))) == [1, 2, 4, 8, 16, 24, 32, 40, 42]
    wide = listed(Buckets.ladder(Dim("batch", 2048)))
    steps = {b: b - a for a, b in itertools.pairwise(wide)}
    assert steps[256] == 8
    assert steps[272] == steps[512] == 16
    assert steps[544] == steps[1024] == 32
    assert steps[2048] == 64
    assert len(wide) == 35 + 3 * 16


def test_ladder_aligned():
    assert listed(Buckets.ladder(Dim("batch", 42), align=8)) == [8, 16, 24, 32, 40, 42]
    assert listed(Buckets.ladder(batch, align=64)) == [64]


@given(maximum=st.integers(1, 5000))
def test_ladder_above_256_pads_by_a_sixteenth(maximum):
    sizes = listed(Buckets.ladder(Dim("batch", maximum)))
    assert sizes == sorted(set(sizes))
    assert all(b - a <= max(8, b / 16) for a, b in itertools.pairwise(sizes))


def test_of_is_exactly_what_was_asked_for():
    assert listed(Buckets.of(batch, 16, 8)) == [8, 16]
    assert listed(Buckets.of(batch, [16, 8])) == [8, 16]
    assert listed(Buckets.of(batch, range(1, 4))) == [1, 2, 3]


@given(data=st.data())
def test_d9_sizes_are_normalized(data):
    given = data.draw(strategies.sizes(batch))
    integers = [data.draw(strategies.as_integer(size)) for size in given]
    points = Buckets.of(batch, integers).points
    assert points == tuple((size,) for size in sorted(set(given)))
    assert all(type(size) is int for (size,) in points)
    assert Buckets.of(batch, np.array(given)) == Buckets.of(batch, *given)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "a bucket size of dim 'batch' must be at least 1, got 0"),
        (-8, "a bucket size of dim 'batch' must be at least 1, got -8"),
        (True, "a bucket size of dim 'batch' must be an int, got True (bool)"),
        (8.0, "a bucket size of dim 'batch' must be an int, got 8.0 (float)"),
        (np.float32(8), "a bucket size of dim 'batch' must be an int, got"),
        ("8", "a bucket size of dim 'batch' must be an int, got '8' (str)"),
        (None, "a bucket size of dim 'batch' must be an int, got None (NoneType)"),
        ([], "no bucket sizes of dim 'batch' were given"),
        (65, "a bucket size of dim 'batch' is 65, above the dim's maximum 64"),
    ],
)
def test_d9_what_is_no_size_is_refused(value, message):
    with pytest.raises(BucketError, match=re.escape(message)):
        Buckets.of(batch, value)
    grid = {batch: [value] if not isinstance(value, list) else value}
    with pytest.raises(BucketError, match=re.escape(message)):
        Buckets.grid(grid, reqs)


def test_d5_capacity_50_and_size_56():
    with pytest.raises(BucketError, match=r"dim 'rows' is 56, above the dim's maximum 50"):
        Buckets.of(Dim("rows", 50), 48, 56)
    with pytest.raises(BucketError, match=r"upto of dim 'rows' is 56, above .* maximum 50"):
        Buckets.ladder(Dim("rows", 50), upto=56)
    with pytest.raises(BucketError, match=r"dim 'rows' is 56, above the dim's maximum 50"):
        Buckets.of(batch, 8, rows=56).resolve([batch, Dim("rows", 50)])


def test_d6_three_and_eight_tokens():
    with pytest.raises(BucketError, match=r"8 tokens is no multiple of query_len 3; use 6 or 9"):
        Buckets.uniform(reqs, tokens, query_len=3, tokens_sizes=[3, 8])
    with pytest.raises(BucketError, match=r"2 tokens is no multiple of query_len 3; use 3$"):
        Buckets.uniform(reqs, tokens, query_len=3, tokens_sizes=[2])
    with pytest.raises(BucketError, match=r"8 tokens is no multiple of query_len 3; use 6$"):
        Buckets.uniform(reqs, Dim("tokens", 8), query_len=3, tokens_sizes=[8])


def test_uniform_tokens_are_requests_times_query_len():
    buckets = Buckets.uniform(reqs, tokens, query_len=3, tokens_sizes=[24, 3, 6, 9, 18, 3])
    assert buckets.points == ((1, 3), (2, 6), (3, 9), (6, 18), (8, 24))
    assert buckets == Buckets.uniform(reqs, tokens, query_len=3, sizes=[1, 2, 3, 6, 8])
    assert str(buckets) == "uniform(reqs, tokens, query_len=3)"


@given(
    most=st.integers(1, 300),
    rows=st.integers(1, 3000),
    query_len=st.integers(1, 9),
)
def test_uniform_holds_as_many_as_both_dims_do(most, rows, query_len):
    count, row = Dim("reqs", most), Dim("tokens", rows)
    if rows < query_len:
        with pytest.raises(BucketError, match="one request of query_len"):
            Buckets.uniform(count, row, query_len=query_len)
        return
    buckets = Buckets.uniform(count, row, query_len=query_len)
    assert buckets.points[-1][0] == min(most, rows // query_len)
    assert all(b == a * query_len <= rows for a, b in buckets.points)


def test_uniform_above_the_tokens():
    message = "10 requests of query_len 4 are 40 tokens, above the maximum 32 of dim 'tokens'"
    with pytest.raises(BucketError, match=message):
        Buckets.uniform(reqs, Dim("tokens", 32), query_len=4, sizes=[10])
    with pytest.raises(BucketError, match=message):
        Buckets.uniform(reqs, Dim("tokens", 32), query_len=4, upto=10)
    assert Buckets.uniform(reqs, tokens, query_len=4, upto=10).points[-1] == (10, 40)


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": [1], "upto": 2},
        {"sizes": [1], "tokens_sizes": [4]},
        {"tokens_sizes": [4], "upto": 2},
    ],
)
def test_uniform_is_sized_in_one_way(options):
    with pytest.raises(BucketError, match="give one of sizes, tokens_sizes and upto"):
        Buckets.uniform(reqs, tokens, query_len=4, **options)


def test_varlen_tokens_stop_at_the_maximum():
    buckets = Buckets.varlen(reqs, Dim("tokens", 20), max_query_len=4, sizes=[8, 1, 4])
    assert buckets.points == ((1, 4), (4, 16), (8, 20))
    assert (buckets.query_len, buckets.max_query_len) == (None, 4)
    assert str(buckets) == "varlen(reqs, tokens, max_query_len=4)"
    assert listed(Buckets.varlen(reqs, tokens, max_query_len=4, upto=10)) == [1, 2, 4, 8, 10]
    with pytest.raises(BucketError, match="give one of sizes and upto"):
        Buckets.varlen(reqs, tokens, max_query_len=4, sizes=[1], upto=2)


@pytest.mark.parametrize("query_len", [0, -1, True, 2.0, None])
def test_query_lens_are_sizes(query_len):
    with pytest.raises(BucketError, match="^query_len must be"):
        Buckets.uniform(reqs, tokens, query_len=query_len)
    with pytest.raises(BucketError, match="^max_query_len must be"):
        Buckets.varlen(reqs, tokens, max_query_len=query_len)


def test_grid():
    length = Dim("length", 512)
    buckets = Buckets.grid(
        Dim("batch", 4), {length: (512, 128)}, where=lambda batch, length: batch * length <= 1024
    )
    assert buckets.points == ((1, 128), (1, 512), (2, 128), (2, 512), (4, 128))
    with pytest.raises(BucketError, match="where= keeps no combination of batch and length"):
        Buckets.grid(batch, length, where=lambda batch, length: False)
    with pytest.raises(SpecError, match="dim 'batch' is in the grid twice"):
        Buckets.grid(batch, {batch: (1, 2)})
    with pytest.raises(SpecError, match="needs at least one dim"):
        Buckets.grid()


def test_fixed_is_one_bucket():
    assert Buckets.fixed().resolve([]) == (Bucket({}),)
    assert Buckets.fixed(batch=8).resolve([batch]) == (Bucket({"batch": 8}),)
    assert Buckets.fixed(batch=batch).resolve([]) == (Bucket({"batch": 64}),)
    assert len(Buckets.fixed()) == 1


# -- further dims


def test_a_dim_that_is_not_mentioned_takes_its_maximum():
    (bucket,) = Buckets.of(tokens, 16).resolve([reqs, tokens, pages])
    assert dict(bucket.sizes) == {"reqs": 256, "tokens": 16, "pages": 512}
    assert list(bucket.sizes) == ["reqs", "tokens", "pages"]


def test_d10_at_most_16_tokens_are_16_requests():
    small, large = Buckets.of(tokens, 16, 512, reqs=at_most(tokens)).resolve([reqs, tokens])
    assert small["reqs"] == 16
    assert large["reqs"] == 256


def test_a_further_dim_by_int_dim_and_bound():
    buckets = Buckets.powers(batch, upto=2, pages=pages, reqs=np.int64(7), tokens=at_most(batch))
    last = buckets.resolve({"tokens": tokens, "reqs": reqs})[-1]
    assert dict(last.sizes) == {"tokens": 2, "reqs": 7, "batch": 2, "pages": 512}
    assert str(buckets) == "powers(batch, pages=pages, reqs=7, tokens=at_most(batch))"


def test_a_dim_that_no_buffer_uses_is_an_axis():
    bound = Dim("bound", 4096)
    found = Buckets.grid(batch, {bound: (1024, 4096)}).resolve([batch])
    assert {bucket["bound"] for bucket in found} == {1024, 4096}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets.of(tokens, 8, tokens=4), "dim 'tokens' is sized twice"),
        (lambda: Buckets.of(tokens, 8, reqs=pages), "reqs=pages names another dim"),
        (lambda: Buckets.of(tokens, 8, variant=4), "dim name 'variant' is reserved"),
        (lambda: Buckets.of("tokens", 8), "the dim of Buckets.of must be a Dim, got 'tokens'"),
        (lambda: Buckets.powers(8), "the dim of Buckets.powers must be a Dim, got 8"),
        (lambda: Buckets.ladder(None), "the dim of Buckets.ladder must be a Dim, got None"),
        (lambda: Buckets.uniform(reqs, reqs, query_len=2), "needs two dims, got 'reqs' twice"),
        (lambda: Buckets.varlen(4, tokens, max_query_len=2), "reqs of Buckets.varlen must be a"),
        (
            lambda: Buckets.of(batch, 8, reqs=at_most(tokens), tokens=at_most(batch)),
            "reqs=at_most(tokens) depends on a dim that at_most sizes too",
        ),
        (
            lambda: Buckets.of(batch, 8, rows=4).resolve([batch]),
            "of(batch, rows=4) sizes 'rows', which is no dim of the runner; its dims are batch",
        ),
        (
            lambda: Buckets.of(batch, 8).resolve([Dim("batch", 65)]),
            "dim 'batch' is declared with maximum 65 and with maximum 64",
        ),
    ],
)
def test_refused_with_a_message(make, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("size", [0, -1, True, 4.0, "4", None])
def test_sizes_of_further_dims_are_sizes(size):
    with pytest.raises(BucketError, match="the bucket size of dim 'reqs' must be"):
        Buckets.of(tokens, 8, reqs=size)


@given(value=strategies.hostile, maker=st.sampled_from(["of", "powers", "ladder", "grid", "more"]))
def test_hostile_sizes_are_buckets_or_errors(value, maker):
    try:
        match maker:
            case "of":
                buckets = Buckets.of(batch, value)
            case "powers":
                buckets = Buckets.powers(batch, upto=value)
            case "ladder":
                buckets = Buckets.ladder(batch, upto=value)
            case "grid":
                buckets = Buckets.grid({batch: value})
            case _:
                buckets = Buckets.of(batch, 8, reqs=value)
        found = buckets.resolve([batch, reqs])
    except (GraphkitError, TypeError):
        return
    for bucket in found:
        assert all(type(size) is int for size in bucket.sizes.values())
        assert 1 <= bucket["batch"] <= 64
        assert 1 <= bucket["reqs"] <= 256


@given(data=st.data())
def test_every_bucket_sizes_every_dim_within_its_maximum(data):
    count, rows = data.draw(strategies.request_dims())
    buckets = data.draw(strategies.bucket_sets(count, rows))
    found = buckets.resolve([count, rows, pages])
    assert len(found) == len(buckets)
    assert len(set(found)) == len(found)
    for bucket in found:
        assert list(bucket.sizes) == ["reqs", "tokens", "pages"]
        assert all(1 <= bucket[dim.name] <= dim.maximum for dim in (count, rows, pages))
        if bucket.query_len is not None:
            assert bucket["tokens"] == bucket["reqs"] * bucket.query_len


def test_a_set_is_made_by_its_methods():
    dim = Dim("batch", 8)
    for wrong in (dim, [dim], (3,), ("batch",)):
        with pytest.raises(
            SpecError, match=r"made by its methods, as Buckets.of\(batch, 1, 2, 4\)"
        ):
            Buckets(wrong, [1, 2])
