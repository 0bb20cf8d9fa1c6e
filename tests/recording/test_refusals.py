"""How a refusal reads, what it leaves behind, and what must not be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphkit as gk
from graphkit.backends.recording import RecordingBackend, refusals
from graphkit.errors import CaptureError
from tests.recording.harness import capture


@pytest.fixture
def recording() -> RecordingBackend:
    return RecordingBackend()


def refusal(recording: RecordingBackend, body: Any, **options: Any) -> CaptureError:
    with pytest.raises(CaptureError) as caught:
        capture(recording, body, **options)
    return caught.value


def test_a_refusal_names_operation_line_reason_and_remedy(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        return x * x.sum().item()

    line = body.__code__.co_firstlineno + 1
    error = refusal(recording, body)
    assert error.operation == "torch.Tensor.item"
    assert error.location == f"{__file__}:{line}"
    assert str(error) == (
        "torch.Tensor.item can't be captured: it reads a value back from the device, which a "
        f"capture can't wait for ({__file__}:{line} in body: return x * x.sum().item()). "
        "Keep the value in a tensor, compute it in prepare and pass it in, or do this in an "
        "eager break"
    )


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_branch_is_named_by_what_python_calls(recording: RecordingBackend, mode: str) -> None:
    x = torch.ones(3)
    error = refusal(recording, lambda: 1 if x.sum() > 0 else 2, mode=mode)
    assert error.operation == "torch.Tensor.__bool__"


def test_an_operation_called_without_pythons_surface(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        with torch._C.DisableTorchFunction():
            return x.nonzero()

    error = refusal(recording, body)
    assert error.operation == "aten::nonzero"
    assert "the size of its result depends on values" in str(error)


def test_a_library_that_swallows_a_refusal_does_not_hide_it(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x + 1

    assert refusal(recording, body).operation == "torch.Tensor.item"

    def in_segments() -> None:
        body()
        under_way.split()

    under_way = recording.begin_capture()
    with pytest.raises(CaptureError):
        in_segments()
    under_way.abort()


def test_a_generator_is_refused_until_registered(recording: RecordingBackend) -> None:
    own = torch.Generator()
    error = refusal(recording, lambda: torch.rand(3, generator=own))
    assert error.operation == "torch.rand"
    assert "Pass the generator to the runner (generators=)" in str(error)
    capture(recording, lambda: torch.rand(3, generator=own), generators=[own])
    capture(recording, lambda: torch.rand(3, generator=torch.default_generator))


def test_a_sparse_tensor_is_refused_as_argument_and_as_result(recording: RecordingBackend) -> None:
    x = torch.eye(3)
    sparse = x.to_sparse()
    assert "layout sparse_coo" in str(refusal(recording, x.to_sparse))
    assert "layout sparse_coo" in str(refusal(recording, lambda: sparse @ x))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("function", [torch.linalg.eigh, torch.linalg.eigvalsh, torch.linalg.eig])
def test_eigenvalues(recording: RecordingBackend, function: Any, mode: str) -> None:
    # Not in the table of programs: on CUDA, a refusal leaves cuSOLVER's handle unusable.
    x = torch.eye(3)
    assert "checks values on the host" in str(refusal(recording, lambda: function(x), mode=mode))


def test_breaks_may_do_what_captures_refuse(recording: RecordingBackend) -> None:
    x = torch.ones(3)
    own = torch.Generator()
    with torch.no_grad():
        under_way = recording.begin_capture()
        y = x * 2
        under_way.split()
        assert y.sum().item() == 6
        assert y.nonzero().tolist() == [[0], [1], [2]]
        assert y.to_sparse().to_dense().tolist() == [2, 2, 2]
        kept = y[y > 1] + torch.tensor([1.0, 2.0, 3.0], device="cpu")
        noise = torch.rand(3, generator=own)
        under_way.resume()
        z = kept * 2 + noise
        graph = under_way.end()
    assert graph.num_nodes == 2
    kept.fill_(1)
    noise.fill_(0)
    graph.replay()
    assert z.tolist() == [2, 2, 2]


def test_values_that_python_made_may_be_read_again(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        host = torch.tensor([2, 1])
        assert host.tolist() == [2, 1]
        return x * torch.tensor(3).item() + int(host.numpy()[0])

    graph, y = capture(recording, body)
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [8, 8, 8]


def test_a_split_by_a_tensor_is_refused_unless_python_made_it(
    recording: RecordingBackend,
) -> None:
    x, where = torch.arange(4.0), torch.tensor([1, 3])
    for body in (
        lambda: x.tensor_split(where),
        lambda: torch.tensor_split(x, tensor_indices_or_sections=where),
    ):
        assert "reads a value back" in str(refusal(recording, body))
    graph, parts = capture(
        recording, lambda: [part * 2 for part in x.tensor_split(torch.tensor([1, 3]))]
    )
    x.fill_(3)
    graph.replay()
    assert [part.tolist() for part in parts] == [[6], [6, 6], [6]]


def test_a_number_that_python_made_does_not_excuse_an_index_that_it_made(
    recording: RecordingBackend,
) -> None:
    x = torch.zeros(4)

    def body() -> None:
        x[[0, 2]] = torch.tensor(1.0)

    assert refusal(recording, body).operation == "torch.Tensor.__setitem__"


def test_a_constant_that_is_worked_on_in_place_starts_afresh(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        total = torch.tensor(5.0)
        total += x.sum()
        return total

    graph, y = capture(recording, body)
    for _ in range(3):
        graph.replay()
        assert y.item() == 8


def test_numbers_are_no_copies_from_python(recording: RecordingBackend) -> None:
    x = torch.zeros(4)

    def body() -> Any:
        x[0] = 1
        x[1:3] = 2.5
        return x.new_full((2,), 3.0), torch.full((2,), 4, device="cpu"), x[..., None]

    graph, _ = capture(recording, body)
    graph.replay()
    assert x.tolist() == [1, 2.5, 2.5, 0]


def test_every_rule_of_the_table_names_an_operator_that_exists() -> None:
    for name in (*refusals.OPERATIONS, *refusals.READS_ONE_VALUE):
        operator, _, overload = name.removeprefix("aten::").partition(".")
        assert hasattr(torch.ops.aten, operator), name
        if overload:
            assert overload in getattr(torch.ops.aten, operator).overloads(), name


@pytest.mark.parametrize(
    ("operation", "function", "args", "fine"),
    [
        ("aten::_local_scalar_dense", torch.quantile, (), True),
        ("aten::_local_scalar_dense", torch.Tensor.item, (), False),
        ("aten::_local_scalar_dense", torch.nn.functional.one_hot, (None, 4), True),
        ("aten::_local_scalar_dense", torch.nn.functional.one_hot, (None,), False),
        ("aten::masked_fill.Tensor", torch.cumsum, (), True),
        ("aten::masked_fill.Tensor", torch.Tensor.masked_fill, (), False),
        ("aten::nonzero", torch.nn.functional.one_hot, (None, 4), False),
    ],
)
def test_what_only_a_cpu_does(
    operation: str, function: Any, args: tuple[Any, ...], fine: bool
) -> None:
    # Which functions read values inside differs between versions of PyTorch.
    assert refusals.is_fine_on_cuda(operation, function, args, {}) is fine


class Rows:
    """A sequence that is no list."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


