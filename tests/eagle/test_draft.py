"""The draft head: what it reads, what it stores, and that it was trained well."""

from __future__ import annotations

import hashlib
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from examples.eagle import corpus, train_draft, weights
from examples.eagle.attention import DenseAttention, PagedCache, UniformAttention, VarlenAttention
from examples.eagle.draft import DRAFT, DraftConfig, DraftHead, load_draft, run_target
from examples.eagle.model import Config, TinyLM

SMALL = Config(width=16, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=24, max_length=64)


def small_target() -> TinyLM:
    target = TinyLM(SMALL)
    target.initialize(torch.Generator().manual_seed(1))
    # Scales at which every part of the computation shows in the result.
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
        target.norm.gain.copy_(torch.linspace(0.5, 2.0, SMALL.width))
    return target.eval().requires_grad_(False)


def small_draft(target: TinyLM, layers: tuple[int, ...] = ()) -> DraftHead:
    draft = DraftHead(DraftConfig(target.config, layers), target)
    draft.initialize(torch.Generator().manual_seed(2))
    with torch.no_grad():
        for parameter in draft.layer.parameters():
            parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
    return draft.eval().requires_grad_(False)


def cache_of(config: Config, layers: int, pages: int = 4) -> PagedCache:
    return PagedCache(layers, pages + 1, 16, config.kv_heads, config.head_dim, torch.float32, "cpu")


TABLE = torch.arange(1, 5, dtype=torch.int32)[None]


def some_text(count: int, seed: int = 3) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


# Sizes


@pytest.mark.parametrize("layers", [(3,), (-1,), (1, 0), (1, 1)])
def test_layers_that_the_target_lacks_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="name layers of the target") as caught:
        DraftConfig(SMALL, layers)
    assert str(caught.value) == (
        f"target_layers={layers}: name layers of the target, 0 to 2, each once, in rising order"
    )


def test_a_config_is_frozen_and_takes_any_sequence() -> None:
    config = DraftConfig(SMALL, [0, 2])  # type: ignore[arg-type]
    assert config.target_layers == (0, 2)
    assert config.seen_width == 32
    assert DraftConfig(SMALL).seen_width == 16
    assert config.cache_layers == 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.target_layers = ()


def test_a_draft_of_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="build it from the target's own config"):
        DraftHead(DraftConfig(attrs.evolve(SMALL, width=8)), small_target())


# What it holds


def test_the_targets_weights_are_not_the_drafts() -> None:
    target = small_target()
    draft = small_draft(target)
    assert draft.target is target
    shared = {id(p) for p in target.parameters()}
    assert not shared & {id(p) for p in draft.parameters()}
    assert not any("target" in name for name, _ in draft.named_modules())
    assert set(draft.state_dict()) == {name for name, _ in draft.named_parameters()}


def test_only_an_eagle_3_draft_fuses_layers() -> None:
    target = small_target()
    seen = torch.randn(5, 32)
    assert small_draft(target).fuse(seen) is seen
    fusing = small_draft(target, (0, 2))
    assert "fusion.weight" in dict(fusing.named_parameters())
    torch.testing.assert_close(fusing.fuse(seen), seen @ fusing.fusion.weight.T)


def test_the_guess_is_scaled_like_the_targets_hidden_state() -> None:
    target = small_target()
    assert torch.equal(small_draft(target).norm.gain, target.norm.gain)


# What it computes


def test_the_targets_forward_is_the_targets_own() -> None:
    target, text = small_target(), some_text(24)
    positions = torch.arange(24)
    plain = target(text, positions, positions, DenseAttention(1))
    hidden, seen = run_target(target, (), text, positions, positions, DenseAttention(1))
    assert torch.equal(hidden, plain)
    assert seen is hidden
    hidden, seen = run_target(target, (0, 2), text, positions, positions, DenseAttention(1))
    assert torch.equal(hidden, plain)
    assert seen.shape == (24, 32)
    # The last layer's output is what the last norm took.
    assert torch.equal(target.norm(seen[:, 16:]), plain)
    assert not torch.allclose(seen[:, :16], seen[:, 16:])


