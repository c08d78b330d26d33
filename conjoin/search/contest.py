"""A contest of plans: each is simulated, the best that fits is kept, and whoever runs it is told when to stop.

Every search runs in one, so that all are judged alike: by the timeline and the memory of `conjoin.sim`, never by what
the search itself believes. A contest begins with the named strategies; a search can therefore not end up worse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from time import perf_counter, process_time

from conjoin.ir import Graph, Plan
from conjoin.machine import Machine, Mesh
from conjoin.search.bundle_size import choose_bundle_bytes
from conjoin.search.constraints import Constraints
from conjoin.search.entries import (
    Entry,
    Heavy,
    Outcome,
    Variant,
    add_to_front,
    entry_of,
    seconds_alone,
    with_asked_segments,
)
from conjoin.search.exact.space import Space
from conjoin.search.exact.units import Units
from conjoin.search.notes import Notes
from conjoin.search.packed_weights import sections_alike
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.sim import (
    ALIKE,
    Classes,
    Drafts,
    PipelinePrediction,
    Prices,
    Simulation,
    least_step,
    new_drafts,
    simulate_layouts,
)

FOR_FINISHING = 0.1
"""The part of its time that a search keeps at most to write out and check the best plan."""
_FOR_FITTING = 0.3
"""The part of its time that a search without a plan that fits keeps for running segments again."""


_FASTEST = 12
_ON_FRONT = 64
SIMPLER = 1.005
"""How much faster a plan must be than a simpler one."""


class Stopped(Enum):
    """Why a search ended."""

    CONVERGED = "converged"
    OUT_OF_TIME = "out of time"
    OUT_OF_STEPS = "out of steps"
    INTERRUPTED = "interrupted"


NOT_TRIED = "Ctrl-C came before it was tried."
"""What a table says of the rest where it was stopped."""


class Enough(Exception):
    """The contest is over: the search that runs it should return."""

    def __init__(self, reason: Stopped) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Improvement:
    """When the best plan got better, to what, and by whom."""

    elapsed: float
    seconds: float
    name: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What a user sees while a search runs."""

    elapsed: float
    best_seconds: float | None
    baseline_seconds: float | None
    budget_left: float
    num_entries: int
    doing: str

    def __str__(self) -> str:
        best = "none fits yet" if self.best_seconds is None else f"best {self.best_seconds * 1e3:.4g} ms"
        ratio = ""
        if self.best_seconds is not None and self.baseline_seconds is not None:
            ratio = f", {self.baseline_seconds / self.best_seconds:.2f}x the best named strategy"
        time = f"{self.budget_left:.0f} s left" if self.budget_left < inf else "no limit of time"
        left = f"{time}, {self.num_entries} plans"
        return f"{self.elapsed:5.1f} s  {best}{ratio}, {left}: {self.doing}"


