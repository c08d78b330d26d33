"""Starting ranks on this host: their values, their errors, and that nothing is left behind."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conjoin.errors import RankError, UsageError
from conjoin.runtime import Session, launch
from conjoin.runtime.ranks import rank_processes
from conjoin.runtime.ranks.rank_processes import Site
from tests.ir.wording import assert_three_sentences
from tests.waiting import HUNG_SECONDS


def _rank_and_sum(rank: int, amount: int) -> tuple[int, float]:
    total = torch.tensor([float(rank + amount)])
    dist.all_reduce(total)
    return rank, total.item()


def test_every_rank_returns_its_value() -> None:
    assert launch(3, _rank_and_sum, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def _convolve(rank: int) -> float:
    torch.set_num_threads(2)
    return torch.conv2d(torch.ones(4, 8, 32, 32), torch.ones(8, 8, 3, 3)).sum().item()


def test_ranks_start_beside_threads() -> None:
    """A fork of this process would wait for ever for the threads with which it has computed."""
    try:
        torch.set_num_threads(2)
        here = _convolve(0)
        assert launch(2, _convolve) == [here, here]
    finally:
        torch.set_num_threads(1)


def test_ranks_are_forked_where_there_are_no_threads() -> None:
    assert launch(1, lambda rank: len(os.listdir(f"/proc/{os.getppid()}/task"))) == [1]


def _looks_for_garbage(rank: int) -> bool:
    return gc.isenabled()


def test_ranks_look_for_garbage() -> None:
    """What they are forked from does not while it imports."""
    assert launch(1, _looks_for_garbage) == [True]


def test_ranks_have_the_surroundings_of_their_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONJOIN_TEST", "ü")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "written_now.py").write_text("FOUND = 'found'\n")
    monkeypatch.setattr(sys, "argv", ["program", "word"])

    def look(rank: int) -> tuple[Any, ...]:
        import written_now

        return os.getcwd(), os.environ["CONJOIN_TEST"], written_now.FOUND, sys.argv, os.environ["LOCAL_RANK"]

    assert launch(2, look)[1] == (str(tmp_path), "ü", "found", ["program", "word"], "1")


def test_ranks_write_where_their_launcher_does_now(capfd: pytest.CaptureFixture[str]) -> None:
    launch(1, lambda rank: print("said"))
    launch(1, lambda rank: print("complained", file=sys.stderr))
    assert capfd.readouterr() == ("said\n", "complained\n")


def test_what_a_rank_registered_for_its_end_is_done(tmp_path: Path) -> None:
    launch(2, lambda rank: atexit.register((tmp_path / f"{rank}").write_text, "done") and None)
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["done"] * 2


def _is_slow_to_connect(rank: int, make: str) -> None:
    """Rank 1 is still making a process group when the others have theirs."""
    connect = getattr(dist, make)

    def connect_late(*args: Any, **options: Any) -> Any:
        made = connect(*args, **options)
        time.sleep(0.3 * (rank == 1))
        dist.connected_at = time.monotonic()
        return made

    setattr(dist, make, connect_late)


def test_no_rank_begins_before_all_are_connected() -> None:
    """One that needs no other would end, and close connections that the others are still making."""
    site = Site("127.0.0.1", partial(_is_slow_to_connect, make="init_process_group"), HUNG_SECONDS)
    times = launch(3, lambda rank: (dist.connected_at, time.monotonic()), site=site)
    assert max(connected for connected, _ in times) <= min(began for _, began in times)


def test_no_rank_goes_on_before_all_of_a_group_are_connected() -> None:
    def program(rank: int) -> tuple[float, float]:
        _is_slow_to_connect(rank, "new_group")
        with Session("cpu") as session:
            session.group((0, 1))
            return dist.connected_at, time.monotonic()

    (_, began), (connected, _), _ = launch(3, program)
    assert connected <= began


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


def test_a_killed_rank_is_named_and_the_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600) if rank == 2 else dist.barrier()

    monkeypatch.setattr(rank_processes, "_GRACE_SECONDS", 0.5)  # rank 2 will not stop by itself
    with pytest.raises(RankError, match=r"Rank 1 ended .* exit code -9"):
        launch(3, die)


@pytest.mark.parametrize("count", [0, 257])
def test_too_many_ranks_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"{count} ranks"):
        launch(count, _rank_and_sum, 0)


def test_an_interrupt_reaches_the_caller() -> None:
    def interrupt(rank: int) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(2, interrupt)


def _be_there(rank: int, heard: Path) -> None:
    """Hold an end of a pipe for as long as this process lives: nobody writes there any more when all ranks are gone."""
    os.write(os.open(heard, os.O_WRONLY), b".")
    dist.barrier()


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Path]:
    """A pipe for ranks; after the test nobody holds it any more."""
    os.mkfifo(tmp_path / "heard")
    end = os.open(tmp_path / "heard", os.O_RDONLY | os.O_NONBLOCK)
    yield tmp_path / "heard"
    os.set_blocking(end, True)
    assert os.read(end, 1), "a rank was there"
    deadline = time.monotonic() + HUNG_SECONDS
    while os.read(end, 100):
        assert time.monotonic() < deadline
    os.close(end)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_no_rank_is_left_when_the_launcher_is_told_to_end(
    heard: Path, number: signal.Signals, raised: type[BaseException]
) -> None:
    def stay(rank: int, launcher: int) -> None:
        _be_there(rank, heard)
        if rank == 0:
            os.kill(launcher, number)
        time.sleep(60)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let the background ignore it
    try:
        with pytest.raises(raised):
            launch(2, stay, os.getpid())
    finally:
        signal.signal(signal.SIGINT, before)


def test_ranks_that_may_finish_are_told_to_end_and_do_so(heard: Path) -> None:
    def finish(rank: int, launcher: int) -> str:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
        _be_there(rank, heard)
        if rank == 0:
            os.kill(launcher, signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGTERM)  # who forks for it gets it too, where it goes to a whole job
        while not told:
            time.sleep(0.01)
        dist.barrier()
        return "done"

    assert launch(2, finish, os.getpid(), may_finish=True) == ["done", "done"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_ranks_that_may_finish_and_do_not_are_gone_as_well(heard: Path) -> None:
    def stay(rank: int, launcher: int) -> None:
        _be_there(rank, heard)
        if rank == 0:
            os.kill(launcher, signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(SystemExit) as raised:
        launch(2, stay, os.getpid(), may_finish=True)
    assert raised.value.code == 128 + signal.SIGTERM


def test_no_rank_is_left_when_the_launcher_or_the_server_is_killed(heard: Path) -> None:
    """The launcher is a rank itself, with a server of its own."""

    def kill(rank: int, launcher: int) -> None:
        _be_there(rank, heard)
        if rank == 0:
            os.kill(launcher or os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def start(rank: int) -> None:
        with pytest.raises(RankError, match="The process that starts ranks ended"):
            launch(2, kill, None)
        launch(2, kill, os.getpid())

    with pytest.raises(RankError, match="Rank 0 ended in the middle of a step with exit code -9"):
        launch(1, start)


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


@pytest.mark.parametrize(("gpus", "device", "said"), [
    (0, None, ""), (0, "cpu", ""), (4, "cpu", ""), (4, None, "gpu"), (4, "cuda", "gpu"), (2, "cuda", "refused"),
    (0, "cuda", "refused"), (2, None, "told"),
])  # fmt: skip
def test_ranks_without_a_gpu_each_are_refused_or_told(
    gpus: int, device: str | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    try:
        assert rank_processes._have_gpus(3, device) == (said == "gpu")
    except UsageError as error:
        assert said == "refused" and f"has {gpus}" in str(error)
        assert_three_sentences(error)
        return
    told = capsys.readouterr().err
    assert ("all of them use the CPU" in told) == (said == "told")
    if told:
        assert_three_sentences(told.strip())