def test_both_the_token_and_the_hidden_state_matter() -> None:
    target = small_target()
    draft = small_draft(target)
    text, positions = some_text(8), torch.arange(8)
    hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(4))

    def guess(tokens: Tensor, states: Tensor) -> Tensor:
        return draft(tokens, states, positions, positions, DenseAttention(1))

    plain = guess(text, hidden)
    other_text, other_hidden = text.clone(), hidden.clone()
    other_text[5] = (text[5] + 1) % 256
    other_hidden[5] += torch.linspace(-1, 1, 16)
    for changed in (guess(other_text, hidden), guess(text, other_hidden)):
        assert torch.equal(changed[:5], plain[:5])  # causal
        assert (changed[5:] - plain[5:]).abs().amax(1).min() > 1e-3  # row 5, and what attends to it
    assert plain.shape == (8, 16)
    logits = draft.logits(plain)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, target.logits(plain))


def test_positions_matter_only_relative_to_each_other() -> None:
    target = small_target()
    draft = small_draft(target)
    text, hidden, slots = some_text(8), torch.randn(8, 16), torch.arange(8)
    results = [
        draft(text, hidden, positions, slots, DenseAttention(1))
        for positions in (slots, slots + 7, 2 * slots)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], results[2], rtol=1e-2, atol=1e-2)


@torch.no_grad()
def chain(draft: DraftHead, text: Tensor, verified: int, depth: int) -> Tensor:
    """As serving does it: a prefill over ``verified`` positions, then ``depth`` steps, each fed
    the text's own token; the last guess."""
    hidden = draft.target(text, torch.arange(len(text)), torch.arange(len(text)), DenseAttention(1))
    cache = cache_of(draft.config.target, draft.config.cache_layers)
    positions = torch.arange(verified)
    attention = VarlenAttention(cache, [0, verified], [verified], TABLE)
    guess = draft(text[1 : verified + 1], hidden[:verified], positions, 16 + positions, attention)
    guess = guess[-1:]
    for position in range(verified, verified + depth):
        here = torch.tensor([position])
        step = UniformAttention(cache, TABLE, (here + 1).to(torch.int32), 1)
        guess = draft(text[position + 1 : position + 2], guess, here, 16 + here, step)
    return guess


@torch.no_grad()
def test_training_unrolls_what_serving_does() -> None:
    target = small_target()
    draft = small_draft(target)
    batch, length = 2, 20
    text = some_text(batch * length).view(batch, length)
    positions = torch.arange(length).repeat(batch)
    states = target(text.flatten(), positions, positions, DenseAttention(batch))
    hidden = states.view(batch, length, -1)[:, :-1]
    entries = positions.view(batch, length)[:, :-1].flatten()
    attention = train_draft.UnrolledAttention(batch)
    for depth in range(4):
        guess = draft(text[:, 1:].flatten(), hidden.flatten(0, 1), entries, entries, attention)
        guess = guess.view(batch, length - 1, -1)
        assert guess.isfinite().all()
        for sequence in range(batch):
            for entry in range(depth, length - 1):
                expected = chain(draft, text[sequence], entry - depth + 1, depth)[0]
                torch.testing.assert_close(guess[sequence, entry], expected, rtol=1e-4, atol=1e-4)
        hidden = guess.roll(1, dims=1)


@torch.no_grad()
def test_stale_guesses_above_the_verified_text_are_never_read() -> None:
    target = small_target()
    draft = small_draft(target)
    text = some_text(20)
    hidden = target(text, torch.arange(20), torch.arange(20), DenseAttention(1))
    results = []
    for garbage in (0.0, 100.0):
        cache = cache_of(SMALL, 1)
        cache.keys[:, 16 + 12 :] = garbage
        cache.values[:, 16 + 12 :] = garbage
        positions = torch.arange(12)
        attention = VarlenAttention(cache, [0, 12], [12], TABLE)
        results.append(draft(text[1:13], hidden[:12], positions, 16 + positions, attention))
    assert torch.equal(*results)


# The training


def greedy(target: TinyLM, prompt: bytes, count: int) -> bytes:
    """Plain greedy decoding, without a cache."""
    text = list(prompt)
    for _ in range(count):
        positions = torch.arange(len(text))
        with torch.no_grad():
            hidden = target(torch.tensor(text), positions, positions, DenseAttention(1))
        text.append(int(target.logits(hidden[-1:]).argmax()))
    return bytes(text[len(prompt) :])


