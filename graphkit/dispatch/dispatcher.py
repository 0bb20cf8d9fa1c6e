"""Dispatch: which mode and which bucket one batch gets, and why not a better one."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from graphkit.dims import Dim, as_items, as_size, dims_by_name
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.call import Memo, make_call
from graphkit.dispatch.decision import NO_VARIANT, Dispatch, Reason, Tally
from graphkit.dispatch.policy import (
    EAGER,
    FULL,
    PIECEWISE,
    Downgrade,
    Mode,
    Policy,
    Route,
    Support,
)
from graphkit.dispatch.ranking import Candidate, Fitting, ranked, unreachable
from graphkit.dispatch.variants import RoundUp, Variants, round_up, variant_value
from graphkit.errors import (
    BucketError,
    DispatchError,
    InputError,
    SpecError,
    UnreachableBucketWarning,
)

__all__ = [
    "EAGER",
    "FULL",
    "PIECEWISE",
    "Dispatch",
    "Dispatcher",
    "Downgrade",
    "Mode",
    "Policy",
    "Reason",
    "RoundUp",
    "Route",
    "Support",
    "Tally",
    "Variants",
    "round_up",
]


# Of the reasons that several routes give, the one of the route that came closest.
_CLOSEST = (
    Reason.EXCESS_PADDING,
    Reason.ABOVE_MAX,
    Reason.UNKNOWN_VARIANT,
    Reason.QUERY_TOO_LONG,
    Reason.NOT_UNIFORM,
)
_STATES = frozenset({Reason.SUSPENDED, Reason.STALE})
_ABSENCES = frozenset({Reason.OVER_BUDGET, Reason.NOT_CAPTURED})
_MEMO_LIMIT = 65536


class Dispatcher:
    """Chooses mode and bucket for a batch by a policy. Usable on its own: no group, no device.

    The best mode first, then the least cost over all captured buckets of all routes of that mode
    that accept the batch; then the fewest rows of the first dim, the least variant, and the order
    of the routes.

    Args:
        policy: the routes.
        dims: the runner's dims (by name, or any iterable); those of the policy are added.
        captured: the graphs that are there, as ``(mode, bucket)`` of `graphs`; None means all.
        strict: raise where a batch would fall back.
        name: of the runner, for messages.

    Raises:
        SpecError: two dims have one name, or a route sizes a dim that nobody declares.
        BucketError: a bucket is above a dim's maximum, or `captured` names none of `graphs`.

    Warns:
        UnreachableBucketWarning: buckets that are never chosen while better ones are captured.
    """

    policy: Policy
    dims: Mapping[str, Dim]
    """Every dim by name: keyword arguments of `dispatch`."""
    graphs: tuple[tuple[Mode, Bucket], ...]
    """Every mode and bucket that can be captured, in the order that the routes give."""
    unreachable: tuple[tuple[Mode, Bucket], ...]
    """Those of `graphs` that no batch gets while all are captured."""
    strict: bool
    dispatch: Callable[..., Dispatch]
    """``dispatch(**sizes, query_len=None, max_query_len=None, variant=None, eager=None)``.

    Sizes are the batch's real ones. A dim may be left out if every bucket sizes it at its maximum,
    which is then its size, and so may the tokens where `query_len` is given and a route ties them
    to the requests. `query_len` states that every request has exactly so many tokens and that the
    batch is of that kind; `max_query_len` that none has more. `variant` names values for the
    policy's variants; `eager` is the caller's own reason for EAGER.

    Raises InputError for what is no size, is above a dim's maximum, is unknown or missing, or
    contradicts itself; DispatchError where the dispatcher is strict and the batch would fall back.
    """

    def __init__(
        self,
        policy: Policy,
        dims: Mapping[str, Dim] | Iterable[Dim] = (),
        *,
        captured: Iterable[tuple[Mode, Bucket]] | None = None,
        strict: bool = False,
        name: str | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise SpecError(f"a dispatcher needs a Policy, got {policy!r}")
        if name is not None and not isinstance(name, str):
            raise SpecError(f"a dispatcher's name must be a str or None, got {name!r}")
        given = dims.values() if isinstance(dims, Mapping) else as_items(dims, "the dims")
        known = dims_by_name((*given, *policy.dims.values()))
        self.policy = policy
        self.dims = MappingProxyType(known)
        self.strict = strict
        self._where = f"runner {name!r}: " if name else ""
        resolved = [(route, route.resolve(known)) for route in policy.routes]
        self._candidates = ranked(policy, known, resolved)
        self.graphs = tuple(
            dict.fromkeys((route.mode, bucket) for route, buckets in resolved for bucket in buckets)
        )
        self._graphs = frozenset(self.graphs)
        self._tiers = tuple(
            (dim, sorted({candidate.bucket.sizes[dim] for candidate in self._candidates}))
            for dim in known
        )
        # Where every bucket holds the maximum, whatever the caller leaves unsaid fits.
        self._optional = frozenset(
            dim for dim, tiers in self._tiers if not tiers or tiers == [known[dim].maximum]
        )
        self._ties = tuple(
            dict.fromkeys(
                route.buckets.tied for route in policy.routes if route.buckets.tied is not None
            )
        )
        self._variants = next(
            (tuple(route.variants.axes) for route in policy.routes if route.variants), ()
        )
        self._state: Reason | None = None
        self._memo: Memo = {}
        self._fitting: dict[tuple[Any, ...], Fitting] = {}
        self._totals: dict[tuple[Mode, Bucket | None, Reason | None], list[Any]] = {}
        self._missing: dict[tuple[Mode, Bucket], Reason] = {}
        self._captured = set(self.graphs if captured is None else ())
        for graph in () if captured is None else as_items(captured, "the captured graphs"):
            if not isinstance(graph, tuple) or len(graph) != 2:
                raise SpecError(f"captured= takes pairs of mode and bucket, got {graph!r}")
            self.mark_captured(*graph)
        self.dispatch = make_call(tuple(known), self._memo, self._miss)
        self._warn_unreachable()

    @property
    def captured(self) -> tuple[tuple[Mode, Bucket], ...]:
        """The graphs that are there, in the order of `graphs`."""
        return tuple(graph for graph in self.graphs if graph in self._captured)

    def is_captured(self, mode: Mode, bucket: Bucket) -> bool:
        """Whether this graph is there."""
        return (mode, bucket) in self._captured

    def mark_captured(self, mode: Mode, bucket: Bucket) -> None:
        """Note that a graph is there.

        Raises:
            BucketError: it is none of `graphs`.
        """
        graph = self._known(mode, bucket)
        if graph in self._captured:
            return
        self._captured.add(graph)
        self._missing.pop(graph, None)
        self._forget_answers()

    def forget(self, mode: Mode, bucket: Bucket) -> None:
        """Note that a graph is gone; nothing happens if it wasn't there.

        Raises:
            BucketError: it is none of `graphs`.
        """
        self._captured.discard(self._known(mode, bucket))
        self._forget_answers()

    def note_missing(self, mode: Mode, bucket: Bucket, reason: Reason) -> None:
        """Note why a graph isn't there, if it isn't: what is said where a batch would have got it.

        Args:
            reason: OVER_BUDGET, or NOT_CAPTURED, which is what is said of all others.

        Raises:
            BucketError: it is none of `graphs`.
            SpecError: `reason` is none of the two.
        """
        if reason not in _ABSENCES:
            raise SpecError(f"the reason can be OVER_BUDGET or NOT_CAPTURED, got {reason!r}")
        self._missing[self._known(mode, bucket)] = reason
        self._forget_answers()

    def missing_reason(self, mode: Mode, bucket: Bucket) -> Reason:
        """What was noted of a graph that isn't there: OVER_BUDGET or NOT_CAPTURED."""
        return self._missing.get((mode, bucket), Reason.NOT_CAPTURED)

    def fall_back(self, answer: Dispatch, reason: Reason) -> Dispatch:
        """What a batch gets instead of an answer whose graph has turned out not to be there: EAGER.

        It is counted in place of the answer.

        Raises:
            DispatchError: the dispatcher is strict.
        """
        self._add_up()
        key = (answer.mode, answer.bucket, answer.reason)
        if key in self._totals:
            self._add(answer, -1)
            if not self._totals[key][0]:
                del self._totals[key]
        instead = Dispatch(
            mode=EAGER,
            bucket=None,
            sizes=answer.sizes,
            padding=MappingProxyType(dict.fromkeys(answer.sizes, 0)),
            reason=reason,
            query_len=answer.query_len,
            max_query_len=answer.max_query_len,
            variant=answer.variant,
            is_fallback=True,
        )
        self._add(instead, 1)
        if self.strict:
            raise DispatchError(f"{self._where}strict, and the batch would fall back: {instead}")
        return instead

    def clear_captured(self) -> None:
        """Note that all graphs are gone."""
        self._captured.clear()
        self._missing.clear()
        self._forget_answers()

    def set_reason(self, reason: Reason | None) -> None:
        """Answer EAGER for this reason (SUSPENDED or STALE) until it is set to None."""
        if reason is not None and reason not in _STATES:
            raise SpecError(f"the reason can be SUSPENDED, STALE or None, got {reason!r}")
        self._state = reason
        self._forget_answers()

    @property
    def counts(self) -> tuple[Tally, ...]:
        """How often each mode, bucket and reason was the answer, most frequent first."""
        self._add_up()
        rows = [
            Tally(
                mode=mode,
                bucket=bucket,
                reason=reason,
                dispatches=number,
                rows=MappingProxyType(dict(real)),
                padding=MappingProxyType(dict(padding)),
            )
            for (mode, bucket, reason), (number, real, padding) in self._totals.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.dispatches))

    def reset_counts(self) -> None:
        """Start counting anew."""
        self._add_up()
        self._totals.clear()

    def _known(self, mode: Mode, bucket: Bucket) -> tuple[Mode, Bucket]:
        graph = (mode, bucket)
        if graph not in self._graphs:
            raise BucketError(f"{self._where}{mode} {bucket} is no graph of the policy")
        return graph

    def _add_up(self) -> None:
        for entry in self._memo.values():
            if entry[1]:
                self._add(entry[0], entry[1])
                entry[1] = 0

    def _add(self, answer: Dispatch, number: int) -> None:
        key = (answer.mode, answer.bucket, answer.reason)
        total = self._totals.setdefault(
            key, [0, dict.fromkeys(self.dims, 0), dict.fromkeys(self.dims, 0)]
        )
        total[0] += number
        for name, size in answer.sizes.items():
            total[1][name] += number * size
            total[2][name] += number * answer.padding[name]

    def _forget_answers(self) -> None:
        self._add_up()
        self._memo.clear()
        self._fitting.clear()

    def _miss(
        self,
        given: tuple[Any, ...],
        query_len: Any,
        max_query_len: Any,
        variant: Any,
        eager: Any,
        others: Mapping[str, Any],
    ) -> Dispatch:
        """Answer what the memo can't be asked, or doesn't have."""
        if others:
            unknown = ", ".join(repr(name) for name in others)
            raise InputError(
                f"{self._where}dispatch got {unknown}, which is no dim; the dims are "
                f"{_listed(self.dims)}"
            )
        sizes = tuple(
            [
                None if value is None else self._size(value, dim)
                for value, dim in zip(given, self.dims.values(), strict=True)
            ]
        )
        if query_len is not None:
            query_len = as_size(query_len, f"{self._where}query_len", minimum=1)
        if max_query_len is not None:
            max_query_len = as_size(max_query_len, f"{self._where}max_query_len", minimum=1)
        asked = self._asked(variant)
        key: tuple[Any, ...] = (*sizes, query_len, max_query_len)
        if eager is not None or asked:
            if eager is not None and not (isinstance(eager, str) and eager):
                raise InputError(
                    f"{self._where}eager is the reason in words, as eager='cascade attention', "
                    f"got {eager!r}"
                )
            try:
                key = (*key, _kinds(asked), eager)
                entry = self._memo.get(key)
            except TypeError:
                raise InputError(
                    f"{self._where}the values of variant must be hashable, got {asked!r}"
                ) from None
        else:
            entry = self._memo.get(key)
        if entry is not None:
            entry[1] += 1
            found: Dispatch = entry[0]
            return found
        answer = self._answer(sizes, query_len, max_query_len, asked, eager)
        if self.strict and answer.is_fallback:
            self._add(answer, 1)
            raise DispatchError(f"{self._where}strict, and the batch would fall back: {answer}")
        if len(self._memo) >= _MEMO_LIMIT:
            self._add_up()
            self._memo.clear()
        self._memo[key] = [answer, 1]
        return answer

    def _size(self, value: object, dim: Dim) -> int:
        size = as_size(value, f"{self._where}the size of dim {dim.name!r}")
        if size > dim.maximum:
            raise InputError(
                f"{self._where}{dim.name}={size} is above the maximum {dim.maximum} of dim "
                f"{dim.name!r}"
            )
        return size

    def _asked(self, variant: object) -> Mapping[str, Any]:
        if variant is None:
            variant = NO_VARIANT
        elif not isinstance(variant, Mapping):
            raise InputError(
                f"{self._where}variant must map names to values, got {variant!r} "
                f"({type(variant).__name__})"
            )
        asked = {name: variant_value(value) for name, value in variant.items()}
        if self.policy.routes:
            for name in asked:
                if name not in self._variants:
                    raise InputError(
                        f"{self._where}variant {name!r} is not the policy's; its variants are "
                        f"{_listed(self._variants)}"
                    )
            for name in self._variants:
                if name not in asked:
                    raise InputError(
                        f"{self._where}variant {name!r} isn't given; give variant={{{name!r}: ...}}"
                    )
        return asked

    def _complete(
        self, given: tuple[int | None, ...], query_len: int | None, max_query_len: int | None
    ) -> dict[str, int]:
        """The size of every dim, and no contradiction between them."""
        stated: dict[str, int | None] = dict(zip(self.dims, given, strict=True))
        for reqs, tokens in self._ties:
            count, rows = stated[reqs], stated[tokens]
            if rows is None and count is not None and query_len is not None:
                stated[tokens] = self._size(count * query_len, self.dims[tokens])
        sizes: dict[str, int] = {}
        for name, size in stated.items():
            if size is None:
                if name not in self._optional:
                    raise InputError(
                        f"{self._where}the size of dim {name!r} isn't given; give {name}=..."
                    )
                size = self.dims[name].maximum
            sizes[name] = size
        for reqs, tokens in self._ties:
            count, rows = sizes[reqs], sizes[tokens]
            if query_len is not None and rows != count * query_len:
                raise InputError(
                    f"{self._where}{tokens}={rows} contradicts {reqs}={count} with "
                    f"query_len={query_len}, "
                    f"which is {count * query_len}"
                )
            if max_query_len is not None and rows > count * max_query_len:
                raise InputError(
                    f"{self._where}{tokens}={rows} contradicts {reqs}={count} with "
                    f"max_query_len={max_query_len}, "
                    f"which is at most {count * max_query_len}"
                )
        if query_len is not None and max_query_len is not None and max_query_len < query_len:
            raise InputError(
                f"{self._where}max_query_len={max_query_len} contradicts query_len={query_len}"
            )
        return sizes

    def _answer(
        self,
        given: tuple[int | None, ...],
        query_len: int | None,
        max_query_len: int | None,
        asked: Mapping[str, Any],
        eager: str | None,
    ) -> Dispatch:
        sizes = self._complete(given, query_len, max_query_len)
        longest = max_query_len if query_len is None else query_len
        chosen: Candidate | None = None
        reason: Reason | None
        if eager is not None:
            reason, is_fallback = Reason.CALLER, False
        elif not self.policy.routes:
            reason, is_fallback = Reason.EAGER_POLICY, False
        elif self._state is not None:
            reason, is_fallback = self._state, True
        else:
            chosen, reason, is_fallback = self._choose(sizes, query_len, longest, asked)
        padding = dict.fromkeys(sizes, 0) if chosen is None else chosen.bucket.padding(sizes)
        return Dispatch(
            mode=EAGER if chosen is None else chosen.mode,
            bucket=None if chosen is None else chosen.bucket,
            sizes=MappingProxyType(sizes),
            padding=MappingProxyType(padding),
            reason=reason,
            query_len=query_len,
            max_query_len=query_len if max_query_len is None else max_query_len,
            variant=MappingProxyType(dict(asked)) if chosen is None else chosen.bucket.variant,
            detail=eager,
            is_fallback=is_fallback,
        )

    def _choose(
        self,
        sizes: dict[str, int],
        query_len: int | None,
        longest: int | None,
        asked: Mapping[str, Any],
    ) -> tuple[Candidate | None, Reason | None, bool]:
        """The graph, why no better mode, and whether that is a fallback."""
        # Batches between the same bucket sizes in every dim fit the same buckets, so that a batch
        # never seen before costs a bisection a dim, however many buckets there are.
        tiers = tuple([bisect_left(tiers, sizes[name]) for name, tiers in self._tiers])
        key = (tiers, query_len, longest, _kinds(asked))
        fitting = self._fitting.get(key)
        if fitting is None:
            if len(self._fitting) >= _MEMO_LIMIT:
                self._fitting.clear()
            fitting = self._fitting[key] = self._fit(sizes, query_len, longest, asked)
        best = next((c for c in fitting.captured if c.accepts_padding(sizes)), None)
        ideal = next((c for c in fitting.declared if c.accepts_padding(sizes)), None)
        rank = EAGER.rank if best is None else best.rank
        if ideal is not None and ideal.rank < rank:
            graph = (ideal.mode, ideal.bucket)
            return best, self._missing.get(graph, Reason.NOT_CAPTURED), True
        reasons = {reason for refused, reason in fitting.refused if refused < rank}
        if any(candidate.rank < rank for candidate in fitting.declared):
            reasons.add(Reason.EXCESS_PADDING)
        reason = next((reason for reason in _CLOSEST if reason in reasons), None)
        return best, reason, best is None

    def _fit(
        self,
        sizes: dict[str, int],
        query_len: int | None,
        longest: int | None,
        asked: Mapping[str, Any],
    ) -> Fitting:
        declared = []
        refused = set()
        for candidate in self._candidates:
            reason = candidate.refusal(sizes, query_len, longest, asked)
            if reason is None:
                declared.append(candidate)
            else:
                refused.add((candidate.rank, reason))
        captured = [c for c in declared if (c.mode, c.bucket) in self._captured]
        return Fitting(tuple(declared), tuple(captured), frozenset(refused))

    def _warn_unreachable(self) -> None:
        covers = unreachable(self._candidates)
        self.unreachable = tuple(graph for graph in self.graphs if graph in covers)
        if not self.unreachable:
            return
        lost: dict[tuple[Mode, Mode], list[Bucket]] = {}
        for mode, bucket in self.unreachable:
            lost.setdefault((mode, covers[mode, bucket]), []).append(bucket)
        parts = []
        for (mode, better_mode), buckets in lost.items():
            shown = "; ".join(str(bucket) for bucket in buckets[:3])
            more = f"; and {len(buckets) - 3} more" if len(buckets) > 3 else ""
            parts.append(
                f"{mode} [{shown}{more}] can't be reached while the {better_mode} ones "
                "that take the same are captured"
            )
        warnings.warn(
            f"{self._where}{'; '.join(parts)}. Drop them, or keep them for when a capture fails.",
            UnreachableBucketWarning,
            stacklevel=3,
        )


def _kinds(variant: Mapping[str, Any]) -> tuple[Any, ...]:
    # With the types, since True and 1.0 are the same key as 1.
    return tuple(sorted((name, type(value).__name__, value) for name, value in variant.items()))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
