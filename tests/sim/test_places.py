"""Branches at places of an axis: exact times, folded as unfolded, delta as full, and the memory of every place."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import OperatorCost, Seconds, Source
from conjoin.frontends import capture
from conjoin.ir import Choice, Mark, Plan, check_plan, parallelize
from conjoin.ops import At, Call
from conjoin.search import make_plan
from conjoin.search.papers.walks import rule_at
from conjoin.sim import Change, Simulation, make_change, measure_memory, random_change, simulate
from tests.runtime.branch_plans import Towers, machine_of, towers_batch, with_towers
from tests.sim.conftest import RoundPrices
from tests.sim.test_simulation import assert_same, full


class TwoWays(nn.Module):
    """A tanh and a sine of the same tensor, added up."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.tanh() + x.sin()).sum()


class Units(RoundPrices):
    """A second for every operator and its backward, some for its host; a tenth for a collective."""

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        second = Seconds(1.0, Source.MEASURED)
        return OperatorCost(second, second, self.host, self.host)

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        return Seconds(0.1, Source.MEASURED)


def two_ways() -> Plan:
    """The tanh at the first place, the sine at the second, the rest everywhere."""
    graph = capture(TwoWays().eval(), (torch.randn(4, 4),))
    at = {"tanh": (("d0", At(0)),), "sin": (("d0", At(1)),)}
    choices = {node: Choice((at[node.op],), (at[node.op],)) for node in graph.nodes if node.op in at}
    mark = Mark("two ways", "")
    return check_plan(Plan(parallelize(graph, {}, choices), machine_of(2).mesh, mark, mark, "by hand"))


@pytest.mark.parametrize(("host", "seconds"), [(0.0, 3.2), (1.5, 5.5)])
def test_two_branches_take_the_time_of_one(host: float, seconds: float) -> None:
    """Both at once, two broadcasts, add, sum; where hosts are slower, three launches of each host and a sum."""
    found = simulate(two_ways(), Units(host=host))
    assert found.seconds == pytest.approx(seconds)
    spans = {task.name: (np.broadcast_to(a, 2), np.broadcast_to(b, 2)) for task, a, b in found.timeline.times()}
    (tanh, tanh_end), (sine, sine_end) = spans["tanh"], spans["sin"]
    assert (tanh[0], tanh_end[0]) == (sine[1], sine_end[1])
    assert tanh[1] == tanh_end[1] and sine[0] == sine_end[0], "at other places nothing runs"


def towers(num_devices: int = 4) -> Plan:
    graph = capture(Towers(), towers_batch())
    return with_towers(graph, num_devices)


@pytest.mark.parametrize("host", [0.0, 3e-6])
def test_places_are_told_apart_and_other_axes_folded(host: float) -> None:
    plan, prices = towers(), RoundPrices(host=host)
    folded, unfolded = simulate(plan, prices), simulate(plan, prices, unfold=True)
    assert folded.classes.axes == ("d0",) and unfolded.classes.axes == ("d0", "d1")
    assert folded.timeline.ticks == unfolded.timeline.ticks
    for (task, *mine), (same, *theirs) in zip(folded.timeline.times(), unfolded.timeline.times(), strict=True):
        assert task.name == same.name
        for found, wanted in zip(mine, theirs, strict=True):
            assert np.array_equal(*np.broadcast_arrays(np.broadcast_to(found, 2)[:, None], wanted))


def drawn(simulation: Simulation, rng: Random) -> Change | None:
    """A random change, by which an operator often comes to a place, or leaves it."""
    program = simulation.program
    if rng.random() < 0.5:
        return random_change(program, rng)
    operator = rng.randrange(len(program.skeleton.operators))
    axes = rng.sample(program.drafts.mesh.names, rng.randint(1, 2))
    return make_change(program, operator, {axis: rule_at(program, operator, rng.randrange(2)) for axis in axes})


@pytest.mark.parametrize("host", [0.0, 3e-6])
def test_a_change_to_a_place_gives_what_a_simulation_from_the_beginning_gives(host: float) -> None:
    rng = Random(5)
    current = simulate(towers(), RoundPrices(host=host), unfold=True)
    changed = 0
    for _ in range(60):
        change = drawn(current, rng)
        if change is not None:
            current = current.change(change)
            assert_same(current, full(current))
            changed += 1
    assert changed > 30


def test_every_place_holds_what_is_its_own() -> None:
    """The fuller place is that of batch norm: it has the parameters of its tower and of the head, not of the other."""
    plan = towers()
    memory = measure_memory(simulate(plan, RoundPrices()).program, kind="cpu")
    sizes = {name: sum(p.numel() * 4 for p in part.parameters()) for name, part in Towers().named_children()}
    assert memory.parameters == sizes["left"] + sizes["head"]
    whole = make_plan(capture(Towers(), towers_batch()), machine_of(4), "data-parallel")
    alike = measure_memory(simulate(whole, RoundPrices()).program, kind="cpu")
    assert alike.parameters == sum(sizes.values())
    assert memory.peak < alike.peak
