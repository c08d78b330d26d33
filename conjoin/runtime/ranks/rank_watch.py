"""A rank that dies, hangs or ends early: the others stop and say which, by the progress that everyone reports.

Each rank counts the collectives of every group that it has entered. A thread of its own puts these counts into the
rendezvous store, again and again, and where the rank is when it stands still. A rank that waits looks who has not come
to the same collective. One that ended, failed, or has made no progress for as long as was set is what all of them wait
for; one that waits itself is not to blame. Who finds out first puts a verdict into the store, so that all say the same.
Nobody is judged while nobody waits for them.

A rank whose thread cannot run says nothing: its process is stopped or cut off, or in a call that holds Python's lock.
It has just as long. Time in which the watching thread itself could not run does not count.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import torch

from conjoin.errors import RankError
from conjoin.runtime.ranks.progress import (
    BrokenOff,
    Eye,
    Passage,
    Report,
    Verdict,
    at_odds,
    ended_early,
    failed,
    first_line,
    gone_on,
    held_up,
    lost,
    name_of,
    not_coming,
    where_is,
)
from conjoin.runtime.ranks.rendezvous import KeyStore

T = TypeVar("T")
PATIENCE_SECONDS = 540.0
"""Before NCCL's own watchdog, which ends processes after 600 s and names no rank."""
SILENT_EXIT = 75
"""The exit code of a rank that ends because of another one."""
_MAX_BEAT_SECONDS = 1.0
_BEATS = 5
"""At least as many reports are due within the time that a rank has."""
_LOOKS = 20
"""How often a rank that waits looks at the others in this time: the store serves all of them."""
_LOST_BEATS = 3
"""Whoever has not reported in as many beats after a collective failed is lost."""

last_words: list[Callable[[RankError], None]] = []
"""To whom this process says why it ends, if not on its stderr."""


