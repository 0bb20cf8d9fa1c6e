"""The budget: which graphs are worth the memory that they would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs

Item = TypeVar("Item")


@attrs.frozen
class Applicant(Generic[Item]):
    """A graph that wants memory.

    Attributes:
        item: what is captured.
        need: bytes of the pool that it works in, which every other graph of the pool uses too.
        kept: bytes of the pool that are its own for as long as it lives.
        worth: how much it is worth to have it, against the others.
        rank: of its mode, the best first.
    """

    item: Item
    need: int
    kept: int
    worth: float
    rank: int

    @property
    def value(self) -> tuple[float, int, int]:
        """Sort key, the most valuable first: worth a byte; then the better mode; then the least bytes."""
        size = max(self.need + self.kept, 1)
        return (-self.worth / size, self.rank, size)


class Admission:
    """Chooses graphs by value until a budget is spent, and learns from what captures really take.

    Graphs of one pool never run at the same time, so that a pool takes what its largest graph needs. What a warm-up
    needed is known beforehand, and what the driver takes for a graph isn't; both are corrected by the truth.

    Attributes:
        surplus: bytes that a pool took beyond what was expected of it.
        driver_first: bytes that the driver took for the first graph, and whatever it needs once.
        driver_each: bytes that it took for each further one.
    """

    def __init__(self) -> None:
        self.surplus = 0
        self.driver_first = 0
        self.driver_each = 0.0

    def expected(self, chosen: Sequence[Applicant[Item]]) -> int:
        """Bytes that these graphs would take together."""
        if not chosen:
            return 0
        return self._pool(chosen) + self.surplus + self.driver(len(chosen))

    def driver(self, graphs: int) -> int:
        """Bytes that the driver would take for so many graphs."""
        return self.driver_first + int(self.driver_each * (graphs - 1)) if graphs else 0

    def choose(self, applicants: Sequence[Applicant[Item]], room: int) -> list[Applicant[Item]]:
        """The most valuable graphs that fit into `room` bytes together, the most valuable first.

        One that doesn't fit is passed over, and the next is asked.
        """
        chosen: list[Applicant[Item]] = []
        need = kept = 0
        for applicant in sorted(applicants, key=lambda a: a.value):
            most, own = max(need, applicant.need), kept + applicant.kept
            if most + own + self.surplus + self.driver(len(chosen) + 1) <= room:
                chosen.append(applicant)
                need, kept = most, own
        return chosen

    def learn(
        self, captured: Sequence[Applicant[Item]], *, pool: int, driver_first: int, driver: int
    ) -> None:
        """Note what the capture of these graphs has really taken.

        Args:
            pool: bytes of the pool.
            driver_first: bytes that the driver took up to the first of them.
            driver: bytes that it took for all.
        """
        self.surplus = max(self.surplus, pool - self._pool(captured))
        self.driver_first = max(self.driver_first, driver_first)
        if len(captured) > 1:
            each = (driver - driver_first) / (len(captured) - 1)
            self.driver_each = max(self.driver_each, each)

    @staticmethod
    def _pool(chosen: Sequence[Applicant[Item]]) -> int:
        return max((a.need for a in chosen), default=0) + sum(a.kept for a in chosen)
