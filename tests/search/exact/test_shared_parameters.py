"""A parameter that several operators read comes to a layout once, and unrolled networks are solved exactly."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

import zoo
from conjoin.frontends import capture
from conjoin.ir import Graph, parse_graph
from conjoin.search.exact import elimination_order
from conjoin.search.exact.elimination import _Elimination
from conjoin.search.exact.elimination_order import find_order
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.shared_parameters import MANY
from conjoin.search.exact.space import Objective
from conjoin.search.exact.table_sum import sum_of
from conjoin.sim import take_graph_apart
from tests.cases import each_of
from tests.search.exact.exhausting import exhaust
from tests.search.exact.test_problem import space_of


def chain(reads: int, size: int = 8) -> Graph:
    """One weight, by which an input is multiplied again and again."""
    lines, value = [], "input:x"
    for i in range(reads):
        lines.append(f"%{i}: f32[{size},{size}] = mm({value}, param:w)")
        value = f"%{i}"
    lines.append(f"%{reads}: f32[] = sum({value})")
    head = [f'graph "chain" train\nparam:w f32[{size},{size}] trainable\ninput:x f32[{size},{size}]']
    tail = f"returns [%{reads}] in null loss 0\n"
    return parse_graph("\n".join([*head, "takes [input:x] in null", *lines, tail]))


def random_tied(rng: Random) -> Graph:
    """Products with one of two weights, each read several times."""
    calls, values, count = list[str](), ["input:x"], rng.randint(2, 4)
    while len(calls) < count:
        weight = len(calls) if len(calls) < 2 else rng.randint(0, 1)
        call = f"mm({rng.choice(values)}, param:w{weight})"
        if call not in calls:
            values.append(f"%{len(calls)}")
            calls.append(call)
    lines = [f"%{i}: f32[8,8] = {call}" for i, call in enumerate(calls)]
    last = len(lines)
    lines.append(f"%{last}: f32[] = sum(%{last - 1})")
    head = ['graph "tied" train', "param:w0 f32[8,8] trainable", "param:w1 f32[8,8] trainable", "input:x f32[8,8]"]
    return parse_graph("\n".join([*head, "takes [input:x] in null", *lines, f"returns [%{last}] in null loss 0\n"]))


@each_of(range(60))
def test_with_shared_parameters_it_is_as_good_as_trying_everything(seed: int) -> None:
    rng = Random(seed)
    skeleton, _ = take_graph_apart(random_tied(rng))
    space = space_of("local:2", link=10 ** rng.uniform(5, 9))
    objective = Objective(rng.choice((0.0, 0.5)), rng.choice((0.0, 1e-9, 1e-7)), update_seconds=1e-8)
    found = Problem(skeleton, space, objective).solve()
    tried = exhaust(Problem(skeleton, space, objective, with_dominated=True))
    assert found.is_exact and found.total == pytest.approx(tried.total, rel=1e-9)


@pytest.mark.parametrize("reads", [2, 3, MANY, MANY + 1, 12])
def test_what_is_found_has_the_sum_that_is_told_of_its_layouts(reads: int) -> None:
    skeleton, _ = take_graph_apart(chain(reads, 64))
    space = space_of("local:4", link=1e8)
    for overlap, price in ((0.0, 0.0), (0.5, 0.0), (0.5, 1e-9)):
        problem = Problem(skeleton, space, Objective(overlap, price, update_seconds=1e-9))
        solution = problem.solve()
        layouts, regathered = problem.layouts(solution)
        told = sum_of(skeleton, space, problem.objective, layouts, regathered)
        assert told == pytest.approx(solution.total, rel=1e-9)


def test_a_gradient_is_summed_once_however_often_a_parameter_is_read() -> None:
    def seconds(reads: int) -> float:
        skeleton, _ = take_graph_apart(chain(reads, 64))
        problem = Problem(skeleton, space_of("local:2", link=1e6), Objective())
        root = problem.stored[0]
        split = [int(np.flatnonzero(c.operands[0] == 3)[0]) for c in problem.choices[:reads]]  # the rows of the input
        values, costs = [*split, 0], problem.storages(root).seconds.copy()
        for factor in problem.factors:
            if factor.variables[0] == problem.variable[root] and len(factor.variables) == 2:
                costs += factor.table.values[:, values[factor.variables[1]]]
        return float(costs.min())

    assert seconds(2) > 0 and seconds(12) == pytest.approx(seconds(2), rel=1e-9)


@pytest.mark.parametrize("model", ["rnnlm-2step:tiny", "rnnlm:tiny", "rnntc:tiny", "nmt:tiny"])
def test_unrolled_networks_reduced_have_the_same_least_sum(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = zoo.build(model, device="meta", batch_size=16)
    skeleton, _ = take_graph_apart(capture(built.model.train(), built.batch, built.loss))
    problem = Problem(skeleton, space_of("local:4", link=1e6), Objective(0.6, update_seconds=1e-9))
    scopes = [factor.variables for factor in problem.factors]
    plain = _Elimination(problem.sizes, problem.factors, problem.space.tables, 1 << 24).run(
        find_order(problem.sizes, scopes)
    )
    monkeypatch.setattr(elimination_order, "WIDE", 1)
    found = problem.solve()
    assert plain.is_exact and found.is_exact
    assert found.total == pytest.approx(plain.total, rel=1e-12)