def test_what_the_target_writes_is_its_own_choice() -> None:
    target = small_target()
    prompts = some_text(3 * 5).view(3, 5)
    cold = torch.zeros(3, 1)
    text = train_draft.write(target, prompts, 21, cold, torch.Generator().manual_seed(5))
    assert text.shape == (3, 21)
    for row, prompt in zip(text, prompts, strict=True):
        assert bytes(row.tolist()) == bytes(prompt.tolist()) + greedy(
            target, bytes(prompt.tolist()), 16
        )


def test_what_the_target_writes_follows_the_temperature() -> None:
    target = small_target()
    prompts, rows = some_text(5).repeat(4_000, 1), 4_000
    with torch.no_grad():
        hidden = target(prompts[0], torch.arange(5), torch.arange(5), DenseAttention(1))
    logits = target.logits(hidden[-1:])[0]
    for temperature in (1.0, 0.5):
        warm = torch.full((rows, 1), temperature)
        text = train_draft.write(target, prompts, 6, warm, torch.Generator().manual_seed(6))
        counts = torch.bincount(text[:, 5], minlength=256) / rows
        wanted = (logits / temperature).softmax(0)
        assert (counts - wanted).abs().sum() / 2 < 0.12  # total variation
        assert (counts - logits.div(1.5 - temperature).softmax(0)).abs().sum() / 2 > (
            0.2 if temperature == 0.5 else 0.12
        )


