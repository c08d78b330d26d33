"""Every combination of choices, one after the other: what the exact core is checked against."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np

from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.problem import Problem

MAX_COMBINATIONS = 2_000_000


def exhaust(problem: Problem) -> Solution:
    """The combination with the least sum, found by trying all.

    For given choices of the operators, parameters and hubs are on their own: each takes its best value.
    """
    num_operators = problem.num_operators
    count = prod(problem.sizes[:num_operators])
    assert count <= MAX_COMBINATIONS, f"{count:,} combinations would take too long"
    own = [factor for factor in problem.factors if max(factor.variables) < num_operators]
    others = range(num_operators, len(problem.sizes))
    around = {v: [factor for factor in problem.factors if v in factor.variables] for v in others}
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for values in product(*map(range, problem.sizes[:num_operators])):
        total = sum(float(factor.table.values[tuple(values[v] for v in factor.variables)]) for factor in own)
        rest = []
        for variable in others:
            sums = np.zeros(problem.sizes[variable])
            for factor in around[variable]:
                place = tuple(slice(None) if v == variable else values[v] for v in factor.variables)
                sums = sums + factor.table.values[place]
            rest.append(int(sums.argmin()))
            total += float(sums.min())
        best = min(best, (total, (*values, *rest)))
    return Solution(best[1], best[0], is_exact=True)
