"""Micro-batches in the simulation: each forward and backward, sums once, less memory, and a delta is the full one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from conjoin.frontends import capture
from conjoin.ir import Plan, check_plan, cut_in_micro_batches, model_mark
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from conjoin.sim import (
    Layouts,
    Prices,
    Simulation,
    break_down,
    measure_memory,
    random_change,
    simulate,
    simulate_layouts,
)
from tests.sim.conftest import tiny_graph
from tests.sim.test_memory import residual
from tests.sim.test_recomputing import measured_peak
from tests.sim.test_simulation import assert_same

CASES = [
    ("mlp", "local:4", "data-parallel"),
    ("gpt-125m", "local:4", "fsdp"),
    ("bert-base", "local:4", "megatron:tp=2"),
]


def in_parts(name: str, machine: str, strategy: str, steps: int) -> Plan:
    graph = tiny_graph(name, 16)
    part, accumulation = cut_in_micro_batches(graph, steps)
    plan = make_plan(part, parse_machine(machine), strategy)
    return check_plan(replace(plan, model=model_mark(graph), accumulation=accumulation, computes=None))


def full(simulation: Simulation) -> Simulation:
    program = simulation.program
    layouts = Layouts(program.leaves, tuple(program.choices), program.results)
    return simulate_layouts(
        program.skeleton, layouts, program.drafts, program.regathered, program.segments, program.steps
    )


@pytest.mark.parametrize(("name", "machine", "strategy"), CASES)
def test_a_change_gives_what_a_simulation_from_the_beginning_gives(
    name: str, machine: str, strategy: str, prices: Prices
) -> None:
    simulation = simulate(in_parts(name, machine, strategy, 2), prices, unfold=True)
    rng, made = Random(1), 0
    while made < 20:
        change = random_change(simulation.program, rng)
        if change is not None:
            made += 1
            simulation = simulation.change(change)
            assert_same(simulation, full(simulation))


def test_a_micro_batch_is_timed_as_often_as_it_runs(tiny_plan: Callable[..., Plan], prices: Prices) -> None:
    parts = break_down(simulate(in_parts("mlp", "local:4", "data-parallel", 4), prices).timeline)
    one = make_plan(tiny_graph("mlp", 4), parse_machine("local:4"), "data-parallel")
    single = break_down(simulate(one, prices).timeline)
    assert parts.forward > 4 * single.forward > parts.forward * 0.9, "a factor of the loss besides"
    assert parts.update == single.update

    def reductions(found: object) -> int:
        return sum(sent for kind, _, _, _, sent in found.collectives if kind == "all-reduce")  # type: ignore[attr-defined]

    assert reductions(parts) == pytest.approx(reductions(single), rel=0.01), "gradients are summed up once"


@pytest.mark.parametrize("steps", [2, 4])
def test_one_device_holds_what_was_predicted(steps: int, prices: Prices) -> None:
    model, batch, loss = residual()
    graph = capture(model.train(), batch, loss)
    part, accumulation = cut_in_micro_batches(graph, steps)
    single = make_plan(part, parse_machine("local:1"), "single")
    plan = check_plan(replace(single, model=model_mark(graph), accumulation=accumulation, computes=None))
    predicted = measure_memory(simulate(plan, prices).program, "adam", "cpu")
    plain = simulate(make_plan(graph, parse_machine("local:1"), "single"), prices)
    whole = measure_memory(plain.program, "adam", "cpu")
    measured = measured_peak(plan, model, batch)
    assert predicted.peak == pytest.approx(measured, rel=0.1)
    assert measured < 0.8 * whole.peak
