"""A rank that dies, hangs, holds Python's lock or ends early: the others stop and name it. A slow one goes on."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conjoin.errors import RankError
from conjoin.runtime import Session, launch, load
from conjoin.runtime.ranks.channels import GlooChannel, ParcelOfWorks
from conjoin.runtime.ranks.progress import (
    Eye,
    Passage,
    Report,
    Verdict,
    at_odds,
    ended_early,
    failed,
    gone_on,
    held_up,
    lost,
    not_coming,
    where_is,
)
from conjoin.runtime.ranks.rank_watch import _Waiting, last_words
from tests.ir.wording import assert_three_sentences
from tests.runtime.models import mlp, plan_of

PATIENCE, LONG_PATIENCE = 3.0, 30.0
"""How long others have; and long, where it is not what is tried: a busy machine holds ranks up for seconds."""
Act = Callable[[Session], None]


def hang(session: Session) -> None:
    time.sleep(600)


def hold_the_lock(session: Session) -> None:
    ctypes.PyDLL(None).sleep(600)


def stop(session: Session) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(session: Session) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(session: Session) -> None:
    raise ZeroDivisionError("one over nothing")


def end(session: Session) -> None:
    raise SystemExit


def close(session: Session) -> None:
    session.close()
    time.sleep(600)


def _train(rank: int, plan: Any, batch: Any, model: Any, act: Act, notes: Path) -> None:
    """Rank 1 does something else in the middle; what the others say is noted."""
    def note(error: RankError) -> None:
        (notes / f"{rank}").write_text(str(error))

    last_words.insert(0, note)  # where the thread that watches ends this process
    session = Session(patience_seconds=LONG_PATIENCE if act in (die, fail) else PATIENCE)
    step = load(plan, model, session=session)
    try:
        for i in range(1000):
            if rank == 1 and i == 3:
                act(session)
            step(batch).backward()
    except RankError as error:
        note(error)
        raise
    except SystemExit:
        return


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (hang, r"Rank 1 has made no progress for 3 s .* It is at .*test_rank_watch.py:\d+ in hang"),
        (hold_the_lock, r"Rank 1 has given no sign of life for 3 s .* holds Python's lock"),
        (stop, r"Rank 1 has given no sign of life for 3 s .* is stopped"),
        (close, r"Rank 1 has ended its program, noticed by rank .* fewer steps"),
        (end, r"Rank 1 has ended its program, noticed by rank .* fewer steps"),
    ],
)
def test_what_holds_up_the_others_is_named(act: Act, said: str, tmp_path: Path) -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 3)
    launch(1, print)  # the first takes longer
    start = time.monotonic()
    with pytest.raises(RankError, match=said) as told:
        launch(3, _train, plan, batch, model, act, tmp_path)
    assert time.monotonic() - start < 300
    assert_three_sentences(told.value)
    for noted in tmp_path.iterdir():
        assert re.search(said, noted.read_text()), "whoever could still speak said the same"


@pytest.mark.parametrize("strategy", ["data-parallel", "megatron"])
def test_a_killed_rank_is_named_by_all_others(tmp_path: Path, strategy: str) -> None:
    model, batch = mlp()
    with pytest.raises(RankError, match="Rank 1 ended in the middle of a step with exit code -9"):
        launch(4, _train, plan_of(model, batch, 4, strategy), batch, model, die, tmp_path)
    for rank in (0, 2, 3):
        said = (tmp_path / f"{rank}").read_text()
        assert said.startswith(f"Rank 1 was lost in the middle of a step, noticed by rank {rank}.")


def test_a_rank_that_ends_by_its_own_error_is_named_with_it(tmp_path: Path) -> None:
    model, batch = mlp()
    with pytest.raises(RankError, match=r"(?s)Rank 1 failed.*in fail.*one over nothing"):
        launch(3, _train, plan_of(model, batch, 3), batch, model, fail, tmp_path)
    for rank in (0, 2):
        said = (tmp_path / f"{rank}").read_text()
        assert said.startswith(f"Rank 1 failed with an error of its own, noticed by rank {rank}: ZeroDivisionError: on")


def _train_slowly(rank: int, plan: Any, batch: Any, model: Any, seconds: float) -> float:
    session = Session(patience_seconds=PATIENCE)
    step = load(plan, model, session=session)
    for i in range(3):
        if rank == 1:
            time.sleep(seconds) if i % 2 else ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        loss = step(batch)
        loss.backward()
    if rank == 1:
        time.sleep(1.2 * PATIENCE)  # nobody waits for it any more
    return loss.item()


def _ask_alone(rank: int, plan: Any, batch: Any, model: Any) -> None:
    step = load(plan, model, session=Session(patience_seconds=2.0))
    for _ in range(3):
        step(batch).backward()
        if rank == 1:
            step.clip_grad_norm_(1.0)


def test_a_norm_that_one_rank_asks_for_is_told() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 2, "fsdp")
    with pytest.raises(RankError, match=r"rank 1 at .*test_rank_watch.py:\d+ in _ask_alone.* on every rank") as told:
        launch(2, _ask_alone, plan, batch, model)
    assert_three_sentences(told.value)


def test_a_slow_rank_is_not_taken_for_lost() -> None:
    """More than the patience in all, also while it holds Python's lock; and at the end, when nobody waits for it."""
    model, batch = mlp()
    losses = launch(2, _train_slowly, plan_of(model, batch, 2), batch, model, 0.35 * PATIENCE)
    assert losses[0] == losses[1]


# ------------------------------------------------------------------------------------------------- without any process

