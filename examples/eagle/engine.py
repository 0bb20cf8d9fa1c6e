"""The engine: steps that verify, propose, and read the result back once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import torch

import graphkit as gk

from .draft import DRAFT, DraftHead, load_draft
from .memory import Limits, Memory
from .model import TinyLM
from .scheduler import Request, Scheduler
from .speculator import EagleSpeculator, Graphs
from .target import TargetRunner
from .verify import NO_TOKEN
from .weights import TARGET, load_target


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one step did.

    Attributes:
        seconds: from building the batch to having the tokens.
        ended: when it ended, on `time.perf_counter`'s clock.
        is_uniform: whether every request was there to verify drafts.
        gained: request -> tokens that it gained.
        verified: for each request that had drafts, how many of them were accepted, and the bonus.
    """

    seconds: float
    ended: float
    is_uniform: bool
    gained: dict[Request, int]
    verified: tuple[int, ...]


class Engine:
    """Serves requests with one target, and a draft if there is one.

    Args:
        target: the model.
        draft: its draft head; None for plain decoding, one token a step.
        limits: the largest batch. ``k`` is 0 without a draft.
        temperature: 0 for greedy.
        graphs: what is captured; "none" is all eager, the target included.
        device: "cuda", or "cpu" for graphkit's recording backend.
        checked: see `graphkit.GraphGroup`.

    Attributes:
        records: what each step did.
    """

    def __init__(
        self,
        target: TinyLM,
        draft: DraftHead | None,
        limits: Limits,
        *,
        temperature: float = 0.0,
        graphs: Graphs = "prefill+decode",
        device: str | torch.device = "cpu",
        checked: bool | None = None,
    ) -> None:
        if (draft is None) != (limits.k == 0):
            raise ValueError(f"k={limits.k} needs {'no ' if limits.k == 0 else 'a '}draft head")
        if limits.max_length > target.config.max_length:
            raise ValueError(
                f"max_length={limits.max_length} is beyond the model's {target.config.max_length}"
            )
        self.limits = limits
        self.memory = Memory(
            target.config,
            limits,
            seen_width=None if draft is None else draft.config.seen_width,
            device=device,
            dtype=target.embedding.weight.dtype,
            checked=checked,
        )
        self.target = TargetRunner(
            target,
            self.memory,
            layers=() if draft is None else draft.config.target_layers,
            temperature=temperature,
            graphs=graphs != "none",
        )
        self.speculator: EagleSpeculator | None = None
        if draft is not None:
            self.speculator = EagleSpeculator(
                draft, self.memory, temperature=temperature, graphs=graphs
            )
        self.scheduler = Scheduler(limits)
        self.records: list[StepRecord] = []

    @classmethod
    def from_files(
        cls,
        limits: Limits,
        *,
        target: Path = TARGET,
        draft: Path = DRAFT,
        device: str | torch.device = "cpu",
        temperature: float = 0.0,
        graphs: Graphs = "prefill+decode",
    ) -> Engine:
        """The engine of the shipped weights; without a draft where ``limits.k`` is 0.

        Raises:
            WeightsError: a file is missing, damaged, or another model's.
        """
        model = load_target(target, device=device)
        head = load_draft(model, draft) if limits.k else None
        return cls(model, head, limits, temperature=temperature, graphs=graphs, device=device)

    @property
    def group(self) -> gk.GraphGroup:
        """The graph group of all runners."""
        return self.memory.group

    def capture(self) -> None:
        """Capture every graph. Without this everything runs eagerly, and the report says why."""
        self.group.capture()

    def add(self, prompt: bytes, max_tokens: int) -> Request:
        """Queue a prompt; see `Scheduler.add`."""
        return self.scheduler.add(prompt, max_tokens)

    def step(self) -> dict[Request, list[int]]:
        """Run one step of every request that there is room for.

        Returns:
            Each running request's new tokens; empty if there was nothing to do.
        """
        began = time.perf_counter()
        self.scheduler.admit()
        if not self.scheduler.running:
            return {}
        batch = self.scheduler.batch()
        result = self.target.run(batch)
        if self.speculator is not None:
            # The draft goes ahead on the device, with whatever was accepted: the host doesn't know.
            result = torch.cat((result, self.speculator.propose(batch)), 1)
        # The step's only sync: the host learns what was accepted, and what is drafted next.
        rows = result.tolist()
        new: dict[Request, list[int]] = {}
        gained: dict[Request, int] = {}
        verified: list[int] = []
        for request, row in zip(self.scheduler.running, rows, strict=True):
            sampled, request.drafts = row[: self.limits.k + 1], row[self.limits.k + 1 :]
            tokens = [token for token in sampled if token != NO_TOKEN]
            if request.has_run:
                verified.append(len(tokens))
            request.has_run = True
            gained[request] = request.extend(tokens, self.limits.max_length)
            new[request] = request.tokens[-gained[request] :]
        ended = time.perf_counter()
        self.records.append(
            StepRecord(
                seconds=ended - began,
                ended=ended,
                is_uniform=batch.query_len is not None,
                gained=gained,
                verified=tuple(verified),
            )
        )
        return new

    def run(self) -> Iterator[dict[Request, list[int]]]:
        """Step until there is nothing left to do."""
        while self.scheduler.has_work:
            yield self.step()

    def generate(self, prompts: Sequence[bytes], max_tokens: int) -> list[bytes]:
        """The continuations of all prompts."""
        requests = [self.add(prompt, max_tokens) for prompt in prompts]
        for _ in self.run():
            pass
        return [request.output for request in requests]
