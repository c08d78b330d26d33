"""Unity's search in three levels, and the search that it is compared with: first the graph, then the layouts.

Unity (section 5), as far as this space has it:

1. *Graph splitting* (5.3): where all paths go through one operator the graph is cut, in parts of ten operators or more.
   Over such a cut a tensor is split or whole, never copies or partial sums (`_cut`).
2. *Substitution selection* (5.1): variants of the graph, also those that the library's rules make of the best one, by
   their seconds; those slower than the best by more than a twentieth are dropped (`THRESHOLD`).
3. *Machine mappings* (5.2): sequence and parallel splits, by dynamic programming: that is what elimination does on
   them (`exact/elimination.py`). Branches run one after the other on all devices: the space has no disjoint ones.

Seconds are added up, nothing is hidden behind anything, and parameters are stored as they are used: the paper has no
other storage. What is found is judged by the timeline, as in every search.

`first_rewrite_then_walk` takes the variant that is fastest on one device, TASO's search over substitutions, and then
walks on its layouts, FlexFlow's (`walks.py`). `first_rewrite_then_lay_out` does the same with the layouts of the joint
search: what Unity compares itself with (section 6.4) to see what deciding together is worth, all else being equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from conjoin.search.baselines import baselines
from conjoin.search.branch_places import with_branches_aside
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome, Variant
from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.layout_codes import WHOLE, P, S, all_digits
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.tables import Factor
from conjoin.search.exact.units import Units
from conjoin.search.joint import JointSearch
from conjoin.search.papers.walks import walk_from_all
from conjoin.search.rewrites import Backtracking, RuleWay
from conjoin.search.substitutions import REWRITING
from conjoin.sim import Operator, Skeleton

THRESHOLD = 1.05
"""Unity, section 5.1: how much slower than the best a candidate may be."""
MIN_PART = 10
"""Operators between two cuts of the graph: Unity, section 6 (k = 10)."""

Array = NDArray[np.float64]


def search_in_levels(contest: Contest, variants: Sequence[Variant], ways: tuple[RuleWay, ...]) -> None:
    """Unity's search: the least sum of every variant on every cut of the mesh in two; the best are entered."""
    levels = _Levels(contest, variants)
    for units in levels.tables.cuts():
        for variant in variants:
            levels.solve(variant, units)
    if not levels.found:
        return
    best = levels.best()
    share, dropped = contest.share(REWRITING), contest.notes.dropped
    work = Backtracking(lambda variant: levels.solve(variant, best.units), ways, share, dropped=dropped)
    work.start(best.variant)
    deque(work.run(), maxlen=0)
    levels.enter()


@dataclass(frozen=True, slots=True)
class _Solved:
    """A variant on units, with the least sum."""

    variant: Variant
    units: Units
    problem: Problem
    solution: Solution


class _Levels:
    """What the levels have found so far."""

    def __init__(self, contest: Contest, variants: Sequence[Variant]) -> None:
        self.contest, self.tables = contest, JointSearch(contest, variants)
        self.found: list[_Solved] = []

    def solve(self, variant: Variant, units: Units) -> float:
        """The least sum of a variant on units."""
        self.contest.check("in levels")
        problem = self.tables.problem(variant, units, self.tables.objective(0.0), with_dominated=True)
        if problem is None:
            return inf
        _store_as_used(problem)
        for position in cut_positions(variant.skeleton):
            _cut(problem, position)
        solution = problem.solve()
        self.found.append(_Solved(variant, units, problem, solution))
        return solution.total

    def best(self) -> _Solved:
        """The one with the least sum of all."""
        return min(self.found, key=lambda solved: solved.solution.total)

    def enter(self) -> None:
        """Let the timeline judge those that are not much worse than the best, by their sums."""
        least = self.best().solution.total
        for solved in sorted(self.found, key=lambda solved: solved.solution.total):
            if solved.solution.total <= THRESHOLD * least:
                self.contest.check("in levels")
                layouts, regathered = solved.problem.layouts(solved.solution)
                self.contest.enter(Entry("in levels", solved.variant, layouts, regathered))


def cut_positions(skeleton: Skeleton) -> list[int]:
    """The operators at which a graph is cut: all paths go through them, and parts have ten operators at least."""
    found, furthest, last = [], -1, 0
    for position, operator in enumerate(skeleton.operators[:-1]):
        if furthest <= position and position + 1 - last >= MIN_PART and len(_read(skeleton, operator)) == 1:
            found.append(position)
            last = position + 1
        furthest = max(furthest, *(p for root in operator.makes for p, _ in skeleton.readers[root]), -1)
    return found


