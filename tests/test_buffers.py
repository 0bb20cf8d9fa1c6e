from __future__ import annotations

import math
import re

import pytest
import torch

import graphkit as gk
from graphkit.buffers import Buffers, as_shape, shape_text

reqs, pages, tokens = gk.Dim("reqs", 4), gk.Dim("pages", 3), gk.Dim("tokens", 16)


def spec(*shape, dtype=torch.int32, **options):
    options.setdefault("pad", 0)
    return gk.BufferSpec(shape, dtype, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gk.BufferSpec((reqs, 8), torch.int32),
            (
                "a buffer of shape (reqs, 8) varies with 'reqs' and needs a pad: what its rows beyond "
                "the batch hold, e.g. pad=0, or pad=gk.keep if nothing reads them"
            ),
        ),
        (
            lambda: gk.BufferSpec((2.5,), torch.int32),
            (
                "axis 0 of a buffer must be a Dim, an expression of one, or an int of at least 0, got "
                "2.5 of type float"
            ),
        ),
        (lambda: gk.BufferSpec((True,), torch.int32), "got True of type bool"),
        (lambda: gk.BufferSpec((-1,), torch.int32), "an int of at least 0, got -1"),
        (
            lambda: gk.BufferSpec("reqs", torch.int32),
            "the shape of a buffer must be a tuple of ints and dims, got 'reqs'",
        ),
        (
            lambda: gk.BufferSpec((4,), "int32"),
            "dtype must be a torch.dtype, got 'int32' of type str",
        ),
        (
            lambda: spec(reqs, layout="columns"),
            "layout must be 'strided' or 'packed', got 'columns'",
        ),
        (
            lambda: spec(reqs, pad=-1, valid=(0, 8)),
            (
                "pad -1 of dim 'reqs' lies outside valid=(0, 8): it would be used as an index. Reserve "
                "a scratch row inside the range and pad with it"
            ),
        ),
        (lambda: spec(reqs, pad=8, valid=(0, 8)), "pad 8 of dim 'reqs' lies outside"),
        (
            lambda: spec(reqs, pad=gk.by_producer(9), valid=(0, 8)),
            "pad by_producer(9) of dim 'reqs' lies outside",
        ),
        (
            lambda: spec(reqs, valid=(8, 8)),
            "valid must be two ints, low below high (high excluded), got (8, 8)",
        ),
        (lambda: spec(reqs, valid=[0, 8]), "valid must be two ints"),
        (lambda: spec(reqs, valid=(0, True)), "valid must be two ints"),
        (
            lambda: spec(reqs, dtype=torch.float32, valid=(0, 8)),
            "valid is for integer buffers; this one holds torch.float32",
        ),
        (
            lambda: spec(reqs, pages, pad={reqs: 0}),
            (
                "pad names ['reqs'], and the shape (reqs, pages) has the dims ['pages', 'reqs']: give "
                "one pad for each"
            ),
        ),
        (lambda: spec(reqs, pad={reqs: 0, tokens: 0}), "pad names ['reqs', 'tokens']"),
        (
            lambda: spec(reqs, pad=0.5),
            "pad 0.5 of dim 'reqs' can't be held by torch.int32; use a value that can",
        ),
        (lambda: spec(reqs, pad=2**31), "can't be held by torch.int32"),
        (lambda: spec(reqs, dtype=torch.uint8, pad=-1), "pad -1 of dim 'reqs' can't be held by"),
        (lambda: spec(reqs, dtype=torch.bool, pad=2), "can't be held by torch.bool"),
        (lambda: spec(reqs, dtype=torch.float16, pad=1e6), "can't be held by torch.float16"),
        (
            lambda: spec(reqs, dtype=torch.bool, pad=gk.continue_(1)),
            "pad continue_(1) of dim 'reqs' can't count in a bool buffer",
        ),
        (
            lambda: spec(reqs, dtype=torch.bfloat16, pad=gk.continue_(1)),
            "pad continue_(1) of dim 'reqs': torch.bfloat16 has no counterpart to count in",
        ),
        (
            lambda: spec(reqs, dtype=torch.float8_e4m3fn, pad=gk.continue_(1)),
            "torch.float8_e4m3fn has no counterpart to count in",
        ),
        (lambda: spec(reqs, pad="0"), "a pad must be a bool, an int or a float, got '0' of type"),
        (lambda: spec(reqs, adopt=[0] * 4), "adopt must be a tensor, got list"),
        (
            lambda: spec(reqs, adopt=torch.zeros(3, dtype=torch.int32)),
            (
                "adopted memory is (3,) of torch.int32; BufferSpec((reqs,), torch.int32, pad=0) needs "
                "(4,) of torch.int32"
            ),
        ),
        (lambda: spec(reqs, adopt=torch.zeros(4)), "adopted memory is (4,) of torch.float32"),
        (
            lambda: spec(reqs, adopt=torch.zeros(8, dtype=torch.int32)[::2]),
            "adopted memory must be contiguous; adopt its base, or a copy",
        ),
        (
            lambda: spec(reqs, gk.Dim("reqs", 5)),
            "dim 'reqs' is declared with maximum 4 and with maximum 5",
        ),
    ],
)
def test_what_a_spec_refuses(make, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (spec(reqs), "BufferSpec((reqs,), torch.int32, pad=0)"),
        (
            spec(reqs, pages, pad={reqs: 1, pages: gk.keep}, valid=(0, 9), layout="packed"),
            (
                "BufferSpec((reqs, pages), torch.int32, pad={reqs: 1, pages: keep}, valid=(0, 9), "
                "layout='packed')"
            ),
        ),
        (gk.BufferSpec((), torch.float32), "BufferSpec((), torch.float32)"),
        (
            spec(reqs + 1, pad=gk.repeat_last),
            "BufferSpec((reqs + 1,), torch.int32, pad=repeat_last)",
        ),
    ],
)
def test_a_spec_reads_as_its_declaration(made, text):
    assert str(made) == text


