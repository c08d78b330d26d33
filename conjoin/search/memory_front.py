"""What lies between fast plans that do not fit and small ones that are slow, where memory decides.

A price of a byte finds the corners of that front, and not all of them: its tables count what is held all the time, not
what is there for a moment, and parts of a model that are alike do the same for every price. So small models go on from
the corners: from every plan on the front to those that differ in one choice, in how one parameter is stored or in what
one block runs again, and from what they add to the front again. Where that leads no further, an operator is laid out
otherwise together with what is next to it, which alone would be worse (`explore_front`).

Which plan of the front is the fastest once it fits is not to be seen from either figure: what is held all the time can
lie on the host or be made again, what is there for a moment cannot. So a plan that can be made to fit stays beside
faster and smaller ones that cannot (`Heavy.beats`), and all are relieved that are faster than the best so far
(`relieve_front`, `relief.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Heavy, Variant, add_to_front
from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.neighbours import Following
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.space import LEAST_PRICE, OVERLAPS
from conjoin.search.exact.units import Units, shown
from conjoin.search.relief import relieve

if TYPE_CHECKING:
    from conjoin.search.joint import JointSearch

Values = tuple[int, ...]
"""Of the variables of a problem."""
MAX_OPERATORS = 64
"""Of a model that is explored: every neighbour is simulated, and larger ones have more than can be."""
_PRICES = (1.0, 1e3)
"""Of a byte, in steps for a device's memory: of the corners to begin from besides the fastest."""


def relieve_front(contest: Contest, left: Callable[[], float]) -> None:
    """Relieve what is faster than the best but does not fit, the fastest first; while nothing fits the smallest."""
    while left() > 0 and (new := [heavy for heavy in contest.front if _is_worth(contest, heavy)]):
        heavy = min(new, key=lambda heavy: heavy.peak_bytes if contest.best is None else heavy.seconds)
        contest.tell(f"{heavy.outcome.entry.name}, some of it run again or on the host")
        relieve(contest, heavy.outcome, left)


def _is_worth(contest: Contest, heavy: Heavy) -> bool:
    return heavy.seconds < contest.least_seconds and heavy.outcome.entry not in contest.relieved


def explore_front(search: JointSearch, variant: Variant, units: Units, left: Callable[[], float]) -> None:
    """Enter neighbours of what is on the front of a variant on units, as long as they add to it."""
    contest = search.contest
    if len(variant.skeleton.operators) > MAX_OPERATORS or contest.smallest is None:
        return
    first = contest.smallest.seconds / contest.capacity
    objectives = [search.objective(OVERLAPS[0], price) for price in (LEAST_PRICE, *(p * first for p in _PRICES))]
    made = (search.problem(variant, units, objective, with_dominated=True) for objective in objectives)
    problems = [problem for problem in takewhile(lambda _: left() > 0, made) if problem is not None]
    if problems:
        _Front(contest, variant, problems, f"joint search, {shown(units)}", left).go()


@dataclass
class _Front:
    """A front under way."""

    contest: Contest
    variant: Variant
    problems: Sequence[Problem]
    """The same variables, for several prices of a byte."""
    name: str
    left: Callable[[], float]
    known: set[Values] = field(default_factory=set)
    """What was entered."""
    points: dict[Heavy, Values] = field(default_factory=dict)
    """What none of the others beats."""

    def go(self) -> None:
        """From plan to plan; in larger steps from where small ones lead no further."""
        for problem in self.problems:
            self._enter(problem.solve().values)
        small, large = set[Heavy](), set[Heavy]()
        while self.left() > 0:
            if nearest := self._nearest(small):
                self._enter_all(self._neighbours(self.points[nearest]))
                small.add(nearest)
            elif nearest := self._nearest(large):
                self._enter_all(self._followed(self.points[nearest]))
                large.add(nearest)
            else:
                return
        self.contest.cut_short = True

    def _nearest(self, done: Set[Heavy]) -> Heavy | None:
        """Of what may still win that which comes nearest to fitting for its seconds."""
        new = (point for point in self.points if point not in done and self._may_win(point.seconds))
        return min(new, key=lambda p: p.seconds * max(1.0, p.peak_bytes / self.contest.capacity), default=None)

    def _enter_all(self, some: Iterable[Values]) -> None:
        for values in some:
            if self.left() <= 0:
                return
            self._enter(values)

    def _may_win(self, seconds: float) -> bool:
        return seconds < self.contest.seconds_to_beat

    def _neighbours(self, values: Values) -> Iterator[Values]:
        """What differs in one value."""
        for variable in (found for found in range(len(values)) if found not in self.hubs):
            for value in range(self.problems[0].sizes[variable]):
                yield (*values[:variable], value, *values[variable + 1 :])

    def _followed(self, values: Values) -> Iterator[Values]:
        """What differs in the choice of an operator, and in what is next to it as it is then best, by each price."""
        for problem in self.problems:
            tables = Following(problem)
            for position in range(problem.num_operators):
                for value in range(problem.sizes[position]):
                    yield from tables.follow(values, position, value)

    @cached_property
    def hubs(self) -> set[int]:
        """How a tensor comes to its readers is no layout."""
        return {self.problems[0].variable[root] for root in self.problems[0].hubs}

    def _enter(self, values: Values) -> None:
        laid_out = tuple(value for variable, value in enumerate(values) if variable not in self.hubs)
        if laid_out in self.known:
            return
        self.known.add(laid_out)
        self.contest.check(f"{self.name}, near what does not fit")
        solution = Solution(values, 0.0, is_exact=False)
        layouts, regathered = self.problems[0].layouts(solution)
        entry = Entry(self.name, self.variant, layouts, regathered, self.problems[0].segments(solution))
        found = self.contest.enter(entry)
        if found.peak_bytes is not None:  # else it is slower than the best
            front = add_to_front(list(self.points), self.contest.weigh(found))
            self.points = {point: self.points.get(point, values) for point in front}
