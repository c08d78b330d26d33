"""Micro-batches in the simulation: each forward and backward, sums once, less memory, and a delta is the full one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, check_plan, cut_in_micro_batches, model_mark, operators_of, recompute_actions
from conjoin.machine import parse_machine
from conjoin.ops import CAST
from conjoin.search import make_plan
from conjoin.sim import (
    Layouts,
    Phase,
    Prices,
    Simulation,
    break_down,
    measure_memory,
    random_change,
    simulate,
    simulate_layouts,
)
from tests.runtime.random_graphs import Sample
from tests.sim.conftest import tiny_graph
from tests.sim.test_memory import held_by_ranks, residual
from tests.sim.test_recompute import measured_peak
from tests.sim.test_simulation import assert_same

CASES = [
    ("mlp", "local:4", "data-parallel"),
    ("gpt-125m", "local:2", "fsdp"),
    ("bert-base", "local:4", "megatron:tp=2"),
    ("narrow", "local:2", "data-parallel"),
    ("narrow", "local:4", "megatron:tp=2"),
]


@cache
def narrow_graph() -> Graph:
    """Weights are stored wide, and used narrow."""
    model, batch, loss = residual()
    with torch.autocast("cpu", torch.bfloat16):
        return capture(model.train(), batch, loss)


@cache
def residual_graph() -> Graph:
    model, batch, loss = residual()
    return capture(model.train(), batch, loss)


def in_parts(name: str, machine: str, strategy: str, steps: int) -> Plan:
    graph = narrow_graph() if name == "narrow" else tiny_graph(name, 16 if name == "mlp" else 4)
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
    while made < 18:
        change = random_change(simulation.program, rng)
        if change is not None:
            made += 1
            simulation = simulation.change(change)
            if made % 3 == 0:  # what is wrong after a change is so after the next
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


@pytest.mark.parametrize(("strategy", "segments"), [("data-parallel", 0), ("megatron:tp=2", 0), ("single", 5)])
def test_weights_are_cast_once_for_all_micro_batches(strategy: str, segments: int, prices: Prices) -> None:
    plan = in_parts("narrow", "local:1" if strategy == "single" else "local:2", strategy, 4)
    count = len(operators_of(plan.graph))
    some = [(i, i + segments - 1) for i in range(0, count - segments, segments)] if segments else []
    plan = check_plan(replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, some))))
    start, *fragments = simulate(plan, prices).program.unrolled()
    once = [task for task in start if task.name in ("cast", CAST)]
    assert len(once) == 18 if strategy == "single" else 1 <= len(once) <= 18, "of 18 weights, in bundles or alone"
    done = [task for fragment in fragments for task in fragment if task.name in ("cast", CAST)]
    assert sum(task.phase is Phase.FORWARD for task in done) == 4 * 6, "activations in every micro-batch"
    assert sum(task.phase is Phase.RECOMPUTE for task in done) <= 4 * 6 * bool(segments)


@pytest.mark.parametrize(("steps", "narrow"), [(2, False), (4, False), (4, True)])
def test_one_device_holds_what_was_predicted(steps: int, narrow: bool, prices: Prices) -> None:
    model, batch, _ = residual()
    graph = narrow_graph() if narrow else residual_graph()
    part, accumulation = cut_in_micro_batches(graph, steps)
    single = make_plan(part, parse_machine("local:1"), "single")
    plan = check_plan(replace(single, model=model_mark(graph), accumulation=accumulation, computes=None))
    predicted = measure_memory(simulate(plan, prices).program, "adam", "cpu")
    plain = simulate(make_plan(graph, parse_machine("local:1"), "single"), prices)
    whole = measure_memory(plain.program, "adam", "cpu")
    measured = measured_peak(plan, model, batch)
    assert predicted.peak == pytest.approx(measured, rel=0.1)
    assert measured < 0.8 * whole.peak


def weighty() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """More parameters than activations."""
    layers = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(64, 1)), (torch.randn(16, 64), torch.randn(16, 1))


@cache
def weighty_graph() -> Graph:
    model, batch = weighty()
    return capture(model.train(), batch, nn.functional.mse_loss)


def test_gradients_of_a_micro_batch_are_not_held_beside_their_sums(prices: Prices) -> None:
    model, batch = weighty()
    graph, machine = weighty_graph(), parse_machine("local:1")
    whole, parts = (make_plan(graph, machine, f"single{more}") for more in ("", "+micro=4"))
    predicted, plain = (measure_memory(simulate(plan, prices).program, "adam", "cpu") for plan in (parts, whole))
    assert predicted.peak == pytest.approx(measured_peak(parts, model, batch), rel=0.01)
    assert predicted.peak == pytest.approx(plain.peak, rel=0.01) and predicted.gradients == plain.gradients


@pytest.mark.parametrize(("strategy", "ranks"), [("data-parallel", 2), ("fsdp", 2), ("hsdp", 4)])
def test_ranks_hold_what_was_predicted(strategy: str, ranks: int, prices: Prices, tmp_path: Path) -> None:
    model, batch = weighty()
    graph = weighty_graph()
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), f"{strategy}+micro=4")
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    held = held_by_ranks(plan, Sample(graph, model, batch), tmp_path)
    assert predicted.peak - predicted.inputs == pytest.approx(held, rel=0.02)


class FusedBlock(nn.Module):
    """Queries, keys and values of one product, whose weight is made of another: split by heads, it is rearranged, once
    in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        parts = nn.functional.linear(x, self.qkv.weight.tanh(), self.qkv.bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v)
        made: Tensor = x + self.out(seen.transpose(1, 2).flatten(2))
        return made


def fused() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return nn.Sequential(*(FusedBlock() for _ in range(2))), (torch.randn(16, 24, 64), torch.randn(16, 24, 64))


@cache
def fused_graph() -> Graph:
    model, batch = fused()
    return capture(model.train(), batch, nn.functional.mse_loss)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_what_is_made_once_is_held_beside_segments_that_are_run_again(mode: str, prices: Prices) -> None:
    model, batch = fused()
    plan = make_plan(fused_graph(), parse_machine("local:2"), f"megatron:tp=2+recompute={mode}+micro=2")
    program = simulate(plan, prices).program
    assert program.once, "of parameters alone"
    most = measured_peak(plan, model, batch, num_steps=6)  # what is sent ends early or late, as it comes
    assert measure_memory(program, "adam", "cpu").peak == pytest.approx(most, rel=0.1)
