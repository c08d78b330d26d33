"""Products in chunks on the timeline: worked out by hand, the same bytes, and a delta is the full simulation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from conjoin.sim import Phase, Prices, break_down, random_change, simulate
from tests.sim.conftest import tiny_graph
from tests.sim.test_accumulation import full
from tests.sim.test_simulation import assert_same


class Pair(nn.Module):
    """A layer that is split by columns, and one by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.relu(self.up(torch.sin(x))))
        return made


def pair() -> Graph:
    return capture(Pair().train(), (torch.randn(8, 8), torch.randn(8, 8)), nn.functional.mse_loss)


def spans(plan: Plan, prices: Prices, phase: Phase, *names: str) -> list[tuple[str, int, int]]:
    times = simulate(plan, prices).timeline.times()
    return [(task.name, int(a), int(b)) for task, a, b in times if task.phase is phase and task.name in names]


def test_sums_go_beside_the_product_of_the_next_chunk(prices: Prices) -> None:
    plan = make_plan(pair(), parse_machine("local:2"), "megatron:tp=2,chunks=4")
    found = spans(plan, prices, Phase.FORWARD, "linear", "all-reduce")
    products = [(a, b) for name, a, b in found if name == "linear"]
    sums = [(a, b) for name, a, b in found if name == "all-reduce"][-4 - 1 :][:4]
    assert len(products) == 1 + 4, "nothing is sent around the first layer forward: it goes at once"
    for (_, made), (start, _) in zip(products[1:], sums, strict=True):
        assert start >= made
    assert all(a == b for (_, a), (b, _) in pairwise(products[1:])), "nobody waits for a sum"


@pytest.mark.parametrize("flags", ["", ",sp"])
def test_less_is_exposed_and_as_much_is_sent(flags: str, prices: Prices) -> None:
    graph = tiny_graph("llama-8b", 4)
    cut = make_plan(graph, parse_machine("local:2"), f"megatron:tp=2{flags},chunks=2")
    one, two = (simulate(plan, prices).timeline for plan in (replace(cut, chunks=1), cut))
    sent = [sum(task.sent for fragment in timeline.fragments for task in fragment) for timeline in (one, two)]
    assert sent[0] == sent[1]
    assert break_down(two).exposed < break_down(one).exposed


def test_a_change_gives_what_a_simulation_from_the_beginning_gives(prices: Prices) -> None:
    plan = make_plan(tiny_graph("llama-8b", 4), parse_machine("local:4"), "megatron:tp=2,dp=2,sp,chunks=2")
    simulation, rng, made = simulate(plan, prices, unfold=True), Random(1), 0
    while made < 12:
        change = random_change(simulation.program, rng)
        if change is not None:
            made += 1
            simulation = simulation.change(change)
            assert_same(simulation, full(simulation))
