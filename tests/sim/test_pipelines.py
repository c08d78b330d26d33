"""Predicted pipelines: what schedules are known to take, what devices hold, and how stages are cut."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from conjoin.comm import Grid, plan_transfer
from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import make_pipeline, make_plan
from conjoin.sim import PipelinePrediction, crossing_seconds, predict, predict_pipeline, transfer_seconds

WIDTH, DEPTH, ROWS, MICRO = 8192, 8, 2**16, 16


class Rows(nn.Module):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@cache
def graph() -> Graph:
    with torch.device("meta"):
        model, batch = Rows(), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    return capture(model, batch, nn.functional.mse_loss)


@cache
def predicted(strategy: str, machine: str = "dgx-h100") -> PipelinePrediction:
    where = parse_machine(machine)
    return predict_pipeline(make_pipeline(graph(), where, strategy), where, CostModel())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_take_as_long_as_is_known(schedule: str) -> None:
    found = predicted(f"pipeline:pp=4,micro={MICRO},schedule={schedule}")
    stages = found.stages
    assert [len([n for n in s.plan.graph.nodes if n.op == "linear"]) for s in found.pipeline.stages] == [2, 2, 2, 2]
    slowest = max(stage.forward + stage.backward for stage in stages)
    assert found.timeline.seconds == pytest.approx((MICRO + 3) * slowest, rel=0.15)
    assert found.timeline.bubble == pytest.approx(3 / (MICRO + 3), abs=0.06)


def test_schedules_hold_and_wait_as_they_are_made_to() -> None:
    names = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble")
    found = {name: predicted(f"pipeline:pp=4,micro={MICRO},schedule={name}") for name in names}
    assert [stage.in_flight for stage in found["gpipe"].stages] == [MICRO] * 4
    assert [stage.in_flight for stage in found["1f1b"].stages] == [4, 3, 2, 1]
    assert [stage.in_flight for stage in found["eager-1f1b"].stages] == [7, 5, 3, 1]
    assert found["1f1b"].peak < found["eager-1f1b"].peak < found["gpipe"].peak
    assert found["zero-bubble"].timeline.bubble < found["1f1b"].timeline.bubble
    assert found["eager-1f1b"].timeline.exposed_seconds <= found["1f1b"].timeline.exposed_seconds
    assert found["1f1b"].breakdown.step == pytest.approx(found["1f1b"].seconds)


def test_stages_hold_less_than_one_device_and_interleaving_waits_less() -> None:
    machine = Machine.preset("dgx-h100")
    alone = predict(make_plan(graph(), machine, "data-parallel"), machine, CostModel())
    staged, looped = (predicted(f"pipeline:pp=4,micro={MICRO},schedule={name}") for name in ("1f1b", "interleaved"))
    parameters = sum(stage.memory.parameters for stage in staged.stages)
    assert parameters == alone.memory.parameters, "each lies with one stage"
    assert looped.timeline.bubble < staged.timeline.bubble and len(looped.stages) == 8


def test_the_schedule_that_is_found_is_no_slower_than_those_known() -> None:
    found = predicted(f"pipeline:pp=4,micro={MICRO},schedule=found")
    names = ("1f1b", "eager-1f1b", "zero-bubble")
    others = [predicted(f"pipeline:pp=4,micro={MICRO},schedule={name}") for name in names]
    assert found.timeline.seconds <= min(other.timeline.seconds for other in others) and found.fits
    with pytest.raises(StrategyError, match="says no speeds"):
        make_pipeline(graph(), Machine("four", 1, 4, "cpu"), "pipeline:pp=4,schedule=found")


def test_between_nodes_transfers_take_longer() -> None:
    near, far = predicted("pipeline:pp=2,micro=4"), predicted("pipeline:pp=2,micro=4", "dgx-h100:2")
    seconds = []
    for found, machine in ((near, "dgx-h100"), (far, "dgx-h100:2")):
        transfer = next(iter(found.pipeline.transfers()))
        seconds.append(transfer_seconds(found.pipeline, transfer, parse_machine(machine)))
    assert seconds[1] > seconds[0] > 0


@pytest.mark.parametrize(("chunks", "times"), [(1, 4), (64, 1 + 3 / 64)])
def test_chunks_are_passed_on_while_the_next_ones_come(chunks: int, times: float) -> None:
    """Four hosts in a row: whole, each waits for all of the one before; in chunks all pass on what came before."""
    num_bytes, machine = 2**30, Machine.preset("piz-daint", nodes=5)
    target = Grid.of_hosts(4, 1, 1, 1)
    one, plan = (
        plan_transfer((num_bytes,), 1, ((), Grid.of_hosts(1, 1)), ((), grid), chunks)
        for grid in (Grid.of_hosts(1, 1, 1, 1), target)
    )
    once = crossing_seconds(one, 1, machine)
    assert crossing_seconds(plan, 1, machine) / once == pytest.approx(times, rel=0.01)