@dataclass
class Contest:
    """Plans of one model on one machine, and the best so far."""

    captured: Graph
    machine: Machine
    prices: Prices
    optimizer: str
    capacity: int
    """Bytes that a device has."""
    budget: float
    """Seconds on the wall."""
    progress: Callable[[Progress], None] | None = None
    best: Outcome | None = None
    fastest: list[tuple[float, Entry]] = field(default_factory=list)
    """The fastest entries, whether they fit or not."""
    smallest: Outcome | None = None
    """The entry that needs the least memory of those that do not fit, while none does."""
    front: list[Heavy] = field(default_factory=list)
    """Of what does not fit and was faster than the best, those of which no other is both faster and smaller, or which
    can be made to fit where no such other one can."""
    relieved: list[Entry] = field(default_factory=list)
    """What was tried with something of it run again or on the host, or cannot be."""
    named: dict[str, Outcome] = field(default_factory=dict)
    """Named strategies that run blocks again, by name."""
    slow: dict[str, Entry] = field(default_factory=dict)
    """Named strategies that cannot be the best: they are not simulated."""
    baseline: Outcome | None = None
    """The best of the named strategies."""
    pipeline: PipelinePrediction | None = None
    """The best of several stages that fits."""
    bound: PipelineBound | None = None
    """What pipelines take at least."""
    pipeline_given: bool = False
    """Whether the user gave one to start from: then the result is no slower, even by little."""
    without: Outcome | None = None
    """The fastest entry that fits but breaks a constraint: what would be there without it."""
    history: list[Improvement] = field(default_factory=list)
    num_entries: int = 0
    steps_left: int | None = None
    cpu_budget: float = inf
    """Seconds of this process, which do not count what others do on a shared host."""
    constraints: Constraints = field(default_factory=Constraints)
    notes: Notes = field(default_factory=Notes)
    """What was tried, also by an earlier search that this one goes on with."""
    spaces: dict[Units, Space] = field(default_factory=dict)
    """Tables of the exact core, made once for all that ask it."""
    steps: int = 0
    """Plans that were simulated, and sums that were worked out for substitutions."""
    cut_short: bool = False
    """Whether a part of the search ended because its share of the time was over: more of it may be found."""
    for_finishing: float = 0.0
    """Seconds that are kept to write out and check the best plan."""
    started: float = field(default_factory=perf_counter)
    cpu_started: float = field(default_factory=process_time)
    _drafts: dict[tuple[Classes, int, int], Drafts] = field(default_factory=dict)
    _asked: tuple[Entry, Drafts] | None = None
    """Those of the last entry."""
    _relieved: dict[Hashable, bool] = field(default_factory=dict)
    """Whether plans fit with much of them elsewhere, by their seconds and bytes and by how leaves are stored."""

    def __post_init__(self) -> None:
        self.steps_given = self.steps_left
        self.bundle_bytes = choose_bundle_bytes(self.captured, self.machine)

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.started

    @property
    def cpu_elapsed(self) -> float:
        return process_time() - self.cpu_started

    @property
    def time_left(self) -> float:
        """Seconds until the earlier of the two budgets is spent, but for what is kept for finishing."""
        left = self.budget - self.elapsed
        left = left if self.cpu_budget == inf else min(left, self.cpu_budget - self.cpu_elapsed)
        return left - self.for_finishing

    @property
    def time_spent(self) -> float:
        """Seconds of the budget that has less left, on the wall or of the process."""
        elapsed, cpu_elapsed = self.elapsed, self.cpu_elapsed
        return elapsed if self.budget - elapsed <= self.cpu_budget - cpu_elapsed else cpu_elapsed

    @property
    def time_left_of_given(self) -> float:
        """The part that is left of the time on the wall or of the seconds of the process, whichever is scarcer."""
        kept = self.for_finishing
        left = 1 - (self.elapsed + kept) / self.budget if self.budget > 0 else 0.0
        if self.cpu_budget == inf:  # asking the system takes longer than most that is done in between
            return left
        return min(left, 1 - (self.cpu_elapsed + kept) / self.cpu_budget if self.cpu_budget > 0 else 0.0)

    @property
    def left(self) -> float:
        """The part that is left of what is scarcest: time, seconds of the process, or steps.

        Searches share out this instead of seconds, so that with steps alone they do the same every time.
        """
        steps = 1.0
        if self.steps_given is not None and self.steps_left is not None:
            steps = self.steps_left / max(1, self.steps_given)
        return max(0.0, min(self.time_left_of_given, steps))

    def keep_for_finishing(self) -> None:
        """Keep as many seconds to finish the best plan as were spent so far: the first strategy goes through the
        model as often as the writing of a plan does."""
        spent = self.time_spent
        self.for_finishing = min(spent, FOR_FINISHING * max(0.0, spent + self.time_left))

    def share(self, part: float) -> Callable[[], float]:
        """A part of what is left, to be spent on something: how much of it there still is, from 1 down to 0."""
        end, given = self.left * (1 - part), self.left * part
        return lambda: (self.left - end) / given if given > 0 else 0.0

    def seconds_alone(self, variant: Variant) -> float:
        """Computing forward and backward on one device."""
        return seconds_alone(variant, self.prices)

    @property
    def least_seconds(self) -> float:
        """Of a step by the best so far, in one stage or several."""
        return min(found.seconds if found is not None else inf for found in (self.best, self.pipeline))

    @property
    def pipeline_leads(self) -> bool:
        """Whether several stages are faster than one, by more than plans differ that are alike."""
        simpler = 1.0 if self.pipeline_given else SIMPLER
        return self.pipeline is not None and (
            self.best is None or self.pipeline.seconds * simpler < self.best.seconds
        )

    @property
    def seconds_to_beat(self) -> float:
        """What a plan of one stage has to take less than to be of any use."""
        several = inf if self.pipeline is None else self.pipeline.seconds * SIMPLER
        return several if self.best is None else min(several, self.best.seconds)

    @property
    def mesh(self) -> Mesh:
        """The axes that may be used."""
        return self.constraints.free(self.machine.mesh)

    def allows(self, entry: Entry) -> bool:
        """Whether an entry keeps to the constraints; memory and time are seen when it is simulated."""
        return not self.constraints or self._broken_by(entry) is None

    def _broken_by(self, entry: Entry) -> str | None:
        return self.constraints.broken_by(entry.variant.skeleton, entry.layouts)

    def is_new(self, trial: str) -> bool:
        """Whether something was not tried yet on this machine, in this search or in the one it goes on with."""
        return f"{self.machine.name}: {trial}" not in self.notes.tried

    def note(self, trial: str, seconds: float = inf) -> None:
        """Take down that something was tried to its end, and what came of it."""
        self.notes.tried[f"{self.machine.name}: {trial}"] = seconds

    def noted(self, trial: str) -> float:
        """What came of it."""
        return self.notes.tried.get(f"{self.machine.name}: {trial}", inf)

    def check(self, doing: str) -> None:
        """Tell the user what comes next; Enough when there is no time for it, or just enough to make a plan fit."""
        self.tell(doing)
        nothing_fits = self.best is None and self.pipeline is None and self.smallest is not None
        if self.time_left_of_given <= (_FOR_FITTING if nothing_fits else 0):
            raise Enough(Stopped.OUT_OF_TIME)
        if self.steps_left is not None and self.steps_left <= 0:
            raise Enough(Stopped.OUT_OF_STEPS)

    def tell(self, doing: str) -> None:
        """Tell the user what comes next."""
        if self.progress is not None:
            best = None if self.least_seconds == inf else self.least_seconds
            baseline = self.baseline.seconds if self.baseline else None
            left = max(0.0, self.time_left)
            self.progress(Progress(self.elapsed, best, baseline, left, self.num_entries, doing))

    def simulate(self, entry: Entry) -> Simulation:
        """Time an entry; what is alike in several is priced once."""
        skeleton, drafts = entry.variant.skeleton, self._drafts_for(entry)
        return simulate_layouts(
            skeleton, entry.layouts, drafts, entry.regathered, entry.segments, entry.variant.steps, entry.offloads
        )

    def _drafts_for(self, entry: Entry) -> Drafts:
        if self._asked is None or self._asked[0] is not entry:
            self._asked = entry, self._new_drafts(entry)
        return self._asked[1]

    def _new_drafts(self, entry: Entry) -> Drafts:
        drafts = new_drafts(entry.variant.skeleton, entry.layouts, self.machine.mesh, self.prices)
        drafts.bundle_bytes = self.bundle_bytes if entry.plan is None else entry.plan.bundle_bytes
        drafts.chunks = entry.chunks if entry.plan is None else entry.plan.chunks
        return self._drafts.setdefault((drafts.classes, drafts.bundle_bytes, drafts.chunks), drafts)

    def is_slow(self, entry: Entry) -> bool:
        """Whether an entry is slower than the best by more than plans are off that are told alike, by its operators and
        what these wait for alone."""
        if self.best is None or self.constraints:  # what breaks these is told of
            return False
        enough = (1 + ALIKE) * self.best.seconds / entry.variant.steps
        return least_step(entry.variant.skeleton, entry.layouts, self._drafts_for(entry), enough) > enough

    def enter(self, entry: Entry) -> Outcome:
        """Judge an entry; it becomes the best where it fits and is faster."""
        self.count_step()
        entry = with_asked_segments(entry)
        return self.judge(entry, self.simulate(entry))

    def count_step(self) -> None:
        """Take note that a plan is simulated; Enough when no more may be."""
        if self.steps_left is not None:
            if self.steps_left <= 0:
                raise Enough(Stopped.OUT_OF_STEPS)
            self.steps_left -= 1
        self.steps += 1

    def judge(self, entry: Entry, simulation: Simulation) -> Outcome:
        """The same where the entry was simulated already."""
        self.num_entries += 1
        layouts = sections_alike(entry.variant.skeleton.graph, entry.layouts, self.machine.mesh)
        if layouts is not entry.layouts:
            entry = replace(entry, layouts=layouts)
            simulation = self.simulate(entry)
        seconds, allowed = simulation.seconds, self.allows(entry)
        self._keep_near(entry, seconds, allowed)
        rival = self.best if allowed else self.without
        if rival is not None and seconds >= rival.seconds:
            return Outcome(entry, simulation, seconds, None)
        peak = simulation.peak_bytes(self.optimizer, self.machine.device)
        outcome = Outcome(entry, simulation, seconds, peak)
        if not allowed:
            self.without = outcome if peak <= self.capacity else self.without
        elif peak <= self.capacity:
            self.best = outcome
            self.history.append(Improvement(self.elapsed, seconds, entry.name))
        else:
            if not entry.segments and not entry.offloads and seconds < self.seconds_to_beat:
                self._keep_on_front(outcome)
            if self.smallest is None or self.smallest.peak_bytes is None or peak < self.smallest.peak_bytes:
                self.smallest = outcome
        return outcome

    @property
    def is_too_small(self) -> bool:
        """Whether nothing was found for want of memory, and not because of what is asked for besides."""
        return self.least_seconds == inf and (self.smallest is not None or self.without is None)

    @property
    def memory_decides(self) -> bool:
        """Whether something is faster than the best, by more than plans differ that are alike, but does not fit."""
        return any(heavy.seconds * SIMPLER < self.least_seconds for heavy in self.front)

    def _keep_on_front(self, outcome: Outcome) -> None:
        """Keep what does not fit unless something beats it; of many the fastest, and the smallest."""
        found = add_to_front(self.front, self.weigh(outcome))
        least = min(found, key=lambda heavy: heavy.peak_bytes)
        self.front = [heavy for i, heavy in enumerate(found) if i < _ON_FRONT or heavy is least]

    def weigh(self, outcome: Outcome) -> Heavy:
        """An outcome of which memory was asked, to be compared where memory decides."""
        assert outcome.peak_bytes is not None
        return Heavy(outcome, outcome.seconds, outcome.peak_bytes, self._fits_relieved)

    def _fits_relieved(self, outcome: Outcome) -> bool:
        if outcome.entry.segments or outcome.entry.offloads:  # it is relieved as it is
            return (outcome.peak_bytes or 0) <= self.capacity
        alike = outcome.seconds, outcome.peak_bytes, *sorted(outcome.entry.layouts.leaves.items())
        if alike not in self._relieved:  # random changes come to the same plans again and again
            found = outcome.simulation.relieved_bytes(self.optimizer, self.machine.device)
            self._relieved[alike] = found <= self.capacity
        return self._relieved[alike]

    def _keep_near(self, entry: Entry, seconds: float, allowed: bool) -> None:
        """Keep an entry where it is among the fastest; of those laid out alike the first."""
        is_slow = len(self.fastest) == _FASTEST and seconds >= self.fastest[-1][0]
        known = any(seconds == other and entry.layouts == its.layouts for other, its in self.fastest)
        if allowed and not is_slow and not known:
            self.fastest = sorted([*self.fastest, (seconds, entry)], key=lambda found: found[0])[:_FASTEST]

    def enter_pipeline(self, found: PipelinePrediction) -> None:
        """Keep a pipeline where it fits and is faster than those before."""
        self.num_entries += 1
        if found.peak <= self.capacity and (self.pipeline is None or found.seconds < self.pipeline.seconds):
            self.pipeline = found
            self.history.append(Improvement(self.elapsed, found.seconds, found.pipeline.strategy))

    def enter_plan(self, plan: Plan, *, is_counted: bool = True) -> Outcome:
        """Judge a plan that somebody made; one that was found before need not count as a step."""
        entry = entry_of(plan)
        return self.enter(entry) if is_counted else self.judge(entry, self.simulate(entry))
