"""The best schedule: as good as brute force finds, within memory, no worse than what others' tables are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product

import pytest

from benchmarks.schedules_torch import TABLES, compare, their_table
from conjoin.schedules import (
    Kind,
    Memory,
    Problem,
    Row,
    Schedule,
    Times,
    chain,
    check,
    find_schedule,
    looped,
    one_each,
    peaks,
    v_shaped,
)
from tests.schedules.slow_play import slow_seconds


@cache
def orders(num: int, apart: bool) -> tuple[tuple[tuple[Kind, int], ...], ...]:
    """Every order in which one owner of one stage can run its rows."""
    kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if apart else (Kind.FORWARD, Kind.BACKWARD)
    rows = [(kind, m) for kind in kinds for m in range(num)]
    steps = list(pairwise(kinds))

    def right(order: tuple[tuple[Kind, int], ...]) -> bool:
        return all(order.index((one, m)) < order.index((next_one, m)) for one, next_one in steps for m in range(num))

    return tuple(order for order in permutations(rows) if right(order))


def brute_force(problem: Problem) -> float:
    """The best of all orders of all owners."""
    best = float("inf")
    stages, num = len(problem.owners), problem.num_micro_batches
    for choice in product(orders(num, problem.apart), repeat=stages):
        rows = tuple(tuple(Row(kind, stage, m) for kind, m in order) for stage, order in enumerate(choice))
        schedule = Schedule(problem.owners, num, rows, problem.edges)
        held = peaks(schedule, problem.memory).held
        if all(mine <= limit for mine, limit in zip(held, problem.memory.limits, strict=True)):
            best = min(best, slow_seconds(schedule, problem.times))
    return best


TINY = [
    (2, 2, True, (2, 2), 0.0), (2, 2, True, (2, 1), 0.5), (2, 2, True, (1, 1), 2.0),
    (2, 3, False, (2, 1), 1.0), (3, 2, False, (2, 2, 2), 0.75), (3, 2, False, (2, 1, 1), 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "num", "apart", "limits", "transfer"), TINY)
def test_the_best_of_all_orders_is_found_and_said_to_be_proven(
    stages: int, num: int, apart: bool, limits: tuple[int, ...], transfer: float
) -> None:
    edges = chain(stages)
    uneven = Times(
        (1.0, 1.5, 0.5)[:stages], (1.0, 0.75, 2.0)[:stages], (0.5, 1.0, 1.0)[:stages], *[(transfer,) * len(edges)] * 2
    )
    for times in (uneven, Times.alike(stages, edges, transfer=transfer))[: 4 - num]:
        problem = Problem(one_each(stages), num, times, Memory.in_flight(stages, limits), edges, apart)
        found = find_schedule(problem)
        check(found.schedule, problem.memory)
        assert found.proven
        assert (
            found.seconds == pytest.approx(brute_force(problem)) == pytest.approx(slow_seconds(found.schedule, times))
        )


def test_what_is_kept_for_weight_gradients_alone_may_be_less() -> None:
    times = Times.alike(2, chain(2), (1.0, 1.0, 0.5), transfer=0.5)
    for limits in ((2.0, 2.0), (3.0, 3.0), (4.0, 2.5)):
        memory = Memory((2.0, 2.0), (1.0, 0.5), limits)
        problem = Problem.of(one_each(2), 2, times, memory)
        found = find_schedule(problem)
        check(found.schedule, memory)
        assert found.proven and found.seconds == pytest.approx(brute_force(problem))


@pytest.mark.parametrize("owners", [one_each(4), looped(2, 2), v_shaped(2)])
def test_never_below_its_bound_and_never_beyond_its_memory(owners: tuple[int, ...]) -> None:
    for limit, transfer in ((2, 0.5), (3, 0.0), (4, 1.0)):
        times = Times.alike(len(owners), chain(len(owners)), transfer=transfer)
        problem = Problem.of(owners, 5, times, Memory.in_flight(len(owners), [limit] * (max(owners) + 1)))
        found = find_schedule(problem, max_steps=300)
        check(found.schedule, problem.memory)
        assert found.seconds >= found.bound - 1e-9
        assert found == find_schedule(problem, max_steps=300), "the same question has the same answer"
        whole = find_schedule(replace(problem, apart=False), max_steps=300)
        assert found.seconds <= whole.seconds + 1e-9
        assert not any(row.kind is Kind.WEIGHT_GRADIENT for rows in whole.schedule.rows for row in rows)


@pytest.mark.parametrize(("kind", "stages_each"), TABLES, ids=[kind.__name__ for kind, _ in TABLES])
def test_never_behind_the_tables_of_torch_at_equal_memory(kind: type, stages_each: int) -> None:
    for owners, num in ((2, 4), (3, 6)):
        table = their_table(kind, owners, stages_each, num)
        for transfer in (0.0, 0.25, 1.0):
            row = compare(table, transfer, max_steps=1000)
            assert row.bound - 1e-9 <= row.ours <= row.theirs + 1e-9