MADE_OF_TENSORS: dict[str, Any] = {
    "tensor": lambda t: torch.tensor([t]),
    "tensor by name": lambda t: torch.tensor(data=[t]),
    "tensor of nested rows": lambda t: torch.tensor([[1, 2], (3, t)]),
    "tensor of a sequence": lambda t: torch.tensor(Rows(1, t)),
    "as_tensor": lambda t: torch.as_tensor((t,)),
    "asarray": lambda t: torch.asarray([1, t]),
    "asarray by name": lambda t: torch.asarray(obj=[t]),
    "LongTensor": lambda t: torch.LongTensor([t]),
    "LongTensor of rows": lambda t: torch.LongTensor([[1, 2], [3, t]]),
    "FloatTensor": lambda t: torch.FloatTensor([t]),
    "Tensor": lambda t: torch.Tensor([t]),
    "new": lambda t: t.new([t]),
    "new_tensor": lambda t: t.new_tensor([t]),
}


@pytest.mark.parametrize("name", MADE_OF_TENSORS)
def test_a_tensor_made_of_a_list_of_tensors_reads_each_back(
    recording: RecordingBackend, name: str
) -> None:
    """A device would be asked for each element, and the values baked."""
    make, x = MADE_OF_TENSORS[name], torch.arange(3)

    def body() -> Any:
        return make(x.max()) - x[0]

    assert "reads a value back" in str(refusal(recording, body))
    found = gk.lint(lambda x: make(x.max()) - x[0], (x,))
    assert ["reads a value back" in str(refusal) for refusal in found] == [True]