class Work(Protocol):
    """A collective under way, as torch has it."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class _Waiting:
    """While this rank waits for a collective. No generator makes it: there are many in a step."""

    def __init__(self, watch: Watch, passage: Passage) -> None:
        self._watch, self._passage = watch, passage

    def __enter__(self) -> None:
        self._watch.begin_waiting(self._passage)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise self._watch.explain(error, self._passage) from error
        finally:
            self._watch.end_waiting(self._passage)


class Watch:
    """This rank's reports, and its eye on those it waits for."""

    def __init__(self, store: KeyStore, rank: int, num_ranks: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._patience = patience_seconds
        self._beat_seconds = min(_MAX_BEAT_SECONDS, patience_seconds / _BEATS)
        self._worker = threading.get_ident()
        self._beat = self._moves = 0
        self._entered: dict[str, int] = {}
        self._waiting: dict[int, Passage] = {}
        self._probes: dict[str, tuple[Passage, Work]] = {}
        """By group, a collective of those that a device carries out in order: it is looked at now and then."""
        self._is_told = False
        self._failure = ""
        self._num_renewed = 0
        """How often ranks have left what was under way, and connected anew."""
        self._eye = Eye(self._beat_seconds)
        self._eye_on_all = Eye(self._beat_seconds)
        """Also on those who have come."""
        self._stop = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._run, name="conjoin-watch", daemon=True)
        self._thread.start()

    def enter(self, members: tuple[int, ...], may_break: bool = False) -> Passage:
        """Note that this rank enters a collective, which somebody may leave."""
        name = name_of(members)
        self._moves += 1
        self._entered[name] = number = self._entered.get(name, 0) + 1
        return Passage(members, name, number, may_break)

    def break_off(self) -> None:
        """Say that this rank leaves what is under way, before others see that it is gone from there."""
        self._quietly(lambda: self._store.set(f"broken off/{self._num_renewed}", str(self._rank)))

    def renew(self) -> None:
        """What ranks have entered is counted anew: they have left it at different points, and all are through."""
        self._num_renewed += 1
        self._entered.clear()

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on, to those who wait for it; it says so itself to its caller."""
        self._is_told = True
        self._failure = f"{type(error).__name__}: {first_line(error)}"
        self._tell()

    def probe(self, passage: Passage, work: Work) -> None:
        """Look at a collective for which the host does not wait."""
        self._probes.setdefault(passage.group, (passage, work))

    def waiting(self, passage: Passage) -> _Waiting:
        """Around waiting for a collective; when it fails the error names the rank that was lost."""
        return _Waiting(self, passage)

    def begin_waiting(self, passage: Passage) -> None:
        self._waiting[id(passage)] = passage

    def end_waiting(self, passage: Passage) -> None:
        self._moves += 1
        del self._waiting[id(passage)]

    def explain(self, error: BaseException, passage: Passage) -> RankError:
        """Which rank was lost, after a collective failed; or that one has left it."""
        left = f"broken off/{self._num_renewed}"
        if passage.may_break and self._quietly(lambda: self._store.check([left])):
            rank = self._quietly(lambda: self._store.get(left).decode())
            return BrokenOff(
                f"Rank {self._rank} waited for another in the middle of a step. Rank {rank} has left it. All leave it "
                f"together."
            )
        self._is_told = True
        verdict = self._verdict() or self._find_lost(passage)
        if verdict is None:
            return RankError(
                f"A collective failed on rank {self._rank} although every rank is alive: {first_line(error)}. The "
                f"ranks ran different programs, or the network failed. Compare their logs."
            )
        return self._agreed(verdict).error(self._rank)

    def why_missing(self, ranks: list[int], groups: Sequence[tuple[int, ...]]) -> RankError | None:
        """Why ranks do not come to compare notes, where that is certain; `groups` are those of this rank."""
        reports = self._reports(ranks)
        if reports is None:
            found: Verdict | None = lost([0])
        else:
            entered = {name: self._entered.get(name, 0) for name in map(name_of, groups)}
            found = self._verdict() or failed(reports) or not_coming(reports) or gone_on(reports, entered)
        if found is None:
            return None
        self._is_told = True
        return self._agreed(found).error(self._rank)

    def leave(self, error: BaseException | None = None) -> None:
        """Say that this rank ends: on purpose, or with an error."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        error = error or getattr(sys, "last_value", None)  # what nobody caught; not there before the first
        if error is None:
            self._tell(has_ended=True)
        elif not isinstance(error, RankError):
            self._tell(failure=f"{type(error).__name__}: {first_line(error)}")

    def _find_lost(self, passage: Passage) -> Verdict | None:
        """Whoever says that it ended or failed; else whoever says nothing more."""
        first: dict[int, Report] = {}
        quiet: list[int] = []
        for _ in range(_LOST_BEATS + 1):
            time.sleep(self._beat_seconds if first else 0.0)
            reports = self._reports(range(self._num_ranks))
            if reports is None:
                return lost([0])  # the store itself is gone with the process that holds it
            found = self._verdict() or failed(reports) or ended_early(reports, passage)
            if found is not None:
                return found
            first = first or reports
            quiet = [rank for rank, each in reports.items() if each.beat == first[rank].beat and not each.has_ended]
        return lost(quiet) if quiet else None

    def _run(self) -> None:
        looked = 0.0
        judged: float | None = None
        while not self._stop.wait(self._beat_seconds):
            now = self._eye.tick()
            self._eye_on_all.tick()
            self._tell()
            awaited = self._awaited()
            verdict = self._verdict()
            if verdict is not None:
                judged = now if judged is None else judged
                is_stuck = awaited is not None or self._rank in verdict.ranks
                if is_stuck and not self._is_told and now - judged >= _BEATS * self._beat_seconds:
                    self._end(verdict)
            elif awaited is None:
                self._eye.close()
                self._eye_on_all.close()
            elif now - looked >= self._patience / _LOOKS:
                looked = now
                found = self._judge(awaited)
                if found is not None:
                    self._end(self._agreed(found))  # this rank waits inside a collective that nothing else can end

    def _awaited(self) -> Passage | None:
        """The collective for which this rank waits."""
        for name, (passage, work) in list(self._probes.items()):
            if not work.is_completed():
                return passage
            self._moves += 1
            del self._probes[name]
        return next(iter(list(self._waiting.values())), None)

    def _judge(self, passage: Passage) -> Verdict | None:
        """Who holds up a collective, if that is certain by now."""
        everyone = self._reports(passage.members)
        if everyone is None:
            return None
        reports = {rank: report for rank, report in everyone.items() if rank != self._rank}
        late = {rank: report for rank, report in reports.items() if report.lags(passage)}
        found = failed(late) or ended_early(late, passage)
        if found is not None:
            return found
        quiet, still = self._eye.look(late)
        together = self._eye_on_all.look(everyone)[1]
        return held_up(late, quiet, still, self._patience) if late else at_odds(everyone, together, self._patience)

    def _agreed(self, found: Verdict) -> Verdict:
        """The first verdict of any rank."""
        if self._quietly(lambda: self._store.add("judged", 1)) == 1:
            self._quietly(lambda: self._store.set("verdict", json.dumps(asdict(found))))
            return found
        for _ in range(_LOST_BEATS):
            verdict = self._verdict()
            if verdict is not None:
                return verdict
            time.sleep(self._beat_seconds)
        return found

    def _verdict(self) -> Verdict | None:
        if not self._quietly(lambda: self._store.check(["verdict"])):
            return None
        text = self._quietly(lambda: self._store.get("verdict").decode())
        return None if text is None else Verdict(**json.loads(text))

    def _end(self, verdict: Verdict) -> NoReturn:
        error = verdict.error(self._rank)
        for say in last_words:
            say(error)
        if not last_words:
            print(error, file=sys.stderr, flush=True)
        os._exit(SILENT_EXIT)

    def _tell(self, *, has_ended: bool = False, failure: str = "") -> None:
        self._beat += 1
        where = "" if has_ended else where_is(self._worker)
        waits = bool(self._waiting or self._probes)
        said = failure or self._failure
        report = Report(self._beat, self._moves, dict(self._entered), waits, has_ended, said, where)
        self._quietly(lambda: self._store.set(f"report/{self._rank}", json.dumps(asdict(report))))

    def _reports(self, ranks: Iterable[int]) -> dict[int, Report] | None:
        """What ranks last said; None where the store is gone."""
        found = {}
        for rank in ranks:
            text = self._quietly(partial(self._read, f"report/{rank}"))
            if text is None:
                return None
            found[rank] = Report(**json.loads(text))
        return found

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else "{}"

    def _quietly(self, ask: Callable[[], T]) -> T | None:
        """Ask the store; None when it is gone."""
        try:
            return ask()
        except RuntimeError:
            return None
