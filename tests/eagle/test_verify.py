"""Verification: lossless, on the device, with static shapes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphkit as gk
from examples.eagle.draft import DraftConfig, DraftHead
from examples.eagle.engine import Engine
from examples.eagle.memory import Limits
from examples.eagle.model import Config, TinyLM
from examples.eagle.target import next_tokens
from examples.eagle.verify import NO_TOKEN, count_accepted, draw, verify_greedy, verify_sampled

VOCAB = 5


def chi_square_fits(counts: list[int], probs: list[float]) -> bool:
    """Whether counts fit probabilities, at one in 10,000 (Wilson and Hilferty's approximation)."""
    total = sum(counts)
    kept = [(n, p * total) for n, p in zip(counts, probs, strict=True) if p * total >= 5]
    rest = total - sum(n for n, _ in kept), total - sum(e for _, e in kept)
    if rest[1] > 1e-9:
        kept.append(rest)
    freedom = len(kept) - 1
    statistic = sum((n - e) ** 2 / e for n, e in kept)
    a = 2 / (9 * freedom)
    return statistic < freedom * (1 - a + 3.719 * a**0.5) ** 3


def test_chi_square_accepts_what_fits_and_refuses_what_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = [0.5, 0.3, 0.2]
    drawn = torch.multinomial(torch.tensor(probs), 10_000, True, generator=generator)
    counts = torch.bincount(drawn, minlength=3).tolist()
    assert chi_square_fits(counts, probs)
    assert not chi_square_fits(counts, [0.46, 0.34, 0.2])


@st.composite
def greedy_batches(
    draw: st.DrawFn,
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    reqs, k = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    token = st.integers(0, 2)
    best = [[draw(token) for _ in range(k + 1)] for _ in range(reqs)]
    drafts = [[draw(token) for _ in range(k)] for _ in range(reqs)]
    # -1 is a padded request.
    return best, drafts, [draw(st.integers(-1, k)) for _ in range(reqs)]


@given(greedy_batches())
@settings(max_examples=60, deadline=None)
def test_greedy_keeps_exactly_what_the_target_would_have_said(
    batch: tuple[list[list[int]], list[list[int]], list[int]],
) -> None:
    best, drafts, num_drafts = batch
    logits = torch.nn.functional.one_hot(torch.tensor(best), 3).float()
    accepted, sampled = verify_greedy(logits, torch.tensor(drafts), torch.tensor(num_drafts))
    for row, (said, proposed, real) in enumerate(zip(best, drafts, num_drafts, strict=True)):
        kept = 0
        while kept < real and proposed[kept] == said[kept]:
            kept += 1
        rest = [NO_TOKEN] * (len(proposed) - kept)
        assert accepted[row] == kept
        assert sampled[row].tolist() == [*proposed[:kept], said[kept], *rest]


def test_nothing_after_the_first_rejected_draft_is_accepted() -> None:
    matches = torch.tensor([[True, False, True], [False, True, True], [True, True, True]])
    assert count_accepted(matches, torch.tensor([3, 3, 2])).tolist() == [1, 0, 2]


@pytest.mark.parametrize("is_real", [True, False])
def test_a_padded_request_does_not_touch_the_row_that_it_points_at(is_real: bool) -> None:
    ids = torch.tensor([10, 11, 12, 13])
    tokens = next_tokens(
        ids, torch.tensor([3, 0]), torch.tensor([99, 7]), torch.tensor([True, is_real])
    )
    assert tokens.tolist() == [7 if is_real else 11, 12, 13, 99]


def test_a_draw_is_fair_and_never_of_weight_zero() -> None:
    torch.manual_seed(3)
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0])
    counts = torch.bincount(draw(weights.expand(20_000, -1)), minlength=5).tolist()
    assert counts[0] == counts[3] == 0
    assert chi_square_fits(counts, [0, 0.125, 0.375, 0, 0.5])


