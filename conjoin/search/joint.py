"""The joint search: rewrites, layouts of every operator and storage of every parameter together.

1. *Two units.* For every cut of the mesh in two and every variant of the graph the layouts with the least sum of
   seconds are found exactly (`exact/problem.py`), for several guesses of how much of the parameters' communication is
   hidden, and judged by the timeline (`contest.py`).
2. *Near the best.* The best entries are taken up on three units, one of theirs cut in two: again exactly, but only
   over choices that agree with the entry on one unit at least; from what is found on, as long as that helps.
3. *Memory.* Where nothing fits, a byte is given a price, which is raised until something does, and lowered again
   while it still fits: the Lagrangian of the memory limit. Besides, the fastest of what does not fit is relieved: some
   of it is run again in the backward pass (`relieving.py`), and steps are taken in micro-batches
   (`micro_batches.py`).

Variants are what named strategies rewrite and what substitutions give (`variants.py`). Since the layouts of a variant
are solved exactly, the best variant is found together with its best layouts, never before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch

from conjoin.ops import TensorType
from conjoin.search.contest import Contest, Entry, Outcome, Variant
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.problem import Objective, Problem, Space
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.units import Units, canonical, cuts, natural_units, neighbours, splits
from conjoin.search.micro_batches import enter_strategies, micro_variants
from conjoin.search.relieving import relieve
from conjoin.search.rewrites import Backtracking, Way
from conjoin.search.variants import as_variant
from conjoin.sim import OPTIMIZER_COPIES, Layouts

OVERLAPS = (0.6, 0.0)
"""Parts of the parameters' communication that are taken to be hidden; the timeline then tells what really is."""
_MORE_OVERLAPS = (0.8, 0.3, 0.9, 1.0)
"""Tried where it looks best."""
_HOPELESS = 1.3
"""Solutions whose sum is larger than the least by this factor are not simulated."""
_REWRITING = 0.3
"""The part of the time left that is spent on substitutions."""
_MEMORY_STEPS = 12
_RELIEVED = 3
"""How many entries that do not fit are relieved at a time."""
_FIRST_PRICE = 0.01
"""Of a byte, in steps for a device's memory."""


