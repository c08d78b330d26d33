"""The joint search: rewrites, layouts of every operator and storage of every parameter together.

1. *Two units.* For every cut of the mesh in two and every variant of the graph the layouts with the least sum of
   seconds are found exactly (`exact/problem.py`), for several guesses of how much of the parameters' communication is
   hidden, and judged by the timeline (`contest.py`).
2. *Near the best.* The best entries are taken up on three units, one of theirs cut in two: again exactly, but only
   over choices that agree with the entry on one unit at least; from what is found on, as long as that helps.
3. *Counted axes.* Where all axes of the mesh are alike, the layouts with the least sum over all axes, not only over
   units, are found by counting axes (`exact/counted/`), and then given names.
4. *Memory.* Where nothing fits, a byte is given a price, which is raised until something does, and lowered again
   while it still fits: the Lagrangian of the memory limit. Besides, the fastest of what does not fit is relieved: some
   of it is run again in the backward pass (`relief.py`), and steps are taken in micro-batches
   (`micro_batches.py`).

Variants are what named strategies rewrite and what substitutions give (`variants.py`). Since the layouts of a variant
are solved exactly, the best variant is found together with its best layouts, never before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from conjoin.search.branch_places import without_places
from conjoin.search.constraints import refined
from conjoin.search.contest import Contest
from conjoin.search.entries import NOTHING_OFFLOADED, Entry, Outcome, Variant, digest
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.counted.alignments import TooMany
from conjoin.search.exact.counted.named_layouts import name_axes
from conjoin.search.exact.counted.problem import CountedProblem
from conjoin.search.exact.counted.space import CountedSpace, axes_are_alike
from conjoin.search.exact.problem import Impossible, Problem
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.space import OVERLAPS, Objective, Space, host_seconds_per_byte, objective_on
from conjoin.search.exact.stack import StackProblem, folded_problem
from conjoin.search.exact.units import Units, cuts, kinds_text, natural_units, neighbours, shown, splits
from conjoin.search.host_relief import relieve_by_host, states_on_host
from conjoin.search.memory_front import explore_front, relieve_front
from conjoin.search.micro_batches import enter_strategies, micro_variants
from conjoin.search.relief import mix, relieve
from conjoin.search.rewrites import RuleWay
from conjoin.search.substitutions import substitute, substitute_alone
from conjoin.search.variants import as_variant
from conjoin.sim import Layouts

_MORE_OVERLAPS = (0.8, 0.3, 0.9, 1.0)
"""Tried where it looks best."""
_HOPELESS = 1.3
"""Solutions whose sum is larger than the least by this factor are not simulated, and slower entries not taken up."""
_TAKEN_UP = 24
"""How many of the entries on two units are taken up on three, as long as there is time."""
_MEMORY_STEPS = 12
_ABOVE = 1.01
"""The price of a byte where what the optimizer remembers goes to the host, in prices of doing so."""
_RELIEVED = 3
"""How many entries that do not fit are relieved at a time."""
_FIRST_RELIEF = 0.2
"""The part of the time for which named strategies that do not fit are relieved, before others are looked for."""
_FOR_MICRO_BATCHES = 0.6
"""The part of the time in which micro-batches are made smaller, before a byte is given a price."""
_FIRST_PRICE = 0.01
"""Of a byte, in steps for a device's memory."""
_LOWEST_PRICE, _HIGHEST_PRICE = 1e-3, 1e4
"""Of the first: what fits for less is not priced, and where a device's memory is worth a hundred steps nothing does."""


class _Prices(NamedTuple):
    """Of a byte: the one to begin with, and how low and how high others may be."""

    first: float
    lowest: float
    highest: float


