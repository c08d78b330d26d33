"""The search over pipelines: how many stages, their cuts, devices and ways, micro-batches and schedule.

For every division of the machine and every number of micro-batches the dynamic programme (`programme.py`) finds the
stages that are best by its formula, from tables (`tables.py`) in which equal blocks are worked out once. Divisions and
numbers come in the order of what they can take at best; what cannot become the best by that is left out. The best few
are built for real, and the timeline has the last word (`plans.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from conjoin.comm import Streams
from conjoin.errors import StrategyError
from conjoin.ir import Accumulation, Graph, LeafKind, cut_in_micro_batches
from conjoin.machine import DeviceType, Machine
from conjoin.search.rewrites import gaining
from conjoin.search.stage_cuts import node_seconds
from conjoin.search.stages.cells import Cells, find_cells
from conjoin.search.stages.folds import Fold, shorten, stands_for
from conjoin.search.stages.least import least_seconds
from conjoin.search.stages.parts import Division, Part, divisions
from conjoin.search.stages.plans import Judged, Model, build, checked, crossings_of, judge, least_of_cutting, played
from conjoin.search.stages.programme import Cutting, Programme, Slot
from conjoin.search.stages.tables import BACKWARD, FINISH, FORWARD, KEPT, PEAK, StageTables
from conjoin.search.stages.ways import RECOMPUTE, Solver, Way, ways_on
from conjoin.sim import Crossings, streams_seconds

MAX_STAGES = 64
_SPACING = 1.4
"""Between numbers of micro-batches that are tried, where a batch has many parts."""
_MANY_SAMPLES = 16
_BUILT = 3
"""Cuttings that are built for real and simulated at a time."""
_PLAYED = 12
"""Cuttings of a trial that are played by their figures, with all schedules."""
_NEAR = 1.05
"""How far above the best a cutting may be by the formula to be built: so far is the timeline from it."""
_SOON = 1.01
"""How much faster than the best a cutting has to be by its figures to be built before others are looked for."""
_ROUGH = 1.25
"""How far above what it takes at best a trial can be told to be by two cells in a row and 1F1B: with half as many
stages as micro-batches weight gradients that fill the bubble save so much, and cells take less where they are more."""
_SOLVED = 2
"""Ways on each part whose layouts are solved."""
_FASTER = 0.002
"""By how much solved layouts have to be faster than the best of named strategies."""
_MORE_BLOCKS = 2
"""How often blocks are added to what is run again where a pipeline does not quite fit."""
_TRIED = 3
"""Substitutions that are tried on each part, those first that gain the most on one device."""
_REWRITTEN = 256
"""Operators of a row in which substitutions are looked for; in 669 it takes half a second (aarch64, 2026-11-18)."""
_ROWS = 1024
"""Of a schedule that is played to see whether a cutting is of any use: it takes little time."""
_BINDS = 1.002
"""How much slower than without a limit a cutting is where memory decides."""


_Cut = tuple[Cells, Accumulation | None]
"""A model in micro-batches."""


class Over(Exception):
    """The time for pipelines is over."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A division of the machine and a number of micro-batches, with what a step takes at best."""

    division: Division
    micro: int
    least: float
    is_priced: bool = False


