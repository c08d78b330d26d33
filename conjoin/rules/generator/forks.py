"""Functions of many items over processes that see everything this one has; results in order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")
_FEW = 4
"""Items for each process below which none is started."""
_functions: list[Callable[[Any], Any]] = []
"""What processes call: they are forked when it is here, so that it may hold whatever this one has in memory."""


def forked(function: Callable[[Item], Made], items: Sequence[Item], workers: int) -> list[Made]:
    """The function of each item, in processes of their own where there are enough items."""
    if workers == 1 or len(items) < _FEW * workers:
        return [function(item) for item in items]
    _functions.append(function)
    try:
        with multiprocessing.get_context("fork").Pool(workers, compute_alone) as pool:
            return pool.map(_call, items, chunksize=max(len(items) // (8 * workers), 1))
    finally:
        _functions.pop()


def compute_alone() -> None:
    """In a forked process: the threads with which torch computed before are not here, and would be waited for."""
    torch.set_num_threads(1)


def _call(item: Any) -> Any:
    return _functions[-1](item)
