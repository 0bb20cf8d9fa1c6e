from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphkit as gk
from graphkit.backends import backend_for
from graphkit.buffers import shape_at
from graphkit.outputs.host_output import HostOutput
from graphkit.outputs.inference import Sample, infer_shape
from graphkit.outputs.outputs import StaticOutput, Tree, as_outputs, bound_to, check_leaf
from graphkit.outputs.results import Results
from graphkit.runner.shared import Shared
from tests.properties.bounds import examples

reqs, tokens = gk.Dim("reqs", 16), gk.Dim("tokens", 64)
CPU = torch.device("cpu")


def host(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def samples(sizes, *seen):
    return [Sample(at, shape) for at, shape in zip(sizes, seen, strict=True)]


def infer(sizes, seen, dims=(reqs,), uniform=None):
    return infer_shape(
        [Sample(at, (n,)) for at, n in zip(sizes, seen, strict=True)], dims, uniform or {}, "it"
    )[0]


def by_reqs(*sizes):
    return [{"reqs": size} for size in sizes]


# -- declarations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gk.Output((1.5,), torch.int32), "axis 0 of an output must be a Dim"),
        (
            lambda: gk.Output((reqs,), "int32"),
            "dtype must be a torch.dtype, got 'int32'",
        ),
        (
            lambda: gk.Output((reqs,), torch.int32, to="gpu"),
            "Output(to=) must be 'static', 'pool', 'host' or a buffer, got 'gpu'",
        ),
        (lambda: as_outputs([1]), "outputs must map paths to Output or a buffer, got [1]"),
        (lambda: as_outputs({"a": 3}), "output 'a' must be an Output or a buffer, got 3"),
    ],
)
def test_what_a_declaration_refuses(make, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        make()


def test_declarations_by_path():
    buffers = gk.GraphGroup("cpu").buffers
    buffer = buffers.declare(h=gk.BufferSpec((reqs, 2), torch.int32, pad=0)).h
    output = gk.Output((reqs,), torch.float32)
    assert as_outputs(None) == {}
    assert as_outputs(output) == {"": output}
    assert as_outputs({"a": output, "b": buffer}) == {"a": output, "b": bound_to(buffer)}
    assert bound_to(buffer).to is buffer
    assert str(output) == "Output((reqs,), torch.float32)"


# -- trees ------------------------------------------------------------------------------------------


def test_a_tree_has_its_leaves_by_path():
    a, b, c = (torch.full((1,), i) for i in range(3))
    tree = Tree({"x": a, "more": [b, (c, None)]}, "it")
    assert tree.paths == ["x", "more.0", "more.1.0", "more.1.1"]
    assert tree.tensor_paths == ["x", "more.0", "more.1.0"]
    assert tree.rebuild({"x": c, "more.0": b, "more.1.0": a}) == {"x": c, "more": [b, (a, None)]}
    assert Tree(a, "it").paths == [""]


@pytest.mark.parametrize("value", [3, "text", 1.5, True])
def test_a_python_value_would_be_baked(value):
    with pytest.raises(
        gk.CaptureError, match=r"it returned .* as output 'n': a Python value would"
    ):
        Tree({"n": value}, "it")
    with pytest.raises(gk.CaptureError, match="as its output"):
        Tree(value, "it")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(1),
            (
                "it: output 'y' has shape (1,), expected (3,), which is (reqs,) at reqs=3; it is never "
                "broadcast"
            ),
        ),
        (
            torch.zeros(3, dtype=torch.float64),
            "it: output 'y' is torch.float64, expected torch.float32; it is never cast",
        ),
    ],
)
def test_a_leaf_is_as_declared(value, message):
    declared = gk.Output((reqs,), torch.float32)
    check_leaf("y", torch.zeros(3), declared, {"reqs": 3}, "it")
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        check_leaf("y", value, declared, {"reqs": 3}, "it")


# -- inference --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "seen", "expected"),
    [
        ((2, 4, 8), (2, 4, 8), "reqs"),
        ((2, 4, 8), (3, 5, 9), "reqs + 1"),
        ((2, 4, 8), (8, 16, 32), "4 * reqs"),
        ((1, 2, 4), (5, 5, 5), "5"),
        ((1, 4), (1, 1), "1"),
        ((2, 4), (7, 7), "7"),
    ],
)
def test_the_one_expression_that_fits(sizes, seen, expected):
    assert str(infer(by_reqs(*sizes), seen)) == expected


