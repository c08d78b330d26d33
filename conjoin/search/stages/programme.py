"""Where to cut a row of cells, on which devices each stage runs and in which way: a dynamic programme from the end.

A step of m micro-batches through stages that take t of each, and are one after the other, takes about

    sum of all t, and of what goes between stages, + (m - 1) × the longest t + what the first does at the end

(1F1B; Alpa, section 5). What a stage does once, at the end of a step, counts for the longest by its m-th part. For a
bound on the longest, with F(s, p, i) for the least sum of the last s stages if they have the cells from i and the
granules from p on,

    F(s, p, i) = min over sizes c and ends j of  t(i..j on c granules from p) + sent(i) + F(s - 1, p + c, j)

where t is the least over all ways that fit: s micro-batches are in flight at the s-th stage from the end, and hold
their part of its memory (`Programme.of`). Where a way fits only with its blocks run again, as few of them are as are
enough: seconds and bytes go from those with none to those with all in a straight line (`_Mixed`). The bound goes
through what stages can take, upwards, until the bound alone makes it worse than what was found (`solve`). Cuttings for
all bounds are handed out: a schedule in which the bubble is smaller likes balanced ones better than the formula does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from conjoin.search.stages.parts import Division, Part
from conjoin.search.stages.tables import BACKWARD, FINISH, FORWARD, KEPT, PEAK
from conjoin.search.stages.ways import Way

_MAX_BOUNDS = 48
"""Bounds on the longest stage that are tried, where stages could take more different times than that."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A stage: its cells, its granules, and the way it is run."""

    cells: tuple[int, int]
    granules: tuple[int, int]
    part: Part
    way: Way
    figures: tuple[float, ...] = ()
    """As its table has them."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """Stages for a whole model and machine, and what a step takes by the formula."""

    slots: tuple[Slot, ...]
    seconds: float


@dataclass
class Programme:
    """The dynamic programme for one division of a machine and one number of micro-batches."""

    division: Division
    tables: Mapping[Part, np.ndarray]
    """[begin, end, way, figure]"""
    ways: Mapping[Part, Sequence[Way]]
    sent: np.ndarray
    """Seconds in which what goes into a cell is sent there, and its gradient back."""
    num_micro_batches: int
    capacity: float
    most: int
    """Stages at most."""
    in_flight: int | None = None
    """Micro-batches that every stage holds; None is as many as by 1F1B."""
    _seconds: dict[tuple[Part, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)
    _mixed: dict[tuple[Part, int], list[_Mixed]] = field(default_factory=dict)

    def of(self, part: Part, in_flight: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[begin, end]: the least seconds of a stage with so many micro-batches in flight, with its part of the end of
        a step; what of them is added up; and by which way."""
        key = part, self._held(in_flight)
        if key not in self._seconds:
            table = self.tables[part]
            with np.errstate(invalid="ignore"):
                held = table[..., PEAK] + (key[1] - 1) * table[..., KEPT]
                finish = table[..., FINISH] / self.num_micro_batches
                taken = table[..., FORWARD] + table[..., BACKWARD] + finish
            mixed = [self._mix(pair, taken, held) for pair in self._pairs(part)]
            with np.errstate(invalid="ignore"):
                finish = np.concatenate([finish, *(m.between(finish)[..., None] for m in mixed)], axis=2)
                between = [np.where(m.is_some, m.between(taken), inf)[..., None] for m in mixed]
            taken = np.concatenate([np.where(held <= self.capacity, taken, inf), *between], axis=2)
            self._mixed[key] = mixed
            chosen = taken.argmin(2)
            least = taken.min(2)
            added = least - np.where(np.isfinite(least), np.take_along_axis(finish, chosen[..., None], 2)[..., 0], 0.0)
            added[0] = least[0]  # the first stage ends last
            self._seconds[key] = least, added, chosen
        return self._seconds[key]

    def _held(self, stages: int) -> int:
        """Micro-batches that the first of the last stages holds, where there are so many of them."""
        return min(self.num_micro_batches, self.in_flight or stages)

    def _pairs(self, part: Part) -> list[tuple[int, int]]:
        """Ways that differ in what they run again, by their numbers: nothing, and something."""
        numbers = {way: i for i, way in enumerate(self.ways[part])}
        plain = ((i, numbers.get(replace(way, recompute=""))) for way, i in numbers.items() if way.recompute)
        return [(without, again) for again, without in plain if without is not None]

    def _mix(self, pair: tuple[int, int], taken: np.ndarray, held: np.ndarray) -> _Mixed:
        without, again = (held[..., number] for number in pair)
        cells = np.maximum(np.arange(len(held))[None, :] - np.arange(len(held))[:, None], 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            is_some = (without > self.capacity) & (again <= self.capacity) & np.isfinite(without)
            part = np.where(is_some, (without - self.capacity) / (without - again), 1.0)
        blocks = np.clip(np.ceil(part * cells - 1e-9), 1, cells)
        return _Mixed(pair, is_some & (blocks < cells), blocks / cells, blocks.astype(int))

    def _way(self, part: Part, in_flight: int, row: tuple[int, int], number: int) -> tuple[Way, np.ndarray]:
        """A way by its number, those with some blocks run again after the others; and what the row takes by it."""
        ways, table = self.ways[part], self.tables[part]
        if number < len(ways):
            return ways[number], table[(*row, number)]
        mixed = self._mixed[part, self._held(in_flight)][number - len(ways)]
        without, again = (table[(*row, way)] for way in mixed.pair)
        way = replace(ways[mixed.pair[1]], blocks=int(mixed.blocks[row]))
        return way, without + mixed.part[row] * (again - without)

    def solve(self, is_wanted: int | None = None) -> list[Cutting]:
        """Cuttings into every number of stages, or into the one that is wanted: the best for all bounds that can be any
        good, the best of all first.
        """
        free = self._fill(inf)
        least = {s: f for s, f in self._sums(free).items() if f < inf and is_wanted in (None, s)}
        best = {s: self._cutting(free, s) for s in least}
        every = {cutting.slots: cutting for cutting in best.values()}
        for bound in self._bounds(best, least):
            hopeful = [s for s in least if least[s] + (self.num_micro_batches - 1) * bound <= best[s].seconds]
            if not hopeful:
                break
            filled = self._fill(bound)
            for s in hopeful:
                if self._sums(filled).get(s, inf) < inf:
                    found = self._cutting(filled, s)
                    every[found.slots] = found
                    best[s] = min(best[s], found, key=lambda cutting: cutting.seconds)
        return sorted(every.values(), key=lambda cutting: cutting.seconds)

    def _bounds(self, best: Mapping[int, Cutting], least: Mapping[int, float]) -> Sequence[float]:
        """What the longest stage may take, upwards: from what all can keep to, to where it no longer pays."""
        if not best:
            return ()
        further = max(self.num_micro_batches - 1, 1)
        top = max((best[s].seconds - least[s]) / further if self.num_micro_batches > 1 else inf for s in best)
        values = np.unique(np.concatenate([found[0].ravel() for found in self._seconds.values()]))
        values = values[(values <= top) & (values < inf)]
        low, high = 0, len(values)
        while low < high:  # the least bound that some cutting keeps to
            middle = (low + high) // 2
            sums = self._sums(self._fill(values[middle]))
            low, high = (low, middle) if any(sums.get(s, inf) < inf for s in best) else (middle + 1, high)
        values = values[low:]
        if len(values) > _MAX_BOUNDS:
            places = np.unique(np.round(np.geomspace(1, len(values), _MAX_BOUNDS)).astype(int)) - 1
            values = values[places]
        return list(map(float, values))

    def _sums(self, filled: Sequence[_Level]) -> dict[int, float]:
        return {s: float(level.least[0][0]) for s, level in enumerate(filled) if 0 in level.least and s > 0}

    def _fill(self, bound: float) -> list[_Level]:
        cells = len(self.sent) - 1
        start = np.full(cells + 1, inf)
        start[cells] = 0.0
        levels = [_Level({self.division.count: start}, {})]
        for s in range(1, self.most + 1):
            before, level = levels[-1].least, _Level({}, {})
            for begin in range(self.division.count):
                self._extend(level, begin, s, before, bound)
            if not level.least:
                break
            levels.append(level)
        return levels

    def _extend(self, level: _Level, begin: int, s: int, before: Mapping[int, np.ndarray], bound: float) -> None:
        """The last s stages from a granule on, each with one stage more than those before."""
        for size, part in self.division.moves[begin]:
            rest = before.get(begin + size)
            if rest is None:
                continue
            seconds, added, _ = self.of(part, s)
            total = np.where(seconds <= bound, added, inf) + rest[None, :]
            ends = total.argmin(1)
            least = total[np.arange(len(ends)), ends] + self.sent
            known = level.least.get(begin)
            if known is None:
                level.least[begin] = least
                level.chosen[begin] = np.stack([np.full(len(ends), size), ends])
            else:
                better = least < known
                known[better] = least[better]
                level.chosen[begin][:, better] = np.stack([np.full(len(ends), size), ends])[:, better]

    def _cutting(self, filled: Sequence[_Level], num_stages: int) -> Cutting:
        slots: list[Slot] = []
        cell, granule, longest = 0, 0, 0.0
        for s in range(num_stages, 0, -1):
            size, end = (int(x) for x in filled[s].chosen[granule][:, cell])
            part = next(part for number, part in self.division.moves[granule] if number == size)
            seconds, _, chosen = self.of(part, s)
            longest = max(longest, float(seconds[cell, end]))
            way, figures = self._way(part, s, (cell, end), int(chosen[cell, end]))
            slots.append(Slot((cell, end), (granule, granule + size), part, way, tuple(map(float, figures))))
            cell, granule = end, granule + size
        total = float(filled[num_stages].least[0][0])
        return Cutting(tuple(slots), total + (self.num_micro_batches - 1) * longest)


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Two ways that differ in what they run again, and by row how many blocks have to be."""

    pair: tuple[int, int]
    is_some: np.ndarray
    """Where it fits neither without, nor needs all."""
    part: np.ndarray
    blocks: np.ndarray

    def between(self, figures: np.ndarray) -> np.ndarray:
        """What lies between the two."""
        without, again = (figures[..., number] for number in self.pair)
        found: np.ndarray = without + self.part * (again - without)
        return found


@dataclass
class _Level:
    """The last stages, so many: by the granule they begin with, the least sums by cell, and what they begin with."""

    least: dict[int, np.ndarray]
    chosen: dict[int, np.ndarray]
