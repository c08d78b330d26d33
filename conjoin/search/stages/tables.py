"""What rows of cells take and hold as stages: forward, backward, end of step, bytes; by row, devices and way.

Only rows that begin and end with one cell of a kind are simulated, each once for all that are alike; of a longer one
every further cell adds as much as a second one does to a first (`folds.py`, `StageTables.growth`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np

from conjoin.ir import Accumulation, StageGraph
from conjoin.machine import Machine
from conjoin.search.stages.cells import Cells
from conjoin.search.stages.folds import Fold, Run
from conjoin.search.stages.parts import Part
from conjoin.search.stages.ways import Solver, Way, lay_out_stage
from conjoin.sim import Classes, Drafts, Simulation, stage_memory, stage_spans

FORWARD, BACKWARD, FINISH, PEAK, KEPT = range(5)
"""Places in the figures of a row: seconds of a micro-batch there and back and of the end of a step, bytes with one
micro-batch, bytes of every further one."""
Figures = np.ndarray
NOT_POSSIBLE = np.full(5, inf)
_Key = tuple[tuple[int, ...], Part, Way]


@dataclass
class StageTables:
    """The figures of rows of cells of a model in micro-batches, worked out when they are asked for."""

    cells: Cells
    """Of the model, or of a short one that stands for it."""
    fold: Fold
    learning: np.ndarray
    """Of the whole model, as `Cells.learning`."""
    accumulation: Accumulation | None
    machines: Mapping[Part, Machine]
    solver: Solver
    check: Callable[[], None] = lambda: None
    """Called before every simulation: raises when there is no time."""
    num_priced: int = 0
    _priced: dict[_Key, Figures] = field(default_factory=dict)
    _simulated: dict[_Key, Simulation | None] = field(default_factory=dict)
    _drafts: dict[Part, dict[tuple[Classes, int], Drafts]] = field(default_factory=dict)
    _cuts: dict[tuple[int, ...], StageGraph] = field(default_factory=dict)

    @property
    def num_micro_batches(self) -> int:
        return 1 if self.accumulation is None else self.accumulation.steps

    def __len__(self) -> int:
        """How many cells the model has."""
        return len(self.fold.kinds)

    @property
    def crossing(self) -> np.ndarray:
        """Bytes that go into every cell of the model."""
        return np.array([*(self.cells.crossing[self.fold.cell(i)] for i in range(len(self))), 0.0])

    @cached_property
    def main(self) -> tuple[int, int] | None:
        """The cell of the kind that comes most often, two in a row, and how often it does."""
        kinds = self.cells.kinds
        often = Counter(kinds[self.fold.cell(i)] for i in range(len(self)))
        pairs = {kinds[i]: i for i in reversed(range(len(kinds) - 1)) if kinds[i] == kinds[i + 1]}
        found = [(often[kind], -cell) for kind, cell in pairs.items() if 2 * often[kind] >= len(self)]
        return (-max(found)[1], max(found)[0]) if found else None

    def seconds(self, row: tuple[int, int], part: Part, way: Way) -> tuple[float, float]:
        """What a micro-batch takes there and back, with its part of what is done once in a step, and without."""
        found = self._simulation(row, part, way)
        if found is None:
            return inf, inf
        forward, backward, finish, start = stage_spans(found)
        return forward + backward + (start + finish) / self.num_micro_batches, forward + backward

    def price(self, row: tuple[int, int], part: Part, way: Way) -> Figures:
        """The figures of a row as it is, simulated; not finite where the way cannot be gone."""
        key = self.cells.kinds[slice(*row)], part, way
        if key not in self._priced:
            simulation = self._simulation(row, part, way)
            self._priced[key] = NOT_POSSIBLE if simulation is None else self._measure(simulation, self.machines[part])
        return self._priced[key]

    def _measure(self, simulation: Simulation, machine: Machine) -> Figures:
        forward, backward, finish, start = stage_spans(simulation)
        memory, kept = stage_memory(simulation, self.solver.optimizer, machine)
        return np.array([forward, backward, start + finish, memory.peak, kept])

    def _simulation(self, row: tuple[int, int], part: Part, way: Way) -> Simulation | None:
        key = self.cells.kinds[slice(*row)], part, way
        if key not in self._simulated:
            self.check()
            self._simulated[key] = self._simulate(row, part, way)
        return self._simulated[key]

    def _simulate(self, row: tuple[int, int], part: Part, way: Way) -> Simulation | None:
        kinds, machine = self.cells.kinds[slice(*row)], self.machines[part]
        if kinds not in self._cuts:
            self._cuts[kinds] = self.cells.row(*row)
        laid_out = lay_out_stage(self._cuts[kinds], machine, way, self.cells.graph, self.solver)
        if laid_out is None or (way.recompute and not laid_out.segments):
            return None
        self.num_priced += 1
        prices = self.solver.prices(laid_out.graph, machine)
        return laid_out.simulate(machine, prices, self._drafts.setdefault(part, {}))

    def figures(self, run: Run, part: Part, way: Way) -> Figures:
        """The figures of a row, from shorter ones where cells repeat; not finite where the way cannot be gone."""
        found = self.price(run.row, part, way)
        for cell, times in run.more:
            if np.isfinite(found[0]):
                found = found + times * self.growth(cell, part, way)
        return found if np.isfinite(found).all() else NOT_POSSIBLE

    def growth(self, cell: int, part: Part, way: Way) -> Figures:
        """What one more cell of a kind adds, of which two come in a row."""
        one, two = self.price((cell, cell + 1), part, way), self.price((cell, cell + 2), part, way)
        return np.maximum(two - one, 0.0) if np.isfinite(two[0]) and np.isfinite(one[0]) else NOT_POSSIBLE

    def fill(self, part: Part, ways: Sequence[Way], longest: int) -> np.ndarray:
        """[begin, end, way, figure] for all rows of at most so many cells; not finite where a row is none."""
        count, learning = len(self), self.learning
        table = np.full((count + 1, count + 1, len(ways), 5), inf)
        alike: dict[Hashable, np.ndarray] = {}
        for (begin, end), run in self._runs(longest):
            if learning[end] > learning[begin] and end - begin < count:
                key = self.cells.kinds[slice(*run.row)], run.more
                if key not in alike:
                    alike[key] = np.stack([self.figures(run, part, way) for way in ways])
                table[begin, end] = alike[key]
        return table

    def _runs(self, longest: int) -> Iterator[tuple[tuple[int, int], Run]]:
        for begin in range(len(self)):
            for end in range(begin + 1, min(len(self), begin + longest) + 1):
                yield (begin, end), self.fold.run(begin, end)
