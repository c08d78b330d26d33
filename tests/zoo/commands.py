"""Commands that tests run get each model of the zoo captured once, whichever process asks for it first."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch import nn

from conjoin.cli import models
from conjoin.ir import Graph
from tests.zoo.graphs import shared


@contextmanager
def captured_once() -> Iterator[None]:
    """Commands get the graph of a model of the zoo that one of them has captured, with equal options.

    Not where something was said of it: that is said again. What capture makes of these models has tests of its own.
    """
    make, capture, said = models._from_zoo, models.capture_model, logging.getLogger("conjoin")
    names: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
    losses: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
    graphs: dict[tuple[Any, ...], Graph] = {}

    def from_zoo(model: str, batch_size: int | None, sizes: Mapping[str, int], device: str = "meta") -> Any:
        made = make(model, batch_size, sizes, device)
        names[made[0]], losses[made[0]] = (model, batch_size, device, *sizes.items()), made[2]
        return made

    def capture_model(model: nn.Module, batch: Any, loss: Any, *, check: bool = False, precision: Any = None) -> Graph:
        def captured() -> Graph | None:
            """Nothing where something was said, which `spoken` then has the graph of."""
            listening, records = logging.Handler(), list[logging.LogRecord]()
            listening.emit = records.append  # type: ignore[method-assign]
            said.addHandler(listening)
            try:
                graph = capture(model, batch, loss, check=check, precision=precision)
            finally:
                said.removeHandler(listening)
            if records:
                spoken.append(graph)
                return None
            return graph

        if model not in names or loss is not losses[model]:
            return capture(model, batch, loss, check=check, precision=precision)
        spoken: list[Graph] = []
        key = (*names[model], model.training, check, repr(precision))
        if key not in graphs:
            graph = shared(hashlib.sha256(repr(key).encode()).hexdigest(), captured)
            if graph is None:
                return spoken[0]
            graphs[key] = graph
        return graphs[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(models, "_from_zoo", from_zoo)
        monkeypatch.setattr(models, "capture_model", capture_model)
        yield
