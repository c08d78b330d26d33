"""The lists that predictions on a GPU are judged by, and the sweep that prices rest on: without a GPU."""

from __future__ import annotations

import pytest
import torch

import zoo
from benchmarks import public_models
from benchmarks.operator_sweep import Swept, sweep
from benchmarks.prediction_gpu import ZOO, build, one_gpu, summarise
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.search import make_plan
from conjoin.sim import predict


def test_nothing_is_judged_by_what_it_was_fitted_on() -> None:
    assert not set(public_models.NAMES) & set(zoo.names()) and set(ZOO) <= set(zoo.names())
    assert len(public_models.NAMES) >= 20


@pytest.mark.filterwarnings("ignore:::transformers")
def test_a_public_model_is_built_captured_and_predicted_without_memory() -> None:
    case = build("distilbert", torch.bfloat16, "meta")
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in case.model.parameters())
    machine = one_gpu("dgx-h200")
    found = predict(make_plan(case.graph, machine, "single"), machine, CostModel(), "adamw")
    assert found.seconds == pytest.approx(14.3e-3, rel=0.2) and found.memory.peak == pytest.approx(2.066e9, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cases_of_the_sweep_can_be_captured(dtype: torch.dtype) -> None:
    cases = list(sweep())
    graph = capture(Swept(cases[:: len(cases) // 20], dtype), (torch.empty((), device="meta"),))
    assert len({node.op for node in graph.nodes}) > 10


def test_a_summary_tells_medians_and_worst() -> None:
    rows = [{"error": error, "memory_error": 0.01, "step_over_plain": 1 + error} for error in (-0.1, 0.02, 0.3)]
    found = summarise([*rows, {"error": 0.0, "memory_error": 0.0}])
    assert (found["steps"], found["median_error"], found["worst_error"]) == (4, 0.06, 0.3)
    assert (found["median_step_over_plain"], found["worst_step_over_plain"]) == (1.02, 1.3)
    assert "median_loaded_over_plain" not in found
