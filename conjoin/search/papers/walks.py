"""Searches that walk at random from plan to plan, each judged by the timeline: `mcmc` and `random`.

FlexFlow (Jia's thesis, section 3.5) proposes a random choice for a random operator, and goes there with probability

    min(1, exp(beta (seconds of the current plan - seconds of the proposed one)))            (3.1), `_Walk._accepts`

from every initial strategy, until that has had its share of the time, or nothing better was found in the second half
of what was proposed (section 3.5.2, `_Walk.go`). A proposal is timed by delta simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp
from random import Random

from conjoin.ir import rules_for
from conjoin.ops import At, Partial, ShardingRule
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome, Variant
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.settled_choices import settle
from conjoin.search.exact.units import Units
from conjoin.search.joint import JointSearch
from conjoin.search.variants import as_variant
from conjoin.sim import Change, Layouts, Program, make_change

MAX_STARTS = 4
"""Initial strategies that are walked from, the fastest first."""
COLDNESS = 100.0
"""Beta times the seconds of the plan that a walk begins with; the thesis prints no value. A plan that is slower by a
hundredth of these is accepted once in e times."""
MIN_PROPOSALS, FEW_PROPOSALS = 10, 100
"""For each operator, and for a model of few, before a walk may end because nothing better is found."""
NUM_SAMPLES = 1000
"""Of random search."""
AT_PLACE = 0.05
"""How often an operator is proposed to run at one place of an axis only."""
_MAX_PARTS = 3
"""Into how many runs of axes a proposal cuts the mesh at most: as many as the exact core has units."""


def walk_from_all(contest: Contest, starts: Sequence[Outcome], seed: int, kept: float = 0.0) -> None:
    """FlexFlow's search from the fastest starts, one after the other; a part of what is left is kept for others."""
    rng = Random(seed + contest.notes.rounds)
    contest.notes.rounds += 1
    allowed = [start for start in starts if contest.allows(start.entry)]
    if contest.best is not None and not allowed:
        allowed = [contest.best]
    chosen = sorted(allowed, key=lambda outcome: outcome.seconds)[:MAX_STARTS]
    end = kept * contest.left
    for position, start in enumerate(chosen if contest.mesh.size > 1 else ()):
        share = (contest.left - end) / (len(chosen) - position)
        until = contest.left - share if position + 1 < len(chosen) else end or -1.0
        _Walk(contest, start.entry.name, start, rng, until).go()
    contest.check("all walks are over")


@dataclass
class _Walk:
    """A walk under way."""

    contest: Contest
    name: str
    current: Outcome
    rng: Random
    until: float
    """The part left of the contest's time or steps at which the next walk's turn has come."""
    beta: float = field(init=False)
    best: float = field(init=False)
    """The least cost on this walk."""

    def __post_init__(self) -> None:
        start = as_variant(self.current)
        self.current = replace(start, simulation=self.contest.simulate(start.entry))
        self.best = self._cost(self.current)
        self.beta = COLDNESS / self.best if self.best else 0.0

    def go(self) -> None:
        """Until its time is over, or the second half of the proposals brought nothing better."""
        proposed, found_at = 0, 0
        count = len(self.current.simulation.program.skeleton.operators)
        least = max(FEW_PROPOSALS, MIN_PROPOSALS * count) if count else 0
        while proposed < max(least, 2 * found_at) and self.contest.left > self.until:
            self.contest.check(f"random changes from {self.name}")
            proposed += 1
            if self._step():
                found_at = proposed
        self.contest.cut_short |= proposed < max(least, 2 * found_at)

    def _step(self) -> bool:
        """Propose, and accept or not; whether that is the best of the walk."""
        change = propose(self.current.simulation.program, self.rng, self.contest.mesh.names)
        change = None if change is None else self._kept(change)
        if change is None:
            return False
        proposed = self._try(change)
        cost = self._cost(proposed)
        if not self._accepts(cost):
            return False
        self.current = proposed
        better = cost < self.best
        self.best = min(cost, self.best)
        return better

    def _kept(self, change: Change) -> Change | None:
        """The change with parameters stored as they are to be; None where it makes something as it may not be."""
        program, constraints = self.current.simulation.program, self.contest.constraints
        fixed = constraints.roots(program.skeleton) if constraints.fixed else {}
        makes = zip(program.skeleton.operators[change.operator].makes, change.choice.outputs, strict=True)
        if fixed is None or any(fixed.get(root, layout) != layout for root, layout in makes):
            return None
        return replace(change, leaves={root: layout for root, layout in change.leaves.items() if root not in fixed})

    def _accepts(self, cost: float) -> bool:
        worse = cost - self._cost(self.current)
        return worse <= 0 or self.rng.random() < exp(-self.beta * worse)

    def _cost(self, outcome: Outcome) -> float:
        """Seconds; of a plan that does not fit, as many times more as it needs more than there is."""
        return outcome.seconds * max(1.0, (outcome.peak_bytes or 0) / self.contest.capacity)

    def _try(self, change: Change) -> Outcome:
        self.contest.count_step()
        simulation = self.current.simulation
        program = simulation.program
        choices = list(program.choices)
        choices[change.operator] = change.choice
        layouts = Layouts({**program.leaves, **change.leaves}, tuple(choices), program.results)
        entry = replace(self.current.entry, name=f"random changes from {self.name}", layouts=layouts)
        unlike = program.drafts.unlike_axes(program.numbers[change.operator], change.choice)
        if unlike <= {*program.drafts.classes.axes}:
            return self.contest.judge(entry, simulation.change(change))
        return self.contest.judge(entry, self.contest.simulate(entry))


