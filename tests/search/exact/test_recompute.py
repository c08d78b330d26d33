"""What is run again of blocks, decided with their layouts: against trying everything, and against the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import devices_of, parse_machine
from conjoin.search import Wish
from conjoin.search.certificate import certify
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Variant, make_variant
from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.stack import StackProblem
from conjoin.search.exact.table_sum import sum_of
from conjoin.search.joint import JointSearch
from conjoin.search.searches import open_contest
from conjoin.sim import gain_of
from tests.search.exact.exhausting import exhaust


class Block(nn.Module):
    """Two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.sin(self.up(x)))
        return y


class Row(nn.Module):
    """Blocks one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@cache
def row(depth: int, width: int, samples: int) -> Graph:
    with torch.device("meta"):
        model, batch = Row(depth, width).train(), (torch.randn(samples, width), torch.randn(samples, width))
    return capture(model, batch, nn.functional.mse_loss)


def contest_of(depth: int, width: int = 256, samples: int = 1 << 15) -> tuple[Contest, Variant]:
    graph = row(depth, width, samples)
    return open_contest(
        graph, devices_of(parse_machine("dgx-h100:1"), range(2)), CostModel(), Wish(optimizer="adam")
    ), make_variant(graph)


@pytest.mark.parametrize("price", [1e-13, 1e-9])
def test_least_over_layouts_and_what_is_run_again(price: float) -> None:
    contest, variant = contest_of(2)
    search = JointSearch(contest, [variant])
    problem = search.problem(variant, search.cuts()[0], search.objective(0.6, price))
    assert problem is not None
    found, every = problem.solve(), exhaust(problem)
    assert found.is_exact and found.total == pytest.approx(every.total, rel=1e-12)
    layouts, regathered = problem.layouts(found)
    told = sum_of(variant.skeleton, problem.space, problem.objective, layouts, regathered, problem.segments(found))
    assert told == pytest.approx(found.total, rel=1e-9)
    assert bool(problem.segments(found)) == (price > 1e-13)


def test_blocks_of_a_stack_choose_what_is_run_again() -> None:
    contest, variant = contest_of(12)
    search = JointSearch(contest, [variant])
    seen = set[int]()
    for price in (1e-13, 1e-9):
        objective = search.objective(0.6, price)
        stacked = search.stacked(variant, search.cuts()[0], objective)
        whole = search.problem(variant, search.cuts()[0], objective)
        assert isinstance(stacked, StackProblem) and whole is not None
        short, long = stacked.solve(), whole.solve()
        assert short.total == pytest.approx(long.total, rel=1e-9)
        again, skeleton = stacked.segments(short), variant.skeleton
        told = sum_of(skeleton, whole.space, objective, *stacked.layouts(short), again)
        assert told == pytest.approx(short.total, rel=1e-9)
        seen.add(len(again))
    assert min(seen) == 0 and max(seen) >= 12


def test_bytes_are_those_of_the_simulator() -> None:
    contest, variant = contest_of(3)
    search = JointSearch(contest, [variant])
    (units,) = search.cuts()[:1]
    objective = search.objective(0.6, 1e-12)
    recompute = objective.recompute(variant.skeleton)
    problem = search.problem(variant, units, search.objective(0.6))
    assert recompute is not None and problem is not None
    layouts, _ = problem.layouts(problem.solve())
    program = contest.simulate(Entry("some", variant, layouts)).program
    space, dear = search.space(units), replace(objective, seconds_per_byte=1.0, copies=0, update_seconds=0.0)
    sums = [sum_of(variant.skeleton, space, dear, layouts, (), some) for some in ((), recompute.modes[1][2])]
    assert sums[0] is not None and sums[1] is not None
    gain = gain_of(program, recompute.modes[1][2][0], "cuda")
    assert sums[0] - sums[1] == pytest.approx(gain.num_bytes, rel=1e-6)


def test_no_plan_takes_less_than_nothing_can_hide() -> None:
    contest, variant = contest_of(1, samples=1 << 17)
    search = JointSearch(contest, [variant])
    (units,) = search.cuts()
    problem = search.problem(variant, units, search.objective(0.0), with_dominated=True)
    assert problem is not None
    sizes = [1 if v >= problem.num_operators + len(problem.stored) else n for v, n in enumerate(problem.sizes)]
    outcomes = []
    for values in product(*map(range, sizes)):
        layouts, regathered = problem.layouts(Solution(values, 0.0, is_exact=True))
        outcomes.append(contest.enter(Entry("some", variant, layouts, regathered)))
    assert len(outcomes) > 100
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    told = certify(contest, best)
    assert told is not None and told.step == best.seconds
    assert 0.5 * best.seconds < told.least_step <= best.seconds