def test_a_shape_may_be_one_extent():
    assert as_shape(reqs, "it") == (reqs,)
    assert as_shape([reqs, 2], "it") == (reqs, 2)
    assert as_shape(torch.Size([2, 3]), "it") == (2, 3)
    assert shape_text((reqs,)) == "(reqs,)"
    assert shape_text(()) == "()"


def test_pads_by_dim_and_for_all():
    both = spec(reqs, 2, pages + 1, pad={reqs: 5, pages + 1: gk.keep})
    assert [str(pad) for pad in both.pads] == ["5", "None", "keep"]
    assert [str(pad) for pad in spec(reqs, pages, pad=7).pads] == ["7", "7"]
    assert spec(reqs, pages, pad={"reqs": 1, "pages": 2}).pad["pages"].value == 2
    assert gk.BufferSpec((3,), torch.int32).pads == (None,)


@pytest.mark.parametrize(
    ("made", "fill"),
    [
        (spec(reqs, pad=7), 7),
        (spec(reqs, pad=gk.repeat_last), 0),
        (spec(reqs, pad=gk.keep, valid=(3, 9)), 3),
        (spec(reqs, pages, pad={reqs: gk.keep, pages: 4}), 4),
        (gk.BufferSpec((3,), torch.int32), 0),
    ],
)
def test_fresh_memory_may_be_read_as_padding(made, fill):
    assert made.fill == fill
    buffer = Buffers(torch.device("cpu")).declare(x=made).x
    assert set(buffer.tensor.reshape(-1).tolist()) == {fill}


def test_infinite_and_undefined_pads_are_floats_too():
    assert spec(reqs, dtype=torch.float16, pad=-math.inf).fill == -math.inf
    assert math.isnan(spec(reqs, dtype=torch.bfloat16, pad=math.nan).fill)


def test_memory_is_made_at_first_use_and_never_moves():
    buffers = Buffers(torch.device("cpu"))
    buffer = buffers.declare(x=spec(reqs, 3)).x
    assert not buffer.is_allocated
    assert buffers.nbytes == 4 * 3 * 4
    small, large = buffer.view({"reqs": 1}), buffer.view({"reqs": 4})
    assert buffer.is_allocated
    assert small.data_ptr() == large.data_ptr() == buffer.tensor.data_ptr()
    assert buffer.view({"reqs": 1}) is small


def test_strided_views_keep_places_and_packed_ones_are_contiguous():
    buffers = Buffers(torch.device("cpu"))
    named = buffers.declare(a=spec(reqs, pages), b=spec(reqs, pages, layout="packed"))
    sizes = {"reqs": 2, "pages": 2}
    assert named.a.view(sizes).stride() == (3, 1)
    assert named.b.view(sizes).stride() == (2, 1)


