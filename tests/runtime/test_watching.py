"""A rank that dies or hangs: the others stop in time and name it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from conjoin.errors import RankError
from conjoin.runtime import launch, load, watching
from tests.runtime.models import mlp, plan_of


def _train_until(rank: int, plan: Any, model: Any, batch: Any, notes: Path, how: int) -> None:
    step = load(plan, model)
    for i in range(1000):
        if rank == 1 and i == 3:
            (notes / "start").write_text(str(time.monotonic()))
            os.kill(os.getpid(), how)
        try:
            step(batch).backward()
        except RankError as error:
            (notes / f"{rank}").write_text(str(error))
            (notes / f"{rank}.seconds").write_text(str(time.monotonic()))
            raise


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, strategy: str) -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 4, strategy)
    with pytest.raises(RankError, match="Rank 1"):
        launch(4, _train_until, plan, model, batch, tmp_path, signal.SIGKILL)
    start = float((tmp_path / "start").read_text())
    for rank in (0, 2, 3):
        assert (tmp_path / f"{rank}").read_text().startswith("Rank 1 was lost in the middle of a step")
        assert float((tmp_path / f"{rank}.seconds").read_text()) - start < 30


def test_a_rank_that_hangs_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its connections: nothing fails, nothing ends, but its sign of life stands still."""
    monkeypatch.setattr(watching, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(watching, "_GRACE_SECONDS", 1.0)
    model, batch = mlp()
    plan = plan_of(model, batch, 3)
    start = time.monotonic()
    with pytest.raises(RankError, match="noticed that another rank was silent"):
        launch(3, _train_until, plan, model, batch, tmp_path, signal.SIGSTOP)
    assert time.monotonic() - start < 60


def _train_until_an_error(rank: int, plan: Any, model: Any, batch: Any, notes: Path) -> None:
    step = load(plan, model)
    for i in range(1000):
        if rank == 1 and i == 3:
            raise ZeroDivisionError("one over nothing")
        try:
            step(batch).backward()
        except RankError as error:
            (notes / f"{rank}").write_text(str(error))
            raise


def test_a_rank_that_ends_by_its_own_error_is_named_with_it(tmp_path: Path) -> None:
    model, batch = mlp()
    with pytest.raises(RankError, match=r"(?s)Rank 1 failed.*one over nothing"):
        launch(3, _train_until_an_error, plan_of(model, batch, 3), model, batch, tmp_path)
    for rank in (0, 2):
        said = (tmp_path / f"{rank}").read_text()
        assert said.startswith(f"Rank 1 failed with an error of its own, noticed by rank {rank}: ZeroDivisionError: on")
