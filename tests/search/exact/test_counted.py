"""Counting axes is as good as naming each: compared with trying every named combination, and with AutoDDL's grids."""

from __future__ import annotations

from itertools import product
from math import inf
from random import Random

import numpy as np
import pytest

from conjoin.comm import reshard, route_bytes
from conjoin.ir import Graph, parse_graph
from conjoin.machine import Machine, Mesh, parse_machine
from conjoin.ops import TensorType, make_layout
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.counted.alignments import TooMany, align
from conjoin.search.exact.counted.layouts import ascending, counted, counts_of, placements_of
from conjoin.search.exact.counted.named_layouts import name_axes
from conjoin.search.exact.counted.problem import CountedProblem
from conjoin.search.exact.counted.space import CountedSpace, axes_are_alike
from conjoin.search.exact.layout_codes import P, all_digits, base, placement_of
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.reshard_seconds import ReshardSeconds, find_moves
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.units import cuts, make_unit
from conjoin.sim import Skeleton, take_graph_apart
from tests.search.exact.test_problem import random_graph
from tests.search.prices import SlowDevices


def test_layouts_are_counted_and_told_again() -> None:
    digits = ascending(tuple(range(base(2))), 4)
    codes = counted(digits)
    assert len(np.unique(codes)) == len(codes) == 70
    assert (counts_of(codes, 2, 4).sum(axis=1) == 4).all()
    assert all((placements_of(int(code), 2, 4) == row).all() for code, row in zip(codes, digits, strict=True))


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_a_counted_reshard_is_the_cheapest_of_all_named_ones(num_axes: int) -> None:
    """Without latencies: every way to give the target's placements to axes, in the nesting that suits best."""
    space = CountedSpace(Mesh.of_nodes(1, 2**num_axes), OperatorSeconds(SlowDevices(latency=0.0)))
    digits, type = ascending(tuple(range(base(2))), num_axes), TensorType((64, 64), _F32)
    found = space.edge(type, True, counted(digits), counted(digits))
    every = all_digits(2, num_axes)
    ways, ones = np.full((num_axes, 1), 2.0), np.ones((num_axes, 1), np.int64)
    dual = np.array([0, 2, 1, 3, 4])
    for row, source in enumerate(digits):
        before = np.repeat(source[:, None], len(every), axis=1)
        there = space.curves.seconds(find_moves((before, every.T), 2, ways, ones), type.bytes)
        back = space.curves.seconds(find_moves((dual[every.T], dual[before]), 2, ways, ones), type.bytes)
        for column, code in enumerate(counted(digits)):
            named = (there + back)[counted(every) == code].min()
            assert found[row, column] == pytest.approx(named, rel=1e-9), (source, digits[column])


def test_what_goes_on_splitting_stays_and_little_is_lost() -> None:
    """On three axes nothing; on four a few pairs of layouts of a vector that become partial sums."""
    for rank, num_axes, lost in ((2, 3, 0), (1, 4, 3)):
        digits = ascending(tuple(range(base(rank))), num_axes)
        few, every = (align(counted(digits), counted(digits), rank, num_axes, 2, every=e) for e in (False, True))
        assert len(few.pairs) < len(every.pairs)
        space = CountedSpace(Mesh.of_nodes(1, 2**num_axes), OperatorSeconds(SlowDevices(latency=0.0)))
        type = TensorType((64,) * rank, _F32)
        some, least = (each.least(space.seconds(each, type, True)) for each in (few, every))
        worse = np.argwhere(some > least * (1 + 1e-9))
        assert len(worse) == lost and (some >= least * (1 - 1e-9)).all()
        assert all((digits[column] == P).any() for _, column in worse)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_on_one_axis_the_closed_form_has_the_bytes_of_the_route(rank: int) -> None:
    mesh, shape, digits = Mesh.of_nodes(1, 2), (8,) * rank, all_digits(rank, 1)
    for source, target in product(digits, digits):
        layouts = [make_layout([("d0", placement_of(int(code[0])))]) for code in (source, target)]
        moves = find_moves((source[:, None], target[:, None]), rank, np.array([[2.0]]), np.array([[1]]))
        sent = float((moves.sent * (moves.groups > 0)).sum()) * 8**rank
        assert sent == pytest.approx(route_bytes(reshard(shape, layouts[0], layouts[1], mesh), 1, mesh)), layouts


def random_tree(rng: Random, num_operators: int) -> Graph:
    """Products, functions and sums of what nobody else reads; each product has weights of its own."""
    calls, free, weights = list[str](), ["input:x"], 0
    for place in range(num_operators):
        match rng.choice(("weights", "weights", "relu", "t")):
            case "weights":
                call, weights = f"mm({free.pop()}, param:w{weights})", weights + 1
            case function:
                call = f"{function}({free.pop()})"
        free.append(f"%{place}")
        calls.append(call)
    lines = [f"%{i}: f32[8,8] = {call}" for i, call in enumerate(calls)]
    lines.append(f"%{num_operators}: f32[] = sum({free[-1]})")
    head = ['graph "tree" train', *(f"param:w{i} f32[8,8] trainable" for i in range(weights)), "input:x f32[8,8]"]
    return parse_graph(
        "\n".join([*head, "takes [input:x] in null", *lines, f"returns [%{num_operators}] in null loss 0", ""])
    )


