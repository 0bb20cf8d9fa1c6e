"""The life of a recording: segments, what is put back, what the process answers, what it keeps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkit.backends.recording import RecordingBackend
from graphkit.errors import CaptureError, SpecError, StateError
from tests.recording.harness import assert_same, capture


@pytest.fixture
def recording() -> Iterator[RecordingBackend]:
    backend = RecordingBackend()
    yield backend
    assert not backend.is_capturing()


class Counting(TorchDispatchMode):
    """A mode of the user's: which operations it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# Segments.


def test_segments_run_one_after_the_other_with_eager_code_between(
    backend: Any, device: str
) -> None:
    x = torch.ones(4, device=device)
    state = torch.zeros(4, device=device)
    eager: list[float] = []
    with backend.on_stream(backend.new_stream()), torch.no_grad():
        under_way = backend.begin_capture(pool=backend.pool_of(None))
        assert backend.is_capturing()
        y = x * 2
        state += y
        first = under_way.split()
        assert not backend.is_capturing()
        eager.append(float(y.sum()))
        moved = y.clone()
        under_way.resume()
        assert backend.is_capturing()
        z = moved + 1
        second = under_way.split()
        under_way.resume()
        z *= 10
        third = under_way.end()
    assert not backend.is_capturing()
    assert eager == [8.0]
    x.fill_(3)
    state.zero_()
    first.replay()
    backend.synchronize()
    assert y.tolist() == [6] * 4
    moved.copy_(y)
    second.replay()
    third.replay()
    backend.synchronize()
    assert z.tolist() == [70] * 4
    assert state.tolist() == [6] * 4


def test_a_split_deep_inside_modes_of_the_users(recording: RecordingBackend) -> None:
    x = torch.ones(4)
    graphs = []

    def inner(y: torch.Tensor) -> torch.Tensor:
        y = y + 1
        graphs.append(under_way.split())
        assert not recording.is_capturing()
        y = y.clone()
        under_way.resume()
        return y * 3

    with torch.no_grad():
        under_way = recording.begin_capture()
        with Counting() as counting, torch.inference_mode(), torch.autocast("cpu"):
            first = x * 2
            z = inner(first) + 1
        graphs.append(under_way.end())
    assert z.tolist() == [10] * 4
    assert counting.seen == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.clone.default",
        "aten.mul.Tensor",
        "aten.add.Tensor",
    ]
    assert [graph.num_nodes for graph in graphs] == [2, 2]
    x.fill_(5)
    graphs[0].replay()
    assert first.tolist() == [10] * 4


def test_views_in_place_across_a_split(recording: RecordingBackend) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with torch.no_grad():
        under_way = recording.begin_capture()
        y = x * 2
        first = under_way.split()
        y.t_()
        under_way.resume()
        z = y[0] + 1
        second = under_way.end()
    x.add_(1)
    first.replay()
    second.replay()
    assert z.tolist() == [3, 9]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (("resume",), "recording a segment; calls of split() and resume() have to alternate"),
        (("split", "split"), "between segments"),
        (("split", "end"), "between segments"),
        (("end", "split"), "has ended"),
        (("end", "resume"), "has ended"),
        (("end", "end"), "has ended"),
        (("abort", "end"), "has ended"),
    ],
)
def test_calls_in_the_wrong_order(
    recording: RecordingBackend, calls: tuple[str, ...], message: str
) -> None:
    under_way = recording.begin_capture()
    try:
        for call in calls[:-1]:
            getattr(under_way, call)()
        with pytest.raises(StateError) as caught:
            getattr(under_way, calls[-1])()
        assert message in str(caught.value)
    finally:
        under_way.abort()
        under_way.abort()  # twice does nothing


def test_only_the_thread_that_began_a_capture_may_end_it(recording: RecordingBackend) -> None:
    under_way = recording.begin_capture()
    errors: list[BaseException] = []

    def end() -> None:
        try:
            under_way.end()
        except StateError as error:
            errors.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    under_way.end()
    assert "by the thread that began it" in str(errors[0])