@dataclass
class JointSearch:
    """A joint search under way."""

    contest: Contest
    variants: Sequence[Variant]
    starts: Sequence[Outcome] = ()
    """Entries to take up on three units."""
    ways: tuple[Way, ...] = ()
    """Substitutions."""
    operators: OperatorSeconds = field(init=False)
    sums: dict[tuple[Units, Objective], float] = field(default_factory=dict)
    """The least sum on units for an objective, over all variants."""
    fastest: dict[Units, float] = field(default_factory=dict)
    """Seconds of the fastest entry on units, by the timeline."""
    _spaces: dict[Units, Space] = field(default_factory=dict)
    _tried: set[object] = field(default_factory=set)
    _heavy: list[Outcome] = field(default_factory=list)
    """What does not fit, and was not relieved."""
    _price: float = 0.0
    """Of a byte, for which the best entry was found."""

    def __post_init__(self) -> None:
        self.operators = OperatorSeconds(self.contest.prices)

    def run(self) -> None:
        """Go through all levels; Enough when there is no time left."""
        mesh = self.contest.machine.mesh
        self._heavy += [start for start in self.starts if _peak(start) > self.contest.capacity]
        self._relieve()
        if mesh.size == 1:
            self._accumulate()
            return
        if self.contest.best is None or self.contest.best.entry.segments:
            self._accumulate()
            self._fit(list(cuts(mesh, 2)))
            self._relieve()
        self._go_through(cuts(mesh, 2), OVERLAPS)
        self._climb()
        self._relieve()
        self._go_through(self._promising()[:2], _MORE_OVERLAPS)
        self._rewrite()
        if len(mesh.axes) > 2:
            for start in self._worth_taking_up():
                self._take_up(start)
        self._relieve()

    def _relieve(self) -> None:
        """Have the fastest of what does not fit run some of it again, and what comes nearest to fitting."""
        best = self.contest.best
        heavy = [outcome for outcome in self._heavy if best is None or outcome.seconds < best.seconds]
        by_seconds, by_peak = sorted(heavy, key=lambda o: o.seconds), sorted(heavy, key=_peak)
        self._heavy = []
        for outcome in {id(o): o for o in (*by_seconds[:_RELIEVED], *by_peak[:1])}.values():
            if self.contest.best is None or outcome.seconds < self.contest.best.seconds:
                self.contest.check(f"{outcome.entry.name}, some of it run again")
                relieve(self.contest, outcome)

    def _accumulate(self) -> None:
        """Where memory is short, take the step in more and more micro-batches, as long as one of them is any faster."""
        best = self.contest.best
        if best is not None and not best.entry.segments:
            return
        for variant in micro_variants(self.contest):
            found = enter_strategies(self.contest, variant)
            found += [self._solve(variant, units) for units in self._cuts()]
            self._heavy += [outcome for outcome in found if _peak(outcome) > self.contest.capacity]
            self._relieve()
            if all(outcome.peak_bytes is None for outcome in found):
                return

    def _cuts(self) -> list[Units]:
        mesh = self.contest.machine.mesh
        return [units for units in cuts(mesh, 2) if units] if mesh.size > 1 else []

    def _solve(self, variant: Variant, units: Units) -> Outcome:
        """Enter the layouts of a variant with the least sum on units."""
        self.contest.check(f"{shown(units)} devices, {variant.steps} micro-batches")
        problem = Problem(variant.skeleton, self.space(units), self.objective(OVERLAPS[0], self._price))
        layouts, regathered = problem.layouts(problem.solve())
        return self.contest.enter(Entry(_name(units, variant), variant, layouts, regathered))

    def _go_through(self, some: Iterable[Units], overlaps: Sequence[float]) -> bool:
        """Try units that were not tried; whether a better plan or a lower sum was found."""
        best, least = self.contest.best, min(self.sums.values(), default=0.0)
        for units in some:
            name = canonical(units, self.contest.machine.mesh)
            for overlap in overlaps if units else ():
                if (name, overlap) not in self._tried:
                    self._tried.add((name, overlap))
                    self._try_all(units, self.objective(overlap))
        return self.contest.best is not best or min(self.sums.values(), default=0.0) < least

    def _climb(self) -> None:
        """From the best two units on to their neighbours, as long as that helps."""
        mesh = self.contest.machine.mesh
        while (found := self._promising()) and self._go_through(neighbours(found[0], mesh), OVERLAPS):
            pass

    def _rewrite(self) -> None:
        """Substitutions in the best variant, as far as they lower the sum on its units: those that do are judged."""
        best, units = self.contest.best, self._promising()
        if best is None or not units or not self.ways:
            return
        objective = self.objective(OVERLAPS[0], self._price)
        enough = self.contest.time_left * (1 - _REWRITING)

        def seconds(variant: Variant) -> float:
            self.contest.check(f"substitutions, {shown(units[0])} devices")
            return variant.steps * Problem(variant.skeleton, self.space(units[0]), objective).solve().total

        work = Backtracking(seconds, self.ways, lambda: self.contest.time_left < enough)
        work.start(as_variant(best).entry.variant)
        least = work.best
        for variant, total in work.run():
            if total < least:
                least = total
                for overlap in OVERLAPS:
                    self.try_out(variant, units[0], self.objective(overlap, self._price))
                self.variants = (variant, *self.variants)

    def _worth_taking_up(self) -> list[Outcome]:
        """The best entry, and those to start from that are not much slower."""
        best = self.contest.best
        if best is None:
            return []
        found = sorted((o for o in self.starts if o.seconds < _HOPELESS * best.seconds), key=lambda o: o.seconds)
        return [as_variant(best), *(o for o in found[:3] if o.entry.name != best.entry.name)]

    def _take_up(self, start: Outcome) -> None:
        """From an entry on to the best near it, as long as that helps."""
        mesh, entry, price = self.contest.machine.mesh, start.entry, self._price
        done: set[object] = set()
        while True:
            natural = natural_units(entry.layouts.choices, mesh)
            best = None
            for units in splits(natural, mesh, 3):
                for overlap in (*OVERLAPS, *_MORE_OVERLAPS[:2]):
                    key = units, overlap, entry.name, id(entry)
                    if key in done:
                        continue
                    done.add(key)
                    self.contest.check(f"{shown(units)} devices, near {entry.name}")
                    found = self.try_out(entry.variant, units, self.objective(overlap, price), entry.layouts)
                    if found is not None and self.contest.best is found:
                        best = found
            if best is None:
                return
            entry = best.entry

    def _try_all(self, units: Units, objective: Objective) -> list[Outcome]:
        found = []
        for variant in self.variants:
            self.contest.check(f"{shown(units)} devices{_described(objective)}")
            outcome = self.try_out(variant, units, objective)
            found += [outcome] if outcome is not None else []
        return found

    def try_out(
        self, variant: Variant, units: Units, objective: Objective, near: Layouts | None = None
    ) -> Outcome | None:
        """Solve a variant on units, and enter what is found unless it is hopeless."""
        problem = Problem(variant.skeleton, self.space(units), objective, near)
        solution = problem.solve()
        key, total = (units, objective), variant.steps * solution.total
        if near is None:
            self.sums[key] = min(total, self.sums.get(key, total))
        least = min((total for (_, other), total in self.sums.items() if other == objective), default=total)
        if total > _HOPELESS * least:
            return None
        layouts, regathered = problem.layouts(solution)
        outcome = self.contest.enter(Entry(_name(units, variant), variant, layouts, regathered))
        if _peak(outcome) > self.contest.capacity:
            self._heavy.append(outcome)
        if near is None:
            self.fastest[units] = min(outcome.seconds, self.fastest.get(units, inf))
        if self.contest.best is outcome:
            self._price = objective.seconds_per_byte
        return outcome

    def objective(self, overlap: float, seconds_per_byte: float = 0.0) -> Objective:
        """What is counted, with the optimizer of the contest."""
        prices = self.contest.prices
        many = TensorType((1 << 26,), torch.float32)
        update = prices.update([many], 0).value / many.bytes
        return Objective(overlap, seconds_per_byte, 2 + OPTIMIZER_COPIES[self.contest.optimizer], update)

    def space(self, units: Units) -> Space:
        """The tables on units, made once."""
        if units not in self._spaces:
            mesh, prices = self.contest.machine.mesh, self.contest.prices
            self._spaces[units] = Space(units, mesh, ReshardSeconds(units, mesh, prices), self.operators)
        return self._spaces[units]

    def _fit(self, candidates: list[Units]) -> None:
        """Raise the price of a byte until a plan fits; then find the lowest price at which one still does.

        After every price the units go on that came nearest to fitting.
        """
        contest = self.contest
        if contest.smallest is None:
            return
        price, low = _FIRST_PRICE * contest.smallest.seconds / contest.capacity, 0.0
        peaks: list[int] = []
        for _ in range(_MEMORY_STEPS):
            tried = {units: self._try_all(units, self.objective(OVERLAPS[0], price)) for units in candidates}
            found = [outcome for outcomes in tried.values() for outcome in outcomes]
            candidates = sorted(candidates, key=lambda units: min(map(_peak, tried[units]), default=inf))[:3]
            if any(_peak(outcome) <= contest.capacity for outcome in found):
                if low == 0.0 or price < 1.5 * low:
                    return
                price = (price * low) ** 0.5
            else:
                peaks.append(min(map(_peak, found), default=0))
                if len(peaks) > 2 and peaks[-1] >= peaks[-3]:
                    return
                low, price = price, 4 * price

    def _promising(self) -> list[Units]:
        """Units by the best entry that was found on them."""
        return sorted(self.fastest, key=self.fastest.__getitem__)


def _peak(outcome: Outcome) -> int:
    """Bytes at the peak; none where they were not asked: such an entry is slower than one that fits."""
    return outcome.peak_bytes or 0


def shown(units: Units) -> str:
    """The degrees of units, outermost first."""
    return "×".join(str(unit.degree) for unit in units)


def _name(units: Units, variant: Variant) -> str:
    parts = f", {variant.steps} micro-batches" if variant.steps > 1 else ""
    return f"joint search, {shown(units)}{parts}"


def _described(objective: Objective) -> str:
    if objective.seconds_per_byte:
        return f", a GiB worth {objective.seconds_per_byte * 2**30 * 1e3:.3g} ms"
    return f", {objective.overlap:.0%} of gradients hidden"