PASSAGE = Passage((0, 1, 2), "0,1,2", 7)
LATE, THERE = {"0,1,2": 6}, {"0,1,2": 7}


def test_who_has_not_come_is_late() -> None:
    assert Report(entered=LATE).lags(PASSAGE) and Report().lags(PASSAGE) and not Report(entered=THERE).lags(PASSAGE)


@pytest.mark.parametrize(
    ("quiet", "still", "waits", "said"),
    [
        (0.0, 9.9, False, None),
        (0.0, 10.0, False, "made no progress for 10 s"),
        (9.9, 9.9, False, None),
        (10.0, 10.0, False, "no sign of life for 10 s"),
        (0.0, 19.9, True, None),
        (0.0, 20.0, True, "for 20 s in another collective"),
    ],
)
def test_who_is_judged_and_when(quiet: float, still: float, waits: bool, said: str | None) -> None:
    found = held_up({1: Report(entered=LATE, waits=waits, where="{x}.py:3")}, {1: quiet}, {1: still}, 10.0)
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        assert found.ranks == [1] and said in str(found.error(2)) and found.error(2).ranks == (1,)


@pytest.mark.parametrize(
    ("still", "waits", "is_told"), [(24.9, True, False), (25.0, False, False), (25.0, True, True)]
)
def test_who_waits_together_in_what_does_not_end_has_asked_for_different_things(
    still: float, waits: bool, is_told: bool
) -> None:
    there = {0: Report(waits=True, where="a.py:3 in log"), 2: Report(waits=waits, where="a.py:9 in train")}
    found = at_odds(there, {0: 30.0, 2: still}, 10.0)
    assert (found is not None) == is_told
    if found is not None:
        told = found.error(2)
        assert "rank 0 at a.py:3 in log and rank 2 at a.py:9 in train" in str(told) and told.ranks == (0, 2)
        assert_three_sentences(told)


def test_an_end_counts_only_before_the_collective() -> None:
    assert ended_early({1: Report(entered=THERE, has_ended=True)}, PASSAGE) is None
    found = ended_early({1: Report(entered=LATE, has_ended=True), 2: Report(entered=LATE)}, PASSAGE)
    assert found is not None and found.ranks == [1]


@pytest.mark.parametrize("found", [lost([1]), failed({1: Report(failure="E: {x}")}), lost([*range(20)])])
def test_every_verdict_has_three_sentences(found: Verdict) -> None:
    assert_three_sentences(found.error(0))


def test_time_in_which_nobody_looked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that held Python's lock itself must not take the others for silent."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    eye = Eye(beat_seconds=1.0)
    eye.look({1: Report(beat=1)})
    now[0] = 100.0
    eye.tick()
    assert eye.look({1: Report(beat=1)})[0] == {1: 2.0}
    now[0] = 101.0
    eye.tick()
    assert eye.look({1: Report(beat=1, moves=4)}) == ({1: 3.0}, {1: 0.0})
    eye.close()
    assert eye.look({1: Report(beat=1)})[0] == {1: 0.0}


def test_the_place_is_one_of_the_users() -> None:
    import threading

    assert where_is(threading.get_ident()).split(" in ")[1] == "test_the_place_is_one_of_the_users"
    assert where_is(-1) == ""


def test_a_rank_that_went_on_is_told_from_one_that_is_on_its_way() -> None:
    mine = {"0,1": 7, "0,1,2": 4}
    assert gone_on({1: Report(entered={"0,1": 7}), 2: Report(entered={"0,1,2": 3, "2,3": 99})}, mine) is None
    found = gone_on({1: Report(entered={"0,1": 8}), 2: Report(entered={"0,1,2": 4})}, mine)
    assert found is not None and found.ranks == [1]
    assert_three_sentences(found.error(0))
    ended = not_coming({1: Report(), 2: Report(has_ended=True)})
    assert ended is not None and ended.ranks == [2]
    assert_three_sentences(ended.error(0))


class Guard:
    """A watch that is asked what other ranks have to do with it."""

    def enter(self, *_: Any) -> None: ...

    def begin_waiting(self, _: Any) -> None: ...

    def end_waiting(self, _: Any) -> None: ...

    def explain(self, error: BaseException, _: Any) -> RankError:
        return RankError(f"a rank was lost: {error}")


def run_out(*_: Any) -> Any:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def test_memory_that_runs_out_in_a_message_is_no_rank_that_was_lost() -> None:
    """Who runs out of memory says so and can leave the step, wherever it happens; torch's error is a RuntimeError."""
    session: Any = SimpleNamespace(guard=Guard())
    way = SimpleNamespace(recv=run_out, send=run_out)
    ways: Any = SimpleNamespace(rank=0, up=way, down=way, tags=lambda ranks: {1: 1})
    channel = GlooChannel(ways, (0, 1), session)
    with pytest.raises(torch.OutOfMemoryError):
        channel.start((), [(1, torch.zeros(1))])
    with pytest.raises(torch.OutOfMemoryError):
        channel.start([(1, torch.zeros(1))], ())
    parcel = ParcelOfWorks(session, (0, 1))
    parcel.works = [SimpleNamespace(wait=run_out)]  # type: ignore[list-item]
    with pytest.raises(torch.OutOfMemoryError):
        parcel.wait()
    with pytest.raises(torch.OutOfMemoryError):
        Session.started(session, (0, 1), run_out)
    with pytest.raises(torch.OutOfMemoryError), _Waiting(session.guard, None):  # type: ignore[arg-type]
        run_out()
