"""Long schedules played by a short one: where the rows of all owners repeat, and their times do, one period tells.

Some periods are taken out of the middle of every owner's rows, and what is left is played. If there the rows of all
owners come back after the same seconds, for as many micro-batches as may be in flight at once and more, they would go
on so: the periods are put back in. If they do not, the whole schedule has to be played.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from conjoin.schedules.schedule import Row, Schedule

Seconds = NDArray[np.float64]
_KEPT = 6
"""Periods that are left to play."""
_CLOSE = 1e-9


class Shortened:
    """A schedule with periods taken out, of as many micro-batches as there are stages: so many may be in flight, and
    wait for one another. `schedule` is None where there are too few."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule: Schedule | None = None
        num, self.step = schedule.num_micro_batches, schedule.num_stages
        each = [len(rows) // num for rows in schedule.rows]
        runs = [_longest_run(rows, length) for rows, length in zip(schedule.rows, each, strict=True)]
        self.begins = [begin for begin, _ in runs]
        self.lengths = [self.step * length for length in each]
        """Rows of a period, by owner."""
        periods = min((end - begin) // length for (begin, end), length in zip(runs, self.lengths, strict=True))
        self.periods = periods - _KEPT
        if self.periods < _KEPT:
            return
        self.taken = self.periods * self.step
        rows = tuple(
            (*mine[:cut], *(replace(row, micro_batch=row.micro_batch - self.taken) for row in mine[cut + gone :]))
            for mine, cut, gone in zip(schedule.rows, self._cuts(), self._gone(), strict=True)
        )
        self.schedule = replace(schedule, num_micro_batches=num - self.taken, rows=rows)

    def _cuts(self) -> list[int]:
        """Where periods are taken out: in the middle of those that are left."""
        return [begin + _KEPT // 2 * p for begin, p in zip(self.begins, self.lengths, strict=True)]

    def _gone(self) -> list[int]:
        return [self.periods * length for length in self.lengths]

    def period(self, starts: tuple[Seconds, ...]) -> float | None:
        """Seconds after which the rows around the cuts come back, if they all do."""
        around = _KEPT // 3
        steps = [
            mine[cut - (around - 1) * p : cut + around * p] - mine[cut - around * p : cut + (around - 1) * p]
            for mine, cut, p in zip(starts, self._cuts(), self.lengths, strict=True)
        ]
        least, most = min(float(each.min()) for each in steps), max(float(each.max()) for each in steps)
        return most if most - least <= _CLOSE * most else None

    def put_back(self, seconds: tuple[Seconds, ...], period: float) -> tuple[Seconds, ...]:
        """The times of all rows; with a period of 0, what comes back unchanged."""
        found = []
        for mine, cut, p in zip(seconds, self._cuts(), self.lengths, strict=True):
            later = np.arange(1, self.periods + 1)[:, None] * period
            between = (mine[cut - p : cut][None] + later).reshape(-1)
            found.append(np.concatenate([mine[:cut], between, mine[cut:] + self.periods * period]))
        return tuple(found)


def _longest_run(rows: tuple[Row, ...], length: int) -> tuple[int, int]:
    """From where to where rows come back one period later, for the next micro-batch."""
    kinds = np.array([ord(row.kind.value[0]) for row in rows])
    stages, micro_batches = (np.array([getattr(row, name) for row in rows]) for name in ("stage", "micro_batch"))
    same = (kinds[length:] == kinds[:-length]) & (stages[length:] == stages[:-length])
    same &= micro_batches[length:] == micro_batches[:-length] + 1
    breaks = [-1, *np.flatnonzero(~same).tolist(), len(same)]
    begin, end = max(((a + 1, b) for a, b in pairwise(breaks)), key=lambda run: run[1] - run[0])
    return begin, end
