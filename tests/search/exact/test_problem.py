"""The exact core finds what trying every combination finds, and its plans compute what the model computes."""

from __future__ import annotations

from random import Random

import pytest
import torch

from conjoin.ir import Graph, parse_graph
from conjoin.machine import Mesh, parse_machine
from conjoin.ops import ROUTED_EXPERTS, Call, Split, TensorType
from conjoin.search.exact.choices import OperatorSeconds, Task
from conjoin.search.exact.counted.space import CountedSpace
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.units import Units, cuts, make_unit
from conjoin.sim import take_graph_apart
from tests.cases import each_of
from tests.search.exact.exhausting import exhaust
from tests.search.prices import SlowDevices


def random_graph(rng: Random, num_operators: int) -> Graph:
    """A few products, sums and functions of one input, with sharing; the loss is a sum."""
    calls, values, weights = list[str](), ["input:x"], 0
    while len(calls) < num_operators:
        match rng.choice(("weights", "mm", "add", "relu", "t")):
            case "weights":
                call = f"mm({rng.choice(values)}, param:w{weights})"
            case "mm":
                call = f"mm({rng.choice(values)}, {rng.choice(values)})"
            case "add":
                call = f"add.Tensor({rng.choice(values)}, {rng.choice(values)}, alpha=1)"
            case function:
                call = f"{function}({values[-1]})"
        if call not in calls:
            weights += "param" in call
            values.append(f"%{len(calls)}")
            calls.append(call)
    lines = [f"%{i}: f32[8,8] = {call}" for i, call in enumerate(calls)]
    lines.append(f"%{num_operators}: f32[] = sum({values[-1]})")
    parameters = [f"param:w{i} f32[8,8] trainable" for i in range(weights)]
    head = ['graph "random" train', *parameters, "input:x f32[8,8]", "takes [input:x] in null"]
    return parse_graph("\n".join([*head, *lines, f"returns [%{num_operators}] in null loss 0", ""]))


def space_of(machine: str, units: Units | None = None, **prices: float) -> Space:
    mesh, slow = parse_machine(machine).mesh, SlowDevices(**prices)
    units = units or next(cuts(mesh, 2))
    return Space(units, mesh, ReshardSeconds(units, mesh, slow), OperatorSeconds(slow))


def assert_least(graph: Graph, space: Space, objective: Objective) -> None:
    skeleton, _ = take_graph_apart(graph)
    found = Problem(skeleton, space, objective).solve()
    tried = exhaust(Problem(skeleton, space, objective, with_dominated=True))
    assert found.is_exact and found.total == pytest.approx(tried.total, rel=1e-9)


@each_of(range(150))
def test_one_unit_is_as_good_as_trying_everything(seed: int) -> None:
    rng = Random(seed)
    link, price = 10 ** rng.uniform(5, 9), rng.choice((0.0, 1e-9, 1e-7))
    objective = Objective(overlap=rng.choice((0.0, 0.5)), seconds_per_byte=price, update_seconds=1e-8)
    assert_least(random_graph(rng, rng.randint(1, 4)), space_of("local:2", link=link), objective)


@each_of(range(60))
def test_two_units_are_as_good_as_trying_everything(seed: int) -> None:
    rng = Random(1000 + seed)
    assert_least(random_graph(rng, rng.randint(1, 2)), space_of("local:4", link=10 ** rng.uniform(5, 9)), Objective())


def test_dominated_choices_are_left_out() -> None:
    skeleton, _ = take_graph_apart(random_graph(Random(3), 4))
    space = space_of("local:4")
    few, all_of_them = Problem(skeleton, space, Objective()), Problem(skeleton, space, Objective(), with_dominated=True)
    assert sum(map(len, few.choices)) < sum(map(len, all_of_them.choices))
    assert few.solve().total == pytest.approx(all_of_them.solve().total, rel=1e-9)


def test_near_a_solution_nothing_worse_is_found() -> None:
    skeleton, _ = take_graph_apart(random_graph(Random(5), 4))
    mesh = parse_machine("local:8").mesh
    units = tuple(make_unit(mesh, (axis,)) for axis in mesh.names)
    space, coarse = space_of("local:8", units), space_of("local:8")
    before = Problem(skeleton, coarse, Objective())
    solution = before.solve()
    layouts, _ = before.layouts(solution)
    near = Problem(skeleton, space, Objective(), layouts).solve()
    whole = Problem(skeleton, space, Objective()).solve()
    assert whole.total <= near.total * (1 + 1e-9) and near.total <= solution.total * (1 + 1e-9)


def test_no_device_is_left_without_an_expert() -> None:
    """What rows are split by splits experts, too, over several units as well: two experts, two units of two devices."""
    rows, types = TensorType((8, 4), torch.float32), (TensorType((16, 4), torch.float32),)
    matrices = TensorType((2, 4, 12), torch.float32), TensorType((2, 6, 4), torch.float32)
    call = Call(ROUTED_EXPERTS, (rows, *matrices, TensorType((16,), torch.int64), 2, "silu", None))
    task = Task(call, types, (0, 1, 2), (False, True, True, False), of_weights=False)
    mesh = Mesh.of_nodes(2, 2)
    units = tuple(make_unit(mesh, (axis,)) for axis in mesh.names)
    choices = space_of("dgx-h100:2x2", units).choices(task, every_rule=True)
    legal = CountedSpace(Mesh.of_nodes(1, 4), OperatorSeconds(SlowDevices())).legal(task)
    for rules, picks in ((choices.rules, choices.picks), (legal.rules, legal.picks)):
        owning = [sum(rules[rule].operands[1] == Split(0) for rule in pick) for pick in picks.tolist()]
        assert max(owning) == 1