def _read(skeleton: Skeleton, operator: Operator) -> list[int]:
    """The tensors of an operator that others read."""
    return [root for root in operator.makes if skeleton.readers[root]]


def _cut(problem: Problem, position: int) -> None:
    """Over a cut the tensor is split or whole: a detour for whoever would read or make it otherwise."""
    skeleton, space = problem.skeleton, problem.space
    root = _read(skeleton, skeleton.operators[position])[0]
    type, readers = skeleton.roots[root].type, skeleton.readers[root]
    rank, output = len(type.shape), skeleton.operators[position].makes.index(root)
    digits = all_digits(rank, len(space.units))
    plain = np.flatnonzero(((digits == WHOLE) | (digits >= S)).all(axis=1))
    made = problem.choices[position].outputs[output]
    for reader, operand in readers:
        back = operand in skeleton.operators[reader].needs
        direct = space.between(type, back)
        detour = (direct[:, plain, None] + direct[None, plain, :]).min(axis=1)
        extra = np.maximum(0.0, detour - direct)
        values = extra[made[:, None], problem.choices[reader].operands[operand][None]]
        name = "cut", type, back, problem.kinds[position], output, problem.kinds[reader], operand
        problem.factors.append(Factor((position, reader), space.tables.named(name, values)))


def _store_as_used(problem: Problem) -> None:
    """Parameters are stored as their first reader uses them, whole where it uses copies."""
    skeleton, space = problem.skeleton, problem.space
    for root in problem.stored:
        leaf, type = skeleton.roots[root].leaf, skeleton.roots[root].type
        if leaf is None or not skeleton.readers[root] or root in problem.fixed:
            continue
        position, operand = skeleton.readers[root][0]
        digits = all_digits(len(type.shape), len(space.units))
        codes = problem.storages(root).codes
        stored = digits[codes]
        used = digits[problem.choices[position].operands[operand]]
        used = np.where(used <= P, WHOLE, used)
        values = np.where((stored[:, None] == used[None]).all(axis=-1), 0.0, np.inf)
        name = "stored as used", type, codes.tobytes(), problem.objective, problem.kinds[position], operand
        problem.factors.append(Factor((problem.variable[root], position), space.tables.named(name, values)))


def first_rewrite_then_walk(
    contest: Contest, variants: Sequence[Variant], ways: tuple[RuleWay, ...], seed: int
) -> None:
    """The variant that is fastest on one device, then FlexFlow's search from the named strategies for it."""
    walk_from_all(contest, _named_for(contest, fastest_on_one(contest, variants, ways)), seed)


def first_rewrite_then_lay_out(
    contest: Contest, variants: Sequence[Variant], ways: tuple[RuleWay, ...], seed: int
) -> None:
    """The variant that is fastest on one device, then the layouts of the joint search for it, and no other graph."""
    variant = fastest_on_one(contest, variants, ways)
    starts = _named_for(contest, variant)
    with_branches_aside(contest, lambda: JointSearch(contest, [variant], starts).run())
    if contest.best is not None:
        walk_from_all(contest, [contest.best, *starts], seed)


def fastest_on_one(contest: Contest, variants: Sequence[Variant], ways: tuple[RuleWay, ...]) -> Variant:
    """TASO's search: of the variants, and what substitutions make of them, the fastest on one device."""
    found = {id(variant): (contest.seconds_alone(variant), variant) for variant in variants}
    best, variant = min(found.values(), key=lambda item: item[0])
    work = Backtracking(contest.seconds_alone, ways, contest.share(REWRITING), dropped=contest.notes.dropped)
    work.start(variant)
    for changed, seconds in work.run():
        if seconds < best:
            best, variant = seconds, changed
    return variant


def _named_for(contest: Contest, variant: Variant) -> list[Outcome]:
    """The named strategies on a variant."""
    starts: list[Outcome] = []
    for name, entry in baselines(variant.graph, contest.machine):
        contest.check(name)
        if entry is not None:
            substitutions = (*variant.substitutions, *entry.variant.substitutions)
            made = replace(entry, name=name, variant=replace(entry.variant, substitutions=substitutions))
            starts.append(contest.enter(made))
    return starts
