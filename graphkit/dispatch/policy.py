"""Policies: the routes of a runner, from the fastest mode down, and what each accepts."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from graphkit.dims import Dim, as_items, as_size, dims_by_name
from graphkit.dispatch.bucket import Bucket
from graphkit.dispatch.buckets import Buckets
from graphkit.dispatch.variants import Variants
from graphkit.errors import SpecError


class Mode(enum.Enum):
    """How a batch runs. In order, fastest first."""

    FULL = "FULL"
    """One graph."""
    PIECEWISE = "PIECEWISE"
    """Graphs with eager breaks between."""
    EAGER = "EAGER"
    """No graph."""

    @property
    def rank(self) -> int:
        """0 for the fastest mode."""
        return _RANKS[self.value]

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return self.value


_RANKS = MappingProxyType({"FULL": 0, "PIECEWISE": 1, "EAGER": 2})

FULL = Mode.FULL
PIECEWISE = Mode.PIECEWISE
EAGER = Mode.EAGER


class Support(enum.Enum):
    """Which batches can run in a FULL graph: a property of the function, its attention mostly."""

    ALWAYS = "any batch"
    UNIFORM = "uniform batches"
    SINGLE_TOKEN = "uniform batches of one token a request"
    NEVER = "no batch"

    def allows(self, buckets: Buckets) -> bool:
        """Whether every batch that these buckets are for may run in a FULL graph."""
        if self is Support.ALWAYS:
            return True
        if self is Support.UNIFORM:
            return buckets.query_len is not None
        return self is Support.SINGLE_TOKEN and buckets.query_len == 1


def _as_mode(value: object) -> Mode:
    if not isinstance(value, Mode):
        raise SpecError(f"a route's mode is FULL or PIECEWISE, got {value!r}")
    if value is EAGER:
        raise SpecError("EAGER needs no route: whatever no route takes runs EAGER")
    return value


def _check_buckets(instance: object, attribute: object, value: Any) -> None:
    if not isinstance(value, Buckets):
        raise SpecError(f"a route needs Buckets, as Buckets.powers(batch), got {value!r}")


def _check_variants(instance: object, attribute: object, value: Any) -> None:
    if value is not None and not isinstance(value, Variants):
        raise SpecError(f"a route's variants are Variants(...) or None, got {value!r}")


def _as_max_padding(value: object) -> int | float | None:
    if value is None:
        return None
    if isinstance(value, float):
        if 0.0 <= value < 1.0:
            return value
        raise SpecError(
            f"max_padding={value} as a float is a share of the bucket, at least 0 and below 1; "
            "give rows as an int"
        )
    return as_size(value, "max_padding", error=SpecError)


@attrs.frozen
class Route:
    """A mode with its buckets, and the batches that it accepts.

    Args:
        mode: FULL or PIECEWISE.
        buckets: the set. A uniform set accepts batches whose stated `query_len` is its own; a
            varlen set those whose longest query is stated and within its bound; others accept
            whatever fits.
        variants: what else its graphs bake.
        max_padding: the most padding it accepts, in the first dim of `buckets`: rows (an int), or a
            share of the bucket (a float below 1; an empty batch counts as one row).
    """

    mode: Mode = attrs.field(converter=_as_mode)
    buckets: Buckets = attrs.field(validator=_check_buckets)
    variants: Variants | None = attrs.field(default=None, kw_only=True, validator=_check_variants)
    max_padding: int | float | None = attrs.field(
        default=None, kw_only=True, converter=_as_max_padding
    )

    def resolve(self, dims: Mapping[str, Dim] | Iterable[Dim]) -> tuple[Bucket, ...]:
        """The route's buckets for a runner of these dims, one for each combination of variants."""
        buckets = self.buckets.resolve(dims)
        if self.variants is None:
            return buckets
        combinations = self.variants.combinations()
        return tuple(
            attrs.evolve(bucket, variant=variant) for bucket in buckets for variant in combinations
        )

    def accepts_padding(self, padded: int, real: int) -> bool:
        """Whether `max_padding` allows so many padded rows, of the set's first dim, for `real`."""
        limit = self.max_padding
        if limit is None:
            return True
        if isinstance(limit, float):
            return padded - max(real, 1) <= limit * padded
        return padded - real <= limit

    def __str__(self) -> str:
        return f"{self.mode} {self.buckets}"


@attrs.frozen
class Downgrade:
    """A route that can't be FULL, and what became of it."""

    route: Route
    mode: Mode | None
    """The mode it has instead; None where an equal route of that mode was there already."""
    support: Support

    def __str__(self) -> str:
        became = (
            "runs PIECEWISE" if self.mode else "is dropped for the PIECEWISE route over the same"
        )
        return (
            f"route {self.route} {became}: "
            f"what the runner calls supports FULL graphs for {self.support.value}"
        )


