"""The target model's runner: prompts, verification of drafts, and both in one batch.

Two kinds of step, two kinds of graph. When every request is there to verify K drafts, the batch is
*uniform*: its shape is a number of requests, and the whole step is one graph (FULL). When prompts
are among them, attention has to see each request's own length, which no graph can; so the graph is
split there (PIECEWISE), and attention runs eagerly between the segments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import graphkit as gk

from .attention import Attention, PagedCache, UniformAttention, VarlenAttention
from .batch import Batch, spread
from .draft import run_target
from .memory import Memory
from .model import TinyLM
from .verify import verify_greedy, verify_sampled


@gk.eager_break
def attend_varlen(layer: int, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """Attention at this step's own lengths; see `attention.VarlenAttention`.

    A break: PIECEWISE graphs end a segment before it, and begin another after it.
    """
    attend: Attention = gk.current_run().prepared["varlen"]
    return attend(layer, q, k, v, slots)


def plan_attention(cache: PagedCache, step: gk.Step) -> dict[str, Any]:
    """The ``prepare`` of target and draft: what attention needs besides static buffers.

    A uniform step needs nothing more. Otherwise the lengths are the live batch's, which the caller
    passes as the run's context; in warm-up and capture there is none, and prompts fill the bucket.
    """
    if step.dispatch.query_len is not None:
        return {"varlen": None}
    batch: Batch | None = step.context
    if batch is None:
        query_start, seq_lens = spread(step.dispatch.sizes)
    else:
        query_start, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    table = step.views["block_table"]
    return {"varlen": VarlenAttention(cache, query_start, seq_lens, table)}


def routes(memory: Memory, modes: tuple[gk.Mode, ...]) -> gk.Policy:
    """One set of buckets: FULL for uniform batches, PIECEWISE for variable length.

    Args:
        memory: whose dims the buckets size.
        modes: which of the two to capture; the rest runs EAGER.
    """
    reqs, tokens = memory.reqs, memory.tokens
    mixed = [size for size in memory.limits.mixed_tokens if size < tokens.maximum]
    both = (
        gk.Route(gk.FULL, gk.Buckets.uniform(reqs, tokens, query_len=memory.limits.query_len)),
        gk.Route(
            gk.PIECEWISE, gk.Buckets.of(tokens, *mixed, tokens.maximum, reqs=gk.at_most(tokens))
        ),
    )
    return gk.Policy([route for route in both if route.mode in modes])


class TargetRunner:
    """Runs the target on a batch, and verifies the drafts in it, on the device.

    Args:
        model: the target.
        memory: what it shares with the draft.
        layers: which layers' states the draft reads; none for the last hidden state.
        temperature: 0 for greedy.
        graphs: capture graphs, or run eagerly.
    """

    def __init__(
        self,
        model: TinyLM,
        memory: Memory,
        *,
        layers: tuple[int, ...] = (),
        temperature: float = 0.0,
        graphs: bool = True,
    ) -> None:
        self.layers = layers
        self.model = model
        self.memory = memory
        self.temperature = temperature
        self.cache = memory.target_cache
        buffers = memory.buffers
        self.runner = memory.group.runner(
            "target",
            self._verify,
            policy=routes(memory, (gk.FULL, gk.PIECEWISE) if graphs else ()),
            prepare=lambda step: plan_attention(self.cache, step),
            # Written by the draft, a step ago.
            inputs={"draft_probs": gk.Resident("draft_probs")},
            # Bound to buffers: in every mode, and for every bucket, the draft finds them there.
            outputs={
                "hidden": buffers.hidden,
                "draft_ids": buffers.draft_ids,
                "accepted": buffers.accepted,
                "sampled": buffers.sampled,
            },
            reads=memory.reads(self.cache, model),
            mutates=memory.scratch(self.cache),
        )

    def run(self, batch: Batch) -> Tensor:
        """Process the batch.

        Returns:
            [reqs, k + 1] int64: the tokens that each request gains, then `verify.NO_TOKEN`. A view
            of static memory, which the next step overwrites.
        """
        dispatch = self.runner.dispatch(
            reqs=batch.reqs, tokens=batch.tokens, query_len=batch.query_len
        )
        outputs = self.runner.run(dispatch, batch.inputs, context=batch)
        sampled: Tensor = outputs["sampled"]
        return sampled

    def _verify(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first_row: Tensor,
        num_drafts: Tensor,
        seats: Tensor,
        draft_probs: Tensor,
        varlen: VarlenAttention | None,
    ) -> dict[str, Tensor]:
        """What is captured. ``varlen`` is prepare's; everything else is a static buffer's view."""
        k = self.memory.limits.k
        attention: Attention = attend_varlen
        if varlen is None:
            attention = UniformAttention(self.cache, block_table, seq_lens, k + 1)
        hidden, seen = run_target(
            self.model, self.layers, input_ids, positions, slot_mapping, attention
        )
        # Each request's newest token and the K rows after it. A prompt has no drafts after its last
        # token: those rows are somebody else's, and num_drafts keeps them out.
        rows = first_row[:, None] + torch.arange(k + 1, device=hidden.device)
        rows = rows.clamp(max=len(input_ids) - 1)
        logits = self.model.logits(hidden[rows].flatten(0, 1)).view(*rows.shape, -1)
        drafts = input_ids[rows[:, 1:]]
        if self.temperature:
            accepted, sampled = verify_sampled(
                logits, drafts, num_drafts, draft_probs[seats, :k], self.temperature
            )
        else:
            accepted, sampled = verify_greedy(logits, drafts, num_drafts)
        bonus = sampled.gather(1, accepted[:, None]).squeeze(1)
        draft_ids = next_tokens(input_ids, first_row + accepted, bonus, num_drafts >= 0)
        return {
            "hidden": seen,
            "draft_ids": draft_ids,
            "accepted": accepted,
            "sampled": sampled,
        }


def next_tokens(input_ids: Tensor, last_row: Tensor, bonus: Tensor, is_real: Tensor) -> Tensor:
    """The token after each row's: what the draft reads beside the row's hidden state.

    It is the next row's, but for a request's last row: that one is followed by the bonus.

    Args:
        input_ids: [tokens] int64.
        last_row: [reqs] int64, the row of each request's newest accepted token.
        bonus: [reqs] int64.
        is_real: [reqs] bool, False for padding.

    Returns:
        [tokens] int64; after a request's last row, in rejected rows, nothing that is used.
    """
    # One row more than needed, as scratch: a padded request's last_row is 0, which is a real row.
    tokens = torch.cat((input_ids[1:], input_ids.new_zeros(2)))
    scratch = len(input_ids)
    tokens.index_copy_(0, torch.where(is_real, last_row, scratch), bonus)
    return tokens[:scratch]