def test_only_the_capturing_thread_is_recorded(recording: RecordingBackend) -> None:
    x = torch.ones(3)
    answers = []

    def work() -> None:
        answers.append((recording.is_capturing(), float((x * 2).sum())))

    with torch.no_grad():
        under_way = recording.begin_capture()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        graph = under_way.end()
    assert answers == [(False, 6.0)]
    assert graph.num_nodes == 0


def test_two_threads_capture_at_a_time_and_end_in_either_order(recording: RecordingBackend) -> None:
    query = torch.cuda.graphs._cuda_isCurrentStreamCapturing
    x = torch.ones(3)
    began, may_end = threading.Event(), threading.Event()
    answers = []

    def other() -> None:
        with torch.no_grad():
            under_way = recording.begin_capture()
            began.set()
            assert may_end.wait(10)
            answers.append(torch.cuda.is_current_stream_capturing())
            y = x + 1
            answers.append(under_way.end().num_nodes)
            answers.append(y.tolist())

    thread = threading.Thread(target=other)
    with torch.no_grad():
        under_way = recording.begin_capture()
        thread.start()
        assert began.wait(10)
        assert torch.cuda.is_current_stream_capturing()
        under_way.end()
        assert not torch.cuda.is_current_stream_capturing()
        may_end.set()
        thread.join()
    assert answers == [True, 1, [2, 2, 2]]
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is query


def test_a_capture_inside_a_capture_is_refused_and_inside_its_break_is_not(
    recording: RecordingBackend,
) -> None:
    x = torch.ones(2)
    with torch.no_grad():
        outer = recording.begin_capture()
        with pytest.raises(StateError, match="a capture is under way on this thread"):
            recording.begin_capture()
        first = outer.split()
        graph, y = capture(recording, lambda: x + 1)
        graph.replay()
        outer.resume()
        z = y * 2
        second = outer.end()
    assert (first.num_nodes, graph.num_nodes, second.num_nodes) == (0, 1, 1)
    x.fill_(4)
    graph.replay()
    second.replay()
    assert z.tolist() == [10, 10]


# What is put back.


def test_undeclared_state_is_as_before_a_capture(backend: Any, device: str) -> None:
    counter = torch.zeros((), dtype=torch.int64, device=device)
    cache = torch.zeros(8, 2, device=device)
    slots = torch.tensor([1, 5], device=device)
    new = torch.ones(2, 2, device=device)

    def body() -> torch.Tensor:
        counter.add_(1)
        cache[slots] = new
        cache.view(-1)[0] += 7
        return cache[slots].sum() + counter

    graph, result = capture(backend, body)
    assert counter.item() == 0
    assert not cache.any()
    graph.replay()
    graph.replay()
    backend.synchronize()
    assert counter.item() == 2
    assert cache[:, 0].tolist() == [14, 1, 0, 0, 0, 1, 0, 0]
    assert result.item() == 6


def test_state_is_as_before_an_aborted_capture(recording: RecordingBackend) -> None:
    counter = torch.zeros(3)
    state = torch.random.get_rng_state()

    def body() -> None:
        counter.add_(torch.rand(3))
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        capture(recording, body)
    assert not counter.any()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_state_written_by_segments_is_real_in_breaks_and_put_back_at_the_end(
    recording: RecordingBackend,
) -> None:
    counter = torch.zeros(2)
    with torch.no_grad():
        under_way = recording.begin_capture()
        counter += 1
        first = under_way.split()
        seen = counter.tolist()
        view = counter[:1]  # a break's view of memory from before the capture
        under_way.resume()
        view += 1
        second = under_way.end()
    assert seen == [1, 1]
    assert counter.tolist() == [0, 0]
    first.replay()
    second.replay()
    assert counter.tolist() == [2, 1]


def test_memory_that_a_break_touched_first_is_put_back(recording: RecordingBackend) -> None:
    cache = torch.zeros(4)
    with torch.no_grad():
        under_way = recording.begin_capture()
        under_way.split()
        view = cache[1:3]
        made = torch.zeros(2)
        under_way.resume()
        view += 1
        made += 1
        under_way.end()
    assert cache.tolist() == [0] * 4
    assert made.tolist() == [1, 1]  # the break's own: it existed before no capture