def _as_routes(value: object) -> tuple[Route, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise SpecError(f"a policy needs a list of routes, got {value!r}")
    routes = as_items(value, "the routes of a policy")
    for route in routes:
        if not isinstance(route, Route):
            raise SpecError(f"a policy needs routes, as Route(FULL, buckets), got {route!r}")
    return routes


def _check_routes(instance: object, attribute: object, routes: tuple[Route, ...]) -> None:
    names = [frozenset(route.variants.axes) if route.variants else frozenset() for route in routes]
    for route, axes in zip(routes, names, strict=True):
        # A route without the axis would serve every value of it with whatever its graphs have
        # baked.
        if axes != names[0]:
            raise SpecError(
                f"routes {routes[0]} and {route} have different variants "
                f"({_listed(names[0])}; {_listed(axes)}); every route of a policy needs the same "
                "axes"
            )
    dims_by_name(dim for route in routes for dim in route.buckets.all_dims.values())


def _check_cost(instance: object, attribute: object, value: Any) -> None:
    if value is not None and not callable(value):
        raise SpecError(f"cost must be a function of a Bucket, got {value!r}")


def _as_dims(value: object) -> tuple[Dim, ...]:
    is_many = isinstance(value, Iterable)
    dims = as_items(value, "the further dims of a policy") if is_many else (value,)
    for dim in dims:
        if not isinstance(dim, Dim):
            raise SpecError(f"the further dims of a policy are Dims, got {dim!r}")
    return dims


@attrs.frozen
class Policy:
    """The ordered routes of a runner. A batch that no route takes runs EAGER, with a reason.

    Args:
        routes: any iterable of `Route`; the best mode wins whatever the order, and the order breaks
            ties.
        cost: of a bucket, less is better, among the buckets of one mode that accept a batch. By
            default the product of the padded sizes over the dims that vary among the policy's
            buckets; with one such dim that is least padding.
        further_dims: dims that `dispatch` takes besides those of the buffers and the buckets.

    Raises:
        SpecError: what is given are no routes, or they have different variant axes, or two dims of
            one name.
    """

    routes: tuple[Route, ...] = attrs.field(converter=_as_routes, validator=_check_routes)
    cost: Callable[[Bucket], float] | None = attrs.field(
        default=None, kw_only=True, validator=_check_cost
    )
    further_dims: tuple[Dim, ...] = attrs.field(default=(), kw_only=True, converter=_as_dims)

    @staticmethod
    def eager(*dims: Dim) -> Policy:
        """No graphs at all: for debugging, and to compare with.

        Args:
            dims: what callers give to `dispatch` and no buffer has, so that they needn't change.
        """
        return Policy((), further_dims=dims)

    @staticmethod
    def full(buckets: Buckets) -> Policy:
        """One graph for each bucket."""
        return Policy((Route(FULL, buckets),))

    @staticmethod
    def piecewise(buckets: Buckets) -> Policy:
        """Graphs with eager breaks between."""
        return Policy((Route(PIECEWISE, buckets),))

    @staticmethod
    def full_decode_only(decode: Buckets) -> Policy:
        """FULL for uniform decode batches; everything else EAGER.

        Raises:
            SpecError: the buckets are not uniform.
        """
        return Policy((Route(FULL, _uniform(decode, "full_decode_only")),))

    @staticmethod
    def full_and_piecewise(decode: Buckets, mixed: Buckets) -> Policy:
        """FULL for uniform decode batches, PIECEWISE for whatever else fits `mixed`.

        Raises:
            SpecError: the decode buckets are not uniform.
        """
        decode = _uniform(decode, "full_and_piecewise")
        return Policy((Route(FULL, decode), Route(PIECEWISE, mixed)))

    @property
    def dims(self) -> dict[str, Dim]:
        """Every dim that the policy knows as an object, by name."""
        of_routes = (d for route in self.routes for d in route.buckets.all_dims.values())
        return dims_by_name((*of_routes, *self.further_dims))

    def resolve(self, support: Support) -> tuple[Policy, tuple[Downgrade, ...]]:
        """The policy with no FULL route that `support` doesn't allow, and what was changed.

        Such a route becomes PIECEWISE, or goes where an equal PIECEWISE route is there already.
        """
        routes: list[Route] = []
        downgrades: list[Downgrade] = []
        for route in self.routes:
            if route.mode is not FULL or support.allows(route.buckets):
                routes.append(route)
                continue
            slower = attrs.evolve(route, mode=PIECEWISE)
            there = slower in self.routes or slower in routes
            downgrades.append(Downgrade(route, None if there else PIECEWISE, support))
            if not there:
                routes.append(slower)
        if not downgrades:
            return self, ()
        return attrs.evolve(self, routes=routes), tuple(downgrades)


def _uniform(buckets: Any, preset: str) -> Any:
    if isinstance(buckets, Buckets) and buckets.query_len is None:
        raise SpecError(
            f"{preset} needs uniform decode buckets, got {buckets}; use Buckets.uniform(...)"
        )
    return buckets


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
