"""Segments that the backward pass runs again: what they take in time and memory, and that a delta is the full thing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Plan, check_plan, operators_of, recompute_actions, recomputed_segments
from conjoin.machine import parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from conjoin.sim import (
    Layouts,
    Prices,
    Simulation,
    break_down,
    gain_of,
    measure_memory,
    random_change,
    simulate,
    simulate_layouts,
)
from tests.sim.test_memory import Storages, convolutions, residual, wide
from tests.sim.test_simulation import assert_same


def recomputing(plan: Plan, length: int) -> Plan:
    """The plan with segments of that many operators run again, all but the last."""
    count = len(operators_of(plan.graph))
    segments = [(i, i + length - 1) for i in range(0, count - length, length)]
    return check_plan(replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, segments))))


CASES = [
    ("mlp", "local:4", "data-parallel", 4),
    ("bert-base", "local:8", "megatron:sp", 4),
    ("gpt-125m", "summit:1", "fsdp", 11),
    ("alexnet", "local:4", "spatial", 4),
]


@pytest.mark.parametrize(("name", "machine", "strategy", "batch_size"), CASES)
def test_a_change_gives_what_a_simulation_from_the_beginning_gives(
    name: str, machine: str, strategy: str, batch_size: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    simulation = simulate(recomputing(tiny_plan(name, machine, strategy, batch_size), 7), prices, unfold=True)
    assert simulation.program.again
    rng, made = Random(1), 0
    while made < 18:
        change = random_change(simulation.program, rng)
        if change is not None:
            made += 1
            simulation = simulation.change(change)
            if made % 3 == 0:  # what is wrong after a change is so after the next
                assert_same(simulation, full(simulation))


def full(simulation: Simulation) -> Simulation:
    program = simulation.program
    layouts = Layouts(program.leaves, tuple(program.choices), program.results)
    return simulate_layouts(program.skeleton, layouts, program.drafts, program.regathered, program.segments)


@pytest.mark.parametrize(("name", "machine", "strategy", "batch_size"), CASES)
def test_what_is_run_again_takes_its_forward_time_and_no_more(
    name: str, machine: str, strategy: str, batch_size: int, tiny_plan: Callable[..., Plan], prices: Prices
) -> None:
    plan = tiny_plan(name, machine, strategy, batch_size)
    plain, again = (break_down(simulate(p, prices).timeline) for p in (plan, recomputing(plan, 7)))
    assert plain.recompute == 0.0 < again.recompute <= again.forward
    assert again.forward == plain.forward and again.backward == pytest.approx(plain.backward)
    assert sum(n for *_, n, _, _ in again.collectives) >= sum(n for *_, n, _, _ in plain.collectives)


@pytest.mark.parametrize("make", [residual, convolutions, wide])
@pytest.mark.parametrize("length", [3, 5])
def test_one_device_holds_what_was_predicted(
    make: Callable[[], tuple[nn.Module, Any, Any]], length: int, prices: Prices
) -> None:
    model, batch, loss = make()
    graph = capture(model.train(), batch, loss)
    plan = recomputing(make_plan(graph, parse_machine("local:1"), "single"), length)
    predicted = measure_memory(simulate(plan, prices).program, "adam", "cpu")
    assert predicted.peak == pytest.approx(measured_peak(plan, model, batch), rel=0.1)


def test_what_is_kept_of_blocks_is_held_as_predicted(prices: Prices) -> None:
    """Every other product stays, and is not made again."""
    model, batch, loss = residual()
    graph = capture(model.train(), batch, loss)
    plans = {m: make_plan(graph, parse_machine("local:1"), f"single+recompute={m}") for m in ("full", "selective")}
    found = {mode: simulate(plan, prices) for mode, plan in plans.items()}
    held = {mode: measure_memory(simulation.program, "adam", "cpu") for mode, simulation in found.items()}
    assert held["selective"].peak == pytest.approx(measured_peak(plans["selective"], model, batch), rel=0.1)
    kept = 4 * 512 * 256 * 4  # the first product of each of four blocks
    middle = len(found["full"].program.skeleton.operators) + 1
    assert held["selective"].curve[middle] - held["full"].curve[middle] == pytest.approx(kept, rel=0.01)
    assert found["selective"].timeline.seconds < found["full"].timeline.seconds


def measured_peak(plan: Plan, model: nn.Module, batch: Any, num_steps: int = 1) -> int:
    """The most bytes that are there at once in steps of a plan on one device, counted storage by storage."""

    def program(communicator: Communicator) -> int:
        store = Store(plan, 0, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(plan, store, communicator)
        optimizer = torch.optim.Adam(module.parameters())
        module(*batch).backward()
        optimizer.step()
        gc.collect(1)
        state = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
        with Storages(*module.parameters(), *batch, *state) as storages:
            for _ in range(num_steps):
                optimizer.zero_grad()
                module(*batch).backward()
                optimizer.step()
        return storages.peak

    return run_ranks(plan.mesh, program)[0]


def test_what_a_segment_keeps_is_what_it_saves(prices: Prices) -> None:
    """After the forward pass just what the segments are given is kept: less than before by what was told."""
    model, batch, loss = residual()
    plan = make_plan(capture(model.train(), batch, loss), parse_machine("local:1"), "single")
    again = recomputing(plan, 6)
    plain, other = (simulate(p, prices).program for p in (plan, again))
    middle = len(plain.skeleton.operators) + 1
    held = [measure_memory(program, "sgd", "cpu").curve[middle] for program in (plain, other)]
    saved = sum(gain_of(plain, segment, "cpu").num_bytes for segment in recomputed_segments(again))
    given = (len(other.again) - 1) * batch[0].nbytes
    assert held[0] - held[1] == pytest.approx(saved - given, rel=0.25)
    assert held[1] < 0.6 * held[0]
