"""Transfers as rows: a send right after what makes it, a receive as early as wanted.

All owners follow one order in time, that of the schedule as it is played: a receive stands before the row that runs
when its data comes, or, for owners that wait at every receive, before the first row that starts after it. Either way
whatever stands before a transfer has ended when it begins; so both ends meet without a deadlock even where a send
waits for its receive, and what goes over one channel is received in the order in which it is sent.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from conjoin.errors import ScheduleError
from conjoin.schedules.play import play
from conjoin.schedules.schedule import Kind, Row, Schedule
from conjoin.schedules.times import Times


@dataclass(frozen=True, slots=True, order=True)
class _Moved:
    """Something that goes from owner to owner, in the order in which it is there."""

    seconds: float
    source: int
    edge: int
    target: int
    micro_batch: int


def with_transfers(
    schedule: Schedule, times: Times | None = None, early: int | None = None, blocking: bool = False
) -> Schedule:
    """The schedule with its sends and receives as rows.

    A receive stands where the data comes by `times` (all rows alike if there are none), so that it is started in time,
    or taken when it is there by an owner that is `blocking`: free of deadlock whatever sends wait for. With `early` it
    stands at most so many rows before the one that uses it, 0 for right before: fewer buffers, and sends may have to
    be buffered, which `check` finds.

    >>> from conjoin.schedules import one_f_one_b
    >>> print(with_transfers(one_f_one_b(2, 2)))
    F0.0 S0>1.0 F0.1 S0>1.1 R0<1.0 B0.0 R0<1.1 B0.1
    R1<0.0 F1.0 R1<0.1 B1.0 S1>0.0 F1.1 B1.1 S1>0.1
    """
    if schedule.has_transfers:
        raise ScheduleError(
            f"Sends and receives are to be added to the schedule {schedule.name!r}. It has some already. "
            f"Give one without, or use it as it is."
        )
    times = _positive(times or Times.alike(schedule.num_stages, schedule.edges))
    timeline = play(schedule, times)
    ends = [list(map(float, each)) for each in timeline.ends]
    marks = [list(map(float, each)) for each in timeline.starts] if blocking else ends
    place: dict[tuple[bool, int, int], int] = {}
    for rows in schedule.rows:
        for position, row in enumerate(rows):
            if row.kind is not Kind.WEIGHT_GRADIENT:
                place[row.kind is Kind.FORWARD, row.stage, row.micro_batch] = position
    before: list[list[list[tuple[_Moved, Row]]]] = [[[] for _ in range(len(rows) + 1)] for rows in schedule.rows]
    slots: dict[tuple[int, int], list[tuple[_Moved, int]]] = {}
    for moved in sorted(_all_moved(schedule, ends, place)):
        giver, taker = schedule.owners[moved.source], schedule.owners[moved.target]
        forward = moved.source < moved.target
        made = place[forward, moved.source, moved.micro_batch]
        before[giver][made + 1].append((moved, Row(Kind.SEND, moved.source, moved.micro_batch, moved.target)))
        slot = (bisect_left if blocking else bisect_right)(marks[taker], moved.seconds)
        if early is not None:
            slot = max(slot, place[forward, moved.target, moved.micro_batch] - early)
        slots.setdefault((giver, taker), []).append((moved, slot))
    for (_, taker), receives in slots.items():
        latest = len(schedule.rows[taker])
        for moved, slot in reversed(receives):  # none later than one that is sent after it
            latest = min(latest, slot)
            before[taker][latest].append((moved, Row(Kind.RECEIVE, moved.target, moved.micro_batch, moved.source)))
    full = []
    for slots_before, mine in zip(before, schedule.rows, strict=True):
        merged = [row for slot, row in zip(slots_before, mine, strict=False) for row in (*_in_order(slot), row)]
        full.append((*merged, *_in_order(slots_before[-1])))
    return replace(schedule, rows=tuple(full))


def _all_moved(schedule: Schedule, ends: list[list[float]], place: dict[tuple[bool, int, int], int]) -> list[_Moved]:
    moved = []
    for number, edge in enumerate(schedule.edges):
        if schedule.owners[edge[0]] == schedule.owners[edge[1]]:
            continue
        for forward, (source, target) in ((True, edge), (False, edge[::-1])):
            end = ends[schedule.owners[source]]
            for micro_batch in range(schedule.num_micro_batches):
                moved.append(_Moved(end[place[forward, source, micro_batch]], source, number, target, micro_batch))
    return moved


def _in_order(slot: list[tuple[_Moved, Row]]) -> list[Row]:
    return [row for _, row in sorted(slot, key=lambda entry: entry[0])]


def _positive(times: Times) -> Times:
    """Times without zeros: rows that take no time have no order in time."""
    least = (
        min((s for s in (*times.forward, *times.input_gradient, *times.weight_gradient) if s > 0), default=1.0) / 1024
    )
    raised = [tuple(s or least for s in each) for each in (times.forward, times.input_gradient, times.weight_gradient)]
    return replace(times, forward=raised[0], input_gradient=raised[1], weight_gradient=raised[2])
