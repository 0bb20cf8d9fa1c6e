from __future__ import annotations

import re

import pytest
import torch

import graphkit as gk
from graphkit.buffers import Buffers
from graphkit.parameters import bind

reqs = gk.Dim("reqs", 4)


@pytest.fixture
def buffers():
    made = Buffers(torch.device("cpu"))
    spec = gk.BufferSpec((reqs,), torch.int32, pad=0)
    made.declare(ids=spec, positions=spec, hidden=spec)
    return made


def names(binding):
    return (
        {name: buffer.name for name, buffer in binding.fed.items()},
        {name: buffer.name for name, buffer in binding.resident.items()},
        binding.by_prepare,
    )


def test_parameters_are_fed_from_the_buffers_of_their_names(buffers):
    binding = bind(lambda ids, positions, scale=1.0: None, buffers)
    assert names(binding) == ({"ids": "ids", "positions": "positions"}, {}, ())
    assert binding.passed == ("ids", "positions")
    assert set(binding.buffers) == {"ids", "positions"}


def test_roles_rename_and_say_who_writes(buffers):
    roles = {"h": gk.Resident("hidden"), "tokens": gk.Fed("ids"), "count": gk.Count(reqs)}
    binding = bind(lambda h, tokens, count: None, buffers, inputs=roles)
    assert names(binding) == ({"tokens": "ids"}, {"h": "hidden"}, ())
    assert binding.counts == {"count": reqs}
    assert binding.passed == ("h", "tokens", "count")


def test_what_has_no_buffer_comes_from_prepare_or_a_variant(buffers):
    binding = bind(lambda ids, plan, loras: None, buffers, variants=["loras"], has_prepare=True)
    assert names(binding) == ({"ids": "ids"}, {}, ("plan",))
    assert binding.variants == ("loras",)


def test_inputs_for_prepare_alone_are_not_passed(buffers):
    binding = bind(
        lambda ids: None, buffers, inputs={"lens": gk.Fed("positions")}, has_prepare=True
    )
    assert set(binding.fed) == {"ids", "lens"}
    assert binding.passed == ("ids",)


def test_a_function_of_any_keywords_gets_what_inputs_names(buffers):
    binding = bind(lambda **views: None, buffers, inputs={"ids": gk.Fed("ids")}, variants=["n"])
    assert binding.passed == ("ids",)
    assert binding.variants == ("n",)


def test_a_module_is_bound_by_its_forward(buffers):
    class Model(torch.nn.Module):
        def forward(self, ids):
            return ids

    assert names(bind(Model(), buffers))[0] == {"ids": "ids"}


def test_positional_only_parameters_keep_their_places(buffers):
    def fn(ids, scale=2, positions=None, /, *, extra=0):
        return ids, scale, positions, extra

    binding = bind(fn, buffers)
    assert binding.call(fn, {"ids": "i", "positions": "p"}) == ("i", 2, "p", 0)
    assert binding.call(fn, {"ids": "i", "positions": "p", "extra": 1}) == ("i", 2, "p", 1)


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (3, {}, "a runner needs a callable, got 3"),
        (
            lambda ids, mask, plan: None,
            {},
            (
                "needs 'mask' and 'plan', which no buffer is named after (declared: ids, positions, "
                "hidden), no variant gives and no prepare makes: declare a buffer, rename one with "
                "inputs=, make it a variant if it is a Python value, or give it a default"
            ),
        ),
        (
            lambda ids: None,
            {"inputs": {"mask": gk.Fed("ids")}},
            "inputs names 'mask', which",
        ),
        (
            lambda ids: None,
            {"inputs": {"ids": gk.Fed("nobody")}},
            "no buffer is named 'nobody'; declared are: ids, positions, hidden",
        ),
        (
            lambda ids: None,
            {"inputs": {"ids": "hidden"}},
            "inputs['ids'] must be Fed(buffer), Resident(buffer) or Count(dim), got 'hidden'",
        ),
        (
            lambda count: None,
            {"inputs": {"count": gk.Count(reqs + 1)}},
            "inputs['count']: Count takes a Dim, got the expression reqs + 1",
        ),
        (
            lambda count: None,
            {"inputs": {"count": gk.Count(3)}},
            "inputs['count'] must be Fed(buffer)",
        ),
        (
            lambda clone: None,
            {"inputs": {"clone": gk.Fed("ids")}},
            "buffer name 'clone' is reserved for an option; use another name",
        ),
        (
            lambda ids: None,
            {"variants": ["loras"]},
            "the policy has the variants ['loras'], which",
        ),
        (
            lambda ids, again: None,
            {"inputs": {"again": gk.Fed("ids")}},
            "are both fed into buffer 'ids'; feed one, and make the other Resident('ids')",
        ),
    ],
)
def test_what_is_refused(buffers, fn, options, message):
    with pytest.raises(gk.SpecError, match=re.escape(message)):
        bind(fn, buffers, **options)


def test_a_callable_without_a_signature_is_refused(buffers):
    class Odd:
        __signature__ = "none"

        def __call__(self):
            return None

    with pytest.raises(gk.SpecError, match=r"the parameters of Odd can't be read .*; wrap it"):
        bind(Odd(), buffers)