@pytest.mark.parametrize("name", MADE_OF_TENSORS)
def test_a_list_of_what_python_made_is_read_on_the_host(
    recording: RecordingBackend, name: str
) -> None:
    make, x = MADE_OF_TENSORS[name], torch.arange(3)
    graph, y = capture(recording, lambda: make(torch.tensor(5)).flatten()[-1] + x)
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [7, 7, 7]
    assert gk.lint(lambda x: make(torch.tensor(5)).flatten()[-1] + x, (x,)) == ()


def test_sizes_and_numbers_are_no_tensors_to_read(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> Any:
        x.new(2, 3), x.new(torch.Size([2])), torch.tensor([[1.0], [2.0]]), torch.asarray(range(3))
        return x + torch.tensor([1.0, 2.0, 3.0]) + torch.as_tensor(x) + torch.LongTensor([1, 2, 3])

    graph, y = capture(recording, body)
    graph.replay()
    assert y.tolist() == [4, 6, 8]
    error = refusal(recording, lambda: x.new([1, 2]))
    assert "copies from Python's memory" in str(error)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        capture(recording, lambda: torch.tensor(endless))


def test_numpy_reads_no_memory_of_the_device_and_torch_may(recording: RecordingBackend) -> None:
    x = torch.ones(3)
    for body in (
        lambda: np.from_dlpack(x).max(),
        lambda: np.from_dlpack(x[1:]) + 1,
    ):
        error = refusal(recording, body)
        assert error.operation == "torch.Tensor.__dlpack__"
        assert "it copies to the host" in str(error)
    found = gk.lint(lambda x: float(np.from_dlpack(x).max()) + x, (x,))
    assert [r.operation for r in found] == ["torch.Tensor.__dlpack__"]

    def allowed() -> Any:
        host = np.from_dlpack(torch.tensor([1.0, 2.0, 3.0]))
        return torch.from_dlpack(x) * 2 + torch.utils.dlpack.from_dlpack(x) + float(host[1])

    graph, y = capture(recording, allowed)
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [8, 8, 8]
    assert gk.lint(lambda x: torch.from_dlpack(x) * 2, (x,)) == ()


def test_a_group_names_the_line_that_reads_back() -> None:
    group = gk.GraphGroup("cpu")
    rows = gk.Dim("rows", 8)
    group.buffers.declare(x=gk.BufferSpec((rows,), torch.int64, pad=1))
    group.runner(
        "r",
        lambda x: torch.LongTensor([x.max()]) - x,
        policy=gk.Policy.full(gk.Buckets.powers(rows)),
        outputs=gk.Output((rows,), torch.int64),
    )
    with pytest.raises(gk.CaptureError, match=r"reads a value back.*torch\.LongTensor"):
        group.capture(progress=False)