def test_statistics_that_no_schema_mentions_are_put_back(recording: RecordingBackend) -> None:
    for mode in ("no_grad", "inference_mode"):
        norm = torch.nn.BatchNorm1d(3)
        x = torch.randn(5, 3)
        before = [tensor.clone() for tensor in norm.buffers()]
        graph, _ = capture(recording, lambda norm=norm, x=x: norm(x), mode=mode)
        assert_same(list(norm.buffers()), before)
        graph.replay()
        assert norm.num_batches_tracked.item() == 1
        assert not torch.equal(norm.running_mean, before[0])


def test_two_tensors_over_the_same_bytes_are_put_back(recording: RecordingBackend) -> None:
    array = torch.zeros(4).numpy()
    one, other = torch.from_numpy(array), torch.from_numpy(array)

    def body() -> None:
        one.add_(1)
        other.add_(1)

    capture(recording, body)
    assert array.tolist() == [0] * 4


def test_generators_are_as_before_a_capture(recording: RecordingBackend) -> None:
    own = torch.Generator().manual_seed(3)
    default = torch.random.get_rng_state()
    before = own.get_state()
    graph, y = capture(
        recording, lambda: (torch.rand(4), torch.rand(4, generator=own)), generators=[own]
    )
    assert torch.equal(torch.random.get_rng_state(), default)
    assert torch.equal(own.get_state(), before)
    graph.replay()
    assert torch.equal(y[1], torch.rand(4, generator=torch.Generator().manual_seed(3)))
    first = y[1].clone()
    graph.replay()
    assert not torch.equal(y[1], first)


def test_the_state_of_generators_is_saved_and_restored(recording: RecordingBackend) -> None:
    own = torch.Generator().manual_seed(3)
    state = recording.rng_state([own])
    drawn = (torch.rand(2), torch.rand(2, generator=own))
    recording.restore_rng_state(state)
    assert_same((torch.rand(2), torch.rand(2, generator=own)), drawn)


def test_an_arrays_memory_is_read_live_and_never_written(recording: RecordingBackend) -> None:
    array = np.ones(3, dtype=np.float32)
    graph, y = capture(recording, lambda: torch.from_numpy(array) * 2)
    array[:] = 5
    graph.replay()
    assert y.tolist() == [10, 10, 10]
    assert array.tolist() == [5, 5, 5]


# What the process answers.


def test_code_that_asks_is_told_that_the_stream_captures(recording: RecordingBackend) -> None:
    from torch.cuda import is_current_stream_capturing as imported_before

    query = torch.cuda.graphs._cuda_isCurrentStreamCapturing
    x = torch.ones(2)

    def body() -> torch.Tensor:
        assert imported_before()
        return x + 1 if torch.cuda.is_current_stream_capturing() else x - 1

    graph, y = capture(recording, body)
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is query
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_compiled_functions_are_recorded_and_compile_afterwards(
    recording: RecordingBackend,
) -> None:
    compiled = []

    def compiler(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=compiler)
    x = torch.ones(2)
    graph, y = capture(recording, lambda: double(x) + 1)
    assert graph.num_nodes == 2
    assert not compiled
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [7, 7]
    with torch.no_grad():
        assert double(x).tolist() == [6, 6]
    assert compiled
    torch._dynamo.reset()


# Replays.


def test_inputs_may_be_inference_tensors(recording: RecordingBackend) -> None:
    with torch.inference_mode():
        x, state = torch.ones(3), torch.zeros(3)

    def body() -> torch.Tensor:
        with torch.inference_mode():
            state.add_(x)
            return state.expand(2, 3) * 2

    graph, y = capture(recording, body)
    assert not state.any()
    graph.replay()
    graph.replay()
    assert state.tolist() == [2, 2, 2]
    assert y.tolist() == [[4, 4, 4]] * 2


def test_parameters_that_need_gradients(recording: RecordingBackend) -> None:
    layer = torch.nn.Linear(3, 2)
    x = torch.ones(1, 3)
    graph, y = capture(recording, lambda: layer(x).relu())
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.bias.add_(1)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, layer(x).relu())


