"""The EAGLE speculator: proposes K tokens for every request, from 0, 1 or 2 graphs.

A proposal has two parts. *Prefill* runs the draft over all rows that the target has just processed,
so that its own cache keeps up, and picks the first draft from each request's last accepted row.
*Decode* goes on alone, one token a request at a time, for the other K - 1.

    --graphs none            both run eagerly: hundreds of launches
    --graphs decode          decode is one graph, whole loop included; prefill is eager
    --graphs prefill+decode  two graphs, one replay each
    --graphs one             a uniform batch's proposal is a single replay
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

import graphkit as gk

from .attention import SCRATCH_PAGE, Attention, UniformAttention, VarlenAttention
from .batch import Batch
from .draft import DraftHead
from .memory import Memory
from .target import attend_varlen, plan_attention, routes
from .verify import draw

Graphs = Literal["none", "decode", "prefill+decode", "one"]
GRAPHS: tuple[Graphs, ...] = get_args(Graphs)


class EagleSpeculator:
    """Owns the draft's runners.

    Args:
        draft: the draft head.
        memory: what it shares with the target.
        temperature: 0 for greedy.
        graphs: what is captured; see the module.

    Attributes:
        prefill, decode, propose_all: the runners; the last is there only for ``graphs="one"``.
    """

    def __init__(
        self,
        draft: DraftHead,
        memory: Memory,
        *,
        temperature: float = 0.0,
        graphs: Graphs = "prefill+decode",
    ) -> None:
        self.draft = draft
        self.memory = memory
        self.temperature = temperature
        self.cache = memory.draft_cache
        buffers = memory.buffers
        modes: tuple[gk.Mode, ...] = ()
        if graphs in ("prefill+decode", "one"):
            # In one graph's mode prefill is on its own only where lengths vary.
            modes = (gk.PIECEWISE,) if graphs == "one" else (gk.FULL, gk.PIECEWISE)
        handed_over = ("first_draft", "draft_state", "draft_positions")
        # Nothing is fed here: what the draft reads the host has staged for the target already, or
        # the target has left on the device. So these runs cost a replay and nothing else.
        prefill_inputs = (
            "draft_ids",
            "hidden",
            "positions",
            "slot_mapping",
            "seq_lens",
            "block_table",
            "first_row",
            "accepted",
            "seats",
            "draft_probs",
        )
        self.prefill = self._runner(
            "prefill",
            self._prefill,
            routes(memory, modes),
            reads=prefill_inputs,
            writes={name: getattr(buffers, name) for name in handed_over},
            prepare=lambda step: plan_attention(self.cache, step),
        )
        # A decode has one token for each request: its only size is the number of requests.
        single = gk.Buckets.ladder(memory.reqs)
        self.decode = self._runner(
            "decode",
            self._decode,
            gk.Policy.eager() if graphs == "none" else gk.Policy.full(single),
            reads=(*handed_over, "block_table", "seats", "draft_probs"),
            writes={"draft_tokens": buffers.draft_tokens},
        )
        self.propose_all: gk.GraphRunner | None = None
        if graphs == "one":
            self.propose_all = self._runner(
                "propose",
                self._propose,
                routes(memory, (gk.FULL,)),
                reads=prefill_inputs,
                writes={"draft_tokens": buffers.draft_tokens},
            )

    def _runner(
        self,
        name: str,
        function: Callable[..., dict[str, Tensor]],
        policy: gk.Policy,
        *,
        reads: tuple[str, ...],
        writes: dict[str, gk.Buffer],
        prepare: Callable[[gk.Step], dict[str, Any]] | None = None,
    ) -> gk.GraphRunner:
        memory = self.memory
        return memory.group.runner(
            name,
            function,
            policy=policy,
            inputs={buffer: gk.Resident(buffer) for buffer in reads},
            outputs=writes,
            prepare=prepare,
            reads=memory.reads(self.cache, self.draft, self.draft.target),
            mutates=memory.scratch(self.cache),
        )

    def propose(self, batch: Batch) -> Tensor:
        """Draft K tokens for every request of the batch that the target has just run on.

        Returns:
            [reqs, k] int64, a view of static memory, which the next step overwrites.
        """
        reqs, tokens = batch.reqs, batch.tokens
        if self.propose_all is not None and batch.query_len is not None:
            whole = self.propose_all.dispatch(reqs=reqs, tokens=tokens, query_len=batch.query_len)
            drafts: Tensor = self.propose_all.run(whole)["draft_tokens"]
            return drafts
        first = self.prefill.dispatch(reqs=reqs, tokens=tokens, query_len=batch.query_len)
        self.prefill.run(first, context=batch)
        rest = self.decode.dispatch(reqs=reqs)
        drafts = self.decode.run(rest)["draft_tokens"]
        return drafts

    # -- what is captured -------------------------------------------------------------------------

    def _prefill(
        self,
        draft_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first_row: Tensor,
        accepted: Tensor,
        seats: Tensor,
        draft_probs: Tensor,
        varlen: VarlenAttention | None,
    ) -> dict[str, Tensor]:
        attention: Attention = attend_varlen
        if varlen is None:
            query_len = self.memory.limits.query_len
            attention = UniformAttention(self.cache, block_table, seq_lens, query_len)
        states = self.draft(draft_ids, self.draft.fuse(hidden), positions, slot_mapping, attention)
        # The rows after a request's last accepted one were rejected. They stay, as padding: what
        # they write into the cache lies after everything that is read, until it is overwritten.
        last_row = first_row + accepted
        state = states.index_select(0, last_row)
        return {
            "first_draft": self._choose(state, seats, draft_probs, 0),
            "draft_state": state,
            "draft_positions": positions.index_select(0, last_row) + 1,
        }

    def _decode(
        self,
        first_draft: Tensor,
        draft_state: Tensor,
        draft_positions: Tensor,
        block_table: Tensor,
        seats: Tensor,
        draft_probs: Tensor,
    ) -> dict[str, Tensor]:
        tokens, state = [first_draft], draft_state
        longest = self.memory.limits.max_length - 1
        for index in range(1, self.memory.limits.k):
            positions = draft_positions + (index - 1)
            slots = self._slots(positions, block_table)
            positions = positions.clamp(max=longest)
            lengths = (positions + 1).to(torch.int32)
            attention = UniformAttention(self.cache, block_table, lengths, 1)
            state = self.draft(tokens[-1], state, positions, slots, attention)
            tokens.append(self._choose(state, seats, draft_probs, index))
        return {"draft_tokens": torch.stack(tokens, 1)}

    def _propose(
        self,
        draft_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first_row: Tensor,
        accepted: Tensor,
        seats: Tensor,
        draft_probs: Tensor,
    ) -> dict[str, Tensor]:
        handed_over = self._prefill(
            draft_ids,
            hidden,
            positions,
            slot_mapping,
            seq_lens,
            block_table,
            first_row,
            accepted,
            seats,
            draft_probs,
            varlen=None,
        )
        return self._decode(
            **handed_over, block_table=block_table, seats=seats, draft_probs=draft_probs
        )

    def _choose(self, state: Tensor, seats: Tensor, draft_probs: Tensor, index: int) -> Tensor:
        """A draft for each request: the likeliest, or a draw whose distribution is kept."""
        logits = self.draft.logits(state)
        if not self.temperature:
            return logits.argmax(-1)
        probs = (logits / self.temperature).softmax(-1)
        # In place, in memory of fixed shape: the verification of the next step looks it up by seat.
        draft_probs[:, index].index_copy_(0, seats, probs)
        return draw(probs)

    def _slots(self, positions: Tensor, block_table: Tensor) -> Tensor:
        """Where the tokens at ``positions`` [reqs] live; scratch where a request can't grow to."""
        page_size, longest = self.memory.limits.page_size, self.memory.limits.max_length - 1
        pages = block_table.gather(1, (positions.clamp(max=longest) // page_size)[:, None])
        slots = pages.squeeze(1).to(torch.int64) * page_size + positions % page_size
        return torch.where(positions <= longest, slots, SCRATCH_PAGE * page_size)
