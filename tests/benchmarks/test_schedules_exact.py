"""A solver is asked for schedules that are faster than those found."""

from __future__ import annotations

import pytest

from benchmarks.schedules_exact import alike, drawn, faster, judge
from conjoin.schedules import Problem, Times, one_each

WAITED = [
    (2, 3, Times((1.5, 0.25), (1.5, 0.75), (0.75, 1.5), (2.0,), (0.25,)), (3, 2)),
    (2, 4, Times((1.5, 1.0), (0.25, 1.75), (1.75, 1.75), (0.75,), (1.5,)), (2, 2)),
    (2, 3, Times((1.25, 0.75), (2.0, 0.5), (0.5, 1.5), (2.0,), (1.5,)), (3, 2)),
    (3, 4, Times((0.5, 0.75, 0.25), (2.0, 1.5, 2.0), (0.5, 0.75, 1.75), (1.75, 1.5), (1.5, 0.75)), (4, 2, 2)),
]
"""Where weight gradients fill what a stage waits for its next forward: a bound that forgets them cuts the best away."""


@pytest.mark.parametrize("case", [*WAITED, *drawn(25, seed=1), *list(alike())[:24:8]])
def test_there_is_no_faster_schedule(case: tuple[int, int, Times, tuple[int, ...]]) -> None:
    row = judge(*case, seconds=20)
    assert row.proven and row.solver == "best"


def test_the_solver_finds_a_schedule_where_there_is_one() -> None:
    stages, num, times, limits = WAITED[0]
    best = judge(stages, num, times, limits, seconds=20).seconds
    pipeline = Problem.of(one_each(stages), num, times)
    assert str(faster(pipeline, limits, best + 0.25).check()) == "sat"
