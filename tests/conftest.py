"""What all tests share: one thread, since small tensors gain nothing from more and test processes share the cores; a
cache of their own, empty when they begin; modules that the garbage collector need not look through again and again; and
the same random numbers in every run, whichever tests ran before in a process.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, settings
from pytest import Collector, Item

HERE = Path(__file__).parent
collect_ignore = ["libraries.py"]
"""What takes seconds to import, and holds no test."""

gc.disable()
"""What is imported and collected stays: it is not looked through while it grows, but once (`pytest_collection_finish`).
"""

os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
"""Tests fork ranks after threads have multiplied matrices: in a process so forked MKL's own lists of buffers may have
no end. It reads this when it is first used."""


settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)


class _FromElsewhere(pytest.Dir):
    """A folder of which each process of a run collects another part first: what one has compiled, the others read."""

    def collect(self) -> list[Item | Collector]:
        found = list(super().collect())
        number, count = _place(self.config)
        start = len(found) * number // count
        return found[start:] + found[:start]


def pytest_collect_directory(path: Path, parent: Collector) -> Collector | None:
    return _FromElsewhere.from_parent(parent, path=path) if _place(parent.config)[0] else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[Item]) -> None:
    """The order is that of one process again, by folders and files."""
    if _place(config)[0]:
        mine = [item for item in items if item.path.is_relative_to(HERE)]
        others = [item for item in items if not item.path.is_relative_to(HERE)]
        items[:] = [*sorted(mine, key=lambda item: item.path.parts), *others]


def _place(config: pytest.Config) -> tuple[int, int]:
    """Which process of how many this is."""
    told: dict[str, Any] = getattr(config, "workerinput", {"workerid": "gw0", "workercount": 1})
    return int(told["workerid"].removeprefix("gw")), told["workercount"]


def pytest_collection_finish() -> None:
    """With thresholds as high, what a test has made is in the young generations, where `gc.collect(1)` finds it."""
    from tests.cli.processes import COLLECTED_AT  # and with it the package

    _have_ctrl_c()
    _leave_logging_to_one()
    _seed_no_absent_devices()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTED_AT)
    gc.enable()


def pytest_sessionfinish() -> None:
    """What is left is not looked through once more while the process ends, as pytest would."""
    gc.collect(1)
    gc.freeze()


def _have_ctrl_c() -> None:
    """Shells start background jobs with Ctrl-C ignored, and that is inherited: a user's terminal has it on."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _seed_no_absent_devices() -> None:
    """Where there is no accelerator, torch keeps every seed for later, with all lines of the stack it was set in."""
    if not torch.accelerator.is_available():
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            devices.manual_seed_all = lambda seed: None


def _leave_logging_to_one() -> None:
    """Have torch's loggers hand what they are told to the one called torch: pytest adds its handlers to every logger
    that hands nothing on, six times a test; and where its trace has a handler, torch writes down all that it compiles.
    """
    for logger in map(logging.getLogger, sorted(logging.root.manager.loggerDict)):
        if logger.name.startswith("torch.") and not logger.propagate:
            logger.handlers.clear()
            logger.propagate = True


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


@pytest.fixture(autouse=True, scope="session")
def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of all processes of this run, for what one of them has captured (`tests/zoo/graphs.py`)."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    shared.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CONJOIN_TESTS_SHARED", str(shared))
        yield


@pytest.fixture(autouse=True, scope="session")
def _ranks_with_pytest() -> Iterator[None]:
    """What forks ranks has imported pytest and the zoo already: programs and models stand in modules that import those.

    Where tests of libraries were collected it has those, too. And it forks commands, which else need one of their own.
    """
    from conjoin.runtime.ranks import fork_server, rank_processes
    from tests.cli.processes import begin_either

    own = fork_server._own_modules
    libraries = ["tests.libraries"] if "transformers" in sys.modules else []
    models = sorted(name for name in sys.modules if name.partition(".")[0] == "zoo")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fork_server, "_own_modules", lambda: [*own(), "pytest", *libraries, *models])
        monkeypatch.setattr(rank_processes, "_begin", begin_either)
        yield
