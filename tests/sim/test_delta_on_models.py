"""Delta simulation is full simulation, to the last bit, on the models of FlexFlow's Table 3.4."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from conjoin.cost import CostModel
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.sim import Layouts, MachinePrices, Simulation, random_change, simulate, simulate_layouts

CASES = [
    ("alexnet", 1), ("alexnet", 2), ("resnet-101", 1), ("inception-v3", 1), ("rnntc", 1), ("rnnlm", 1), ("rnnlm", 2),
    ("nmt", 1),
]  # fmt: skip
"""Each model on one node or two, and one of each kind on both."""
NUM_CHANGES = 18


def full(simulation: Simulation) -> Simulation:
    """The same layouts, simulated from the beginning."""
    program = simulation.program
    layouts = Layouts(program.leaves, tuple(program.choices), program.results)
    return simulate_layouts(program.skeleton, layouts, program.drafts, program.regathered)


def times(simulation: Simulation) -> tuple[list[str], Any]:
    """Every task with its start and end on every device."""
    tasks = simulation.timeline.times()
    spans = np.empty((len(tasks), 2, *simulation.classes.shape), np.int64)
    for i, (_, start, end) in enumerate(tasks):
        spans[i, 0], spans[i, 1] = start, end
    return [task.name for task, _, _ in tasks], spans


@pytest.mark.parametrize(("name", "nodes"), CASES)
def test_a_chain_of_changes_is_simulated_as_from_the_beginning(
    name: str, nodes: int, tiny_plan: Callable[..., Plan]
) -> None:
    machine = f"k80-cluster:{nodes}"
    prices = MachinePrices(parse_machine(machine), CostModel())
    simulation = simulate(tiny_plan(name, machine, "data-parallel", 4 * nodes), prices, unfold=True)
    rng, made, seen = Random(2), 0, {simulation.timeline.ticks}
    while made < NUM_CHANGES:
        change = random_change(simulation.program, rng)
        if change is None:
            continue
        made += 1
        simulation = simulation.change(change)
        if made % 3:  # what is wrong after a change is so after the next
            continue
        wanted = full(simulation)
        assert simulation.timeline.ticks == wanted.timeline.ticks
        (names, spans), (wanted_names, wanted_spans) = times(simulation), times(wanted)
        assert names == wanted_names and np.array_equal(spans, wanted_spans)
        seen.add(simulation.timeline.ticks)
    assert len(seen) > 1, "the changes made no difference"
