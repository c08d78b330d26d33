"""Playing a schedule: when every row starts and ends, what owners wait for, how much of transfers is hidden.

A row starts when its owner is free and what it needs has come. Implied transfers start when their row ends and the
channel is free: one for each ordered pair of owners, on which one transfer follows another. Rows that send and receive
are played as *started* (they take no time; a transfer begins when both ends have come to theirs) or as *blocking* (both
owners are taken up by it). Where the times tell of links that transfers share, each link takes one after another, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.errors import ScheduleError
from conjoin.schedules.check import Peaks, peaks
from conjoin.schedules.events import play_events
from conjoin.schedules.fast import play_implied
from conjoin.schedules.schedule import TRANSFERS, Row, Schedule
from conjoin.schedules.times import Memory, Times
from conjoin.schedules.walk import Sends, walk

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. `starts` and `ends` are by owner, then by position in its rows."""

    schedule: Schedule
    starts: tuple[Seconds, ...]
    ends: tuple[Seconds, ...]
    busy: tuple[float, ...]
    """Seconds each owner computes."""
    transfer_seconds: float
    """All that is moved between owners, one after another."""
    exposed_seconds: float
    """What owners wait for transfers, or are taken up by them, where they would not wait for what is moved."""
    peaks: Peaks

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(float(ends[-1]) if len(ends) else 0.0 for ends in self.ends)

    @property
    def hidden_seconds(self) -> float:
        """What is moved while the receiver computes, or waits for something else."""
        return max(0.0, self.transfer_seconds - self.exposed_seconds)

    @property
    def idle(self) -> tuple[float, ...]:
        """The bubble of each owner: seconds in which it computes nothing."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The part of all owners' time in which they compute nothing.

        >>> from conjoin.schedules import Times, chain, gpipe
        >>> play(gpipe(2, 3), Times.alike(2, chain(2))).bubble
        0.25
        """
        return sum(self.idle) / (self.seconds * len(self.busy)) if self.seconds else 0.0


def play(schedule: Schedule, times: Times, memory: Memory | None = None, blocking: bool = False) -> Timeline:
    """Play a schedule; `blocking` says how rows that send and receive are played, and means nothing without them."""
    _check_times(schedule, times)
    if schedule.has_transfers:
        walked = walk(schedule, Sends.RENDEZVOUS if blocking else Sends.STARTED)
        _refuse_stuck(schedule, [schedule.rows[owner][at] for owner, at in walked.stuck])
    if schedule.has_transfers or times.links is not None:
        starts, ends, exposed, stuck = play_events(schedule, times, blocking)
        _refuse_stuck(schedule, stuck)
    else:
        starts, ends, exposed = play_implied(schedule, times)
    busy, moved = [], 0.0
    for rows, begins, finishes in zip(schedule.rows, starts, ends, strict=True):
        computes = np.fromiter((row.kind not in TRANSFERS for row in rows), bool, len(rows))
        busy.append(float((finishes - begins)[computes].sum()))
    for (source, target), there, back in zip(schedule.edges, times.activations, times.gradients, strict=True):
        if schedule.owners[source] != schedule.owners[target]:
            moved += (there + back) * schedule.num_micro_batches
    found = peaks(schedule, memory or Memory.unlimited(schedule.num_stages, schedule.num_owners))
    return Timeline(schedule, starts, ends, tuple(busy), moved, exposed, found)


def _check_times(schedule: Schedule, times: Times) -> None:
    by_stage = (times.forward, times.input_gradient, times.weight_gradient)
    by_edge = (times.activations, times.gradients)
    links = (times.links.there, times.links.back) if times.links else ()
    wanted = [schedule.num_stages] * 3 + [len(schedule.edges)] * (2 + len(links))
    have = [len(each) for each in (*by_stage, *by_edge, *links)]
    if have != wanted:
        raise ScheduleError(
            f"The times are of {have[:3]} stages and {have[3:]} edges. The schedule {schedule.name!r} has "
            f"{schedule.num_stages} stages and {len(schedule.edges)} edges. Give one time for each."
        )
    all_seconds = [seconds for each in (*by_stage, *by_edge) for seconds in each]
    all_seconds += [seconds for way in links for taken in way for _, seconds in taken]
    worst = min(all_seconds, default=0.0)
    if not 0 <= worst < float("inf"):
        raise ScheduleError(f"One of the times is {worst} seconds. No time is less than 0. Correct it.")


def _refuse_stuck(schedule: Schedule, rows: Sequence[Row]) -> None:
    """Refuse a schedule that cannot be played to its end."""
    if rows:
        raise ScheduleError(
            f"The schedule {schedule.name!r} was to be played, and does not come to its end. "
            f"Owners wait for ever at {', '.join(map(str, rows[:6]))}. Check it first: `check` says what they wait for."
        )
