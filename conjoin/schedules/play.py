"""Playing a schedule: when every row starts and ends, what owners wait for, how much of transfers is hidden.

A row starts when its owner is free and what it needs has come. Implied transfers start when their row ends and the
channel is free: one for each ordered pair of owners, on which one transfer follows another. Rows that send and receive
are played as *started* (they take no time; a transfer begins when both ends have come to theirs) or as *blocking* (both
owners are taken up by it). There is no queue of events: a schedule is walked in an order in which it can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.errors import ScheduleError
from conjoin.schedules.check import Peaks, peaks
from conjoin.schedules.fast import play_implied
from conjoin.schedules.schedule import TRANSFERS, Kind, Row, Schedule
from conjoin.schedules.times import Memory, Times
from conjoin.schedules.walk import Sends, walk

Seconds = NDArray[np.float64]
Way = tuple[int, int, int]
"""What goes from a stage to another for a micro-batch."""


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
        starts, ends, exposed = _play_rows(schedule, times, blocking)
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
    wanted = [schedule.num_stages] * 3 + [len(schedule.edges)] * 2
    have = [len(each) for each in (*by_stage, *by_edge)]
    if have != wanted:
        raise ScheduleError(
            f"The times are of {have[:3]} stages and {have[3:]} edges. The schedule {schedule.name!r} has "
            f"{schedule.num_stages} stages and {len(schedule.edges)} edges. Give one time for each."
        )
    worst = min((seconds for each in (*by_stage, *by_edge) for seconds in each), default=0.0)
    if not 0 <= worst < float("inf"):
        raise ScheduleError(f"One of the times is {worst} seconds. No time is less than 0. Correct it.")


def _play_rows(
    schedule: Schedule, times: Times, blocking: bool
) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...], float]:
    """Rows one by one in an order in which they can run, those that send and receive among them."""
    walked = walk(schedule, Sends.RENDEZVOUS if blocking else Sends.STARTED)
    if walked.stuck:
        refuse_stuck(schedule, [schedule.rows[owner][at] for owner, at in walked.stuck])
    starts = tuple(np.zeros(len(rows)) for rows in schedule.rows)
    ends = tuple(np.zeros(len(rows)) for rows in schedule.rows)
    clock = _Clock(schedule, times)
    transfer = clock.meet if blocking else clock.start
    for owner, at in walked.order:
        row = schedule.rows[owner][at]
        starts[owner][at], ends[owner][at] = (transfer if row.kind in TRANSFERS else clock.compute)(owner, row)
    return starts, ends, clock.exposed


class _Clock:
    """What is known of time while rows run: when owners are free, when things were made, and when they came."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times = schedule, times
        self.free = [0.0] * schedule.num_owners
        self.exposed = 0.0
        self.made: dict[tuple[bool, int, int], float] = {}
        """Outputs (True) and input gradients (False), by stage and micro-batch."""
        self.arrived: dict[Way, float] = {}
        self.posted: dict[Way, float] = {}
        self.met: dict[Way, tuple[float, float]] = {}
        self.channels: dict[tuple[int, int], float] = {}
        ways = zip(schedule.edges, times.activations, times.gradients, strict=True)
        self.carry = {w: s for (i, j), there, back in ways for w, s in (((i, j), there), ((j, i), back))}
        self.before: list[list[int]] = [[] for _ in schedule.owners]
        self.after: list[list[int]] = [[] for _ in schedule.owners]
        for source, target in schedule.edges:
            self.before[target].append(source)
            self.after[source].append(target)

    def compute(self, owner: int, row: Row) -> tuple[float, float]:
        """Run a row that computes: start and end."""
        stage, m, forward = row.stage, row.micro_batch, row.kind is Kind.FORWARD
        if row.kind is Kind.WEIGHT_GRADIENT:
            ready = made = self.made[False, stage, m]
        else:
            others = self.before[stage] if forward else self.after[stage]
            ends = {other: self.made[forward, other, m] for other in others}
            made = max(ends.values(), default=0.0)
            ready = max((self.arrived.get((other, stage, m), end) for other, end in ends.items()), default=0.0)
        start = max(self.free[owner], ready)
        self.exposed += start - max(self.free[owner], made)
        end = self.free[owner] = start + self.times.of(row.kind, stage)
        if row.kind is not Kind.WEIGHT_GRADIENT:
            self.made[forward, stage, m] = end
        return start, end

    def start(self, owner: int, row: Row) -> tuple[float, float]:
        """Start a send or a receive: what comes is waited for where it is used."""
        now, way = self.free[owner], (row.source, row.target, row.micro_batch)
        if way in self.posted:
            channel = self.schedule.owners[row.source], self.schedule.owners[row.target]
            begin = max(now, self.posted[way], self.channels.get(channel, 0.0))
            self.arrived[way] = self.channels[channel] = begin + self.carry[row.source, row.target]
        self.posted[way] = now
        return now, now

    def meet(self, owner: int, row: Row) -> tuple[float, float]:
        """Send or receive so that both ends meet, and are taken up until all has come."""
        way = (row.source, row.target, row.micro_batch)
        if way not in self.met:
            other = row.target if row.kind is Kind.SEND else row.source
            begin = max(self.free[owner], self.free[self.schedule.owners[other]])
            self.met[way] = begin, begin + self.carry[row.source, row.target]
            self.exposed += self.carry[row.source, row.target]
        self.free[owner] = self.met[way][1]
        return self.met[way]


def refuse_stuck(schedule: Schedule, rows: Sequence[object]) -> None:
    """Say that a schedule cannot be played to its end."""
    raise ScheduleError(
        f"The schedule {schedule.name!r} was to be played, and does not come to its end. "
        f"Owners wait for ever at {', '.join(map(str, rows[:6]))}. Check it first: `check` says what they wait for."
    )
