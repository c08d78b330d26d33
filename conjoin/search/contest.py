"""A contest of plans: each is simulated, the best that fits is kept, and whoever runs it is told when to stop.

Every search runs in one, so that all are judged alike: by the timeline and the memory of `conjoin.sim`, never by what
the search itself believes. A contest begins with the named strategies; a search can therefore not end up worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

from conjoin.ir import (
    REGATHER,
    Accumulation,
    Graph,
    Mark,
    MemoryAction,
    Plan,
    Segment,
    Substitution,
    Value,
    check_plan,
    model_mark,
    parallelize,
    recompute_actions,
    recomputed_segments,
    regathered_parameters,
)
from conjoin.machine import Machine
from conjoin.sim import (
    Classes,
    Drafts,
    Layouts,
    Prices,
    Simulation,
    Skeleton,
    measure_memory,
    new_drafts,
    simulate_layouts,
    take_apart,
    take_graph_apart,
)


class Stopped(Enum):
    """Why a search ended."""

    CONVERGED = "converged"
    OUT_OF_TIME = "out of time"
    OUT_OF_STEPS = "out of steps"
    INTERRUPTED = "interrupted"


class Enough(Exception):
    """The contest is over: the search that runs it should return."""

    def __init__(self, reason: Stopped) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as a graph without layouts, and how it was made from the captured one."""

    graph: Graph
    skeleton: Skeleton
    substitutions: tuple[Substitution, ...] = ()
    accumulation: Accumulation | None = None
    """Where the graph is that of a micro-batch."""

    @property
    def steps(self) -> int:
        """Micro-batches in a step."""
        return 1 if self.accumulation is None else self.accumulation.steps


def make_variant(
    graph: Graph, substitutions: tuple[Substitution, ...] = (), accumulation: Accumulation | None = None
) -> Variant:
    """The variant that a graph without layouts is."""
    return Variant(graph, take_graph_apart(graph)[0], substitutions, accumulation)


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan as it takes part: a variant in layouts."""

    name: str
    variant: Variant
    layouts: Layouts
    regathered: frozenset[str] = frozenset()
    segments: tuple[Segment, ...] = ()
    """What the backward pass runs again."""
    plan: Plan | None = None
    """Where there is one already."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An entry with what the simulation says."""

    entry: Entry
    simulation: Simulation
    seconds: float
    peak_bytes: int | None
    """None where memory was not asked: the entry is slower than one that fits."""


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
        left = f"{self.budget_left:.0f} s left, {self.num_entries} plans"
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
    """Seconds."""
    progress: Callable[[Progress], None] | None = None
    best: Outcome | None = None
    smallest: Outcome | None = None
    """The entry that needs the least memory of those that do not fit, while none does."""
    baseline: Outcome | None = None
    """The best of the named strategies."""
    history: list[Improvement] = field(default_factory=list)
    num_entries: int = 0
    steps_left: int | None = None
    started: float = field(default_factory=perf_counter)
    _drafts: dict[Classes, Drafts] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.started

    @property
    def time_left(self) -> float:
        return self.budget - self.elapsed

    def check(self, doing: str) -> None:
        """Tell the user what comes next; Enough when there is no time for it."""
        self.tell(doing)
        if self.time_left <= 0:
            raise Enough(Stopped.OUT_OF_TIME)

    def tell(self, doing: str) -> None:
        """Tell the user what comes next."""
        if self.progress is not None:
            best = self.best.seconds if self.best else None
            baseline = self.baseline.seconds if self.baseline else None
            left = max(0.0, self.time_left)
            self.progress(Progress(self.elapsed, best, baseline, left, self.num_entries, doing))

    def simulate(self, entry: Entry) -> Simulation:
        """Time an entry; what is alike in several is priced once."""
        skeleton, layouts, mesh = entry.variant.skeleton, entry.layouts, self.machine.mesh
        drafts = new_drafts(skeleton, layouts, mesh, self.prices)
        drafts = self._drafts.setdefault(drafts.classes, drafts)
        return simulate_layouts(skeleton, layouts, drafts, entry.regathered, entry.segments, entry.variant.steps)

    def enter(self, entry: Entry) -> Outcome:
        """Judge an entry; it becomes the best where it fits and is faster."""
        self.count_step()
        return self.judge(entry, self.simulate(entry))

    def count_step(self) -> None:
        """Take note that a plan is simulated; Enough when no more may be."""
        if self.steps_left is not None:
            if self.steps_left <= 0:
                raise Enough(Stopped.OUT_OF_STEPS)
            self.steps_left -= 1

    def judge(self, entry: Entry, simulation: Simulation) -> Outcome:
        """The same where the entry was simulated already."""
        self.num_entries += 1
        seconds = simulation.seconds
        if self.best is not None and seconds >= self.best.seconds:
            return Outcome(entry, simulation, seconds, None)
        peak = measure_memory(simulation.program, self.optimizer, self.machine.device).peak
        outcome = Outcome(entry, simulation, seconds, peak)
        if peak <= self.capacity:
            self.best = outcome
            self.history.append(Improvement(self.elapsed, seconds, entry.name))
        elif self.smallest is None or self.smallest.peak_bytes is None or peak < self.smallest.peak_bytes:
            self.smallest = outcome
        return outcome

    def enter_plan(self, plan: Plan) -> Outcome:
        """Judge a plan that somebody made."""
        skeleton, layouts = take_apart(plan)
        variant = Variant(plan.graph, skeleton, plan.substitutions, plan.accumulation)
        entry = Entry(plan.strategy, variant, layouts, regathered_parameters(plan), recomputed_segments(plan), plan)
        return self.enter(entry)


def plan_of(outcome: Outcome, captured: Graph, machine: Machine) -> Plan:
    """The plan that an outcome stands for, checked."""
    entry = outcome.entry
    if entry.plan is not None:
        return entry.plan
    skeleton, layouts = entry.variant.skeleton, entry.layouts
    leaves = {skeleton.graph.leaves[i]: layout for i, layout in layouts.leaves.items()}
    choices = {op.node: choice for op, choice in zip(skeleton.operators, layouts.choices, strict=True)}
    values = [i for i, value in enumerate(skeleton.graph.outputs) if isinstance(value, Value)]
    outputs = dict(zip(values, layouts.results, strict=False))
    graph = parallelize(skeleton.graph, leaves, choices, outputs)
    regathered = tuple(MemoryAction(REGATHER, name) for name in sorted(entry.regathered))
    plan = Plan(
        graph=graph,
        mesh=machine.mesh,
        model=model_mark(captured),
        machine=Mark(machine.name, machine.fingerprint()),
        strategy=entry.name,
        memory=(*regathered, *recompute_actions(graph, entry.segments)),
        substitutions=entry.variant.substitutions,
        accumulation=entry.variant.accumulation,
        predictions=(("seconds_per_step", outcome.seconds), ("peak_bytes", float(outcome.peak_bytes or 0))),
    )
    return check_plan(plan)
