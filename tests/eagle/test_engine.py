"""The engine: greedy speculative text equals plain greedy text, whatever the schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import graphkit as gk
from examples.eagle import corpus
from examples.eagle.attention import DenseAttention
from examples.eagle.draft import DraftConfig, DraftHead, load_draft
from examples.eagle.engine import Engine
from examples.eagle.memory import Limits
from examples.eagle.model import TinyLM
from examples.eagle.speculator import GRAPHS, Graphs
from examples.eagle.weights import WeightsError, load_target

from .conftest import Tally

MAX_LENGTH = 64
NEAR_TIE = 1e-4

WAYS: list[tuple[Graphs, int]] = [
    ("none", 6),
    ("decode", 4),
    ("prefill+decode", 1),
    ("prefill+decode", 3),
    ("one", 2),
    ("one", 5),
]
"""Each mode, and each K from 1 to 6, once; a graph takes a moment to capture."""


@attrs.frozen
class Model:
    """A target, its draft head, and plain greedy decoding as the reference."""

    target: TinyLM
    draft: DraftHead
    plain: Engine
    known: dict[tuple[bytes, int], bytes] = attrs.field(factory=dict)

    @property
    def device(self) -> torch.device:
        return self.target.embedding.weight.device

    def continuations(self, wanted: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """What the target says without speculation to each prompt, in so many tokens."""
        new = {pair: self.plain.add(*pair) for pair in wanted if pair not in self.known}
        for _ in self.plain.run():
            pass
        self.known.update((pair, request.output) for pair, request in new.items())
        return [self.known[pair] for pair in wanted]

    def gap_after(self, text: bytes) -> float:
        """How far apart the two best logits for the next token are."""
        ids = torch.tensor(list(text), device=self.device)
        at = torch.arange(len(ids), device=self.device)
        hidden = self.target(ids, at, at, DenseAttention(1))
        first, second = self.target.logits(hidden[-1:])[0].topk(2).values.tolist()
        return float(first - second)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(request: pytest.FixtureRequest) -> Model:
    target = load_target(device=request.param)
    try:
        draft = load_draft(target)
    except WeightsError:
        draft = DraftHead(DraftConfig(target.config), target).eval().requires_grad_(False)
        draft.initialize(torch.Generator().manual_seed(0))
        draft.to(request.param)
    limits = Limits(max_reqs=40, k=0, max_length=MAX_LENGTH, max_tokens=1024)
    return Model(target, draft, Engine(target, None, limits, graphs="none", device=request.param))


EngineOf = Callable[[Graphs, int], Engine]


@pytest.fixture(scope="module")
def engine_of(model: Model) -> EngineOf:
    """Engines by mode and K, captured once."""
    engines: dict[tuple[Graphs, int], Engine] = {}

    def get(graphs: Graphs, k: int) -> Engine:
        if (graphs, k) not in engines:
            limits = Limits(
                max_reqs=5, k=k, max_length=MAX_LENGTH, max_tokens=128, mixed_tokens=(32,)
            )
            engine = Engine(model.target, model.draft, limits, graphs=graphs, device=model.device)
            if graphs != "none":
                engine.group.capture(progress=False)
            engines[graphs, k] = engine
        return engines[graphs, k]

    return get


def check_same(
    model: Model, tally: Tally, wanted: Sequence[tuple[bytes, int]], outputs: Sequence[bytes]
) -> None:
    """The texts are equal, or part where the target itself was undecided."""
    expectations = model.continuations(wanted)
    for (prompt, _), output, expected in zip(wanted, outputs, expectations, strict=True):
        tally.compared += 1
        if output == expected:
            continue
        pairs = list(zip(output, expected, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gap = model.gap_after(prompt + expected[:same])
        assert gap < NEAR_TIE, (prompt, output, expected, gap)
        tally.near_ties += 1
        event("parts at a near tie")


TEXT = corpus.heldout_text().replace(b"\0", b"\n")


@st.composite
def prompts(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(min_size=1, max_size=30))
    start = draw(st.integers(0, len(TEXT) - 50))
    return TEXT[start : start + draw(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 12, 20, 31)))]


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[int, bytes, int]]:
    """Requests: the step before which they arrive, their prompt, and how many tokens they want."""
    count = draw(st.integers(1, 7))
    lengths = st.integers(1, 14)
    weights = [0, 0, 0, 1, 2, 5]
    return [(draw(st.sampled_from(weights)), draw(prompts()), draw(lengths)) for _ in range(count)]


def serve(engine: Engine, schedule: list[tuple[int, bytes, int]]) -> list[bytes]:
    """Run a schedule, and give each request's text, in order."""
    requests: dict[int, Any] = {}
    step = 0
    while len(requests) < len(schedule) or engine.scheduler.has_work:
        for index, (arrival, prompt, tokens) in enumerate(schedule):
            if arrival == step:
                requests[index] = engine.add(prompt, tokens)
        engine.step()
        step += 1
    return [requests[index].output for index in range(len(schedule))]


def check(
    model: Model, tally: Tally, engine: Engine, schedule: list[tuple[int, bytes, int]]
) -> None:
    """A schedule's texts are those of plain decoding."""
    wanted = [(prompt, tokens) for _, prompt, tokens in schedule]
    check_same(model, tally, wanted, serve(engine, schedule))


