"""How far predictions say they may be off, against how far they were off where somebody measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from conjoin.cost import CostModel, Source
from conjoin.ir import Plan
from conjoin.machine import Machine
from conjoin.sim import expected_error, predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_nine_of_ten_measured_steps_are_within() -> None:
    rows = json.loads((RESULTS / "prediction_h200.json").read_text())["rows"]
    by_source = [[(Source(name), seconds) for name, seconds in row["seconds_by_source"].items()] for row in rows]
    within = [abs(row["error"]) <= expected_error(parts) for row, parts in zip(rows, by_source, strict=True)]
    assert len(rows) >= 19 and sum(within) >= 0.85 * len(rows)
    assert not all(within), "a bar that nothing is ever outside of says nothing"


def test_what_is_estimated_is_less_certain(tiny_plan: Callable[..., Plan]) -> None:
    found = predict(tiny_plan("mlp", "p3.8xlarge", "data-parallel"), Machine.preset("p3.8xlarge"), CostModel())
    assert found.error == pytest.approx(expected_error([(Source.ESTIMATED, 1.0)]))
    assert expected_error([(Source.MEASURED, 1.0)]) < expected_error([(Source.INTERPOLATED, 1.0)]) < found.error
    assert expected_error([]) == 0
