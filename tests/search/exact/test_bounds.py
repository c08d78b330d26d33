"""Lower bounds: never above the least sum, equal to it where nothing is taken apart; and sums of given layouts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from conjoin.machine import parse_machine
from conjoin.ops import Split
from conjoin.search.exact.elimination import solve
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.relaxation import lower_bound
from conjoin.search.exact.space import Objective
from conjoin.search.exact.table_sum import sum_of
from conjoin.search.exact.tables import Factor, Tables
from conjoin.search.exact.units import make_unit
from conjoin.sim import take_graph_apart
from tests.cases import each_of
from tests.search.exact.test_elimination import random_problem
from tests.search.exact.test_problem import random_graph, space_of


@each_of(range(100))
def test_a_bound_is_never_above_the_least_sum(seed: int) -> None:
    sizes, factors, tables = random_problem(seed)
    least = solve(sizes, factors, tables).total
    for max_entries in (1, 4, 9, 27):
        assert lower_bound(sizes, factors, tables, max_entries).least <= least + 1e-12
    whole = lower_bound(sizes, factors, tables)
    assert whole.is_exact and whole.least == pytest.approx(least, abs=1e-12)


def test_a_bound_says_that_it_is_loose() -> None:
    tables, rng = Tables(), np.random.default_rng(0)
    pairs = [(a, b) for a, b in product(range(6), repeat=2) if a < b]
    factors = [Factor(pair, tables.named(pair, rng.random((5, 5)))) for pair in pairs]
    least = solve([5] * 6, factors, tables).total
    loose, near = lower_bound([5] * 6, factors, tables, 25), lower_bound([5] * 6, factors, tables, 625)
    assert not loose.is_exact and not near.is_exact and loose.least < near.least < least


@each_of(range(40))
def test_the_sum_of_a_solution_is_what_elimination_says(seed: int) -> None:
    rng = Random(seed)
    skeleton, _ = take_graph_apart(random_graph(rng, rng.randint(1, 5)))
    space = space_of(rng.choice(("local:2", "local:4")), link=10 ** rng.uniform(5, 9))
    objective = Objective(rng.choice((0.0, 0.5)), rng.choice((0.0, 1e-9, 1e-7)), update_seconds=1e-8)
    problem = Problem(skeleton, space, objective)
    solution = problem.solve()
    layouts, regathered = problem.layouts(solution)
    found = sum_of(skeleton, space, objective, layouts, regathered)
    assert found == pytest.approx(solution.total, rel=1e-9)
    everywhere = sum_of(skeleton, space, objective, take_graph_apart(skeleton.graph)[1])
    assert everywhere is not None and everywhere >= solution.total * (1 - 1e-12), "all devices do the same"


def test_layouts_that_units_cannot_tell_have_no_sum() -> None:
    skeleton, whole = take_graph_apart(random_graph(Random(0), 3))
    mesh = parse_machine("local:4").mesh
    together, apart = space_of("local:4", (make_unit(mesh, mesh.names),)), space_of("local:4")
    stored = next(i for i, root in enumerate(skeleton.roots) if root.leaf and root.leaf.kind.value == "param")
    layouts = replace(whole, leaves={**whole.leaves, stored: (("d0", Split(0)),)})
    assert sum_of(skeleton, together, Objective(), layouts) is None
    assert (sum_of(skeleton, apart, Objective(), layouts) or 0) > 0
