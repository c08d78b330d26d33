"""The simulated program is the runtime's: it starts the same collectives in the same order, and ranks train exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import (
    Plan,
    check_plan,
    computation_digest,
    cut_in_micro_batches,
    model_mark,
    operators_of,
    recompute_actions,
)
from conjoin.machine import Machine, parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Axes, Communicator, Work
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from conjoin.sim import Prices, break_down, predict, simulate
from tests.runtime.hand_plans import captured, module_on, sharded_inside
from tests.runtime.random_graphs import Sample


class Layer(nn.Module):
    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.up.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


@cache
def sample(width: int, frozen: bool) -> Sample:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width, frozen) for _ in range(3)), nn.Linear(width, 4))
    return captured(model, (torch.randn(12, width), torch.randn(12, 4)), functional.mse_loss)


@cache
def plan_of(how: str) -> tuple[Plan, Sample]:
    """A plan of few words: how parameters are stored, and what else is done."""
    uneven, frozen = "uneven" in how, "frozen" in how
    found = sample(7 if uneven else 8, frozen)
    graph, accumulation = cut_in_micro_batches(found.graph, 2) if "micro" in how else (found.graph, None)
    per_node = 3 if uneven else 2
    if "hybrid" in how:
        plan = sharded_inside(graph, Machine("two nodes", 2, per_node, "cpu"), regather="kept" not in how)
    else:
        plan = make_plan(graph, parse_machine(f"local:{per_node}"), "zero1" if "kept" in how else "fsdp")
    if "again" in how:
        count = len(operators_of(plan.graph))
        segments = [(i, i + 4) for i in range(0, count - 6, 5)]
        plan = replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, segments)))
    computes = computation_digest(plan.graph, accumulation)
    plan = replace(plan, model=model_mark(found.graph), accumulation=accumulation, computes=computes, bundle_bytes=700)
    return check_plan(plan), found


class Logged:
    """A communicator that notes which collectives are started, with the bytes that it sends."""

    def __init__(self, communicator: Communicator) -> None:
        self.log: list[tuple[str, Axes, int]] = []
        self._communicator = communicator
        for kind in ("all_reduce", "all_gather", "reduce_scatter"):
            setattr(communicator, kind, self._logged(kind, getattr(communicator, kind)))

    def _logged(self, kind: str, start: object) -> object:
        def call(*args: object, **kwargs: object) -> Work:
            before = self._communicator.bytes_sent
            work: Work = start(*args, **kwargs)  # type: ignore[operator]
            axes = next(x for x in args if isinstance(x, tuple))
            self.log.append((kind.replace("_", "-"), axes, self._communicator.bytes_sent - before))
            return work

        return call


HOWS = [
    "split", "split frozen again micro", "split kept uneven micro", "split kept frozen uneven again",
    "hybrid uneven again", "hybrid frozen uneven micro", "hybrid kept again micro", "hybrid kept frozen",
]  # fmt: skip
"""Every two words meet, each with and without the other."""


@pytest.mark.parametrize("how", HOWS)
def test_collectives_are_started_as_simulated(how: str, prices: Prices) -> None:
    plan, found = plan_of(how)

    def program(communicator: Communicator) -> tuple[int, list[tuple[str, Axes, int]]]:
        module, logged = module_on(plan, found, communicator), Logged(communicator)
        module(*found.inputs).backward()
        return communicator.bytes_sent, logged.log

    ranks, told = run_ranks(plan.mesh, program), explain(plan)
    assert [sent for sent, _ in ranks] == [told.bytes_of(rank) for rank in range(plan.mesh.size)]
    simulated = [task for fragment in simulate(plan, prices).program.unrolled() for task in fragment if task.axes]
    assert ranks[0][1] == [(task.name, task.axes, task.sent) for task in simulated]
    parameters = len(list(found.model.parameters()))
    assert len(simulated) < 2 * parameters or "micro" in how, "bundles are of several parameters"


@pytest.mark.parametrize("how", HOWS)
def test_training_is_as_on_one_device(how: str) -> None:
    plan, found = plan_of(how)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


def test_a_segment_does_not_wait_for_all_its_bundles(prices: Prices) -> None:
    """What is run again exposes no more of the gathers than what is kept."""
    plain, again = (break_down(simulate(plan_of(how)[0], prices).timeline) for how in ("split", "split again"))
    assert again.recompute > 0 and again.exposed <= 1.05 * plain.exposed


def test_hybrid_sharding_hides_as_much_as_its_pure_form() -> None:
    """On two nodes of eight H100s, in prices of data sheets."""
    machine = parse_machine("dgx-h100:2")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(24))).to(torch.bfloat16).train()
        batch = torch.zeros(2**16, 4096, dtype=torch.bfloat16), torch.zeros(2**16, 4096, dtype=torch.bfloat16)
    graph, costs = capture(model, batch, functional.mse_loss), CostModel()
    plans = make_plan(graph, machine, "fsdp"), sharded_inside(graph, machine)
    pure, hybrid = (predict(plan, machine, costs).breakdown for plan in plans)
    hidden = [each.hidden / (each.hidden + each.exposed) for each in (pure, hybrid)]
    assert hidden[0] > 0.7 and hidden[1] >= 0.95 * hidden[0], hidden
