"""How far predictions say they may be off, against how far they were off where somebody measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest

from conjoin.cost import CostModel, OperatorCost, Seconds, Source
from conjoin.ir import Plan
from conjoin.machine import DeviceType, Machine
from conjoin.ops import Call
from conjoin.sim import expected_error, predict
from conjoin.sim.expected_error import PUBLISHED

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_nine_of_ten_measured_steps_are_within() -> None:
    rows = json.loads((RESULTS / "prediction_h200.json").read_text())["rows"]
    by_source = [[(Source(name), seconds) for name, seconds in row["seconds_by_source"].items()] for row in rows]
    within = [abs(row["error"]) <= expected_error(parts) for row, parts in zip(rows, by_source, strict=True)]
    assert len(rows) >= 19 and sum(within) >= 0.85 * len(rows)
    assert not all(within), "a bar that nothing is ever outside of says nothing"


def test_a_step_that_the_host_holds_up_is_not_as_certain_as_its_operators(tiny_plan: Callable[..., Plan]) -> None:
    """A tiny model of which every operator is measured: the device waits for the host most of the time."""
    machine = Machine.preset("dgx-h200")
    plan = tiny_plan("mlp", "dgx-h200", "data-parallel", 8)
    costs = _Measured()
    found = predict(plan, machine, costs)
    alone = [(source, seconds) for source, seconds in found.breakdown.sources if source is Source.MEASURED]
    assert found.breakdown.waiting > 0.5 * found.seconds and alone[0][1] > 0
    assert found.error > 2 * expected_error(alone)


class _Measured(CostModel):
    """Every operator is measured."""

    def operator(self, call: Call, needs: tuple[int, ...], device: DeviceType) -> OperatorCost:
        cost = super().operator(call, needs, device)
        forward, backward = (Seconds(part.value, Source.MEASURED) for part in (cost.forward, cost.backward))
        return OperatorCost(forward, backward, cost.host_forward, cost.host_backward)


def test_what_is_said_of_published_steps_is_what_was_found() -> None:
    rows = json.loads((RESULTS / "published.json").read_text())["rows"]
    for told in PUBLISHED:
        off = [abs(row["ratio"] - 1) for row in rows if row["gpu"] == told.gpu and row["expressible"]]
        assert len(off) == told.num_steps
        assert median(off) == pytest.approx(told.median_error, abs=0.01)
        assert max(off) == pytest.approx(told.worst_error, abs=0.01)


def test_a_gpu_with_a_profile_is_not_all_estimated(tiny_plan: Callable[..., Plan]) -> None:
    for name, expected in (("p3.8xlarge", True), ("dgx-h100", True), ("dgx-h200", False)):
        found = predict(tiny_plan("mlp", name, "data-parallel", 8), Machine.preset(name), CostModel())
        assert found.all_estimated is expected, name


def test_what_is_estimated_is_less_certain(tiny_plan: Callable[..., Plan]) -> None:
    found = predict(tiny_plan("mlp", "p3.8xlarge", "data-parallel"), Machine.preset("p3.8xlarge"), CostModel())
    assert found.error == pytest.approx(expected_error([(Source.ESTIMATED, 1.0)]))
    assert expected_error([(Source.MEASURED, 1.0)]) < expected_error([(Source.INTERPOLATED, 1.0)]) < found.error
    assert expected_error([]) == 0
