"""What no pipeline takes less than, by the tables of its stages: whatever its cuts, devices, ways and schedule.

A stage that begins with cell i runs m micro-batches, once the first of them went forward through all cells before, and
is then done with the end of the step. With f(i) for the least seconds in which the cells before i go forward, however
they are cut, and b(i) the same backward,

    step  >=  max over stages of  f(i) + m · (forward + backward) + end + idle                                   `apart`
    step  >=  max over stages of  f(i) + m · (forward + backward) + max(end, b(i))                            `together`

Where gradients of inputs and weights are made apart, weight gradients can stand where stages would wait for what comes
back. Then nothing is run again, and every one of s stages holds k = min(s, m) micro-batches, which must fit
(`schedules/greedy.py`), and no more: a stage that ends with cell j runs k - 1 others forward until the first comes back
from the cells behind, where it goes forward and its gradient back, and is idle for the rest of that. By all other
schedules the last row of a stage makes both gradients, and the stages before it wait for it; there memory is not
counted, since a stage may run more again. The least over all cuttings is filled in from the last stage
(`_over_cuttings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np

from conjoin.search.stages.parts import Division, Part
from conjoin.search.stages.tables import BACKWARD, FINISH, FORWARD, KEPT, PEAK
from conjoin.search.stages.ways import Way

_Rows = Callable[[Part, int], np.ndarray]
"""[begin, end]: what a step of so many stages takes at least where one of them, on a part, has these cells."""


def least_seconds(
    division: Division,
    tables: Mapping[Part, np.ndarray],
    ways: Mapping[Part, Sequence[Way]],
    micro: int,
    capacity: float,
    stages: Sequence[int],
) -> float:
    """What no pipeline with some number of stages takes less than: tables are [begin, end, way, figure]."""
    rows = [table.min(2) for table in tables.values()]
    least = np.minimum.reduce([row[..., [FORWARD, BACKWARD]] for row in rows])
    forward, backward = _before(least[..., 0])[:, None], _before(least[..., 1])[:, None]
    there_and_back = least[..., 0] + least[..., 1] / 2
    behind = _before(there_and_back[::-1, ::-1].T)[::-1][None, :, None]

    def apart(part: Part, count: int) -> np.ndarray:
        table, held = tables[part][:, :, [not way.recompute for way in ways[part]]], min(count, micro)
        with np.errstate(invalid="ignore"):
            fits = np.isfinite(table[..., FORWARD]) & (table[..., PEAK] + (held - 1) * table[..., KEPT] <= capacity)
            idle = np.maximum(behind - (held - 1) * table[..., FORWARD], 0.0)
        found: np.ndarray = np.where(fits, _spent(table, micro) + table[..., FINISH] + idle, inf).min(2, initial=inf)
        return np.asarray(forward + found)

    def together(part: Part, count: int) -> np.ndarray:
        spent = _spent(tables[part], micro)
        return np.asarray(forward + np.maximum((spent + tables[part][..., FINISH]).min(2), backward + spent.min(2)))

    counts = [division.count] if division.is_even else [count for count in stages if count <= division.count]
    return min(
        (_over_cuttings(division, rows, count, len(forward)) for count in counts for rows in (apart, together)),
        default=inf,
    )


def _spent(table: np.ndarray, micro: int) -> np.ndarray:
    found: np.ndarray = micro * (table[..., FORWARD] + table[..., BACKWARD])
    return found


def _before(rows: np.ndarray) -> np.ndarray:
    """By cell, the least sum of some numbers [begin, end] over rows that make up all cells before it."""
    found = np.full(len(rows), inf)
    found[0] = 0.0
    for end in range(1, len(rows)):
        found[end] = (found[:end] + rows[:end, end]).min()
    return found


def _over_cuttings(division: Division, rows: _Rows, stages: int, num_places: int) -> float:
    """The least over all cuttings into so many stages of the most that one of them says."""
    end = np.full(num_places, inf)
    end[-1] = 0.0
    level, known = {division.count: end}, dict[Part, np.ndarray]()
    for _ in range(stages):
        before, level = level, {}
        for begin in range(division.count):
            for size, part in division.moves[begin]:
                if begin + size in before:
                    if part not in known:
                        known[part] = rows(part, stages)
                    least = np.maximum(known[part], before[begin + size][None, :]).min(1)
                    level[begin] = np.minimum(level.get(begin, inf), least)
    return float(level[0][0]) if 0 in level else inf
