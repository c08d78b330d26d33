"""Choices of all operators made into a solution: parameters and hubs, then on their own, take their best value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.problem import Problem


def settle(problem: Problem, values: Sequence[int]) -> Solution:
    """The best solution with given choices of the operators."""
    found = list(values)
    own = [factor for factor in problem.factors if max(factor.variables) < problem.num_operators]
    around: dict[int, list[int]] = {}
    for position, factor in enumerate(problem.factors):
        around.setdefault(max(factor.variables), []).append(position)
    total = sum(float(factor.table.values[tuple(values[v] for v in factor.variables)]) for factor in own)
    for variable in range(problem.num_operators, len(problem.sizes)):
        sums = np.zeros(problem.sizes[variable])
        for position in around.get(variable, ()):
            factor = problem.factors[position]
            at = tuple(slice(None) if v == variable else values[v] for v in factor.variables)
            sums = sums + factor.table.values[at]
        found.append(int(sums.argmin()))
        total += float(sums.min())
    return Solution(tuple(found), total, is_exact=False)