@given(way=st.sampled_from(WAYS), schedule=schedules())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_speculative_text_is_plain_text(
    model: Model,
    engine_of: EngineOf,
    tally: Tally,
    way: tuple[Graphs, int],
    schedule: list[tuple[int, bytes, int]],
) -> None:
    check(model, tally, engine_of(*way), schedule)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_gives_plain_text_up_to_the_models_last_position(
    model: Model, engine_of: EngineOf, tally: Tally, way: tuple[Graphs, int]
) -> None:
    # Long enough that drafts would lie beyond the last position, and of K + 1 tokens, among others.
    lengths = (way[1] + 1, 40, MAX_LENGTH - 1, MAX_LENGTH - 2, 17)
    schedule = [(0, TEXT[200 * n : 200 * n + size], MAX_LENGTH) for n, size in enumerate(lengths)]
    check(model, tally, engine_of(*way), schedule)


def test_forty_prompts_in_thirty_two_seats(model: Model, tally: Tally) -> None:
    limits = Limits(max_reqs=32, k=3, max_length=32, max_tokens=512, mixed_tokens=())
    engine = Engine(model.target, model.draft, limits, graphs="one", device=model.device)
    engine.group.capture(progress=False)
    texts = corpus.heldout_prompts(40, 12)
    for _ in range(2):
        check_same(model, tally, [(text, 10) for text in texts], engine.generate(texts, 10))
    assert max(len(record.gained) for record in engine.records) == 32


@pytest.mark.parametrize("graphs", GRAPHS)
def test_checked_mode_finds_nothing_to_refuse(model: Model, tally: Tally, graphs: Graphs) -> None:
    limits = Limits(max_reqs=2, k=2, max_length=64, max_tokens=64, mixed_tokens=())
    engine = Engine(
        model.target, model.draft, limits, graphs=graphs, device=model.device, checked=True
    )
    if graphs != "none":
        engine.group.capture(progress=False)
    schedule = [(0, b"The del statement", 8), (2, b"class A", 8), (2, b"a", 3)]
    check(model, tally, engine, schedule)


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way[0] in ("prefill+decode", "one")], ids=str
)
def test_uniform_steps_never_run_eager_and_others_never_replay_a_uniform_graph(
    model: Model, engine_of: EngineOf, way: tuple[Graphs, int]
) -> None:
    engine = engine_of(*way)
    for runner in engine.group.runners:
        runner.dispatcher.reset_counts()
    seen = len(engine.records)
    # A prompt of K + 1 tokens, alone: the shape of a decode, but none.
    serve(engine, [(0, b"import sys"[: way[1] + 1], 12), (0, b"return", 9), (3, b"for i in", 9)])
    serve(engine, [(0, b"import sys"[: way[1] + 1], 12)])
    records = engine.records[seen:]
    uniform = sum(record.is_uniform for record in records)
    mixed = len(records) - uniform
    assert mixed == 3
    assert uniform > 3
    counted = {
        runner.name: {
            mode: sum(c.dispatches for c in runner.counts if c.mode is mode)
            for mode in (gk.FULL, gk.PIECEWISE, gk.EAGER)
        }
        for runner in engine.group.report().runners
    }
    both = {gk.FULL: uniform, gk.PIECEWISE: mixed, gk.EAGER: 0}
    assert counted["target"] == both
    if way[0] == "one":
        assert counted["propose"] == {gk.FULL: uniform, gk.PIECEWISE: 0, gk.EAGER: 0}
        assert counted["prefill"] == {gk.FULL: 0, gk.PIECEWISE: mixed, gk.EAGER: 0}
        assert counted["decode"] == {gk.FULL: mixed, gk.PIECEWISE: 0, gk.EAGER: 0}
    else:
        assert counted["prefill"] == both
        assert counted["decode"] == {gk.FULL: uniform + mixed, gk.PIECEWISE: 0, gk.EAGER: 0}


def test_a_step_syncs_with_the_host_once(model: Model, engine_of: EngineOf) -> None:
    if model.device.type != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    engine = engine_of("one", 2)
    engine.add(b"The global statement", 12)
    engine.step()
    batch = engine.scheduler.batch()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        engine.target.run(batch)
        assert engine.speculator is not None
        engine.speculator.propose(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in engine.run():
        pass


def test_limits_and_engine_say_what_does_not_fit(model: Model) -> None:
    with pytest.raises(ValueError, match="8 requests of 4 tokens.*need 32"):
        Limits(max_reqs=8, k=3, max_length=16, max_tokens=31)
    with pytest.raises(ValueError, match="k=3 needs a draft head"):
        Engine(model.target, None, Limits(k=3))
    with pytest.raises(ValueError, match="k=0 needs no draft head"):
        Engine(model.target, model.draft, Limits(k=0))
    with pytest.raises(ValueError, match="max_length=1000 is beyond the model's 512"):
        Engine(model.target, model.draft, Limits(k=3, max_length=1000))


def test_sampling_repeats_with_its_seed_and_not_otherwise(
    model: Model,
) -> None:
    limits = Limits(max_reqs=2, k=3, max_length=64, max_tokens=64, mixed_tokens=())
    engine = Engine(
        model.target, model.draft, limits, temperature=1.0, graphs="one", device=model.device
    )
    engine.group.capture(progress=False)
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(engine.generate([b"The yield", b"del"], 30))
    assert texts[0] == texts[1] != texts[2]


def test_nothing_is_left_of_a_request_that_has_gone(engine_of: EngineOf) -> None:
    engine = engine_of("prefill+decode", 3)
    engine.generate([b"with open"], 5)
    before = len(engine.scheduler._pages), len(engine.scheduler._seats)
    engine.generate([b"with open", b"a", b"b", b"c", b"d"], 5)
    assert (len(engine.scheduler._pages), len(engine.scheduler._seats)) == before
    assert before == (engine.limits.pages - 1, engine.limits.max_reqs)
    assert math.isclose(before[0] / engine.limits.pages_per_request, engine.limits.max_reqs)