@dataclass
class StageSearch:
    """A search for pipelines under way."""

    model: Model
    goal: Callable[[], float]
    """What a pipeline has to beat, in seconds a step."""
    check: Callable[[str], None]
    """Called with what is done next; raises Over when there is no time."""
    stages: int | None = None
    """How many there are to be; None is as many as are best."""
    best: Judged | None = None
    num_judged: int = 0
    found: Callable[[Judged], None] = lambda judged: None
    """Called with every pipeline that is better than all before."""
    _tables: dict[int, StageTables | None] = field(default_factory=dict)
    _machines: dict[Part, Machine] = field(default_factory=dict)
    _short: tuple[Cells, Graph] | None = None
    _solver: Solver = field(init=False)
    _built: dict[int, _Cut | None] = field(default_factory=dict)
    """By number of micro-batches, the whole model."""
    _rules: dict[Part, tuple[str, ...]] = field(default_factory=dict)
    """Substitutions for stages on parts, by name."""
    least: dict[tuple[int, bool, int], float] = field(default_factory=dict)
    """By devices of a granule, whether all stages have one, and micro-batches: what no pipeline takes less than, of
    those that were looked at."""
    ideal: float = 0.0
    """What is computed, dealt out to all devices such that all are done together."""
    num_trials: int = 0
    _too_high: float = 1.0
    """What of their figures by the tables stages took at least that were built."""
    _gains: dict[Hashable, tuple[str, ...]] = field(default_factory=dict)
    """Those by which the cells that come most often gain on one device, after others."""

    def __post_init__(self) -> None:
        rules = {one.rule.name: one for one in self.model.rules}
        self._solver = Solver(self.model.costs, self.model.optimizer, rules=rules)

    def run(self) -> bool:
        """Look for pipelines as long as there is time; the best is kept. Whether it came to its end."""
        self._short = self._shorten()
        trials = list(self._trials())
        self.num_trials = len(trials)
        try:
            self._go_through(trial for trial in trials if trial.division.is_even)
            self._go_through(trial for trial in trials if not trial.division.is_even)
        except Over:
            return False
        return True

    def _go_through(self, some: Iterable[Trial]) -> None:
        """Solve trials in the order of what they can take at best, and judge the best cuttings."""
        cuttings: list[tuple[float, Trial, Cutting]] = []
        trials = [(trial.least, number, trial) for number, trial in enumerate(some)]
        heapify(trials)
        while trials:
            least, number, trial = heappop(trials)
            if least >= min([self._limit(), *(seconds for seconds, _, _ in cuttings[:1])]):
                break
            if not trial.is_priced:
                trial = self._priced(trial)
                heappush(trials, (trial.least, number, trial))
                continue
            for cutting in self._solve(trial)[:_PLAYED]:
                limit = min([_NEAR * self._limit(), *(seconds for seconds, _, _ in cuttings[_BUILT - 1 :])])
                crossings = self._crossings(trial, cutting)
                seconds = played(cutting, trial.micro, self.model.capacity, crossings, limit)
                if seconds < limit:
                    cuttings.append((seconds, trial, cutting))
                    cuttings.sort(key=lambda found: found[0])
            if cuttings and (self.best is None or cuttings[0][0] * _SOON < self._limit()):  # time may be over soon
                self._judge(*cuttings.pop(0)[1:])
        for seconds, trial, cutting in cuttings[:_BUILT]:
            if seconds < _NEAR * self._limit():
                self._judge(trial, cutting)

    def _priced(self, trial: Trial) -> Trial:
        """A trial with what it takes at best by the price of the cells that come most often."""
        self.check(f"stages of {trial.division.granule} devices, {trial.micro} micro-batches")
        tables = self._tables_for(trial.micro)
        if tables is None:
            return replace(trial, least=inf, is_priced=True)
        if tables.main is None:
            return replace(trial, least=max(trial.least, self._least_of_cells(trial, tables)), is_priced=True)
        (cell, count), division, micro = tables.main, trial.division, trial.micro
        each: dict[Part, tuple[float, float]] = {}
        for part in division.parts:
            plain = [way for way in ways_on(division.machines[part]) if way.is_plain]
            each[part] = min(tables.seconds((cell, cell + 2), part, way) for way in plain)
        devices = self.model.machine.num_devices
        longest = count * min(seconds * part.num_devices for part, (seconds, _) in each.items()) / devices
        if len(each) == 1:
            longest = -(-count // division.count) * min(each.values())[0]
        least = (micro - 1) * longest + count * min(seconds for _, seconds in each.values())
        return replace(trial, least=max(trial.least, least / 2 / _ROUGH), is_priced=True)

    def _least_of_cells(self, trial: Trial, tables: StageTables) -> float:
        """What a step takes at best by the price of each cell alone: a micro-batch takes its time however small it is.

        Cells in a row may take less than one by one, by half at most.
        """
        division, total = trial.division, 0.0
        plain = [(part, way) for part in division.parts for way in ways_on(division.machines[part]) if way.is_plain]
        for cell in np.flatnonzero(np.diff(tables.learning) > 0).tolist():
            row = cell, cell + 1
            each = [part.num_devices * tables.seconds(row, part, way)[0] for part, way in plain]
            total += min((seconds for seconds in each if seconds < inf), default=0.0)
        return trial.micro * total / self.model.machine.num_devices / 2

    def _limit(self) -> float:
        """What a step may take that is any use."""
        return min(self.goal(), inf if self.best is None else self.best.seconds)

    def _trials(self) -> Iterator[Trial]:
        """All that could be tried; a step takes at least what is computed, dealt out, and the bubble."""
        self.ideal = ideal = self._ideal()
        for division in divisions(self.model.machine, MAX_STAGES if self.stages is None else self.stages):
            self._machines = division.machines
            stages = division.count if division.is_even else 2
            if self.stages is not None and division.is_even and stages != self.stages:
                continue
            for micro in micro_batches(self.model.captured):
                yield Trial(division, micro, ideal * (1 + (stages - 1) / micro))

    def _ideal(self) -> float:
        """What is computed, dealt out to all devices such that all are done together."""
        machine, alone = self.model.machine, dict[DeviceType, float]()
        for device in machine.device_types:
            alone[device] = float(node_seconds(self.model.captured, self.model.costs, device).sum())
        rates = [1 / max(alone[machine.device_type(rank)], 1e-30) for rank in range(machine.num_devices)]
        return 1 / sum(rates)

    @property
    def least_seconds(self) -> float:
        """What no pipeline takes less than of those that were looked at: tables tell longer rows of equal cells from
        shorter ones, and may be too high by as much as they were for the stages that were built."""
        return self._too_high * min(self.least.values(), default=0.0)

    def _compare(self, cutting: Cutting, judged: Judged) -> None:
        micro = judged.pipeline.num_micro_batches
        for slot, stage in zip(cutting.slots, judged.prediction.stages, strict=True):
            if slot.way.blocks is None:
                taken = micro * (stage.forward + stage.backward) + stage.finish + stage.start
                told = micro * (slot.figures[FORWARD] + slot.figures[BACKWARD]) + slot.figures[FINISH]
                self._too_high = min(self._too_high, taken / told if told else 1.0)

    def _solve(self, trial: Trial) -> Sequence[Cutting]:
        """The best cuttings of a trial for every number of stages."""
        tables = self._tables_for(trial.micro)
        assert tables is not None
        parts = trial.division.parts
        plain = {part: [way for way in ways_on(trial.division.machines[part]) if way.is_plain] for part in parts}
        free = self._cuttings(trial, tables, plain, inf)
        if not self._is_hopeful(trial, free):
            return ()
        better = {part: self._better(tables, part, plain[part]) for part in parts}
        if any(better.values()):
            plain = {part: [*plain[part], *better[part]] for part in parts}
            free = self._cuttings(trial, tables, plain, inf)
        least = min((cutting.seconds for cutting in free), default=inf)
        fitting = self._cuttings(trial, tables, plain, self.model.capacity)
        if trial.division.is_even:  # a schedule with less of a bubble holds more
            held = self._cuttings(trial, tables, plain, self.model.capacity, trial.division.count)
            fitting = sorted({*fitting, *held}, key=lambda cutting: cutting.seconds)
        if free and min((cutting.seconds for cutting in fitting), default=inf) <= _BINDS * least:
            return fitting
        every = {part: list(ways_on(trial.division.machines[part])) for part in parts}
        for part in parts:
            again = [replace(way, recompute=mode) for way in better[part] for mode in RECOMPUTE]
            every[part] = self._worth(tables, part, [*every[part], *again])
        return self._cuttings(trial, tables, every, self.model.capacity)

    def _is_hopeful(self, trial: Trial, free: Sequence[Cutting]) -> bool:
        """Whether some cutting is of any use: by the formula, or by a schedule with less of a bubble than it counts."""
        limit = _NEAR * self._limit()
        if min((cutting.seconds for cutting in free), default=inf) < limit:
            return True
        few = (cutting for cutting in free if len(cutting.slots) * trial.micro <= _ROWS)
        tried = [cutting for cutting in few if least_of_cutting(cutting, trial.micro) < limit][:_BUILT]
        return any(played(one, trial.micro, inf, self._crossings(trial, one), limit) < limit for one in tried)

    def _better(self, tables: StageTables, part: Part, plain: Sequence[Way]) -> list[Way]:
        """What is faster than some ways: other layouts, and substitutions with these or those."""
        solved = self._solved(tables, part, plain)
        return [*solved, *self._rewritten(tables, part, [*plain, *solved])]

    def _solved(self, tables: StageTables, part: Part, plain: Sequence[Way]) -> list[Way]:
        """The best of some ways with layouts that are solved on their units, where these are any faster."""
        twins = [replace(way, is_solved=True) for way in plain]
        if tables.main is None:
            return twins
        row = tables.main[0], tables.main[0] + 2
        before = {way: tables.seconds(row, part, way)[0] for way in plain}
        best = sorted(range(len(plain)), key=lambda number: before[plain[number]])[:_SOLVED]
        limit = min(before.values(), default=inf) * (1 - _FASTER)
        return [twins[number] for number in best if tables.seconds(row, part, twins[number])[0] < limit]

    def _rewritten(self, tables: StageTables, part: Part, plain: Sequence[Way]) -> list[Way]:
        """Some ways after the substitutions that make the cells which come most often faster, where they do."""
        row = (0, len(tables.cells)) if tables.main is None else (tables.main[0], tables.main[0] + 2)
        places = tables.cells.places
        if not self.model.rules or places[row[1]] - places[row[0]] > _REWRITTEN:
            return []
        before = {way: tables.seconds(row, part, way)[0] for way in plain}
        best = min(before, key=before.__getitem__, default=None)
        if best is None or before[best] == inf:
            return []
        if part not in self._rules:
            self._rules[part] = self._find_rules(tables, row, part, best)
        twins = {replace(way, rules=self._rules[part]): way for way in before if self._rules[part]}
        return [t for t, way in twins.items() if tables.seconds(row, part, t)[0] < before[way] * (1 - _FASTER)]

    def _find_rules(self, tables: StageTables, row: tuple[int, int], part: Part, way: Way) -> tuple[str, ...]:
        """The substitutions, one after the other, that make a row of cells faster here, and on one device, too."""
        device = tables.machines[part].device_type(0)
        least = tables.seconds(row, part, way)[0]
        while True:
            key = tables.num_micro_batches, device, way.rules
            if key not in self._gains:
                cut, _ = self._solver.rewrite(tables.cells.row(*row), way.rules)
                prices = self._solver.prices(cut.graph, tables.machines[part])
                self._gains[key] = gaining(cut.graph, self.model.rules, prices)
            tried = [replace(way, rules=(*way.rules, name)) for name in self._gains[key][:_TRIED]]
            best = min(tried, key=lambda one: tables.seconds(row, part, one)[0], default=way)
            if tables.seconds(row, part, best)[0] >= least * (1 - _FASTER):
                return way.rules
            way, least = best, tables.seconds(row, part, best)[0]

    def _worth(self, tables: StageTables, part: Part, ways: list[Way]) -> list[Way]:
        """The ways that are not worse in everything than another, for the cells that come most often."""
        if tables.main is None:
            return ways
        cell = tables.main[0]
        found = np.stack([tables.price((cell, cell + 1), part, way) for way in ways])
        told = np.stack([found[:, FORWARD] + found[:, BACKWARD] + found[:, FINISH] / tables.num_micro_batches,
                         found[:, PEAK], found[:, KEPT]], axis=1)  # fmt: skip
        kept = []
        for number, mine in enumerate(told):
            better = (told <= mine).all(1) & ((told < mine).any(1) | (np.arange(len(told)) < number))
            if np.isfinite(mine).all() and not better.any():
                kept.append(ways[number])
        return kept

    def _cuttings(
        self,
        trial: Trial,
        tables: StageTables,
        ways: dict[Part, list[Way]],
        capacity: float,
        in_flight: int | None = None,
    ) -> Sequence[Cutting]:
        """What the programme finds with some ways; perhaps where all stages hold so many micro-batches."""
        if not all(ways.values()):
            return ()
        count, division = len(tables), trial.division
        longest = count if not division.is_even else min(count, 3 * -(-count // division.count) + 2)
        filled = {part: tables.fill(part, some, longest) for part, some in ways.items()}
        sent = self._sent(tables.crossing, division.granule)
        most = min(division.count, count, MAX_STAGES)
        wanted = range(2, most + 1) if self.stages is None else [self.stages]
        told = division.granule, division.is_even, trial.micro
        self.least[told] = least_seconds(division, filled, ways, trial.micro, self.model.capacity, wanted)
        programme = Programme(division, filled, ways, sent, trial.micro, capacity, most, in_flight)
        return [cutting for cutting in programme.solve(self.stages) if len(cutting.slots) > 1]

    def _tables_for(self, micro: int) -> StageTables | None:
        """The tables of the model in so many micro-batches; None where it cannot be cut so."""
        if micro not in self._tables:
            self._tables[micro] = self._make_tables(micro)
        return self._tables[micro]

    def _make_tables(self, micro: int) -> StageTables | None:
        short = self._short
        if short is not None:
            whole, model = short
            cut = self._cells(model, micro, blocks_only=True)
            fold = None if cut is None else stands_for(cut[0], whole)
            if cut is not None and fold is not None:
                return self._tables_of(cut, fold, whole.learning)
            self._short = None
        cut = self._cells(self.model.captured, micro)
        return None if cut is None else self._tables_of(cut, Fold(cut[0].kinds, cut[0].kinds), cut[0].learning)

    def _tables_of(self, cut: _Cut, fold: Fold, learning: np.ndarray) -> StageTables:
        check = lambda: self.check("stages")
        solver = replace(self._solver, micro=1 if cut[1] is None else cut[1].steps)
        return StageTables(cut[0], fold, learning, cut[1], self._machines, solver, check)

    def _cells(self, graph: Graph, micro: int, *, blocks_only: bool = False) -> _Cut | None:
        """A model in micro-batches and cells; None where it cannot be cut so."""
        try:
            made, accumulation = cut_in_micro_batches(graph, micro) if micro > 1 else (graph, None)
        except StrategyError:
            return None
        seconds = node_seconds(made, self.model.costs, self.model.machine.device_type(0))
        return find_cells(made, seconds, blocks_only=blocks_only), accumulation

    def _shorten(self) -> tuple[Cells, Graph] | None:
        """The cells of the model, and a short one that stands for it where blocks repeat."""
        cut = self._cells(self.model.captured, 1)
        made = None if cut is None else shorten(cut[0])
        return None if cut is None or made is None else (cut[0], made)

    def _sent(self, crossing: np.ndarray, granule: int) -> np.ndarray:
        """Seconds in which what goes into every cell is sent from a granule to the next, and its gradient back."""
        found: dict[float, float] = {0.0: 0.0}
        for num_bytes in map(float, crossing):
            if num_bytes not in found:
                each = -(-int(num_bytes) // granule)
                sent = Streams.at_once((rank, rank + granule, each) for rank in range(granule))
                found[num_bytes] = 2 * streams_seconds(sent, self.model.machine)
        return np.array([found[float(num_bytes)] for num_bytes in crossing])

    def _crossings(self, trial: Trial, cutting: Cutting) -> Crossings:
        """What goes between the stages of a cutting."""
        tables = self._tables_for(trial.micro)
        assert tables is not None, "it was solved by them"
        sent = [float(tables.crossing[slot.cells[0]]) for slot in cutting.slots[1:]]
        return crossings_of(cutting, sent, trial.division.granule, self.model.machine)

    def _judge(self, trial: Trial, cutting: Cutting) -> None:
        """Build a cutting for real, and keep it where it is the best."""
        tables = self._tables_for(trial.micro)
        assert tables is not None
        self.check(f"{len(cutting.slots)} stages, {trial.micro} micro-batches, built")
        if trial.micro not in self._built:
            is_whole = len(tables.cells) == len(tables)
            mine = tables.cells, tables.accumulation
            self._built[trial.micro] = mine if is_whole else self._cells(self.model.captured, trial.micro)
        cut = self._built[trial.micro]
        if cut is None or len(cut[0]) != len(tables):
            return
        model = replace(self.model, check=self.check)
        for _ in range(1 + _MORE_BLOCKS):
            try:
                judged = judge(self.model, build(model, tables.solver, *cut, trial.division, cutting))
            except StrategyError:
                return
            self.num_judged += 1
            self._compare(cutting, judged)
            if judged.fits or all(slot.way.blocks is None for slot in cutting.slots):
                break
            cutting = replace(cutting, slots=tuple(_with_more_blocks(slot) for slot in cutting.slots))
        if judged.fits and (self.best is None or judged.seconds < self.best.seconds):
            self.best = checked(self.model, judged)
            self.found(self.best)


def _with_more_blocks(slot: Slot) -> Slot:
    """A stage that runs one more of its blocks again, where it runs some."""
    way = slot.way
    return slot if way.blocks is None else replace(slot, way=replace(way, blocks=way.blocks + 1))


def micro_batches(graph: Graph) -> list[int]:
    """Numbers of micro-batches to try: parts of the batch, not too near to each other where it has many.

    One is tried only where the batch is one sample: all stages but one would wait.
    """
    shapes = [leaf.type.shape for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    size = Counter(shape[0] for shape in shapes).most_common(1)[0][0] if shapes else 1
    found = [1]
    for parts in range(2, size + 1):
        if size % parts == 0 and (size <= _MANY_SAMPLES or parts >= _SPACING * found[-1]):
            found.append(parts)
    return found[1:] or found