def least_by_names(skeleton: Skeleton, mesh: Mesh, prices: SlowDevices, objective: Objective) -> float:
    """The least sum with a unit for every axis."""
    units = tuple(make_unit(mesh, (axis,)) for axis in mesh.names)
    space = Space(units, mesh, ReshardSeconds(units, mesh, prices), OperatorSeconds(prices))
    return Problem(skeleton, space, objective, with_dominated=True).solve().total


@pytest.mark.parametrize("seed", range(40))
def test_on_trees_names_reach_the_counted_sum(seed: int) -> None:
    rng = Random(seed)
    prices = SlowDevices(link=10 ** rng.uniform(5, 9))
    mesh = Mesh.of_nodes(1, 2 ** rng.randint(2, 3))
    objective = Objective(rng.choice((0.0, 0.5)), rng.choice((0.0, 1e-7)), update_seconds=1e-8)
    skeleton, _ = take_graph_apart(random_tree(rng, rng.randint(1, 5)))
    problem = CountedProblem(skeleton, CountedSpace(mesh, OperatorSeconds(prices)), objective)
    solution = problem.solve()
    named = name_axes(problem, solution)
    assert solution.is_exact and named.total == pytest.approx(solution.total, rel=1e-9)
    assert solution.total <= least_by_names(skeleton, mesh, prices, objective) * (1 + 1e-9), "no nesting is fixed"
    if len(mesh.axes) == 2:
        bounded = CountedProblem(skeleton, problem.space, objective, upper=solution.total)
        assert bounded.solve().total == pytest.approx(solution.total, rel=1e-9)
        assert sum(bounded.sizes) <= sum(problem.sizes)


@pytest.mark.parametrize("seed", range(30))
def test_counted_is_never_more_than_named_and_names_are_found(seed: int) -> None:
    """With sharing, counting is a bound from below; with names it is a sum that a plan has."""
    rng = Random(seed)
    prices, mesh = SlowDevices(link=10 ** rng.uniform(5, 9)), Mesh.of_nodes(1, 4)
    skeleton, _ = take_graph_apart(random_graph(rng, rng.randint(2, 4)))
    problem = CountedProblem(skeleton, CountedSpace(mesh, OperatorSeconds(prices)), Objective())
    solution = problem.solve()
    named, least = name_axes(problem, solution), least_by_names(skeleton, mesh, prices, Objective())
    assert solution.total <= least * (1 + 1e-9)
    assert solution.total * (1 - 1e-9) <= named.total


def test_one_axis_counted_is_one_unit() -> None:
    prices, mesh = SlowDevices(), Mesh.of_nodes(1, 2)
    for seed in range(20):
        skeleton, _ = take_graph_apart(random_graph(Random(seed), 3))
        units = next(cuts(mesh, 1))
        space = Space(units, mesh, ReshardSeconds(units, mesh, prices), OperatorSeconds(prices))
        least = Problem(skeleton, space, Objective(seconds_per_byte=1e-8)).solve().total
        problem = CountedProblem(
            skeleton, CountedSpace(mesh, OperatorSeconds(prices)), Objective(seconds_per_byte=1e-8)
        )
        assert problem.solve().total == pytest.approx(least, rel=1e-9)


def test_meshes_of_one_kind_of_axes() -> None:
    machines = "piz-daint:128", "dgx-h100", "summit:4", "dgx-h100:2"
    assert [axes_are_alike(parse_machine(name).mesh) for name in machines] == [True, True, False, False]
    assert not axes_are_alike(Machine("six", 1, 6, "cpu").mesh)


def test_what_is_too_much_is_refused() -> None:
    codes = counted(ascending(tuple(range(base(4))), 6))
    with pytest.raises(TooMany):
        align(codes, codes, 4, 6, 2)


def test_a_bound_leaves_out_what_computes_things_twice() -> None:
    skeleton, _ = take_graph_apart(random_tree(Random(1), 4))
    space = CountedSpace(Mesh.of_nodes(1, 8), OperatorSeconds(SlowDevices(link=1e12)))
    free = CountedProblem(skeleton, space, Objective(), inf)
    bounded = CountedProblem(skeleton, space, Objective(), free.solve().total)
    assert sum(bounded.sizes[: bounded.num_operators]) < sum(free.sizes[: free.num_operators])
    assert bounded.solve().total == pytest.approx(free.solve().total, rel=1e-9)


_F32 = random_graph(Random(0), 1).leaves[-1].type.dtype
