"""Folded and unfolded simulations agree, and so do delta and full ones, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from conjoin.ir import Plan
from conjoin.sim import Layouts, Prices, Simulation, random_change, simulate, simulate_layouts

CASES = [
    ("mlp", "local:4", "data-parallel", 4),
    ("bert-base", "local:8", "megatron:sp", 4),
    ("gpt-125m", "summit:1", "fsdp", 11),
    ("alexnet", "local:4", "spatial", 4),
    ("dlrm", "local:4", "table-parallel", 11),
    ("rnnlm-2step", "local:4", "reduction", 4),
]
UNEVEN = [("mlp", "local:4", "data-parallel", 11), ("bert-base", "local:8", "megatron:sp", 11)]


def assert_same(one: Simulation, other: Simulation) -> None:
    assert one.timeline.ticks == other.timeline.ticks
    for (task, *mine), (same, *theirs) in zip(one.timeline.times(), other.timeline.times(), strict=True):
        assert task.name == same.name
        assert all(np.array_equal(*np.broadcast_arrays(a, b)) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("name", "machine", "strategy", "batch_size"), [*CASES, *UNEVEN])
def test_devices_that_behave_alike_can_be_simulated_once(
    name: str, machine: str, strategy: str, batch_size: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    plan = tiny_plan(name, machine, strategy, batch_size)
    folded, unfolded = simulate(plan, prices), simulate(plan, prices, unfold=True)
    assert len(folded.classes.ranks) <= len(unfolded.classes.ranks) == plan.mesh.size
    assert folded.timeline.ticks == unfolded.timeline.ticks
    kept = [plan.mesh.names.index(axis) for axis in folded.classes.axes]
    for (task, start, end), (same, wanted_start, wanted_end) in zip(
        folded.timeline.times(), unfolded.timeline.times(), strict=True
    ):
        assert task.name == same.name
        for found, wanted in ((start, wanted_start), (end, wanted_end)):
            shape = [size if i in kept else 1 for i, size in enumerate(plan.mesh.sizes.values())]
            spread = np.broadcast_to(found, folded.classes.shape).reshape(shape)
            assert np.array_equal(*np.broadcast_arrays(spread, wanted))


def full(simulation: Simulation) -> Simulation:
    """The same layouts, simulated from the beginning."""
    program = simulation.program
    layouts = Layouts(program.leaves, tuple(program.choices), program.results)
    return simulate_layouts(program.skeleton, layouts, program.drafts, program.regathered)


@pytest.mark.parametrize(("name", "machine", "strategy", "batch_size"), CASES)
def test_a_change_gives_what_a_simulation_from_the_beginning_gives(
    name: str, machine: str, strategy: str, batch_size: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    simulation = simulate(tiny_plan(name, machine, strategy, batch_size), prices, unfold=True)
    rng = Random(1)
    made = 0
    while made < 18:
        change = random_change(simulation.program, rng)
        if change is None:
            continue
        made += 1
        simulation = simulation.change(change)
        if made % 3 == 0:  # what is wrong after a change is so after the next
            assert_same(simulation, full(simulation))
