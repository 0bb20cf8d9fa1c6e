"""Models that are not edited, split at operators, on both backends and through both tracers."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphkit as gk
from graphkit import fx
from tests.fx.llama import DEPTH, VOCAB, llama

TOKENS = gk.Dim("tokens", 64)
ATTENTION = torch.ops.aten.scaled_dot_product_attention
THROUGH = ["export", "compile"]


def buffers_of(group):
    return vars(
        group.buffers.declare(
            input_ids=gk.BufferSpec((TOKENS,), torch.int64, pad=0),
            positions=gk.BufferSpec((TOKENS,), torch.int64, pad=0),
        )
    )


def batch(device, count):
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, VOCAB, (count,), generator=generator)
    return {"input_ids": ids.to(device), "positions": torch.arange(count, device=device)}


def num_segments(runner):
    return {len(entry._graphs[-1].segments) for entry in runner.entries}


@pytest.mark.parametrize("pieces", [False, "aot_eager"], ids=["plain", "compiled"])
@pytest.mark.parametrize("through", THROUGH)
def test_a_hand_written_llama_equals_eager_at_every_bucket(device, through, pieces):
    model = llama(device)
    group = gk.GraphGroup(device)
    inputs = buffers_of(group)
    split = fx.split(model, at=[ATTENTION], inputs=inputs, through=through, compile_pieces=pieces)
    sizes = (1, 2, 5, 8, 32) if not pieces else (2, 8)
    runner = group.runner(
        "llama", split, policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, *sizes)), reads=[model]
    )
    group.capture()
    assert num_segments(runner) == {DEPTH + 1}
    assert split.num_breaks == DEPTH
    counts = sorted({1, 3, 7, 20, 40, *sizes}) if not pieces else (2, 5, 8)
    for count in counts:
        given = batch(device, count)
        made = runner.run(runner.dispatch(tokens=count), **given)
        with torch.no_grad():
            expected = model(**given)
        assert list(made) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5)
    assert runner.eager_runs == sum(count > max(sizes) for count in counts)


@pytest.mark.parametrize("through", THROUGH)
def test_parameters_are_the_models_own(device, through):
    model = llama(device)
    group = gk.GraphGroup(device)
    split = fx.split(model, at=[ATTENTION], inputs=buffers_of(group), through=through)
    runner = group.runner(
        "llama",
        split,
        policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, 4)),
        reads=[model],
        outputs={
            "hidden": gk.Output((TOKENS, 32), torch.float32),
            "logits": gk.Output((TOKENS, VOCAB), torch.float32),
        },
    )
    group.capture()
    given = batch(device, 3)
    other = llama(device, seed=1)

    def check():
        made = runner.run(runner.dispatch(tokens=3), **given)
        with torch.no_grad():
            torch.testing.assert_close(
                made["logits"], model(**given)["logits"], rtol=1e-4, atol=1e-5
            )

    check()
    model.load_state_dict(other.state_dict())  # in place
    check()
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    with pytest.raises(gk.StaleGraphError, match="head.weight"):
        group.check_addresses()
    group.invalidate()
    group.capture()
    check()


def test_nothing_in_the_model_is_changed(device):
    model = llama(device)
    before = {name: id(module) for name, module in model.named_modules()}
    group = gk.GraphGroup(device)
    for through in THROUGH:
        fx.split(model, at=[ATTENTION], inputs=buffers_of(group), through=through)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize(
    "at",
    [
        ATTENTION,
        torch.ops.aten.scaled_dot_product_attention.default,
        "aten::scaled_dot_product_attention",
        "aten.scaled_dot_product_attention",
        lambda node: (
            "scaled_dot_product" in str(node.target)
            or "scaled_dot" in getattr(node.target, "__name__", "")
        ),
    ],
    ids=["packet", "overload", "name", "dotted name", "predicate"],
)
def test_every_way_to_name_an_operator(at, through):
    if through == "compile" and isinstance(at, str):
        at = "scaled_dot_product_attention"
    group = gk.GraphGroup("cpu")
    split = fx.split(llama("cpu"), at=[at], inputs=buffers_of(group), through=through)
    assert split.num_breaks == DEPTH


def test_a_builtin_function_of_torchs_matches_in_the_graph_of_torch_compile():
    group = gk.GraphGroup("cpu")
    split = fx.split(
        llama("cpu"),
        at=[F.scaled_dot_product_attention],
        inputs=buffers_of(group),
        through="compile",
    )
    assert split.num_breaks == DEPTH


@pytest.mark.parametrize("through", THROUGH)
def test_no_match_lists_what_is_there(through):
    group = gk.GraphGroup("cpu")
    with pytest.raises(gk.SpecError) as caught:
        fx.split(
            llama("cpu"), at=[torch.ops.aten.cumsum], inputs=buffers_of(group), through=through
        )
    message = str(caught.value)
    assert (
        "no node of the traced model matches at=[aten::cumsum]; the operators that are there: "
        in message
    )
    assert "scaled_dot_product_attention" in message
    assert "(2)" in message


@torch.library.custom_op("graphkit_tests::per_request", mutates_args=())
def per_request(h: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """A cumulative sum within each request; it asks the device for the lengths."""
    out = torch.zeros_like(h)
    bounds = starts.tolist()
    for low, high in itertools.pairwise(bounds):
        out[low:high] = h[low:high].cumsum(0)
    return out


@per_request.register_fake
def _(h: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(h)


class WithRequests(nn.Module):
    """Two dims, one of them in an expression, a custom operator and several outputs."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)
        self.table = torch.ones(width)

    def forward(self, x, starts, flag=True):
        h = per_request(torch.relu(self.first(x)), starts)
        h = per_request(torch.tanh(self.second(h)) * self.scale, starts) + self.table
        return h, {
            "last": h[starts[1:].long() - 1],
            "none": None,
            "rows": x.shape[1] * torch.ones_like(x),
        }


