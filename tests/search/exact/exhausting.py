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

    For given choices of the operators, and of what is run again, parameters and hubs are on their own: each takes its
    best value.
    """
    first = [*range(problem.num_operators), *problem.modes.values()]
    count = prod(problem.sizes[v] for v in first)
    assert count <= MAX_COMBINATIONS, f"{count:,} combinations would take too long"
    own = [factor for factor in problem.factors if set(factor.variables) <= set(first)]
    others = [v for v in range(len(problem.sizes)) if v not in first]
    around = {v: [factor for factor in problem.factors if v in factor.variables] for v in others}
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for some in product(*(range(problem.sizes[v]) for v in first)):
        values = dict(zip(first, some, strict=True))
        total = sum(float(factor.table.values[tuple(values[v] for v in factor.variables)]) for factor in own)
        for variable in others:
            sums = np.zeros(problem.sizes[variable])
            for factor in around[variable]:
                place = tuple(slice(None) if v == variable else values[v] for v in factor.variables)
                sums = sums + factor.table.values[place]
            values[variable] = int(sums.argmin())
            total += float(sums.min())
        best = min(best, (total, tuple(values[v] for v in range(len(problem.sizes)))))
    return Solution(best[1], best[0], is_exact=True)