def test_a_capture_with_gradients_on(recording: RecordingBackend) -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    under_way = recording.begin_capture()
    y = (w * x).sum(0, keepdim=True).expand(2)
    graph = under_way.end()
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [6, 6]


def test_default_dtype_and_autocast_are_the_captures(recording: RecordingBackend) -> None:
    x = torch.ones(2, 2)

    def body() -> Any:
        torch.set_default_dtype(torch.float64)
        a = torch.arange(4).sqrt()
        torch.set_default_dtype(torch.float32)
        return a, torch.arange(4).sqrt(), x @ x

    graph, result = capture(recording, body)
    expected = body()
    for tensor in result:
        tensor.zero_()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            graph.replay()
        assert torch.get_default_dtype() is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(result, expected)


def test_modes_of_the_callers_do_not_see_a_replay(recording: RecordingBackend) -> None:
    x = torch.ones(2)
    graph, y = capture(recording, lambda: x + 1)
    x.fill_(2)
    with Counting() as counting:
        graph.replay()
    assert counting.seen == []
    assert y.tolist() == [3, 3]


def test_a_replay_inside_a_capture_is_refused(recording: RecordingBackend) -> None:
    x = torch.ones(2)
    graph, _ = capture(recording, lambda: x + 1)
    with pytest.raises(CaptureError, match="can't be replayed inside a capture"):
        capture(recording, graph.replay)


def test_a_released_graph_lets_go_of_its_memory(recording: RecordingBackend) -> None:
    x = torch.ones(2)
    graph, y = capture(recording, lambda: (x + 1) * 2)
    kept = weakref.ref(graph._steps[0].copies[0].tensor)
    assert graph.num_nodes == 2
    graph.release()
    gc.collect()
    assert kept() is None
    assert y.tolist() == [4, 4]
    with pytest.raises(StateError, match=r"was released, and can't be replayed; capture it again"):
        graph.replay()


def test_a_graph_keeps_what_it_needs_alive(recording: RecordingBackend) -> None:
    x = torch.ones(64)

    def body() -> torch.Tensor:
        hidden = x * 2
        return (hidden + torch.ones(64)).cumsum(0)

    graph, y = capture(recording, body)
    del body
    gc.collect()
    noise = [torch.full((64,), 9.0) for _ in range(50)]
    x.fill_(2)
    graph.replay()
    assert y[-1].item() == 64 * 5
    assert all(tensor.eq(9).all() for tensor in noise)


def test_an_operator_whose_shape_depends_on_values(recording: RecordingBackend) -> None:
    library = torch.library.Library("graphkit_shapes", "DEF")
    library.define("positive(Tensor x) -> Tensor")
    library.impl("positive", lambda x: x[x > 0], "CPU")
    x = torch.ones(3)
    graph, _ = capture(recording, lambda: torch.ops.graphkit_shapes.positive(x) * 1)
    x[0] = -1
    with pytest.raises(CaptureError) as caught:
        graph.replay()
    assert "graphkit_shapes::positive" in str(caught.value)
    assert "float32[2] in a replay and float32[3] in the capture" in str(caught.value)
    assert "test_capture.py" in str(caught.value.location)
    library._destroy()


def test_an_operator_that_returns_nested_results(recording: RecordingBackend) -> None:
    library = torch.library.Library("graphkit_nested", "DEF")
    library.define("parts(Tensor x) -> (Tensor, Tensor[])")
    library.impl("parts", lambda x: (x * 2, [x + 1, x + 2]), "CPU")
    x = torch.ones(3)
    graph, (a, (b, c)) = capture(recording, lambda: torch.ops.graphkit_nested.parts(x))
    x.fill_(5)
    graph.replay()
    assert [t[0].item() for t in (a, b, c)] == [10, 6, 7]
    library._destroy()


