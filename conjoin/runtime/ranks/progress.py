"""What ranks say of their progress, and what follows from it: who holds up the others, and why."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from conjoin.errors import RankError

_AGAIN = "start again from the last checkpoint"


class Passage(NamedTuple):
    """A collective that a rank has entered: the how manieth of a group."""

    members: tuple[int, ...]
    group: str
    number: int
    may_break: bool = False
    """Whether a rank may leave it, and go on later."""


class BrokenOff(RankError):
    """What a rank is told that waits for one which has left what they were to do together, and goes on later."""


@cache
def name_of(members: tuple[int, ...]) -> str:
    """What a group is called in reports, which are to stay short.

    >>> name_of((0, 2))
    '0,2'
    """
    name = ",".join(map(str, members))
    return name if len(name) <= 32 else hashlib.sha256(name.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of itself."""

    beat: int = -1
    moves: int = -1
    """How often it has entered or left a collective."""
    entered: dict[str, int] = field(default_factory=dict)
    """By group, how many collectives it has entered."""
    waits: bool = False
    has_ended: bool = False
    failure: str = ""
    where: str = ""

    def lags(self, passage: Passage) -> bool:
        """Whether it has not come to a collective yet."""
        return self.entered.get(passage.group, 0) < passage.number


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which ranks hold up the others, and why."""

    ranks: list[int]
    what: str
    why: str

    def error(self, noticed_by: int) -> RankError:
        """What a rank says that knows of it."""
        named = ", ".join(str(rank) for rank in self.ranks[:8]) + (" …" if len(self.ranks) > 8 else "")
        message = f"Rank {named} {self.what}, noticed by rank {noticed_by}{self.why}"
        told = RankError(message)
        told.ranks = tuple(self.ranks)
        return told


def lost(ranks: list[int]) -> Verdict:
    """Of ranks that say nothing more after a collective failed."""
    why = "Its process ended or its machine cannot be reached; the others cannot go on without its part"
    return Verdict(ranks, "was lost in the middle of a step", f". {why}. See its own log, then {_AGAIN}.")


def failed(reports: Mapping[int, Report]) -> Verdict | None:
    """Of the first rank that says so."""
    for rank, report in reports.items():
        if report.failure:
            why = f": {report.failure}. The others cannot go on without its part. See its own log, then {_AGAIN}."
            return Verdict([rank], "failed with an error of its own", why)
    return None


def ended_early(reports: Mapping[int, Report], passage: Passage) -> Verdict | None:
    """Of ranks that ended their program and never came to a collective."""
    ranks = [rank for rank, report in reports.items() if report.has_ended and report.lags(passage)]
    why = ". It took fewer steps than those who wait for it in a collective. Let all ranks take the same steps."
    return Verdict(ranks, "has ended its program", why) if ranks else None


def gone_on(reports: Mapping[int, Report], entered: Mapping[str, int]) -> Verdict | None:
    """Of ranks that have entered a collective of a group which others of it, who wait for them, never came to."""
    ranks = [rank for rank, report in reports.items() if any(report.entered.get(g, 0) > n for g, n in entered.items())]
    why = "Every shape and mode has its own program, and all ranks save together: they would wait for ever"
    what = "went on without those who wait for it"
    wanted = "Give all ranks batches of the same shape, in the same mode and order, and save on all of them"
    return Verdict(ranks, what, f". {why}. {wanted}.") if ranks else None


def not_coming(reports: Mapping[int, Report]) -> Verdict | None:
    """Of ranks that have ended and are waited for."""
    ranks = [rank for rank, report in reports.items() if report.has_ended]
    why = ". It took fewer steps than those who wait for it. Let all ranks take the same steps."
    return Verdict(ranks, "has ended its program", why) if ranks else None


def held_up(
    late: Mapping[int, Report], quiet: Mapping[int, float], still: Mapping[int, float], patience: float
) -> Verdict | None:
    """Of those who are late: have they said nothing, or made no progress, for longer than they may?"""
    longer = "patience_seconds gives it longer"
    silent = [rank for rank in late if quiet[rank] >= patience]
    if silent:
        why = "Its process is stopped, cannot be reached, or is in a call that holds Python's lock"
        what = f"has given no sign of life for {patience:g} s while others wait for it"
        return Verdict(silent, what, f". {why}. See its own log; {longer}.")
    hung = [rank for rank in late if still[rank] >= patience and not late[rank].waits]
    if hung:
        what = f"has made no progress for {patience:g} s while others wait for it"
        where = late[hung[0]].where or "a place unknown"
        return Verdict(hung, what, f". It is at {where}. See what it waits for there; if that is work, {longer}.")
    crossed = [rank for rank in late if still[rank] >= 2 * patience]
    if crossed:
        what = f"has been waiting for {2 * patience:g} s in another collective than those who wait for it"
        return Verdict(crossed, what, ". The ranks run different programs. Compare them.")
    return None


_TIMES_TOGETHER = 2.5
"""So many times as long as a rank has: whoever holds up the others in a known way is named before."""


def at_odds(there: Mapping[int, Report], still: Mapping[int, float], patience: float) -> Verdict | None:
    """Of ranks that all have come and all wait, in what does not end: they were not asked for the same.

    So it is where a norm, or an output in pieces, is asked for on some ranks only: they wait for the next collective of
    the others, which is another one.
    """
    longest = _TIMES_TOGETHER * patience
    if not all(report.waits and still[rank] >= longest for rank, report in there.items()):
        return None
    places = {report.where: rank for rank, report in sorted(there.items(), reverse=True) if report.where}
    where = " and ".join(f"rank {rank} at {place}" for place, rank in [*places.items()][:-4:-1]) or "places unknown"
    what = f"has come to a collective which all of them wait in and which has not ended for {longest:g} s"
    asked = "Take the same steps, and ask for norms, sums, outputs in pieces and whole tensors, on every rank"
    why = f". They have asked for different things: {where}. {asked}."
    return Verdict(sorted(there), what, why)


@dataclass(slots=True)
class _Seen:
    """The last report of a rank that is waited for, and since when it says so."""

    report: Report
    silent_since: float
    still_since: float


class Eye:
    """How long ranks have said the same, by a clock that stands while the thread that looks cannot run."""

    def __init__(self, beat_seconds: float) -> None:
        self._longest, self._last, self._now = 2 * beat_seconds, time.monotonic(), 0.0
        self._seen: dict[int, _Seen] = {}

    def tick(self) -> float:
        """Once in a beat; what the clock shows."""
        last, self._last = self._last, time.monotonic()
        self._now += min(self._last - last, self._longest)
        return self._now

    def close(self) -> None:
        """Nobody is waited for any more."""
        self._seen.clear()

    def look(self, reports: Mapping[int, Report]) -> tuple[dict[int, float], dict[int, float]]:
        """For how many seconds ranks that are waited for have given no sign of life, and made no progress."""
        for rank, report in reports.items():
            seen = self._seen.setdefault(rank, _Seen(report, self._now, self._now))
            if report.beat != seen.report.beat:
                seen.silent_since = self._now
            if report.moves != seen.report.moves:
                seen.still_since = self._now
            seen.report = report
        quiet = {rank: self._now - self._seen[rank].silent_since for rank in reports}
        return quiet, {rank: self._now - self._seen[rank].still_since for rank in reports}


def where_is(thread: int) -> str:
    """The place in the user's program where a thread is; where it is not in one, the innermost place."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_USERS):
        frame = frame.f_back
    found = frame or innermost
    return "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno} in {found.f_code.co_name}"


_NOT_THE_USERS = (f"{os.sep}torch{os.sep}", "<conjoin ", os.path.join(os.path.abspath(f"{__file__}/../../.."), ""))
"""Nor is anything of this package, or of programs that it has written."""


def first_line(error: BaseException) -> str:
    """The beginning of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
