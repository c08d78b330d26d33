"""What all tests share: one thread, since small tensors gain nothing from more and test processes share the cores; a
cache of their own, empty when they begin; and modules that the garbage collector need not look through again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CONJOIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        monkeypatch.delenv("CONJOIN_COSTS", raising=False)
        yield
