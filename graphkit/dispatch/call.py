"""The function that `Dispatcher.dispatch` is, made for each dispatcher, with the dims as keywords.

A decode step asks for its bucket thousands of times a second, and ``**sizes`` alone costs as much
as all that is done here on a known batch. So a template for each number of dims is given the dims'
names: the compiled code is the template's own, only its parameters are renamed. Names in the
templates begin with an underscore, which no dim's name does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, cast

Memo = dict[tuple[Any, ...], list[Any]]
"""By ``(*sizes, query_len, max_query_len)``: the answer, and how often it was given."""
Miss = Callable[[tuple[Any, ...], Any, Any, Any, Any, Mapping[str, Any]], Any]
"""Called with sizes, query_len, max_query_len, variant, eager and unknown names."""

# The types are checked before the memo is asked, since 3.0 and True are the same key as 3 and 1.


def _of_none(_memo: Memo, _miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **_others: Any,
    ) -> Any:
        if (
            variant is None
            and eager is None
            and (query_len is None or type(query_len) is int)
            and (max_query_len is None or type(max_query_len) is int)
            and not _others
        ):
            try:
                _entry = _memo[query_len, max_query_len]
            except KeyError:
                pass
            else:
                _entry[1] += 1
                return _entry[0]
        return _miss((), query_len, max_query_len, variant, eager, _others)

    return dispatch


def _of_one(_memo: Memo, _miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        _a: Any = None,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **_others: Any,
    ) -> Any:
        if (
            variant is None
            and eager is None
            and (type(_a) is int or _a is None)
            and (query_len is None or type(query_len) is int)
            and (max_query_len is None or type(max_query_len) is int)
            and not _others
        ):
            try:
                _entry = _memo[_a, query_len, max_query_len]
            except KeyError:
                pass
            else:
                _entry[1] += 1
                return _entry[0]
        return _miss((_a,), query_len, max_query_len, variant, eager, _others)

    return dispatch


def _of_two(_memo: Memo, _miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        _a: Any = None,
        _b: Any = None,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **_others: Any,
    ) -> Any:
        if (
            variant is None
            and eager is None
            and (type(_a) is int or _a is None)
            and (type(_b) is int or _b is None)
            and (query_len is None or type(query_len) is int)
            and (max_query_len is None or type(max_query_len) is int)
            and not _others
        ):
            try:
                _entry = _memo[_a, _b, query_len, max_query_len]
            except KeyError:
                pass
            else:
                _entry[1] += 1
                return _entry[0]
        return _miss((_a, _b), query_len, max_query_len, variant, eager, _others)

    return dispatch


def _of_three(_memo: Memo, _miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        _a: Any = None,
        _b: Any = None,
        _c: Any = None,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **_others: Any,
    ) -> Any:
        if (
            variant is None
            and eager is None
            and (type(_a) is int or _a is None)
            and (type(_b) is int or _b is None)
            and (type(_c) is int or _c is None)
            and (query_len is None or type(query_len) is int)
            and (max_query_len is None or type(max_query_len) is int)
            and not _others
        ):
            try:
                _entry = _memo[_a, _b, _c, query_len, max_query_len]
            except KeyError:
                pass
            else:
                _entry[1] += 1
                return _entry[0]
        return _miss((_a, _b, _c), query_len, max_query_len, variant, eager, _others)

    return dispatch


def _of_four(_memo: Memo, _miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        _a: Any = None,
        _b: Any = None,
        _c: Any = None,
        _d: Any = None,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **_others: Any,
    ) -> Any:
        if (
            variant is None
            and eager is None
            and (type(_a) is int or _a is None)
            and (type(_b) is int or _b is None)
            and (type(_c) is int or _c is None)
            and (type(_d) is int or _d is None)
            and (query_len is None or type(query_len) is int)
            and (max_query_len is None or type(max_query_len) is int)
            and not _others
        ):
            try:
                _entry = _memo[_a, _b, _c, _d, query_len, max_query_len]
            except KeyError:
                pass
            else:
                _entry[1] += 1
                return _entry[0]
        return _miss((_a, _b, _c, _d), query_len, max_query_len, variant, eager, _others)

    return dispatch


def _of_more(names: Sequence[str], miss: Miss) -> Callable[..., Any]:
    def dispatch(
        *,
        query_len: Any = None,
        max_query_len: Any = None,
        variant: Any = None,
        eager: Any = None,
        **sizes: Any,
    ) -> Any:
        given = tuple([sizes.pop(name, None) for name in names])
        # The miss asks the memo itself, once it has seen to the types.
        return miss(given, query_len, max_query_len, variant, eager, sizes)

    options = list(inspect.signature(dispatch).parameters.values())
    keyword = inspect.Parameter.KEYWORD_ONLY
    dims = [inspect.Parameter(name, keyword, default=None, annotation=Any) for name in names]
    cast(Any, dispatch).__signature__ = inspect.Signature([*dims, *options])
    return dispatch


_TEMPLATES = (_of_none, _of_one, _of_two, _of_three, _of_four)
_FIRST = ("_a", "_b", "_c", "_d")


def make_call(names: Sequence[str], memo: Memo, miss: Miss) -> Callable[..., Any]:
    """The dispatch function over dims of these names (public identifiers, no options' names).

    It gives what `memo` has for a batch whose values are all of the right types, and otherwise what
    `miss` returns.
    """
    if len(names) >= len(_TEMPLATES):
        return _of_more(names, miss)
    template = cast(FunctionType, _TEMPLATES[len(names)](memo, miss))
    renamed = dict(zip(_FIRST, names, strict=False))
    code: CodeType = template.__code__
    call = FunctionType(
        code.replace(co_varnames=tuple(renamed.get(name, name) for name in code.co_varnames)),
        template.__globals__,
        template.__name__,
        None,
        template.__closure__,
    )
    call.__kwdefaults__ = {
        renamed.get(name, name): default
        for name, default in (template.__kwdefaults__ or {}).items()
    }
    call.__annotations__ = {
        renamed.get(name, name): kind for name, kind in template.__annotations__.items()
    }
    call.__qualname__ = "dispatch"
    call.__doc__ = "Choose mode and bucket for one batch; see `graphkit.Dispatcher.dispatch`."
    return call