def sampled_in_a_graph(device: str, temperature: float) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Results of several replays on the same logits, 4,000 rows each; and the target's p."""
    generator = torch.Generator().manual_seed(1)
    rows, k = 4_000, 2
    logits = 1.5 * torch.randn(1, k + 1, VOCAB, generator=generator)
    q = torch.randn(1, k, VOCAB, generator=generator).softmax(-1)
    reqs = gk.Dim("reqs", rows)
    group = gk.GraphGroup(device)
    logits, q = logits.to(device), q.to(device)

    def step(num_drafts: torch.Tensor) -> torch.Tensor:
        probs = q.expand(len(num_drafts), -1, -1).contiguous()
        drafts = draw(probs)
        scores = logits.expand(len(num_drafts), -1, -1)
        return verify_sampled(scores, drafts, num_drafts, probs, temperature)[1]

    fast = group.wrap(
        step,
        num_drafts=gk.BufferSpec((reqs,), torch.int64, pad=-1),
        policy=gk.Policy.full(gk.Buckets.of(reqs, rows)),
        outputs=gk.Output((reqs, k + 1), torch.int64),
    )
    torch.manual_seed(5)
    group.capture()
    given = torch.full((rows,), k, dtype=torch.int64)
    results = [fast(num_drafts=given).cpu() for _ in range(4)]
    assert [row.replays for row in group.report().runners[0].graphs] == [4]
    return results, (logits / temperature).softmax(-1)[0].cpu()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_tokens_are_distributed_as_the_targets(device: str, temperature: float) -> None:
    results, p = sampled_in_a_graph(device, temperature)
    sampled = torch.cat(results)
    for position in range(3):
        tokens = sampled[:, position][sampled[:, position] != NO_TOKEN]
        assert len(tokens) > 1_000
        counts = torch.bincount(tokens, minlength=VOCAB).tolist()
        assert chi_square_fits(counts, p[position].tolist()), (position, counts)


def test_a_replay_never_repeats_its_random_numbers(device: str) -> None:
    results, _ = sampled_in_a_graph(device, 1.0)
    for one, other in itertools.combinations(results, 2):
        # The same row of two draws agrees by chance, in far fewer than all rows.
        assert 0.01 < (one == other).all(1).float().mean() < 0.6


def small_models(vocab: int) -> tuple[TinyLM, DraftHead]:
    """A target and a draft of another mind, both random."""
    config = Config(
        vocab=vocab, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, max_length=16
    )
    generator = torch.Generator().manual_seed(11)
    target = TinyLM(config)
    target.initialize(generator)
    with torch.no_grad():
        target.embedding.weight.normal_(0, 0.5, generator=generator)
    draft = DraftHead(DraftConfig(config), target)
    draft.initialize(generator)
    return target.eval().requires_grad_(False), draft.eval().requires_grad_(False)


def exact_distribution(target: TinyLM, prompt: bytes, tokens: int) -> dict[bytes, float]:
    """Every continuation's probability, by asking the target for each."""
    from examples.eagle.attention import DenseAttention

    found, open_ = {}, {b"": 1.0}
    for _ in range(tokens):
        following: dict[bytes, float] = {}
        for text, weight in open_.items():
            ids = torch.tensor(list(prompt + text))
            at = torch.arange(len(ids))
            hidden = target(ids, at, at, DenseAttention(1))
            for token, p in enumerate(target.logits(hidden[-1:])[0].softmax(-1).tolist()):
                whole = text + bytes([token])
                ends = token == 0 or len(whole) == tokens
                (found if ends else following)[whole] = weight * p
        open_ = following
    return found


@pytest.mark.parametrize("graphs", ["none", "prefill+decode", "one"])
def test_the_engines_texts_are_distributed_as_the_targets(device: str, graphs: str) -> None:
    target, draft = small_models(vocab=4)
    expected = exact_distribution(target, b"\1\2", 4)
    assert sum(expected.values()) == pytest.approx(1)
    target.to(device)
    draft.to(device)
    limits = Limits(
        max_reqs=64, k=2, max_length=16, max_tokens=192, page_size=4, mixed_tokens=(128,)
    )
    engine = Engine(target, draft, limits, temperature=1.0, graphs=graphs, device=device)
    if graphs != "none":
        engine.group.capture(progress=False)
    torch.manual_seed(2)
    outputs = engine.generate([b"\1\2"] * 2_000, 4)
    counts = Counter(outputs)
    keys = sorted(expected)
    assert counts.keys() <= expected.keys()
    assert chi_square_fits([counts[key] for key in keys], [expected[key] for key in keys])
    # The draft was of use, and not always: both ways of going on were taken.
    lengths = {length for record in engine.records for length in record.verified}
    assert lengths == {1, 2, 3}