class Wrapper(torch.Tensor):
    """A tensor subclass in the manner of quantized weights: it dispatches to what it holds."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [a.inner * 2 if isinstance(a, Wrapper) else a for a in args]
        return func(*args, **(kwargs or {}))


def test_a_subclass_is_recorded_by_what_it_does(recording: RecordingBackend) -> None:
    weight = Wrapper(torch.ones(3))
    x = torch.ones(3)
    graph, y = capture(recording, lambda: torch.add(weight, x))
    assert graph.num_nodes == 2
    weight.inner.fill_(5)
    graph.replay()
    assert y.tolist() == [11, 11, 11]


def test_a_profiled_capture(recording: RecordingBackend) -> None:
    x = torch.ones(3)

    def body() -> torch.Tensor:
        with torch.profiler.record_function("part"):
            return x + 1

    graph, _ = capture(recording, body)
    assert graph.num_nodes == 1
    assert graph.difference(capture(recording, body)[0]) is None


def test_views_and_allocations_are_no_nodes(recording: RecordingBackend) -> None:
    x = torch.ones(2, 3)

    def body() -> Any:
        y = torch.empty_like(x)
        y.t_().unsqueeze_(0).squeeze_(0)
        z = torch.empty(0)
        z.resize_(4)
        z.set_(y)
        return x[0].view(3).expand(2, 3).t(), x.detach(), x.reshape(3, 2), torch.empty(3)

    for mode in ("no_grad", "inference_mode"):
        assert capture(recording, body, mode=mode)[0].num_nodes == 0


def test_an_assertion_on_the_device_is_repeated(recording: RecordingBackend) -> None:
    fine = torch.tensor(True)
    graph, _ = capture(recording, lambda: torch._assert_async(fine, "not fine"))
    graph.replay()
    fine.fill_(False)
    with pytest.raises(RuntimeError, match="not fine"):
        graph.replay()


# The backend.


def test_the_backend_is_for_a_cpu() -> None:
    with pytest.raises(SpecError, match=r"runs on the CPU, and was given 'meta'"):
        RecordingBackend("meta")


def test_what_means_nothing_on_a_cpu(recording: RecordingBackend) -> None:
    assert recording.new_stream() is None
    assert recording.stream_key() == 0
    assert recording.memory_reserved() == 0
    recording.wait_for(0)
    recording.synchronize()
    recording.empty_cache()
    with recording.on_stream(None):
        pass


def test_host_memory_may_be_written_in_either_mode(recording: RecordingBackend) -> None:
    with torch.inference_mode(), torch.device("meta"):
        memory = recording.host_empty(16)
    assert (memory.dtype, memory.shape, memory.device.type) == (torch.uint8, (16,), "cpu")
    memory.fill_(1)
    with torch.inference_mode():
        memory.fill_(2)


def test_an_operator_that_returns_what_it_kept(recording: RecordingBackend) -> None:
    kept = torch.zeros(3)
    library = torch.library.Library("graphkit_kept", "DEF")
    library.define("last(Tensor x) -> Tensor")
    library.impl("last", lambda x: kept.copy_(x), "CPU")
    x = torch.ones(3)

    def body() -> Any:
        kept.add_(0)
        return torch.ops.graphkit_kept.last(x) + 1

    graph, y = capture(recording, body)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5]
    assert kept.tolist() == [4, 4, 4]
    library._destroy()


def test_results_that_overlap_or_fill_only_a_part_of_their_memory(
    recording: RecordingBackend,
) -> None:
    library = torch.library.Library("graphkit_parts", "DEF")
    library.define("wide(Tensor x) -> Tensor")
    library.define("part(Tensor x) -> Tensor")
    library.define("conjugate(Tensor x) -> Tensor")
    library.impl("wide", lambda x: (x * 2)[:1].expand(2, 2), "CPU")
    library.impl("part", lambda x: (x * 3)[:, 1:], "CPU")
    library.impl("conjugate", lambda x: torch.complex(x, x).conj(), "CPU")
    x = torch.ones(2, 2)

    def body() -> Any:
        ops = torch.ops.graphkit_parts
        wide, part, conjugate = ops.wide(x), ops.part(x), ops.conjugate(x)
        return wide, part, conjugate, wide + 1, part.as_strided((2, 2), (2, 1), 0), conjugate.imag

    graph, results = capture(recording, body)
    x.copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    graph.replay()
    assert_same(results, body())
    library._destroy()