@dataclass
class JointSearch:
    """A joint search under way."""

    contest: Contest
    variants: Sequence[Variant]
    starts: Sequence[Outcome] = ()
    """Entries to take up on three units."""
    ways: tuple[RuleWay, ...] = ()
    """Substitutions."""
    operators: OperatorSeconds = field(init=False)
    sums: dict[tuple[Units, Objective], float] = field(default_factory=dict)
    """The least sum on units for an objective, over all variants."""
    fastest: dict[Units, float] = field(default_factory=dict)
    """Seconds of the fastest entry on units, by the timeline."""
    entries: dict[Units, dict[str, Outcome]] = field(default_factory=dict)
    """The fastest entry of every variant on units, of those that were found by this search and no earlier one."""
    _heavy: list[Outcome] = field(default_factory=list)
    """What does not fit, and was not relieved."""
    _smaller: Iterator[Variant] = field(init=False)
    """In more micro-batches than were tried."""
    price: float = 0.0
    """Of a byte, for which the best entry was found."""

    def __post_init__(self) -> None:
        known = (space.operators for space in self.contest.spaces.values())
        self.operators = next(known, OperatorSeconds(self.contest.prices))
        self._smaller = micro_variants(self.contest)
        self.price = self.contest.notes.sums.get(f"{self.contest.machine.name}: price", 0.0)

    def run(self) -> None:
        """Go through all levels; Enough when there is no time left."""
        mesh = self.contest.mesh
        self._hold_heavy(self.starts)
        heavy = list(self._heavy)
        self._relieve(_FIRST_RELIEF)
        if mesh.size == 1:
            self._accumulate()
            substitute_alone(self)
            return
        tight = self.contest.smallest is not None
        if tight and (self.contest.best is None or self.contest.best.entry.segments):
            self._accumulate(_FOR_MICRO_BATCHES)
            self._fit(self.cuts())
            self._accumulate()
            self._relieve()
        self._go_through(self.cuts(), OVERLAPS)
        if self.contest.best is None and not tight:  # only now something was found that keeps to the constraints
            self._fit(self.cuts())
        self._climb()
        best, heavy = self.contest.best, [*heavy, *self._heavy]
        if best is not None and any(outcome.seconds < self.contest.seconds_to_beat for outcome in heavy):
            self._mix(heavy)  # memory decides, though something fits without a price
            self._fit(self.promising()[:2])
        self._relieve()
        self._go_through(self.promising()[:2], _MORE_OVERLAPS)
        fresh = substitute(self)
        if fresh is not None:  # what is best on some units need not be so on others
            self._go_through(self.cuts(), OVERLAPS, fresh)
            self._climb(fresh)
            self._go_through(self.promising()[:2], _MORE_OVERLAPS, fresh)
        self._count()
        if len(mesh.axes) > 2:
            for start in self._worth_taking_up():
                self._take_up(start)
        self._relieve()
        if self.contest.memory_decides:
            for units in self.promising()[:2]:
                explore_front(self, self.variants[0], units, self.contest.share(_FIRST_RELIEF))
            relieve_front(self.contest, self.contest.share(_FIRST_RELIEF))
            self._accumulate(_FIRST_RELIEF)
            relieve_front(self.contest, self.contest.share(_FIRST_RELIEF))

    def _relieve(self, part: float = 1.0) -> None:
        """Have the fastest of what does not fit run some of it again, and what comes nearest to fitting; for a part of
        the time left.
        """
        left = self.contest.share(part)
        heavy = [outcome for outcome in self._heavy if outcome.seconds < self.contest.seconds_to_beat]
        by_seconds, by_peak = _unlike(sorted(heavy, key=_seconds)), sorted(heavy, key=_peak)
        self._heavy = []
        for outcome in _unlike((*by_seconds[:_RELIEVED], *by_peak[:1])):
            if outcome.seconds < self.contest.seconds_to_beat:
                self.contest.check(f"{outcome.entry.name}, some of it run again")
                relieve(self.contest, outcome, left)

    def _accumulate(self, part: float = 1.0) -> None:
        """Where memory is short, take the step in more and more micro-batches, as long as one of them is any faster,
        for a part of the time left; from those on that were tried."""
        best, left = self.contest.best, self.contest.share(part)
        if best is not None and not best.entry.segments and not self.contest.memory_decides:
            return
        while left() > 0 and (variant := next(self._smaller, None)) is not None:
            solved = (self._solve(variant, units) for units in self.cuts())
            found = [outcome for outcome in solved if outcome is not None]
            self._hold_heavy(found)
            self._relieve()
            known = enter_strategies(self.contest, variant)
            self._hold_heavy(known)
            self._relieve()
            found += known
            for units in self.cuts():
                explore_front(self, variant, units, left)
            if all(o.peak_bytes is None or o.seconds >= self.contest.seconds_to_beat for o in found):
                self._smaller = iter(())

    def _hold_heavy(self, found: Iterable[Outcome]) -> None:
        self._heavy += [outcome for outcome in found if _peak(outcome) > self.contest.capacity]

    def _solve(self, variant: Variant, units: Units) -> Outcome | None:
        """Enter the layouts of a variant with the least sum on units."""
        self.contest.check(f"{shown(units)} devices, {variant.steps} micro-batches")
        problem = self.stacked(variant, units, self.objective(OVERLAPS[0], self.price))
        if problem is None:
            return None
        solution = problem.solve()
        layouts, regathered = problem.layouts(solution)
        again = problem.segments(solution)
        return self.contest.enter(Entry(_name(units, variant), variant, layouts, regathered, again))

    def _go_through(self, some: Iterable[Units], overlaps: Sequence[float], fresh: Variant | None = None) -> bool:
        """Try units that were not tried, with all variants or a fresh one; whether anything better was found."""
        best, least = self.contest.best, min(self.sums.values(), default=0.0)
        for units in some:
            for overlap in overlaps if units else ():
                trial = f"{self.kinds_of(units)}, {overlap:g} hidden"
                if fresh is not None:
                    trial += f", {digest(fresh)}"
                if self.contest.is_new(trial):
                    found = self._try_all(units, self.objective(overlap), fresh)
                    self.contest.note(trial, min((outcome.seconds for outcome in found), default=inf))
                elif self.contest.noted(trial) < inf:
                    self.fastest[units] = min(self.contest.noted(trial), self.fastest.get(units, inf))
        return self.contest.best is not best or min(self.sums.values(), default=0.0) < least

    def _climb(self, fresh: Variant | None = None) -> None:
        """From the best two units on to their neighbours, as long as that helps."""
        mesh = self.contest.mesh
        while (found := self.promising()) and self._go_through(neighbours(found[0], mesh), OVERLAPS, fresh):
            pass

    def _count(self) -> None:
        """All axes instead of units, where they are alike and choices few enough."""
        mesh = self.contest.mesh
        if not axes_are_alike(mesh) or len(mesh.axes) < 2 or self.contest.constraints.fixed:
            return
        space = CountedSpace(mesh, self.operators)
        for overlap in (*OVERLAPS, *_MORE_OVERLAPS[:2]):
            for variant in self.variants:
                self.contest.check(f"{len(mesh.axes)} axes of {space.size} counted, {overlap:.0%} of gradients hidden")
                self.try_counted(variant, space, self.objective(overlap, self.price))

    def try_counted(self, variant: Variant, space: CountedSpace, objective: Objective) -> Outcome | None:
        """Solve a variant on counted axes, give them names, and enter what is found unless units do better."""
        upper = min((total for (_, other), total in self.sums.items() if other == objective), default=inf)
        try:
            problem = CountedProblem(variant.skeleton, space, objective, upper)
        except TooMany:
            return None
        solution = problem.solve()
        if solution.total > upper:
            return None
        named = name_axes(problem, solution)
        name = f"joint search, {space.num_axes} axes of {space.size}"
        outcome = self.contest.enter(Entry(name, variant, named.layouts, named.regathered))
        if self.contest.best is outcome:
            self.price = objective.seconds_per_byte
        return outcome

    def _worth_taking_up(self) -> list[Outcome]:
        """The best entry, those to start from that are not much slower, and the best variant on each units, then the
        second best."""
        best = self.contest.best
        if best is None:
            return []
        near = without_places([best, *self.starts])
        found = sorted((o for o in near if o.seconds < _HOPELESS * best.seconds), key=_seconds)
        first = [as_variant(best)] if near and near[0] is best else []
        by_units = [sorted(known.values(), key=_seconds) for known in self.entries.values()]
        places = range(max(map(len, by_units), default=0))
        others = [o for i in places for o in sorted((known[i] for known in by_units if i < len(known)), key=_seconds)]
        return [*first, *(o for o in found[:3] if o.entry.name != best.entry.name), *others[:_TAKEN_UP]]

    def _take_up(self, start: Outcome) -> None:
        """From an entry on to the best near it, as long as that helps and comes near the best of all."""
        mesh, price = self.contest.mesh, self.price
        best, better = start, True
        while better and self.contest.best is not None and best.seconds < _HOPELESS * self.contest.best.seconds:
            entry, better = best.entry, False
            natural, name = natural_units(entry.layouts.choices, mesh), digest(entry.variant, entry.layouts)
            for units in splits(natural, mesh, 3):
                for overlap in (*OVERLAPS, *_MORE_OVERLAPS[:2]):
                    trial = f"{self.kinds_of(units)}, {overlap:g} hidden, {price:g}, near {name}"
                    if not self.contest.is_new(trial):
                        continue
                    self.contest.check(f"{shown(units)} devices, near {entry.name}")
                    found = self.try_out(entry.variant, units, self.objective(overlap, price), entry.layouts)
                    self.contest.note(trial, found.seconds if found is not None else inf)
                    if found is not None and self._fits(found) and found.seconds < best.seconds:
                        best, better = found, True

    def _fits(self, outcome: Outcome) -> bool:
        return _peak(outcome) <= self.contest.capacity

    def _try_all(self, units: Units, objective: Objective, fresh: Variant | None = None) -> list[Outcome]:
        found = []
        for variant in self.variants if fresh is None else (fresh,):
            self.contest.check(f"{shown(units)} devices{_described(objective)}")
            outcome = self.try_out(variant, units, objective)
            found += [outcome] if outcome is not None else []
        return found

    def try_out(
        self, variant: Variant, units: Units, objective: Objective, near: Layouts | None = None
    ) -> Outcome | None:
        """Solve a variant on units, and enter what is found unless it is hopeless."""
        problem = self.problem(variant, units, objective, near) if near else self.stacked(variant, units, objective)
        if problem is None:
            return None
        solution = problem.solve()
        key, total = (units, objective), variant.steps * solution.total
        if near is None:
            self.sums[key] = min(total, self.sums.get(key, total))
        least = min((total for (_, other), total in self.sums.items() if other == objective), default=total)
        if total > _HOPELESS * least:
            return None
        layouts, regathered = problem.layouts(solution)
        again = problem.segments(solution)
        moved = states_on_host(variant) if objective.has_states_on_host else NOTHING_OFFLOADED
        entry = Entry(_name(units, variant), variant, layouts, regathered, again, moved, objective=objective)
        outcome = self.contest.enter(entry)
        if _peak(outcome) > self.contest.capacity:
            self._heavy.append(outcome)
        if near is None:
            self.fastest[units] = min(outcome.seconds, self.fastest.get(units, inf))
            known, name = self.entries.setdefault(units, {}), digest(variant)
            known[name] = min(outcome, known.get(name, outcome), key=_seconds)
        if self.contest.best is outcome:
            self.price = objective.seconds_per_byte
            self.contest.notes.sums[f"{self.contest.machine.name}: price"] = self.price
        return outcome

    def problem(
        self,
        variant: Variant,
        units: Units,
        objective: Objective,
        near: Layouts | None = None,
        *,
        with_dominated: bool = False,
    ) -> Problem | None:
        """The tables of a variant on units, within the constraints; None where nothing keeps to these there."""
        fixed = self.contest.constraints.roots(variant.skeleton) if self.contest.constraints.fixed else {}
        if fixed is None:
            return None
        try:
            space = self.space(units)
            return Problem(variant.skeleton, space, objective, near, with_dominated=with_dominated, fixed=fixed)
        except Impossible:
            return None

    def stacked(self, variant: Variant, units: Units, objective: Objective) -> Problem | StackProblem | None:
        """The same, with blocks that are equal worked out once where the model has a stack of them."""
        if self.contest.constraints.fixed:
            return self.problem(variant, units, objective)
        return folded_problem(variant.skeleton, self.space(units), objective)

    def cuts(self, num_units: int = 2) -> list[Units]:
        """The cuts of the axes that may be used, such that fixed layouts can be told on their units."""
        mesh = self.contest.mesh
        if mesh.size == 1:
            return []
        found, constraints = list(cuts(mesh, num_units)), self.contest.constraints
        return refined(found, mesh, constraints) if constraints.fixed else found

    def kinds_of(self, units: Units) -> str:
        """What units that differ only in the names of equal axes have in common; with fixed layouts none do."""
        if self.contest.constraints.fixed:
            return "|".join(" ".join(unit.axes) for unit in units)
        return kinds_text(units, self.contest.mesh)

    def objective(self, overlap: float, seconds_per_byte: float = 0.0) -> Objective:
        """What is counted, with the optimizer of the contest."""
        contest = self.contest
        return objective_on(contest.machine, contest.prices, contest.optimizer, overlap, seconds_per_byte)

    def space(self, units: Units) -> Space:
        """The tables on units, made once."""
        spaces = self.contest.spaces
        if units not in spaces:
            mesh, prices = self.contest.machine.mesh, self.contest.prices
            spaces[units] = Space(units, mesh, ReshardSeconds(units, mesh, prices), self.operators)
        return spaces[units]

    def _fit(self, candidates: list[Units]) -> None:
        """Raise the price of a byte until a plan fits; then find the lowest price at which one still does, and what
        lies between that plan and the one for a little less, which does not fit.

        After every price the units go on that came nearest to fitting.
        """
        contest = self.contest
        if contest.smallest is None:
            return
        first = _FIRST_PRICE * contest.smallest.seconds / contest.capacity
        heavy = self._price(candidates, _Prices(first, _LOWEST_PRICE * first, _HIGHEST_PRICE * first))
        host = host_seconds_per_byte(contest.machine, contest.prices)
        if contest.best is None or any(outcome.seconds < contest.seconds_to_beat for outcome in heavy):
            self._fit_by_host(candidates, host)
        self._mix(heavy)

    def _price(
        self, candidates: Sequence[Units], prices: _Prices, host: float = inf, part: float = 1.0
    ) -> list[Outcome]:
        """Look for the lowest price at which something fits, for a part of the time left; what was found on the way
        that does not fit."""
        contest, price, left = self.contest, prices.first, self.contest.share(part)
        low, high, peaks, heavy = 0.0, inf, list[int](), list[Outcome]()
        for _ in range(_MEMORY_STEPS):
            if left() <= 0:
                break
            objective = replace(self.objective(OVERLAPS[0], price), host_seconds_per_byte=host)
            tried = {units: self._try_all(units, objective) for units in candidates}
            found = [outcome for outcomes in tried.values() for outcome in outcomes]
            candidates = sorted(candidates, key=lambda units: min(map(_peak, tried[units]), default=inf))[:3]
            heavy += [outcome for outcome in found if _peak(outcome) > contest.capacity]
            if any(_peak(outcome) <= contest.capacity for outcome in found):
                high = price
                if price < 1.5 * low or price <= prices.lowest:
                    break
                price = max((price * low) ** 0.5 if low else price / 4, prices.lowest)
            else:
                peaks.append(min(map(_peak, found), default=0))
                if price > prices.highest:
                    break
                further = 16 if len(peaks) > 1 and peaks[-1] >= peaks[-2] else 4
                low, price = price, (price * high) ** 0.5 if high < inf else further * price
        return heavy

    def _fit_by_host(self, candidates: Sequence[Units], host: float) -> None:
        """The same with what the optimizer remembers on the host, for prices above what that takes; of what is found as
        little is left there as is enough."""
        contest, left = self.contest, self.contest.share(_FIRST_RELIEF)
        if host == inf:
            return
        prices = _Prices(_ABOVE * host, _ABOVE * host, _HIGHEST_PRICE * host)
        heavy = self._price(candidates[:1], prices, host, _FIRST_RELIEF / 2)
        best = [contest.best] if contest.best is not None and contest.best.entry.offloads else []
        for outcome in (*best, *_unlike(sorted(heavy, key=_peak))[:_RELIEVED]):
            if contest.best is None or outcome.seconds <= contest.best.seconds:
                plain = replace(outcome.entry, offloads=NOTHING_OFFLOADED)
                relieve_by_host(contest, plain, outcome.simulation.program, left)

    def _mix(self, heavy: Sequence[Outcome]) -> None:
        """Enter what lies between the best plan and faster ones that do not fit."""
        best, left = self.contest.best, self.contest.share(_FIRST_RELIEF)
        if best is None:
            return
        light = as_variant(best)
        graph = light.entry.variant.graph
        alike = [outcome for outcome in map(as_variant, heavy) if outcome.entry.variant.graph is graph]
        for outcome in sorted(alike, key=_seconds)[:_RELIEVED]:
            if outcome.seconds < self.contest.least_seconds:
                mix(self.contest, light, outcome, left)

    def promising(self) -> list[Units]:
        """Units by the best entry that was found on them."""
        return sorted(self.fastest, key=self.fastest.__getitem__)


def _seconds(outcome: Outcome) -> float:
    return outcome.seconds


def _peak(outcome: Outcome) -> int:
    """Bytes at the peak; none where they were not asked: such an entry is slower than one that fits."""
    return outcome.peak_bytes or 0


def _unlike(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those of which no earlier one takes as many seconds and bytes."""
    return list({(outcome.seconds, outcome.peak_bytes): outcome for outcome in reversed([*outcomes])}.values())[::-1]


def _name(units: Units, variant: Variant) -> str:
    parts = f", {variant.steps} micro-batches" if variant.steps > 1 else ""
    return f"joint search, {shown(units)}{parts}"


def _described(objective: Objective) -> str:
    if objective.seconds_per_byte:
        return f", a GiB worth {objective.seconds_per_byte * 2**30 * 1e3:.3g} ms"
    return f", {objective.overlap:.0%} of gradients hidden"