@pytest.mark.parametrize("sees", ["real", "bucket"])
@pytest.mark.parametrize("through", THROUGH)
def test_a_custom_operator_that_decides_on_the_host(device, through, sees):
    reqs = gk.Dim("reqs", 6)
    torch.manual_seed(0)
    model = WithRequests().to(device)
    model.table = model.table.to(device)
    group = gk.GraphGroup(device)
    inputs = vars(
        group.buffers.declare(
            x=gk.BufferSpec((TOKENS, 16), torch.float32, pad=1e4),
            starts=gk.BufferSpec((reqs + 1,), torch.int32, pad=gk.repeat_last),
        )
    )
    split = fx.split(
        model, at=[torch.ops.graphkit_tests.per_request], inputs=inputs, through=through, rows=sees
    )
    runner = group.runner(
        "model",
        split,
        policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, 1, 4, 16, 32, reqs=gk.at_most(TOKENS))),
        reads=[model],
        outputs={"1.last": gk.Output((reqs, 16), torch.float32)},
    )
    group.capture()
    assert num_segments(runner) == {3}
    for lengths in ([1], [2, 1], [3], [4, 1, 2], [5, 9, 2], [30], [1, 1, 1, 1]):
        count = sum(lengths)
        x = torch.randn(count, 16, device=device)
        starts = torch.tensor(
            [0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device
        )
        dispatch = runner.dispatch(tokens=count, reqs=len(lengths))
        made = runner.run(dispatch, x=x, starts=starts)
        assert dispatch.mode is gk.PIECEWISE
        with torch.no_grad():
            expected = model(x, starts)
        torch.testing.assert_close(made[0], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(made[1]["last"], expected[1]["last"], rtol=1e-4, atol=1e-5)
        assert made[1]["none"] is None


@pytest.mark.parametrize("through", THROUGH)
def test_a_function_and_inputs_given_as_tensors(device, through):
    weight = torch.randn(16, 16, device=device)

    def fn(x, scale):
        return torch.softmax(x @ weight * scale, -1)

    split = fx.split(
        fn,
        at=[torch.ops.aten.softmax],
        inputs={"x": torch.randn(5, 16, device=device), "scale": 3.0},
        dynamic={"x": {0: TOKENS}},
        through=through,
    )
    assert split.num_breaks == 1
    for count in (1, 2, 5, 9):
        x = torch.randn(count, 16, device=device)
        torch.testing.assert_close(split(x=x, scale=3.0), fn(x, 3.0))
        torch.testing.assert_close(split(x=x), fn(x, 3.0))
    with pytest.raises(gk.SpecError, match=r"fn was traced for scale=3.0, and got 4.0"):
        split(x=x, scale=4.0)
    with pytest.raises(
        gk.SpecError,
        match=r"fn was traced for 'x' of \[tokens, 16\] of torch.float32, and got \[3, 8\] of torch.float32",
    ):
        split(x=torch.zeros(3, 8, device=device))
    with pytest.raises(gk.SpecError, match=r"fn was traced with the input 'x', and got \[\]"):
        split()
    with pytest.raises(gk.SpecError, match=r"fn was traced without 'y'; name it in inputs="):
        split(x=x, y=x, scale=3.0)


class OneSize(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1) * (2 if x.shape[0] == 3 else 1) + torch.zeros(
            3, 4, device=x.device
        )


class ByValue(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return torch.softmax(x, -1)
        return torch.softmax(x + 1, -1)


class BySize(nn.Module):
    def forward(self, x):
        return torch.softmax(x[x[:, 0] > 0], -1).sum(0)


class Plain(nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1)


class Broken(nn.Module):
    def forward(self, x):
        raise KeyError("the user's own")


class Printing(nn.Module):
    def forward(self, x):
        y = torch.softmax(x, -1)
        torch._dynamo.graph_break()
        return y + 1


def small(group):
    return vars(group.buffers.declare(x=gk.BufferSpec((TOKENS, 4), torch.float32, pad=0)))


def refusal(model, through):
    group = gk.GraphGroup("cpu")
    with pytest.raises(gk.SpecError) as caught:
        fx.split(
            model,
            at=["softmax", torch.ops.aten.softmax],
            inputs=small(group),
            through=through,
            device="cpu",
        )
    return str(caught.value)


@pytest.mark.parametrize("through", THROUGH)
def test_a_decision_by_a_value_is_refused(through):
    message = refusal(ByValue(), through)
    assert f"torch.{through} can't trace the model in one graph: " in message
    assert "Put that part into one custom operator" in message


@pytest.mark.parametrize("through", THROUGH)
def test_a_size_that_depends_on_data_is_refused(through):
    message = refusal(BySize(), through)
    assert "custom operator whose result has a fixed shape, and name" in message


@pytest.mark.parametrize("through", THROUGH)
def test_a_model_for_one_size_is_refused(through):
    message = refusal(OneSize(), through)
    assert "can't trace the model in one graph" in message
    assert "makes a Python constant of a size that varies" in message


def test_a_graph_break_is_refused_with_what_torch_says():
    message = refusal(Printing(), "compile")
    assert "torch.compile can't follow the model there (a graph break)" in message


def test_the_users_own_exception_is_itself():
    group = gk.GraphGroup("cpu")
    with pytest.raises(KeyError) as caught:
        fx.split(Broken(), at=["softmax"], inputs=small(group), device="cpu")
    assert "graphkit: while torch.export traced the model" in caught.value.__notes__


def test_wrong_arguments_are_refused():
    group = gk.GraphGroup("cpu")
    inputs = small(group)
    model = Plain()

    def refused(match, **options):
        arguments = {"at": ["softmax"], "inputs": inputs, "device": "cpu", **options}
        with pytest.raises(gk.SpecError, match=match):
            fx.split(arguments.pop("model", model), **arguments)

    refused("through must be 'export' or 'compile', got 'magic'", through="magic")
    refused("split needs a module or function, got 3", model=3)
    refused(
        r"Softmax can't be called with the inputs \['x'\]: missing a required argument: 'input'",
        model=nn.Softmax(-1),
    )
    refused("at is empty: name at least one operator", at=[])
    refused("at must be a list of operators or predicates, got 'softmax'", at="softmax")
    refused("at takes operators .* got 3", at=[3])
    refused("inputs must map the model's parameters to buffers", inputs={})
    refused("no axis of any input varies", inputs={"x": torch.zeros(3, 4)})
    refused("dynamic names 'y', which is not among the inputs", dynamic={"y": {0: TOKENS}})
    refused("dynamic names 'x', whose dims are declared by its buffer", dynamic={"x": {0: TOKENS}})
    one = {"x": torch.zeros(1, 4)}
    refused("axis 0 of the example 'x' has size 1", inputs=one, dynamic={"x": {0: TOKENS}})
    refused(r"dynamic\['x'\] must map axes to Dims", inputs=one, dynamic={"x": {5: TOKENS}})
    refused("dynamic names 'x', which is no tensor: 3", inputs={"x": 3}, dynamic={"x": {0: TOKENS}})
    refused("the model has no parameter to tell the device by: give device=", device=None)
    refused("compile_pieces must be a bool or a backend's name, got 3", compile_pieces=3)
    refused("rows must be 'real', 'bucket' or a mapping", rows="all")


def test_the_backend_for_torch_compile_splits_what_it_is_given(device):
    model = llama(device)
    seen = []
    splitter = fx.Splitter(
        at=[lambda node: seen.append(node) or "scaled_dot" in getattr(node.target, "__name__", "")]
    )
    compiled = torch.compile(model, backend=splitter, dynamic=True, fullgraph=True)
    given = batch(device, 7)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given)["logits"], model(**given)["logits"])
    assert seen
    if device == "cpu":
        return  # recording needs `through="compile"`
    group = gk.GraphGroup(device, checked=False)
    buffers_of(group)
    runner = group.runner(
        "llama",
        lambda input_ids, positions: compiled(input_ids, positions),
        policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, 2, 8, 32)),
        reads=[model],
    )
    group.capture()
    assert num_segments(runner) == {DEPTH + 1}
    for count in (2, 5, 8, 20):
        given = batch(device, count)
        made = runner.run(runner.dispatch(tokens=count), **given)
        with torch.no_grad():
            torch.testing.assert_close(
                made["logits"], model(**given)["logits"], rtol=1e-4, atol=1e-5
            )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor's own imports
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_pieces_compiled_by_inductor():
    pytest.importorskip("triton")
    model = llama("cuda")
    group = gk.GraphGroup("cuda", checked=False)
    split = fx.split(model, at=[ATTENTION], inputs=buffers_of(group), compile_pieces=True)
    runner = group.runner(
        "llama", split, policy=gk.Policy.piecewise(gk.Buckets.of(TOKENS, 2, 8, 32)), reads=[model]
    )
    group.capture()
    assert num_segments(runner) == {DEPTH + 1}
    for count in (2, 5, 8, 20):
        given = batch("cuda", count)
        made = runner.run(runner.dispatch(tokens=count), **given)
        with torch.no_grad():
            torch.testing.assert_close(
                made["logits"], model(**given)["logits"], rtol=1e-3, atol=1e-4
            )


def test_importing_graphkit_does_not_import_what_traces():
    code = (
        "import sys, torch\n"
        "import graphkit\n"
        "assert 'graphkit.fx' not in sys.modules\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert graphkit.fx.split and 'graphkit.fx' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
