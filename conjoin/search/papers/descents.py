"""Searches on the sum of seconds: `coordinate`, layer by layer, and `exhaustive`.

AutoDDL's coordinate descent (section 4.6) gives one layer after the other the best choice while all others stay

    s_i = argmin over s_i of  seconds([s_0 ... s_i ... s_L])                                   `Descent.improve`

until nothing improves, and begins anew elsewhere. A layer is an operator that reads parameters, these parameters, and
all operators up to the next such one. What is found is judged by the timeline, as in every search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from conjoin.errors import StrategyError
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Variant
from conjoin.search.exact.branch_and_bound import TooMany, branch_and_bound
from conjoin.search.exact.elimination import Solution, solve
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.settled_choices import settle
from conjoin.search.exact.space import OVERLAPS
from conjoin.search.exact.tables import Factor, Tables
from conjoin.search.joint import JointSearch

NUM_BEGINNINGS = 3
"""Places where a descent begins: every operator's own best choice, then random ones."""
MAX_AXES = 3
"""Axes of the mesh up to which all choices of an operator are gone through."""
_ROUNDING = 1e-9


def descend_everywhere(contest: Contest, variants: Sequence[Variant], seed: int) -> None:
    """Coordinate descent on every cut of the mesh in two, for every variant and guess of what is hidden."""
    rng, tables = Random(seed + contest.notes.rounds), JointSearch(contest, variants)
    contest.notes.rounds += 1
    for units in tables.cuts():
        for variant in variants:
            for overlap in OVERLAPS:
                contest.check("layer by layer")
                problem = tables.problem(variant, units, tables.objective(overlap))
                if problem is None:
                    continue
                found = [_descend(contest, problem, values) for values in _beginnings(problem, rng)]
                best = min(found, key=lambda solution: solution.total)
                layouts, regathered = problem.layouts(best)
                contest.enter(Entry("layer by layer", variant, layouts, regathered))


def _beginnings(problem: Problem, rng: Random) -> list[list[int]]:
    own = [int(choices.seconds.argmin()) for choices in problem.choices]
    sizes = problem.sizes[: problem.num_operators]
    return [own, *([rng.randrange(size) for size in sizes] for _ in range(NUM_BEGINNINGS - 1))]


def _descend(contest: Contest, problem: Problem, values: Sequence[int]) -> Solution:
    descent = Descent(problem, list(settle(problem, values).values))
    before = np.inf
    while (total := descent.total) < before - _ROUNDING * abs(total):
        before = total
        for layer in descent.layers:
            contest.check("layer by layer")
            descent.improve(layer)
    return Solution(tuple(descent.values), descent.total, is_exact=False)


@dataclass
class Descent:
    """A value of every variable, which gets better layer by layer."""

    problem: Problem
    values: list[int]
    layers: list[list[int]] = field(init=False)
    """The variables of each layer."""
    _around: list[list[Factor]] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = layers_of(self.problem)
        self._around = [[] for _ in self.values]
        for factor in self.problem.factors:
            for variable in factor.variables:
                self._around[variable].append(factor)

    @property
    def total(self) -> float:
        return sum(
            float(factor.table.values[tuple(self.values[v] for v in factor.variables)])
            for factor in self.problem.factors
        )

    def improve(self, layer: Sequence[int]) -> None:
        """The best values of a layer while all others stay."""
        positions = {variable: position for position, variable in enumerate(layer)}
        factors = {id(factor): factor for variable in layer for factor in self._around[variable]}
        tables, inside = Tables(), []
        for number, factor in enumerate(factors.values()):
            at = tuple(slice(None) if v in positions else self.values[v] for v in factor.variables)
            variables = tuple(positions[v] for v in factor.variables if v in positions)
            inside.append(Factor(variables, tables.named(number, factor.table.values[at])))
        found = solve([self.problem.sizes[v] for v in layer], inside, tables)
        for variable, value in zip(layer, found.values, strict=True):
            self.values[variable] = value


def layers_of(problem: Problem) -> list[list[int]]:
    """The variables of every layer: operators up to the next that reads parameters, with these, and what they share."""
    skeleton = problem.skeleton
    stored, shared = set(problem.stored), set(problem.hubs)
    layers: list[list[int]] = [[]]
    taken: set[int] = set()
    for position, operator in enumerate(skeleton.operators):
        parameters = [root for root in dict.fromkeys(operator.reads) if root in stored and root not in taken]
        taken.update(parameters)
        if parameters and layers[-1]:
            layers.append([])
        hubs = [root for root in operator.makes if root in shared]
        layers[-1] += [position, *(problem.variable[root] for root in (*parameters, *hubs))]
    return layers


def try_everything(contest: Contest, variants: Sequence[Variant]) -> None:
    """The least sum over all choices of all operators on the axes of the mesh, by branch and bound."""
    mesh = contest.mesh
    if len(mesh.axes) > MAX_AXES:
        raise StrategyError(
            f"All choices of {contest.captured.name} were to be gone through on {contest.machine.name}. Its mesh has "
            f"{len(mesh.axes)} axes, and that is done for at most {MAX_AXES}. Use the joint search, or fewer devices."
        )
    tables = JointSearch(contest, variants)
    for units in tables.cuts(len(mesh.axes)):
        for variant in variants:
            for overlap in OVERLAPS:
                contest.check("all choices")
                problem = tables.problem(variant, units, tables.objective(overlap))
                if problem is None:
                    continue
                try:
                    found = branch_and_bound(problem.sizes, problem.factors)
                except TooMany as error:
                    raise StrategyError(
                        f"All choices of {contest.captured.name} were to be gone through on {contest.machine.name}. "
                        f"{error.visited:,} combinations of some of its {problem.num_operators} operators were not "
                        f"enough. Use the joint search, fewer devices, or a smaller model."
                    ) from error
                layouts, regathered = problem.layouts(found)
                contest.enter(Entry("all choices", variant, layouts, regathered))