@pytest.mark.parametrize(
    ("sizes", "seen", "message"),
    [
        (
            (8, 16),
            (4, 4),
            (
                "it: axis 0 of size 4 could be 4 or reqs, and 2 buckets can't tell; declare it, as "
                "outputs=gk.Output(shape, dtype) for a lone one"
            ),
        ),
        ((8,), (8,), "axis 0 of size 8 could be 8 or reqs, and 1 bucket can't tell"),
        ((8,), (16,), "axis 0 of size 16 could be 16 or 2 * reqs, and 1 bucket"),
        ((8,), (9,), "axis 0 of size 9 could be 9 or reqs + 1, and 1 bucket"),
        (
            (1, 2, 4),
            (1, 2, 2),
            (
                "it: axis 0 is no one expression in the dims (reqs=1: 1, reqs=2: 2, reqs=4: 2); declare "
                "it with outputs=, as an Output whose shape holds for every batch"
            ),
        ),
        ((4, 8), (3, 7), "axis 0 is no one expression in the dims"),
    ],
)
def test_what_must_not_be_guessed(sizes, seen, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        infer(by_reqs(*sizes), seen)


def test_the_number_of_axes_is_one():
    with pytest.raises(gk.SpecError, match=r"it: the number of axes differs between buckets"):
        infer_shape(samples(by_reqs(1, 2), (1,), (2, 1)), (reqs,), {}, "it")


def test_expressions_that_agree_on_every_batch_are_one():
    sizes = [{"reqs": n, "tokens": 4 * n} for n in (1, 2, 4)]
    dims, seen = (reqs, tokens), (4, 8, 16)
    assert infer(sizes, seen, dims, {("tokens", "reqs"): 4}) == tokens
    with pytest.raises(gk.SpecError, match=r"could be 4 \* reqs or tokens"):
        infer(sizes, seen, dims)


@examples(200)
@given(
    kind=st.sampled_from(["constant", "affine", "slice", "slice of two"]),
    n=st.integers(1, 9),
    factor=st.integers(1, 3),
    sizes=st.sets(st.integers(1, reqs.maximum), min_size=1, max_size=4),
)
def test_what_is_inferred_holds_for_every_batch(kind, n, factor, sizes):
    """Refused, or right at all sizes that the buckets cover, the empty batch of a lone row aside."""
    truth = {
        "constant": lambda size: n,
        "affine": lambda size: factor * size + n,
        "slice": lambda size: min(size, n),
        "slice of two": lambda size: min(2 * size, n),
    }[kind]
    order = sorted(sizes)
    try:
        found = infer(by_reqs(*order), [truth(size) for size in order])
    except gk.SpecError:
        return
    if kind == "slice of two" and 2 * order[0] > n > order[0]:
        return  # no reader could tell this from a constant either
    for size in range(1, order[-1] + 1):
        assert shape_at((found,), {"reqs": size}) == (truth(size),)


# -- memory -----------------------------------------------------------------------------------------


def test_static_memory_is_that_of_the_largest_bucket():
    static = StaticOutput(gk.Output((reqs, 2), torch.float32), {"reqs": 8}, CPU)
    assert static.nbytes == 8 * 2 * 4
    assert static.view({"reqs": 3}) is static.view({"reqs": 3})
    assert static.view({"reqs": 3}).data_ptr() == static.view({"reqs": 8}).data_ptr()
    static.write(torch.ones(3, 2), {"reqs": 3})
    assert static.view({"reqs": 4}).sum().item() == 6


def test_what_lies_there_already_is_not_copied_and_overlap_is():
    static = StaticOutput(gk.Output((reqs,), torch.int64), {"reqs": 4}, CPU)
    view = static.view({"reqs": 4})
    view.copy_(torch.arange(4))
    static.write(view, {"reqs": 4})
    assert view.tolist() == [0, 1, 2, 3]
    static.write(view[:1].expand(4), {"reqs": 4})
    assert view.tolist() == [0, 0, 0, 0]
    view.copy_(torch.arange(4))
    static.write(view[1:], {"reqs": 3})
    assert view.tolist() == [1, 2, 3, 3]


def test_what_stays_in_the_pool_takes_no_memory():
    assert StaticOutput(gk.Output((reqs,), torch.int64, to="pool"), {"reqs": 4}, CPU).nbytes == 0


def test_on_the_host_there_is_memory_for_each_step_in_flight():
    output = HostOutput(gk.Output((reqs, 2), torch.int64, to="host"), {"reqs": 4}, 3, host)
    assert output.nbytes == 3 * 4 * 2 * 8
    slots = output.targets({"reqs": 3})
    assert len({slot.data_ptr() for slot in slots}) == 3
    assert all(slot.shape == (3, 2) and slot.is_contiguous() for slot in slots)
    output.write(torch.arange(12).view(2, 6).T[:3], {"reqs": 3})
    view = output.view({"reqs": 3}, {"reqs": 2}, 0)
    assert view.tolist() == [[0, 6], [1, 7]]
    assert view.data_ptr() == slots[0].data_ptr()
    output.end_leases(1)
    assert output.generations == [0, 1, 0]
    output.end_leases(None)
    assert output.generations == [1, 2, 1]


def test_a_buffer_s_memory_is_its_own():
    buffers = gk.GraphGroup("cpu").buffers
    buffer = buffers.declare(h=gk.BufferSpec((reqs,), torch.int64, pad=0)).h
    static = StaticOutput(bound_to(buffer), {"reqs": 4}, CPU)
    assert static.nbytes == 0
    assert static.view({"reqs": 2}) is buffer.view({"reqs": 2})


def test_results_name_what_is_missing():
    declared = {"y": gk.Output((reqs,), torch.float32)}
    shared = Shared(backend_for("cpu"), checked=False)
    results = Results("r", declared, {"reqs": 4}, shared, 8)
    with pytest.raises(
        gk.SpecError, match=r"it: outputs declares 'y', and the function returns 'z'"
    ):
        results.check(Tree({"z": torch.zeros(2)}, "it"), {"reqs": 2}, "it")
    with pytest.raises(gk.SpecError, match="returns no tensor"):
        results.check(Tree(None, "it"), {"reqs": 2}, "it")


# -- through a runner -------------------------------------------------------------------------------


def test_rows_that_are_no_prefix_are_refused():
    group = gk.GraphGroup("cpu")
    x = gk.BufferSpec((reqs, 2), torch.float32, pad=0)
    group.wrap(lambda x: torch.cat([x, x]), name="twice", x=x)
    message = (
        "runner 'twice': output '' of shape (2 * reqs, 2) has 2 rows for each of 'reqs', whose real "
        "rows are a prefix only if they sit side by side: write gk.interleaved(2 * reqs) if they do"
    )
    for _ in range(2):
        with pytest.raises(gk.SpecError, match=re.escape(message)):
            group.capture()


def test_rows_side_by_side_are_taken(device):
    group = gk.GraphGroup(device)
    x = gk.BufferSpec((reqs, 2), torch.float32, pad=0)
    declared = gk.Output((gk.interleaved(reqs, 2), 2), torch.float32)
    twice = group.wrap(lambda x: x.repeat_interleave(2, 0), x=x, outputs=declared)
    group.capture()
    given = torch.arange(6.0).reshape(3, 2)
    assert twice(x=given).tolist() == given.repeat_interleave(2, 0).tolist()


@pytest.mark.parametrize("layout", ["strided", "packed"])
@pytest.mark.parametrize("clone", [False, True])
def test_an_output_in_a_buffer_of_two_dims(device, layout, clone):
    pages = gk.Dim("pages", 4)
    group = gk.GraphGroup(device)
    buffers = group.buffers.declare(
        x=gk.BufferSpec((reqs, pages), torch.int64, pad=0),
        h=gk.BufferSpec((reqs, pages), torch.int64, pad=0, layout=layout),
    )
    policy = gk.Policy.full(gk.Buckets.grid({reqs: [4], pages: [4]}))
    runner = group.runner("r", lambda x: x * 2, policy=policy, outputs=buffers.h)
    group.capture()
    x = torch.arange(6).reshape(2, 3)
    for size in (2, 2):
        out = runner.run(runner.dispatch(reqs=size, pages=3), x=x, clone=clone)
        assert out.tolist() == (x * 2).tolist()


@pytest.mark.parametrize("captured", [False, True])
def test_a_clone_is_independent_in_every_mode(device, captured):
    group = gk.GraphGroup(device)
    same = group.wrap(lambda x: {"y": x}, x=gk.BufferSpec((reqs,), torch.int64, pad=0))
    if captured:
        group.capture()
    first = same(x=[1, 2, 3])["y"]
    same(x=[7, 8, 9])
    assert first.tolist() == [1, 2, 3]


def test_buckets_must_return_alike():
    group = gk.GraphGroup("cpu")
    x = gk.BufferSpec((reqs,), torch.float32, pad=0)

    def paths(x):
        return {"a": x} if x.shape[0] > 4 else {"b": x}

    group.wrap(paths, x=x)
    with pytest.raises(gk.SpecError, match=r"returns the outputs \['.'\], and runner 'paths'"):
        group.capture()
    group = gk.GraphGroup("cpu")

    def dtypes(x):
        return x if x.shape[0] > 4 else x.double()

    group.wrap(dtypes, x=x)
    with pytest.raises(gk.SpecError, match="its output has several dtypes: "):
        group.capture()
