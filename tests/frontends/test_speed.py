"""How long capture takes at full size, on the meta device, in seconds of the process: the cores may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zoo
from conjoin.frontends import capture

SECONDS = 15.0
LAYERS = {"inception-v3": (1, 1), "llama-7b": (16, 32)}
"""So many of how many: of a stack of layers that is like another one a part may take its part of the time."""


@pytest.fixture
def export_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """How long torch.export itself took since the start of the test, without what is done to its program afterwards."""
    spent: list[float] = []
    original = torch.export.export

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.process_time() - start)

    monkeypatch.setattr(torch.export, "export", timed)
    return lambda: sum(spent)


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    start = time.process_time()
    yield lambda: time.process_time() - start


@pytest.mark.parametrize("name", LAYERS)
def test_capture_at_full_size_is_fast(
    name: str, export_seconds: Callable[[], float], record_property: Callable[[str, Any], None]
) -> None:
    layers, of_all = LAYERS[name]
    workload = zoo.build(name, device="meta", sizes={"layers": layers} if layers < of_all else {})
    with stopwatch() as elapsed:
        graph = capture(*workload)
        whole = elapsed()
    ours = whole - export_seconds()
    record_property("seconds", whole)
    record_property("of which after torch.export", ours)
    print(f"{name}: {len(graph.nodes)} nodes, {whole:.1f} s, of which {ours:.1f} s after torch.export")
    assert whole < SECONDS * layers / of_all
    assert ours < export_seconds()
