"""How far a plan can be from the best that the exact core could find: a sum that nothing on its units is below.

The tables count seconds one after the other. For the units of a plan, the guess of what is hidden and the price of a
byte with which it was found, the least sum over all layouts and storages is known exactly, or from below where
elimination would be too large (`exact/relaxation.py`). With a price l of a byte and m bytes that may be used,

    least over all that need at most m  >=  (least of seconds + l · bytes) - l · m          (weak duality)

What is bounded so is the sum on these units and this variant of the graph. The timeline, in which things overlap, is
bounded by what nothing can hide: devices compute, and wait for the reshards of activations, one after the other,

    step  >=  least over all of (computing + reshards + update) - what devices wait for hosts in it at most

which is the least sum with all of the parameters' communication hidden (`_least_step`). It is far below where links are
busier than devices. Other units, other rewrites, and memory beyond what tables count are not bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isclose

from conjoin.search.contest import Contest
from conjoin.search.entries import Outcome
from conjoin.search.exact.kinds import kinds_of
from conjoin.search.exact.relaxation import Bound, lower_bound
from conjoin.search.exact.space import LEAST_PRICE, OVERLAPS, Objective
from conjoin.search.exact.stack import StackProblem
from conjoin.search.exact.table_sum import sum_of
from conjoin.search.exact.units import Units, natural_units, shown
from conjoin.search.joint import JointSearch
from conjoin.search.variants import as_variant

_MAX_UNITS = 3
_FAR = 0.05
"""A gap of the step that is told with a reason."""
_LATE = 2.0
"""Seconds by which a search may be late for a bound of the step."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A plan's sum of seconds by the tables, and one that no plan on the same units is below."""

    units: str
    """The degrees of the units; in how many micro-batches a step is taken, of which no other number is bounded."""
    hidden: float
    """The part of the parameters' communication that is not counted."""
    seconds: float
    """Of the plan: its operators, reshards and updates, one after the other."""
    least: float
    is_exact: bool
    """Whether some plan has the least sum; else it is only known that none has less."""
    memory: int | None = None
    """The bound holds for plans that need at most so many bytes, as tables count them; None where it holds for all."""
    step: float = 0.0
    """Seconds of the plan by the timeline."""
    least_step: float = 0.0
    """Seconds that no plan on these units takes less than, by the timeline; 0 where that is not known."""

    @property
    def gap(self) -> float:
        """By which part of the bound the plan's sum can at most be lowered.

        >>> Certificate("2×4", 0.6, 1.05, 1.0, True).gap
        0.050000000000000044
        """
        return max(0.0, self.seconds / self.least - 1) if self.least > 0 else float("inf")

    @property
    def step_gap(self) -> float:
        """By which part of its bound the step can at most be lowered."""
        return max(0.0, self.step / self.least_step - 1) if self.least_step > 0 else float("inf")

    def __str__(self) -> str:
        among = "" if self.memory is None else f" in {self.memory / 2**30:.3g} GiB"
        return (
            f"the sum of seconds is within {self.gap:.1%} of the least on units of {self.units}{among}, "
            f"{self.hidden:.0%} of the parameters' communication not counted{self._of_step()}"
        )

    def _of_step(self) -> str:
        if self.least_step <= 0:
            return "; how much of the step nothing can hide is not known: tables or their time would be too large"
        why = ", since links are busy while devices wait" if self.step_gap > _FAR else ""
        return f"; the step is within {self.step_gap:.1%} of what nothing can hide{why}"


def certify(contest: Contest, best: Outcome) -> Certificate | None:
    """What is known of a plan from below; None where its layouts are not among those of the tables.

    Where there is no time left, only if the tables are there already.
    """
    outcome = as_variant(best)
    entry, mesh = outcome.entry, contest.mesh
    natural = natural_units(entry.layouts.choices, mesh) if mesh.size > 1 else ()
    if not natural or len(natural) > _MAX_UNITS:
        return None
    objective = entry.objective or JointSearch(contest, ()).objective(OVERLAPS[0])
    if entry.regathered and not objective.seconds_per_byte:
        objective = replace(objective, seconds_per_byte=LEAST_PRICE)
    for units in _known_first(contest, natural):
        if units in contest.spaces or contest.time_left > 0:
            found = _certify_on(contest, outcome, units, objective)
            if found is not None:
                return found
    return None


def _known_first(contest: Contest, natural: Units) -> list[Units]:
    """The units of the plan itself, or finer ones for which there are tables."""
    known = [units for units in contest.spaces if len(units) <= _MAX_UNITS and _cut(units, natural)]
    same = [units for units in known if len(units) == len(natural)]
    finer = sorted((units for units in known if len(units) > len(natural)), key=len, reverse=True)
    return [*same, *finer, *(() if same else (natural,))]


def _cut(units: Units, coarser: Units) -> bool:
    """Whether each of some units is a part of one of the others."""
    return all(any(set(unit.axes) <= set(whole.axes) for whole in coarser) for unit in units)


def _certify_on(contest: Contest, outcome: Outcome, units: Units, objective: Objective) -> Certificate | None:
    tables, entry = JointSearch(contest, ()), outcome.entry
    space, skeleton = tables.space(units), entry.variant.skeleton
    among = shown(units) + (f" in {entry.variant.steps} micro-batches" if entry.variant.steps > 1 else "")
    told = entry.layouts, entry.regathered, entry.segments
    own, before = sum_of(skeleton, space, objective, *told), contest.time_left
    bound = _bound(tables, outcome, units, objective) if own is not None else None
    if own is None or bound is None or bound.least <= 0:
        return None
    price = objective.seconds_per_byte
    is_late = before < inf and 2 * contest.time_left < before - _LATE  # a second bound takes as long as the first
    steps = outcome.seconds, 0.0 if is_late else _least_step(tables, outcome, units, objective)
    if price <= LEAST_PRICE:
        least = own if isclose(own, bound.least, rel_tol=1e-12) else bound.least  # the same, summed in another order
        return Certificate(among, objective.overlap, own, least, bound.is_exact, None, *steps)
    dearer = sum_of(skeleton, space, replace(objective, seconds_per_byte=2 * price), *told)
    assert dearer is not None, "the price of a byte changes no layout"
    priced = dearer - own
    memory = max(contest.capacity, round(priced / price))
    least = bound.least - price * memory
    if least <= 0:  # true, and says nothing
        return None
    return Certificate(among, objective.overlap, own - priced, least, bound.is_exact, memory, *steps)


def _least_step(tables: JointSearch, outcome: Outcome, units: Units, objective: Objective) -> float:
    """Seconds of a step that nothing hides, on units; 0 where that is not found."""
    variant, steps = outcome.entry.variant, outcome.entry.variant.steps
    once = objective.update_seconds if steps == 1 else 0.0
    bound = _bound(tables, outcome, units, replace(objective, overlap=1.0, seconds_per_byte=0.0, update_seconds=once))
    if bound is None:
        return 0.0
    waits = sum(tables.operators.waiting(kind.task) for kind in kinds_of(variant.skeleton))
    return max(0.0, steps * (bound.least - waits))


def _bound(tables: JointSearch, outcome: Outcome, units: Units, objective: Objective) -> Bound | None:
    stacked = tables.stacked(outcome.entry.variant, units, objective)
    if isinstance(stacked, StackProblem):
        solution = stacked.solve()
        if solution.is_exact:
            return Bound(solution.total, True)
    problem = tables.problem(outcome.entry.variant, units, objective)
    return None if problem is None else lower_bound(problem.sizes, problem.factors, problem.space.tables)
