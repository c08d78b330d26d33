"""The calls of every model of the zoo: each has a key and a price, and a sample of them can be measured."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from conjoin.comm import GradientFlow
from conjoin.cost import CostModel, Measurement, measure, read_key, write_key
from conjoin.ir import is_parallel, plain_call
from conjoin.machine import DeviceType
from conjoin.ops import Call
from tests.zoo.graphs import captured
from tests.zoo.workloads import tiny_names

CPU = DeviceType("one core", "cpu", 2**34, 1e10, (("float32", 1e11),))
GPU = DeviceType("one gpu", "cuda", 2**34, 1e12, (("float32", 1e13),))
COSTS = CostModel(profiles=())
MEASURED = 2


def calls_of(name: str) -> list[tuple[Call, tuple[int, ...]]]:
    graph = captured(name)
    gradients = GradientFlow(graph)
    return list(
        dict.fromkeys(
            (plain_call(node), tuple(i for i in range(len(node.inputs)) if gradients.reach_operand(node, i)))
            for node in graph.nodes
            if not is_parallel(node)
        )
    )


@cache
def check(call: Call, needs: tuple[int, ...]) -> None:
    """It has a key that can be read, and prices; models have many calls in common."""
    key = write_key(call, needs)
    assert " #" in key or read_key(key) is not None, key
    for device in (CPU, GPU):
        cost = COSTS.operator(call, needs, device)
        assert cost.forward.value >= 0 and (cost.backward.value == 0 or needs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", tiny_names())
def test_the_calls_of_a_model(name: str) -> None:
    calls = calls_of(name)
    assert any(needs for _, needs in calls)
    for call, needs in calls:
        check(call, needs)
    for call, needs in Random(name).sample(calls, min(MEASURED, len(calls))):
        outcome = measure(call, needs, "cpu", seconds=0.0)
        assert isinstance(outcome, Measurement), outcome
