"""Starting ranks on this host: their values, their errors, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conjoin.errors import RankError, UsageError
from conjoin.runtime import launch


def _rank_and_sum(rank: int, amount: int) -> tuple[int, float]:
    total = torch.tensor([float(rank + amount)])
    dist.all_reduce(total)
    return rank, total.item()


def test_every_rank_returns_its_value() -> None:
    assert launch(3, _rank_and_sum, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_tensors_come_back_by_value() -> None:
    """The rank is gone when its answer is read, and with it everything that is shared by a handle."""

    def program(rank: int) -> dict[str, torch.Tensor]:
        dist.barrier()
        return {"whole": torch.arange(3.0) + rank, "view": torch.ones(4, 4)[rank]}

    found = launch(2, program)
    assert [answer["whole"].tolist() for answer in found] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    assert all(answer["view"].tolist() == [1.0] * 4 for answer in found)


def test_a_mistake_of_the_user_is_told_once_and_as_it_is() -> None:
    def refuse(rank: int) -> None:
        raise UsageError("This was asked. It cannot be. Change that.")

    with pytest.raises(UsageError, match="It cannot be"):
        launch(2, refuse)


def test_an_error_names_its_rank_and_line() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("one over nothing")
        dist.barrier()

    with pytest.raises(RankError, match=r"(?s)Rank 1 failed.*in fail.*one over nothing"):
        launch(2, fail)


def test_a_killed_rank_is_named_and_the_others_are_gone() -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600) if rank == 2 else dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 ended .* exit code -9"):
        launch(3, die)
    assert time.monotonic() - start < 45


@pytest.mark.parametrize("count", [0, 257])
def test_too_many_ranks_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} ranks"):
        launch(count, _rank_and_sum, 0)


def test_an_interrupt_reaches_the_caller() -> None:
    def interrupt(rank: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(2, interrupt)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_rank_outlives_its_launcher(number: signal.Signals, code: int) -> None:
    """Every process holds an end of one pipe: it says that nobody writes any more when all of them are gone."""
    context = multiprocessing.get_context("fork")
    heard, said = context.Pipe(duplex=False)

    def sleep(rank: int) -> None:
        said.send(rank)
        time.sleep(60)

    launcher = context.Process(target=launch, args=(2, sleep))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's own idle threads
        launcher.start()
    said.close()
    assert {heard.recv(), heard.recv()} == {0, 1}
    assert launcher.pid is not None
    os.kill(launcher.pid, number)
    launcher.join(10)
    assert launcher.exitcode == code
    assert heard.poll(10)
    with pytest.raises(EOFError):
        heard.recv()


def test_the_way_to_end_is_the_programs_own_again() -> None:
    before = signal.getsignal(signal.SIGTERM)
    during = launch(1, lambda rank: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    assert during == [True] and signal.getsignal(signal.SIGTERM) == before


def test_ranks_are_launched_from_any_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(launch(2, _rank_and_sum, 10)))
    thread.start()
    thread.join(60)
    assert found == [(0, 21.0), (1, 21.0)]
