"""Train the draft head: ``python -m examples.eagle.train_draft``.

About 15 minutes on one CPU core. The target is frozen; the draft learns to continue its hidden
states, on the text that the target learned from and on text that the target wrote, since that is
what it will draft for. It is trained as it will be used: several steps in a row, each reading the
guess of the one before. Everything random comes from one seed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from . import corpus, weights
from .attention import DenseAttention, PagedCache, UniformAttention, VarlenAttention
from .draft import DRAFT, DraftConfig, DraftHead, run_target
from .model import TinyLM

SEED = 20_27
STEPS = 3_000
TOKENS_PER_STEP = 2_048
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1
DROPOUT = 0.1

DEPTH = 4
"""Steps in a row that are trained; further ones work too, but less well."""

DEPTH_WEIGHT = 0.8
"""How much a step counts, relative to the one before: a late one is reached less often."""

REGRESSION_WEIGHT = 0.5
"""Of the distance to the target's hidden state, beside that to its distribution."""

LENGTHS = ((0.6, 128), (0.9, 256), (1.0, 512))

# What the target writes: it starts from pieces of its training text, half of the time greedily.
WRITTEN = 768
PROMPT_LENGTH = 64
WRITTEN_LENGTH = 256
TEMPERATURES = (0.0, 1.0)

PAGE_SIZE = 16


@torch.no_grad()
def write(
    target: TinyLM, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Let the target continue a batch of prompts.

    Args:
        target: the target, on the CPU.
        prompts: [batch, prompt length] int64.
        length: of the result, prompt included.
        temperatures: [batch, 1] fp32; 0 is greedy.
        generator: what the random numbers come from.

    Returns:
        [batch, length] int64.
    """
    batch, given = prompts.shape
    pages = -(-length // PAGE_SIZE)
    cache = _cache(target, target.config.layers, batch * pages)
    table = 1 + torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    text = torch.zeros(batch, length, dtype=torch.int64)
    text[:, :given] = prompts
    slots = PAGE_SIZE + pages * PAGE_SIZE * torch.arange(batch)[:, None] + torch.arange(length)
    positions = torch.arange(length).repeat(batch, 1)
    begin = 0
    for end in range(given, length):
        new = slice(begin, end)
        seq_lens = torch.full((batch,), end, dtype=torch.int32)
        attention = UniformAttention(cache, table, seq_lens, end - begin)
        hidden = target(
            text[:, new].flatten(), positions[:, new].flatten(), slots[:, new].flatten(), attention
        )
        logits = target.logits(hidden.view(batch, end - begin, -1)[:, -1])
        # The largest of logits plus temperature times Gumbel noise is a draw at that temperature.
        uniform = torch.rand(logits.shape, generator=generator).clamp_(min=1e-20)
        text[:, end] = (logits - temperatures * (-uniform.log()).log()).argmax(-1)
        begin = end
    return text


def written_text(target: TinyLM, text: Tensor, generator: torch.Generator) -> Tensor:
    """`WRITTEN` continuations of pieces of ``text`` (1-d int64), one after the other."""
    starts = torch.randint(len(text) - PROMPT_LENGTH, (WRITTEN, 1), generator=generator)
    prompts = text[starts + torch.arange(PROMPT_LENGTH)]
    temperatures = torch.tensor(TEMPERATURES).repeat(WRITTEN)[:WRITTEN, None]
    pieces = [
        write(target, some, WRITTEN_LENGTH, warm, generator)
        for some, warm in zip(prompts.split(128), temperatures.split(128), strict=True)
    ]
    return torch.cat(pieces).flatten()


class UnrolledAttention:
    """Causal attention of draft steps in a row, over whole sequences; for training.

    The first call is the draft's prefill: every entry was made from the target's hidden state. In
    call ``j`` (from 0), row ``t`` is the ``j``-th token drafted by a chain that left the verified
    text at ``t - j``. It sees what serving would let it see: the prefill's entries up to there, and
    the chain's own, one for each call since. Rows before ``j`` belong to no chain, and get something
    finite.

    Args:
        batch: sequences, of equal length, one after the other; slots are ignored.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """See `attention.Attention`."""
        depth = len(self.keys)
        by_sequence = (self.batch, -1)
        # [batch, kv_heads, 1, length, head_dim], so that a group of query heads shares them.
        self.keys.append(k.unflatten(0, by_sequence).transpose(1, 2).unsqueeze(2))
        self.values.append(v.unflatten(0, by_sequence).transpose(1, 2).unsqueeze(2))
        if depth == 0:
            return DenseAttention(self.batch)(layer, q, k, v, slots)
        heads, head_dim = q.shape[1:]
        rows = q.unflatten(0, by_sequence).transpose(1, 2)
        rows = rows.unflatten(1, (k.shape[1], -1)) * head_dim**-0.5
        length = rows.shape[3]
        past = (rows @ self.keys[0].transpose(-1, -2)).float()
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-depth)
        past = past.masked_fill(~visible, float("-inf"))
        chain = [
            (rows * self.keys[call].roll(depth - call, 3)).sum(-1, keepdim=True).float()
            for call in range(1, depth + 1)
        ]
        shares = torch.cat((past, *chain), dim=-1).softmax(-1).to(v.dtype)
        out = shares[..., :length] @ self.values[0]
        for call in range(1, depth + 1):
            share = shares[..., length + call - 1, None]
            out = out + share * self.values[call].roll(depth - call, 3)
        return out.flatten(1, 2).transpose(1, 2).reshape(-1, heads, head_dim)


