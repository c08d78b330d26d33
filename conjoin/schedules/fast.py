"""The quick way to play a schedule without transfer rows: all owners that can go on take one row at once, as arrays.

What a row gives goes straight to the rows that wait for it: `lacking` counts what each still lacks, `ready` is when the
last of it came. So a step is a few operations on arrays as long as there are owners, and there are about as many steps
as the longest owner has rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.errors import ScheduleError
from conjoin.schedules.schedule import Kind, Schedule
from conjoin.schedules.times import Times

CODES = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 2}
"""What rows are to those that wait for them; an input gradient, alone or with that of the weights, is one thing."""

Seconds = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class _Gives:
    """What each row gives, by (code, stage) and column: over which channel, in which seconds, to which (code, stage).

    Columns that a row has no use for give to a stage beyond the last.
    """

    channels: Numbers
    seconds: Seconds
    targets: Numbers


def play_implied(schedule: Schedule, times: Times) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...], float]:
    """Starts and ends by owner, and the seconds that owners wait for transfers."""
    num, num_owners = schedule.num_micro_batches, schedule.num_owners
    lengths = np.array([len(rows) for rows in schedule.rows])
    cells, seconds = _tables(schedule, times)
    gives = _gives(schedule, times)
    lacking = _lacking(schedule)
    ready = np.zeros_like(lacking, dtype=np.float64)
    made = np.zeros_like(ready)
    channels = np.zeros(num_owners * num_owners + 1)
    starts, ends = np.zeros(cells.shape), np.zeros(cells.shape)
    free, exposed = np.zeros(num_owners), 0.0
    positions, everyone = np.zeros(num_owners, dtype=np.int64), np.arange(num_owners)
    left = int(lengths.sum())
    while left:
        able = everyone[positions < lengths]
        at = cells[able, positions[able]]
        can = lacking[at] == 0
        who, at = able[can], at[can]
        if not len(who):
            raise ScheduleError(
                f"The schedule {schedule.name!r} was to be played, and does not come to its end. {len(able)} owners "
                f"wait for ever with {left:,} rows to go. Check it first: `check` says what they wait for."
            )
        place = positions[who]
        start = np.maximum(free[who], ready[at])
        exposed += float((start - np.maximum(free[who], made[at])).sum())
        end = start + seconds[who, place]
        starts[who, place], ends[who, place] = start, end
        free[who] = end
        positions[who] += 1
        left -= len(who)
        sort, micro_batch = np.divmod(at, num)
        for column in range(gives.targets.shape[1]):
            channel, target = gives.channels[sort, column], gives.targets[sort, column] * num + micro_batch
            begin = np.maximum(end, channels[channel])
            come = begin + gives.seconds[sort, column]
            channels[channel] = come
            channels[-1] = 0  # what stays with its owner goes over no channel
            np.maximum.at(ready, target, come)
            np.maximum.at(made, target, end)
            np.subtract.at(lacking, target, 1)
    begins, finishes = (tuple(table[o, : lengths[o]] for o in range(num_owners)) for table in (starts, ends))
    return begins, finishes, exposed


def _tables(schedule: Schedule, times: Times) -> tuple[Numbers, Seconds]:
    """By owner and position: the cell of a row, (code × stages + stage) × micro-batches + micro-batch, and seconds."""
    num, num_stages = schedule.num_micro_batches, schedule.num_stages
    width = max(len(rows) for rows in schedule.rows)
    cells = np.zeros((schedule.num_owners, width), dtype=np.int64)
    seconds = np.zeros(cells.shape)
    order = list(CODES)
    by_kind = np.array([[times.of(kind, stage) for stage in range(num_stages)] for kind in order])
    place = {kind: i for i, kind in enumerate(order)}
    codes = np.array(list(CODES.values()))
    for owner, rows in enumerate(schedule.rows):
        count = len(rows)
        kinds = np.fromiter([place[row.kind] for row in rows], np.int64, count)
        stages = np.fromiter([row.stage for row in rows], np.int64, count)
        micro_batches = np.fromiter([row.micro_batch for row in rows], np.int64, count)
        cells[owner, :count] = (codes[kinds] * num_stages + stages) * num + micro_batches
        seconds[owner, :count] = by_kind[kinds, stages]
    return cells, seconds


def _lacking(schedule: Schedule) -> Numbers:
    """How much each cell waits for: a forward for stages before, a gradient for its forward and the stages after."""
    counts = np.zeros((3, schedule.num_stages), dtype=np.int64)
    counts[1:] = 1
    for source, target in schedule.edges:
        counts[0, target] += 1
        counts[1, source] += 1
    unused = np.full(schedule.num_micro_batches, 1 << 40)
    return np.concatenate([np.repeat(counts.reshape(-1), schedule.num_micro_batches), unused])


def _gives(schedule: Schedule, times: Times) -> _Gives:
    num_stages, owners, none = schedule.num_stages, schedule.owners, -1
    lists: list[list[tuple[int, float, int]]] = [[] for _ in range(3 * num_stages)]
    for stage in range(num_stages):
        lists[stage].append((none, 0.0, num_stages + stage))
        lists[num_stages + stage].append((none, 0.0, 2 * num_stages + stage))
    for (source, target), there, back in zip(schedule.edges, times.activations, times.gradients, strict=True):
        for giver, taker, code, seconds in ((source, target, 0, there), (target, source, 1, back)):
            crosses = owners[giver] != owners[taker]
            channel = owners[giver] * schedule.num_owners + owners[taker] if crosses else none
            lists[code * num_stages + giver].append((channel, seconds if crosses else 0.0, code * num_stages + taker))
    width = max(map(len, lists))
    full = [[*entries, *[(none, 0.0, 3 * num_stages)] * (width - len(entries))] for entries in lists]
    columns = [np.array([[entry[i] for entry in entries] for entries in full]) for i in range(3)]
    return _Gives(columns[0].astype(np.int64), columns[1].astype(np.float64), columns[2].astype(np.int64))
