"""Pipelines in other shapes and the other mode: each step is that of the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.errors import UsageError
from conjoin.ir import LeafKind, Pipeline
from conjoin.machine import Machine
from conjoin.runtime import run_ranks
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.search import make_pipeline
from tests.ir.wording import assert_three_sentences
from tests.runtime.shape_cases import TEXT, captured, plan_for, words
from tests.runtime.side_by_side import Call, Case, check, module_of


def pipeline_case(ranks: int, strategy: str) -> Case:
    model, loss, graph = captured("words without dropout")
    return Case(model, loss, make_pipeline(graph, Machine("here", 1, ranks, "cpu"), strategy))


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "pipeline:pp=2,micro=4"), (4, "pipeline:pp=2,tp=2,micro=2,schedule=zero-bubble"),
        (2, "pipeline:pp=2,micro=4,schedule=interleaved"), (3, "pipeline:pp=3,micro=2,schedule=gpipe"),
    ],
)  # fmt: skip
def test_every_shape_and_mode_of_a_pipeline_is_that_of_the_plain_model(ranks: int, strategy: str) -> None:
    check(pipeline_case(ranks, strategy), TEXT)


class Helped(nn.Module):
    """Layers, the last of which is there for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.helper = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.helper(x) if self.training else x


def test_a_weight_of_a_later_stage_that_is_not_evaluated_stays_there() -> None:
    torch.manual_seed(1)
    model, batch = Helped().double().train(), (torch.randn(8, 4).double(), torch.randn(8, 4).double())
    graph = conjoin.capture(model, batch, functional.mse_loss)
    case = Case(model, functional.mse_loss, make_pipeline(graph, Machine("here", 1, 2, "cpu"), "pipeline:pp=2,micro=2"))
    check(case, [Call(True, batch), Call(False, batch), Call(True, batch)])


def test_micro_batches_of_a_pipeline_become_no_larger_and_weights_stay_where_they_lie() -> None:
    case = pipeline_case(2, "pipeline:pp=2,micro=4,schedule=eager-1f1b")
    for size, steps in ((12, 6), (6, 3), (5, 5), (2, 1)):
        found = plan_for(case, words(size))
        assert isinstance(found, Pipeline) and isinstance(case.plan, Pipeline)
        assert found.num_micro_batches == found.schedule.num_micro_batches == steps
        assert found.schedule.name == "eager-1f1b"
        for mine, other in zip(found.stages, case.plan.stages, strict=True):
            held = [{leaf for leaf in s.plan.graph.leaves if leaf.kind is LeafKind.PARAMETER} for s in (mine, other)]
            assert held[0] == held[1] and mine.ranks == other.ranks


def test_a_pipeline_says_what_it_takes_where_no_other_can_be_planned() -> None:
    case = pipeline_case(2, "pipeline:pp=2,micro=4")

    def program(ranks: Communicator) -> str:
        with pytest.raises(UsageError) as told:
            module_of(case, None, ranks)(*words(5))
        return str(told.value)

    for told in run_ranks(case.plan.mesh, program):
        assert "is torch.int64 of shape (8, 6), and torch.int64 of shape (5, 6) came" in told and "stage 0" not in told
        assert "here of 4 micro-batches" in told
        assert_three_sentences(told)
