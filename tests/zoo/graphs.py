"""Graphs of tiny models of the zoo, each captured once in a run of the tests, whichever process asks for it first."""

from __future__ import annotations

import os
import pickle
from functools import cache
from pathlib import Path

import zoo
from conjoin.frontends import capture
from conjoin.ir import Graph


@cache
def captured(name: str, batch_size: int = 4) -> Graph:
    """The graph of a tiny model with its loss, in training; by default of as many samples as tiny models have."""
    shared = os.environ.get("CONJOIN_TESTS_SHARED")
    if shared is None:
        return _capture(name, batch_size)
    path = Path(shared, f"{name}-{batch_size}.graph")
    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(_capture(name, batch_size)))
        own.replace(path)
    graph: Graph = pickle.loads(path.read_bytes())
    return graph


def _capture(name: str, batch_size: int) -> Graph:
    model, batch, loss = zoo.build(f"{name}:tiny", batch_size=batch_size)
    return capture(model.train(), batch, loss)
