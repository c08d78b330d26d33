"""Segments that a model asks to be run again: gradients flow as in the plain model, and plans do as it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import conjoin
from conjoin.frontends import capture
from conjoin.ir import asked_segments, operators_of, parse_graph, recomputed_segments
from conjoin.machine import parse_machine
from conjoin.search import make_plan

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Blocks(nn.Module):
    """Two blocks between layers, each run as given."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.run(block, x).relu()
        return self.last(x)


RUNS: dict[str, Callable[..., Tensor]] = {
    "as it is": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "one in another": lambda block, x: checkpoint(
        lambda y: checkpoint(block[1:], block[0](y), use_reentrant=False), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients_flow_and_each_call_knows_its_segment(compare: Callable[..., Any], run: Any) -> None:
    captured = compare(Blocks(run), X, lambda plain: plain(X))
    assert asked_segments(captured.graph) == ((1, 3), (5, 7))
    assert [node.op for node in operators_of(captured.graph)][1:4] == ["linear", "tanh", "linear"]
    assert parse_graph(str(captured.graph)).sources == captured.graph.sources


def test_a_reentrant_one_without_a_gradient_at_its_inputs_stops_them(compare: Callable[..., Any]) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(checkpoint(self.inner, x, use_reentrant=True))

    model = First()
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        compare(model, X, lambda plain: plain(X))
    assert model.inner.weight.grad is None and model.outer.weight.grad is not None


def test_plans_run_again_what_the_model_says() -> None:
    graph = capture(Blocks(RUNS["as it is"]), (X, torch.zeros(8, dtype=torch.long)), nn.functional.cross_entropy)
    asked = [graph.nodes[i] for first, last in asked_segments(graph) for i in range(first, last + 1)]
    for plan in (
        make_plan(graph, parse_machine("local:2"), "data-parallel"),
        conjoin.search_plan(graph, "dgx-h100", conjoin.Wish(budget=1)).plan,
    ):
        again = [operators_of(plan.graph)[i] for a, b in recomputed_segments(plan) for i in range(a, b + 1)]
        assert [node.op for node in again] == [node.op for node in asked]


def test_a_plan_that_runs_a_segment_again_trains_as_the_plain_model() -> None:
    model, batch = Blocks(RUNS["reentrant"]), (X, torch.arange(8) % 4)
    plan = conjoin.plan(model, batch, "local:2", loss=nn.functional.cross_entropy, strategy="data-parallel")
    assert recomputed_segments(plan)
    verdict = conjoin.verify_plan(plan, copy.deepcopy(model), batch, loss=nn.functional.cross_entropy, num_steps=2)
    assert verdict.passed
