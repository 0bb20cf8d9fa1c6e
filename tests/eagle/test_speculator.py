"""The speculator: the right drafts, from the right graphs, in memory that doesn't move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import graphkit as gk
from examples.eagle import corpus
from examples.eagle.attention import DenseAttention
from examples.eagle.draft import DraftConfig, DraftHead, load_draft, run_target
from examples.eagle.engine import Engine
from examples.eagle.memory import Limits
from examples.eagle.model import Config, TinyLM
from examples.eagle.scheduler import Request, Scheduler
from examples.eagle.speculator import GRAPHS, Graphs
from examples.eagle.weights import load_target


def limits_of(k: int, max_reqs: int = 3) -> Limits:
    return Limits(
        max_reqs=max_reqs, k=k, max_length=64, max_tokens=max(128, 8 * max_reqs), mixed_tokens=()
    )


def engine_of(device: str, graphs: Graphs, k: int, *, layers: Sequence[int] = ()) -> Engine:
    target = load_target(device=device)
    if layers:
        draft = DraftHead(DraftConfig(target.config, layers), target)
        draft.initialize(torch.Generator().manual_seed(4))
        draft.to(device).eval().requires_grad_(False)
    else:
        draft = load_draft(target)
    # Buckets of 1, 2, 4 and 6 requests.
    engine = Engine(target, draft, limits_of(k, 6), graphs=graphs, device=device)
    if graphs != "none":
        engine.group.capture(progress=False)
    return engine


def drafts_by_hand(target: TinyLM, draft: DraftHead, tokens: Sequence[int], k: int) -> list[int]:
    """What a loop without cache, batch or graph drafts after these tokens."""
    ids = torch.tensor(tokens, device=target.embedding.weight.device)
    at = torch.arange(len(ids), device=ids.device)[:-1]
    layers = draft.config.target_layers
    _, seen = run_target(target, layers, ids[:-1], at, at, DenseAttention(1))
    hidden, following = draft.fuse(seen), ids[1:]
    drafts = []
    for _ in range(k):
        at = torch.arange(len(following), device=ids.device)
        guess = draft(following, hidden, at, at, DenseAttention(1))[-1:]
        token = draft.logits(guess).argmax(-1)
        drafts.append(int(token))
        following, hidden = torch.cat((following, token)), torch.cat((hidden, guess))
    return drafts


@pytest.mark.parametrize(
    ("graphs", "k", "layers"),
    [*((graphs, 3, ()) for graphs in GRAPHS), ("one", 1, ()), ("prefill+decode", 3, (0, 2))],
)
def test_drafts_are_those_of_a_loop_by_hand(
    device: str, graphs: Graphs, k: int, layers: tuple[int, ...]
) -> None:
    engine = engine_of(device, graphs, k, layers=layers)
    assert engine.speculator is not None
    target, draft = engine.target.model, engine.speculator.draft
    # The first is often wrong, so that its row is where a careless padded request would write.
    engine.add(b"0x7f }{ Zq", 12)
    engine.add(b"if x", 12)
    engine.add(b"The global statement", 9)
    compared = 0
    for step in range(8):
        if step == 4:
            engine.add(b"The with", 9)
        for request in engine.step():
            if not request.is_done:
                assert request.drafts == drafts_by_hand(target, draft, request.tokens, k)
                compared += 1
    assert compared >= 10


def test_padded_requests_leave_a_prompts_rows_alone(device: str) -> None:
    engine = engine_of(device, "prefill+decode", 2)
    prompt = b"zq}{ 0x7f"
    engine.add(prompt, 8)
    engine.scheduler.admit()
    batch = engine.scheduler.batch()
    bonus = int(engine.target.run(batch)[0, 0])
    padding = engine.group.report().runners[0].counts[0].padding
    assert padding["reqs"] > 0
    following = engine.memory.buffers.draft_ids.tensor[: len(prompt)].tolist()
    assert following == [*prompt[1:], bonus]


def replays(engine: Engine) -> dict[str, int]:
    report = engine.group.report()
    return {runner.name: sum(row.replays for row in runner.graphs) for runner in report.runners}


@pytest.mark.parametrize(
    ("graphs", "expected"),
    [
        ("none", {"target": 0, "prefill": 0, "decode": 0}),
        ("decode", {"target": 1, "prefill": 0, "decode": 1}),
        ("prefill+decode", {"target": 1, "prefill": 1, "decode": 1}),
        ("one", {"target": 1, "prefill": 0, "decode": 0, "propose": 1}),
    ],
)
def test_a_uniform_step_replays_as_many_graphs_as_its_mode_says(
    device: str, graphs: Graphs, expected: dict[str, int]
) -> None:
    engine = engine_of(device, graphs, 2)
    engine.add(b"The pass statement", 20)
    engine.step()
    before = replays(engine)
    engine.step()
    assert {name: n - before[name] for name, n in replays(engine).items()} == expected


def test_results_lie_in_one_place_whatever_the_bucket(device: str) -> None:
    engine = engine_of(device, "prefill+decode", 2)
    buffers = engine.memory.buffers
    assert engine.speculator is not None
    engine.add(b"The pass statement", 30)
    for step in range(4):
        if step == 2:
            engine.add(b"class", 30)
            engine.add(b"class", 30)
        engine.scheduler.admit()
        batch = engine.scheduler.batch()
        sampled, drafts = engine.target.run(batch), engine.speculator.propose(batch)
        assert sampled.data_ptr() == buffers.sampled.tensor.data_ptr()
        assert drafts.data_ptr() == buffers.draft_tokens.tensor.data_ptr()
        assert sampled.shape == (batch.reqs, 3)
        assert drafts.shape == (batch.reqs, 2)
        for request, tokens, proposed in zip(
            engine.scheduler.running, sampled.tolist(), drafts.tolist(), strict=True
        ):
            request.extend([token for token in tokens if token >= 0], 64)
            request.has_run, request.drafts = True, proposed


def untrained(k: int, max_reqs: int, graphs: Graphs) -> Engine:
    """An engine whose model is small, random, and no longer than its requests may be."""
    config = Config(width=8, layers=1, heads=2, kv_heads=1, head_dim=4, hidden=8, max_length=64)
    target = TinyLM(config)
    draft = DraftHead(DraftConfig(config), target)
    for module in (target, draft):
        module.initialize(torch.Generator().manual_seed(1))
        module.eval().requires_grad_(False)
    return Engine(target, draft, limits_of(k, max_reqs), graphs=graphs)


@pytest.mark.parametrize("graphs", ["none", "one"])
def test_nothing_reaches_beyond_the_models_last_position(graphs: Graphs) -> None:
    engine = untrained(5, 2, graphs)
    assert engine.limits.max_length == engine.target.model.config.max_length
    if graphs == "one":
        engine.group.capture(progress=False)
    prompts = [bytes(range(1, 59)), bytes(range(1, 63))]
    plain = Engine(
        engine.target.model, None, Limits(max_reqs=2, k=0, max_length=64, max_tokens=128)
    )
    outputs = engine.generate(prompts, 10)
    assert outputs == plain.generate(prompts, 10)
    assert [len(output) for output in outputs] == [6, 2]


def test_97_of_100_requests_have_a_graph() -> None:
    engine = untrained(3, 100, "one")
    for runner in engine.group.runners:
        dispatcher = gk.Dispatcher(runner.policy, runner.dims)
        if runner.name == "decode":
            answer = dispatcher.dispatch(reqs=97)
        elif runner.name == "prefill":
            continue  # in this mode, where lengths vary only
        else:
            answer = dispatcher.dispatch(reqs=97, tokens=97 * 4, query_len=4)
        assert answer.mode is gk.FULL
        assert answer.bucket is not None
        assert answer.bucket.sizes["reqs"] == 100


@pytest.mark.parametrize("graphs", ["prefill+decode", "one"])
def test_a_prompt_of_k_plus_1_tokens_is_not_taken_for_a_decode(graphs: Graphs) -> None:
    engine = untrained(3, 4, graphs)
    request = engine.add(b"abcd", 8)
    engine.scheduler.admit()
    batch = engine.scheduler.batch()
    assert (batch.reqs, batch.tokens, batch.query_len) == (1, 4, None)
    request.has_run, request.drafts = True, [1, 2, 3]
    decode = engine.scheduler.batch()
    assert (decode.reqs, decode.tokens, decode.query_len) == (1, 4, 4)
    for name in ("target", "prefill"):
        runner = engine.group[name]
        dispatcher = gk.Dispatcher(runner.policy, runner.dims)
        assert dispatcher.dispatch(reqs=1, tokens=4, query_len=None).mode is gk.PIECEWISE


def test_the_shipped_draft_is_accepted_for_two_tokens_a_step(device: str) -> None:
    engine = engine_of(device, "none", 3)
    engine.generate(corpus.heldout_prompts(12, 24), 32)
    lengths = [length for record in engine.records for length in record.verified]
    assert sum(lengths) / len(lengths) >= 2.0


# -- the scheduler --------------------------------------------------------------------------------


def test_rows_of_a_mixed_batch() -> None:
    scheduler = Scheduler(Limits(max_reqs=3, k=2, max_length=32, max_tokens=32, page_size=4))
    old = scheduler.add(b"abcde", 10)
    scheduler.admit()
    old.extend([102], 32)
    old.has_run, old.drafts = True, [103, 104]
    scheduler.add(b"xyz", 10)
    scheduler.admit()
    batch = scheduler.batch()
    assert batch.query_len is None
    assert batch.query_start.tolist() == [0, 3, 6]
    assert batch.input_ids.tolist() == [102, 103, 104, *b"xyz"]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 2]
    assert batch.seq_lens.tolist() == [8, 3]
    # The newest token's row: the first of a decode's, the last of a prompt's.
    assert batch.first_row.tolist() == [0, 5]
    assert batch.num_drafts.tolist() == [2, 0]
    pages = [page for request in scheduler.running for page in request.pages]
    assert len(set(pages)) == len(pages)
    assert 0 not in pages
    first = scheduler.running[0].pages
    assert batch.slot_mapping.tolist()[:3] == [4 * first[1] + n for n in (1, 2, 3)]
    assert len({request.seat for request in scheduler.running} | {0}) == 3


def test_drafts_beyond_the_last_position_go_to_scratch() -> None:
    scheduler = Scheduler(Limits(max_reqs=1, k=3, max_length=8, max_tokens=8, page_size=4))
    request = scheduler.add(b"abcdef", 10)
    scheduler.admit()
    request.extend([103], 8)
    request.has_run, request.drafts = True, [104, 105, 106]
    batch = scheduler.batch()
    assert batch.query_len == 4
    assert batch.num_drafts.tolist() == [1]
    assert batch.positions.tolist() == [6, 7, 7, 7]
    assert batch.slot_mapping.tolist()[2:] == [0, 0]


def test_more_prompts_than_seats_wait_their_turn() -> None:
    scheduler = Scheduler(Limits(max_reqs=2, k=1, max_length=16, max_tokens=16))
    requests = [scheduler.add(b"ab", 3) for _ in range(4)]
    scheduler.admit()
    assert scheduler.running == requests[:2]
    requests[0].is_done = True
    scheduler.admit()
    assert scheduler.running == requests[1:3]
    assert list(scheduler.waiting) == requests[3:]


def test_prompts_wait_for_room_in_the_step() -> None:
    scheduler = Scheduler(Limits(max_reqs=4, k=1, max_length=16, max_tokens=16))
    requests = [scheduler.add(b"x" * 7, 3) for _ in range(3)]
    scheduler.admit()
    assert scheduler.running == requests[:2]


def test_a_request_ends_with_its_text_or_at_its_limit() -> None:
    request = Request(b"ab", 5)
    assert request.extend([99, 0, 100], 64) == 2
    assert request.is_done
    assert request.output == b"c\0"
    request = Request(b"ab", 5)
    assert request.extend([99, 100, 101], 4) == 2
    assert request.is_done


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        (b"", 4, "a prompt is empty: give at least one byte"),
        (b"ab" * 8, 4, "a prompt has 16 bytes, and the model takes at most 15"),
        (b"ab", 0, "max_tokens=0: ask for at least one token"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(
    prompt: bytes, tokens: int, message: str
) -> None:
    scheduler = Scheduler(Limits(max_reqs=2, k=1, max_length=16, max_tokens=16))
    with pytest.raises(ValueError, match=message):
        scheduler.add(prompt, tokens)
    assert not scheduler.has_work
