"""The check of one bucket: that its graph computes for a batch what the function does, and nothing else (rule 21).

The function is run without the graph on the same padded buffers, and on the batch alone; then with other padding,
and after another batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from graphkit.checking.differences import (
    Difference,
    Tolerance,
    bit_difference,
    difference,
    largest_difference,
)
from graphkit.checking.findings import CheckReport, Comparison, Finding, FindingKind
from graphkit.checking.poison import Poison
from graphkit.checking.trials import Seen, Trials

Compare = Callable[[torch.Tensor, torch.Tensor], Difference | None]


class Check:
    """One bucket and one batch; used once.

    Args:
        trials: runs of the batch.
        tolerance: for the comparison at the real size.
    """

    def __init__(self, trials: Trials, tolerance: Tolerance) -> None:
        self._trials = trials
        self._tolerance = tolerance
        self._findings: list[Finding] = []
        self._is_deterministic = True

    def report(self) -> CheckReport:
        """Run everything."""
        trials = self._trials
        eager = self._look_for_state()
        replayed = trials.replay()
        padded = self._against_padded(replayed, eager)
        real = self._against_real(replayed)
        self._find_pads(eager)
        self._find_history(replayed)
        return CheckReport(
            runner=trials.runner.name,
            mode=trials.entry.mode,
            bucket=trials.entry.bucket,
            sizes=trials.real,
            padded=padded,
            real=real,
            findings=tuple(self._findings),
        )

    def against_eager(self) -> tuple[Finding, ...]:
        """Only the comparison with the function on the same padded buffers; what differs."""
        eager = self._look_for_state()
        self._against_padded(self._trials.replay(), eager)
        return tuple(f for f in self._findings if f.kind is FindingKind.PADDED)

    def _look_for_state(self) -> Seen:
        """Learn what the function writes and draws; then what it computes on the padded buffers."""
        trials = self._trials
        for write in trials.look_for_state():
            self._add(
                FindingKind.UNDECLARED,
                "undeclared state",
                (),
                f"{write}, memory from outside that isn't declared, so that warm-up and capture change it for good "
                "and nothing here compares it. Name it in mutates=",
            )
        for name in trials.lost:
            self._add(
                FindingKind.PADDED,
                f"input {name!r}",
                (),
                f"input {name!r} isn't in its buffer when the function is called: somebody else writes there, or "
                "staging is wrong",
            )
        if trials.draws:
            self._add(
                FindingKind.RANDOM,
                "random numbers",
                (),
                "the function draws random numbers: the graph is compared with the function at the padded size only, "
                "from the same state of the generators",
            )
        first, second = trials.eager(), trials.eager()
        self._is_deterministic = not self._differences(first, second, bit_difference)
        if not self._is_deterministic:
            self._add(
                FindingKind.NONDETERMINISTIC,
                "the function",
                (),
                "two eager calls on the same contents differ, so that results are compared within tolerances only",
            )
        return second

    def _against_padded(self, replayed: Seen, eager: Seen) -> Comparison:
        compare = bit_difference if self._is_deterministic else self._close
        found = self._differences(replayed, eager, compare)
        comparison = self._compared(replayed, eager, agrees=not found)
        for what, differs in found.items():
            if self._trials.draws:
                self._add(
                    FindingKind.RANDOM,
                    what,
                    differs.rows,
                    f"{what} differs from an eager call {differs}; the graph has drawn other random numbers from the "
                    "same state of the generators, or that is a bug: check it without randomness",
                )
                continue
            self._add(
                FindingKind.PADDED,
                what,
                differs.rows,
                f"{what} differs from an eager call on the same padded buffers, {differs}. Something is baked into "
                "the graph that changes from run to run: a Python value, or a tensor that is made anew. Give it by a "
                "buffer, by prepare or as a variant",
            )
        return comparison

    def _against_real(self, replayed: Seen) -> Comparison | None:
        trials = self._trials
        if trials.draws and trials.padded != trials.real:
            return None
        try:
            eager = trials.alone()
        except Exception as error:
            if all(trials.real.values()):
                raise
            self._add(
                FindingKind.SKIPPED,
                "the real size",
                (),
                f"the graph takes an empty batch, and the function alone doesn't: it raised {type(error).__name__}: "
                f"{error}",
            )
            return None
        found = self._differences(replayed, eager, self._close)
        for what, differs in found.items():
            self._add(FindingKind.REAL, what, differs.rows, self._real_message(what, differs))
        return self._compared(replayed, eager, agrees=not found)

    def _real_message(self, what: str, differs: Difference) -> str:
        text = (
            f"{what} is not close to that of an eager call on the batch alone: it differs {differs}"
        )
        if self._is_written(what):
            return f"{text}. Padding has written there: {self._scratch_remedy(what, differs.rows)}"
        return f"{text}. Padding reaches it, or something of the capture's is baked in"

    def _is_written(self, what: str) -> bool:
        """Whether padding may write there: state, or a buffer that holds a cache."""
        kept = self._trials.kept
        return what in kept.state or kept.fixed(what) is not None

    def _scratch_remedy(self, what: str, rows: Sequence[int]) -> str:
        kept = self._trials.kept
        text, name = "pad what says where to write with a scratch row", "tensor"
        buffer = kept.fixed(what)
        if what in kept.scratch or (buffer is not None and kept.has_scratch(buffer)):
            return text
        if buffer is not None:
            name = f"group.buffers[{buffer.name!r}].tensor"
        return (
            f"{text}, which nothing reads; if this is one, say so: mutates=[gk.Scratch({name}, "
            f"rows={list(rows[:8])})]"
        )

    # -- padding ----------------------------------------------------------------------------------

    def _find_pads(self, clean: Seen) -> None:
        """Find whose padding reaches real rows: one buffer at a time, since two poisons may cancel out; then all."""
        variants = self._trials.poisons()
        # Where an index leads shows by what is found there: padding that holds 0 may be written onto a 0.
        others = [poison for poison in variants[0] if not poison.is_index]
        marked = clean
        if others and len(others) < len(variants[0]):
            marked = self._trials.eager(poison=others)
        singly = [poison for pair in zip(*variants, strict=True) for poison in pair]
        blamed: set[str] = set()
        for poison in (*singly, *self._trials.ends()):
            if poison.buffer in blamed:
                continue
            with_others = (marked, [*others, poison])
            found = self._poisoned(*(with_others if poison.is_index else (clean, [poison])))
            if poison.is_index and self._is_state(found):
                # It says where padding is written, which is what its pad is for.
                continue
            if found:
                self._blame(poison, found)
                blamed.add(poison.buffer)
        if not blamed:
            self._find_pads_together(clean, variants)

    def _find_pads_together(self, clean: Seen, variants: Sequence[Sequence[Poison]]) -> None:
        for variant in variants:
            rest = list(variant)
            found = self._poisoned(clean, rest)
            if self._is_state(found):
                rest = [poison for poison in variant if not poison.is_index]
                found = self._poisoned(clean, rest)
            if found:
                what, differs = next(iter(found.items()))
                names = " and ".join(repr(poison.buffer) for poison in rest)
                self._add(
                    FindingKind.PADS,
                    f"buffers {names}",
                    differs.rows,
                    f"{what} depends on what buffers {names} hold together beyond the batch: it changes {differs}. "
                    "Mask those rows, or say which padding the function relies on, as pad=gk.relied(0)",
                )
                return

    def _blame(self, poison: Poison, found: Mapping[str, Difference]) -> None:
        # Where padding was written says more than what was read from there.
        fixed = (what for what in found if self._trials.kept.fixed(what) is not None)
        what = next(fixed, next(iter(found)))
        differs = found[what]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        self._add(
            FindingKind.PADS,
            f"buffer {poison.buffer!r}",
            differs.rows,
            f"{what}{more} depends on what buffer {poison.buffer!r} (pad {poison.pad}) holds beyond the batch: with "
            f"{poison.value} there it changes {differs}. {self._pad_remedy(poison, what, differs.rows)}",
        )

    def _pad_remedy(self, poison: Poison, what: str, rows: Sequence[int]) -> str:
        if self._is_written(what):
            if poison.is_index:
                # The rows are also those where the poison leads; its pad is to be the scratch row.
                rows = [int(poison.pad)] if poison.pad.isdecimal() else rows
            return f"Mask those rows, or {self._scratch_remedy(what, rows)}"
        if poison.pad == "keep":
            return "Mask those rows, or pad it with a value: gk.relied(value) if the function relies on it"
        return f"Mask those rows, or, if the function relies on the pad, say pad=gk.relied({poison.pad})"

    def _poisoned(self, reference: Seen, poison: Sequence[Poison]) -> dict[str, Difference]:
        """What a call with other padding changes."""
        try:
            seen = self._trials.eager(poison=poison)
        except (IndexError, RuntimeError) as error:
            # Indices that are right alone may lead too far together, or in a small bucket.
            names = " and ".join(sorted({repr(item.buffer) for item in poison}))
            self._add(
                FindingKind.SKIPPED,
                "padding",
                (),
                f"other padding of {names} wasn't tried: with it the function raised {type(error).__name__}: {error}",
            )
            return {}
        return self._differences(seen, reference, self._close)

    def _is_state(self, found: Mapping[str, Difference]) -> bool:
        kept = self._trials.kept
        buffers = [buffer for what in found if (buffer := kept.fixed(what)) is not None]
        return any(what in kept.state for what in found) or any(map(kept.has_scratch, buffers))

    # -- history ----------------------------------------------------------------------------------

    def _find_history(self, before: Seen) -> None:
        """Replay another batch that fills the bucket, then this one again."""
        error = self._trials.run_another()
        if error is not None:
            self._add(
                FindingKind.SKIPPED,
                "history",
                (),
                f"independence of what ran before wasn't tried: the example batch raised {error}",
            )
            return
        after = self._trials.replay(fresh=False)
        compare = bit_difference if self._is_deterministic else self._close
        for what, differs in self._differences(after, before, compare).items():
            self._add(
                FindingKind.HISTORY,
                what,
                differs.rows,
                f"{what} depends on what ran before: after another batch that fills the bucket it changes {differs}. "
                "The function reads what an earlier run left, as beyond the batch in a buffer padded with gk.keep; "
                "pad it with a value, or mask it",
            )

    # -- comparisons ------------------------------------------------------------------------------

    def _close(self, found: torch.Tensor, expected: torch.Tensor) -> Difference | None:
        return difference(found, expected, self._tolerance)

    def _pairs(
        self, found: Seen, expected: Seen
    ) -> Sequence[tuple[str, torch.Tensor, torch.Tensor]]:
        pairs = [
            (what, found.results[what], other)
            for what, other in expected.results.items()
            if what in found.results
        ]
        for what, other in expected.state.items():
            mine = found.state[what]
            if what in self._trials.kept.scratch:
                # Rows that padding may write, each several times and in any order.
                mine[self._trials.kept.scratch[what]] = other[self._trials.kept.scratch[what]]
            pairs.append((what, mine, other))
        return pairs

    def _differences(self, found: Seen, expected: Seen, compare: Compare) -> dict[str, Difference]:
        # What only one of them has.
        differences = dict.fromkeys(
            found.results.keys() ^ expected.results.keys(),
            Difference(rows=(), elements=0, largest=math.inf),
        )
        for what, left, right in self._pairs(found, expected):
            if left.shape == right.shape and left.dtype is right.dtype:
                differs = compare(left, right)
            else:
                sizes = sorted(tensor.shape[0] if tensor.ndim else 0 for tensor in (left, right))
                differs = Difference(
                    rows=tuple(range(*sizes)),
                    elements=abs(left.numel() - right.numel()),
                    largest=math.inf,
                )
            if differs is not None:
                differences[what] = differs
        return differences

    def _compared(self, found: Seen, expected: Seen, *, agrees: bool) -> Comparison:
        for what in found.results.keys() ^ expected.results.keys():
            return Comparison(agrees=False, largest=math.inf, worst=what)
        largest, worst = 0.0, ""
        for what, left, right in self._pairs(found, expected):
            if left.shape != right.shape:
                return Comparison(agrees=False, largest=math.inf, worst=what)
            distance = largest_difference(left, right)
            if distance > largest:
                largest, worst = distance, what
        return Comparison(agrees=agrees, largest=largest, worst=worst)

    def _add(self, kind: FindingKind, what: str, rows: tuple[int, ...], message: str) -> None:
        self._findings.append(Finding(kind=kind, what=what, rows=rows, message=message))
