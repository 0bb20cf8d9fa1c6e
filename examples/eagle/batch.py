"""One step's batch, as the host writes it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """The rows of one step. Request ``r`` owns the rows ``query_start[r]`` to ``query_start[r + 1]``.

    Attributes:
        query_len: K + 1 if every request is there to verify K drafts, or None. It is *stated* by
            the scheduler, which knows, and never read off the shape: a prompt of K + 1 tokens has
            the shape of a decode and is none.
        query_start: [reqs + 1].
        seq_lens: [reqs] int32, each request's tokens, this step's included.
        input_ids, positions, slot_mapping: [tokens] int64.
        block_table: [reqs, pages] int32.
        first_row, num_drafts, seats: [reqs] int64; see `memory.Memory`.
    """

    query_len: int | None
    query_start: Ints
    seq_lens: NDArray[np.int32]
    input_ids: Ints
    positions: Ints
    slot_mapping: Ints
    block_table: NDArray[np.int32]
    first_row: Ints
    num_drafts: Ints
    seats: Ints

    @property
    def reqs(self) -> int:
        """How many requests."""
        return len(self.seq_lens)

    @property
    def tokens(self) -> int:
        """How many rows."""
        return len(self.input_ids)

    @property
    def inputs(self) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
        """What the target's runner is fed, by the names of its buffers."""
        return {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "slot_mapping": self.slot_mapping,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "first_row": self.first_row,
            "num_drafts": self.num_drafts,
            "seats": self.seats,
        }


def spread(sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """``query_start`` and ``seq_lens`` of prompts that fill a bucket evenly: for warm-up."""
    reqs, tokens = sizes["reqs"], sizes["tokens"]
    query_start = [request * tokens // reqs for request in range(reqs + 1)]
    return query_start, [end - start for start, end in itertools.pairwise(query_start)]