def propose(program: Program, rng: Random, axes: Sequence[str] = ()) -> Change | None:
    """A random choice for a random operator: some axes of the mesh in a few runs, for each a random rule.

    None where what was drawn is not legal, or is what the operator does already.
    """
    operator = rng.randrange(len(program.skeleton.operators))
    rules = _rules(program, operator)
    drawn: dict[str, ShardingRule] = {}
    for run in _runs(axes or program.drafts.mesh.names, rng):
        rule = rng.choice(rules)
        drawn.update(dict.fromkeys(run, rule))
    if not program.again and program.steps == 1 and rng.random() < AT_PLACE:
        axis = rng.choice(axes or program.drafts.mesh.names)
        drawn[axis] = rule_at(program, operator, rng.randrange(program.drafts.mesh.sizes[axis]))
    change = make_change(program, operator, drawn)
    return change if change is not None and change.choice != program.choices[operator] else None


def rule_at(program: Program, operator: int, place: int) -> ShardingRule:
    """The way to run an operator at one place of an axis."""
    found = program.skeleton.operators[operator]
    return ShardingRule(None, (At(place),) * len(found.reads), (At(place),) * len(found.makes))


def _rules(program: Program, operator: int) -> list[ShardingRule]:
    """The rules of an operator by which no parameter or input would have to be stored as partial sums."""
    found = program.skeleton.operators[operator]
    leaves = [program.skeleton.roots[root].leaf is not None for root in found.reads]
    return [
        rule
        for rule in rules_for(found.call, len(found.makes))
        if not any(leaf and placement == Partial() for leaf, placement in zip(leaves, rule.operands, strict=True))
    ]


def _runs(names: Sequence[str], rng: Random) -> list[tuple[str, ...]]:
    """The row of axes cut at random places."""
    positions = sorted(rng.sample(range(1, len(names)), min(rng.randrange(_MAX_PARTS), len(names) - 1)))
    return [tuple(names[a:b]) for a, b in zip([0, *positions], [*positions, len(names)], strict=True)]


def sample(contest: Contest, variants: Sequence[Variant], seed: int) -> None:
    """Random choices for all operators at once, again and again; parameters are stored as suits these best."""
    rng, tables = Random(seed + contest.notes.rounds), JointSearch(contest, variants)
    contest.notes.rounds += 1
    objective, problems = tables.objective(0.0), dict[tuple[int, Units], Problem | None]()
    some = tables.cuts()
    for _ in range(NUM_SAMPLES if some else 0):
        contest.check("random choices")
        number, units = rng.randrange(len(variants)), rng.choice(some)
        variant = variants[number]
        if (number, units) not in problems:
            problems[number, units] = tables.problem(variant, units, objective)
        problem = problems[number, units]
        if problem is None:
            continue
        values = [rng.randrange(size) for size in problem.sizes[: problem.num_operators]]
        layouts, regathered = problem.layouts(settle(problem, values))
        contest.enter(Entry("random choices", variant, layouts, regathered))
