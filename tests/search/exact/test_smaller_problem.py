"""A problem that was made smaller has the same least sum, and what was remembered for it stays within its bytes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from conjoin.search.exact import elimination_order as orders
from conjoin.search.exact.elimination import MAX_ENTRIES, solve
from conjoin.search.exact.elimination_order import find_order
from conjoin.search.exact.smaller_problem import reduce
from conjoin.search.exact.tables import Factor, Tables
from tests.cases import each_of
from tests.search.exact.test_elimination import random_problem, total


def unrolled(
    layers: int, steps: int, seed: int = 0, cell: int = 3, stored: int = 3
) -> tuple[list[int], list[Factor], Tables]:
    """Cells in a grid of layers and steps; every layer has two weights that are alike, read at every step."""
    rng, tables = np.random.default_rng(seed), Tables()
    cells = {at: n for n, at in enumerate(product(range(steps), range(layers)))}
    sizes = [cell] * len(cells) + [stored] * (2 * layers)
    down, on, own = rng.random((cell, cell)), rng.random((cell, cell)), rng.random(cell)
    factors = [Factor((n,), tables.named("own", own)) for n in cells.values()]
    for layer in range(layers):
        read, storing = rng.random((stored, cell)), rng.random(stored)
        for twin in range(2):
            weight = len(cells) + 2 * layer + twin
            factors.append(Factor((weight,), tables.named(("storing", layer, twin), storing)))
            for step in range(steps):
                name = "read", layer, twin
                factors.append(Factor((weight, cells[step, layer]), tables.named(name, read.copy())))
    for (step, layer), n in cells.items():
        if layer + 1 < layers:
            factors.append(Factor((n, cells[step, layer + 1]), tables.named("down", down)))
        if step + 1 < steps:
            factors.append(Factor((n, cells[step + 1, layer]), tables.named("on", on)))
    return sizes, factors, tables


@each_of(range(150))
def test_the_least_sum_stays(seed: int) -> None:
    sizes, factors, tables = random_problem(seed)
    reduced = reduce(sizes, factors, tables)
    found = solve(reduced.sizes, reduced.factors, tables)
    least = min(total(factors, values) for values in product(*map(range, sizes)))
    assert found.total == pytest.approx(least, abs=1e-12)
    assert total(factors, reduced.restore(found.values)) == pytest.approx(least, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_twins_are_one_variable(seed: int) -> None:
    sizes, factors, tables = unrolled(2, 3, seed, cell=2, stored=2)
    reduced = reduce(sizes, factors, tables)
    assert reduced.twin_of[6:] == (6, 6, 8, 8)
    values = reduced.restore(solve(reduced.sizes, reduced.factors, tables).values)
    least = min(total(factors, tried) for tried in product(*map(range, sizes)))
    assert total(factors, values) == pytest.approx(least, abs=1e-12)


def test_variables_that_differ_in_one_table_are_no_twins() -> None:
    sizes, factors, tables = unrolled(1, 3)
    more = Factor((0, 3), tables.new(np.eye(3)))
    assert reduce(sizes, factors, tables).twin_of[4] == 3
    assert reduce(sizes, [*factors, more], tables).twin_of[4] == 4


def test_dominated_values_are_left_out_and_then_those_they_alone_suited() -> None:
    tables = Tables()
    dear, suits = np.array([0.0, 9.0]), np.array([[1.0, 3.0], [5.0, 0.0]])
    reduced = reduce([2, 2], [Factor((0,), tables.new(dear)), Factor((0, 1), tables.new(suits))], tables)
    assert reduced.sizes == (1, 1) and reduced.restore((0, 0)) == (0, 0)


def test_impossible_values_are_left_alone_or_out() -> None:
    tables = Tables()
    table = np.array([[np.inf, 1.0], [np.inf, 2.0], [0.5, np.inf]])
    factors = [Factor((0, 1), tables.new(table)), Factor((1,), tables.new(np.array([1.0, 0.0])))]
    reduced = reduce([3, 2], factors, tables)
    found = solve(reduced.sizes, reduced.factors, tables)
    assert found.total == 1.0 and reduced.restore(found.values) == (0, 1)


def test_wide_problems_are_reduced_and_solved_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, factors, tables = unrolled(2, 6)
    plain = solve(sizes, factors, tables)
    monkeypatch.setattr(orders, "WIDE", 1)
    found = solve(sizes, factors, tables)
    assert plain.is_exact and found.is_exact
    assert found.total == pytest.approx(plain.total, rel=1e-12)
    assert total(factors, found.values) == pytest.approx(plain.total, rel=1e-12)


def test_forty_steps_are_solved_exactly_where_all_tables_would_be_too_large() -> None:
    sizes, factors, tables = unrolled(4, 40, cell=2, stored=6)
    order = find_order(sizes, [factor.variables for factor in factors])
    assert max(order.entries) > MAX_ENTRIES
    found = solve(sizes, factors, tables)
    assert found.is_exact and total(factors, found.values) == pytest.approx(found.total, rel=1e-12)


def test_what_is_remembered_stays_within_its_bytes() -> None:
    sizes, factors, _ = unrolled(3, 10)
    tables, most = Tables(max_bytes=1 << 14), 0
    inside = [Factor(f.variables, tables.named(f.table.number, f.table.values)) for f in factors]
    for _ in range(3):
        found = solve(sizes, inside, tables)
        most = max(most, tables.remembered_bytes)
    known = sum(t.values.nbytes for t in tables._made.values())
    known += sum(t.values.nbytes + best.nbytes for t, best in tables._minima.values())
    assert 0 < most <= 1 << 14 and known <= 2 << 14
    assert found.total == pytest.approx(solve(*unrolled(3, 10)).total, rel=1e-12)


def test_what_is_best_where_takes_a_byte_where_that_is_enough() -> None:
    tables = Tables()
    table = tables.new(np.random.default_rng(0).random((5, 4)))
    assert tables.minimum([((0, 1), table)], (5, 4))[1].dtype == np.uint8
    large = tables.new(np.random.default_rng(0).random((600, 1000)))
    least, best = tables.minimum([((0, 1), large)], (600, 1000))
    assert best.dtype == np.uint16
    assert (least.values == large.values.min(axis=0)).all() and (best == large.values.argmin(axis=0)).all()


@pytest.mark.parametrize("turn", [orders._by_degree, orders._by_entries, orders._hubs_last])
def test_every_order_names_every_variable_once(turn: orders._Turn) -> None:
    sizes, factors, _ = unrolled(2, 5)
    order = orders._Trial(sizes, [factor.variables for factor in factors], turn).run()
    assert sorted(order.variables) == list(range(len(sizes))) and len(order.entries) == len(sizes)


def test_on_an_unrolled_network_hubs_come_last() -> None:
    sizes, factors, _ = unrolled(4, 40)
    scopes = [factor.variables for factor in factors]
    late, usual = (orders._Trial(sizes, scopes, turn).run() for turn in (orders._hubs_last, orders._by_degree))
    assert set(late.variables[:120]).isdisjoint(range(160, 168))
    assert sum(late.entries) < sum(usual.entries) / 4 and find_order(sizes, scopes) == late