@pytest.mark.parametrize(
    ("made", "moves"),
    [
        (spec(reqs, pages, layout="packed"), True),
        (spec(2, reqs, layout="packed"), True),
        (spec(reqs, 2, layout="packed"), False),
        (spec(reqs, pages), False),
        (spec(2, reqs), False),
    ],
)
def test_elements_move_where_a_packed_dim_is_not_the_first_axis(made, moves):
    assert made.moves is moves


def test_views_are_plain_tensors_in_and_outside_inference_mode():
    buffer = Buffers(torch.device("cpu")).declare(x=spec(reqs)).x
    with torch.inference_mode():
        view = buffer.view({"reqs": 2})
    assert not view.is_inference()
    view += 1


def test_adopted_memory_is_used_as_it_is():
    memory = torch.arange(4, dtype=torch.int32)
    buffers = Buffers(torch.device("cpu"))
    buffer = buffers.declare(x=spec(reqs, adopt=memory)).x
    assert buffer.tensor is memory
    assert buffers.nbytes == 0
    assert memory.tolist() == [0, 1, 2, 3]


def test_memory_on_another_device_is_not_adopted():
    buffers = Buffers(torch.device("cpu"))
    memory = torch.empty(4, dtype=torch.int32, device="meta")
    with pytest.raises(gk.SpecError, match="buffer 'x' adopts memory on meta; the group is on cpu"):
        buffers.declare(x=spec(reqs, adopt=memory))


def test_a_name_is_declared_once_or_alike():
    buffers = Buffers(torch.device("cpu"))
    first = buffers.declare(x=spec(reqs)).x
    assert buffers.declare(x=spec(reqs)).x is first
    message = (
        "buffer 'x' is declared already, and otherwise: first BufferSpec((reqs,), torch.int32, "
        "pad=0), now BufferSpec((reqs,), torch.int32, pad=1). Share it by declaring it once, or use "
        "another name"
    )
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        buffers.declare(y=spec(reqs), x=spec(reqs, pad=1))
    assert "y" not in buffers
    assert [b.name for b in buffers] == ["x"]
    assert len(buffers) == 1


@pytest.mark.parametrize("name", ["clone", "policy", "_x", "class", "reads"])
def test_a_buffer_has_no_option_s_name(name):
    with pytest.raises(gk.SpecError, match=f"buffer name '{name}'"):
        Buffers(torch.device("cpu")).declare(**{name: spec(reqs)})


@pytest.mark.parametrize("apart", [True, False])
def test_one_dim_has_one_maximum(apart):
    buffers = Buffers(torch.device("cpu"))
    other = spec(gk.Dim("reqs", 9))
    if apart:
        buffers.declare(x=spec(reqs))
    with pytest.raises(
        gk.SpecError, match="dim 'reqs' is declared with maximum 4 and with maximum 9"
    ):
        buffers.declare(y=other) if apart else buffers.declare(x=spec(reqs), y=other)
    assert "y" not in buffers


def test_a_declaration_is_a_spec():
    with pytest.raises(gk.SpecError, match="buffer 'x' must be declared by a BufferSpec, got 3"):
        Buffers(torch.device("cpu")).declare(x=3)


def test_an_unknown_buffer_is_named_with_the_known():
    buffers = Buffers(torch.device("cpu"))
    with pytest.raises(gk.SpecError, match="no buffer is named 'y'; declared are: none"):
        buffers["y"]
    buffers.declare(x=spec(reqs))
    with pytest.raises(gk.SpecError, match="no buffer is named 'y'; declared are: x"):
        buffers["y"]
    assert repr(buffers["x"]) == "Buffer('x', BufferSpec((reqs,), torch.int32, pad=0))"


def test_forgotten_memory_comes_back_and_closed_memory_does_not():
    buffers = Buffers(torch.device("cpu"))
    buffer = buffers.declare(x=spec(reqs)).x
    old = buffer.view({"reqs": 2})
    buffers.forget()
    assert not buffer.is_allocated
    assert buffer.view({"reqs": 2}) is not old
    buffers.close()
    with pytest.raises(gk.StateError, match="the group is closed, and its buffers are gone"):
        _ = buffer.tensor
    with pytest.raises(gk.StateError, match="make a new GraphGroup"):
        buffers.declare(y=spec(reqs))
