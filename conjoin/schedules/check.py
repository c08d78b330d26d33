"""One checker for every schedule: whole, in an order that can run, without deadlock, within memory.

A schedule is *whole* when every stage runs every micro-batch forward once and backward once (or both gradients apart),
and, where transfers are rows, when all that crosses from owner to owner is sent once and received once. It *can run*
when a walk through it comes to the end: with sends that wait for nothing, and with sends that wait for their receives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from conjoin.errors import ScheduleError
from conjoin.schedules.makers import MAX_MICRO_BATCHES, MAX_STAGES
from conjoin.schedules.schedule import TRANSFERS, Kind, Row, Schedule
from conjoin.schedules.times import Memory
from conjoin.schedules.walk import Sends, lacking, walk


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that is held at once: micro-batches in flight by stage, memory by owner."""

    in_flight: tuple[int, ...]
    held: tuple[float, ...]


def check(schedule: Schedule, memory: Memory | None = None, rendezvous: bool = True) -> Peaks:
    """Prove a schedule, or raise a `ScheduleError`; gives what it holds.

    Without limits in `memory`, any number of micro-batches may be in flight. Without `rendezvous`, sends may be
    buffered: they need not be able to wait for their receives.
    """
    _check_form(schedule)
    _check_whole(schedule)
    modes = [Sends.BUFFERED, *([Sends.RENDEZVOUS] if rendezvous else [])] if schedule.has_transfers else [Sends.STARTED]
    for sends in modes:
        _check_end(schedule, sends)
    memory = memory or Memory.unlimited(schedule.num_stages, schedule.num_owners)
    found = peaks(schedule, memory)
    for owner, (held, limit) in enumerate(zip(found.held, memory.limits, strict=True)):
        if held > limit:
            stages = [stage for stage, its in enumerate(schedule.owners) if its == owner]
            raise ScheduleError(
                f"The schedule {schedule.name!r} holds {held:g} at owner {owner}, and {limit:g} are allowed. "
                f"In flight at its stages {_listed(stages)} are up to {_listed(found.in_flight[s] for s in stages)} "
                f"micro-batches. Start fewer forwards before the first backward, or allow more."
            )
    return found


def peaks(schedule: Schedule, memory: Memory) -> Peaks:
    """The most that is held at once, by order alone: what an owner holds changes with its own rows only."""
    flying, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    held = []
    for rows in schedule.rows:
        now = peak = 0.0
        for row in rows:
            stage = row.stage
            if row.kind is Kind.FORWARD:
                flying[stage] += 1
                now += memory.held[stage]
                if flying[stage] > most[stage]:
                    most[stage] = flying[stage]
                if now > peak:
                    peak = now
            elif row.kind is Kind.INPUT_GRADIENT:
                now += memory.kept[stage] - memory.held[stage]
            elif row.kind is Kind.WEIGHT_GRADIENT:
                now -= memory.kept[stage]
                flying[stage] -= 1
            elif row.kind is Kind.BACKWARD:
                now -= memory.held[stage]
                flying[stage] -= 1
        held.append(peak)
    return Peaks(tuple(most), tuple(held))


def _check_form(schedule: Schedule) -> None:
    num_stages, num_owners = schedule.num_stages, schedule.num_owners
    if not 1 <= num_stages <= MAX_STAGES or not 1 <= schedule.num_micro_batches <= MAX_MICRO_BATCHES:
        raise ScheduleError(
            f"The schedule {schedule.name!r} has {num_stages:,} stages and {schedule.num_micro_batches:,} micro-"
            f"batches. It can have 1 to {MAX_STAGES:,} and 1 to {MAX_MICRO_BATCHES:,}. "
            f"Describe it with numbers in between."
        )
    if set(schedule.owners) != set(range(num_owners)):
        raise ScheduleError(
            f"The schedule {schedule.name!r} has rows for {num_owners} owners, and its stages belong to "
            f"{_listed(sorted(set(schedule.owners)))}. Owners are counted from 0, and each has a stage. Number them so."
        )
    for edge in schedule.edges:
        if not 0 <= edge[0] < edge[1] < num_stages or schedule.edges.count(edge) > 1:
            raise ScheduleError(
                f"The schedule {schedule.name!r} has an edge {edge[0]} → {edge[1]}. Edges are there once each and go "
                f"from a stage to a later one, of {num_stages}. Correct or remove it."
            )
    edges = {*schedule.edges, *((target, source) for source, target in schedule.edges)}
    for owner, rows in enumerate(schedule.rows):
        for row in rows:
            _check_row(schedule, owner, row, edges)