@pytest.mark.parametrize("layers", [(), (0, 2)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_reference_loop_is_lossless(layers: tuple[int, ...], k: int) -> None:
    target = small_target()
    draft = small_draft(target, layers)
    for prompt in (b"x", b"abcdefgh"):
        text, yields = train_draft.speculate(draft, prompt, k, 24)
        assert text == greedy(target, prompt, 24)
        assert all(1 <= n <= k + 1 for n in yields)
        # The first token is the prefill's; the last verification may write past the count.
        assert 24 <= 1 + sum(yields) <= 24 + k


@torch.no_grad()
def test_a_perfect_draft_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    draft = small_draft(target)
    prompt, k = b"abcdefgh", 3
    future = prompt + greedy(target, prompt, 40)

    def forward(ids: Tensor, hidden: Tensor, positions: Tensor, *rest: object) -> Tensor:
        # Its answer is the token two after each position, in a code that `logits` reads.
        assert ids.tolist() == list(future[int(positions[0]) + 1 :][: len(ids)])
        wanted = torch.tensor([future[int(p) + 2] for p in positions])
        return wanted[:, None].float()

    monkeypatch.setattr(draft, "forward", forward)
    monkeypatch.setattr(
        draft, "logits", lambda code: torch.nn.functional.one_hot(code[:, 0].long(), 256).float()
    )
    _, yields = train_draft.speculate(draft, prompt, k, 32)
    assert yields
    assert set(yields) == {k + 1}
    assert train_draft.mean_accepted_length(draft, [prompt], k, 32) == k + 1


def test_the_loss_is_lower_for_better_guesses() -> None:
    target = small_target()
    draft = small_draft(target).requires_grad_(True)
    text = some_text(4 * 16).view(4, 16)
    optimizer = torch.optim.Adam(draft.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss, agreed = train_draft.draft_loss(draft, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert agreed.shape == (train_draft.DEPTH,)
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is None for p in target.parameters())


def test_the_schedule_rises_falls_and_fits_the_model() -> None:
    rates = [train_draft.learning_rate_at(step, 500) for step in range(500)]
    peak = rates.index(max(rates))
    assert peak in (train_draft.WARMUP_STEPS - 1, train_draft.WARMUP_STEPS)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    lengths = [train_draft.length_at(i / 100) for i in range(100)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == Config().max_length
    assert all(train_draft.TOKENS_PER_STEP % (2 * length) == 0 for length in lengths)


def test_it_learns_and_is_repeatable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"TOKENS_PER_STEP": 256, "WARMUP_STEPS": 2, "WRITTEN": 4, "WRITTEN_LENGTH": 80}
    for name, value in (small | {"LENGTHS": ((1.0, 64),)}).items():
        monkeypatch.setattr(train_draft, name, value)
    prompts = corpus.heldout_prompts(1, 16)
    monkeypatch.setattr(corpus, "heldout_prompts", lambda count, length: prompts)
    for name in ("one", "two"):
        train_draft.train(tmp_path / name, steps=4, save_every=4, target_layers=(1, 3))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    training = weights.read_metadata(tmp_path / "one")["training"]
    assert training["steps"] == 4
    assert len(training["agreed_by_step"]) == train_draft.DEPTH
    draft = load_draft(weights.load_target(), tmp_path / "one")
    assert draft.config.target_layers == (1, 3)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(train_draft, "train", lambda *given: asked.append(given))
    out = tmp_path / "x.safetensors"
    arguments = ["train_draft", "--out", str(out), "--steps", "7", "--target-layers", "0", "2"]
    monkeypatch.setattr("sys.argv", arguments)
    train_draft.main()
    assert asked == [(out, 7, (0, 2))]


# The shipped weights


@pytest.fixture(scope="module")
def target() -> TinyLM:
    return weights.load_target()


def test_the_file_is_small_and_belongs_to_the_shipped_target() -> None:
    assert DRAFT.stat().st_size <= 2_000_000
    training = weights.read_metadata(DRAFT)["training"]
    assert training["steps"] == train_draft.STEPS
    assert training["seed"] == train_draft.SEED
    # A target that was trained anew needs a draft that was, too.
    assert training["target_sha256"] == hashlib.sha256(weights.TARGET.read_bytes()).hexdigest()


def test_it_is_loaded_beside_its_target(target: TinyLM) -> None:
    draft = load_draft(target)
    assert draft.target is target
    assert {p.dtype for p in draft.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in draft.parameters())
    assert not draft.training


def test_it_follows_its_target(device: str) -> None:
    target = weights.load_target(dtype=torch.bfloat16, device=device)
    draft = load_draft(target)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in draft.parameters()} == {device}
    text = some_text(8).to(device)
    positions = torch.arange(8, device=device)
    hidden = target(text, positions, positions, DenseAttention(1))
    guess = draft(text, hidden, positions, positions, DenseAttention(1))
    assert guess.dtype == torch.bfloat16
    assert draft.logits(guess).dtype == torch.float32


def test_its_accepted_length_on_heldout_prompts(target: TinyLM) -> None:
    prompts = corpus.heldout_prompts(8, 48)
    draft = load_draft(target)
    assert train_draft.mean_accepted_length(draft, prompts, k=3, count=64) >= 2.0


def test_it_is_lossless_on_the_shipped_models(target: TinyLM) -> None:
    draft = load_draft(target)
    for prompt in corpus.heldout_prompts(2, 32):
        text, _ = train_draft.speculate(draft, prompt, 3, 48)
        assert text == greedy(target, prompt, 48)


def test_a_missing_file_is_one_clear_line(target: TinyLM, tmp_path: Path) -> None:
    with pytest.raises(weights.WeightsError) as caught:
        load_draft(target, tmp_path / "none")
    assert str(caught.value) == (
        f"no draft weights at {tmp_path / 'none'}: train them, see examples/eagle/train_draft.py"
    )


@pytest.mark.parametrize("keep", [0, 4, 5_000])
def test_a_damaged_file_is_one_clear_line(target: TinyLM, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(DRAFT.read_bytes()[:keep])
    with pytest.raises(weights.WeightsError, match=r"^.* is no readable weights file .*: restore"):
        load_draft(target, path)


def test_a_target_is_no_draft(target: TinyLM) -> None:
    with pytest.raises(weights.WeightsError, match="doesn't say what sizes its draft head has"):
        load_draft(target, weights.TARGET)


def test_a_draft_for_another_target_is_refused() -> None:
    with pytest.raises(weights.WeightsError, match="train a draft head for it"):
        load_draft(small_target())


def test_weights_that_do_not_fit_are_refused(target: TinyLM, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    config = DraftConfig(target.config, (1, 2))
    weights.save(path, load_draft(target), {"draft_config": attrs.asdict(config)})
    with pytest.raises(weights.WeightsError, match=r"differing: fusion.weight"):
        load_draft(target, path)
