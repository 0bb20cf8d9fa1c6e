"""Verification: which drafts the target keeps, and what it says next. Lossless.

Everything here stays on the device and has static shapes, so that it can be part of a graph: a
rejected draft is not removed from the batch, it is masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN = -1
"""Fills the rest of a request's row of sampled tokens."""


def draw(weights: Tensor) -> Tensor:
    """Draw an index from each row of ``weights`` [..., vocab], which need not sum to 1.

    Whichever of independent exponential times with these rates comes first is a fair draw. Unlike
    `torch.multinomial` this neither syncs nor depends on a batch's size.
    """
    times = torch.empty_like(weights).exponential_()
    return (weights / times).argmax(-1)


def count_accepted(matches: Tensor, num_drafts: Tensor) -> Tensor:
    """The drafts before the first rejected one: [reqs, k] bool and [reqs] to [reqs] int64."""
    steps = torch.arange(matches.shape[1], device=matches.device)
    kept = matches & (steps < num_drafts[:, None])
    return kept.to(torch.int64).cumprod(1).sum(1)


def join(drafts: Tensor, accepted: Tensor, bonus: Tensor) -> Tensor:
    """The tokens that a step adds to each request: [reqs, k + 1], `NO_TOKEN` after the bonus."""
    steps = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    tokens = torch.cat((drafts, bonus[:, None]), 1)
    tokens = torch.where(steps == accepted[:, None], bonus[:, None], tokens)
    return tokens.masked_fill(steps > accepted[:, None], NO_TOKEN)


def verify_greedy(logits: Tensor, drafts: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the drafts that the target itself would have said.

    Args:
        logits: [reqs, k + 1, vocab] fp32, the target's, of the newest token and of each draft.
        drafts: [reqs, k] int64.
        num_drafts: [reqs] int64, how many of them are real.

    Returns:
        accepted [reqs] int64, and sampled [reqs, k + 1] int64: the accepted drafts, the target's
        next token (the bonus), then `NO_TOKEN`.
    """
    best = logits.argmax(-1)
    accepted = count_accepted(drafts == best[:, :-1], num_drafts)
    bonus = best.gather(1, accepted[:, None]).squeeze(1)
    return accepted, join(drafts, accepted, bonus)


def verify_sampled(
    logits: Tensor, drafts: Tensor, num_drafts: Tensor, draft_probs: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: the result is distributed as if the target alone had been sampled.

    A draft x, drawn from q, is kept with probability min(1, p(x) / q(x)). The first rejected one is
    replaced by a draw from the positive part of p - q; after the last one comes a draw from p.

    Args:
        logits, drafts, num_drafts: as in `verify_greedy`.
        draft_probs: [reqs, k, vocab] fp32, the q that each draft was drawn from.
        temperature: above 0.

    Returns:
        As `verify_greedy`.

    Source:
        Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.
    """
    p = (logits / temperature).softmax(-1)
    # Where there is no draft q is 0, and the positive part of p - q is p itself: the bonus.
    real = torch.arange(drafts.shape[1], device=drafts.device) < num_drafts[:, None]
    q = torch.cat((draft_probs * real[:, :, None], torch.zeros_like(p[:, :1])), 1)
    p_draft, q_draft = (x[:, :-1].gather(2, drafts[:, :, None]).squeeze(2) for x in (p, q))
    accepted = count_accepted(torch.rand_like(p_draft) * q_draft < p_draft, num_drafts)
    row = accepted[:, None, None].expand(-1, 1, p.shape[2])
    p_row, q_row = p.gather(1, row).squeeze(1), q.gather(1, row).squeeze(1)
    rest = (p_row - q_row).clamp(min=0)
    # Where p and q agree up to rounding nothing is left over, and either is as good.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p_row)
    return accepted, join(drafts, accepted, draw(rest))