def _check_row(schedule: Schedule, owner: int, row: Row, edges: set[tuple[int, int]]) -> None:
    if not 0 <= row.stage < schedule.num_stages or schedule.owners[row.stage] != owner:
        reason = f"stage {row.stage} is not one of its stages"
    elif not 0 <= row.micro_batch < schedule.num_micro_batches:
        reason = f"micro-batches are counted from 0 to {schedule.num_micro_batches - 1}"
    elif (row.peer is not None) != (row.kind in TRANSFERS):
        reason = "sends and receives name another stage, and other rows do not"
    elif row.peer is not None and (row.stage, row.peer) not in edges:
        reason = f"no edge joins stages {row.stage} and {row.peer}"
    elif row.peer is not None and schedule.owners[row.peer] == owner:
        reason = f"stages {row.stage} and {row.peer} have the same owner"
    else:
        return
    raise ScheduleError(
        f"The schedule {schedule.name!r} has a row {row} at owner {owner}. That cannot be: {reason}. "
        f"Correct or remove the row."
    )


def _check_whole(schedule: Schedule) -> None:
    num = schedule.num_micro_batches
    bits = {kind: 1 << i for i, kind in enumerate(Kind)}
    have = [0] * (schedule.num_stages * num)
    moved: set[tuple[Kind, int, int | None, int]] = set()
    for rows in schedule.rows:
        for row in rows:
            if row.kind in TRANSFERS:
                key = (row.kind, row.stage, row.peer, row.micro_batch)
                doubled = key in moved
                moved.add(key)
            else:
                at = row.stage * num + row.micro_batch
                doubled = bool(have[at] & bits[row.kind])
                have[at] |= bits[row.kind]
            if doubled:
                raise ScheduleError(
                    f"The schedule {schedule.name!r} has the row {row} more than once. Each thing is done once. "
                    f"Remove all but one."
                )
    both = bits[Kind.FORWARD] | bits[Kind.BACKWARD]
    apart = bits[Kind.FORWARD] | bits[Kind.INPUT_GRADIENT] | bits[Kind.WEIGHT_GRADIENT]
    for at, found in enumerate(have):
        if found != both and found != apart:
            _refuse_incomplete(schedule, at // num, at % num, [kind for kind in Kind if found & bits[kind]])
    for row in crossing_rows(schedule) if moved else ():
        if (row.kind, row.stage, row.peer, row.micro_batch) not in moved:
            raise ScheduleError(
                f"The schedule {schedule.name!r} has rows that send and receive, and lacks {row}. What goes from one "
                f"owner to another is sent once and received once. Add the row, or remove all sends and receives."
            )


def _refuse_incomplete(schedule: Schedule, stage: int, micro_batch: int, have: list[Kind]) -> None:
    found = _listed(have) or "nothing"
    raise ScheduleError(
        f"The schedule {schedule.name!r} has {found} for stage {stage} and micro-batch {micro_batch}. Each takes one "
        f"F and one B, or one F, one I and one W. Add what is missing, or remove what is too much."
    )


def crossing_rows(schedule: Schedule) -> Iterable[Row]:
    """The sends and receives of all that crosses from one owner to another."""
    for source, target in schedule.edges:
        if schedule.owners[source] == schedule.owners[target]:
            continue
        for micro_batch in range(schedule.num_micro_batches):
            for one, other in ((source, target), (target, source)):
                yield Row(Kind.SEND, one, micro_batch, other)
                yield Row(Kind.RECEIVE, other, micro_batch, one)


def _check_end(schedule: Schedule, sends: Sends) -> None:
    walked = walk(schedule, sends)
    if not walked.stuck:
        return
    lines = [f"{row} waits for {_listed(map(str, rows))}" for row, rows in lacking(schedule, walked, sends) if rows]
    how = "" if not schedule.has_transfers else f" with {sends.value} sends"
    raise ScheduleError(
        f"The schedule {schedule.name!r} does not come to its end{how}: {len(walked.stuck)} of {schedule.num_owners} "
        f"owners wait for ever. There {'; '.join(lines[:6])}. Put what is waited for before what waits."
    )


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)
