"""Graphs of tiny models of the zoo, each captured once in a run of the tests, whichever process asks for it first."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import zoo
from conjoin.frontends import capture
from conjoin.ir import Graph

Made = TypeVar("Made", Graph, Graph | None)


@cache
def captured(name: str, batch_size: int = 4) -> Graph:
    """The graph of a tiny model with its loss, in training; by default of as many samples as tiny models have."""
    return shared(f"{name}-{batch_size}", lambda: _capture(name, batch_size))


def shared(name: str, make: Callable[[], Made]) -> Made:
    """What one process of this run has made under a name, and what is none is not kept."""
    folder = os.environ.get("CONJOIN_TESTS_SHARED")
    path = None if folder is None else Path(folder, f"{name}.graph")
    if path is not None and path.exists():
        found: Made = pickle.loads(path.read_bytes())
        return found
    made = make()
    if path is not None and made is not None:
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(made))
        own.replace(path)
    return made


def _capture(name: str, batch_size: int) -> Graph:
    model, batch, loss = zoo.build(f"{name}:tiny", batch_size=batch_size)
    return capture(model.train(), batch, loss)