def draft_loss(draft: DraftHead, text: Tensor) -> tuple[Tensor, Tensor]:
    """How far the draft's guesses are from what the target does next.

    Args:
        draft: the draft head.
        text: [batch, length] int64.

    Returns:
        The loss, a scalar; and for each of `DEPTH` steps the share of guesses whose best token is
        the target's best, [DEPTH] fp32.
    """
    target, (batch, length) = draft.target, text.shape
    positions = torch.arange(length, dtype=torch.int64, device=text.device).repeat(batch)
    layers = draft.config.target_layers
    with torch.no_grad():
        dense = DenseAttention(batch)
        states, seen = run_target(target, layers, text.flatten(), positions, positions, dense)
        states = states.view(batch, length, -1)[:, 1:]
        wanted = target.logits(states).softmax(-1)
        best = wanted.argmax(-1)
    # Entry t reads token t + 1 and state t, and should guess state t + 1.
    tokens = text[:, 1:].flatten()
    positions = positions.view(batch, length)[:, :-1].flatten()
    hidden = draft.fuse(seen).view(batch, length, -1)[:, :-1]
    attention = UnrolledAttention(batch)
    total, agreed, weight = torch.zeros((), device=text.device), [], 1.0
    for depth in range(DEPTH):
        guess = draft(tokens, hidden.flatten(0, 1), positions, positions, attention)
        guess = guess.view(batch, length - 1, -1)
        valid = slice(depth, None)
        logits = draft.logits(guess[:, valid])
        entropy = F.cross_entropy(logits.flatten(0, 1), wanted[:, valid].flatten(0, 1))
        distance = F.smooth_l1_loss(guess[:, valid].float(), states[:, valid].float())
        total = total + weight * (entropy + REGRESSION_WEIGHT * distance)
        agreed.append((logits.argmax(-1) == best[:, valid]).float().mean())
        weight *= DEPTH_WEIGHT
        # The next step's entry t reads this step's guess of state t, made at entry t - 1.
        hidden = guess.roll(1, dims=1)
    return total, torch.stack(agreed).detach()


def _cache(target: TinyLM, layers: int, pages: int) -> PagedCache:
    config, weight = target.config, target.embedding.weight
    sizes = (layers, pages + 1, PAGE_SIZE, config.kv_heads, config.head_dim)
    return PagedCache(*sizes, weight.dtype, weight.device)


@torch.no_grad()
def speculate(draft: DraftHead, prompt: bytes, k: int, count: int) -> tuple[bytes, list[int]]:
    """Greedy speculative decoding of one prompt, as plainly as it can be written.

    Args:
        draft: the draft head; its target verifies.
        prompt: at least one byte.
        k: tokens that are drafted before each verification.
        count: tokens to write; the prompt, these and ``k`` more must fit the model's length.

    Returns:
        The text, without the prompt: what the target alone would write; and how many tokens each
        verification yielded, the bonus token included, from 1 to ``k + 1``.
    """
    target = draft.target
    device = target.embedding.weight.device
    pages = -(-(len(prompt) + count + k) // PAGE_SIZE)
    caches = _cache(target, target.config.layers, pages), _cache(target, 1, pages)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]

    def whereabouts(
        cache: PagedCache, begin: int, end: int
    ) -> tuple[Tensor, Tensor, VarlenAttention]:
        positions = torch.arange(begin, end, device=device)
        attention = VarlenAttention(cache, [0, end - begin], [end], table)
        return positions, PAGE_SIZE + positions, attention

    def tensor(tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.int64, device=device)

    text, drafted, done, yields = list(prompt), list[int](), 0, list[int]()
    while len(text) < len(prompt) + count:
        # The target reads what it hasn't read yet, and the draft's guesses after it.
        reads = text[done:] + drafted
        where = whereabouts(caches[0], done, done + len(reads))
        hidden, seen = run_target(target, draft.config.target_layers, tensor(reads), *where)
        # Entry i of these chose the token that follows the last verified one by i.
        choices = target.logits(hidden[len(reads) - len(drafted) - 1 :]).argmax(-1).tolist()
        agreed = 0
        while agreed < len(drafted) and drafted[agreed] == choices[agreed]:
            agreed += 1
        if drafted:
            yields.append(agreed + 1)
        verified = len(text) + agreed
        text += choices[: agreed + 1]
        # The draft's prefill: the positions that were verified, the tokens one to the left.
        shifted, fused = tensor(text[done + 1 :]), draft.fuse(seen[: verified - done])
        guess = draft(shifted, fused, *whereabouts(caches[1], done, verified))[-1:]
        drafted = [int(draft.logits(guess).argmax())]
        for position in range(verified, verified + k - 1):
            where = whereabouts(caches[1], position, position + 1)
            guess = draft(tensor(drafted[-1:]), guess, *where)
            drafted.append(int(draft.logits(guess).argmax()))
        done = verified
    return bytes(text[len(prompt) : len(prompt) + count]), yields


