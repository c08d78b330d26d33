"""Caches of what follows from declarations: emptied when an operator is declared, which may have been opaque before."""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import TypeVar

T = TypeVar("T")
_CACHES: list[_lru_cache_wrapper[object]] = []


def call_cache(maxsize: int | None = 1 << 16) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """As `functools.lru_cache`, for a function whose answers rest on how operators are declared."""

    def kept(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        cached = lru_cache(maxsize=maxsize)(function)
        _CACHES.append(cached)
        return cached

    return kept


def forget_calls() -> None:
    """Empty all of them."""
    for cached in _CACHES:
        cached.cache_clear()
