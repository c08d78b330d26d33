"""Elimination gives the least sum of tables: compared with trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from conjoin.search.exact.elimination import _Elimination, solve
from conjoin.search.exact.elimination_order import Order
from conjoin.search.exact.tables import Factor, Tables
from tests.cases import each_of


def random_problem(seed: int) -> tuple[list[int], list[Factor], Tables]:
    rng = np.random.default_rng(seed)
    num_variables = int(rng.integers(1, 7))
    sizes, tables = [int(n) for n in rng.integers(1, 4, num_variables)], Tables()
    factors = [Factor((v,), tables.named(("own", v), rng.random(sizes[v]))) for v in range(num_variables)]
    for a, b in product(range(num_variables), repeat=2):
        if a != b and rng.random() < 0.4:
            factors.append(Factor((a, b), tables.named((a, b), rng.random((sizes[a], sizes[b])))))
    return sizes, factors, tables


def total(factors: list[Factor], values: tuple[int, ...]) -> float:
    return float(sum(f.table.values[tuple(values[v] for v in f.variables)] for f in factors))


@each_of(range(200))
def test_the_least_sum_is_found(seed: int) -> None:
    sizes, factors, tables = random_problem(seed)
    found = solve(sizes, factors, tables)
    least = min(total(factors, values) for values in product(*map(range, sizes)))
    assert found.is_exact
    assert found.total == pytest.approx(least, abs=1e-12)
    assert total(factors, found.values) == pytest.approx(least, abs=1e-12)


@each_of(range(40))
def test_beyond_the_budget_a_solution_is_found_and_its_sum_told(seed: int) -> None:
    sizes, factors, tables = random_problem(seed)
    found = solve(sizes, factors, tables, max_entries=4)
    assert total(factors, found.values) == pytest.approx(found.total, abs=1e-12)
    assert found.total >= solve(sizes, factors, tables).total - 1e-12


def test_a_budget_that_is_too_small_is_told() -> None:
    tables, rng = Tables(), np.random.default_rng(0)
    pairs = [(a, b) for a, b in product(range(5), repeat=2) if a < b]
    factors = [Factor(pair, tables.named(pair, rng.random((4, 4)))) for pair in pairs]
    assert solve([4] * 5, factors, tables).is_exact
    assert not solve([4] * 5, factors, tables, max_entries=64).is_exact


def test_equal_layers_are_worked_out_once() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.random((5, 5)), rng.random((5, 5))

    def num_matrices(depth: int) -> int:
        """Tables of two variables that were made, in a stack of layers with two branches each."""
        tables, factors = Tables(), []
        for layer in range(depth):
            first, left, right, last = 3 * layer, 3 * layer + 1, 3 * layer + 2, 3 * layer + 3
            for branch in left, right:
                factors.append(Factor((first, branch), tables.named("in", one)))
                factors.append(Factor((branch, last), tables.named("out", other)))
        solve([5] * (3 * depth + 1), factors, tables)
        return sum(table.values.ndim == 2 for table, _ in tables._minima.values())

    assert num_matrices(40) == num_matrices(20)


def test_a_variable_with_more_neighbours_than_an_array_has_dims() -> None:
    """Those that have one value are left out of tables; others keep one where the budget allows no more."""
    tables, wants = Tables(), np.array([0.0, 1.0])
    for size in (1, 2):
        edge = tables.new(np.arange(3.0 * size).reshape(3, size))
        factors = [Factor((0, other), edge) for other in range(1, 100)]
        factors += [Factor((other,), tables.new(wants[:size])) for other in range(1, 100)]
        factors += [Factor((other, other + 1), tables.new(np.zeros((size, size)))) for other in range(1, 99)]
        hub_first = Order((0, *range(1, 100)), ())
        found = _Elimination([3] + [size] * 99, factors, tables, 1 << 12).run(hub_first)
        assert found.total == 0.0 and found.values == (0,) * 100
