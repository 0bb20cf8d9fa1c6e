"""Continuous batching on the host: which requests run in the next step, and in which rows.

Requests join when there is a seat, pages and room for their prompt, and leave when they are done;
whoever else is running doesn't notice. More requests than seats wait in a queue, first come, first
served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np

from .attention import SCRATCH_PAGE
from .batch import Batch
from .corpus import END
from .memory import SCRATCH_SEAT, Limits


@attrs.define(eq=False)
class Request:
    """One prompt and its continuation.

    Attributes:
        prompt: the given tokens.
        max_tokens: how many to add at most.
        tokens: prompt and continuation so far.
        drafts: what the draft proposes to follow; empty before the prompt has run.
        seat: where it keeps its state on the device while it runs.
        pages: its pages of the caches while it runs.
        is_done: whether it has all its tokens, or has ended itself.
    """

    prompt: bytes
    max_tokens: int
    tokens: list[int] = attrs.field(init=False)
    drafts: list[int] = attrs.field(init=False, factory=list)
    has_run: bool = attrs.field(init=False, default=False)
    seat: int = attrs.field(init=False, default=SCRATCH_SEAT)
    pages: list[int] = attrs.field(init=False, factory=list)
    is_done: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> bytes:
        """The continuation so far."""
        return bytes(self.tokens[len(self.prompt) :])

    def extend(self, new: Sequence[int], max_length: int) -> int:
        """Take over a step's tokens, until it is done.

        Returns:
            How many it took.
        """
        limit = min(len(self.prompt) + self.max_tokens, max_length)
        taken = 0
        for token in new:
            self.tokens.append(token)
            taken += 1
            if token == END or len(self.tokens) >= limit:
                self.is_done = True
                break
        return taken


class Scheduler:
    """Owns seats and pages.

    Attributes:
        waiting: requests in the queue.
        running: requests with a seat, in the order of their rows.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._seats = [seat for seat in range(limits.max_reqs + 1) if seat != SCRATCH_SEAT][::-1]
        self._pages = [page for page in range(limits.pages) if page != SCRATCH_PAGE][::-1]

    def add(self, prompt: bytes, max_tokens: int) -> Request:
        """Queue a prompt.

        Raises:
            ValueError: it is empty, or leaves no room for a token, or no token is wanted.
        """
        longest = self.limits.max_length - 1
        if not prompt:
            raise ValueError("a prompt is empty: give at least one byte")
        if len(prompt) > longest:
            raise ValueError(
                f"a prompt has {len(prompt)} bytes, and the model takes at most {longest}: "
                f"shorten it (it begins with {prompt[:20].decode(errors='replace')!r})"
            )
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: ask for at least one token")
        request = Request(prompt, max_tokens)
        self.waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def admit(self) -> None:
        """Let requests leave that are done, and others join."""
        for request in [request for request in self.running if request.is_done]:
            self.running.remove(request)
            self._seats.append(request.seat)
            self._pages.extend(reversed(request.pages))
            request.seat, request.pages = SCRATCH_SEAT, []
        room = self.limits.max_tokens - len(self.running) * self.limits.query_len
        while self.waiting and self._seats:
            request = self.waiting[0]
            pages = self._pages_for(request)
            # A prompt becomes K + 1 rows in the next step, and has to have room then too.
            rows = max(len(request.prompt), self.limits.query_len)
            if rows > room or pages > len(self._pages):
                break
            room -= rows
            self.waiting.popleft()
            request.seat = self._seats.pop()
            request.pages = [self._pages.pop() for _ in range(pages)]
            self.running.append(request)

    def _pages_for(self, request: Request) -> int:
        """Enough for its longest, drafts included; reserved at once, so that it never has to wait."""
        limits = self.limits
        longest = len(request.prompt) + request.max_tokens + limits.k
        return -(-min(longest, limits.max_length) // limits.page_size)

    def batch(self) -> Batch:
        """The running requests' rows: whole prompts, or the newest token and its drafts."""
        limits, requests = self.limits, self.running
        is_uniform = all(request.has_run for request in requests)
        ids: list[int] = []
        positions: list[int] = []
        query_start = [0]
        first_row, num_drafts, seq_lens = [], [], []
        table = np.full((len(requests), limits.pages_per_request), SCRATCH_PAGE, np.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.pages)] = request.pages
            start = len(request.tokens) - 1 if request.has_run else 0
            rows = request.tokens[start:] + request.drafts
            first_row.append(len(ids) + len(request.tokens) - 1 - start)
            # Drafts beyond the model's last position keep their rows, and don't count.
            room = limits.max_length - len(request.tokens)
            num_drafts.append(min(len(request.drafts), room))
            ids.extend(rows)
            positions.extend(range(start, start + len(rows)))
            query_start.append(len(ids))
            seq_lens.append(start + len(rows))
        at = np.array(positions, np.int64)
        inside = np.minimum(at, limits.max_length - 1)
        owner = np.repeat(np.arange(len(requests)), np.diff(query_start))
        slots = table[owner, inside // limits.page_size] * limits.page_size
        slots = slots + inside % limits.page_size
        return Batch(
            query_len=limits.query_len if is_uniform else None,
            query_start=np.array(query_start, np.int64),
            seq_lens=np.array(seq_lens, np.int32),
            input_ids=np.array(ids, np.int64),
            positions=inside,
            slot_mapping=np.where(at == inside, slots, SCRATCH_PAGE * limits.page_size),
            block_table=table,
            first_row=np.array(first_row, np.int64),
            num_drafts=np.array(num_drafts, np.int64),
            seats=np.array([request.seat for request in requests], np.int64),
        )
