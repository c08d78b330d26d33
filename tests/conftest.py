"""What all tests share: one thread, since small tensors gain nothing from more and test processes share the cores; a
cache of their own, empty when they begin; and modules that the garbage collector need not look through again and again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch


def pytest_collection_finish() -> None:
    _leave_logging_to_one()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _leave_logging_to_one() -> None:
    """Have torch's loggers hand what they are told to the one called torch: with handlers of their own, which write to
    the same place, pytest would add its own to each of them and remove it again, six times a test.
    """
    for logger in map(logging.getLogger, sorted(logging.root.manager.loggerDict)):
        if logger.name.startswith("torch.") and not logger.propagate and _writes_to_stderr(logger):
            logger.handlers.clear()
            logger.propagate = True


def _writes_to_stderr(logger: logging.Logger) -> bool:
    return bool(logger.handlers) and all(type(handler) is logging.StreamHandler for handler in logger.handlers)


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
