"""Calls of libraries that are answered otherwise while a thread traces a model, and as ever in all other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from threading import Lock, local
from typing import Any

FunctionName = tuple[Any, str]
"""Who has a function, and by what name."""

_LOCK, _HERE = Lock(), local()
_USERS: dict[tuple[int, str], int] = {}


class _Either:
    """The function that stands in a place while some thread traces."""

    def __init__(self, place: FunctionName, plain: Callable[..., Any]) -> None:
        self.plain, self.key = plain, _key(place)

    def made(self) -> Callable[..., Any]:
        """The one for this thread."""
        own: Mapping[tuple[int, str], Callable[..., Any]] = getattr(_HERE, "calls", {})
        return own.get(self.key, self.plain)


def _key(place: FunctionName) -> tuple[int, str]:
    return id(place[0]), place[1]


def plain_call(owner: Any, name: str) -> Callable[..., Any]:
    """The function as it is for all who trace nothing."""
    found: Any = getattr(owner, name)
    either = getattr(found, "_either", None)
    return either.plain if isinstance(either, _Either) else found


@contextmanager
def calls_here(calls: Mapping[FunctionName, Callable[..., Any]]) -> Iterator[None]:
    """Answer calls of these places by other functions, in this thread."""
    before: dict[tuple[int, str], Callable[..., Any]] = getattr(_HERE, "calls", {})
    with _LOCK:
        for place in calls:
            if not _USERS.get(_key(place)):
                setattr(*place, _standing(place))
            _USERS[_key(place)] = _USERS.get(_key(place), 0) + 1
    _HERE.calls = {**before, **{_key(place): made for place, made in calls.items()}}
    try:
        yield
    finally:
        _HERE.calls = before
        with _LOCK:
            for place in calls:
                _USERS[_key(place)] -= 1
                if not _USERS[_key(place)]:
                    setattr(*place, plain_call(*place))


def _standing(place: FunctionName) -> Callable[..., Any]:
    either = _Either(place, getattr(*place))

    def call(*args: Any, **named: Any) -> Any:
        return either.made()(*args, **named)

    update_wrapper(call, either.plain)
    call._either = either  # type: ignore[attr-defined]
    return call
