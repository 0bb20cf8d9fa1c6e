"""Where breaks are, and what happens when a function doesn't reach them as before."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

import graphkit as gk
from tests.piecewise.harness import WIDTH, declare, num_segments, rows, run, runner_of


def test_a_break_inside_a_break_is_plain(device):
    seen = []

    @gk.eager_break
    def inner(h):
        seen.append(gk.current_run().dispatch.sizes["rows"])
        return h + 1

    @gk.eager_break
    def outer(h):
        return inner(h) * 2

    runner = runner_of(device, lambda x: outer(x * 3) - 1)
    assert num_segments(runner) == [2, 2, 2]
    seen.clear()
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), (x * 3 + 1) * 2 - 1)
    assert seen == [3]


def test_one_break_in_a_loop(device):
    layers = []

    @gk.eager_break(rows="real")
    def middle(h, layer):
        layers.append(layer)
        return h.cumsum(0) / (layer + 1)

    weights = [torch.eye(WIDTH, device=device) * (i + 1) for i in range(5)]

    def body(x, call):
        for layer, weight in enumerate(weights):
            x = x + call(torch.relu(x @ weight), layer)
        return x

    runner = runner_of(device, lambda x: body(x, middle))
    assert num_segments(runner) == [6, 6, 6]
    for count in (1, 3, 8, 5):
        layers.clear()
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), body(x, middle.fn))
        assert layers[:5] == [0, 1, 2, 3, 4]


def test_a_break_that_is_never_reached(device):
    middle = gk.eager_break(lambda h: h * 2)

    def fn(x, use=False):
        return middle(x) if use else x + 1

    runner = runner_of(device, fn)
    assert num_segments(runner) == [1, 1, 1]
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), x + 1)


def test_breaks_first_last_and_side_by_side(device):
    first = gk.eager_break(lambda x: x * 2, rows="real")
    second = gk.eager_break(lambda h: h + 3, rows="real")
    runner = runner_of(device, lambda x: second(first(x)))
    for count in (1, 3, 8):
        x = rows(device, count)
        torch.testing.assert_close(run(runner, x), x * 2 + 3)


def test_two_runners_of_a_group_break_at_different_functions(device):
    calls = []

    def make(name):
        def middle(h):
            calls.append(name)
            return h.cumsum(0)

        return gk.eager_break(middle, rows="real")

    one, other = make("one"), make("other")
    group = gk.GraphGroup(device)
    first = declare(group, lambda x: one(x * 2) + 1, name="first")
    second = declare(group, lambda x: other(other(x * 3)) - 1, name="second")
    group.capture()
    assert num_segments(first) == [2, 2, 2]
    assert num_segments(second) == [3, 3, 3]
    for count in (3, 8):
        calls.clear()
        x = rows(device, count)
        torch.testing.assert_close(run(first, x), (x * 2).cumsum(0) + 1)
        torch.testing.assert_close(run(second, x), (x * 3).cumsum(0).cumsum(0) - 1)
        assert calls == ["one", "other", "other"]


def test_variants_may_break_at_different_functions(device):
    seen = []
    plain = gk.eager_break(lambda h: seen.append("plain") or h.cumsum(0), rows="real")
    heavy = gk.eager_break(lambda w, h: seen.append("heavy") or (h * w).cumsum(0), rows="real")
    weight = torch.full((8, WIDTH), 2.0, device=device)[:1].clone()

    def fn(x, kind):
        return heavy(weight, x * 2) if kind == "heavy" else plain(x * 2)

    group = gk.GraphGroup(device)
    group.buffers.declare(x=gk.BufferSpec((gk.Dim("rows", 16), WIDTH), torch.float32, pad=0))
    route = gk.Route(
        gk.PIECEWISE,
        gk.Buckets.of(gk.Dim("rows", 16), 1, 4, 8),
        variants=gk.Variants(kind=("plain", "heavy")),
    )
    runner = group.runner("model", fn, policy=gk.Policy([route]))
    group.capture()
    x = rows(device, 3)
    for kind, factor in (("plain", 1), ("heavy", 2)):
        seen.clear()
        made = runner.run(runner.dispatch(rows=3, variant={"kind": kind}), x=x)
        torch.testing.assert_close(made, (x * 2 * factor).cumsum(0))
        assert seen == [kind]


def counter_fn(*results):
    """Gives the results one after another, then the last for ever."""
    values = itertools.chain(results, itertools.repeat(results[-1]))
    return lambda: next(values)


def test_other_python_arguments_in_the_capture_than_in_the_warm_up(device):
    step = counter_fn(0, 1)
    middle = gk.eager_break(lambda h, scale: h * 2)
    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, lambda x: middle(x + 1, step()), 4)
    message = str(caught.value)
    assert (
        "got 0 in the warm-up and 1 in the capture. Its Python arguments are baked: take what changes from "
        "current_run()" in message
    )
    assert "runner 'model', PIECEWISE bucket [rows=4]: break" in message


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((1,), (1, 2), "got arguments of another structure in the capture than in the warm-up"),
        ((1,), (1.0,), "got 1 in the warm-up and 1.0 in the capture"),
        (
            (None,),
            (torch.zeros(2),),
            "got None in the warm-up and a tensor of shape (2,) in the capture; shapes are baked",
        ),
        (
            (torch.zeros(3),),
            (torch.zeros(2),),
            "got a tensor of shape (3,) in the warm-up and a tensor of shape (2,) in the capture",
        ),
        ((torch.zeros(2),), (5,), "got a tensor of shape (2,) in the warm-up and 5 in the capture"),
    ],
    ids=["structure", "type", "none to tensor", "shape", "tensor to value"],
)
def test_other_arguments_in_the_capture_than_in_the_warm_up(device, before, after, text):
    step = counter_fn(before, after)
    middle = gk.eager_break(lambda h, extra: h * 2)
    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, lambda x: middle(x + 1, step()), 4)
    assert text in str(caught.value)


def test_a_changed_array_is_noticed_though_it_is_the_same_object(device):
    import numpy as np

    array = np.zeros(3)
    step = itertools.count()

    def fn(x):
        array[0] = next(step)
        return middle(x + 1, array)

    middle = gk.eager_break(lambda h, extra: h * 2)
    with pytest.raises(gk.CaptureError, match="in the warm-up and array"):
        runner_of(device, fn, 4)


def test_breaks_in_another_order_in_the_capture(device):
    step = counter_fn(0, 1)
    one = gk.eager_break(lambda h: h * 2)
    other = gk.eager_break(lambda h: h + 2)
    with pytest.raises(
        gk.CaptureError,
        match="was reached as number 1 in the capture, and .* in the warm-up; a function must reach the same breaks",
    ):
        runner_of(device, lambda x: one(other(x)) if step() else other(one(x)), 4)


def test_two_breaks_of_one_name_that_change_places_are_told_apart(device):
    step = counter_fn(0, 1)
    one, other = (gk.eager_break(lambda h, n=n: h * n) for n in (2, 3))
    with pytest.raises(
        gk.CaptureError, match=r"number 1 in the capture, and another .*<lambda> in the warm-up"
    ):
        runner_of(device, lambda x: one(other(x)) if step() else other(one(x)), 4)


def test_a_break_that_the_function_makes_anew_is_refused(device):
    def fn(x):
        @gk.eager_break
        def middle(h):
            return h * 2

        return middle(x + 1)

    with pytest.raises(gk.CaptureError) as caught:
        runner_of(device, fn, 4)
    message = str(caught.value)
    assert (
        "<locals>.middle was reached as number 1 in the capture, and is another object than the break "
        "of that name in the warm-up, as when the function makes it anew in each call; decorate it "
        "once, outside the function" in message
    )


def test_more_and_fewer_breaks_in_the_capture(device):
    middle = gk.eager_break(lambda h: h * 2)
    step = counter_fn(0, 1)
    with pytest.raises(
        gk.CaptureError, match="was reached as number 1 in the capture, and none in the warm-up"
    ):
        runner_of(device, lambda x: middle(x) if step() else x * 2, 4)
    again = counter_fn(1, 0)
    with pytest.raises(gk.CaptureError, match="the capture reached 0 breaks and the warm-up 1"):
        runner_of(device, lambda x: middle(x) if again() else x * 2, 4)


def test_after_a_refused_capture_the_group_goes_on(device):
    step = counter_fn(0, 1, 0)
    middle = gk.eager_break(lambda h, scale: h * 2)
    group = gk.GraphGroup(device)
    runner = declare(group, lambda x: middle(x + 1, step()), 4)
    with pytest.raises(gk.CaptureError):
        group.capture()
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), (x + 1) * 2)  # EAGER
    assert runner.eager_runs == 1
    group.capture()
    torch.testing.assert_close(run(runner, x), (x + 1) * 2)
    assert runner.eager_runs == 1


# -- break_at ---------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.name = "block"

    def forward(self, x):
        return self.inner(x).cumsum(0)

    @staticmethod
    def fixed(x):
        return x * 2

    @classmethod
    def made(cls, x):
        return x * 3

    def method(self, x):
        return x * 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_break_at_a_module_of_a_model_that_is_not_edited(device):
    torch.manual_seed(0)
    model = Model().to(device)
    with gk.break_at(model.blocks[0], rows="real"), gk.break_at(model.blocks[2], rows="real"):
        runner = runner_of(device, model, reads=[model])
    assert num_segments(runner) == [3, 3, 3]
    assert "forward" not in vars(model.blocks[0])
    for count in (1, 3, 8, 6):  # the patch is gone, the graphs keep their breaks
        x = rows(device, count)
        with torch.no_grad():
            torch.testing.assert_close(run(runner, x), model(x))


def test_break_at_a_submodule_by_name(device):
    torch.manual_seed(0)
    model = Block().to(device)
    with gk.break_at(model, "inner"):
        runner = runner_of(device, model)
        assert isinstance(model.inner, torch.nn.Linear)
    assert num_segments(runner) == [2, 2, 2]
    assert "forward" not in vars(model.inner)


def test_break_at_a_function_of_a_module(device):
    library = types.ModuleType("library")
    original = library.attend = lambda h: h.cumsum(0)
    patch = gk.break_at(library, "attend", rows="real")
    runner = runner_of(device, lambda x: library.attend(x * 2) + 1)
    patch.remove()
    patch.remove()
    assert library.attend is original
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), (x * 2).cumsum(0) + 1)
    assert num_segments(runner) == [2, 2, 2]


def test_break_at_torchs_own_function(device):
    functional = torch.nn.functional
    with gk.break_at(functional, "softplus"):
        runner = runner_of(device, lambda x: functional.softplus(x * 2) + 1)
    assert num_segments(runner) == [2, 2, 2]
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), functional.softplus(x * 2) + 1)


def plain(h):
    return h + 7


def test_break_at_a_function_finds_where_it_is_looked_up(device):
    import sys

    if plain.__module__ not in sys.modules:
        pytest.skip("the test runner has not put this module where functions are looked up")
    with gk.break_at(plain):
        assert isinstance(plain, gk.Break)
    assert not isinstance(plain, gk.Break)


@pytest.mark.parametrize("name", ["fixed", "made", "method"])
@pytest.mark.parametrize("through", ["class", "instance"])
def test_break_at_methods_of_every_kind(name, through):
    block, x = Block(), torch.ones(2)
    expected = getattr(block, name)(x)
    kind = type(vars(Block)[name])
    with gk.break_at(Block if through == "class" else block, name):
        torch.testing.assert_close(getattr(block, name)(x), expected)
    assert type(vars(Block)[name]) is kind
    assert name not in vars(block)
    torch.testing.assert_close(getattr(block, name)(x), expected)


def test_break_at_refuses_what_it_can_t_patch():
    with pytest.raises(gk.SpecError, match="has no callable named 'missing'"):
        gk.break_at(torch.nn.functional, "missing")
    with pytest.raises(
        gk.SpecError, match="can't tell where .* is looked up; name the place: break_at"
    ):
        gk.break_at(lambda h: h)
    with pytest.raises(gk.SpecError, match="doesn't let its 'upper' be replaced"):
        gk.break_at(str, "upper")
    block = Block()
    with (
        gk.break_at(block),
        pytest.raises(
            gk.SpecError, match="'forward' of Block is a break already; remove that one first"
        ),
    ):
        gk.break_at(block)
    middle = gk.eager_break(lambda h: h)
    with pytest.raises(gk.SpecError, match="is a break already"):
        gk.break_at(middle)


def test_eager_break_refuses_wrong_arguments():
    with pytest.raises(gk.SpecError, match="eager_break needs a function, got 3"):
        gk.eager_break(3)
    with pytest.raises(
        gk.SpecError,
        match="rows must be 'real', 'bucket' or a mapping of parameters to dims, got 'all'",
    ):
        gk.eager_break(rows="all")(lambda h: h)
    with pytest.raises(gk.SpecError, match="rows names 'q', and .* takes h"):
        gk.eager_break(lambda h: h, rows={"q": gk.Dim("rows", 4)})
    with pytest.raises(
        gk.SpecError, match=r"rows\['h'\] must be a Dim, or a mapping of axes to Dims, got 4"
    ):
        gk.eager_break(lambda h: h, rows={"h": 4})
    with pytest.raises(gk.SpecError, match="out must be a declared buffer, got"):
        gk.eager_break(lambda h: h, out=torch.zeros(3))
    gk.eager_break(lambda **inputs: inputs, rows={"q": gk.Dim("rows", 4)})


def test_attributes_of_a_function_do_not_replace_those_of_its_break():
    block = Block()  # has a `name` of its own
    broken = gk.eager_break(block)
    assert broken.fn is block
    assert broken.name == "Block"


def test_a_decorated_method_is_bound_to_its_instance(device):
    class Holder:
        def __init__(self, factor):
            self.factor = factor

        @gk.eager_break(rows="real")
        def middle(self, h):
            return h * self.factor

    two, three = Holder(2), Holder(3)
    runner = runner_of(device, lambda x: two.middle(x + 1) + three.middle(x))
    assert num_segments(runner) == [3, 3, 3]
    x = rows(device, 3)
    torch.testing.assert_close(run(runner, x), (x + 1) * 2 + x * 3)
    two.factor = 5
    torch.testing.assert_close(run(runner, x), (x + 1) * 5 + x * 3)