def mean_accepted_length(
    draft: DraftHead, prompts: Sequence[bytes], k: int, count: int = 96
) -> float:
    """Tokens that one verification yields on average, the bonus token included; greedy.

    Args:
        draft: the draft head, in evaluation mode.
        prompts: where to start from.
        k: tokens that are drafted before each verification.
        count: tokens to write for each prompt.
    """
    yields = [n for prompt in prompts for n in speculate(draft, prompt, k, count)[1]]
    return sum(yields) / len(yields)


def length_at(progress: float) -> int:
    """The sequence length at a share of the training."""
    return next(length for until, length in LENGTHS if progress < until)


def learning_rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def optimizer_for(draft: DraftHead) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves gains alone."""
    matrices = [p for p in draft.parameters() if p.dim() > 1]
    gains = [p for p in draft.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))


def train(
    path: Path,
    steps: int = STEPS,
    target_layers: tuple[int, ...] = (),
    save_every: int = 500,
    target_path: Path = weights.TARGET,
) -> DraftHead:
    """Train from scratch and write the weights to ``path``, now and then and at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # dropout draws from the default generator
        return _train(path, steps, target_layers, save_every, target_path)


def _train(
    path: Path, steps: int, target_layers: tuple[int, ...], save_every: int, target_path: Path
) -> DraftHead:
    began = time.monotonic()
    generator = torch.Generator().manual_seed(SEED)
    target = weights.load_target(target_path)
    draft = DraftHead(DraftConfig(target.config, target_layers), target, DROPOUT)
    draft.initialize(generator)
    optimizer = optimizer_for(draft)
    read = torch.frombuffer(bytearray(corpus.train_text()), dtype=torch.uint8).to(torch.int64)
    written = written_text(target, read, generator)
    print(f"the target wrote {len(written)} bytes, {_minutes(began)}", flush=True)
    recent = torch.zeros(1 + DEPTH)
    for step in range(steps):
        length = length_at(step / steps)
        pieces = [
            data[
                torch.randint(len(data) - length, (count, 1), generator=generator)
                + torch.arange(length)
            ]
            for data in (read, written)
            for count in (TOKENS_PER_STEP // length // 2,)
        ]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss, agreed = draft_loss(draft, torch.cat(pieces))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        figures = torch.cat((loss.detach()[None], agreed))
        recent += (figures - recent) * (1.0 if step == 0 else 0.02)
        done = step + 1
        if done % 100 == 0 or done == steps:
            shares = ", ".join(f"{share:.3f}" for share in recent[1:].tolist())
            print(
                f"step {done}/{steps}: loss {recent[0].item():.3f}, agreed {shares}, "
                f"{_minutes(began)}",
                flush=True,
            )
        if done % save_every == 0 or done == steps:
            prompts = corpus.heldout_prompts(16, PROMPT_LENGTH)
            accepted = mean_accepted_length(draft.eval(), prompts, k=3)
            draft.train()
            training = {
                "steps": done,
                "seed": SEED,
                "agreed_by_step": [round(share, 4) for share in recent[1:].tolist()],
                "heldout_accepted_length_at_k_3": round(accepted, 3),
                "target_sha256": hashlib.sha256(target_path.read_bytes()).hexdigest(),
                "text": f"pydoc_data.topics of CPython {platform.python_version()}",
            }
            metadata = {"draft_config": attrs.asdict(draft.config), "training": training}
            weights.save(path, draft, metadata)
            print(f"accepted length on held-out prompts, k = 3: {accepted:.3f}", flush=True)
    return draft.eval()


def _minutes(began: float) -> str:
    return f"{(time.monotonic() - began) / 60:.1f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=DRAFT, help="where the weights go")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument(
        "--target-layers",
        type=int,
        nargs="*",
        default=(),
        help="layers of the target to read instead of its last hidden state (EAGLE-3)",
    )
    arguments = parser.parse_args()
    train(arguments.out, arguments.steps, tuple(arguments.target_layers))


if __name__ == "__main__":
    main()
